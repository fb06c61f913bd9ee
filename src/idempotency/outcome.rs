use crate::ack::Outcome;
use pin_project_lite::pin_project;
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tower_layer::Layer;
use tower_service::Service;

/// Has a service answer [`Outcome::Ran`].
///
/// Made by [`IdempotencyLayer::outcome`](super::IdempotencyLayer::outcome).
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct OutcomeLayer(());

impl OutcomeLayer {
    pub(crate) const fn new() -> Self {
        OutcomeLayer(())
    }
}

/// A service that answers [`Outcome::Ran`].
#[derive(Clone, Copy, Debug)]
pub struct OutcomeService<S> {
    inner: S,
}

pin_project! {
    /// The response future of [`OutcomeService`].
    #[derive(Debug)]
    pub struct OutcomeFuture<F> {
        #[pin]
        inner: F,
    }
}

impl<S> Layer<S> for OutcomeLayer {
    type Service = OutcomeService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        OutcomeService { inner }
    }
}

impl<S, Req> Service<Req> for OutcomeService<S>
where
    S: Service<Req>,
{
    type Response = Outcome<S::Response>;
    type Error = S::Error;
    type Future = OutcomeFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        OutcomeFuture {
            inner: self.inner.call(request),
        }
    }
}

impl<F, T, E> Future for OutcomeFuture<F>
where
    F: Future<Output = Result<T, E>>,
{
    type Output = Result<Outcome<T>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(ready!(self.project().inner.poll(cx)).map(Outcome::Ran))
    }
}
