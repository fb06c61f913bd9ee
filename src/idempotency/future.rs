//! Future types.

use crate::{
    ack::{Ack, IsDone},
    call::{Limited, Resent, Shared},
    error::{BoxError, Operation, StoreError},
    event::Event,
    id::MessageId,
    store::Store,
};
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tower_service::Service;

pin_project! {
    /// The response future of [`Idempotency`](super::Idempotency).
    ///
    /// # Cancel safety
    ///
    /// Dropped before the handler answered Ok, it leaves the message unmarked: a redelivery runs
    /// it. Dropped after that and before the mark was answered, it hands the mark to a task of
    /// the tokio runtime it is dropped on, or else of the one it was last polled on;
    /// [`IdempotencyLayer::drained`](super::IdempotencyLayer::drained) waits for it. Until that
    /// task is done a copy runs. Where no runtime is left, or without the feature `tokio`,
    /// [`Event::Abandoned`] is reported. The drop itself never blocks, never panics and never calls
    /// the store.
    ///
    /// # Panics
    ///
    /// When it is polled again after it was ready.
    pub struct ResponseFuture<S, Req, St, D>
    where
        S: Service<Req>,
        St: Store,
    {
        #[pin]
        state: State<S::Future, S::Response, St::Future<bool>, St::Future<()>>,
        call: Option<(S, Req)>,
        created_at: Option<i64>,
        is_done: D,
        // After the state: what it holds is gone before the guard acts.
        guard: Guard<St>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, Res, Seen, Remember> {
        // Nothing was asked yet.
        Ready,
        // The store was asked whether the id is remembered.
        Asked {
            #[pin]
            seen: Limited<Seen>,
        },
        // The handler is running.
        Running {
            #[pin]
            response: F,
        },
        // The handler answered Ok; the guard is armed.
        Marking {
            #[pin]
            mark: Resent<Remember>,
            response: Option<Res>,
        },
        Done,
    }
}

/// What a call knows of its message, and the promise that a mark which is due is made.
struct Guard<St: Store> {
    shared: Arc<Shared<St>>,
    /// `None`: no usable id, so nothing to mark.
    id: Option<MessageId>,
    /// The effect happened and the mark is not answered.
    armed: bool,
    /// The runtime that the mark waits on.
    #[cfg(feature = "tokio")]
    runtime: Option<tokio::runtime::Handle>,
}

// ===== the mark =====

impl<St: Store> Shared<St> {
    fn poll_mark(
        &self,
        mark: Pin<&mut Resent<St::Future<()>>>,
        id: &MessageId,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), StoreError>> {
        let remember = || self.store.remember(id);
        mark.poll(self.limit, self.mark_retries, cx, remember)
            .map_err(|source| StoreError::new(Operation::Remember, source))
    }
}

// ===== impl ResponseFuture =====

impl<S, Req, St, D> ResponseFuture<S, Req, St, D>
where
    S: Service<Req>,
    St: Store,
{
    /// Asks the store first. The service of the call is ready.
    pub(super) fn ask(
        shared: Arc<Shared<St>>,
        is_done: D,
        id: MessageId,
        created_at: Option<i64>,
        call: (S, Req),
    ) -> Self {
        ResponseFuture {
            state: State::Ready,
            call: Some(call),
            created_at,
            is_done,
            guard: Guard::new(shared, Some(id)),
        }
    }

    /// Runs the handler and marks nothing.
    pub(super) fn run(shared: Arc<Shared<St>>, is_done: D, response: S::Future) -> Self {
        let state = State::Running { response };
        ResponseFuture {
            state,
            call: None,
            created_at: None,
            is_done,
            guard: Guard::new(shared, None),
        }
    }
}

impl<S, Req, St, D> Future for ResponseFuture<S, Req, St, D>
where
    S: Service<Req>,
    S::Response: Ack,
    S::Error: Into<BoxError>,
    St: Store,
    D: IsDone<S::Response>,
{
    type Output = Result<S::Response, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let guard = this.guard;
        loop {
            match this.state.as_mut().project() {
                StateProj::Ready => {
                    let id = guard
                        .id
                        .as_ref()
                        .expect("only a message with an id is asked for");
                    let seen = Limited::new(guard.shared.store.seen(id));
                    this.state.set(State::Asked { seen });
                }
                StateProj::Asked { seen } => {
                    let answer = ready!(seen.poll(guard.shared.limit, cx));
                    let id = guard
                        .id
                        .as_ref()
                        .expect("only a message with an id is asked for");
                    match answer {
                        Ok(false) => {}
                        Ok(true) => {
                            // Gives back what the service had reserved.
                            *this.call = None;
                            this.state.set(State::Done);
                            let created_at = *this.created_at;
                            let event = Event::Duplicate { id, created_at };
                            guard.shared.reporter.report(&event);
                            return Poll::Ready(Ok(Ack::ack()));
                        }
                        Err(source) => {
                            let error = StoreError::new(Operation::Seen, source);
                            if !guard.shared.fail_open {
                                *this.call = None;
                                this.state.set(State::Done);
                                guard
                                    .shared
                                    .reporter
                                    .report(&Event::StoreError { id, error: &error });
                                return Poll::Ready(Err(error.into()));
                            }
                            let event = Event::FailedOpen { id, error: &error };
                            guard.shared.reporter.report(&event);
                        }
                    }
                    let (mut service, request) = this.call.take().expect("polled after completion");
                    let response = service.call(request);
                    this.state.set(State::Running { response });
                }
                StateProj::Running { response } => match ready!(response.poll(cx)) {
                    Ok(response) if guard.id.is_some() && this.is_done.is_done(&response) => {
                        guard.armed = true;
                        let mark = Resent::new();
                        this.state.set(State::Marking {
                            mark,
                            response: Some(response),
                        });
                    }
                    answer => {
                        this.state.set(State::Done);
                        return Poll::Ready(answer.map_err(Into::into));
                    }
                },
                StateProj::Marking { mark, response } => {
                    let id = guard
                        .id
                        .as_ref()
                        .expect("only a message with an id is marked");
                    let Poll::Ready(answer) = guard.shared.poll_mark(mark, id, cx) else {
                        #[cfg(feature = "tokio")]
                        guard.note_runtime();
                        return Poll::Pending;
                    };
                    guard.armed = false;
                    let response = response.take().expect("polled after completion");
                    this.state.set(State::Done);
                    match answer {
                        Ok(()) => guard.shared.reporter.report(&Event::Ran { id }),
                        Err(error) => {
                            guard
                                .shared
                                .reporter
                                .report(&Event::MarkFailed { id, error: &error });
                            if guard.shared.fail_on_mark_error {
                                return Poll::Ready(Err(error.into()));
                            }
                        }
                    }
                    return Poll::Ready(Ok(response));
                }
                StateProj::Done => panic!("polled after completion"),
            }
        }
    }
}

impl<S, Req, St, D> fmt::Debug for ResponseFuture<S, Req, St, D>
where
    S: Service<Req>,
    St: Store,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Ready => "Ready",
            State::Asked { .. } => "Asked",
            State::Running { .. } => "Running",
            State::Marking { .. } => "Marking",
            State::Done => "Done",
        };
        f.debug_struct("ResponseFuture")
            .field("id", &self.guard.id)
            .field("state", &format_args!("{state}"))
            .finish_non_exhaustive()
    }
}

// ===== impl Guard =====

impl<St: Store> Guard<St> {
    fn new(shared: Arc<Shared<St>>, id: Option<MessageId>) -> Self {
        Guard {
            shared,
            id,
            armed: false,
            #[cfg(feature = "tokio")]
            runtime: None,
        }
    }

    /// The latest one counts: a future may move to another runtime, and the first one end.
    #[cfg(feature = "tokio")]
    fn note_runtime(&mut self) {
        self.runtime = tokio::runtime::Handle::try_current().ok();
    }
}

impl<St: Store> Drop for Guard<St> {
    fn drop(&mut self) {
        if !mem::take(&mut self.armed) {
            return;
        }
        let Some(id) = self.id.take() else { return };
        let left = LeftOverMark {
            shared: self.shared.clone(),
            id,
            answered: false,
        };
        #[cfg(feature = "tokio")]
        {
            use tokio::runtime::Handle;

            if let Some(runtime) = Handle::try_current().ok().or_else(|| self.runtime.take()) {
                let under_way = left.shared.left_over.begin();
                // On a runtime that is shutting down the task is dropped unpolled, which reports.
                runtime.spawn(async move {
                    left.make().await;
                    drop(under_way);
                });
            }
        }
        #[cfg(not(feature = "tokio"))]
        drop(left);
    }
}

// ===== the mark that a dropped call left =====

/// A mark that is due and nobody's call any more. Dropped unanswered, it reports that.
struct LeftOverMark<St: Store> {
    shared: Arc<Shared<St>>,
    id: MessageId,
    answered: bool,
}

#[cfg(feature = "tokio")]
impl<St: Store> LeftOverMark<St> {
    async fn make(mut self) {
        let mut mark = std::pin::pin!(Resent::new());
        let answer =
            std::future::poll_fn(|cx| self.shared.poll_mark(mark.as_mut(), &self.id, cx)).await;
        self.answered = true;
        let id = &self.id;
        match answer {
            Ok(()) => self.shared.reporter.report(&Event::Ran { id }),
            Err(error) => self
                .shared
                .reporter
                .report(&Event::MarkFailed { id, error: &error }),
        }
    }
}

impl<St: Store> Drop for LeftOverMark<St> {
    fn drop(&mut self) {
        if !self.answered {
            self.shared.reporter.report(&Event::Abandoned {
                id: &self.id,
                operation: Operation::Remember,
            });
        }
    }
}
