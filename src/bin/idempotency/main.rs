//! What an operator asks of a record of `tower-idempotency` and of a dead-letter queue. `--help` says how.

mod redrive;
mod secrets;
mod store;

use crate::{redrive::Redrive, secrets::Secrets, store::Records};
use clap::{
    CommandFactory, FromArgMatches, Parser, Subcommand, builder::NonEmptyStringValueParser,
    error::ErrorKind,
};
use serde_json::{Value, json};
use std::{
    env,
    error::Error,
    fmt,
    future::Future,
    io::{self, Write},
    process::ExitCode,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime},
};
use tower_idempotency::{
    BackendError, BoxError, MessageId,
    error::BackendErrorKind,
    store::{Entry, EntryState},
};

const EXIT_CODES: &str = "\
Exit codes:
  0  done; of `seen`: yes; of `why`: something is recorded that is in force
  1  of `seen` and `why`: no; of `forget`: of some of the ids nothing was recorded
  2  it was asked in a way that cannot be answered; nothing was done
  3  the store or the broker failed; what was printed until then was done
  4  done in part: `redrive` left messages where they are, or it was interrupted

A URL may hold a password, which others on this machine can read from the command line: better give it
in IDEMPOTENCY_STORE and IDEMPOTENCY_BROKER. No password is ever printed.";

/// Asks and tends the record of messages that had their effect, and redrives dead letters.
#[derive(Parser)]
#[command(name = "idempotency", version, after_help = EXIT_CODES)]
struct Cli {
    /// Where the record is: redis://…, postgres://…, mysql://… or sqlite:///…
    #[arg(
        long,
        value_name = "URL",
        env = "IDEMPOTENCY_STORE",
        hide_env_values = true,
        global = true
    )]
    store: Option<String>,
    /// The prefix of its keys in Redis, or its table
    #[arg(
        long,
        value_name = "PREFIX_OR_TABLE",
        env = "IDEMPOTENCY_NAME",
        global = true
    )]
    name: Option<String>,
    /// PostgreSQL is behind a pooler in transaction mode
    #[arg(long, global = true)]
    transaction_pooler: bool,
    /// Print JSON, one object
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Whether a message had its effect
    Seen {
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        id: String,
    },
    /// Why a message is skipped or parked: its state, since when, whose, for how long
    ///
    /// Redis keeps neither since when nor whose of what is done. Whose is told by a number of 128 bits, which each claim
    /// has one of.
    Why {
        #[arg(value_parser = NonEmptyStringValueParser::new())]
        id: String,
    },
    /// Drop what is recorded of messages, so that their next delivery runs
    ///
    /// A handler that is under way still marks its message done: forget after it ended.
    Forget {
        #[arg(required = true, value_parser = NonEmptyStringValueParser::new())]
        ids: Vec<String>,
    },
    /// Delete the rows that are past their end (Redis does so by itself)
    Purge,
    /// Count what is recorded, what of it is claimed, and tell the oldest (which Redis does not know)
    Stats,
    /// Make the table and its index unless they are there
    Migrate,
    /// Print the statements that make them; connects to nothing
    Ddl,
    /// Bring dead letters back to their queue
    ///
    /// A message leaves the dead-letter queue after the broker confirmed that the other queue has it, without its
    /// `dead_letter` block and with no attempts. What cannot be decoded stays, byte for byte, and is named. The
    /// run ends with the last message that was there when it began.
    Redrive(Redrive),
}

/// What it was asked for cannot be answered.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Usage {}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum End {
    Yes = 0,
    No = 1,
    Usage = 2,
    Failed = 3,
    InPart = 4,
}

impl From<End> for ExitCode {
    fn from(end: End) -> Self {
        ExitCode::from(end as u8)
    }
}

fn main() -> ExitCode {
    let secrets = Secrets::of(
        env::args_os()
            .map(|text| text.to_string_lossy().into_owned())
            .chain(
                ["IDEMPOTENCY_STORE", "IDEMPOTENCY_BROKER"]
                    .into_iter()
                    .filter_map(|name| env::var(name).ok()),
            ),
    );
    let asked = Cli::command().mut_subcommands(|command| command.after_help(EXIT_CODES));
    let asked = asked.try_get_matches();
    let cli = match asked.and_then(|asked| Cli::from_arg_matches(&asked)) {
        Ok(cli) => cli,
        Err(asked)
            if matches!(
                asked.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            ) =>
        {
            // Nobody may be there to read it.
            let _ = asked.print();
            return End::Yes.into();
        }
        Err(error) => {
            say(secrets.hide(error.to_string().trim_end()));
            return End::Usage.into();
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build();
    let done = match runtime {
        Ok(runtime) => {
            let done = runtime.block_on(run(cli));
            // Resolving a name may hang.
            runtime.shutdown_background();
            done
        }
        Err(error) => Err(error.into()),
    };
    done.unwrap_or_else(|error| {
        say(format_args!("error: {}", secrets.hide(&chain(&*error))));
        if is_usage(&*error) {
            End::Usage
        } else {
            End::Failed
        }
    })
    .into()
}

async fn run(cli: Cli) -> Result<End, BoxError> {
    let out = Out { json: cli.json };
    let place = Place {
        store: cli.store,
        name: cli.name,
        pooler: cli.transaction_pooler,
    };
    match cli.command {
        Command::Seen { id } => {
            let seen = place.open().await?.seen(&id.as_str().into()).await?;
            out.put(
                json!({"id": id, "seen": seen}),
                if seen { "yes" } else { "no" },
            )?;
            Ok(if seen { End::Yes } else { End::No })
        }
        Command::Why { id } => {
            let entry = place.open().await?.entry(&id.as_str().into()).await?;
            out.put(
                entry_as_json(&id, entry.as_ref()),
                entry_as_text(&id, entry.as_ref()),
            )?;
            let in_force = entry.is_some_and(|entry| !is_over(&entry));
            Ok(if in_force { End::Yes } else { End::No })
        }
        Command::Forget { ids } => {
            let records = place.open().await?;
            let (mut forgotten, mut unknown) = (0, Vec::new());
            for id in &ids {
                let key = MessageId::from(id.as_str());
                let dropped = async {
                    let known = records.entry(&key).await?.is_some();
                    records.forget(&key).await?;
                    Ok::<_, BoxError>(known)
                };
                let known = dropped.await.map_err(|error| {
                    format!("after {forgotten} forgotten: {id:?}: {}", chain(&*error))
                })?;
                if known {
                    forgotten += 1;
                } else {
                    unknown.push(id);
                }
            }
            let mut text = format!("{forgotten} forgotten");
            if !unknown.is_empty() {
                text += &format!(", nothing was recorded of {unknown:?}");
            }
            out.put(json!({"forgotten": forgotten, "unknown": unknown}), text)?;
            Ok(if unknown.is_empty() {
                End::Yes
            } else {
                End::No
            })
        }
        Command::Purge => {
            let records = place.open_for_long().await?;
            let (stop, progress) = (interrupted()?, Mutex::new(Progress::new()));
            let stopped = stop.clone();
            let deleted = records.purge(move |deleted| {
                let mut progress = progress.lock().unwrap_or_else(PoisonError::into_inner);
                progress.tell(|| format!("{deleted} deleted"));
                !stopped.load(Ordering::Relaxed)
            });
            let (deleted, stop) = (deleted.await?, stop.load(Ordering::Relaxed));
            out.put(
                json!({"deleted": deleted, "interrupted": stop}),
                format!("{deleted} deleted"),
            )?;
            Ok(if stop { End::InPart } else { End::Yes })
        }
        Command::Stats => {
            let records = place.open_for_long().await?;
            let stats = patiently("counting", records.stats()).await?;
            let oldest = stats.oldest().and_then(written);
            let json = json!({
                "count": stats.count(), "claimed": stats.claimed(), "expired": stats.expired(), "oldest": oldest,
            });
            let mut text = format!(
                "{} recorded, {} of them claimed",
                stats.count(),
                stats.claimed()
            );
            if let Some(oldest) = oldest {
                text += &format!(", the oldest since {oldest}");
            }
            if stats.expired() > 0 {
                text += &format!("; {} past their end, to be purged", stats.expired());
            }
            out.put(json, text)?;
            Ok(End::Yes)
        }
        Command::Migrate => {
            let records = place.open_or_make().await?;
            patiently("migrating", records.migrate()).await?;
            let text = match records {
                Records::Redis(_) => "Redis needs no table",
                _ => "the table is there",
            };
            out.put(json!({"migrated": true}), text)?;
            Ok(End::Yes)
        }
        Command::Ddl => {
            let ddl = place.ddl()?;
            if ddl.is_empty() {
                say("Redis needs no table");
            }
            out.put(json!({"ddl": ddl}), ddl.trim_end())?;
            Ok(End::Yes)
        }
        Command::Redrive(redrive) => {
            let records = if redrive.forgets() {
                Some(place.open().await?)
            } else {
                None
            };
            let tally = redrive.run(records, interrupted()?).await?;
            out.put(tally.as_json(), tally.as_text())?;
            Ok(tally.end())
        }
    }
}

/// Where the record is, as far as that was said.
struct Place {
    store: Option<String>,
    name: Option<String>,
    pooler: bool,
}

impl Place {
    fn told(&self) -> Result<(&str, &str), Usage> {
        let told = |value: &Option<String>, option: &str, variable: &str| {
            Usage(match value {
                Some(_) => format!("{option} is empty"),
                None => format!("where is the record? Give {option}, or {variable}"),
            })
        };
        let store = self.store.as_deref().filter(|url| !url.is_empty());
        let name = self.name.as_deref().filter(|name| !name.is_empty());
        Ok((
            store.ok_or_else(|| told(&self.store, "--store", "IDEMPOTENCY_STORE"))?,
            name.ok_or_else(|| told(&self.name, "--name", "IDEMPOTENCY_NAME"))?,
        ))
    }

    async fn open(&self) -> Result<Records, BoxError> {
        let (url, name) = self.told()?;
        store::is_there(url)?;
        Records::connect(url, name, self.pooler).await
    }

    /// For what may take long.
    async fn open_for_long(&self) -> Result<Records, BoxError> {
        let (url, name) = self.told()?;
        store::is_there(url)?;
        Records::connect_for_long(url, name, self.pooler).await
    }

    /// Of SQLite the file is made as well.
    async fn open_or_make(&self) -> Result<Records, BoxError> {
        let (url, name) = self.told()?;
        Records::connect_for_long(url, name, self.pooler).await
    }

    fn ddl(&self) -> Result<String, BoxError> {
        let (url, name) = self.told()?;
        store::ddl(url, name)
    }
}

// ===== what is printed =====

struct Out {
    json: bool,
}

impl Out {
    fn put(&self, json: Value, text: impl fmt::Display) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let put = if self.json {
            writeln!(out, "{json}")
        } else {
            writeln!(out, "{text}")
        };
        match put {
            // The work is done, and nobody is there to read of it.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            put => put,
        }
    }
}

/// On standard error, as far as somebody is there to read it.
pub(crate) fn say(text: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

fn is_over(entry: &Entry) -> bool {
    entry.expires_in() == Some(Duration::ZERO)
}

fn state(entry: &Entry) -> &'static str {
    match entry.state() {
        EntryState::Done => "done",
        EntryState::Claimed => "claimed",
        _ => "foreign",
    }
}

fn entry_as_json(id: &str, entry: Option<&Entry>) -> Value {
    json!({
        "id": id,
        "state": entry.map(state),
        "since": entry.and_then(Entry::since).and_then(written),
        "owner": entry.and_then(Entry::owner),
        "expires_in": entry.and_then(Entry::expires_in).map(|left| left.as_secs_f64()),
        "expired": entry.is_some_and(is_over),
    })
}

fn entry_as_text(id: &str, entry: Option<&Entry>) -> String {
    let Some(entry) = entry else {
        return format!("{id}: nothing is recorded; its next delivery runs");
    };
    let mut text = format!("{id}: {}", state(entry));
    if let Some(since) = entry.since().and_then(written) {
        text += &format!(" since {since}");
    }
    if let Some(owner) = entry.owner() {
        text += &format!(", by {owner}");
    }
    match entry.expires_in() {
        None => text += ", without an end",
        Some(Duration::ZERO) => {
            return text + ", but that is over; its next delivery runs";
        }
        Some(left) => text += &format!(", for another {}", rounded(left)),
    }
    text + match entry.state() {
        EntryState::Done => "; its next delivery is skipped",
        EntryState::Claimed => "; its next delivery waits for that",
        _ => "; somebody else wrote this, and with claims its next delivery waits until it is gone",
    }
}

/// None of one before 1970 or after 9999, which a row that something else wrote may hold.
fn written(time: SystemTime) -> Option<String> {
    let mut text = String::new();
    let known = time >= SystemTime::UNIX_EPOCH
        && fmt::write(
            &mut text,
            format_args!("{}", humantime::format_rfc3339_millis(time)),
        )
        .is_ok();
    known.then_some(text)
}

/// Seconds will do, of what is not less than one.
fn rounded(length: Duration) -> humantime::FormattedDuration {
    let length = if length.as_secs() > 0 {
        Duration::from_secs(length.as_secs())
    } else {
        Duration::from_millis(length.subsec_millis().max(1).into())
    };
    humantime::format_duration(length)
}

/// An error with what it came of, each said once.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        source = error.source();
    }
    text
}

fn is_usage(error: &(dyn Error + 'static)) -> bool {
    let config = |error: &BackendError| error.kind() == BackendErrorKind::Config;
    error.is::<Usage>() || error.downcast_ref().is_some_and(config)
}

// ===== work that takes a while =====

/// Tells on standard error how far it is, now and then.
pub(crate) struct Progress {
    told: Instant,
}

impl Progress {
    const EVERY: Duration = Duration::from_secs(2);

    pub(crate) fn new() -> Self {
        Progress {
            told: Instant::now(),
        }
    }

    pub(crate) fn tell(&mut self, text: impl FnOnce() -> String) {
        if self.told.elapsed() >= Self::EVERY {
            self.told = Instant::now();
            say(format_args!("{} …", text()));
        }
    }
}

/// The same of work that tells nothing.
async fn patiently<T>(what: &str, work: impl Future<Output = T>) -> T {
    let (mut work, begun) = (std::pin::pin!(work), Instant::now());
    loop {
        match tokio::time::timeout(Progress::EVERY, &mut work).await {
            Ok(done) => return done,
            Err(_) => say(format_args!("{what} for {} …", rounded(begun.elapsed()))),
        }
    }
}

/// Becomes true when it is to end after the step that is under way. Asked again, it ends at once.
fn interrupted() -> Result<Arc<AtomicBool>, BoxError> {
    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    #[cfg(unix)]
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::spawn(async move {
        loop {
            #[cfg(unix)]
            tokio::select! {
                _ = tokio::signal::ctrl_c() => {}
                _ = terminate.recv() => {}
            }
            #[cfg(not(unix))]
            let _ = tokio::signal::ctrl_c().await;
            if asked.swap(true, Ordering::Relaxed) {
                std::process::exit(End::InPart as i32);
            }
            say("interrupted: ending after this step");
        }
    });
    Ok(stop)
}
