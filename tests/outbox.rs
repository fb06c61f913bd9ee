//! A handler that leaves a follow-up message in an outbox, by the transaction that it was lent: one message,
//! one row, one follow-up, however often either is delivered.
#![allow(missing_docs)]

#[path = "support/services.rs"]
mod services;
#[path = "support/world.rs"]
mod world;

use services::PATIENCE;
use std::sync::Arc;
use tokio::{sync::Semaphore, time::timeout};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{BoxError, Envelope, Outcome, TransactionLayer, WithTransaction};
use world::{MySql, Postgres, Sqlite, World};

const COPIES: usize = 16;

/// Where a handler waits until the test lets it go on.
#[derive(Clone)]
struct Gate {
    arrived: Arc<Semaphore>,
    open: Arc<Semaphore>,
}

impl Gate {
    fn new() -> Gate {
        Gate {
            arrived: Arc::new(Semaphore::new(0)),
            open: Arc::new(Semaphore::new(0)),
        }
    }

    async fn pass(&self) {
        self.arrived.add_permits(1);
        // It is closed to let all of them through.
        let _ = self.open.acquire().await;
    }
}

/// Books an order, and leaves the invoice that is to be written in the outbox.
async fn order<W: World>(
    tables: String,
    gate: Gate,
    message: WithTransaction<Envelope, W::Db>,
) -> Result<(), BoxError> {
    let WithTransaction {
        request: order,
        mut transaction,
    } = message;
    let id = order.id().ok_or("no id")?;
    let invoice = Envelope::new("urn:shop:invoice", &serde_json::json!({"order": **id}))?
        .with_id(format!("{id}/invoice"))
        .with_trace_id(order.trace_id().unwrap_or_default());
    let body = invoice.encode();
    let book = format!("INSERT INTO {tables}_orders (id) VALUES ('{id}')");
    W::execute(&mut transaction, book).await?;
    let leave = format!("INSERT INTO {tables}_outbox (body) VALUES ('{body}')");
    W::execute(&mut transaction, leave).await?;
    gate.pass().await;
    Ok(())
}

async fn invoice<W: World>(
    tables: String,
    message: WithTransaction<Envelope, W::Db>,
) -> Result<(), BoxError> {
    let WithTransaction {
        request: invoice,
        mut transaction,
    } = message;
    let id = invoice.id().ok_or("no id")?;
    let write = format!("INSERT INTO {tables}_invoices (id) VALUES ('{id}')");
    W::execute(&mut transaction, write).await?;
    Ok(())
}

async fn one_message_leaves_one_follow_up<W: World>() {
    let Some(world) = W::open("outbox").await else {
        return;
    };
    let table = world.table().to_owned();
    // Nothing but the record keeps a second row out.
    for (name, column) in [("orders", "id"), ("outbox", "body"), ("invoices", "id")] {
        let create = format!("CREATE TABLE {{t}}_{name} ({column} TEXT NOT NULL)");
        world.run(&create).await;
    }
    let pool = world.pool(u32::try_from(COPIES).unwrap()).await;
    let query = |query: &str| query.replace("{t}", &table);
    let count = async |rows: &str| {
        let mut connection = pool.acquire().await.unwrap();
        let query = query(&format!("SELECT count(*) FROM {{t}}_{rows}"));
        W::number(&mut connection, query).await.unwrap()
    };

    let layer = TransactionLayer::new(pool.clone(), &table).unwrap();
    let gate = Gate::new();
    let (tables, at) = (table.clone(), gate.clone());
    let orders = layer
        .clone()
        .lock_wait(PATIENCE)
        .outcome()
        .layer(service_fn(move |message| {
            order::<W>(tables.clone(), at.clone(), message)
        }));
    let message = Envelope::new("urn:shop:order", &serde_json::json!({"item": 7})).unwrap();
    let copies: Vec<_> = (0..COPIES)
        .map(|_| tokio::spawn(orders.clone().oneshot(message.clone())))
        .collect();
    // One of them has written both rows, and another one waits for it.
    let arrived = timeout(PATIENCE, gate.arrived.acquire()).await;
    drop(arrived.expect("no copy came so far"));
    world.until_waiting(&copies[COPIES - 1]).await;
    gate.open.close();
    let mut ran = 0;
    for copy in copies {
        match copy.await.unwrap() {
            Ok(Outcome::Ran(())) => ran += 1,
            Ok(outcome) => assert!(matches!(outcome, Outcome::Duplicate)),
            Err(error) => panic!("a copy was not acked: {error}"),
        }
    }
    assert_eq!(ran, 1);
    let again = orders.oneshot(message.clone()).await.unwrap();
    assert!(matches!(again, Outcome::Duplicate));
    assert_eq!((count("orders").await, count("outbox").await), (1, 1));

    let mut connection = pool.acquire().await.unwrap();
    let body = query("SELECT body FROM {t}_outbox");
    let body = W::text(&mut connection, body).await.unwrap();
    drop(connection);
    let follow_up = Envelope::decode(body.as_bytes()).unwrap();
    follow_up.accepts().unwrap();
    assert_eq!(follow_up.trace_id(), message.trace_id());
    assert!(follow_up.id().is_some_and(|id| !id.is_empty()));
    assert_ne!(follow_up.id(), message.id());

    // A relay that dies before it has deleted the row publishes it twice. Its consumer has a record of its own.
    let layer = TransactionLayer::new(pool.clone(), &format!("{table}_2")).unwrap();
    layer.migrate().await.unwrap();
    let tables = table.clone();
    let invoices = layer.outcome().layer(service_fn(move |message| {
        invoice::<W>(tables.clone(), message)
    }));
    let first = invoices.clone().oneshot(follow_up.clone()).await.unwrap();
    let second = invoices.oneshot(follow_up).await.unwrap();
    assert!(matches!(first, Outcome::Ran(())));
    assert!(matches!(second, Outcome::Duplicate));
    assert_eq!(count("invoices").await, 1);

    for table in ["orders", "outbox", "invoices", "2"] {
        world.run(&format!("DROP TABLE {{t}}_{table}")).await;
    }
    pool.close().await;
    world.drop().await;
}

#[tokio::test]
async fn one_message_leaves_one_follow_up_on_postgres() {
    one_message_leaves_one_follow_up::<Postgres>().await;
}

#[tokio::test]
async fn one_message_leaves_one_follow_up_on_mysql() {
    one_message_leaves_one_follow_up::<MySql>().await;
}

#[tokio::test]
async fn one_message_leaves_one_follow_up_on_sqlite() {
    one_message_leaves_one_follow_up::<Sqlite>().await;
}
