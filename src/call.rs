//! Store commands: the time limit around one, the retries of the mark, the timer behind both.

use crate::{
    error::{BoxError, Operation, StoreError, TimedOut},
    event::Reporter,
    id::MessageId,
    store::Store,
};
use pin_project_lite::pin_project;
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

/// The pause before a mark is sent again the first time; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// What a layer and its clones and calls share.
#[derive(Clone)]
pub(crate) struct Shared<St> {
    pub(crate) store: St,
    /// The time limit of one store command.
    pub(crate) limit: Option<Duration>,
    /// How often a mark is sent again.
    pub(crate) mark_retries: u32,
    pub(crate) fail_open: bool,
    pub(crate) fail_on_mark_error: bool,
    pub(crate) reporter: Reporter,
    #[cfg(feature = "tokio")]
    pub(crate) left_over: LeftOver,
}

// ===== the time limit =====

pin_project! {
    /// One store command under the time limit, which counts from the first `Pending`.
    #[derive(Debug)]
    pub(crate) struct Limited<F> {
        #[pin]
        command: F,
        // Some once it was asked for; it may be that there is none.
        timer: Option<Option<Timer>>,
    }
}

impl<F> Limited<F> {
    pub(crate) fn new(command: F) -> Self {
        Limited {
            command,
            timer: None,
        }
    }

    pub(crate) fn poll<T, E>(
        self: Pin<&mut Self>,
        limit: Option<Duration>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<T, BoxError>>
    where
        F: Future<Output = Result<T, E>>,
        E: Into<BoxError>,
    {
        let this = self.project();
        if let Poll::Ready(answer) = this.command.poll(cx) {
            return Poll::Ready(answer.map_err(Into::into));
        }
        let Some(limit) = limit else {
            return Poll::Pending;
        };
        match this.timer.get_or_insert_with(|| Timer::start(limit)) {
            Some(timer) => timer.poll(cx).map(|()| Err(TimedOut::new(limit).into())),
            None => Poll::Pending,
        }
    }
}

// ===== the mark =====

pin_project! {
    /// Remembers an id, and sends that again a few times when it fails.
    ///
    /// Not a future, so that the call and the task that takes over from it each lend it what
    /// they hold.
    #[derive(Debug)]
    pub(crate) struct Mark<F> {
        sent: u32,
        #[pin]
        state: MarkState<F>,
    }
}

pin_project! {
    #[project = MarkStateProj]
    #[derive(Debug)]
    enum MarkState<F> {
        Due,
        Sent {
            #[pin]
            command: Limited<F>,
        },
        Pausing {
            timer: Timer,
        },
    }
}

impl<F> Mark<F> {
    /// Sends nothing before it is polled.
    pub(crate) fn new() -> Self {
        Mark {
            sent: 0,
            state: MarkState::Due,
        }
    }

    pub(crate) fn poll<St>(
        self: Pin<&mut Self>,
        shared: &Shared<St>,
        id: &MessageId,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), StoreError>>
    where
        St: Store<Future<()> = F>,
        F: Future<Output = Result<(), St::Error>>,
    {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                MarkStateProj::Due => {
                    let command = Limited::new(shared.store.remember(id));
                    this.state.set(MarkState::Sent { command });
                }
                MarkStateProj::Sent { command } => {
                    let Err(source) = ready!(command.poll(shared.limit, cx)) else {
                        return Poll::Ready(Ok(()));
                    };
                    if *this.sent >= shared.mark_retries {
                        return Poll::Ready(Err(StoreError::new(Operation::Remember, source)));
                    }
                    let pause = FIRST_PAUSE.saturating_mul(1 << (*this.sent).min(31));
                    *this.sent += 1;
                    let next = match Timer::start(pause) {
                        Some(timer) => MarkState::Pausing { timer },
                        None => MarkState::Due,
                    };
                    this.state.set(next);
                }
                MarkStateProj::Pausing { timer } => {
                    ready!(timer.poll(cx));
                    this.state.set(MarkState::Due);
                }
            }
        }
    }
}

// ===== the timer =====

/// A timer of the runtime that is there, if one is.
#[cfg(feature = "tokio")]
#[derive(Debug)]
pub(crate) struct Timer(Pin<Box<tokio::time::Sleep>>);

#[cfg(feature = "tokio")]
impl Timer {
    /// `None` outside a runtime, and on one that was built without its time driver.
    pub(crate) fn start(duration: Duration) -> Option<Self> {
        tokio::runtime::Handle::try_current().ok()?;
        // A missing time driver is told by a panic and by nothing else. Here it could come between
        // a handler's effect and its mark.
        let sleep = std::panic::catch_unwind(|| Box::pin(tokio::time::sleep(duration)));
        sleep.ok().map(Timer)
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}

/// Without a runtime to ask there is no timer.
#[cfg(not(feature = "tokio"))]
#[derive(Debug)]
pub(crate) enum Timer {}

#[cfg(not(feature = "tokio"))]
impl Timer {
    pub(crate) fn start(_: Duration) -> Option<Self> {
        None
    }

    pub(crate) fn poll(&mut self, _: &mut Context<'_>) -> Poll<()> {
        match *self {}
    }
}

// ===== what dropped calls left =====

/// Counts the tasks that finish what dropped calls left.
#[cfg(feature = "tokio")]
#[derive(Clone, Debug)]
pub(crate) struct LeftOver(std::sync::Arc<tokio::sync::watch::Sender<usize>>);

/// One task under way, until it is dropped.
#[cfg(feature = "tokio")]
#[derive(Debug)]
pub(crate) struct UnderWay(LeftOver);

#[cfg(feature = "tokio")]
impl LeftOver {
    pub(crate) fn new() -> Self {
        LeftOver(std::sync::Arc::new(tokio::sync::watch::Sender::new(0)))
    }

    pub(crate) fn begin(&self) -> UnderWay {
        self.0.send_modify(|tasks| *tasks += 1);
        UnderWay(self.clone())
    }

    pub(crate) async fn drained(&self) {
        // An error means that the sender is gone, but this holds it.
        let _ = self.0.subscribe().wait_for(|&tasks| tasks == 0).await;
    }
}

#[cfg(feature = "tokio")]
impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.0.send_modify(|tasks| *tasks -= 1);
    }
}
