//! A store of a kind that is chosen when the program runs.

use super::{Claim, ClaimStore, Lease, Owner, Store};
use crate::{error::BoxError, id::MessageId};
use std::{fmt, future::Future, pin::Pin, sync::Arc};

type BoxFuture<T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>;

/// Any [`ClaimStore`], of one type: for programs that are told by their configuration where to keep the
/// record.
///
/// A command costs an allocation and a call through a table more than the store itself.
#[derive(Clone)]
pub struct BoxStore {
    store: Arc<dyn AnyStore>,
}

/// What [`ClaimStore`] is without its associated types.
trait AnyStore: Send + Sync {
    fn seen(&self, id: &MessageId) -> BoxFuture<bool>;
    fn remember(&self, id: &MessageId) -> BoxFuture<()>;
    fn forget(&self, id: &MessageId) -> BoxFuture<()>;
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<Claim>;
    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<bool>;
    fn complete(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool>;
    fn release(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool>;
}

fn boxed<T, E: Into<BoxError>>(
    command: impl Future<Output = Result<T, E>> + Send + 'static,
) -> BoxFuture<T> {
    Box::pin(async { command.await.map_err(Into::into) })
}

impl<St: ClaimStore> AnyStore for St {
    fn seen(&self, id: &MessageId) -> BoxFuture<bool> {
        boxed(Store::seen(self, id))
    }

    fn remember(&self, id: &MessageId) -> BoxFuture<()> {
        boxed(Store::remember(self, id))
    }

    fn forget(&self, id: &MessageId) -> BoxFuture<()> {
        boxed(Store::forget(self, id))
    }

    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<Claim> {
        boxed(ClaimStore::claim(self, id, owner, lease))
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<bool> {
        boxed(ClaimStore::renew(self, id, owner, lease))
    }

    fn complete(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool> {
        boxed(ClaimStore::complete(self, id, owner))
    }

    fn release(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool> {
        boxed(ClaimStore::release(self, id, owner))
    }
}

impl BoxStore {
    /// Boxes a store.
    pub fn new(store: impl ClaimStore) -> Self {
        BoxStore {
            store: Arc::new(store),
        }
    }
}

impl Store for BoxStore {
    type Error = BoxError;
    type Future<T: Send + 'static> = BoxFuture<T>;

    fn seen(&self, id: &MessageId) -> BoxFuture<bool> {
        self.store.seen(id)
    }

    fn remember(&self, id: &MessageId) -> BoxFuture<()> {
        self.store.remember(id)
    }

    fn forget(&self, id: &MessageId) -> BoxFuture<()> {
        self.store.forget(id)
    }
}

impl ClaimStore for BoxStore {
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<Claim> {
        self.store.claim(id, owner, lease)
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> BoxFuture<bool> {
        self.store.renew(id, owner, lease)
    }

    fn complete(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool> {
        self.store.complete(id, owner)
    }

    fn release(&self, id: &MessageId, owner: Owner) -> BoxFuture<bool> {
        self.store.release(id, owner)
    }
}

impl fmt::Debug for BoxStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BoxStore")
    }
}
