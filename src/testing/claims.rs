//! The contract of a [`ClaimStore`].

use super::{
    AT_ONCE, BYTES, Breach, Client, EXPIRES, LONG, MOVED, NO_HARM, Reply, SHORT, TOGETHER, TRIES,
    Trouble, UNKNOWN, begin, gone, id, nasty_ids, shown,
};
use crate::{
    id::MessageId,
    store::{Claim, ClaimStore, Lease, Owner},
};
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    task::{JoinSet, yield_now},
    time::sleep,
};

/// How many random walks there are at once, each over three ids of its own.
const WALKS: u64 = 12;
/// How many commands a walk has.
const STEPS: usize = 50;

const WON: &str = "a free id is won by whoever claims it";
const HELD: &str = "an id that another owner holds is Busy";
const SENT_AGAIN: &str = "the owner who holds an id wins it again";
const DONE: &str = "a claim of what is done is answered by Done";
const RETRY: &str = "Busy tells a time above zero, and no longer than what is left of the lease";
const OWN_ID: &str = "a claim holds its own id and no other";
const UNSEEN: &str = "what is not done is not seen, claimed or not";
const SEEN: &str = "what is done is seen";
const RENEWS: &str = "renew answers true to the owner who holds the id";
const RENEW_NOT: &str = "renew answers false to one who does not hold the id, and changes nothing";
const RELEASES: &str = "release frees the id of the owner who holds it, and answers true";
const RELEASE_NOT: &str =
    "release answers false to one who does not hold the id, and changes nothing";
const COMPLETES: &str = "complete marks done, and answers true to the owner who holds the id";
const COMPLETE_NOT: &str =
    "complete marks done whatever the owner, and answers false to one who does not hold the id";
const COMPLETE_TWICE: &str = "complete may be sent twice";
const REMEMBERS: &str = "remember marks an id done, claimed or not";
const FORGETS: &str = "forget drops what is recorded of an id, claimed or done";
const REFUSED: &str =
    "an id that the store cannot hold is refused by claim and complete, and never held";
const OWNERS: &str = "owners are compared by all of their bits";
const ONE_WINNER: &str = "of many who claim an id at once, one wins";
const MARK_STAYS: &str = "no claim undoes a mark that is made at the same time";
const NO_WINNER: &str = "nobody wins an id while another holds it, however many try";
const ONE_HOLDER: &str = "an id has one holder at a time";
const CLONES: &str = "clones share their claims";
const DROPPED: &str = "a dropped command harms no other, nor its owner's next one";
const LONGEST: &str = "a claim may have the longest lease, and what it is completed to a huge TTL";
const SHORTEST: &str = "a claim may have the shortest lease";
const LEASE: &str = "a claim is held until its lease has passed since it was sent";
const LEASE_ANEW: &str = "renew, and the own claim sent again, start a new lease";
const ENDS: &str = "an id can be won by another at some time after its lease";
const NO_EFFECT: &str = "a claim that ended says nothing of an effect";
const TAKEN: &str = "who has lost an id does not touch the claim of who took it";
const STAYS: &str = "what is done stays so, past the lease of its claim";
const TTL_LEASE: &str = "a claim is held for its lease, however short the TTL";
const TTL_DONE: &str = "the TTL counts from when an id was marked done, not from its claim";
const AFTER_END: &str = "where a claim has ended";
const AFTER_TTL: &str = "where the TTL is over";

/// Checks that a store keeps the whole contract of [`ClaimStore`]: the short form of
/// [`ClaimStoreContract`].
///
/// `make` opens a store with the given TTL over a record of its own, which is empty. It is called
/// about a dozen times. What is asked of every [`Store`](crate::Store) is checked by
/// [`store_contract`](super::store_contract).
///
/// # Panics
///
/// When the store breaks a rule, and outside of a tokio runtime with its timer enabled.
///
/// # Cancel safety
///
/// Dropped, it leaves behind the commands that are under way, each until it is answered or its
/// time is out.
pub async fn claim_store_contract<St: ClaimStore>(make: impl AsyncFn(Duration) -> St) {
    ClaimStoreContract::new(make).check().await;
}

/// Checks a [`ClaimStore`] that has limits of its own.
///
/// See the [module docs](super#claims) for an example.
#[must_use = "nothing is checked before `check`"]
pub struct ClaimStoreContract<M> {
    make: M,
    holds: Box<dyn Fn(&str) -> bool + Send + Sync>,
    expires: bool,
    limit: Duration,
    seed: u64,
}

impl<M> fmt::Debug for ClaimStoreContract<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimStoreContract")
            .field("expires", &self.expires)
            .field("store_timeout", &self.limit)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

impl<M> ClaimStoreContract<M> {
    /// The whole contract, for the stores that `make` opens: each with the given TTL, over a record of
    /// its own, which is empty.
    pub fn new<St: ClaimStore>(make: M) -> Self
    where
        M: AsyncFn(Duration) -> St,
    {
        ClaimStoreContract {
            make,
            holds: Box::new(|_| true),
            expires: true,
            limit: Duration::from_secs(30),
            seed: rand::random(),
        }
    }

    /// Says which ids the store can hold; every id unless set.
    ///
    /// Any other is to do no harm: `claim` and `complete` answer an error, `renew` and `release` false
    /// or an error, nothing panics, and no other id is touched. Canonical UUIDs must be among those it
    /// holds.
    pub fn ids(mut self, holds: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.holds = Box::new(holds);
        self
    }

    /// Says that the store has no TTL: what is done stays until it is forgotten, whatever `make` is
    /// given. Leases are watched nevertheless.
    pub fn no_expiry(mut self) -> Self {
        self.expires = false;
        self
    }

    /// How long one command may take before it counts as not answered; 30 s unless set.
    ///
    /// Up to 128 of them are under way at once.
    pub fn store_timeout(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Walks the way of this seed once more; each check has another one unless set.
    ///
    /// A rule that is broken on a random walk is told with its seed.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Checks it.
    ///
    /// # Panics
    ///
    /// When the store breaks a rule, and outside of a tokio runtime with its timer enabled.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it leaves behind the commands that are under way, each until it is answered or its
    /// time is out.
    pub async fn check<St: ClaimStore>(self)
    where
        M: AsyncFn(Duration) -> St,
    {
        if let Err(breach) = self.run().await {
            panic!("{breach}");
        }
    }

    /// The plain rules first, so that what is told of a broken store is the plainest rule it breaks.
    async fn run<St: ClaimStore>(&self) -> Result<(), Breach>
    where
        M: AsyncFn(Duration) -> St,
    {
        basics(&self.open(LONG).await?).await?;
        clones(self.open(LONG).await?).await?;
        pairs(self.open(LONG).await?).await?;
        walks(self.open(LONG).await?, self.seed).await?;
        together(&self.open(LONG).await?).await?;
        owners(&self.open(LONG).await?).await?;
        exact_ids(&self.open(LONG).await?, &self.holds).await?;
        races(&self.open(LONG).await?).await?;
        turns(&self.open(LONG).await?).await?;
        dropped(&self.open(LONG).await?).await?;
        longest(&self.open(Duration::MAX).await?).await?;
        self.time().await
    }

    async fn open<St: ClaimStore>(&self, ttl: Duration) -> Result<Client<St>, Breach>
    where
        M: AsyncFn(Duration) -> St,
    {
        let client = Client {
            store: (self.make)(ttl).await,
            limit: self.limit,
        };
        // Some stores look at their table first, which is then done once, not by many at once.
        client.seen(&id(0)).is(false, UNKNOWN).await?;
        Ok(client)
    }

    /// Has all that needs time watched at once, and what came too late to tell with twice the time.
    async fn time<St: ClaimStore>(&self) -> Result<(), Breach>
    where
        M: AsyncFn(Duration) -> St,
    {
        let mut watched = Watched::all();
        watched.retain(|watched| self.expires || !watched.needs_ttl());
        let mut length = SHORT;
        for _ in 0..TRIES {
            let (lasting, expiring) = (self.open(LONG).await?, self.open(length).await?);
            let quiet = self.open(length).await?;
            let mut watches = Vec::new();
            for (at, watched) in watched.iter().enumerate() {
                let client = match watched {
                    Watched::Unasked => &quiet,
                    _ if watched.needs_ttl() => &expiring,
                    _ => &lasting,
                };
                watches.push(watched.watch(client.clone(), 100 * (at + 1), length));
            }
            let told = all(watches).await?;
            let mut told = told.into_iter();
            watched.retain(|_| told.next() == Some(false));
            if watched.is_empty() {
                return Ok(());
            }
            length *= 2;
        }
        let late = format!("all of it too late to tell, in {TRIES} tries up to {length:?}");
        Err(Breach::new(LEASE, &id(1), late))
    }
}

// ===== what a store is told, and what it answers =====

#[derive(Clone, Copy)]
enum Command {
    Claim(Owner),
    Renew(Owner),
    Complete(Owner),
    Release(Owner),
    Remember,
    Forget,
    Seen,
}
use Command::{Complete, Forget, Release, Remember, Renew, Seen};

impl Command {
    /// Each one, once by every owner where it has one.
    fn by(owners: &[Owner]) -> Vec<Command> {
        let owned = [Command::Claim, Renew, Complete, Release];
        let owned = owned
            .into_iter()
            .flat_map(|command| owners.iter().map(move |owner| command(*owner)));
        owned.chain([Remember, Forget, Seen]).collect()
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, owner) = match self {
            Command::Claim(owner) => ("claim", owner),
            Renew(owner) => ("renew", owner),
            Complete(owner) => ("complete", owner),
            Release(owner) => ("release", owner),
            Remember => return f.write_str("remember"),
            Forget => return f.write_str("forget"),
            Seen => return f.write_str("seen"),
        };
        write!(f, "{name} by {:#x}", owner.to_bits())
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Answer {
    Won,
    Done,
    Busy,
    True,
    False,
    Ok,
}

impl From<bool> for Answer {
    fn from(answer: bool) -> Self {
        if answer { Answer::True } else { Answer::False }
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Answer::Won => "Won",
            Answer::Done => "Done",
            Answer::Busy => "Busy",
            Answer::True => "true",
            Answer::False => "false",
            Answer::Ok => "Ok",
        })
    }
}

impl<St: ClaimStore> Client<St> {
    fn claim(&self, id: &MessageId, owner: Owner, lease: Duration) -> Reply<Claim> {
        let name = Command::Claim(owner).to_string();
        let lease = leased(lease);
        self.send(name, id, |store, id| store.claim(id, owner, lease))
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Duration) -> Reply<bool> {
        let (name, lease) = (Renew(owner).to_string(), leased(lease));
        self.send(name, id, |store, id| store.renew(id, owner, lease))
    }

    fn complete(&self, id: &MessageId, owner: Owner) -> Reply<bool> {
        let name = Complete(owner).to_string();
        self.send(name, id, |store, id| store.complete(id, owner))
    }

    fn release(&self, id: &MessageId, owner: Owner) -> Reply<bool> {
        let name = Release(owner).to_string();
        self.send(name, id, |store, id| store.release(id, owner))
    }

    async fn run(&self, id: &MessageId, command: Command, rule: &str) -> Result<Answer, Breach> {
        Ok(match command {
            Command::Claim(owner) => self.claim(id, owner, LONG).told(rule, LONG).await?,
            Renew(owner) => self.renew(id, owner, LONG).ok(rule).await?.into(),
            Complete(owner) => self.complete(id, owner).ok(rule).await?.into(),
            Release(owner) => self.release(id, owner).ok(rule).await?.into(),
            Remember => self.remember(id).ok(rule).await.map(|()| Answer::Ok)?,
            Forget => self.forget(id).ok(rule).await.map(|()| Answer::Ok)?,
            Seen => self.seen(id).ok(rule).await?.into(),
        })
    }
}

impl Reply<Claim> {
    /// What became of it, where no lease is longer than this.
    async fn told(self, rule: &str, longest: Duration) -> Result<Answer, Breach> {
        let (command, id) = (self.command.clone(), self.id.clone());
        match self.ok(rule).await? {
            Claim::Won => Ok(Answer::Won),
            Claim::Done => Ok(Answer::Done),
            Claim::Busy { retry_after } => {
                let limit = longest + longest / 100 + Duration::from_secs(1);
                if retry_after > Duration::ZERO && retry_after <= limit {
                    return Ok(Answer::Busy);
                }
                let answered =
                    format!("{command} → Busy for {retry_after:?} of a lease of {longest:?}");
                Err(Breach::new(RETRY, &id, answered))
            }
        }
    }

    async fn is(self, expected: Answer, rule: &str) -> Result<(), Breach> {
        let (command, id) = (self.command.clone(), self.id.clone());
        match self.told(rule, LONG).await? {
            answer if answer == expected => Ok(()),
            answer => Err(unlike(rule, &id, &command, answer, &[expected])),
        }
    }
}

fn unlike(
    rule: &str,
    id: &MessageId,
    command: impl fmt::Display,
    answer: Answer,
    expected: &[Answer],
) -> Breach {
    let expected: Vec<_> = expected.iter().map(Answer::to_string).collect();
    let expected = expected.join(" or ");
    Breach::new(rule, id, format!("{command} → {answer}, not {expected}"))
}

fn leased(length: Duration) -> Lease {
    Lease::new(length).expect("the kit's leases can be held")
}

fn owner(number: usize) -> Owner {
    Owner::from_bits(number as u128)
}

/// Two, and one who stands by.
const A: Owner = Owner::from_bits(0xa);
const B: Owner = Owner::from_bits(0xb);
const C: Owner = Owner::from_bits(0xc);

// ===== the model =====

/// What is recorded of an id. A claim that has ended, and what is past its TTL, is `Free`.
#[derive(Clone, Copy)]
enum State {
    Free,
    Claimed(Owner),
    Done {
        /// Who held the id when it was marked, and need not be told so by another complete.
        held: Option<Owner>,
    },
}

impl State {
    /// Which answers are right, what the state is afterwards, and which rule says so.
    fn step(self, command: Command) -> (&'static [Answer], State, &'static str) {
        use Answer::{Busy, False, True, Won};
        let holder = match self {
            State::Claimed(holder) => Some(holder),
            State::Free | State::Done { .. } => None,
        };
        let done = State::Done {
            held: match self {
                State::Done { held } => held,
                _ => holder,
            },
        };
        match (command, self) {
            (Command::Claim(_), State::Done { .. }) => (&[Answer::Done], self, DONE),
            (Command::Claim(owner), State::Free) => (&[Won], State::Claimed(owner), WON),
            (Command::Claim(owner), _) if holder == Some(owner) => (&[Won], self, SENT_AGAIN),
            (Command::Claim(_), _) => (&[Busy], self, HELD),
            (Renew(owner), _) if holder == Some(owner) => (&[True], self, RENEWS),
            (Renew(_), _) => (&[False], self, RENEW_NOT),
            (Complete(owner), _) if holder == Some(owner) => (&[True], done, COMPLETES),
            (Complete(owner), State::Done { held }) if held == Some(owner) => {
                (&[True, False], done, COMPLETE_TWICE)
            }
            (Complete(_), _) => (&[False], done, COMPLETE_NOT),
            (Release(owner), _) if holder == Some(owner) => (&[True], State::Free, RELEASES),
            (Release(_), _) => (&[False], self, RELEASE_NOT),
            (Remember, _) => (&[Answer::Ok], done, REMEMBERS),
            (Forget, _) => (&[Answer::Ok], State::Free, FORGETS),
            (Seen, State::Done { .. }) => (&[True], self, SEEN),
            (Seen, _) => (&[False], self, UNSEEN),
        }
    }
}

/// An id, and what the model has of it.
struct Followed<St> {
    client: Client<St>,
    id: MessageId,
    state: State,
    /// What was sent so far.
    sent: Vec<Command>,
}

impl<St: ClaimStore> Followed<St> {
    fn new(client: &Client<St>, number: usize) -> Self {
        Followed {
            client: client.clone(),
            id: id(number),
            state: State::Free,
            sent: Vec::new(),
        }
    }

    /// Holds the store to the model; `instead` of the rule that the model has, where there is one.
    async fn send(&mut self, command: Command, instead: Option<&str>) -> Result<(), Breach> {
        let (expected, next, rule) = self.state.step(command);
        let rule = instead.unwrap_or(rule);
        let before = self.history();
        self.sent.push(command);
        let answer = self.client.run(&self.id, command, rule).await;
        let answer = answer.map_err(|breach| breach.add(&before))?;
        if !expected.contains(&answer) {
            return Err(unlike(rule, &self.id, command, answer, expected).add(&before));
        }
        self.state = next;
        Ok(())
    }

    /// Whether the record is what the command before has made it, by that command's rule.
    async fn look(&mut self, rule: &str) -> Result<(), Breach> {
        self.send(Seen, Some(rule)).await?;
        if let State::Claimed(holder) = self.state {
            self.send(Renew(holder), Some(rule)).await?;
        }
        self.send(Command::Claim(C), Some(rule)).await
    }

    fn history(&self) -> String {
        let last = self.sent.len().saturating_sub(8);
        let sent: Vec<_> = self.sent[last..].iter().map(Command::to_string).collect();
        match sent.len() {
            0 => String::new(),
            _ => format!(", after {}", sent.join(", ")),
        }
    }
}

impl Breach {
    fn add(mut self, more: &str) -> Self {
        self.answered += more;
        self
    }
}

/// A watch answers whether it could tell.
type Watch = Pin<Box<dyn Future<Output = Result<bool, Breach>> + Send>>;

/// Each in a task of its own, so many at once. Of those that find something the first one is told.
async fn all(watches: Vec<Watch>) -> Result<Vec<bool>, Breach> {
    let mut results: Vec<_> = watches.iter().map(|_| None).collect();
    let mut waiting = watches.into_iter().enumerate();
    let mut tasks = JoinSet::new();
    loop {
        let free = AT_ONCE - tasks.len();
        for (at, watch) in waiting.by_ref().take(free) {
            tasks.spawn(async move { (at, watch.await) });
        }
        let Some(result) = tasks.join_next().await else {
            break;
        };
        let (at, result) = result.expect("a watch does not panic");
        results[at] = Some(result);
        // All before it are answered, and found nothing.
        let first = results.iter().position(|it| !matches!(it, Some(Ok(_))));
        if let Some(Some(Err(breach))) = first.map(|at| results[at].take()) {
            return Err(breach);
        }
    }
    let told = results.into_iter().map(|it| matches!(it, Some(Ok(true))));
    Ok(told.collect())
}

// ===== the rules without time =====

async fn basics<St: ClaimStore>(client: &Client<St>) -> Result<(), Breach> {
    use Answer::{Busy, Done, Won};
    let (one, other, third) = (&id(1), &id(2), &id(3));
    client.seen(one).is(false, UNSEEN).await?;
    client.renew(one, A, LONG).is(false, RENEW_NOT).await?;
    client.renew(one, A, LONG).is(false, RENEW_NOT).await?;
    client.release(one, A).is(false, RELEASE_NOT).await?;

    client.claim(one, A, LONG).is(Won, WON).await?;
    client.seen(one).is(false, UNSEEN).await?;
    client.claim(one, B, LONG).is(Busy, HELD).await?;
    client.claim(one, A, LONG).is(Won, SENT_AGAIN).await?;
    client.claim(one, B, LONG).is(Busy, HELD).await?;
    client.claim(other, B, LONG).is(Won, OWN_ID).await?;
    client.claim(one, B, LONG).is(Busy, OWN_ID).await?;

    client.renew(one, A, LONG).is(true, RENEWS).await?;
    client.renew(one, B, LONG).is(false, RENEW_NOT).await?;
    client.renew(one, A, LONG).is(true, RENEW_NOT).await?;
    client.release(one, B).is(false, RELEASE_NOT).await?;
    client.renew(one, A, LONG).is(true, RELEASE_NOT).await?;
    client.release(one, A).is(true, RELEASES).await?;
    client.renew(one, A, LONG).is(false, RELEASES).await?;
    client.release(one, A).is(false, RELEASE_NOT).await?;
    client.claim(one, B, LONG).is(Won, RELEASES).await?;
    client.renew(other, B, LONG).is(true, OWN_ID).await?;
    client.claim(one, A, LONG).is(Busy, HELD).await?;

    client.complete(one, B).is(true, COMPLETES).await?;
    client.seen(one).is(true, COMPLETES).await?;
    client.claim(one, A, LONG).is(Done, DONE).await?;
    client.claim(one, B, LONG).is(Done, DONE).await?;
    client.seen(one).is(true, DONE).await?;
    client.renew(one, B, LONG).is(false, RENEW_NOT).await?;
    client.seen(one).is(true, RENEW_NOT).await?;
    client.release(one, B).is(false, RELEASE_NOT).await?;
    client.seen(one).is(true, RELEASE_NOT).await?;
    client.complete(one, B).ok(COMPLETE_TWICE).await?;
    client.seen(one).is(true, COMPLETE_TWICE).await?;
    client.seen(other).is(false, UNSEEN).await?;
    client.renew(other, B, LONG).is(true, OWN_ID).await?;

    // The effect happened, whoever says so.
    client.complete(other, A).is(false, COMPLETE_NOT).await?;
    client.seen(other).is(true, COMPLETE_NOT).await?;
    client.claim(other, A, LONG).is(Done, DONE).await?;
    client.complete(other, B).ok(COMPLETE_TWICE).await?;
    client.complete(third, A).is(false, COMPLETE_NOT).await?;
    client.claim(third, A, LONG).is(Done, DONE).await?;

    for done in [one, other, third] {
        client.forget(done).ok(FORGETS).await?;
        client.seen(done).is(false, FORGETS).await?;
        client.claim(done, A, LONG).is(Won, FORGETS).await?;
        client.forget(done).ok(FORGETS).await?;
        client.renew(done, A, LONG).is(false, FORGETS).await?;
        client.claim(done, B, LONG).is(Won, FORGETS).await?;
        client.remember(done).ok(REMEMBERS).await?;
        client.seen(done).is(true, REMEMBERS).await?;
        client.claim(done, A, LONG).is(Done, REMEMBERS).await?;
        client.renew(done, B, LONG).is(false, REMEMBERS).await?;
        client.seen(done).is(true, REMEMBERS).await?;
    }
    Ok(())
}

async fn clones<St: ClaimStore>(client: Client<St>) -> Result<(), Breach> {
    use Answer::{Busy, Done, Won};
    let [one, other, third] = &[1, 2, 3].map(id);
    let clone = client.clone();
    clone.claim(one, A, LONG).is(Won, CLONES).await?;
    client.claim(one, B, LONG).is(Busy, CLONES).await?;
    client.renew(one, A, LONG).is(true, CLONES).await?;
    client.release(one, A).is(true, CLONES).await?;
    clone.claim(one, B, LONG).is(Won, CLONES).await?;
    // A clone outlives the store it was made of.
    drop(client);
    clone.renew(one, B, LONG).is(true, CLONES).await?;

    let client = clone;
    for (id, owner) in [(other, A), (third, B)] {
        let lease = leased(LONG);
        let claim = |store: &St, id: &MessageId| store.claim(id, owner, lease);
        client
            .send_moved("claim", id, claim)
            .await
            .is(Won, MOVED)
            .await?;
        let renew = |store: &St, id: &MessageId| store.renew(id, owner, lease);
        client
            .send_moved("renew", id, renew)
            .await
            .is(true, MOVED)
            .await?;
    }
    let release = |store: &St, id: &MessageId| store.release(id, A);
    let moved = client.send_moved("release", other, release).await;
    moved.is(true, MOVED).await?;
    let complete = |store: &St, id: &MessageId| store.complete(id, B);
    let moved = client.send_moved("complete", third, complete).await;
    moved.is(true, MOVED).await?;
    client.claim(other, C, LONG).is(Won, MOVED).await?;
    client.claim(third, C, LONG).is(Done, MOVED).await
}

/// Every command in every state of an id: free, claimed by its owner or another, done by either, come
/// by in several ways.
async fn pairs<St: ClaimStore>(client: Client<St>) -> Result<(), Breach> {
    use Command::Claim;
    let ways: &[&[Command]] = &[
        &[],
        &[Claim(A), Release(A)],
        &[Claim(B), Forget],
        &[Complete(A), Forget],
        &[Claim(A)],
        &[Claim(B)],
        &[Claim(A), Complete(A)],
        &[Claim(B), Complete(B)],
        &[Claim(A), Complete(B)],
        &[Claim(A), Remember],
        &[Complete(A)],
    ];
    let mut watches: Vec<Watch> = Vec::new();
    for way in ways.iter().copied() {
        for command in Command::by(&[A]) {
            let mut followed = Followed::new(&client, watches.len());
            watches.push(Box::pin(async move {
                for step in way {
                    followed.send(*step, None).await?;
                }
                let (_, _, rule) = followed.state.step(command);
                followed.send(command, None).await?;
                followed.look(rule).await?;
                Ok(true)
            }));
        }
    }
    all(watches).await.map(drop)
}

/// Random commands, by three owners on three ids, held to the model.
async fn walks<St: ClaimStore>(client: Client<St>, seed: u64) -> Result<(), Breach> {
    let mut walks: Vec<Watch> = Vec::new();
    for walk in 0..WALKS {
        let ids = [0, 1, 2].map(|at| Followed::new(&client, 10 * walk as usize + at));
        walks.push(Box::pin(async move {
            let walk = random_walk(ids, seed.wrapping_add(walk)).await;
            walk.map_err(|breach| breach.add(&format!("; on the walks of seed {seed}")))?;
            Ok(true)
        }));
    }
    all(walks).await.map(drop)
}

async fn random_walk<St: ClaimStore>(mut ids: [Followed<St>; 3], seed: u64) -> Result<(), Breach> {
    let mut random = Random(seed);
    for _ in 0..STEPS {
        let owner = [A, B, C][random.below(3)];
        let command = match random.below(16) {
            0..=4 => Command::Claim(owner),
            5 | 6 => Renew(owner),
            7 | 8 => Complete(owner),
            9 | 10 => Release(owner),
            11 => Remember,
            12 | 13 => Forget,
            _ => Seen,
        };
        let followed = &mut ids[random.below(3)];
        followed.send(command, None).await?;
    }
    Ok(())
}

/// SplitMix64: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit) as usize
    }
}

/// Owners that some encoding or other would take for one another: cut to a part, read as a number,
/// written without zeros.
const NASTY_OWNERS: &[u128] = &[
    0,
    1,
    0x10,
    1 << 32,
    1 << 53,
    (1 << 53) + 1,
    1 << 63,
    1 << 64,
    (1 << 64) + 1,
    1 << 127,
    (1 << 127) + 1,
    u128::MAX - 1,
    u128::MAX,
];

async fn owners<St: ClaimStore>(client: &Client<St>) -> Result<(), Breach> {
    let owners: Vec<_> = NASTY_OWNERS.iter().copied().map(Owner::from_bits).collect();
    for (at, owner) in owners.iter().enumerate() {
        let id = &id(at);
        client
            .claim(id, *owner, LONG)
            .is(Answer::Won, OWNERS)
            .await?;
        let others = owners.iter().filter(|other| *other != owner);
        let replies: Vec<_> = others.map(|other| client.renew(id, *other, LONG)).collect();
        for reply in replies {
            reply.is(false, OWNERS).await?;
        }
        let next = owners[(at + 1) % owners.len()];
        client
            .claim(id, next, LONG)
            .is(Answer::Busy, OWNERS)
            .await?;
        client.release(id, next).is(false, OWNERS).await?;
        client.renew(id, *owner, LONG).is(true, OWNERS).await?;
    }
    Ok(())
}

/// Claims every id for an owner of its own, gives up one half of them, then the other, and marks that
/// one done.
async fn exact_ids<St: ClaimStore>(
    client: &Client<St>,
    holds: &(dyn Fn(&str) -> bool + Send + Sync),
) -> Result<(), Breach> {
    let (held, refused): (Vec<_>, Vec<_>) = nasty_ids().into_iter().partition(|(_, id)| holds(id));
    let claims: Vec<_> = held
        .iter()
        .enumerate()
        .map(|(at, (kind, id))| Owned {
            rule: format!("{BYTES}: {kind}"),
            id: id.clone(),
            owner: owner(1000 + at),
            even: at % 2 == 0,
        })
        .collect();

    for chunk in claims.chunks(AT_ONCE) {
        let claim = |it: &Owned| client.claim(&it.id, it.owner, LONG);
        let replies: Vec<_> = chunk.iter().map(claim).collect();
        for (it, reply) in chunk.iter().zip(replies) {
            let answer = reply.told(&it.rule, LONG).await?;
            if answer != Answer::Won {
                return Err(mixed_up(client, &claims, it, answer).await?);
            }
        }
    }
    let (even, odd): (Vec<_>, Vec<_>) = claims.iter().cloned().partition(|it| it.even);
    let release = |it: &Owned| client.release(&it.id, it.owner);
    let complete = |it: &Owned| client.complete(&it.id, it.owner);
    each(&even, release, |_| true).await?;
    claimed(client, &odd, A, Answer::Busy).await?;
    claimed(client, &even, A, Answer::Won).await?;
    each(&odd, release, |_| true).await?;
    claimed(client, &even, B, Answer::Busy).await?;
    each(&odd, complete, |_| false).await?;
    each(&claims, |it| client.seen(&it.id), |it| !it.even).await?;

    // What it cannot hold does no harm to what it holds.
    for (_, id) in &refused {
        let told = |name, trouble| Breach::new(REFUSED, id, format!("{name} → {trouble}"));
        match client.claim(id, B, LONG).answer().await {
            Err(Trouble::Error(_)) => {}
            Ok(claim) => {
                return Err(Breach::new(
                    REFUSED,
                    id,
                    format!("claim → {claim:?}, not an error"),
                ));
            }
            Err(trouble) => return Err(told("claim", trouble)),
        }
        match client.complete(id, B).answer().await {
            Err(Trouble::Error(_)) => {}
            Ok(_) => return Err(Breach::new(REFUSED, id, "complete → Ok, not an error")),
            Err(trouble) => return Err(told("complete", trouble)),
        }
        let others = [
            ("renew", client.renew(id, B, LONG)),
            ("release", client.release(id, B)),
            ("seen", client.seen(id)),
        ];
        for (name, reply) in others {
            match reply.answer().await {
                Ok(false) | Err(Trouble::Error(_)) => {}
                Ok(true) => {
                    return Err(Breach::new(
                        REFUSED,
                        id,
                        format!("{name} → true, not false"),
                    ));
                }
                Err(trouble) => return Err(told(name, trouble)),
            }
        }
    }
    let harm = |it: &Owned| Owned {
        rule: NO_HARM.to_owned(),
        ..it.clone()
    };
    let claims: Vec<_> = claims.iter().map(harm).collect();
    each(&claims, |it| client.seen(&it.id), |it| !it.even).await?;
    let even: Vec<_> = claims.into_iter().filter(|it| it.even).collect();
    claimed(client, &even, B, Answer::Busy).await
}

#[derive(Clone)]
struct Owned {
    rule: String,
    id: MessageId,
    owner: Owner,
    even: bool,
}

async fn each(
    claims: &[Owned],
    send: impl Fn(&Owned) -> Reply<bool>,
    expected: impl Fn(&Owned) -> bool,
) -> Result<(), Breach> {
    for chunk in claims.chunks(AT_ONCE) {
        let replies: Vec<_> = chunk.iter().map(&send).collect();
        for (it, reply) in chunk.iter().zip(replies) {
            reply.is(expected(it), &it.rule).await?;
        }
    }
    Ok(())
}

async fn claimed<St: ClaimStore>(
    client: &Client<St>,
    claims: &[Owned],
    owner: Owner,
    expected: Answer,
) -> Result<(), Breach> {
    for chunk in claims.chunks(AT_ONCE) {
        let claim = |it: &Owned| client.claim(&it.id, owner, LONG);
        let replies: Vec<_> = chunk.iter().map(claim).collect();
        for (it, reply) in chunk.iter().zip(replies) {
            reply.is(expected, &it.rule).await?;
        }
    }
    Ok(())
}

/// Which other id this one is mixed up with: the one whose release frees it.
async fn mixed_up<St: ClaimStore>(
    client: &Client<St>,
    claims: &[Owned],
    it: &Owned,
    answer: Answer,
) -> Result<Breach, Breach> {
    let command = Command::Claim(it.owner);
    let breach = unlike(&it.rule, &it.id, command, answer, &[Answer::Won]);
    for other in claims.iter().filter(|other| other.id != it.id) {
        client.release(&other.id, other.owner).ok(BYTES).await?;
        let claim = client.claim(&it.id, it.owner, LONG);
        if claim.told(BYTES, LONG).await? == Answer::Won {
            return Ok(breach.add(&format!(", mixed up with {}", shown(&other.id))));
        }
    }
    Ok(breach)
}

// ===== races =====

async fn races<St: ClaimStore>(client: &Client<St>) -> Result<(), Breach> {
    use Answer::{Busy, Done, Won};
    for round in 0..2 {
        let [free, held, released, completed, done, marked] =
            &[1, 2, 3, 4, 5, 6].map(|at| id(10 * round + at));
        match race(client, free, ONE_WINNER, || None).await?[..] {
            [winner] => {
                client
                    .renew(free, winner, LONG)
                    .is(true, ONE_WINNER)
                    .await?
            }
            _ => return Err(Breach::new(ONE_WINNER, free, "claim → Won by nobody")),
        }
        client.claim(free, C, LONG).is(Busy, ONE_WINNER).await?;

        client.claim(held, A, LONG).is(Won, WON).await?;
        nobody(held, race(client, held, NO_WINNER, || None).await?)?;
        client.renew(held, A, LONG).is(true, NO_WINNER).await?;

        // All may have come before the release.
        client.claim(released, A, LONG).is(Won, WON).await?;
        let release = || Some((client.release(released, A), true));
        match race(client, released, ONE_WINNER, release).await?[..] {
            [winner] => {
                client
                    .renew(released, winner, LONG)
                    .is(true, ONE_WINNER)
                    .await?
            }
            _ => client.claim(released, C, LONG).is(Won, RELEASES).await?,
        }

        client.claim(completed, A, LONG).is(Won, WON).await?;
        let complete = || Some((client.complete(completed, A), true));
        nobody(
            completed,
            race(client, completed, NO_WINNER, complete).await?,
        )?;
        client.seen(completed).is(true, COMPLETES).await?;
        client.claim(completed, C, LONG).is(Done, DONE).await?;

        let complete = client.complete(done, A);
        race(client, done, MARK_STAYS, || None).await?;
        complete.is(false, COMPLETE_NOT).await?;
        let complete = || Some((client.complete(marked, A), false));
        race(client, marked, MARK_STAYS, complete).await?;
        for id in [done, marked] {
            client.seen(id).is(true, MARK_STAYS).await?;
            client.claim(id, C, LONG).is(Done, MARK_STAYS).await?;
        }
    }

    let sent = [(); 8].map(|()| client.claim(&id(100), A, LONG));
    for reply in sent {
        reply.is(Won, SENT_AGAIN).await?;
    }
    client.release(&id(100), A).is(true, RELEASES).await
}

/// Claims an id for 64 owners at once, with a command in their middle and what it is to answer.
/// Answers the winner; nobody else wins.
async fn race<St: ClaimStore>(
    client: &Client<St>,
    id: &MessageId,
    rule: &str,
    middle: impl FnOnce() -> Option<(Reply<bool>, bool)>,
) -> Result<Vec<Owner>, Breach> {
    let claim = |at| {
        let owner = owner(1000 + at);
        (owner, client.clone().claim(id, owner, LONG))
    };
    let mut racers: Vec<_> = (1..AT_ONCE / 2).map(claim).collect();
    let middle = middle();
    racers.extend((AT_ONCE / 2..=AT_ONCE).map(claim));
    let mut winners = Vec::new();
    for (owner, reply) in racers {
        if reply.told(rule, LONG).await? == Answer::Won {
            winners.push(owner);
        }
    }
    if let Some((reply, expected)) = middle {
        reply.is(expected, rule).await?;
    }
    if winners.len() > 1 {
        let answered = format!("claim by {AT_ONCE} → Won by {}", winners.len());
        return Err(Breach::new(rule, id, answered));
    }
    Ok(winners)
}

fn nobody(id: &MessageId, winners: Vec<Owner>) -> Result<(), Breach> {
    match winners[..] {
        [] => Ok(()),
        _ => Err(Breach::new(NO_WINNER, id, "claim → Won by another")),
    }
}

/// Many commands on one id.
async fn together<St: ClaimStore>(client: &Client<St>) -> Result<(), Breach> {
    let one = &id(1);
    for _ in 0..4 {
        let claims = [A, B, A].map(|owner| client.claim(one, owner, LONG));
        let others = [
            client.renew(one, A, LONG),
            client.release(one, A),
            client.seen(one),
            client.complete(one, B),
            client.renew(one, B, LONG),
            client.release(one, B),
        ];
        let forget = client.forget(one);
        for reply in claims {
            reply.told(TOGETHER, LONG).await?;
        }
        for reply in others {
            reply.ok(TOGETHER).await?;
        }
        forget.ok(TOGETHER).await?;
    }
    // Whichever was last, all still work.
    client.forget(one).ok(TOGETHER).await?;
    client.claim(one, A, LONG).is(Answer::Won, TOGETHER).await?;
    client.renew(one, A, LONG).is(true, TOGETHER).await?;
    client.release(one, A).is(true, TOGETHER).await
}

/// Many tasks that take turns in holding one id.
async fn turns<St: ClaimStore>(client: &Client<St>) -> Result<(), Breach> {
    let holders = Arc::new(AtomicUsize::new(0));
    let mut turns: Vec<Watch> = Vec::new();
    for task in 1..=8 {
        let (client, holders) = (client.clone(), holders.clone());
        turns.push(Box::pin(async move {
            for turn in 0..6 {
                take_turn(&client, owner(100 * task + turn), &holders).await?;
            }
            Ok(true)
        }));
    }
    all(turns).await.map(drop)
}

async fn take_turn<St: ClaimStore>(
    client: &Client<St>,
    owner: Owner,
    holders: &AtomicUsize,
) -> Result<(), Breach> {
    let (id, start) = (&id(1), Instant::now());
    loop {
        let claim = client.claim(id, owner, LONG);
        match claim.told(ONE_HOLDER, LONG).await? {
            Answer::Won => break,
            Answer::Busy if start.elapsed() < client.limit => sleep(Duration::from_millis(1)).await,
            answer => {
                let command = Command::Claim(owner);
                return Err(unlike(ONE_HOLDER, id, command, answer, &[Answer::Won]));
            }
        }
    }
    let others = holders.fetch_add(1, Ordering::SeqCst);
    yield_now().await;
    holders.fetch_sub(1, Ordering::SeqCst);
    if others > 0 {
        let answered = format!(
            "{} → Won, before another released it",
            Command::Claim(owner)
        );
        return Err(Breach::new(ONE_HOLDER, id, answered));
    }
    client.release(id, owner).is(true, RELEASES).await
}

// ===== dropped commands =====

/// Drops commands, unpolled and after some polls, between others that are not dropped.
async fn dropped<St: ClaimStore>(client: &Client<St>) -> Result<(), Breach> {
    use Answer::{Busy, Won};
    let [held, done] = &[1, 2].map(id);
    client.claim(held, A, LONG).is(Won, WON).await?;
    client.remember(done).ok(REMEMBERS).await?;
    for polls in 0..4 {
        let commands = [Command::Claim(A), Renew(A), Complete(A), Release(A)];
        for (at, command) in commands.into_iter().enumerate() {
            let number = 100 + 16 * polls + 4 * at;
            let [before, after, victim] = &[0, 1, 2].map(|offset| id(number + offset));
            if !matches!(command, Command::Claim(_)) {
                client.claim(victim, A, LONG).is(Won, WON).await?;
            }
            let under_way = client.claim(before, A, LONG);
            let claim = client.claim(held, B, LONG);
            let questions = [
                (true, client.renew(held, A, LONG)),
                (false, client.renew(held, B, LONG)),
                (true, client.seen(done)),
                (false, client.release(done, A)),
            ];
            let (store, lease) = (&client.store, leased(LONG));
            match command {
                Renew(owner) => begin(store.renew(victim, owner, lease), polls).await,
                Complete(owner) => begin(store.complete(victim, owner), polls).await,
                Release(owner) => begin(store.release(victim, owner), polls).await,
                _ => begin(store.claim(victim, A, lease), polls).await,
            }
            // What the dropped one did, or still does, to its own id is not known. If its answer is
            // taken for that of one of these, some are wrong.
            client.claim(after, B, LONG).is(Won, DROPPED).await?;
            client.renew(held, B, LONG).is(false, DROPPED).await?;
            client.renew(held, A, LONG).is(true, DROPPED).await?;
            client.claim(held, B, LONG).is(Busy, DROPPED).await?;
            client.seen(held).is(false, DROPPED).await?;
            under_way.is(Won, DROPPED).await?;
            claim.is(Busy, DROPPED).await?;
            for (expected, question) in questions {
                question.is(expected, DROPPED).await?;
            }
            client.renew(after, B, LONG).is(true, DROPPED).await?;
            client.release(before, A).is(true, DROPPED).await?;

            match command {
                Renew(_) => client.complete(victim, A).is(true, DROPPED).await?,
                Complete(_) => client.complete(victim, A).ok(DROPPED).await.map(drop)?,
                Release(_) => {
                    client.claim(victim, A, LONG).is(Won, DROPPED).await?;
                    client.complete(victim, A).ok(DROPPED).await?;
                }
                _ => {
                    client.claim(victim, A, LONG).is(Won, DROPPED).await?;
                    client.release(victim, A).is(true, DROPPED).await?;
                    continue;
                }
            }
            client.seen(victim).is(true, DROPPED).await?;
        }
    }
    Ok(())
}

// ===== time =====

/// The longest lease and TTL, of which it can only be told that they are there.
async fn longest<St: ClaimStore>(client: &Client<St>) -> Result<(), Breach> {
    let one = &id(1);
    for _ in 0..2 {
        let claim = client.claim(one, A, Lease::MAX);
        claim.is(Answer::Won, LONGEST).await?;
        let busy = client.claim(one, B, Lease::MAX);
        let answer = busy.told(LONGEST, Lease::MAX).await?;
        if answer != Answer::Busy {
            let command = Command::Claim(B);
            return Err(unlike(LONGEST, one, command, answer, &[Answer::Busy]));
        }
        client.renew(one, A, Lease::MAX).is(true, LONGEST).await?;
    }
    client.complete(one, A).is(true, LONGEST).await?;
    client.seen(one).is(true, LONGEST).await?;
    let claim = client.claim(one, B, Lease::MAX);
    claim.is(Answer::Done, LONGEST).await
}

/// What is watched by the clock.
#[derive(Clone, Copy)]
enum Watched {
    /// A lease that starts in this way, until somebody else has the id.
    Lease(Start),
    /// A done record whose claim is over.
    Stays(Command),
    /// The TTL of what was claimed before, for longer than the TTL.
    Ttl(Command),
    /// A command on a claim that has ended.
    Ended(Command),
    /// A command on what is past its TTL.
    Expired(Command),
    /// A claim of what is past its TTL, in a record that nobody asked since.
    Unasked,
    /// Many claims on one that has ended, while its owner completes it or does nothing.
    Race { completed: bool },
    /// The shortest lease.
    Shortest,
}

#[derive(Clone, Copy, PartialEq)]
enum Start {
    Claim,
    /// The same claim again at half of its lease.
    ClaimAgain,
    /// At half of the lease.
    Renew,
    /// With a lease that is over before that of the claim.
    RenewShorter,
    /// A claim that comes after its release.
    Ghost,
    /// A claim that nobody waited for.
    Dropped,
}

impl Watched {
    /// The plain ones first.
    fn all() -> Vec<Self> {
        let starts = [
            Start::Claim,
            Start::ClaimAgain,
            Start::Renew,
            Start::RenewShorter,
            Start::Ghost,
            Start::Dropped,
        ];
        let mut all: Vec<_> = starts.map(Watched::Lease).into();
        all.extend([Complete(A), Complete(B), Remember].map(Watched::Stays));
        all.extend([Complete(A), Remember].map(Watched::Ttl));
        all.extend(Command::by(&[A, B]).into_iter().map(Watched::Ended));
        all.extend(Command::by(&[A, B]).into_iter().map(Watched::Expired));
        all.push(Watched::Unasked);
        all.extend([false, true].map(|completed| Watched::Race { completed }));
        all.push(Watched::Shortest);
        all
    }

    fn needs_ttl(&self) -> bool {
        matches!(
            self,
            Watched::Ttl(_) | Watched::Expired(_) | Watched::Unasked
        )
    }

    /// On ids from `number` on; `length` is that of the lease, or of the TTL.
    fn watch<St: ClaimStore>(&self, client: Client<St>, number: usize, length: Duration) -> Watch {
        match *self {
            Watched::Lease(start) => Box::pin(lease(client, id(number), length, start)),
            Watched::Stays(command) => Box::pin(stays(client, id(number), length, command)),
            Watched::Ttl(command) => Box::pin(life(client, id(number), length, command)),
            Watched::Ended(command) => Box::pin(ended(client, number, length, command)),
            Watched::Expired(command) => Box::pin(expired(client, number, length, command)),
            Watched::Unasked => Box::pin(unasked(client, id(number), length)),
            Watched::Race { completed } => Box::pin(race_at_end(client, number, length, completed)),
            Watched::Shortest => Box::pin(shortest(client, id(number))),
        }
    }
}

/// But for the hundredth by which two clocks may differ.
fn nearly(length: Duration) -> Duration {
    length - length / 100
}

/// How long to wait for the end of a claim that must not be asked after; the next one where it turned
/// out to be alive. Some stores look only now and then.
fn patience(length: Duration) -> [Duration; 3] {
    [
        length / 4 * 5 + Duration::from_millis(50),
        2 * length + Duration::from_secs(1),
        4 * length + Duration::from_secs(2),
    ]
}

/// Watches a claim from its start until another owner has won the id.
async fn lease<St: ClaimStore>(
    client: Client<St>,
    id: MessageId,
    length: Duration,
    start: Start,
) -> Result<bool, Breach> {
    let id = &id;
    let first = Instant::now();
    match start {
        Start::Claim => {}
        Start::ClaimAgain | Start::Renew => {
            client.claim(id, A, length).is(Answer::Won, WON).await?;
            sleep(length / 2).await;
        }
        Start::RenewShorter => client.claim(id, A, LONG).is(Answer::Won, WON).await?,
        Start::Ghost => {
            client.claim(id, A, LONG).is(Answer::Won, WON).await?;
            client.release(id, A).is(true, RELEASES).await?;
        }
        Start::Dropped => {
            begin(client.store.claim(id, A, leased(length)), 1).await;
            won_in_the_end(&client, id, B, length, ENDS).await?;
            return Ok(true);
        }
    }
    let sent = Instant::now();
    let held = match start {
        Start::Renew | Start::RenewShorter => client.renew(id, A, length).ok(RENEWS).await?,
        _ => {
            let claim = client.claim(id, A, length);
            claim.is(Answer::Won, SENT_AGAIN).await.map(|()| true)?
        }
    };
    // Over by then, there is nothing to renew.
    let anew = matches!(start, Start::ClaimAgain | Start::Renew);
    if anew && first.elapsed() >= nearly(length) {
        return Ok(false);
    }
    if !held {
        return Err(unlike(RENEWS, id, Renew(A), Answer::False, &[Answer::True]));
    }

    let rule = if anew { LEASE_ANEW } else { LEASE };
    let Some(won) = until_lost(&client, id, B, sent, length, rule).await? else {
        return Ok(false);
    };
    client.seen(id).is(false, NO_EFFECT).await?;
    if start == Start::Claim {
        // A claim that took the place of another has an end as well.
        let won = until_lost(&client, id, C, won, length, LEASE).await?;
        return Ok(won.is_some());
    }
    let held = client.renew(id, B, LONG).ok(RENEWS).await?;
    if won.elapsed() >= nearly(length) {
        return Ok(false);
    }
    if !held {
        return Err(unlike(RENEWS, id, Renew(B), Answer::False, &[Answer::True]));
    }
    // Late commands of the one who lost it.
    client.renew(id, A, LONG).is(false, TAKEN).await?;
    client.release(id, A).is(false, TAKEN).await?;
    client.claim(id, A, LONG).is(Answer::Busy, TAKEN).await?;
    client.renew(id, B, LONG).is(true, TAKEN).await?;
    client.complete(id, A).is(false, COMPLETE_NOT).await?;
    client.seen(id).is(true, COMPLETE_NOT).await?;
    client.renew(id, B, LONG).is(false, RENEW_NOT).await?;
    client.complete(id, B).ok(COMPLETE_TWICE).await?;
    client.release(id, B).is(false, RELEASE_NOT).await?;
    client.seen(id).is(true, RELEASE_NOT).await?;
    client.claim(id, C, LONG).is(Answer::Done, DONE).await?;
    Ok(true)
}

/// Has another owner claim an id until he wins it, and answers when he sent the claim that won; `None`
/// where nothing could be told. The claim that holds it was answered just now.
async fn until_lost<St: ClaimStore>(
    client: &Client<St>,
    id: &MessageId,
    other: Owner,
    sent: Instant,
    length: Duration,
    rule: &str,
) -> Result<Option<Instant>, Breach> {
    let answered = Instant::now();
    let (mut last, mut too_long) = (Duration::ZERO, 0);
    let breach = |rule, answer: String| {
        let answered = format!("{} → {answer}", Command::Claim(other));
        Err(Breach::new(rule, id, answered))
    };
    loop {
        let asked = Instant::now();
        let answer = client.claim(id, other, length).ok(rule).await?;
        // An answer younger than the lease is always Busy, however long it took.
        let age = sent.elapsed();
        match answer {
            Claim::Won if age < nearly(length) => {
                return breach(rule, format!("Won, {age:?} into a lease of {length:?}"));
            }
            Claim::Won => {
                // Late enough that one which was not renewed is over, even if it took a quarter longer.
                return Ok((last >= length / 5 * 4).then_some(asked));
            }
            Claim::Done => {
                return breach(
                    NO_EFFECT,
                    format!("Done, {age:?} into a lease of {length:?}"),
                );
            }
            Claim::Busy { retry_after } => {
                let left = length.saturating_sub(asked - answered);
                let limit = left + length / 4 + Duration::from_millis(100);
                // For once, such as behind a lock, a store may not be able to tell.
                too_long = if retry_after > limit { too_long + 1 } else { 0 };
                if retry_after.is_zero() || too_long == 3 {
                    let answer = format!("Busy for {retry_after:?}, with {left:?} left");
                    return breach(RETRY, answer);
                }
                // By when it was asked: an answer that took long is no wrong one.
                let asked = asked - answered;
                if asked > 5 * length + Duration::from_secs(5) {
                    let answer = format!("Busy, {asked:?} into a lease of {length:?}");
                    return breach(ENDS, answer);
                }
            }
        }
        if age < nearly(length) {
            last = age;
        }
        sleep(length / 25).await;
    }
}

async fn won_in_the_end<St: ClaimStore>(
    client: &Client<St>,
    id: &MessageId,
    owner: Owner,
    length: Duration,
    rule: &str,
) -> Result<(), Breach> {
    let (start, limit) = (Instant::now(), 5 * length + Duration::from_secs(5));
    loop {
        let waited = start.elapsed();
        match client.claim(id, owner, length).told(rule, length).await? {
            Answer::Won => return Ok(()),
            Answer::Busy if waited < limit => sleep(length / 25).await,
            answer => {
                let command = Command::Claim(owner);
                let breach = unlike(rule, id, command, answer, &[Answer::Won]);
                return Err(breach.add(&format!(", {waited:?} later")));
            }
        }
    }
}

async fn shortest<St: ClaimStore>(client: Client<St>, id: MessageId) -> Result<bool, Breach> {
    let claim = client.claim(&id, A, Lease::MIN);
    claim.is(Answer::Won, SHORTEST).await?;
    for next in [B, C] {
        won_in_the_end(&client, &id, next, Lease::MIN, SHORTEST).await?;
    }
    Ok(true)
}

/// Marks a claimed id done and looks whether it still is when the lease is over.
async fn stays<St: ClaimStore>(
    client: Client<St>,
    id: MessageId,
    length: Duration,
    command: Command,
) -> Result<bool, Breach> {
    client.claim(&id, A, length).is(Answer::Won, WON).await?;
    client.run(&id, command, STAYS).await?;
    for _ in 0..2 {
        sleep(length / 4 * 5).await;
        client.seen(&id).is(true, STAYS).await?;
        client.claim(&id, C, LONG).is(Answer::Done, STAYS).await?;
    }
    Ok(true)
}

/// Sends a command after the end of a claim.
async fn ended<St: ClaimStore>(
    client: Client<St>,
    number: usize,
    length: Duration,
    command: Command,
) -> Result<bool, Breach> {
    let (_, _, rule) = State::Free.step(command);
    let rule = format!("{AFTER_END}, {rule}");
    let mut last = Ok(true);
    for (attempt, patience) in patience(length).into_iter().enumerate() {
        let mut followed = Followed::new(&client, number + attempt);
        let claim = client.claim(&followed.id, A, length);
        claim.is(Answer::Won, WON).await?;
        sleep(patience).await;
        // What is wrong of a claim that has ended may be right of one that is alive.
        last = match followed.send(command, Some(&rule)).await {
            Ok(()) => followed.look(&rule).await,
            Err(breach) => Err(breach),
        }
        .map(|()| true);
        if last.is_ok() {
            break;
        }
    }
    last
}

/// Has many claim at the end of a claim.
async fn race_at_end<St: ClaimStore>(
    client: Client<St>,
    number: usize,
    length: Duration,
    completed: bool,
) -> Result<bool, Breach> {
    for (attempt, patience) in patience(length).into_iter().enumerate() {
        let id = &id(number + attempt);
        client.claim(id, A, length).is(Answer::Won, WON).await?;
        sleep(patience).await;
        if completed {
            let rule = format!("{AFTER_END}, {MARK_STAYS}");
            let complete = || Some((client.complete(id, B), false));
            race(&client, id, &rule, complete).await?;
            client.seen(id).is(true, &rule).await?;
            client.claim(id, C, LONG).is(Answer::Done, &rule).await?;
            return Ok(true);
        }
        let rule = format!("{AFTER_END}, {ONE_WINNER}");
        // Without a winner it was alive, as it seems.
        if let [winner] = race(&client, id, &rule, || None).await?[..] {
            client.renew(id, winner, LONG).is(true, &rule).await?;
            client.claim(id, C, LONG).is(Answer::Busy, &rule).await?;
            return Ok(true);
        }
    }
    let answered = format!("claim by {AT_ONCE} → Won by nobody");
    Err(Breach::new(ENDS, &id(number), answered))
}

/// Watches what was marked done after a claim that took longer than the TTL, until it is gone. Whether
/// it could be told.
async fn life<St: ClaimStore>(
    client: Client<St>,
    id: MessageId,
    ttl: Duration,
    command: Command,
) -> Result<bool, Breach> {
    let id = &id;
    client.claim(id, A, LONG).is(Answer::Won, WON).await?;
    sleep(ttl / 2 * 3).await;
    client
        .claim(id, B, LONG)
        .is(Answer::Busy, TTL_LEASE)
        .await?;
    client.renew(id, A, LONG).is(true, TTL_LEASE).await?;

    let sent = Instant::now();
    let answer = client.run(id, command, COMPLETES).await?;
    if answer == Answer::False {
        return Err(unlike(TTL_LEASE, id, command, answer, &[Answer::True]));
    }
    let claim = client.claim(id, C, LONG).told(TTL_DONE, LONG).await?;
    if sent.elapsed() >= nearly(ttl) {
        return Ok(false);
    }
    if claim != Answer::Done {
        let command = Command::Claim(C);
        return Err(unlike(TTL_DONE, id, command, claim, &[Answer::Done]));
    }
    let mut last = Duration::ZERO;
    loop {
        let seen = client.seen(id).ok(TTL_DONE).await?;
        let age = sent.elapsed();
        if age >= nearly(ttl) {
            break;
        }
        if !seen {
            let answered = format!("seen → false, {age:?} into its TTL of {ttl:?}");
            return Err(Breach::new(TTL_DONE, id, answered));
        }
        last = age;
        sleep(ttl / 25).await;
    }
    if last < ttl / 5 * 4 {
        return Ok(false);
    }
    gone(&client, id, ttl, EXPIRES).await?;
    let rule = format!("{AFTER_TTL}, {WON}");
    client.claim(id, C, LONG).is(Answer::Won, &rule).await?;
    Ok(true)
}

/// Sends a command after the end of a done record. Whether it could be told.
async fn expired<St: ClaimStore>(
    client: Client<St>,
    number: usize,
    ttl: Duration,
    command: Command,
) -> Result<bool, Breach> {
    let mut followed = Followed::new(&client, number);
    client
        .claim(&followed.id, C, LONG)
        .is(Answer::Won, WON)
        .await?;
    client.complete(&followed.id, C).is(true, COMPLETES).await?;
    gone(&client, &followed.id, ttl, EXPIRES).await?;

    let (_, next, rule) = State::Free.step(command);
    let rule = format!("{AFTER_TTL}, {rule}");
    let sent = Instant::now();
    followed.send(command, Some(&rule)).await?;
    if !matches!(next, State::Done { .. }) {
        followed.look(&rule).await?;
        return Ok(true);
    }
    let seen = client.seen(&followed.id).ok(&rule).await?;
    if sent.elapsed() >= nearly(ttl) {
        return Ok(false);
    }
    match seen {
        true => Ok(true),
        false => Err(unlike(
            &rule,
            &followed.id,
            Seen,
            Answer::False,
            &[Answer::True],
        )),
    }
}

/// Leaves a done record alone until its end, since some stores look after it when they are asked for it,
/// then claims it.
async fn unasked<St: ClaimStore>(
    client: Client<St>,
    id: MessageId,
    ttl: Duration,
) -> Result<bool, Breach> {
    client.complete(&id, A).is(false, COMPLETE_NOT).await?;
    let rule = format!("{AFTER_TTL}, {WON}");
    let mut answer = Answer::Done;
    for patience in patience(ttl) {
        sleep(patience).await;
        answer = client.claim(&id, B, LONG).told(&rule, LONG).await?;
        if answer == Answer::Won {
            return Ok(true);
        }
    }
    let command = Command::Claim(B);
    Err(unlike(&rule, &id, command, answer, &[Answer::Won]))
}
