//! Where the ids of one operation gather while a statement is under way.

use crate::error::BackendError;
use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::sync::oneshot;

/// How many ids one statement takes.
const LARGEST: usize = 128;

/// What the lane says of one id. `None`: the statement failed as a whole, so the id has to go alone.
pub(super) type Answer = Option<Result<bool, BackendError>>;

/// The ids that wait for the next statement.
pub(super) struct Lane {
    queue: Mutex<Queue>,
    /// How long a driver may give no sign of life.
    patience: Duration,
}

struct Queue {
    waiting: VecDeque<Waiting>,
    /// Whether a task is there that will take them.
    driven: bool,
    /// Which one: that of the highest number.
    driver: Driver,
    /// When it was last heard of.
    heard: Instant,
    /// Whether somebody goes alone because nobody else was there.
    alone: bool,
}

/// The number of a task that drives a lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Driver(u64);

/// Leave to go alone; others gather meanwhile.
pub(super) struct Alone<'a>(&'a Lane);

struct Waiting {
    key: String,
    reply: oneshot::Sender<Answer>,
}

/// Ids that travel together: sorted, each once.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) keys: Vec<String>,
    /// Who waits for which of the keys.
    replies: Vec<(usize, oneshot::Sender<Answer>)>,
}

// ===== impl Lane =====

impl Lane {
    pub(super) fn new(patience: Duration) -> Self {
        Lane {
            queue: Mutex::new(Queue {
                waiting: VecDeque::new(),
                driven: false,
                driver: Driver::default(),
                heard: Instant::now(),
                alone: false,
            }),
            patience,
        }
    }

    /// How long a driver may give no sign of life.
    pub(super) fn patience(&self) -> Duration {
        self.patience
    }

    /// Leave to go alone, if nobody else is there: whoever comes by itself needs no task.
    pub(super) fn alone(&self) -> Option<Alone<'_>> {
        let mut queue = self.lock();
        if queue.driven || queue.alone {
            return None;
        }
        queue.alone = true;
        Some(Alone(self))
    }

    /// Puts an id in the lane. With a number, the caller has to start the task of that number.
    pub(super) fn put(&self, key: String) -> (oneshot::Receiver<Answer>, Option<Driver>) {
        let (reply, answer) = oneshot::channel();
        let mut queue = self.lock();
        queue.waiting.push_back(Waiting { key, reply });
        // A runtime that nobody drives any more keeps its tasks and lets them do nothing.
        if queue.driven && queue.heard.elapsed() < self.patience {
            return (answer, None);
        }
        queue.driven = true;
        queue.heard = Instant::now();
        queue.driver.0 += 1;
        (answer, Some(queue.driver))
    }

    /// Whether anybody waits. If not, the lane counts as not driven from now on.
    pub(super) fn go_on(&self, driver: Driver) -> bool {
        let mut queue = self.lock();
        if queue.driver != driver {
            return false;
        }
        // An operation whose caller is gone is withdrawn.
        queue.waiting.retain(|waiting| !waiting.reply.is_closed());
        queue.heard = Instant::now();
        queue.driven = !queue.waiting.is_empty();
        queue.driven
    }

    /// The next ids, in the order of their bytes: two statements that meet wait for each other's
    /// rows in the same order, so that neither waits for ever.
    pub(super) fn take(&self) -> Batch {
        let mut waiting = Vec::new();
        let mut queue = self.lock();
        queue.heard = Instant::now();
        while waiting.len() < LARGEST {
            match queue.waiting.pop_front() {
                Some(next) if next.reply.is_closed() => {}
                Some(next) => waiting.push(next),
                None => break,
            }
        }
        drop(queue);
        waiting.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        let mut batch = Batch::default();
        for Waiting { key, reply } in waiting {
            if batch.keys.last() != Some(&key) {
                batch.keys.push(key);
            }
            batch.replies.push((batch.keys.len() - 1, reply));
        }
        batch
    }

    /// The task that drove the lane is gone: whoever waits is told by the drop of what it waits for.
    pub(super) fn abandon(&self, driver: Driver) {
        let mut queue = self.lock();
        if queue.driver != driver {
            return;
        }
        queue.driven = false;
        let waiting = std::mem::take(&mut queue.waiting);
        drop(queue);
        drop(waiting);
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        self.0.lock().alone = false;
    }
}

// ===== impl Batch =====

impl Batch {
    /// Gives each caller its own answer.
    pub(super) fn answer(self, answers: &[bool]) {
        for (key, reply) in self.replies {
            // A statement that answers fewer ids than it was asked has failed for the rest.
            let _ = reply.send(answers.get(key).map(|&answer| Ok(answer)));
        }
    }

    /// Gives each caller the same error.
    pub(super) fn fail(self, error: &BackendError) {
        for (_, reply) in self.replies {
            let _ = reply.send(Some(Err(error.clone())));
        }
    }

    /// Has each caller go alone.
    pub(super) fn dissolve(self) {
        for (_, reply) in self.replies {
            let _ = reply.send(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane() -> Lane {
        Lane::new(Duration::from_secs(3600))
    }

    #[test]
    fn ids_are_sorted_and_each_is_asked_once() {
        let lane = lane();
        let mut answers = Vec::new();
        for (at, key) in ["b", "a", "c", "a"].iter().enumerate() {
            let (answer, start) = lane.put((*key).into());
            assert_eq!(start.is_some(), at == 0);
            answers.push(answer);
        }
        let batch = lane.take();
        assert_eq!(batch.keys, ["a", "b", "c"]);
        batch.answer(&[true, false, true]);
        let answers = answers.iter_mut().map(|answer| answer.try_recv());
        let answers: Vec<_> = answers
            .map(|answer| answer.unwrap().unwrap().unwrap())
            .collect();
        assert_eq!(answers, [false, true, true, true]);
        assert!(!lane.go_on(Driver(1)));
    }

    #[test]
    fn who_is_gone_is_withdrawn() {
        let lane = lane();
        let (gone, _) = lane.put("a".into());
        let (_stays, _) = lane.put("b".into());
        drop(gone);
        assert!(lane.go_on(Driver(1)));
        assert_eq!(lane.take().keys, ["b"]);
        let (gone, start) = lane.put("c".into());
        assert!(start.is_none());
        drop(gone);
        assert!(!lane.go_on(Driver(1)));
        assert_eq!(lane.put("d".into()).1, Some(Driver(2)));
    }

    #[test]
    fn one_goes_alone_where_nobody_is() {
        let lane = lane();
        let first = lane.alone();
        assert!(first.is_some());
        assert!(lane.alone().is_none());
        // Who comes meanwhile does not wait for it.
        let (_answer, start) = lane.put("a".into());
        assert!(start.is_some());
        drop(first);
        assert!(lane.alone().is_none(), "the lane is driven");
        lane.abandon(Driver(1));
        assert!(lane.alone().is_some());
    }

    #[test]
    fn a_statement_is_bounded() {
        let lane = lane();
        let waiting: Vec<_> = (0..=LARGEST).map(|n| lane.put(n.to_string())).collect();
        assert_eq!(lane.take().keys.len(), LARGEST);
        assert_eq!(lane.take().keys.len(), 1);
        drop(waiting);
    }

    #[test]
    fn who_waits_learns_that_the_driver_is_gone() {
        let lane = lane();
        let (mut answer, _) = lane.put("a".into());
        lane.abandon(Driver(1));
        assert!(answer.try_recv().is_err());
        assert_eq!(lane.put("b".into()).1, Some(Driver(2)));
    }

    #[test]
    fn a_driver_that_gives_no_sign_of_life_is_replaced() {
        let lane = Lane::new(Duration::ZERO);
        let (_first, driver) = lane.put("a".into());
        assert_eq!(driver, Some(Driver(1)));
        let (mut second, driver) = lane.put("b".into());
        assert_eq!(driver, Some(Driver(2)));
        // Should it wake up after all, it leaves the lane alone.
        assert!(!lane.go_on(Driver(1)));
        lane.abandon(Driver(1));
        assert!(lane.go_on(Driver(2)));
        lane.take().answer(&[true, true]);
        assert!(second.try_recv().unwrap().unwrap().unwrap());
    }

    #[test]
    fn a_short_answer_is_no_answer() {
        let lane = lane();
        let (mut a, _) = lane.put("a".into());
        let (mut b, _) = lane.put("b".into());
        lane.take().answer(&[true]);
        assert!(a.try_recv().unwrap().unwrap().unwrap());
        assert!(b.try_recv().unwrap().is_none());
    }
}
