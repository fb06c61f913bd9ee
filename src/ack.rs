//! Answers that settle a message without the handler's own.

/// The answer to a message that needs no run of the handler, so that it is acked.
///
/// ```
/// use tower_idempotency::{Ack, Outcome};
///
/// let () = Ack::ack();
/// assert_eq!(Option::<u8>::ack(), None);
/// assert_eq!(Outcome::<u8>::ack(), Outcome::Duplicate);
/// ```
///
/// There is no blanket implementation over `Default`: whether a default value may stand for
/// "done before" is for each response type to say.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no answer to a message that had its effect before",
    note = "implement `Ack` for it, or have the handler answer `()` or an `Option`"
)]
pub trait Ack: Sized {
    /// The answer to a message that had its effect before.
    fn ack() -> Self;

    /// The answer to a message that was put on the dead-letter queue; [`ack`](Ack::ack) unless
    /// the type tells the two apart.
    fn dead_lettered() -> Self {
        Self::ack()
    }
}

impl Ack for () {
    fn ack() -> Self {}
}

impl<T> Ack for Option<T> {
    fn ack() -> Self {
        None
    }
}

/// What became of a message, for callers who want to see it.
///
/// [`IdempotencyLayer::outcome`](crate::IdempotencyLayer::outcome) makes it the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome<T> {
    /// The handler ran and answered this.
    Ran(T),
    /// The message had its effect before; the handler was not called.
    Duplicate,
    /// The message failed for good and was put on the dead-letter queue.
    DeadLettered,
}

impl<T> Ack for Outcome<T> {
    fn ack() -> Self {
        Outcome::Duplicate
    }

    fn dead_lettered() -> Self {
        Outcome::DeadLettered
    }
}

/// Says whether a response means that the message had its effect.
///
/// Closures `Fn(&Res) -> bool` do. A response for which it says no is passed on, and the id
/// stays unmarked, so that a redelivery runs the handler again.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say whether a `{Res}` means that the message is done with",
    note = "a closure needs the type of its parameter: `.done_if(|response: &{Res}| true)`"
)]
pub trait IsDone<Res: ?Sized> {
    /// Whether the message is done with.
    fn is_done(&self, response: &Res) -> bool;
}

impl<F, Res: ?Sized> IsDone<Res> for F
where
    F: Fn(&Res) -> bool,
{
    fn is_done(&self, response: &Res) -> bool {
        self(response)
    }
}

/// Every Ok means done: what holds unless `done_if` says otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct Always;

impl<Res: ?Sized> IsDone<Res> for Always {
    fn is_done(&self, _: &Res) -> bool {
        true
    }
}
