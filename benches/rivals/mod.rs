//! What people write today in the layer's place: a set behind a layer of one's own. And the
//! messages that both benches measure with.
#![allow(dead_code, reason = "each bench takes what it needs")]

use dashmap::DashSet;
use moka::sync::Cache;
use pin_project_lite::pin_project;
use std::{
    collections::HashSet,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, ready},
    time::Duration,
};
use tower::{Layer, Service};
use uuid::Uuid;

/// A delivery: named by its `id`, as text.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) id: String,
    pub(crate) cents: u64,
}

/// Numbers that look random, the same in every run.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.number() % end as u64) as usize
    }

    pub(crate) fn uuid(&mut self) -> Uuid {
        let bytes = u128::from(self.number()) << 64 | u128::from(self.number());
        uuid::Builder::from_random_bytes(bytes.to_be_bytes()).into_uuid()
    }
}

// ===== the sets =====

/// A set of ids, shared between threads.
pub(crate) trait IdSet: Send + Sync + 'static {
    fn contains(&self, id: &str) -> bool;
    fn insert(&self, id: String);
}

impl IdSet for Mutex<HashSet<String>> {
    fn contains(&self, id: &str) -> bool {
        self.lock().unwrap().contains(id)
    }

    fn insert(&self, id: String) {
        self.lock().unwrap().insert(id);
    }
}

impl IdSet for DashSet<String> {
    fn contains(&self, id: &str) -> bool {
        self.contains(id)
    }

    fn insert(&self, id: String) {
        self.insert(id);
    }
}

impl IdSet for Cache<String, ()> {
    fn contains(&self, id: &str) -> bool {
        self.contains_key(id)
    }

    fn insert(&self, id: String) {
        self.insert(id, ());
    }
}

/// A cache with the limits of `MemoryStore::new()`.
pub(crate) fn cache() -> Cache<String, ()> {
    Cache::builder()
        .max_capacity(10_000_000)
        .time_to_live(Duration::from_secs(24 * 3600))
        .build()
}

// ===== the layer around them =====

/// Skips what is in the set, and puts in what was answered with Ok.
#[derive(Debug)]
pub(crate) struct SeenLayer<T>(pub(crate) Arc<T>);

#[derive(Debug)]
pub(crate) struct Seen<S, T> {
    inner: S,
    set: Arc<T>,
}

impl<S, T> Layer<S> for SeenLayer<T> {
    type Service = Seen<S, T>;

    fn layer(&self, inner: S) -> Self::Service {
        Seen {
            inner,
            set: self.0.clone(),
        }
    }
}

impl<S: Clone, T> Clone for Seen<S, T> {
    fn clone(&self) -> Self {
        Seen {
            inner: self.inner.clone(),
            set: self.set.clone(),
        }
    }
}

impl<S, T> Service<Request> for Seen<S, T>
where
    S: Service<Request, Response = ()>,
    T: IdSet,
{
    type Response = ();
    type Error = S::Error;
    type Future = SeenFuture<S::Future, T>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        if self.set.contains(&request.id) {
            return SeenFuture::Duplicate;
        }
        SeenFuture::Running {
            id: Some(request.id.clone()),
            set: self.set.clone(),
            response: self.inner.call(request),
        }
    }
}

pin_project! {
    #[project = SeenProj]
    pub(crate) enum SeenFuture<F, T> {
        Duplicate,
        Running {
            id: Option<String>,
            set: Arc<T>,
            #[pin]
            response: F,
        },
    }
}

impl<F, T, E> Future for SeenFuture<F, T>
where
    F: Future<Output = Result<(), E>>,
    T: IdSet,
{
    type Output = Result<(), E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let SeenProj::Running { id, set, response } = self.project() else {
            return Poll::Ready(Ok(()));
        };
        let answer = ready!(response.poll(cx));
        if answer.is_ok() {
            set.insert(id.take().expect("polled after completion"));
        }
        Poll::Ready(answer)
    }
}
