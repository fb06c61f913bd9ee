//! Charges each payment once, however often it is delivered.
//!
//! ```text
//! cargo run --example charge_once            # a built-in sample, checked at the end
//! cargo run --example charge_once -- FILE    # envelopes, one to a line
//! cargo run --example charge_once -- -       # the same from stdin
//! cargo run --example charge_once -- --claim # each payment claimed before it is charged; before any FILE
//! ```
//!
//! A payment whose data has `"fails": n` fails its first n tries, to show retries and dead letters.
//! What is on the dead-letter queue at the end is redriven once.
//!
//! Exit code 0; 1 when a line was no message a consumer may handle, or a message was not acked; 2
//! when the input cannot be read or the output not written.

use std::{
    collections::HashMap,
    env,
    fs::File,
    future::{Ready, ready},
    io::{self, BufRead, BufReader, BufWriter, IsTerminal, Read, Write},
    process::ExitCode,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tower::{
    Service, ServiceBuilder, ServiceExt, retry::Policy, retry::RetryLayer, service_fn,
    timeout::TimeoutLayer, util::Either,
};
use tower_idempotency::{
    BoxError, DeadLetterLayer, Envelope, IdempotencyLayer, Lease, MemoryStore, MessageId, Outcome,
    dead_letter::poison,
    envelope::{DeadLetterBlock, Headers, Reason},
    event::Event,
};

const QUEUE: &str = "payments";
/// How often one delivery is tried.
const TRIES: u32 = 3;
/// A longer line is no message.
const MAX_LINE: u64 = 64 << 20;
/// How many dead letters wait at most; a message that finds no room is not acked.
const MAX_DEAD: usize = 1000;

const SAMPLE: &str = r#"
{"job":"urn:shop:payment","trace_id":"t-1","data":{"payment":1,"cents":9990},"meta":{"id":"0f8fad5b-d9cb-469f-a165-70867728950e","queue":"payments","lang":"php","schema_version":1,"created_at":1790000000000},"attempts":0}
{"job":"urn:shop:payment","trace_id":"t-2","data":{"payment":2,"cents":500},"meta":{"id":"7c9e6679-7425-40de-944b-e07fc1f90ae7","queue":"payments","lang":"go","schema_version":1,"created_at":1790000001000},"attempts":0}
{"job":"urn:shop:payment","trace_id":"t-1","data":{"payment":1,"cents":9990},"meta":{"id":"0f8fad5b-d9cb-469f-a165-70867728950e","queue":"payments","lang":"php","schema_version":1,"created_at":1790000000000},"attempts":1}
{"job":"urn:shop:payment","trace_id":"t-3","data":{"payment":3,"cents":1250,"fails":1},"meta":{"id":"16fd2706-8baf-433b-82eb-8c7fada847da","queue":"payments","lang":"python","schema_version":1,"created_at":1790000002000},"attempts":0}
{"urn":"urn:shop:payment","trace_id":"t-4","data":{"payment":4,"cents":80},"meta":{"id":"886313e1-3b8a-4372-9b90-0c9aee199e5d","queue":"payments","lang":"node","schema_version":1,"created_at":1790000003000},"attempts":0}
{"job":"urn:shop:payment","trace_id":"t-5","data":{"payment":5,"cents":70},"meta":{"queue":"payments","lang":"java","schema_version":1,"created_at":1790000004000},"attempts":0}
{"job":"urn:shop:payment","trace_id":"t-6","data":{"payment":6,"cents":45000,"fails":3},"meta":{"id":"6fa459ea-ee8a-4ca4-894e-db77e160355e","queue":"payments","lang":"dotnet","schema_version":1,"created_at":1790000005000},"attempts":0}
{"job":"urn:shop:payment","trace_id":"t-1","data":{"payment":1,"cents":9990},"meta":{"id":"0f8fad5b-d9cb-469f-a165-70867728950e","queue":"payments","lang":"php","schema_version":1,"created_at":1790000000000},"attempts":2}
{"job":"urn:shop:payment","trace_id":"t-3","data":{"payment":3,"cents":1250,"fails":1},"meta":{"id":"16fd2706-8baf-433b-82eb-8c7fada847da","queue":"payments","lang":"python","schema_version":1,"created_at":1790000002000},"attempts":1}
"#;

/// What the deliveries came to.
#[derive(Debug, Default, PartialEq)]
struct Summary {
    deliveries: u64,
    ran: u64,
    retried: u64,
    failed_open: u64,
    duplicates: u64,
    dead_lettered: u64,
    failed: u64,
    bad_lines: u64,
    /// Deliveries that failed and bad lines whose record found no room.
    not_acked: u64,
}

// ===== the handler =====

#[derive(serde::Deserialize)]
struct Payment {
    #[serde(default)]
    cents: u64,
    #[serde(default)]
    fails: u32,
}

/// Charges. It knows nothing of duplicates.
#[derive(Clone, Default)]
struct Till {
    tries: Arc<AtomicU64>,
    charges: Arc<AtomicU64>,
    cents: Arc<AtomicU64>,
    /// How often those that are to fail have failed.
    failed: Arc<Mutex<HashMap<Option<MessageId>, u32>>>,
}

impl Till {
    async fn charge(self, message: Envelope) -> Result<(), BoxError> {
        self.tries.fetch_add(1, Relaxed);
        let payment: Payment = message.data()?;
        if payment.fails > 0 {
            let mut failed = self.failed.lock().expect("no panic under the lock");
            let times = failed.entry(message.id().cloned()).or_default();
            if *times < payment.fails {
                *times += 1;
                return Err(format!("card declined, {times} of {}", payment.fails).into());
            }
            failed.remove(&message.id().cloned());
        }
        self.charges.fetch_add(1, Relaxed);
        let add = |cents: u64| Some(cents.saturating_add(payment.cents));
        let _ = self.cents.fetch_update(Relaxed, Relaxed, add);
        Ok(())
    }
}

impl Till {
    /// What goes back to its broker starts anew.
    fn forget(&self, id: Option<&MessageId>) {
        let mut failed = self.failed.lock().expect("no panic under the lock");
        failed.remove(&id.cloned());
    }
}

/// Tries a few times, at once. A worker would pause in between.
#[derive(Clone)]
struct Tries(u32);

impl<Res> Policy<Envelope, Res, BoxError> for Tries {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut Envelope, result: &mut Result<Res, BoxError>) -> Option<Ready<()>> {
        self.0 -= 1;
        (result.is_err() && self.0 > 0).then(|| ready(()))
    }

    fn clone_request(&mut self, message: &Envelope) -> Option<Envelope> {
        Some(message.clone())
    }
}

/// The dead-letter queue.
#[derive(Clone, Default)]
struct Dead(Arc<Mutex<Vec<Vec<u8>>>>);

impl Dead {
    fn publish(&self, body: Vec<u8>) -> Result<(), BoxError> {
        let mut queue = self.0.lock().expect("no panic under the lock");
        if queue.len() >= MAX_DEAD {
            return Err("the dead-letter queue is full".into());
        }
        queue.push(body);
        Ok(())
    }
}

// ===== the worker =====

struct Worker<S> {
    consumer: S,
    till: Till,
    dead: Dead,
    failed_open: Arc<AtomicU64>,
    summary: Summary,
    out: BufWriter<io::Stdout>,
}

impl<S> Worker<S>
where
    S: Service<Envelope, Response = Outcome<()>, Error = BoxError>,
{
    async fn line(&mut self, number: u64, line: &[u8]) -> io::Result<()> {
        let message = match Envelope::decode(line) {
            Ok(message) => message,
            Err(error) => {
                let block = DeadLetterBlock::new(Reason::Poison)
                    .with_error(&error)
                    .with_original_queue(QUEUE);
                return self.bad(number, error.into(), Some(poison(line, &block).into()));
            }
        };
        for warning in message.warnings() {
            writeln!(self.out, "line {number}: {warning}")?;
        }
        if let Err(rejected) = message.accepts() {
            let error = format!("rejected: {rejected}").into();
            return self.bad(number, error, Some(line.to_vec()));
        }
        self.deliver(&format!("line {number}"), message).await
    }

    /// A line that no handler may see goes to the dead-letter queue, if its record finds room.
    fn bad(&mut self, number: u64, error: BoxError, record: Option<Vec<u8>>) -> io::Result<()> {
        self.summary.bad_lines += 1;
        writeln!(self.out, "line {number}: {error}")?;
        match record.map(|record| self.dead.publish(record)) {
            Some(Err(error)) => {
                self.summary.not_acked += 1;
                writeln!(self.out, "line {number}: not acked: {error}")
            }
            _ => Ok(()),
        }
    }

    async fn deliver(&mut self, from: &str, message: Envelope) -> io::Result<()> {
        let message = message.with_headers(Headers::new().with_queue(QUEUE));
        let (tries, open) = (
            self.till.tries.load(Relaxed),
            self.failed_open.load(Relaxed),
        );
        let id = message.id().cloned();
        let answer = match self.consumer.ready().await {
            Ok(ready) => ready.call(message).await,
            Err(error) => Err(error),
        };
        let tries = self.till.tries.load(Relaxed) - tries;
        let sum = &mut self.summary;
        sum.deliveries += 1;
        let (what, count) = match &answer {
            Ok(Outcome::Duplicate) => ("duplicate".into(), &mut sum.duplicates),
            Ok(Outcome::DeadLettered) => ("dead-lettered".into(), &mut sum.dead_lettered),
            Ok(_) if self.failed_open.load(Relaxed) > open => {
                ("failed open".into(), &mut sum.failed_open)
            }
            Ok(_) if tries > 1 => (format!("retried, ran at try {tries}"), &mut sum.retried),
            Ok(_) => ("ran".into(), &mut sum.ran),
            Err(error) => {
                self.till.forget(id.as_ref());
                sum.not_acked += 1;
                (format!("not acked: {error}"), &mut sum.failed)
            }
        };
        *count += 1;
        match id {
            Some(id) => writeln!(self.out, "{from}: {id:?}: {what}"),
            None => writeln!(self.out, "{from}: no id: {what}"),
        }
    }

    /// Brings what is on the dead-letter queue back, once.
    async fn redrive(&mut self) -> io::Result<()> {
        let dead = std::mem::take(&mut *self.dead.0.lock().expect("no panic under the lock"));
        for body in dead {
            match Envelope::decode(&body) {
                Ok(message) if message.accepts().is_ok() => {
                    self.deliver("redriven", message.redriven()).await?;
                }
                // What cannot be handled stays.
                _ => self.dead.publish(body).expect("there was room before"),
            }
        }
        Ok(())
    }
}

async fn run(mut input: impl BufRead, name: &str, lease: Option<Lease>) -> io::Result<Summary> {
    let (till, dead, failed_open) = (Till::default(), Dead::default(), Arc::default());
    let (handler, publisher, open) = (till.clone(), dead.clone(), Arc::clone(&failed_open));
    let idempotency = IdempotencyLayer::new(MemoryStore::new()).on_event(move |event| {
        if let Event::NoId | Event::FailedOpen { .. } = event {
            AtomicU64::fetch_add(&open, 1, Relaxed);
        }
    });
    let idempotency = match lease {
        Some(lease) => Either::Left(idempotency.claim(lease).outcome()),
        None => Either::Right(idempotency.outcome()),
    };
    let consumer = ServiceBuilder::new()
        .layer(DeadLetterLayer::new(service_fn(
            move |message: Envelope| ready(publisher.publish(message.encode().into())),
        )))
        .layer(idempotency)
        .layer(RetryLayer::new(Tries(TRIES)))
        .layer(TimeoutLayer::new(Duration::from_secs(30)))
        .service(service_fn(move |message| handler.clone().charge(message)));

    let mut worker = Worker {
        consumer,
        till,
        dead,
        failed_open,
        summary: Summary::default(),
        out: BufWriter::new(io::stdout()),
    };
    // Where the lines themselves are on the screen they are progress enough.
    let progress = io::stderr().is_terminal() && !io::stdout().is_terminal();
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        if input
            .by_ref()
            .take(MAX_LINE + 1)
            .read_until(b'\n', &mut line)?
            == 0
        {
            break;
        }
        if line.len() as u64 > MAX_LINE && !line.ends_with(b"\n") {
            input.skip_until(b'\n')?;
            worker.bad(number, format!("longer than {MAX_LINE} bytes").into(), None)?;
        } else if !line.trim_ascii().is_empty() {
            worker.line(number, line.trim_ascii()).await?;
        }
        if progress && number % 10_000 == 0 {
            eprint!("\r{name}: {number} lines");
        }
    }
    if progress {
        eprint!("\r\x1b[K");
    }
    worker.redrive().await?;

    let (sum, till) = (&worker.summary, &worker.till);
    let (charges, cents) = (till.charges.load(Relaxed), till.cents.load(Relaxed));
    let effects = sum.ran + sum.retried + sum.failed_open;
    assert_eq!(
        charges, effects,
        "each delivery that ran charged once, and no other charged"
    );
    let others = sum.duplicates + sum.dead_lettered + sum.failed;
    assert_eq!(
        sum.deliveries,
        effects + others,
        "each delivery came to one end"
    );
    writeln!(
        worker.out,
        "{} deliveries: {effects} effects ({cents} cents), {} duplicates, {} dead-lettered; {} bad \
         lines, {} not acked",
        sum.deliveries, sum.duplicates, sum.dead_lettered, sum.bad_lines, sum.not_acked,
    )?;
    worker.out.flush()?;
    Ok(worker.summary)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut arguments = env::args().skip(1).peekable();
    let claims = arguments.next_if_eq("--claim").is_some();
    let lease = claims.then(|| Lease::new(Duration::from_secs(60)).expect("a lease"));
    let name = arguments.next();
    if arguments.next().is_some()
        || name
            .as_ref()
            .is_some_and(|name| name.len() > 1 && name.starts_with('-'))
    {
        eprintln!("usage: charge_once [--claim] [FILE | -]");
        return ExitCode::from(2);
    }
    let ended = match name.as_deref() {
        None => run(SAMPLE.trim_start().as_bytes(), "sample", lease)
            .await
            .inspect(|summary| {
                let expected = Summary {
                    deliveries: 10,
                    ran: 4,
                    retried: 1,
                    failed_open: 1,
                    duplicates: 3,
                    dead_lettered: 1,
                    ..Summary::default()
                };
                assert_eq!(*summary, expected);
            }),
        Some("-") => run(io::stdin().lock(), "stdin", lease).await,
        Some(file) => match File::open(file) {
            Ok(input) => run(BufReader::with_capacity(1 << 16, input), file, lease).await,
            Err(error) => Err(error),
        },
    };
    match ended {
        Ok(summary) => ExitCode::from(u8::from(summary.bad_lines + summary.not_acked > 0)),
        // Whoever read the output has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!(
                "charge_once: {}: {error}",
                name.as_deref().unwrap_or("sample")
            );
            ExitCode::from(2)
        }
    }
}
