//! Future types.

use super::{
    guard::{Due, Guard},
    layer::Settings,
};
use crate::{
    ack::{Ack, IsDone},
    call::{Resent, Timer, parked_for},
    error::{BoxError, Operation, Parked, StoreError, TimedOut},
    event::Event,
    id::MessageId,
    store::{Claim, ClaimStore, Owner},
};
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::time::Instant;
use tower_service::Service;

/// How often a claim that failed is sent again.
const CLAIM_RETRIES: u32 = 2;

/// How long a call waits before it claims again the first time; each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pin_project! {
    /// The response future of [`ClaimService`](super::ClaimService).
    ///
    /// # Cancel safety
    ///
    /// Dropped before the handler answered Ok, it has the claim released, so that a redelivery runs at
    /// once; while the handler is running, that is for
    /// [`ClaimLayer::on_drop`](super::ClaimLayer::on_drop) to say. Dropped after that and before the
    /// mark was answered, it has the mark made, and the claim renewed until then. Both are done by a
    /// task of the tokio runtime it is dropped on, or else of the one it was last polled on;
    /// [`ClaimLayer::drained`](super::ClaimLayer::drained) waits for it. Where no runtime is left,
    /// [`Event::Abandoned`] is reported, and the claim ends with its lease. The drop itself never blocks,
    /// never panics and never calls the store.
    ///
    /// # Panics
    ///
    /// When it is polled again after it was ready.
    pub struct ResponseFuture<S, Req, St, D>
    where
        S: Service<Req>,
        St: ClaimStore,
    {
        #[pin]
        state: State<S::Future, S::Response, St::Future<Claim>, St::Future<bool>>,
        call: Option<(S, Req)>,
        created_at: Option<i64>,
        // Whether the service of the call is ready.
        ready: bool,
        is_done: D,
        waits: Waits,
        // Before the claim was sent.
        sent: Option<Instant>,
        // Whether something was waited for since.
        waited: bool,
        // How often the claim was over before the handler could begin.
        over: u32,
        // After the state: what it holds is gone before the guard acts.
        guard: Guard<St>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, Res, C, B> {
        // Nothing was asked yet.
        Ready,
        // The claim was sent.
        Claiming {
            #[pin]
            claim: Resent<C>,
        },
        // Somebody else is busy with the message.
        Waiting {
            timer: Timer,
        },
        // The claim is won, and the service is not ready.
        Readying,
        // The handler is running.
        Running {
            #[pin]
            response: F,
        },
        // The handler answered Ok.
        Marking {
            #[pin]
            complete: Resent<B>,
            response: Option<Res>,
        },
        // The claim is given up.
        Releasing {
            #[pin]
            release: Resent<B>,
            // Whether it is lost if the store does not know of it.
            lost: Lost,
            then: Option<Then<Res>>,
        },
        Done,
    }
}

/// What comes after a release.
enum Then<Res> {
    /// This is the answer.
    Answer(Result<Res, BoxError>),
    /// The claim failed.
    Unclaimed(StoreError),
}

/// Whether a claim is lost that the store does not know of when it is to be released.
enum Lost {
    /// That was told, or there was none.
    No,
    /// Until then; afterwards it has ended on the way.
    Before(Instant),
    /// It was over before.
    Yes,
}

/// How long a call has waited and waits yet.
struct Waits {
    /// When it waits no longer.
    until: Option<Instant>,
    pause: Duration,
}

// ===== impl ResponseFuture =====

impl<S, Req, St, D> ResponseFuture<S, Req, St, D>
where
    S: Service<Req>,
    St: ClaimStore,
{
    /// Claims first. The service of the call is ready.
    pub(super) fn claim(
        settings: Arc<Settings<St>>,
        is_done: D,
        id: MessageId,
        created_at: Option<i64>,
        call: (S, Req),
    ) -> Self {
        ResponseFuture {
            state: State::Ready,
            call: Some(call),
            created_at,
            ready: true,
            is_done,
            waits: Waits::new(settings.wait),
            sent: None,
            waited: false,
            over: 0,
            guard: Guard::new(settings, Some(id)),
        }
    }

    /// Runs the handler, claims nothing and marks nothing.
    pub(super) fn run(settings: Arc<Settings<St>>, is_done: D, response: S::Future) -> Self {
        ResponseFuture {
            state: State::Running { response },
            call: None,
            created_at: None,
            ready: false,
            is_done,
            waits: Waits::new(None),
            sent: None,
            waited: false,
            over: 0,
            guard: Guard::new(settings, None),
        }
    }
}

impl<S, Req, St, D> Future for ResponseFuture<S, Req, St, D>
where
    S: Service<Req> + Clone,
    S::Response: Ack,
    S::Error: Into<BoxError>,
    St: ClaimStore,
    D: IsDone<S::Response>,
{
    type Output = Result<S::Response, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = self.as_mut().advance(cx);
        let mut this = self.project();
        if answer.is_pending() {
            *this.waited = true;
            this.guard.note_runtime();
        } else {
            *this.call = None;
            this.state.set(State::Done);
        }
        answer
    }
}

impl<S, Req, St, D> ResponseFuture<S, Req, St, D>
where
    S: Service<Req> + Clone,
    S::Response: Ack,
    S::Error: Into<BoxError>,
    St: ClaimStore,
    D: IsDone<S::Response>,
{
    fn advance(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<S::Response, BoxError>> {
        let mut this = self.project();
        let guard = this.guard;
        loop {
            match this.state.as_mut().project() {
                StateProj::Ready => {
                    guard.owner = Owner::random();
                    this.state.set(State::claiming());
                }
                StateProj::Claiming { claim } => {
                    guard.due = Due::Release;
                    let (id, owner, settings) = (known(&guard.id), guard.owner, &guard.settings);
                    let (shared, lease) = (&settings.shared, settings.renewal.lease());
                    let send = || {
                        *this.sent = Some(Instant::now());
                        *this.waited = false;
                        shared.store.claim(id, owner, lease)
                    };
                    // Answered later than that, it may be over already.
                    let limit = shared
                        .limit
                        .map_or(lease.length(), |it| it.min(lease.length()));
                    match ready!(claim.poll(Some(limit), CLAIM_RETRIES, cx, send)) {
                        Ok(Claim::Won) => {
                            guard.claimed(this.sent.unwrap_or_else(Instant::now));
                            this.state.set(State::Readying);
                        }
                        Ok(Claim::Done) => {
                            guard.due = Due::Nothing;
                            let created_at = *this.created_at;
                            shared.reporter.report(&Event::Duplicate { id, created_at });
                            guard.leave();
                            return Poll::Ready(Ok(Ack::ack()));
                        }
                        Ok(Claim::Busy { retry_after }) => {
                            guard.due = Due::Nothing;
                            // A renewal under way may still win for the owner that was, and gives that back.
                            if guard.is_claimed() {
                                guard.leave();
                                guard.owner = Owner::random();
                            }
                            let (id, shared) = (known(&guard.id), &guard.settings.shared);
                            if let Some(timer) = this.waits.next() {
                                // Gives back what the service had reserved.
                                if let Some((service, _)) = this.call {
                                    *service = service.clone();
                                }
                                *this.ready = false;
                                this.state.set(State::Waiting { timer });
                                continue;
                            }
                            let retry_after = parked_for(retry_after);
                            let event = Event::Parked { id, retry_after };
                            shared.reporter.report(&event);
                            let parked = Parked::new(id.clone(), retry_after);
                            return Poll::Ready(Err(parked.into()));
                        }
                        Err(source) => {
                            let error = StoreError::new(Operation::Claim, source);
                            let next = State::releasing(guard, Then::Unclaimed(error));
                            this.state.set(next);
                        }
                    }
                }
                StateProj::Waiting { timer } => {
                    ready!(timer.poll(cx));
                    this.state.set(State::claiming());
                }
                StateProj::Readying => {
                    let (service, _) = this.call.as_mut().expect("polled after completion");
                    if !*this.ready {
                        if let Err(error) = ready!(service.poll_ready(cx)) {
                            let answer = Err(error.into());
                            if !guard.is_claimed() {
                                return Poll::Ready(answer);
                            }
                            let next = State::releasing(guard, Then::Answer(answer));
                            this.state.set(next);
                            continue;
                        }
                    }
                    // What was waited for may have taken longer than the lease. Then another one may have run
                    // the message meanwhile.
                    if *this.waited && guard.is_claimed() && !guard.holds() {
                        *this.over += 1;
                        let next = if *this.over > CLAIM_RETRIES {
                            let late = TimedOut::new(guard.settings.renewal.lease().length());
                            let error = StoreError::new(Operation::Claim, late);
                            State::releasing(guard, Then::Unclaimed(error))
                        } else {
                            State::claiming()
                        };
                        this.state.set(next);
                        continue;
                    }
                    let (mut service, request) = this.call.take().expect("polled after completion");
                    if guard.is_claimed() {
                        guard.due = Due::ReleaseOrKeep;
                    }
                    let response = service.call(request);
                    this.state.set(State::Running { response });
                }
                StateProj::Running { response } => {
                    match ready!(response.poll(cx)).map_err(Into::into) {
                        Ok(response) if guard.id.is_some() && this.is_done.is_done(&response) => {
                            guard.marking();
                            this.state.set(State::Marking {
                                complete: Resent::new(),
                                response: Some(response),
                            });
                        }
                        answer if guard.is_claimed() => {
                            let next = State::releasing(guard, Then::Answer(answer));
                            this.state.set(next);
                        }
                        answer => return Poll::Ready(answer),
                    }
                }
                StateProj::Marking {
                    mut complete,
                    response,
                } => {
                    let ended = guard.poll_complete(complete.as_mut(), cx);
                    let answer = ready!(ended);
                    // What is answered to a mark that was sent again says nothing of the first one.
                    let once = complete.failed() == 0;
                    guard.due = Due::Nothing;
                    // Unmarked, it may not be run by others before the lease has ended.
                    let held = match answer {
                        Ok(_) => guard.leave().is_some(),
                        Err(_) => {
                            guard.keep();
                            false
                        }
                    };
                    let (id, shared) = (known(&guard.id), &guard.settings.shared);
                    match answer {
                        Ok(still_held) => {
                            if held && !still_held && once {
                                shared.reporter.report(&Event::LeaseLost { id });
                            }
                            shared.reporter.report(&Event::Ran { id });
                        }
                        Err(error) => {
                            let event = Event::MarkFailed { id, error: &error };
                            shared.reporter.report(&event);
                            if shared.fail_on_mark_error {
                                return Poll::Ready(Err(error.into()));
                            }
                        }
                    }
                    let response = response.take().expect("polled after completion");
                    return Poll::Ready(Ok(response));
                }
                StateProj::Releasing {
                    release,
                    lost,
                    then,
                } => {
                    let released = ready!(guard.poll_release(release, cx));
                    guard.due = Due::Nothing;
                    let (id, shared) = (known(&guard.id), &guard.settings.shared);
                    match then.take().expect("polled after completion") {
                        Then::Answer(answer) => {
                            match released {
                                Ok(false) if lost.is_lost() => {
                                    shared.reporter.report(&Event::LeaseLost { id });
                                }
                                Ok(_) => {}
                                Err(error) => {
                                    let event = Event::ReleaseFailed { id, error: &error };
                                    shared.reporter.report(&event);
                                }
                            }
                            return Poll::Ready(answer);
                        }
                        // A store that is down is told once.
                        Then::Unclaimed(error) if shared.fail_open => {
                            let event = Event::FailedOpen { id, error: &error };
                            shared.reporter.report(&event);
                            this.state.set(State::Readying);
                        }
                        Then::Unclaimed(error) => {
                            let event = Event::StoreError { id, error: &error };
                            shared.reporter.report(&event);
                            return Poll::Ready(Err(error.into()));
                        }
                    }
                }
                StateProj::Done => panic!("polled after completion"),
            }
        }
    }
}

impl<S, Req, St, D> fmt::Debug for ResponseFuture<S, Req, St, D>
where
    S: Service<Req>,
    St: ClaimStore,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Ready => "Ready",
            State::Claiming { .. } => "Claiming",
            State::Waiting { .. } => "Waiting",
            State::Readying => "Readying",
            State::Running { .. } => "Running",
            State::Marking { .. } => "Marking",
            State::Releasing { .. } => "Releasing",
            State::Done => "Done",
        };
        f.debug_struct("ResponseFuture")
            .field("id", &self.guard.id)
            .field("state", &format_args!("{state}"))
            .finish_non_exhaustive()
    }
}

/// Only a message with an id is claimed and marked.
fn known(id: &Option<MessageId>) -> &MessageId {
    id.as_ref().expect("a message with an id")
}

// ===== impl State =====

impl<F, Res, C, B> State<F, Res, C, B> {
    fn claiming() -> Self {
        State::Claiming {
            claim: Resent::new(),
        }
    }

    /// The claim is renewed no longer from here on: a renewal must not undo the release.
    fn releasing<St: ClaimStore>(guard: &mut Guard<St>, then: Then<Res>) -> Self {
        guard.due = Due::Release;
        State::Releasing {
            release: Resent::new(),
            lost: Lost::new(guard.leave()),
            then: Some(then),
        }
    }
}

// ===== impl Lost =====

impl Lost {
    /// Of a claim that is held until `end` as far as is known.
    fn new(end: Option<Instant>) -> Self {
        match end {
            None => Lost::No,
            Some(end) if end <= Instant::now() => Lost::Yes,
            Some(end) => Lost::Before(end),
        }
    }

    fn is_lost(&self) -> bool {
        match *self {
            Lost::No => false,
            Lost::Before(end) => Instant::now() < end,
            Lost::Yes => true,
        }
    }
}

// ===== impl Waits =====

impl Waits {
    fn new(max: Option<Duration>) -> Self {
        // As good as for ever, and no clock is overrun.
        const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        Waits {
            until: max.map(|max| Instant::now() + max.min(CENTURY)),
            pause: FIRST_PAUSE,
        }
    }

    /// The next pause; `None` when it is time to give up, and without a runtime's timer.
    fn next(&mut self) -> Option<Timer> {
        let left = self.until?.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        let pause = self.pause.mul_f64(rand::random_range(0.75..1.25));
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        Timer::start(pause.min(left))
    }
}
