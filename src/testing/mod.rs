//! The contract of a [`Store`] as a test, and that of a [`ClaimStore`](crate::ClaimStore), for those
//! who bring their own.
//!
//! # What is asked of a store
//!
//! Three commands on a set of ids: [`seen`](Store::seen), [`remember`](Store::remember),
//! [`forget`](Store::forget). Everything the layer promises rests on these rules:
//!
//! * **Ids are bytes.** `AbC`, `abc` and `abc` with a blank behind it are three messages. Two ids
//!   that a store takes for one mean a message that is skipped though it never ran: lost.
//! * **Remembered means remembered.** Once `remember` has answered Ok, every clone and every other
//!   worker is told so, until the TTL has passed since that command was sent.
//! * **`remember` may be sent twice**, by the layer's own retries among others. The second is no
//!   error, and the time starts anew.
//! * **An expired id counts as never seen**, and can be remembered again.
//! * **Commands may be dropped** at any time, unpolled or half-way. The command itself may then
//!   have had its effect or not; no other command loses its answer or gets a foreign one.
//! * **In doubt, an error.** An error means *unknown*, and the message comes again. A `false` that
//!   was a guess runs it twice, a `true` that was a guess loses it.
//!
//! # How to write one
//!
//! A remote store answers with a boxed future, which owns what it needs:
//!
//! ```
//! use std::{future::Future, io, pin::Pin};
//! use tower_idempotency::{MessageId, Store};
//! # #[derive(Clone)]
//! # struct Client;
//! # impl Client {
//! #     async fn exists(&self, _: &str) -> io::Result<bool> { Ok(false) }
//! #     async fn put(&self, _: &str) -> io::Result<()> { Ok(()) }
//! #     async fn delete(&self, _: &str) -> io::Result<()> { Ok(()) }
//! # }
//!
//! #[derive(Clone)]
//! struct Remote {
//!     client: Client, // a handle: clones share the connection
//! }
//!
//! impl Store for Remote {
//!     type Error = io::Error;
//!     type Future<T: Send + 'static> = Pin<Box<dyn Future<Output = io::Result<T>> + Send>>;
//!
//!     fn seen(&self, id: &MessageId) -> Self::Future<bool> {
//!         let (client, id) = (self.client.clone(), id.clone());
//!         Box::pin(async move { client.exists(&id).await })
//!     }
//!
//!     fn remember(&self, id: &MessageId) -> Self::Future<()> {
//!         let (client, id) = (self.client.clone(), id.clone());
//!         Box::pin(async move { client.put(&id).await })
//!     }
//!
//!     fn forget(&self, id: &MessageId) -> Self::Future<()> {
//!         let (client, id) = (self.client.clone(), id.clone());
//!         Box::pin(async move { client.delete(&id).await })
//!     }
//! }
//! ```
//!
//! # What goes wrong
//!
//! * *Read, then write.* Between the two another worker writes. Each command is one statement, one
//!   script, one request.
//! * *The worker's clock.* Clocks of two hosts differ by more than a short TTL. The deadline is
//!   computed where the record is, in the statement that writes it.
//! * *Cutting ids.* A column of 255 characters makes one message of two long ids. What does not
//!   fit is refused with an error, or hashed; then a short id that is spelled like a hash must not
//!   meet a long one.
//! * *Collations.* The usual ones of MySQL fold case and accents and ignore trailing blanks.
//!   Binary columns compare bytes. PostgreSQL's `text` holds no NUL.
//! * *Patterns.* An id may contain `*`, `%`, quotes, braces: it is bound as a parameter, and never
//!   becomes a part of a pattern or a command.
//! * *A TTL at the edge.* Half a millisecond that is rounded to 0 means "at once" or "never",
//!   and `now + Duration::MAX` panics. Round up, and let what is too large mean never.
//! * *A connection that lost its place.* A reply nobody waited for is read as the answer to
//!   the next command.
//!
//! # How to test it
//!
//! [`store_contract`] asks for stores over records that are empty and their own, and panics at the
//! first broken rule: it names the rule, the id and the answer. It takes some seconds of
//! real time, which must not be paused, since it watches ids expire.
//!
//! ```
//! use std::{
//!     collections::HashMap,
//!     convert::Infallible,
//!     future::{Ready, ready},
//!     sync::{Arc, Mutex},
//!     time::{Duration, Instant},
//! };
//! use tower_idempotency::{MessageId, Store, testing::store_contract};
//!
//! #[derive(Clone)]
//! struct MyStore {
//!     ttl: Duration,
//!     // When each id ends; `None` is never.
//!     record: Arc<Mutex<HashMap<MessageId, Option<Instant>>>>,
//! }
//!
//! impl Store for MyStore {
//!     type Error = Infallible;
//!     type Future<T: Send + 'static> = Ready<Result<T, Infallible>>;
//!
//!     fn seen(&self, id: &MessageId) -> Self::Future<bool> {
//!         let record = self.record.lock().unwrap();
//!         let alive = |end: &Option<Instant>| end.is_none_or(|end| Instant::now() < end);
//!         ready(Ok(record.get(id).is_some_and(alive)))
//!     }
//!
//!     fn remember(&self, id: &MessageId) -> Self::Future<()> {
//!         let end = Instant::now().checked_add(self.ttl);
//!         self.record.lock().unwrap().insert(id.clone(), end);
//!         ready(Ok(()))
//!     }
//!
//!     fn forget(&self, id: &MessageId) -> Self::Future<()> {
//!         self.record.lock().unwrap().remove(id);
//!         ready(Ok(()))
//!     }
//! }
//!
//! // In a test: #[tokio::test(flavor = "multi_thread")]
//! # #[tokio::main]
//! # async fn main() {
//! store_contract(async |ttl| MyStore { ttl, record: Arc::default() }).await;
//! # }
//! ```
//!
//! A store with limits says so, and is held to what it does promise:
//!
//! ```no_run
//! # use tower_idempotency::{MemoryStore, testing::StoreContract};
//! # async fn check() {
//! # let make = async |_| MemoryStore::new();
//! StoreContract::new(make)
//!     .ids(|id| id.len() <= 255 && !id.contains('\0')) // refuses any other with an error
//!     .no_expiry() // its records stay for good
//!     .check()
//!     .await;
//! # }
//! ```
//!
//! # Claims
//!
//! A [`ClaimStore`](crate::ClaimStore) has four more commands, [`claim`](crate::ClaimStore::claim),
//! [`renew`](crate::ClaimStore::renew), [`complete`](crate::ClaimStore::complete) and
//! [`release`](crate::ClaimStore::release), and an id is free, claimed by an owner, or done:
//!
//! * **One wins.** Of many who claim an id at once, free or with a claim that has ended, exactly one
//!   is told `Won`. The others are told `Busy`, and `Done` where the effect did happen.
//! * **Claimed is not done**: not seen, and no longer claimed when the lease is over. There is no claim
//!   without an end.
//! * **The owner may ask again.** His own claim is won again and starts a new lease: the answer to the
//!   first one may have been lost.
//! * **`renew` and `release` touch what is held**: claimed, by this owner, not past its end. Elsewhere
//!   they change nothing and answer false, however late they come.
//! * **`complete` marks done whatever the owner**, and answers whether he held the id.
//! * **`remember` and `forget`** work on a claimed id as on any other.
//! * **The TTL counts from the mark**, the lease from its claim or renewal, and neither shortens or
//!   lengthens the other.
//!
//! What goes wrong, beside the above:
//!
//! * *Taking over by two steps.* "Has it ended?" and "then it is mine" let two in. The condition
//!   belongs into the statement that writes.
//! * *`release` as a plain delete.* It comes late, when the lease is over and another holds the id, or
//!   when the message is done, and drops the record of that.
//! * *`renew` as a plain update*, which brings back what has ended or makes done claimed again.
//! * *`complete` for the owner alone.* The effect happened. Without the mark it happens once more.
//! * *A done record that keeps the time of its claim*: it is forgotten with the lease, or the TTL has
//!   begun with the claim and is over when the handler is.
//! * *Affected rows.* Some databases count rows that were found, others those that changed. The answer
//!   is whose claim is there afterwards.
//!
//! [`claim_store_contract`] has it as a test, in addition to [`store_contract`]. It takes some seconds
//! of real time as well.
//!
//! ```
//! use std::{
//!     collections::HashMap,
//!     convert::Infallible,
//!     future::{Ready, ready},
//!     sync::{Arc, Mutex},
//!     time::{Duration, Instant},
//! };
//! use tower_idempotency::{
//!     Claim, ClaimStore, Lease, MessageId, Owner, Store, testing::claim_store_contract,
//! };
//!
//! #[derive(Clone)]
//! struct MyStore {
//!     ttl: Duration,
//!     record: Arc<Mutex<HashMap<MessageId, Entry>>>,
//! }
//!
//! #[derive(Clone, Copy)]
//! struct Entry {
//!     /// Who holds it; nobody holds what is done.
//!     owner: Option<Owner>,
//!     /// `None` is never.
//!     end: Option<Instant>,
//! }
//!
//! impl MyStore {
//!     /// One atomic step: what is recorded of an id, if that still counts, and what is from now on.
//!     fn step<T>(
//!         &self,
//!         id: &MessageId,
//!         step: impl FnOnce(&mut Option<Entry>) -> T,
//!     ) -> Ready<Result<T, Infallible>> {
//!         let mut record = self.record.lock().unwrap();
//!         let alive = |it: &Entry| it.end.is_none_or(|end| Instant::now() < end);
//!         let mut entry = record.remove(id).filter(alive);
//!         let answer = step(&mut entry);
//!         if let Some(entry) = entry {
//!             record.insert(id.clone(), entry);
//!         }
//!         ready(Ok(answer))
//!     }
//!
//!     fn done(&self) -> Option<Entry> {
//!         Some(Entry { owner: None, end: Instant::now().checked_add(self.ttl) })
//!     }
//! }
//!
//! fn held(owner: Owner, lease: Lease) -> Option<Entry> {
//!     Some(Entry { owner: Some(owner), end: Some(Instant::now() + lease.length()) })
//! }
//!
//! impl Store for MyStore {
//!     type Error = Infallible;
//!     type Future<T: Send + 'static> = Ready<Result<T, Infallible>>;
//!
//!     fn seen(&self, id: &MessageId) -> Self::Future<bool> {
//!         self.step(id, |entry| entry.is_some_and(|it| it.owner.is_none()))
//!     }
//!
//!     fn remember(&self, id: &MessageId) -> Self::Future<()> {
//!         self.step(id, |entry| *entry = self.done())
//!     }
//!
//!     fn forget(&self, id: &MessageId) -> Self::Future<()> {
//!         self.step(id, |entry| *entry = None)
//!     }
//! }
//!
//! impl ClaimStore for MyStore {
//!     fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<Claim> {
//!         self.step(id, |entry| match *entry {
//!             Some(Entry { owner: None, .. }) => Claim::Done,
//!             Some(Entry { owner: Some(other), end: Some(end) }) if other != owner => {
//!                 let left = end.saturating_duration_since(Instant::now());
//!                 Claim::Busy { retry_after: left.max(Duration::from_millis(1)) }
//!             }
//!             _ => {
//!                 *entry = held(owner, lease);
//!                 Claim::Won
//!             }
//!         })
//!     }
//!
//!     fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<bool> {
//!         self.step(id, |entry| match entry {
//!             Some(it) if it.owner == Some(owner) => {
//!                 *entry = held(owner, lease);
//!                 true
//!             }
//!             _ => false,
//!         })
//!     }
//!
//!     fn complete(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
//!         self.step(id, |entry| {
//!             let before = std::mem::replace(entry, self.done());
//!             before.is_some_and(|it| it.owner == Some(owner))
//!         })
//!     }
//!
//!     fn release(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
//!         self.step(id, |entry| {
//!             entry.take_if(|it| it.owner == Some(owner)).is_some()
//!         })
//!     }
//! }
//!
//! // In a test: #[tokio::test(flavor = "multi_thread")]
//! # #[tokio::main]
//! # async fn main() {
//! claim_store_contract(async |ttl| MyStore { ttl, record: Arc::default() }).await;
//! # }
//! ```

mod claims;

pub use self::claims::{ClaimStoreContract, claim_store_contract};

use crate::{error::BoxError, id::MessageId, store::Store};
use std::{
    any::Any,
    fmt,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};
use tokio::{
    task::{JoinHandle, yield_now},
    time::{sleep, timeout},
};

/// For what does not look at expiry.
const LONG: Duration = Duration::from_secs(3600);
/// The TTL that is watched first; each further try doubles it.
const SHORT: Duration = Duration::from_millis(700);
/// How often ids are watched expiring until a try was quick enough to tell.
const TRIES: u32 = 4;
/// How many commands are under way at once.
const AT_ONCE: usize = 64;

const UNKNOWN: &str = "an id that was never remembered is not seen (each record begins empty)";
const ASKING: &str = "to ask for an id does not remember it";
const REMEMBERED: &str = "what was remembered is seen";
const TWICE: &str = "remember may be sent twice";
const FORGOTTEN: &str = "what was forgotten is not seen";
const FORGET_NOTHING: &str = "to forget what is not there is no error";
const FORGET_OTHER: &str = "forget drops its own id and no other";
const AFTERWARDS: &str = "what was forgotten can be remembered again";
const CLONES: &str = "clones share one record";
const MOVED: &str = "a command may be polled by one task and then by another";
const TOGETHER: &str = "commands on one id may be under way together";
const OWN: &str = "each command takes effect, whoever else works on the record";
const ANSWERS: &str = "each command gets its own answer";
const BYTES: &str = "ids are compared by their bytes";
const REFUSED: &str = "an id that the store cannot hold is refused by remember and never seen";
const NO_HARM: &str = "an id that the store cannot hold touches no other";
const DROPPED: &str = "a dropped command harms no other";
const LIVES: &str = "an id is seen until its TTL has passed since remember was sent";
const RENEWS: &str = "remember starts the id's time anew";
const EXPIRES: &str = "an id is no longer seen at some time after its TTL, asked for or not";
const AGAIN: &str = "an expired id can be remembered again";
const TINY: &str = "a TTL below a millisecond is a short one";
const HUGE: &str = "a huge TTL means that ids never expire";

/// Checks that a store keeps the whole contract of [`Store`]: the short form of
/// [`StoreContract`].
///
/// `make` opens a store with the given TTL over a record of its own, which is empty. It is called
/// about a dozen times.
///
/// # Panics
///
/// When the store breaks a rule, and outside of a tokio runtime with its timer enabled.
///
/// # Cancel safety
///
/// Dropped, it leaves behind the commands that are under way, each until it is answered or its
/// time is out.
pub async fn store_contract<St: Store>(make: impl AsyncFn(Duration) -> St) {
    StoreContract::new(make).check().await;
}

/// Checks a store that has limits of its own.
///
/// See the [module docs](self) for an example.
#[must_use = "nothing is checked before `check`"]
pub struct StoreContract<M> {
    make: M,
    holds: Box<dyn Fn(&str) -> bool + Send + Sync>,
    expires: bool,
    limit: Duration,
}

impl<M> fmt::Debug for StoreContract<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreContract")
            .field("expires", &self.expires)
            .field("store_timeout", &self.limit)
            .finish_non_exhaustive()
    }
}

impl<M> StoreContract<M> {
    /// The whole contract, for the stores that `make` opens: each with the given TTL, over a record of
    /// its own, which is empty.
    pub fn new<St: Store>(make: M) -> Self
    where
        M: AsyncFn(Duration) -> St,
    {
        StoreContract {
            make,
            holds: Box::new(|_| true),
            expires: true,
            limit: Duration::from_secs(30),
        }
    }

    /// Says which ids the store can hold; every id unless set.
    ///
    /// Any other is to do no harm: `remember` answers an error, `seen` answers false or an error,
    /// nothing panics, and no other id is touched. Canonical UUIDs must be among those it holds.
    pub fn ids(mut self, holds: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.holds = Box::new(holds);
        self
    }

    /// Says that the store has no TTL: ids stay until they are forgotten, whatever `make` is
    /// given.
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
    pub async fn check<St: Store>(self)
    where
        M: AsyncFn(Duration) -> St,
    {
        if let Err(breach) = self.run().await {
            panic!("{breach}");
        }
    }

    /// The plain rules first, so that what is told of a broken store is the plainest rule it breaks.
    async fn run<St: Store>(&self) -> Result<(), Breach>
    where
        M: AsyncFn(Duration) -> St,
    {
        basics(&self.open(LONG).await).await?;
        clones(self.open(LONG).await).await?;
        answers(&self.open(LONG).await).await?;
        tasks(&self.open(LONG).await).await?;
        exact_ids(&self.open(LONG).await, &self.holds).await?;
        dropped(&self.open(LONG).await).await?;
        for ttl in [
            Duration::MAX,
            Duration::from_millis(i64::MAX as u64),
            Duration::from_secs(10_000 * 366 * 24 * 3600),
        ] {
            huge(&self.open(ttl).await).await?;
        }
        if self.expires {
            self.expiry().await?;
            tiny(&self.open(Duration::from_nanos(1)).await).await?;
        }
        Ok(())
    }

    async fn open<St: Store>(&self, ttl: Duration) -> Client<St>
    where
        M: AsyncFn(Duration) -> St,
    {
        Client {
            store: (self.make)(ttl).await,
            limit: self.limit,
        }
    }

    async fn expiry<St: Store>(&self) -> Result<(), Breach>
    where
        M: AsyncFn(Duration) -> St,
    {
        let mut ttl = SHORT;
        for _ in 0..TRIES {
            let client = self.open(ttl).await;
            let watches = [
                tokio::spawn(life(client.clone(), id(1), ttl, false)),
                tokio::spawn(life(client, id(2), ttl, true)),
            ];
            let mut told = true;
            for watch in watches {
                told &= watch.await.expect("a watch does not panic")?;
            }
            if told {
                return Ok(());
            }
            ttl *= 2;
        }
        let late = format!("all of it too late to tell, in {TRIES} tries up to {ttl:?}");
        Err(Breach::new(LIVES, &id(1), late))
    }
}

// ===== what was broken =====

/// A rule that was broken, by which answer.
#[derive(Debug)]
struct Breach {
    rule: String,
    id: String,
    answered: String,
}

impl Breach {
    fn new(rule: impl Into<String>, id: &str, answered: impl Into<String>) -> Self {
        Breach {
            rule: rule.into(),
            id: shown(id),
            answered: answered.into(),
        }
    }
}

impl fmt::Display for Breach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Breach { rule, id, answered } = self;
        write!(
            f,
            "the store breaks its contract\n      rule: {rule}\n        id: {id}\n  answered: {answered}"
        )
    }
}

/// In ASCII, so that ids which look alike are told apart, with both ends of a long one.
fn shown(id: &str) -> String {
    let escaped = id.escape_default().to_string();
    if escaped.len() <= 100 {
        return format!("\"{escaped}\"");
    }
    let (head, tail) = (&escaped[..60], &escaped[escaped.len() - 20..]);
    format!("\"{head}…{tail}\" ({} bytes)", id.len())
}

/// Why a command has no answer.
#[derive(Debug)]
enum Trouble {
    Error(BoxError),
    Late(Duration),
    Panic(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Trouble::Error(error) => {
                write!(f, "an error, {error}")?;
                let mut source = error.source();
                while let Some(error) = source {
                    write!(f, ": {error}")?;
                    source = error.source();
                }
                Ok(())
            }
            Trouble::Late(limit) => write!(f, "nothing within {limit:?}"),
            Trouble::Panic(message) => write!(f, "a panic, {message}"),
        }
    }
}

impl Trouble {
    fn panic(payload: &(dyn Any + Send)) -> Self {
        let message = payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        Trouble::Panic(message.unwrap_or("without a message").to_owned())
    }
}

// ===== commands =====

/// Sends each command from a task of its own, so that they are under way together.
#[derive(Clone)]
struct Client<St> {
    store: St,
    limit: Duration,
}

/// A command under way.
struct Reply<T> {
    /// With its owner, where it has one.
    command: String,
    id: MessageId,
    task: JoinHandle<Result<T, Trouble>>,
}

impl<St: Store> Client<St> {
    fn seen(&self, id: &MessageId) -> Reply<bool> {
        self.send("seen", id, St::seen)
    }

    fn remember(&self, id: &MessageId) -> Reply<()> {
        self.send("remember", id, St::remember)
    }

    fn forget(&self, id: &MessageId) -> Reply<()> {
        self.send("forget", id, St::forget)
    }

    /// The future is made here and polled elsewhere.
    fn send<T: Send + 'static>(
        &self,
        name: impl Into<String>,
        id: &MessageId,
        command: impl FnOnce(&St, &MessageId) -> St::Future<T>,
    ) -> Reply<T> {
        let task = match catch_unwind(AssertUnwindSafe(|| command(&self.store, id))) {
            Ok(future) => tokio::spawn(answer(future, self.limit)),
            Err(payload) => {
                let trouble = Trouble::panic(&*payload);
                tokio::spawn(async move { Err(trouble) })
            }
        };
        Reply {
            command: name.into(),
            id: id.clone(),
            task,
        }
    }

    /// The future is polled here first, then elsewhere.
    async fn send_moved<T: Send + 'static>(
        &self,
        name: impl Into<String>,
        id: &MessageId,
        command: impl FnOnce(&St, &MessageId) -> St::Future<T>,
    ) -> Reply<T> {
        let mut future = Box::pin(answer(command(&self.store, id), self.limit));
        let first = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await;
        let task = match first {
            Poll::Ready(answer) => tokio::spawn(async move { answer }),
            Poll::Pending => tokio::spawn(future),
        };
        Reply {
            command: name.into(),
            id: id.clone(),
            task,
        }
    }
}

async fn answer<F, T, E>(future: F, limit: Duration) -> Result<T, Trouble>
where
    F: Future<Output = Result<T, E>>,
    E: Into<BoxError>,
{
    match timeout(limit, future).await {
        Ok(answer) => answer.map_err(|error| Trouble::Error(error.into())),
        Err(_) => Err(Trouble::Late(limit)),
    }
}

impl<T> Reply<T> {
    async fn answer(self) -> Result<T, Trouble> {
        match self.task.await {
            Ok(answer) => answer,
            Err(error) if error.is_panic() => Err(Trouble::panic(&*error.into_panic())),
            Err(error) => Err(Trouble::Error(error.into())),
        }
    }

    /// Any answer that is no error.
    async fn ok(self, rule: &str) -> Result<T, Breach> {
        let (command, id) = (self.command.clone(), self.id.clone());
        self.answer()
            .await
            .map_err(|trouble| Breach::new(rule, &id, format!("{command} → {trouble}")))
    }
}

impl Reply<bool> {
    async fn is(self, expected: bool, rule: &str) -> Result<(), Breach> {
        let (command, id) = (self.command.clone(), self.id.clone());
        match self.ok(rule).await? {
            answer if answer == expected => Ok(()),
            answer => {
                let answered = format!("{command} → {answer}, not {expected}");
                Err(Breach::new(rule, &id, answered))
            }
        }
    }
}

fn unexpected(rule: &str, id: &MessageId, seen: bool) -> Breach {
    Breach::new(rule, id, format!("seen → {seen}, not {}", !seen))
}

/// Ids without pitfalls.
fn id(number: usize) -> MessageId {
    format!("{number:08x}-0000-4000-8000-000000000000").into()
}

fn ids(numbers: std::ops::Range<usize>) -> Vec<MessageId> {
    numbers.map(id).collect()
}

// ===== the rules =====

async fn basics<St: Store>(client: &Client<St>) -> Result<(), Breach> {
    let (one, other, none) = (&id(1), &id(2), &id(3));
    client.seen(one).is(false, UNKNOWN).await?;
    client.seen(one).is(false, ASKING).await?;
    client.forget(none).ok(FORGET_NOTHING).await?;

    client.remember(one).ok(REMEMBERED).await?;
    client.seen(one).is(true, REMEMBERED).await?;
    client.seen(one).is(true, REMEMBERED).await?;
    client.seen(other).is(false, UNKNOWN).await?;
    client.remember(one).ok(TWICE).await?;
    client.seen(one).is(true, TWICE).await?;
    client.remember(other).ok(REMEMBERED).await?;
    client.seen(other).is(true, REMEMBERED).await?;
    client.seen(one).is(true, REMEMBERED).await?;

    // Remembered twice, it is forgotten by one command.
    client.forget(one).ok(FORGOTTEN).await?;
    client.seen(one).is(false, FORGOTTEN).await?;
    client.seen(other).is(true, FORGET_OTHER).await?;
    client.forget(one).ok(FORGET_NOTHING).await?;
    client.seen(other).is(true, FORGET_OTHER).await?;
    client.remember(one).ok(AFTERWARDS).await?;
    client.seen(one).is(true, AFTERWARDS).await
}

async fn clones<St: Store>(client: Client<St>) -> Result<(), Breach> {
    let (one, other) = (&id(1), &id(2));
    let clone = client.clone();
    clone.remember(one).ok(CLONES).await?;
    client.seen(one).is(true, CLONES).await?;
    client.forget(one).ok(CLONES).await?;
    clone.seen(one).is(false, CLONES).await?;
    clone.remember(one).ok(CLONES).await?;
    // A clone outlives the store it was made of.
    drop(client);
    clone.seen(one).is(true, CLONES).await?;

    let moved = clone.send_moved("remember", other, St::remember).await;
    moved.ok(MOVED).await?;
    let moved = clone.send_moved("seen", other, St::seen).await;
    moved.is(true, MOVED).await?;
    let moved = clone.send_moved("forget", other, St::forget).await;
    moved.ok(MOVED).await?;
    clone.seen(other).is(false, MOVED).await
}

/// Asks for many ids at the same time: an answer that went to a neighbour is found.
async fn answers<St: Store>(client: &Client<St>) -> Result<(), Breach> {
    // One by one, so that what is wrong below is an answer.
    for known in ids(0..64) {
        client.remember(&known).ok(REMEMBERED).await?;
    }
    // Strides that are coprime to 128 bring them in ever other neighbourhoods.
    for stride in [1, 45, 77, 127] {
        let order = (0..128).map(|number| number * stride % 128);
        // 0..64 are known, 64..128 are not.
        let replies: Vec<_> = order
            .map(|number| (number < 64, client.seen(&id(number))))
            .collect();
        for (expected, reply) in replies {
            reply.is(expected, ANSWERS).await?;
        }
    }

    let [new, newer, old] = [200, 201, 0].map(id);
    let batch = [(&new, false), (&old, true), (&newer, false), (&old, true)];
    for order in permutations() {
        let replies = order.map(|at| (batch[at].1, client.seen(batch[at].0)));
        for (expected, reply) in replies {
            reply.is(expected, ANSWERS).await?;
        }
    }

    // The same command twice at once, then opposite ones.
    let twice = [client.remember(&new), client.remember(&new)];
    for reply in twice {
        reply.ok(TOGETHER).await?;
    }
    let twice = [client.seen(&new), client.seen(&new)];
    for reply in twice {
        reply.is(true, TOGETHER).await?;
    }
    let twice = [client.forget(&new), client.forget(&new)];
    for reply in twice {
        reply.ok(TOGETHER).await?;
    }
    client.seen(&new).is(false, TOGETHER).await?;
    for _ in 0..8 {
        let (remember, seen, forget) = (
            client.remember(&new),
            client.seen(&new),
            client.forget(&new),
        );
        remember.ok(TOGETHER).await?;
        seen.ok(TOGETHER).await?;
        forget.ok(TOGETHER).await?;
    }
    // Whichever was last, both still work.
    client.remember(&new).ok(TOGETHER).await?;
    client.seen(&new).is(true, TOGETHER).await?;
    client.forget(&new).ok(TOGETHER).await?;
    client.seen(&new).is(false, TOGETHER).await
}

/// The orders of four.
fn permutations() -> impl Iterator<Item = [usize; 4]> {
    (0..256)
        .map(|code| [code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6])
        .filter(|order| (0..4).all(|at| order.contains(&at)))
}

/// Many tasks work on ids of their own, and on some that they share.
async fn tasks<St: Store>(client: &Client<St>) -> Result<(), Breach> {
    let shared = ids(0..3);
    let tasks: Vec<_> = (0..AT_ONCE)
        .map(|task| {
            let (client, shared, own) = (client.clone(), shared[task % 3].clone(), id(100 + task));
            tokio::spawn(async move {
                for _ in 0..3 {
                    client.seen(&own).is(false, OWN).await?;
                    let both = (client.remember(&shared), client.remember(&own));
                    both.0.ok(OWN).await?;
                    both.1.ok(OWN).await?;
                    let both = (client.seen(&shared), client.seen(&own));
                    both.0.ok(OWN).await?;
                    both.1.is(true, OWN).await?;
                    let both = (client.forget(&shared), client.forget(&own));
                    both.0.ok(OWN).await?;
                    both.1.ok(OWN).await?;
                    client.seen(&own).is(false, OWN).await?;
                }
                client.remember(&own).ok(OWN).await
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("a task of the kit does not panic")?;
    }
    // Every task forgot it after it remembered it.
    seen_all(client, &shared, |_| false, OWN).await?;
    let own = ids(100..100 + AT_ONCE);
    seen_all(client, &own, |_| true, OWN).await
}

/// Remembers half of the ids, in ten steps each time another half, and checks that exactly these
/// are seen.
async fn exact_ids<St: Store>(
    client: &Client<St>,
    holds: &(dyn Fn(&str) -> bool + Send + Sync),
) -> Result<(), Breach> {
    let (held, refused): (Vec<_>, Vec<_>) = nasty_ids().into_iter().partition(|(_, id)| holds(id));
    let ids: Vec<_> = held.iter().map(|(_, id)| id.clone()).collect();
    seen_all(client, &ids, |_| false, UNKNOWN).await?;

    // Each id is in five of the ten halves, and no two are in the same five. So for any two there is
    // a half with the one and without the other, and another the other way round.
    let codes: Vec<u32> = (0..1 << 10)
        .filter(|code: &u32| code.count_ones() == 5)
        .collect();
    assert!(codes.len() >= ids.len(), "too many ids for ten halves");
    for step in 0..10 {
        let within = |at: usize| codes[at] >> step & 1 == 1;
        let half = |wanted| {
            let at = (0..ids.len()).filter(move |at| within(*at) == wanted);
            at.map(|at| ids[at].clone()).collect::<Vec<_>>()
        };
        let (half, rest) = (half(true), half(false));
        remember_all(client, &half, BYTES).await?;
        exactly(client, &held, within).await?;
        remember_all(client, &rest, BYTES).await?;
        forget_all(client, &half, BYTES).await?;
        exactly(client, &held, |at| !within(at)).await?;
        forget_all(client, &rest, BYTES).await?;
    }
    exactly(client, &held, |_| false).await?;

    // What it cannot hold does no harm to what it holds.
    let even = |at: usize| at % 2 == 0;
    let evens: Vec<_> = ids.iter().step_by(2).cloned().collect();
    remember_all(client, &evens, BYTES).await?;
    for (_, id) in &refused {
        let seen = |answer: Result<bool, Trouble>| match answer {
            Ok(false) | Err(Trouble::Error(_)) => Ok(()),
            Ok(true) => Err(unexpected(REFUSED, id, true)),
            Err(trouble) => Err(Breach::new(REFUSED, id, format!("seen → {trouble}"))),
        };
        seen(client.seen(id).answer().await)?;
        match client.remember(id).answer().await {
            Err(Trouble::Error(_)) => {}
            Ok(()) => return Err(Breach::new(REFUSED, id, "remember → Ok, not an error")),
            Err(trouble) => {
                return Err(Breach::new(REFUSED, id, format!("remember → {trouble}")));
            }
        }
        seen(client.seen(id).answer().await)?;
    }
    seen_all(client, &ids, even, NO_HARM).await?;
    for (_, id) in &refused {
        match client.forget(id).answer().await {
            Ok(()) | Err(Trouble::Error(_)) => {}
            Err(trouble) => return Err(Breach::new(REFUSED, id, format!("forget → {trouble}"))),
        }
    }
    seen_all(client, &ids, even, NO_HARM).await
}

/// Checks that exactly these are seen.
async fn exactly<St: Store>(
    client: &Client<St>,
    ids: &[(&str, MessageId)],
    remembered: impl Fn(usize) -> bool,
) -> Result<(), Breach> {
    for (chunk, within) in ids.chunks(AT_ONCE).enumerate() {
        let replies: Vec<_> = within.iter().map(|(_, id)| client.seen(id)).collect();
        for (at, reply) in replies.into_iter().enumerate() {
            let (kind, id) = &within[at];
            let rule = format!("{BYTES}: {kind}");
            let seen = reply.ok(&rule).await?;
            if seen == remembered(chunk * AT_ONCE + at) {
                continue;
            }
            let mut breach = unexpected(&rule, id, seen);
            // Which other id it is mixed up with: the one whose forget drops it.
            if !seen {
                client.remember(id).ok(BYTES).await?;
            }
            let others = ids
                .iter()
                .enumerate()
                .filter(|(at, _)| remembered(*at) == seen);
            for (_, (_, other)) in others.filter(|(_, (_, other))| other != id) {
                client.forget(other).ok(BYTES).await?;
                if !client.seen(id).ok(BYTES).await? {
                    breach.answered += &format!(", mixed up with {}", shown(other));
                    break;
                }
            }
            return Err(breach);
        }
    }
    Ok(())
}

/// Drops commands, unpolled and after some polls, between others that are not dropped.
async fn dropped<St: Store>(client: &Client<St>) -> Result<(), Breach> {
    let [known, unknown, victim] = &[1, 2, 3].map(id);
    client.remember(known).ok(REMEMBERED).await?;
    for polls in 0..5 {
        for command in 0..4 {
            let [before, after] = &[0, 4].map(|offset| id(100 + 8 * polls + offset + command));
            let under_way = client.remember(before);
            let questions = [
                (true, client.seen(known)),
                (false, client.seen(unknown)),
                (true, client.seen(known)),
            ];
            let store = &client.store;
            match command {
                0 => begin(store.seen(known), polls).await,
                1 => begin(store.seen(unknown), polls).await,
                2 => begin(store.remember(victim), polls).await,
                _ => begin(store.forget(victim), polls).await,
            }
            // What the dropped one did, or still does, to its own id is not known. If its answer is
            // taken for that of one of these, some are wrong.
            client.remember(after).ok(DROPPED).await?;
            client.seen(unknown).is(false, DROPPED).await?;
            client.seen(known).is(true, DROPPED).await?;
            client.seen(unknown).is(false, DROPPED).await?;
            client.seen(after).is(true, DROPPED).await?;
            under_way.ok(DROPPED).await?;
            for (expected, question) in questions {
                question.is(expected, DROPPED).await?;
            }
            client.seen(before).is(true, DROPPED).await?;
            client.forget(before).ok(DROPPED).await?;
            client.seen(before).is(false, DROPPED).await?;
            client.seen(victim).ok(DROPPED).await?;
        }
    }
    let afters: Vec<_> = ids(100..140)
        .chunks(4)
        .skip(1)
        .step_by(2)
        .flatten()
        .cloned()
        .collect();
    seen_all(client, &afters, |_| true, DROPPED).await
}

/// Polls so many times at most.
async fn begin<F: Future>(future: F, polls: usize) {
    let mut future = pin!(future);
    for _ in 0..polls {
        if poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_ready())).await {
            return;
        }
        yield_now().await;
    }
}

async fn huge<St: Store>(client: &Client<St>) -> Result<(), Breach> {
    client.remember(&id(1)).ok(HUGE).await?;
    client.seen(&id(1)).is(true, HUGE).await?;
    client.remember(&id(1)).ok(HUGE).await?;
    client.seen(&id(1)).is(true, HUGE).await?;
    client.forget(&id(1)).ok(HUGE).await?;
    client.seen(&id(1)).is(false, HUGE).await
}

async fn tiny<St: Store>(client: &Client<St>) -> Result<(), Breach> {
    for _ in 0..3 {
        client.remember(&id(1)).ok(TINY).await?;
        client.seen(&id(1)).ok(TINY).await?;
    }
    gone(client, &id(1), Duration::ZERO, TINY).await?;
    client.forget(&id(1)).ok(TINY).await
}

/// Watches an id from when it is remembered, or renewed, until it is gone. Whether it could be told:
/// on a busy machine the TTL may be over before anything was asked.
async fn life<St: Store>(
    client: Client<St>,
    id: MessageId,
    ttl: Duration,
    renew: bool,
) -> Result<bool, Breach> {
    let rule = if renew { RENEWS } else { LIVES };
    let mut sent = Instant::now();
    client.remember(&id).ok(rule).await?;
    if renew {
        sleep(ttl / 2).await;
        let again = Instant::now();
        client.remember(&id).ok(rule).await?;
        // Gone by then, there is nothing to renew.
        if sent.elapsed() >= ttl {
            return Ok(false);
        }
        sent = again;
    }

    // An answer younger than the TTL is never false, however long it took; but for the hundredth
    // by which two clocks may differ.
    let mut last = Duration::ZERO;
    loop {
        let seen = client.seen(&id).ok(rule).await?;
        let age = sent.elapsed();
        if age >= ttl - ttl / 100 {
            break;
        }
        if !seen {
            let answered = format!("seen → false, {age:?} into its TTL of {ttl:?}");
            return Err(Breach::new(rule, &id, answered));
        }
        last = age;
        sleep(ttl / 25).await;
    }
    // Late enough that one which was not renewed is gone, even if it lives a quarter longer.
    if last < ttl / 5 * 4 {
        return Ok(false);
    }

    gone(&client, &id, ttl, EXPIRES).await?;
    let sent = Instant::now();
    client.remember(&id).ok(AGAIN).await?;
    let seen = client.seen(&id).ok(AGAIN).await?;
    let in_time = sent.elapsed() < ttl / 2;
    if in_time && !seen {
        return Err(unexpected(AGAIN, &id, seen));
    }
    gone(&client, &id, ttl, EXPIRES).await?;
    client.forget(&id).ok(FORGET_NOTHING).await?;
    Ok(in_time)
}

/// Waits until an id is not seen any more. Some stores look only now and then.
async fn gone<St: Store>(
    client: &Client<St>,
    id: &MessageId,
    ttl: Duration,
    rule: &str,
) -> Result<(), Breach> {
    let (start, limit) = (Instant::now(), 4 * ttl + Duration::from_secs(5));
    loop {
        // When it was asked: an answer may take long.
        let waited = start.elapsed();
        if !client.seen(id).ok(rule).await? {
            return Ok(());
        }
        if waited > limit {
            let answered = format!("seen → true, {waited:?} later");
            return Err(Breach::new(rule, id, answered));
        }
        sleep((ttl / 25).max(Duration::from_millis(1))).await;
    }
}

// ===== many at once =====

async fn remember_all<St: Store>(
    client: &Client<St>,
    ids: &[MessageId],
    rule: &str,
) -> Result<(), Breach> {
    for chunk in ids.chunks(AT_ONCE) {
        let replies: Vec<_> = chunk.iter().map(|id| client.remember(id)).collect();
        for reply in replies {
            reply.ok(rule).await?;
        }
    }
    Ok(())
}

async fn forget_all<St: Store>(
    client: &Client<St>,
    ids: &[MessageId],
    rule: &str,
) -> Result<(), Breach> {
    for chunk in ids.chunks(AT_ONCE) {
        let replies: Vec<_> = chunk.iter().map(|id| client.forget(id)).collect();
        for reply in replies {
            reply.ok(rule).await?;
        }
    }
    Ok(())
}

async fn seen_all<St: Store>(
    client: &Client<St>,
    ids: &[MessageId],
    expected: impl Fn(usize) -> bool,
    rule: &str,
) -> Result<(), Breach> {
    for (chunk, ids) in ids.chunks(AT_ONCE).enumerate() {
        let replies: Vec<_> = ids.iter().map(|id| client.seen(id)).collect();
        for (at, reply) in replies.into_iter().enumerate() {
            let at = chunk * AT_ONCE + at;
            reply.is(expected(at), rule).await?;
        }
    }
    Ok(())
}

// ===== nasty ids =====

/// Ids that some store or other took for one another, by what they have in common.
#[rustfmt::skip] // one to a line otherwise
const NASTY: &[(&str, &[&str])] = &[
    ("case", &[
        "AbC", "abc", "ABC", "É", "é", "Σ", "σ", "ς", "I", "i", "İ", "ı",
    ]),
    ("blanks", &[
        "a", "a ", "a  ", " a", "a\t", "a\n", "a\r", "a\r\n", "a\u{a0}", "a\u{3000}", " ", "  ",
        "\t", "\u{a0}",
    ]),
    ("NUL and control characters", &[
        "a\0", "a\0\0", "a\0b", "a\0c", "ab", "\0", "\0a", "a\u{1}", "a\u{8}", "a\u{1a}",
        "a\u{1b}", "a\u{7f}", "a\u{85}", "a\nb", "a\r\nb",
    ]),
    ("accents and composition", &[
        "e", "e\u{301}", "e\u{300}", "Å", "\u{212b}", "가", "\u{1100}\u{1161}",
    ]),
    ("letters that are written in several ways", &[
        "ß", "ss", "ẞ", "ﬁ", "fi", "Æ", "AE", "ａ", "а", "1", "１", "①", "²", "2",
    ]),
    ("emoji", &["🦀", "👍", "👍🏽", "👨\u{200d}👩\u{200d}👧", "👨👩👧", "😀"]),
    ("invisible characters", &[
        "a\u{200b}", "a\u{200d}", "a\u{ad}", "\u{feff}a", "\u{feff}", "a\u{feff}", "\u{200f}a",
        "\u{202e}a", "a\u{2060}",
    ]),
    ("noncharacters", &[
        "\u{fffe}", "\u{ffff}", "\u{10ffff}", "\u{10fffe}", "\u{fffd}", "\u{e000}", "?",
    ]),
    ("quotes and placeholders", &[
        "'", "''", "\"", "`", "\\", "\\\\", "\\'", "\\0", "\\n", "%", "_", "a%", "a_", "%00",
        "%20", "$1", ":x", "@x", ";--", "' OR '1'='1", "#", "/*", "+",
    ]),
    ("signs with a meaning in keys and patterns", &[
        "{}", "{a}b", "{a}c", "{b}b", "*", "a*", ">", ".", "..", "a.b", "a..b", ":", "a:b",
        "a:b:c", "/", "a/b", "../a", "[a]", "a?", "a|b", "a,b", "~", "-", "$1\r\na\r\n",
        "*1\r\n$4\r\nPING\r\n",
    ]),
    ("numbers and names of nothing", &[
        "01", "1.0", "1e0", "+1", "0x1", "0", "-0", "null", "NULL", "true", "NaN",
        "18446744073709551616", "18446744073709551617",
    ]),
    ("spellings of a UUID", &[
        "f1e2d3c4-b5a6-4789-90ab-cdef01234567", "f1e2d3c4-b5a6-4789-90ab-cdef01234568",
        "F1E2D3C4-B5A6-4789-90AB-CDEF01234567", "F1e2d3c4-b5a6-4789-90ab-cdef01234567",
        "f1e2d3c4b5a6478990abcdef01234567", "{f1e2d3c4-b5a6-4789-90ab-cdef01234567}",
        "urn:uuid:f1e2d3c4-b5a6-4789-90ab-cdef01234567", "f1e2d3c4-b5a6-4789-90ab-cdef01234567 ",
        "f1e2d3c4_b5a6_4789_90ab_cdef01234567", "00000000-0000-0000-0000-000000000000",
    ]),
    ("what looks like the hash of another id", &[
        "sha256:", "SHA256:",
        // The hash of `sha256:`.
        "sha256:9fd714ce6f63c3b320c944b70e80a5d105fd2f3e2d30ae2fa81370e223f50d07",
        // That of `a\0b`.
        "sha256:59b271ae1bbcb1d31d41929817f4b16fb439eb4f31520b5ad1d5ce98920a7138",
        // Those of HASHED: with the sign, without it, in upper case; then the hash of the first.
        "sha256:15258faa6649aeec09f46e1af824138031c5adc24e7b2c586e4316c48056d92d",
        "15258faa6649aeec09f46e1af824138031c5adc24e7b2c586e4316c48056d92d",
        "sha256:15258FAA6649AEEC09F46E1AF824138031C5ADC24E7B2C586E4316C48056D92D",
        "sha256:ac8b838c1b3cfc0fd6f2828470cba0d18c4419477255ca8d1c33684715469795",
    ]),
];

/// Thirty-two of these are 256 bytes, of which the hashes above are.
const HASHED: &str = "long-id-";

/// With the name of their kind; all different, none empty.
fn nasty_ids() -> Vec<(&'static str, MessageId)> {
    let mut ids: Vec<(&str, MessageId)> = Vec::new();
    for (kind, spellings) in NASTY {
        ids.extend(spellings.iter().map(|id| (*kind, (*id).into())));
    }
    ids.push((
        "what looks like the hash of another id",
        HASHED.repeat(32).into(),
    ));
    // Pairs that differ in the last byte; the last three are short in characters, not in bytes.
    let lengths = [1, 35, 36, 37, 254, 255, 256, 257, 1024, 65_536].map(|bytes| ("x", bytes - 1));
    let wide = [("é", 254), ("漢", 254), ("🦀", 100)];
    for (sign, count) in lengths.into_iter().chain(wide) {
        let start: Arc<str> = sign.repeat(count).into();
        ids.extend(["y", "z"].map(|end| ("length", format!("{start}{end}").into())));
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nasty_ids_are_all_different_and_fit_the_halves() {
        let ids = nasty_ids();
        let distinct: std::collections::HashSet<_> = ids.iter().map(|(_, id)| id).collect();
        assert_eq!(distinct.len(), ids.len());
        assert!(ids.len() <= 252, "{}", ids.len());
        assert!(ids.iter().all(|(_, id)| !id.is_empty()));
    }

    #[test]
    fn four_have_twenty_four_orders() {
        assert_eq!(permutations().count(), 24);
    }

    #[test]
    fn a_long_id_is_shown_with_both_ends() {
        assert_eq!(shown("a\0é'"), r#""a\u{0}\u{e9}\'""#);
        let long = shown(&format!("{}y", "🦀".repeat(1000)));
        assert!(long.ends_with("y\" (4001 bytes)"), "{long}");
        assert!(long.len() < 120, "{long}");
    }
}
