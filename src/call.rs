//! Store commands: the time limit around one, one that is sent again, the timer behind both.

use crate::{
    error::{BoxError, TimedOut},
    event::Reporter,
};
use pin_project_lite::pin_project;
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

/// The pause before a command is sent again the first time; each further one is twice as long.
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

/// The least that a message is parked for.
#[cfg(feature = "tokio")]
const SHORTEST_PARKING: Duration = Duration::from_millis(10);

/// How long a message is parked that somebody else is at for so long: a little less, by chance, so that copies
/// do not come back all at once.
#[cfg(feature = "tokio")]
pub(crate) fn parked_for(left: Duration) -> Duration {
    let less = rand::random_range(0.75..1.0);
    left.mul_f64(less).max(SHORTEST_PARKING)
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

// ===== sent again =====

pin_project! {
    /// A command that is sent again when it failed, after pauses: one that may be sent twice.
    #[derive(Debug)]
    pub(crate) struct Resent<F> {
        failed: u32,
        #[pin]
        state: ResentState<F>,
    }
}

pin_project! {
    #[project = ResentStateProj]
    #[derive(Debug)]
    enum ResentState<F> {
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

impl<F> Resent<F> {
    /// Sends nothing before it is polled.
    pub(crate) const fn new() -> Self {
        Resent {
            failed: 0,
            state: ResentState::Due,
        }
    }

    /// How often it was answered by an error, or by nothing in time.
    #[cfg(feature = "tokio")]
    pub(crate) const fn failed(&self) -> u32 {
        self.failed
    }

    /// `send` makes the command anew, once and up to `retries` times more.
    pub(crate) fn poll<T, E>(
        self: Pin<&mut Self>,
        limit: Option<Duration>,
        retries: u32,
        cx: &mut Context<'_>,
        mut send: impl FnMut() -> F,
    ) -> Poll<Result<T, BoxError>>
    where
        F: Future<Output = Result<T, E>>,
        E: Into<BoxError>,
    {
        let mut this = self.project();
        loop {
            match this.state.as_mut().project() {
                ResentStateProj::Due => {
                    let command = Limited::new(send());
                    this.state.set(ResentState::Sent { command });
                }
                ResentStateProj::Sent { command } => {
                    let error = match ready!(command.poll(limit, cx)) {
                        Ok(answer) => return Poll::Ready(Ok(answer)),
                        Err(error) => error,
                    };
                    let pause = FIRST_PAUSE.saturating_mul(1 << (*this.failed).min(31));
                    *this.failed = this.failed.saturating_add(1);
                    if *this.failed > retries {
                        return Poll::Ready(Err(error));
                    }
                    let next = match Timer::start(pause) {
                        Some(timer) => ResentState::Pausing { timer },
                        None => ResentState::Due,
                    };
                    this.state.set(next);
                }
                ResentStateProj::Pausing { timer } => {
                    ready!(timer.poll(cx));
                    this.state.set(ResentState::Due);
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
