//! Books each payment exactly once, wherever the workers die that book it.
//!
//! ```text
//! cargo run --example exactly_once --features sqlite
//! ```
//!
//! A broker delivers a message until it is acked, and at times once more. Here this program is the broker, and
//! for each delivery it starts itself as a worker, which dies where it is told to. The ledger is a
//! table in a SQLite file.
//!
//! The same deliveries are made twice: to workers in transactional mode, where the booking and the record of
//! the message are one commit, and to workers with the seen-set, which records a message once it was
//! booked.
//!
//! Exit code 0; 1 when the transactional ledger does not balance, or anything else went wrong.

use sqlx::{Sqlite, SqliteConnection, SqlitePool};
use std::{
    env, fs,
    process::{Command, ExitCode, abort},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{
    BoxError, Envelope, IdempotencyLayer, MessageId, Outcome, TransactionLayer, WithTransaction,
    store::SqliteStore,
};

/// The two ways, by which the tables of their records are called, too.
const TRANSACTIONAL: &str = "transactional";
const SEEN_SET: &str = "seen_set";

/// The cents of payment 1, 2, 3, 4, 5.
const PAYMENTS: [i64; 5] = [9990, 500, 1250, 80, 45000];

#[derive(Clone, Copy, PartialEq)]
enum Dies {
    Never,
    BeforeItBooks,
    /// Nothing is committed yet, or recorded.
    AfterItBooked,
    BeforeItAcks,
}

/// Which payment is delivered, and where the worker dies that it is delivered to.
const DELIVERIES: [(usize, Dies); 15] = [
    (1, Dies::Never),
    (2, Dies::BeforeItBooks),
    (1, Dies::Never),
    (2, Dies::Never),
    (3, Dies::AfterItBooked),
    (3, Dies::Never),
    (4, Dies::BeforeItAcks),
    (4, Dies::Never),
    (5, Dies::BeforeItBooks),
    (5, Dies::AfterItBooked),
    (5, Dies::AfterItBooked),
    (5, Dies::BeforeItAcks),
    (5, Dies::Never),
    (3, Dies::Never),
    (2, Dies::Never),
];

// ===== the worker =====

/// Handles a delivery and says how. To end well is to ack.
async fn work(way: &str, url: &str, delivery: usize) -> Result<(), BoxError> {
    let (payment, dies) = DELIVERIES[delivery];
    let data = serde_json::json!({"payment": payment, "cents": PAYMENTS[payment - 1]});
    let message = Envelope::new("urn:shop:payment", &data)?.with_id(format!("payment-{payment}"));

    let pool = SqlitePool::connect(url).await?;
    let outcome = if way == TRANSACTIONAL {
        let handler = service_fn(async |lent: WithTransaction<Envelope, Sqlite>| {
            let mut transaction = lent.transaction;
            book(&mut transaction, TRANSACTIONAL, &lent.request, dies).await
        });
        let layer = TransactionLayer::new(pool, TRANSACTIONAL)?.outcome();
        layer.layer(handler).oneshot(message).await?
    } else {
        let store = SqliteStore::builder(SEEN_SET).pool(pool.clone())?;
        let handler = service_fn(async |message: Envelope| {
            let mut connection = pool.acquire().await?;
            book(&mut connection, SEEN_SET, &message, dies).await
        });
        let layer = IdempotencyLayer::new(store).outcome();
        layer.layer(handler).oneshot(message).await?
    };
    die(dies, Dies::BeforeItAcks);
    let answer = match outcome {
        Outcome::Duplicate => "duplicate",
        _ => "ran",
    };
    print!("{answer}");
    Ok(())
}

/// What both handlers do. It knows nothing of duplicates.
async fn book(
    connection: &mut SqliteConnection,
    way: &str,
    message: &Envelope,
    dies: Dies,
) -> Result<(), BoxError> {
    let data: serde_json::Value = message.data()?;
    die(dies, Dies::BeforeItBooks);
    sqlx::query("INSERT INTO ledger (way, payment, cents) VALUES (?, ?, ?)")
        .bind(way)
        .bind(data["payment"].as_i64())
        .bind(data["cents"].as_i64())
        .execute(connection)
        .await?;
    die(dies, Dies::AfterItBooked);
    Ok(())
}

/// As by a kill: nothing is put in order any more.
fn die(dies: Dies, here: Dies) {
    if dies == here {
        abort();
    }
}

// ===== the broker =====

/// Has a process of its own handle it, and answers how that ended.
fn deliver(way: &str, url: &str, delivery: usize) -> Result<String, BoxError> {
    let worker = Command::new(env::current_exe()?)
        .args([way, url, &delivery.to_string()])
        .output()?;
    match worker.status.code() {
        Some(0) => Ok(String::from_utf8(worker.stdout)?),
        Some(1 | 101) => Err(String::from_utf8_lossy(&worker.stderr).into()),
        _ => Ok("died".to_owned()),
    }
}

/// How many bookings there are, and of how many cents: of this payment, or of all.
async fn booked(pool: &SqlitePool, way: &str, payment: Option<i64>) -> sqlx::Result<(i64, i64)> {
    let query = "SELECT count(*), coalesce(sum(cents), 0) FROM ledger \
                 WHERE way = ? AND payment = ifnull(?, payment)";
    let query = sqlx::query_as(query).bind(way).bind(payment);
    query.fetch_one(pool).await
}

/// Answers whether the transactional ledger balances.
async fn run(url: &str) -> Result<bool, BoxError> {
    let pool = SqlitePool::connect(url).await?;
    let create = "CREATE TABLE ledger (way TEXT, payment INTEGER, cents INTEGER)";
    sqlx::query(create).execute(&pool).await?;
    for way in [TRANSACTIONAL, SEEN_SET] {
        let record = SqliteStore::builder(way).pool(pool.clone())?;
        record.migrate().await?;
    }

    println!("                                     transactional       seen-set");
    println!("    payment  cents  the worker dies  answer     booked   answer     booked");
    for (delivery, (payment, dies)) in DELIVERIES.into_iter().enumerate() {
        let dies = match dies {
            Dies::Never => "",
            Dies::BeforeItBooks => "before it books",
            Dies::AfterItBooked => "after it booked",
            Dies::BeforeItAcks => "before it acks",
        };
        let (number, cents) = (delivery + 1, PAYMENTS[payment - 1]);
        print!("{number:>2}  {payment:>7}  {cents:>5}  {dies:<15}");
        for way in [TRANSACTIONAL, SEEN_SET] {
            let answer = deliver(way, url, delivery)?;
            let (bookings, _) = booked(&pool, way, Some(payment as i64)).await?;
            print!("  {answer:<10} {bookings:>6}");
        }
        println!();
    }

    let due: i64 = PAYMENTS.iter().sum();
    let (deliveries, payments) = (DELIVERIES.len(), PAYMENTS.len());
    println!("{deliveries} deliveries of {payments} payments, {due} cents");
    let mut too_many = 0;
    for (name, way) in [("seen-set", SEEN_SET), ("transactional", TRANSACTIONAL)] {
        let (bookings, cents) = booked(&pool, way, None).await?;
        too_many = cents - due;
        match too_many {
            0 => println!("{name}: {bookings} bookings, {cents} cents: the ledger balances"),
            _ => println!("{name}: {bookings} bookings, {cents} cents: {too_many} too many"),
        }
    }
    pool.close().await;
    Ok(too_many == 0)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, BoxError> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    if let [way, url, delivery] = &arguments[..] {
        work(way, url, delivery.parse()?).await?;
        return Ok(ExitCode::SUCCESS);
    }
    let dir = env::temp_dir().join(MessageId::random().as_str());
    fs::create_dir(&dir)?;
    let file = dir.join("shop.db");
    let balances = run(&format!("sqlite://{}?mode=rwc", file.display())).await;
    fs::remove_dir_all(&dir)?;
    Ok(ExitCode::from(u8::from(!balances?)))
}
