//! What a call still has to do when it is dropped.

use super::layer::Settings;
use crate::{
    call::{Resent, Timer},
    error::{Operation, StoreError},
    event::Event,
    id::MessageId,
    store::{ClaimStore, Owner},
};
use std::{
    future::poll_fn,
    mem,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{runtime::Handle, time::Instant};

/// When a release that found nothing is sent again, as the claim may come after it: where commands go over
/// several connections.
const OVERTAKEN: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(200),
];

/// What a call knows of its message and its claim, and the promise that it leaves neither a mark undone
/// nor a claim behind.
pub(super) struct Guard<St: ClaimStore> {
    pub(super) settings: Arc<Settings<St>>,
    /// `None`: no usable id, so nothing to claim and nothing to mark.
    pub(super) id: Option<MessageId>,
    pub(super) owner: Owner,
    pub(super) due: Due,
    /// Whether there is a claim, which is being renewed.
    claimed: bool,
    /// The runtime that the call waits on.
    runtime: Option<Handle>,
}

/// What is due when the call is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Nothing was sent, or all of it was answered.
    Nothing,
    /// The claim was sent.
    Release,
    /// The handler is running under the claim.
    ReleaseOrKeep,
    /// The effect happened.
    Mark,
}

impl<St: ClaimStore> Guard<St> {
    pub(super) fn new(settings: Arc<Settings<St>>, id: Option<MessageId>) -> Self {
        Guard {
            settings,
            id,
            // Nobody's: each claim has one of its own.
            owner: Owner::from_bits(0),
            due: Due::Nothing,
            claimed: false,
            runtime: None,
        }
    }

    /// The claim was won by a command that was sent at this time.
    pub(super) fn claimed(&mut self, since: Instant) {
        if let Some(id) = &self.id {
            self.settings.renewal.enter(self.owner, id, since);
            self.claimed = true;
        }
    }

    /// Whether there is a claim, which is being renewed.
    pub(super) fn is_claimed(&self) -> bool {
        self.claimed
    }

    /// Whether the claim is held, by our own count.
    pub(super) fn holds(&self) -> bool {
        self.settings.renewal.holds(self.owner)
    }

    /// The handler answered Ok.
    pub(super) fn marking(&mut self) {
        self.due = Due::Mark;
        if self.claimed {
            self.settings.renewal.marking(self.owner);
        }
    }

    /// The claim is renewed no longer. Answers until when it is held, as far as is known.
    pub(super) fn leave(&mut self) -> Option<Instant> {
        if !mem::take(&mut self.claimed) {
            return None;
        }
        self.settings.renewal.leave(self.owner)
    }

    pub(super) fn poll_complete(
        &self,
        command: Pin<&mut Resent<St::Future<bool>>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<bool, StoreError>> {
        let retries = self.settings.shared.mark_retries;
        self.poll_end(Operation::Complete, retries, command, cx)
    }

    /// Once: the caller waits, and the lease is the backstop.
    pub(super) fn poll_release(
        &self,
        command: Pin<&mut Resent<St::Future<bool>>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<bool, StoreError>> {
        self.poll_end(Operation::Release, 0, command, cx)
    }

    fn poll_end(
        &self,
        operation: Operation,
        retries: u32,
        command: Pin<&mut Resent<St::Future<bool>>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<bool, StoreError>> {
        match &self.id {
            Some(id) => {
                let (settings, owner) = (&self.settings, self.owner);
                settings.poll_end(operation, retries, command, id, owner, cx)
            }
            // Nothing was claimed.
            None => Poll::Ready(Ok(false)),
        }
    }

    /// The claim is renewed no longer, and not released.
    pub(super) fn keep(&mut self) {
        if mem::take(&mut self.claimed) {
            self.settings.renewal.keep(self.owner);
        }
    }

    /// The latest one counts: a future may move to another runtime, and the first one end.
    pub(super) fn note_runtime(&mut self) {
        self.runtime = Handle::try_current().ok();
    }
}

impl<St: ClaimStore> Drop for Guard<St> {
    fn drop(&mut self) {
        let keeps = self.settings.keeps_claim;
        let operation = match self.due {
            Due::Nothing => None,
            Due::ReleaseOrKeep if keeps => None,
            Due::Release | Due::ReleaseOrKeep => Some(Operation::Release),
            Due::Mark => Some(Operation::Complete),
        };
        match operation {
            None => self.keep(),
            // It must not be undone by a renewal.
            Some(Operation::Release) => {
                self.leave();
            }
            // It is covered by the lease until it is answered.
            Some(_) => {}
        }
        let (Some(operation), Some(id)) = (operation, self.id.take()) else {
            return;
        };
        let left = LeftOver {
            settings: self.settings.clone(),
            id,
            owner: self.owner,
            operation,
            overtakes: self.due == Due::Release,
            claimed: mem::take(&mut self.claimed),
            answered: false,
        };
        if let Some(runtime) = Handle::try_current().ok().or_else(|| self.runtime.take()) {
            let under_way = left.settings.shared.left_over.begin();
            // On a runtime that is shutting down the task is dropped unpolled, which reports.
            runtime.spawn(async move {
                left.finish().await;
                drop(under_way);
            });
        }
    }
}

// ===== what a dropped call left =====

/// A mark or a release that is due and nobody's call any more. Dropped unanswered, it reports that.
struct LeftOver<St: ClaimStore> {
    settings: Arc<Settings<St>>,
    id: MessageId,
    owner: Owner,
    operation: Operation,
    /// The claim may still be on its way when the release arrives.
    overtakes: bool,
    claimed: bool,
    answered: bool,
}

impl<St: ClaimStore> LeftOver<St> {
    async fn finish(mut self) {
        let marks = self.operation == Operation::Complete;
        let mut answer = self.send(self.settings.shared.mark_retries).await;
        self.answered = true;
        if self.overtakes {
            let mut pauses = OVERTAKEN.iter();
            while let (Ok(false), Some(&pause)) = (&answer, pauses.next()) {
                if let Some(mut timer) = Timer::start(pause) {
                    poll_fn(|cx| timer.poll(cx)).await;
                }
                answer = self.send(0).await;
            }
        }
        self.leave(answer.is_ok());
        let id = &self.id;
        let reporter = &self.settings.shared.reporter;
        match &answer {
            // The call had sent it before, so the answer says nothing of a claim that was lost.
            Ok(_) if marks => reporter.report(&Event::Ran { id }),
            Ok(_) => {}
            Err(error) if marks => reporter.report(&Event::MarkFailed { id, error }),
            Err(error) => reporter.report(&Event::ReleaseFailed { id, error }),
        }
    }

    async fn send(&self, retries: u32) -> Result<bool, StoreError> {
        let settings = &self.settings;
        let mut command = pin!(Resent::new());
        poll_fn(|cx| {
            let command = command.as_mut();
            settings.poll_end(self.operation, retries, command, &self.id, self.owner, cx)
        })
        .await
    }

    /// Of a release it has left already.
    fn leave(&mut self, marked: bool) {
        if mem::take(&mut self.claimed) {
            if marked {
                self.settings.renewal.leave(self.owner);
            } else {
                self.settings.renewal.keep(self.owner);
            }
        }
    }
}

impl<St: ClaimStore> Drop for LeftOver<St> {
    fn drop(&mut self) {
        self.leave(false);
        if !self.answered {
            let event = Event::Abandoned {
                id: &self.id,
                operation: self.operation,
            };
            self.settings.shared.reporter.report(&event);
        }
    }
}

// ===== the end of a claim =====

impl<St: ClaimStore> Settings<St> {
    /// Completes or releases a claim, which may be sent again when it fails.
    pub(super) fn poll_end(
        &self,
        operation: Operation,
        retries: u32,
        command: Pin<&mut Resent<St::Future<bool>>>,
        id: &MessageId,
        owner: Owner,
        cx: &mut Context<'_>,
    ) -> Poll<Result<bool, StoreError>> {
        let store = &self.shared.store;
        let send = || match operation {
            Operation::Complete => store.complete(id, owner),
            _ => store.release(id, owner),
        };
        command
            .poll(self.shared.limit, retries, cx, send)
            .map_err(|source| StoreError::new(operation, source))
    }
}
