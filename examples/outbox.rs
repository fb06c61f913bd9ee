//! An order is booked, and an invoice asked for: both or neither, and each once.
//!
//! ```text
//! cargo run --example outbox --features sqlite
//! ```
//!
//! What a handler publishes by itself is outside of its transaction. So it writes the message that is to
//! follow into a table, the *outbox*, by the transaction that it was lent. A relay reads the table,
//! publishes, and deletes what it has published. When it dies in between, it publishes twice; the follow-up
//! has an id of its own, by which its consumer skips the second copy.

use sqlx::{Row, Sqlite, SqlitePool};
use std::{collections::VecDeque, env, fs};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_idempotency::{
    BoxError, Envelope, MessageId, Outcome, TransactionLayer, WithTransaction,
};

const TABLES: [&str; 3] = [
    "CREATE TABLE orders (id TEXT)",
    "CREATE TABLE outbox (n INTEGER PRIMARY KEY, body TEXT)",
    "CREATE TABLE invoices (id TEXT)",
];

// ===== the handlers =====

/// Books an order, and leaves the message in the outbox that asks for its invoice.
async fn order(lent: WithTransaction<Envelope, Sqlite>) -> Result<(), BoxError> {
    let WithTransaction {
        request: order,
        mut transaction,
    } = lent;
    let id = order.id().ok_or("an order without an id")?;
    // An id of its own, which follows from the order's.
    let invoice = Envelope::new(
        "urn:shop:invoice",
        &serde_json::json!({"order": id.as_str()}),
    )?
    .with_id(format!("{id}/invoice"))
    .with_trace_id(order.trace_id().unwrap_or_default());

    sqlx::query("INSERT INTO orders (id) VALUES (?)")
        .bind(id.as_str())
        .execute(&mut *transaction)
        .await?;
    sqlx::query("INSERT INTO outbox (body) VALUES (?)")
        .bind(invoice.encode())
        .execute(&mut *transaction)
        .await?;
    // What fails as late as this leaves neither.
    let fails = order.data::<serde_json::Value>()?["fails"].as_i64();
    if order.attempts() < fails.unwrap_or_default() {
        return Err("card declined".into());
    }
    Ok(())
}

async fn invoice(lent: WithTransaction<Envelope, Sqlite>) -> Result<(), BoxError> {
    let WithTransaction {
        request: invoice,
        mut transaction,
    } = lent;
    sqlx::query("INSERT INTO invoices (id) VALUES (?)")
        .bind(invoice.id().map(MessageId::as_str))
        .execute(&mut *transaction)
        .await?;
    Ok(())
}

// ===== the relay =====

/// Publishes what is in the outbox, and deletes each row after that: the other way round, dying in between would
/// lose it.
async fn relay(pool: &SqlitePool, queue: &mut VecDeque<String>, dies: bool) -> sqlx::Result<()> {
    let rows = sqlx::query("SELECT n, body FROM outbox ORDER BY n");
    for row in rows.fetch_all(pool).await? {
        let (n, body): (i64, String) = (row.get(0), row.get(1));
        queue.push_back(body);
        if dies {
            println!("relay: published row {n}, and died before it deleted it");
            return Ok(());
        }
        let delete = sqlx::query("DELETE FROM outbox WHERE n = ?").bind(n);
        delete.execute(pool).await?;
        println!("relay: published row {n}, and deleted it");
    }
    Ok(())
}

// ===== the deliveries =====

async fn deliver<S>(consumer: &mut S, message: Envelope) -> Result<(), BoxError>
where
    S: Service<Envelope, Response = Outcome<()>, Error = BoxError>,
{
    let id = message.id().cloned().unwrap_or_else(|| "no id".into());
    match consumer.ready().await?.call(message).await {
        Ok(Outcome::Duplicate) => println!("{id}: duplicate"),
        Ok(_) => println!("{id}: ran"),
        Err(error) => println!("{id}: not acked: {error}"),
    }
    Ok(())
}

async fn count(pool: &SqlitePool) -> sqlx::Result<[i64; 3]> {
    let count = "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM outbox), \
                 (SELECT count(*) FROM invoices)";
    let row = sqlx::query(count).fetch_one(pool).await?;
    let counts = [row.get(0), row.get(1), row.get(2)];
    println!(
        "    {} orders, {} in the outbox, {} invoices",
        counts[0], counts[1], counts[2]
    );
    Ok(counts)
}

async fn run(url: &str) -> Result<(), BoxError> {
    let pool = SqlitePool::connect(url).await?;
    for table in TABLES {
        sqlx::query(table).execute(&pool).await?;
    }
    // Each consumer has a record of its own.
    let ordering = TransactionLayer::new(pool.clone(), "ordering_seen")?;
    let invoicing = TransactionLayer::new(pool.clone(), "invoicing_seen")?;
    ordering.migrate().await?;
    invoicing.migrate().await?;
    let mut ordering = ServiceBuilder::new()
        .layer(ordering.outcome())
        .service(service_fn(order));
    let mut invoicing = ServiceBuilder::new()
        .layer(invoicing.outcome())
        .service(service_fn(invoice));

    let new = |fails| Envelope::new("urn:shop:order", &serde_json::json!({"fails": fails}));
    let (one, two) = (new(1)?.with_id("order-1"), new(0)?.with_id("order-2"));
    deliver(&mut ordering, one.clone()).await?;
    assert_eq!(count(&pool).await?, [0, 0, 0]);
    let one = one.with_attempts(1);
    for message in [one.clone(), one, two.clone(), two] {
        deliver(&mut ordering, message).await?;
    }
    assert_eq!(count(&pool).await?, [2, 2, 0]);

    let mut queue = VecDeque::new();
    relay(&pool, &mut queue, true).await?;
    relay(&pool, &mut queue, false).await?;
    let published = queue.len();
    assert_eq!(published, 3);
    for body in queue {
        deliver(&mut invoicing, Envelope::decode(body.as_bytes())?).await?;
    }
    let [orders, outbox, invoices] = count(&pool).await?;
    assert_eq!((orders, outbox, invoices), (2, 0, 2));
    println!(
        "5 deliveries of 2 orders: {orders} booked; {published} publications: {invoices} invoices"
    );
    pool.close().await;
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    let dir = env::temp_dir().join(MessageId::random().as_str());
    fs::create_dir(&dir)?;
    let ran = run(&format!(
        "sqlite://{}?mode=rwc",
        dir.join("shop.db").display()
    ))
    .await;
    fs::remove_dir_all(&dir)?;
    ran
}
