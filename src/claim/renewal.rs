//! Renews the claims of a layer, all of them in one task.
//!
//! A claim is renewed from when it was won until its mark has been answered or its release is about to be
//! sent. Its lease is counted from before the command was sent that won or renewed it, so it ends
//! here no later than in the store.
//!
//! The task looks at the claims four times in each interval of renewal. It ends when there were none
//! since it last looked, and the next claim starts another one.

use crate::{
    call::{Limited, Shared, Timer},
    error::BoxError,
    event::Event,
    id::MessageId,
    store::{Claim, ClaimStore, Lease, Owner},
};
use hashbrown::HashTable;
use std::{
    collections::VecDeque,
    fmt,
    future::poll_fn,
    mem,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::{Instant, timeout},
};

/// How often the task looks at the claims in one interval of renewal.
const LOOKS: u32 = 4;

/// The longest time between two looks, so that no task stays for long when there is nothing to do.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How many renewals are under way at once, those aside that have taken longer than this: where a part of a
/// store gives no answer, the claims of the other parts are renewed.
const AT_ONCE: usize = 64;
const QUICK: Duration = Duration::from_millis(100);

/// Below this, the room of claims that have left stays.
const SMALL: usize = 1024;

/// The claims of a layer and its clones, and the task that renews them.
pub(super) struct Renewal<St> {
    inner: Arc<Inner<St>>,
}

struct Inner<St> {
    shared: Shared<St>,
    lease: Lease,
    /// How long one renewal may take: the next one must not come too late.
    limit: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    claims: HashTable<Held>,
    /// Whether a claim came since the task last looked.
    entered: bool,
    task: Option<Task>,
    /// The number of the last task.
    tasks: u64,
}

struct Task {
    number: u64,
    /// When it looks at the claims next.
    looks: Instant,
}

struct Held {
    owner: Owner,
    id: MessageId,
    /// From when its lease is counted.
    since: Instant,
    /// The task that is renewing it at the moment.
    sending: Option<u64>,
    /// The mark was sent: it may be done, and by us.
    marking: bool,
    /// Its call has left and keeps what it holds: a renewal that is under way is the last one.
    kept: bool,
    /// Where its call was polled when it was won.
    runtime: Option<Handle>,
}

impl<St> Renewal<St> {
    pub(super) fn lease(&self) -> Lease {
        self.inner.lease
    }
}

impl<St: ClaimStore> Renewal<St> {
    pub(super) fn new(shared: Shared<St>, lease: Lease) -> Self {
        let every = lease.renewed_every();
        Renewal {
            inner: Arc::new(Inner {
                limit: shared.limit.map_or(every, |limit| limit.min(every)),
                shared,
                lease,
                state: Mutex::default(),
            }),
        }
    }

    /// Renews this claim from now on. It was won by a command that was sent at `since`.
    ///
    /// Outside of a runtime it is held for the time of one lease, unless a task is there already.
    pub(super) fn enter(&self, owner: Owner, id: &MessageId, since: Instant) {
        let here = Handle::try_current().ok();
        let mut state = self.inner.lock();
        match state.find(owner) {
            // It was over, and was won again.
            Some(held) => {
                held.since = held.since.max(since);
                held.runtime = here.clone();
            }
            None => {
                let held = Held {
                    owner,
                    id: id.clone(),
                    since,
                    sending: None,
                    marking: false,
                    kept: false,
                    runtime: here.clone(),
                };
                state
                    .claims
                    .insert_unique(hash(owner), held, |held| hash(held.owner));
            }
        }
        state.entered = true;
        // One that is late goes on nowhere: its runtime has ended, or nobody drives it.
        let patience = self.inner.lease.renewed_every();
        let there = |task: &Task| since < task.looks + patience;
        if state.task.as_ref().is_some_and(there) {
            return;
        }
        let Some(runtime) = here else {
            return;
        };
        let task = self.inner.task(&mut state);
        // Where the runtime is shutting down the task is dropped at once, which takes the lock.
        drop(state);
        runtime.spawn(task.run());
    }

    /// Whether it is held, by our own count.
    pub(super) fn holds(&self, owner: Owner) -> bool {
        let length = self.inner.lease.length();
        let mut state = self.inner.lock();
        let held = state.find(owner);
        held.is_some_and(|held| Instant::now() < held.since + length)
    }

    /// The mark is about to be sent.
    pub(super) fn marking(&self, owner: Owner) {
        if let Some(held) = self.inner.lock().find(owner) {
            held.marking = true;
        }
    }

    /// Renews this claim no longer, as it is about to be released or is done. Answers until when it is held by
    /// our own count; `None` for a claim whose loss was reported.
    pub(super) fn leave(&self, owner: Owner) -> Option<Instant> {
        let held = self.inner.lock().remove(owner)?;
        Some(held.since + self.inner.lease.length())
    }

    /// Renews this claim no longer, and leaves it to end with its lease.
    pub(super) fn keep(&self, owner: Owner) {
        let mut state = self.inner.lock();
        match state.find(owner) {
            // What is won by the renewal that is under way is not to be given back.
            Some(held) if held.sending.is_some() => held.kept = true,
            _ => {
                state.remove(owner);
            }
        }
    }
}

impl<St> Clone for Renewal<St> {
    fn clone(&self) -> Self {
        Renewal {
            inner: self.inner.clone(),
        }
    }
}

impl<St> fmt::Debug for Renewal<St> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewal")
            .field("lease", &self.inner.lease)
            .finish_non_exhaustive()
    }
}

// ===== impl State =====

/// Owners are random, so their bits are as good as a hash of them.
fn hash(owner: Owner) -> u64 {
    let bits = owner.to_bits();
    bits as u64 ^ (bits >> 64) as u64
}

impl State {
    fn find(&mut self, owner: Owner) -> Option<&mut Held> {
        self.claims
            .find_mut(hash(owner), |held| held.owner == owner)
    }

    /// Whether this claim is still to be renewed.
    fn renews(&mut self, owner: Owner) -> bool {
        self.find(owner).is_some_and(|held| !held.kept)
    }

    fn remove(&mut self, owner: Owner) -> Option<Held> {
        let entry = self
            .claims
            .find_entry(hash(owner), |held| held.owner == owner);
        Some(entry.ok()?.remove().0)
    }
}

// ===== impl Inner =====

impl<St> Inner<St> {
    /// Nothing panics under the lock that would leave half a state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<St: ClaimStore> Inner<St> {
    /// The time between two looks.
    fn pause(&self) -> Duration {
        (self.lease.renewed_every() / LOOKS).clamp(Duration::from_millis(1), LONGEST_PAUSE)
    }

    /// A task in the place of the one that there may be.
    fn task(self: &Arc<Self>, state: &mut State) -> Renewing<St> {
        state.tasks += 1;
        state.task = Some(Task {
            number: state.tasks,
            looks: Instant::now() + self.pause(),
        });
        Renewing {
            inner: self.clone(),
            number: state.tasks,
            started: false,
        }
    }

    /// Puts into `due` what has to be renewed, and says when to look again; `None` when there is
    /// nothing to do for this task any more.
    fn look(&self, number: u64, due: &mut VecDeque<(Owner, MessageId)>) -> Option<Instant> {
        let mut state = self.lock();
        let state = &mut *state;
        let task = state.task.as_mut().filter(|task| task.number == number)?;
        let entered = mem::take(&mut state.entered);
        if state.claims.is_empty() && !entered {
            state.task = None;
            return None;
        }
        let now = Instant::now();
        let next = now + self.pause();
        task.looks = next;
        // Of one that is kept, the last renewal was answered, or went with its task.
        let length = self.lease.length();
        let gone = |held: &Held, by: u64| by != number && held.since + length <= now;
        state
            .claims
            .retain(|held| !held.kept || held.sending.is_some_and(|by| !gone(held, by)));
        let (len, capacity) = (state.claims.len(), state.claims.capacity());
        if len < capacity / 8 && capacity > SMALL {
            state.claims.shrink_to(2 * len, |held| hash(held.owner));
        }
        for held in &mut state.claims {
            let idle = held.sending != Some(number) && !held.kept;
            if idle && held.since + self.lease.renewed_every() <= next {
                held.sending = Some(number);
                due.push_back((held.owner, held.id.clone()));
            }
        }
        Some(next)
    }

    /// Renews one claim, and holds the place among those under way while that is quick.
    async fn renew_quickly(
        self: Arc<Self>,
        number: u64,
        owner: Owner,
        id: MessageId,
        place: OwnedSemaphorePermit,
    ) {
        let mut renewal = pin!(self.renew(number, owner, id));
        let renewed = timeout(QUICK, renewal.as_mut()).await;
        drop(place);
        if renewed.is_err() {
            renewal.await;
        }
    }

    /// Renews one claim, or takes it again where the store says that it is not held.
    async fn renew(self: Arc<Self>, number: u64, owner: Owner, id: MessageId) {
        let unless_answered = Sending {
            inner: &self,
            number,
            owner,
        };
        if !self.lock().renews(owner) {
            return;
        }
        let mut sent = Instant::now();
        let store = &self.shared.store;
        let mut answer = self
            .within(store.renew(&id, owner, self.lease))
            .await
            .map(|held| if held { Renewed::Held } else { Renewed::Lost });
        let mut again = false;
        if let Ok(Renewed::Lost) = answer {
            // Not for a call that has left meanwhile: it would hold what was given back.
            if !self.lock().renews(owner) {
                return;
            }
            again = true;
            sent = Instant::now();
            answer =
                self.within(store.claim(&id, owner, self.lease))
                    .await
                    .map(|claim| match claim {
                        Claim::Won => Renewed::Held,
                        Claim::Done => Renewed::Done,
                        Claim::Busy { .. } => Renewed::Lost,
                    });
        }
        let left = {
            let mut state = self.lock();
            match state.find(owner) {
                Some(held) if held.kept => {
                    if held.sending == Some(number) {
                        state.remove(owner);
                    }
                    false
                }
                Some(held) => {
                    if held.sending == Some(number) {
                        held.sending = None;
                    }
                    let lost = match answer {
                        Ok(Renewed::Held) => {
                            held.since = held.since.max(sent);
                            false
                        }
                        Ok(Renewed::Done) if held.marking => false,
                        // Unless its call has won it anew since.
                        Ok(_) => held.since <= sent,
                        // Unknown, so it is tried again while it may be held.
                        Err(_) => held.since + self.lease.length() <= Instant::now(),
                    };
                    if lost {
                        state.remove(owner);
                    }
                    drop(state);
                    if lost {
                        self.shared.reporter.report(&Event::LeaseLost { id: &id });
                    }
                    false
                }
                None => true,
            }
        };
        mem::forget(unless_answered);
        // Taken again although its call had left: nobody would give it back.
        if left && again && !matches!(answer, Ok(Renewed::Done | Renewed::Lost)) {
            let _under_way = self.shared.left_over.begin();
            // The lease is the backstop.
            let _ = self.within(store.release(&id, owner)).await;
        }
    }

    async fn within<T, E: Into<BoxError>>(
        &self,
        command: impl Future<Output = Result<T, E>>,
    ) -> Result<T, BoxError> {
        let mut command = pin!(Limited::new(command));
        poll_fn(|cx| command.as_mut().poll(Some(self.limit), cx)).await
    }
}

/// What a renewal came to.
#[derive(Clone, Copy)]
enum Renewed {
    Held,
    Done,
    Lost,
}

/// A renewal that is dropped without an answer, by the end of its task or a panic of the store, is one
/// that failed.
struct Sending<'a, St> {
    inner: &'a Inner<St>,
    number: u64,
    owner: Owner,
}

impl<St> Drop for Sending<'_, St> {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        let number = Some(self.number);
        if let Some(held) = state.find(self.owner).filter(|it| it.sending == number) {
            held.sending = None;
        }
    }
}

// ===== the task =====

/// The task. When its runtime ends under it, it goes on where another claim is waited for; where none is,
/// the next claim starts another one.
struct Renewing<St: ClaimStore> {
    inner: Arc<Inner<St>>,
    number: u64,
    /// One that never ran, or cannot, is not followed by another.
    started: bool,
}

impl<St: ClaimStore> Renewing<St> {
    async fn run(mut self) {
        self.started = true;
        let (inner, number) = (self.inner.clone(), self.number);
        let mut due = VecDeque::new();
        let mut under_way = JoinSet::new();
        let places = Arc::new(Semaphore::new(AT_ONCE));
        let mut place = None;
        while let Some(next) = inner.look(number, &mut due) {
            // Without timers there are no renewals.
            let Some(mut timer) = Timer::start(next - Instant::now()) else {
                self.started = false;
                break;
            };
            poll_fn(|cx| {
                while !due.is_empty() {
                    let next = place.get_or_insert_with(|| {
                        let places = places.clone();
                        Box::pin(places.acquire_owned())
                    });
                    // Never closed.
                    let Poll::Ready(Ok(taken)) = next.as_mut().poll(cx) else {
                        break;
                    };
                    place = None;
                    if let Some((owner, id)) = due.pop_front() {
                        let renewal = inner.clone().renew_quickly(number, owner, id, taken);
                        under_way.spawn(renewal);
                    }
                }
                // One that panicked has failed, as its drop says.
                while let Poll::Ready(Some(_)) = under_way.poll_join_next(cx) {}
                timer.poll(cx)
            })
            .await;
        }
        // What is taken again for a call that has left is still to be released.
        while under_way.join_next().await.is_some() {}
    }

    /// Another one, on a runtime that has not ended: those where claims were won are tried one by one.
    fn follow(&self) {
        loop {
            let runtimes: Vec<_> = {
                let mut state = self.inner.lock();
                let claims = state.claims.iter_mut();
                claims
                    .filter_map(|held| Some((held.owner, held.runtime.clone()?)))
                    .collect()
            };
            if runtimes.is_empty() {
                return;
            }
            for (owner, runtime) in runtimes {
                let mut state = self.inner.lock();
                match state.find(owner) {
                    Some(held) => held.runtime = None,
                    None => continue,
                }
                let task = self.inner.task(&mut state);
                drop(state);
                // On one that has ended it is dropped at once.
                if !runtime.spawn(task.run()).is_finished() {
                    return;
                }
            }
        }
    }
}

impl<St: ClaimStore> Drop for Renewing<St> {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        let number = self.number;
        if state
            .task
            .as_ref()
            .is_some_and(|task| task.number == number)
        {
            state.task = None;
            drop(state);
            if self.started {
                self.follow();
            }
        }
    }
}
