//! Workers in transactional mode that are killed at random moments, over PostgreSQL, MariaDB and SQLite:
//! each effect is there exactly once, whatever a kill fell between.
//!
//! The effect is a row in a ledger, which has no key that would refuse a second one. The broker is that of
//! `killed.rs`.
#![cfg(unix)]
#![allow(missing_docs)]

#[path = "support/broker.rs"]
mod broker;
#[path = "support/services.rs"]
mod services;
#[path = "support/world.rs"]
mod world;

use broker::{Answer, Broker, Plan};
use services::unique;
use sqlx::pool::PoolOptions;
use std::{env, time::Duration};
use tower::{Layer, ServiceExt, service_fn};
use tower_idempotency::{
    BoxError, Outcome, Parked, StoreError, TransactionLayer, Unfinished, WithTransaction,
};
use world::{MySql, Postgres, Sqlite, World};

const MESSAGES: usize = 500;
const IN_FLIGHT: usize = 4;

// ===== the worker =====

/// Not a test: what a worker process does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn worker() {
    match env::var("KILLED_DATABASE").as_deref() {
        Ok("PostgreSQL") => work::<Postgres>().await,
        Ok("MariaDB") => work::<MySql>().await,
        Ok("SQLite") => work::<Sqlite>().await,
        _ => {}
    }
}

async fn work<W: World>() {
    let url = env::var("KILLED_URL").unwrap();
    let table = env::var("KILLED_RECORD").unwrap();
    let pool = PoolOptions::<W::Db>::new()
        .max_connections(u32::try_from(IN_FLIGHT).unwrap())
        .connect(&url)
        .await
        .unwrap();
    let ledger = format!("{table}_ledger");
    let handler = service_fn(move |message| charge::<W>(ledger.clone(), message));
    let consumer = TransactionLayer::new(pool, &table)
        .unwrap()
        .id_from(|id: &String| Some(id.clone()))
        .outcome()
        .layer(handler);
    broker::work(|id| {
        let consumer = consumer.clone();
        async move {
            match consumer.oneshot(id).await {
                Ok(Outcome::Ran(())) => Answer::Ack("ran"),
                Ok(_) => Answer::Ack("duplicate"),
                Err(error) => back(&error),
            }
        }
    })
    .await;
}

fn back(error: &BoxError) -> Answer {
    if let Some(parked) = error.downcast_ref::<Parked>() {
        return Answer::Back("parked", parked.retry_after());
    }
    if error.is::<StoreError>() || error.is::<Unfinished>() {
        return Answer::Back("trouble", Duration::from_millis(50));
    }
    Answer::Back("failed", Duration::ZERO)
}

async fn charge<W: World>(
    ledger: String,
    message: WithTransaction<String, W::Db>,
) -> Result<(), BoxError> {
    let WithTransaction {
        request: id,
        mut transaction,
    } = message;
    pause().await;
    let effect = format!("INSERT INTO {ledger} (id) VALUES ('{id}')");
    W::execute(&mut transaction, effect).await?;
    pause().await;
    if rand::random_ratio(1, 10) {
        return Err("card declined".into());
    }
    Ok(())
}

/// So that there is something before and after the effect that a kill can fall into.
async fn pause() {
    tokio::time::sleep(Duration::from_millis(rand::random_range(0..=20))).await;
}

// ===== the audit =====

async fn each_effect_is_there_exactly_once<W: World>(name: &'static str) {
    let Some(world) = W::open("killed_tx").await else {
        return;
    };
    world
        .run("CREATE TABLE {t}_ledger (id VARCHAR(64) NOT NULL)")
        .await;
    let plan = Plan {
        workers: 3,
        in_flight: IN_FLIGHT,
        kills: usize::MAX,
        // At least 50 in 1,000 deliveries.
        acks: 8..20,
        pause: 0..30,
        patience: Duration::from_secs(180),
    };
    let variables = vec![
        ("KILLED_DATABASE", name.to_owned()),
        ("KILLED_URL", world.url().to_owned()),
        ("KILLED_RECORD", world.table().to_owned()),
    ];
    let deliveries = deliveries();
    let delivered = tokio::task::spawn_blocking(move || {
        let mut broker = Broker::new(plan, variables);
        broker.deliver(deliveries);
        broker
    });
    let broker = delivered.await.unwrap();

    let pool = world.pool(1).await;
    let mut connection = pool.acquire().await.unwrap();
    let mut count = async |what: &str| {
        let query = format!("SELECT count(*) FROM {what}");
        let query = query.replace("{t}", world.table());
        W::number(&mut connection, query).await.unwrap()
    };
    let effects = count("{t}_ledger").await;
    let charged = count("(SELECT DISTINCT id FROM {t}_ledger) AS charged").await;
    let recorded = count("{t}").await;
    let done = count(
        "{t} JOIN (SELECT DISTINCT id FROM {t}_ledger) AS charged ON id = message_id \
         WHERE state = 'done'",
    )
    .await;
    drop(connection);
    pool.close().await;
    world.run("DROP TABLE {t}_ledger").await;
    world.drop().await;

    let kills = broker.killed.len();
    let said = |why| broker.count(why);
    println!(
        "{name}: {} deliveries of {MESSAGES} messages, {kills} kills; {effects} effects, {} missing, \
         {} repeated; {} committed by a worker that died before it said so; {} duplicates, \
         {} failed, {} parked, {} other errors",
        2 * MESSAGES,
        MESSAGES as i64 - charged,
        effects - charged,
        MESSAGES.saturating_sub(said("ran")),
        said("duplicate"),
        said("failed"),
        said("parked"),
        said("trouble"),
    );
    let all = MESSAGES as i64;
    assert_eq!(charged, all, "messages that had their effect");
    assert_eq!(effects, all, "effects");
    assert_eq!(done, all, "messages recorded as done that had their effect");
    assert_eq!(recorded, all, "rows in the record");
    assert!(kills >= 40, "too few kills to show anything");
    assert!(said("failed") > 0, "nothing was rolled back");
}

/// Each message twice, the second copy soon after the first, so that some meet.
fn deliveries() -> Vec<String> {
    let prefix = unique("message");
    let mut deliveries: Vec<_> = (0..MESSAGES)
        .flat_map(|n| [n, n])
        .map(|n| (n + rand::random_range(0..20), format!("{prefix}-{n}")))
        .collect();
    deliveries.sort();
    deliveries.into_iter().map(|(_, id)| id).collect()
}

#[tokio::test]
async fn each_effect_is_there_exactly_once_on_postgres() {
    each_effect_is_there_exactly_once::<Postgres>("PostgreSQL").await;
}

#[tokio::test]
async fn each_effect_is_there_exactly_once_on_mysql() {
    each_effect_is_there_exactly_once::<MySql>("MariaDB").await;
}

#[tokio::test]
async fn each_effect_is_there_exactly_once_on_sqlite() {
    each_effect_is_there_exactly_once::<Sqlite>("SQLite").await;
}
