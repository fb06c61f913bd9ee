//! Future types.

use crate::error::{BoxError, Parked};
use pin_project_lite::pin_project;
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tracing::Span;

pin_project! {
    /// The response future of [`Trace`](super::Trace).
    ///
    /// # Cancel safety
    ///
    /// Dropped, it drops the inner one, within the span.
    #[derive(Debug)]
    pub struct ResponseFuture<F> {
        // Taken when it is done, so that what it held ends within the span.
        #[pin]
        inner: Option<F>,
        span: Span,
    }

    impl<F> PinnedDrop for ResponseFuture<F> {
        fn drop(this: Pin<&mut Self>) {
            let mut this = this.project();
            let _entered = this.span.enter();
            this.inner.set(None);
        }
    }
}

// ===== impl ResponseFuture =====

impl<F> ResponseFuture<F> {
    pub(super) fn new(inner: F, span: Span) -> Self {
        let inner = Some(inner);
        ResponseFuture { inner, span }
    }
}

impl<F, T, E> Future for ResponseFuture<F>
where
    F: Future<Output = Result<T, E>>,
    E: Into<BoxError>,
{
    type Output = Result<T, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let _entered = this.span.enter();
        let inner = this.inner.as_mut().as_pin_mut();
        let answer = ready!(inner.expect("polled after completion").poll(cx));
        this.inner.set(None);
        Poll::Ready(answer.map_err(|error| {
            let error = error.into();
            if !error.is::<Parked>() {
                this.span.record("otel.status_code", "ERROR");
                this.span.record("error", error.to_string());
            }
            error
        }))
    }
}
