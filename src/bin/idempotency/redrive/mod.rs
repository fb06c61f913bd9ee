//! Dead letters back to their queue.

mod jetstream;
mod rabbitmq;
mod redis;

use crate::{End, Progress, Usage, chain, say, store::Records};
use clap::Args;
use serde_json::{Value, json};
use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};
use tower_idempotency::{BoxError, Envelope};

/// Says that a message is a replay, for its handler.
const BYPASS: &str = "bq-replay-bypass";

#[derive(Args)]
pub(crate) struct Redrive {
    /// The dead-letter queue: a queue of RabbitMQ, a list in Redis, a subject of JetStream
    #[arg(long, value_name = "QUEUE")]
    from: String,
    /// amqp://…, redis://… or nats://…
    #[arg(
        long,
        value_name = "URL",
        env = "IDEMPOTENCY_BROKER",
        hide_env_values = true
    )]
    broker: String,
    /// The queue they go to; otherwise the one that each was on, by its `dead_letter` block or `meta.queue`
    #[arg(long, value_name = "QUEUE")]
    to: Option<String>,
    /// No more than so many
    #[arg(long, value_name = "N")]
    max: Option<u64>,
    /// Tell what would be done, and do nothing of it. On RabbitMQ the messages are taken and handed back, which a quorum
    /// queue counts: what it had handed back before goes to its end, as a copy that counts anew
    #[arg(long)]
    dry_run: bool,
    /// Mark them as replays (`bq-replay-bypass`), for handlers that heed it; without this such a mark is taken away
    #[arg(long)]
    bypass: bool,
    /// First drop what --store has recorded of each: a message that had its effect runs again. To be run by one at a
    /// time; when it is killed, the message in its hands may be redriven twice, and then runs twice
    #[arg(long)]
    forget: bool,
}

/// What came of it.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    redriven: u64,
    left: u64,
    interrupted: bool,
    dry: bool,
}

/// Where a message goes, and as what.
struct Move {
    message: Envelope,
    to: String,
}

/// What the three brokers share.
struct Run<'a> {
    order: &'a Redrive,
    records: Option<Records>,
    stop: Arc<AtomicBool>,
    progress: Progress,
    looked_at: u64,
    tally: Tally,
}

/// A message that one of the queues will not take. It stays; the others may go.
struct Refused(String);

impl Redrive {
    pub(crate) fn forgets(&self) -> bool {
        self.forget
    }

    pub(crate) async fn run(
        &self,
        records: Option<Records>,
        stop: Arc<AtomicBool>,
    ) -> Result<Tally, BoxError> {
        if self.from.is_empty() || self.to.as_deref() == Some("") {
            return Err(Usage("a queue has a name; it is empty".into()).into());
        }
        if self.to.as_ref() == Some(&self.from) {
            let why = "--to is --from: they would stay, and no longer say why they failed";
            return Err(Usage(why.into()).into());
        }
        let mut run = Run {
            order: self,
            records,
            stop,
            progress: Progress::new(),
            looked_at: 0,
            tally: Tally {
                dry: self.dry_run,
                ..Tally::default()
            },
        };
        let scheme = self.broker.split_once("://").map(|(scheme, _)| scheme);
        let done = match scheme {
            Some("amqp" | "amqps") => rabbitmq::redrive(&mut run).await,
            Some("redis" | "rediss" | "valkey" | "valkeys") => redis::redrive(&mut run).await,
            Some("nats" | "tls") => jetstream::redrive(&mut run).await,
            _ => Err(Usage(
                "--broker is of no scheme known here; expected amqp://, redis:// or nats://".into(),
            )
            .into()),
        };
        let tally = run.tally;
        match done {
            Ok(()) => Ok(tally),
            Err(error) if tally.redriven == 0 => Err(error),
            // How far it came is worth as much as why it ended.
            Err(error) => Err(format!("after {}: {}", tally.as_text(), chain(&*error)).into()),
        }
    }
}

impl Run<'_> {
    /// Whether another message of so many is to be looked at.
    fn goes_on(&mut self, of: u64) -> bool {
        let (tally, looked_at) = (&mut self.tally, self.looked_at);
        self.progress
            .tell(|| format!("{looked_at} of {of} looked at, {} redriven", tally.redriven));
        if looked_at >= of || self.order.max.is_some_and(|max| tally.redriven >= max) {
            return false;
        }
        tally.interrupted = self.stop.load(Ordering::Relaxed);
        !tally.interrupted
    }

    /// What is to be done with the next message.
    fn plan(&mut self, body: &[u8]) -> Result<Move, Refused> {
        self.looked_at += 1;
        let message = Envelope::decode(body).map_err(|error| Refused(undecoded(body, &error)))?;
        message.accepts().map_err(|error| Refused(chain(&error)))?;
        let block = message.dead_letter();
        let to = self
            .order
            .to
            .as_deref()
            .or_else(|| block.and_then(|block| block.original_queue()))
            .or_else(|| message.meta().queue())
            .filter(|queue| !queue.is_empty())
            .ok_or_else(|| {
                Refused("it does not say which queue it was on: to be given with --to".into())
            })?
            .to_owned();
        if to == self.order.from {
            let why = "it says that it was on this queue: another one is to be given with --to";
            return Err(Refused(why.into()));
        }
        Ok(Move {
            message: message.redriven(),
            to,
        })
    }

    /// Before it is published, so that it is not taken for a duplicate.
    async fn forget(&self, it: &Move) -> Result<(), BoxError> {
        if let (Some(records), Some(id)) = (&self.records, it.message.id()) {
            let forgotten = records.forget(id).await;
            forgotten.map_err(|error| {
                format!("{:?} is not forgotten: {}", id.as_str(), chain(&error))
            })?;
        }
        Ok(())
    }

    /// Looks whether it could be forgotten, where that is only planned.
    async fn could_forget(&self, it: &Move) -> Result<(), BoxError> {
        if let (Some(records), Some(id)) = (&self.records, it.message.id()) {
            records.entry(id).await?;
        }
        Ok(())
    }

    fn moved(&mut self, it: &Move) {
        self.tally.redriven += 1;
        if self.order.dry_run {
            say(format_args!(
                "would go to {:?}: {}",
                it.to,
                self.name(Some(&it.message))
            ));
        }
    }

    fn stays(&mut self, body: &[u8], why: Refused) {
        self.tally.left += 1;
        let message = Envelope::decode(body).ok();
        let begins = match message {
            None if !body.is_empty() => format!(" that begins {}", beginning(body)),
            _ => String::new(),
        };
        say(format_args!(
            "stays: {}{begins}: {}",
            self.name(message.as_ref()),
            why.0
        ));
    }

    /// The message that was looked at last.
    fn name(&self, message: Option<&Envelope>) -> String {
        match message.and_then(Envelope::id) {
            Some(id) => format!("message {} ({:?})", self.looked_at, id.as_str()),
            None => format!("message {}", self.looked_at),
        }
    }
}

/// Why a body is no message: what the worker wrote down who put it there, if one did.
fn undecoded(body: &[u8], error: &(dyn Error + 'static)) -> String {
    let wrapped: Option<Value> = serde_json::from_slice(body).ok();
    let block = wrapped.as_ref().map(|body| &body["dead_letter"]);
    let text = |name: &str| block.and_then(|block| block[name].as_str());
    match (text("reason"), text("error")) {
        (Some(reason), Some(error)) => {
            format!("no message, but a dead letter for the reason {reason:?}: {error}")
        }
        _ => chain(error),
    }
}

/// Enough of a body to find it by.
fn beginning(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(&body[..body.len().min(240)]);
    let (some, more): (String, _) = (text.chars().take(60).collect(), body.len() > 60);
    format!("{some:?}{}", if more { "…" } else { "" })
}

impl Tally {
    pub(crate) fn as_json(&self) -> Value {
        json!({
            "redriven": self.redriven, "left": self.left,
            "dry_run": self.dry, "interrupted": self.interrupted,
        })
    }

    pub(crate) fn as_text(&self) -> String {
        let what = if self.dry { "to redrive" } else { "redriven" };
        let mut text = format!("{} {what}", self.redriven);
        if self.left > 0 {
            text += &format!(", {} left as they are", self.left);
        }
        text
    }

    pub(crate) fn end(&self) -> End {
        if self.left > 0 || self.interrupted {
            End::InPart
        } else {
            End::Yes
        }
    }
}
