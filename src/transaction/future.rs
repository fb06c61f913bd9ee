//! Future types.

use super::{Dialect, LentTransaction, WithTransaction, layer::Settings};
use crate::{
    ack::{Ack, IsDone},
    call::parked_for,
    error::{BoxError, Operation, Parked, StoreError, Unfinished, UnfinishedCause},
    event::Event,
    id::MessageId,
    store::sql::{
        engine::{Dropped, Within, runtime},
        session::{NotCommitted, Opened, Session},
    },
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
use tokio::{runtime::Handle, sync::oneshot};
use tower_service::Service;

pin_project! {
    /// The response future of [`TransactionService`](super::TransactionService).
    ///
    /// # Cancel safety
    ///
    /// Dropped before the handler answered Ok, it has the transaction rolled back, so that nothing has happened and
    /// a redelivery runs. Dropped after that, it has the commit finished by a task of the runtime it was
    /// first polled on; [`TransactionLayer::drained`](super::TransactionLayer::drained) waits for it. Where that runtime has
    /// ended, the connection is closed, and the message either had its effect and is recorded or neither.
    /// The drop itself never blocks and never panics.
    ///
    /// # Panics
    ///
    /// When it is polled again after it was ready, and perhaps when it is polled on after the runtime that it was first polled
    /// on has ended.
    pub struct ResponseFuture<S, Req, DB, D>
    where
        S: Service<WithTransaction<Req, DB>>,
        DB: Dialect,
    {
        #[pin]
        state: State<S::Future, S::Response, DB>,
        call: Option<(S, Req)>,
        is_done: D,
        message: Message<DB>,
    }
}

/// What is to be told of a call.
struct Message<DB: Dialect> {
    settings: Arc<Settings<DB>>,
    /// Empty: no usable id, so there is nothing to remember.
    id: MessageId,
    created_at: Option<i64>,
    /// The runtime that the call was polled in first.
    runtime: Option<Handle>,
}

type Lent<DB> = Session<<DB as Dialect>::Table>;
type Begun<DB> = Result<Opened<<DB as Dialect>::Table>, StoreError>;

pin_project! {
    #[project = StateProj]
    enum State<F, Res, DB: Dialect> {
        // Nothing was asked yet.
        Ready,
        // A transaction is begun, and the message claimed in it.
        Opening {
            open: Within<Begun<DB>>,
        },
        // The handler is running. It goes before what it gives back.
        Running {
            #[pin]
            response: F,
            back: Option<oneshot::Receiver<Lent<DB>>>,
        },
        // The handler answered Ok.
        Committing {
            commit: Within<Result<(), BoxError>>,
            response: Option<Res>,
        },
        // The handler failed, or said that it is not done.
        RollingBack {
            roll_back: Within<bool>,
            answer: Option<Result<Res, BoxError>>,
        },
        Done,
    }
}

// ===== impl ResponseFuture =====

impl<S, Req, DB, D> ResponseFuture<S, Req, DB, D>
where
    S: Service<WithTransaction<Req, DB>>,
    DB: Dialect,
{
    /// The service of the call is ready.
    pub(super) fn new(
        settings: Arc<Settings<DB>>,
        is_done: D,
        id: MessageId,
        created_at: Option<i64>,
        call: (S, Req),
    ) -> Self {
        ResponseFuture {
            state: State::Ready,
            call: Some(call),
            is_done,
            message: Message {
                settings,
                id,
                created_at,
                runtime: None,
            },
        }
    }
}

impl<S, Req, DB, D> Future for ResponseFuture<S, Req, DB, D>
where
    S: Service<WithTransaction<Req, DB>>,
    S::Response: Ack,
    S::Error: Into<BoxError>,
    DB: Dialect,
    D: IsDone<S::Response>,
{
    type Output = Result<S::Response, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(self.as_mut().advance(cx));
        let mut this = self.project();
        *this.call = None;
        this.state.set(State::Done);
        Poll::Ready(answer)
    }
}

impl<S, Req, DB, D> ResponseFuture<S, Req, DB, D>
where
    S: Service<WithTransaction<Req, DB>>,
    S::Response: Ack,
    S::Error: Into<BoxError>,
    DB: Dialect,
    D: IsDone<S::Response>,
{
    fn advance(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<S::Response, BoxError>> {
        let mut this = self.project();
        let message = this.message;
        loop {
            match this.state.as_mut().project() {
                StateProj::Ready => match message.open() {
                    Ok(open) => this.state.set(State::Opening { open }),
                    Err(error) => return Poll::Ready(Err(message.not_begun(error))),
                },
                StateProj::Opening { open } => match ready!(Pin::new(open).poll(cx)) {
                    Ok(Opened::Session(session)) => {
                        let (mut service, request) =
                            this.call.take().expect("polled after completion");
                        let (home, back) = oneshot::channel();
                        let transaction = LentTransaction::new(session, home);
                        let response = service.call(WithTransaction {
                            request,
                            transaction,
                        });
                        let back = Some(back);
                        this.state.set(State::Running { response, back });
                    }
                    Ok(Opened::Done) => {
                        message.report(&Event::Duplicate {
                            id: &message.id,
                            created_at: message.created_at,
                        });
                        return Poll::Ready(Ok(Ack::ack()));
                    }
                    Ok(Opened::Busy(left)) => return Poll::Ready(Err(message.parked(left))),
                    Err(error) => return Poll::Ready(Err(message.not_begun(error))),
                },
                StateProj::Running { response, back } => {
                    let answer = ready!(response.poll(cx)).map_err(Into::into);
                    let mut back = back.take().expect("polled after completion");
                    // With the handler goes what it still has.
                    this.state.set(State::Done);
                    let done = match &answer {
                        Ok(response) => this.is_done.is_done(response),
                        Err(_) => false,
                    };
                    match (back.try_recv(), answer) {
                        (Ok(session), Ok(response)) if done => this.state.set(State::Committing {
                            commit: message.commit(session),
                            response: Some(response),
                        }),
                        (Ok(session), answer) => this.state.set(State::RollingBack {
                            roll_back: message.roll_back(session),
                            answer: Some(answer),
                        }),
                        // Whoever has it cannot give it back any more, only drop it.
                        (Err(_), Ok(_)) if done => {
                            let kept = "the handler's future has ended, and somebody else has it";
                            let error = Unfinished::new(UnfinishedCause::Kept, kept);
                            return Poll::Ready(Err(message.unfinished(error)));
                        }
                        (Err(_), Ok(response)) => return Poll::Ready(Ok(response)),
                        (Err(_), Err(error)) => {
                            return Poll::Ready(Err(message.failed(error, false)));
                        }
                    }
                }
                StateProj::Committing { commit, response } => {
                    let committed = ready!(Pin::new(commit).poll(cx));
                    let response = response.take().expect("polled after completion");
                    return Poll::Ready(committed.map(|()| response));
                }
                StateProj::RollingBack { roll_back, answer } => {
                    let lost = ready!(Pin::new(roll_back).poll(cx));
                    let answer = answer.take().expect("polled after completion");
                    return Poll::Ready(answer.map_err(|error| message.failed(error, lost)));
                }
                StateProj::Done => panic!("polled after completion"),
            }
        }
    }
}

impl<S, Req, DB, D> fmt::Debug for ResponseFuture<S, Req, DB, D>
where
    S: Service<WithTransaction<Req, DB>>,
    DB: Dialect,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Ready => "Ready",
            State::Opening { .. } => "Opening",
            State::Running { .. } => "Running",
            State::Committing { .. } => "Committing",
            State::RollingBack { .. } => "RollingBack",
            State::Done => "Done",
        };
        f.debug_struct("ResponseFuture")
            .field("id", &self.message.id)
            .field("state", &state)
            .finish_non_exhaustive()
    }
}

// ===== impl Message =====

impl<DB: Dialect> Message<DB> {
    fn open(&mut self) -> Result<Within<Begun<DB>>, StoreError> {
        let runtime = runtime().map_err(|error| StoreError::new(Operation::Begin, error))?;
        self.runtime = Some(runtime.clone());
        let (settings, id) = (self.settings.clone(), self.id.clone());
        let within = runtime.clone();
        Ok(Within::new(&within, Dropped::Ends, async move {
            Session::open(settings.store.clone(), runtime, &settings.opening, &id).await
        }))
    }

    fn commit(&self, session: Lent<DB>) -> Within<Result<(), BoxError>> {
        let (settings, id) = (self.settings.clone(), self.id.clone());
        self.to_the_end(async move {
            let committed = session.commit().await;
            // Here, so that it is told when the call was dropped, too.
            match committed {
                Ok(()) if !id.is_empty() => settings.reporter.report(&Event::Ran { id: &id }),
                Ok(()) => {}
                Err(NotCommitted::Rejected(error)) => return Err(error.into()),
                Err(NotCommitted::Unfinished(error)) => {
                    let event = Event::Unfinished {
                        id: &id,
                        error: &error,
                    };
                    settings.reporter.report(&event);
                    return Err(error.into());
                }
            }
            Ok(())
        })
    }

    /// Answers whether the connection was lost.
    fn roll_back(&self, session: Lent<DB>) -> Within<bool> {
        self.to_the_end(session.roll_back())
    }

    fn to_the_end<T: 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Within<T> {
        let runtime = self.runtime.as_ref().expect("there since the begin");
        let left_over = &self.settings.opening.left_over;
        Within::new(runtime, Dropped::GoesOn, work).counted(left_over)
    }

    /// What is answered to a handler's error: that, unless its transaction is to be handled anew.
    fn failed(&self, error: BoxError, lost: bool) -> BoxError {
        if Lent::<DB>::is_contention(&error) {
            return self.unfinished(Unfinished::new(UnfinishedCause::Contention, error));
        }
        if lost {
            return self.unfinished(Unfinished::new(UnfinishedCause::Lost, error));
        }
        error
    }

    fn unfinished(&self, error: Unfinished) -> BoxError {
        self.report(&Event::Unfinished {
            id: &self.id,
            error: &error,
        });
        error.into()
    }

    fn not_begun(&self, error: StoreError) -> BoxError {
        self.report(&Event::StoreError {
            id: &self.id,
            error: &error,
        });
        error.into()
    }

    fn parked(&self, left: Duration) -> BoxError {
        let (id, retry_after) = (&self.id, parked_for(left));
        self.report(&Event::Parked { id, retry_after });
        Parked::new(id.clone(), retry_after).into()
    }

    fn report(&self, event: &Event<'_>) {
        self.settings.reporter.report(event);
    }
}
