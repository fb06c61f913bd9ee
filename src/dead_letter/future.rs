//! Future types.

use super::layer::Settings;
use crate::{
    ack::Ack,
    envelope::{DeadLetterBlock, Envelope},
    error::{BoxError, Unpublished},
};
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tower_service::Service;

pin_project! {
    /// The response future of [`DeadLetter`](super::DeadLetter).
    ///
    /// # Cancel safety
    ///
    /// Dropped, it answers nothing, so the broker brings the message again. Dropped while it was
    /// publishing, a copy may be on the dead-letter queue nevertheless.
    ///
    /// # Panics
    ///
    /// When it is polled again after it was ready.
    pub struct ResponseFuture<F, P>
    where
        P: Service<Envelope>,
    {
        #[pin]
        state: State<F, P, P::Future>,
        settings: Arc<Settings>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<F, P, PF> {
        // The handler is running.
        Running {
            #[pin]
            response: F,
            call: Option<(Envelope, P)>,
        },
        // The message failed for good; the publisher is not ready.
        Readying {
            publisher: P,
            message: Option<(Envelope, BoxError)>,
        },
        Publishing {
            #[pin]
            published: PF,
            failure: Option<BoxError>,
        },
        Done,
    }
}

// ===== impl ResponseFuture =====

impl<F, P> ResponseFuture<F, P>
where
    P: Service<Envelope>,
{
    pub(super) fn new(
        response: F,
        envelope: Envelope,
        publisher: P,
        settings: Arc<Settings>,
    ) -> Self {
        let state = State::Running {
            response,
            call: Some((envelope, publisher)),
        };
        ResponseFuture { state, settings }
    }
}

impl<F, T, E, P> Future for ResponseFuture<F, P>
where
    F: Future<Output = Result<T, E>>,
    T: Ack,
    E: Into<BoxError>,
    P: Service<Envelope>,
    P::Error: Into<BoxError>,
{
    type Output = Result<T, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                StateProj::Running { response, call } => {
                    let failure = match ready!(response.poll(cx)) {
                        Ok(response) => {
                            this.state.set(State::Done);
                            return Poll::Ready(Ok(response));
                        }
                        Err(error) => error.into(),
                    };
                    if (this.settings.is_transient)(&failure) {
                        this.state.set(State::Done);
                        return Poll::Ready(Err(failure));
                    }
                    let (envelope, publisher) = call.take().expect("polled after completion");
                    let message = Some((annotate(envelope, &failure, this.settings), failure));
                    this.state.set(State::Readying { publisher, message });
                }
                StateProj::Readying { publisher, message } => {
                    let ready = ready!(publisher.poll_ready(cx));
                    let (envelope, failure) = message.take().expect("polled after completion");
                    if let Err(error) = ready {
                        this.state.set(State::Done);
                        return Poll::Ready(Err(Unpublished::new(failure, error).into()));
                    }
                    let published = publisher.call(envelope);
                    this.state.set(State::Publishing {
                        published,
                        failure: Some(failure),
                    });
                }
                StateProj::Publishing { published, failure } => {
                    let published = ready!(published.poll(cx));
                    let failure = failure.take().expect("polled after completion");
                    this.state.set(State::Done);
                    return Poll::Ready(match published {
                        Ok(_) => {
                            #[cfg(feature = "tracing")]
                            crate::trace::decided("dead_lettered");
                            Ok(Ack::dead_lettered())
                        }
                        Err(error) => Err(Unpublished::new(failure, error).into()),
                    });
                }
                StateProj::Done => panic!("polled after completion"),
            }
        }
    }
}

fn annotate(envelope: Envelope, failure: &BoxError, settings: &Settings) -> Envelope {
    let mut block = DeadLetterBlock::new((settings.reason)(failure)).with_error(failure);
    if let Some(queue) = &settings.queue {
        block = block.with_original_queue(queue);
    }
    let attempts = envelope.attempts().saturating_add(1);
    envelope.with_attempts(attempts).with_dead_letter(block)
}

impl<F, P> fmt::Debug for ResponseFuture<F, P>
where
    P: Service<Envelope>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Running { .. } => "Running",
            State::Readying { .. } => "Readying",
            State::Publishing { .. } => "Publishing",
            State::Done => "Done",
        };
        f.debug_tuple("ResponseFuture")
            .field(&format_args!("{state}"))
            .finish()
    }
}
