//! A store that is chosen by its URL: each scheme, what is refused and why, and that no URL is told.
#![allow(missing_docs)]

#[path = "support/services.rs"]
mod services;

use std::{error::Error, future::Future, time::Duration};
use tower_idempotency::{
    ConfigError, MessageId, Store,
    error::{BackendError, BackendErrorKind},
    store::{BoxStore, Claim, ClaimStore, Lease, Owner},
};

fn run<F: Future>(future: F) -> F::Output {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().unwrap().block_on(future)
}

fn refused(url: &str, name: &str) -> BackendError {
    run(BoxStore::connect(url, name)).expect_err(url)
}

/// The setting that was refused, and the whole of what is said.
fn config(url: &str, name: &str) -> (&'static str, String) {
    let error = refused(url, name);
    assert_eq!(error.kind(), BackendErrorKind::Config, "{url}: {error}");
    let source = error.source().unwrap().downcast_ref::<ConfigError>();
    (source.expect(url).setting(), error.to_string())
}

/// All that an error shows to whoever looks.
fn shown(error: &BackendError) -> String {
    let mut text = format!("{error} {error:#} {error:?} {error:#?}");
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(&format!(" {error} {error:?}"));
        source = error.source();
    }
    text
}

const SCHEMES: &str = "`memory:`, `redis://`, `rediss://`, `valkey://`, `valkeys://`, `postgres://`, \
                       `postgresql://`, `mysql://`, `mariadb://` or `sqlite:`";

#[test]
fn a_scheme_that_is_unknown_is_told() {
    for (url, scheme) in [
        ("http://example.com", "http"),
        ("amqp+tls.1-x://u:p@h", "amqp+tls.1-x"),
        ("Redis://127.0.0.1", "Redis"),
        ("REDIS://127.0.0.1", "REDIS"),
        ("redis+unix:///run/redis.sock", "redis+unix"),
        ("mongodb://", "mongodb"),
    ] {
        let text = format!("`url` is of the scheme `{scheme}`; expected {SCHEMES}");
        assert_eq!(config(url, "billing"), ("url", text));
    }
    // Nothing is shown of what may be anything.
    for url in [
        "",
        ":",
        "://",
        "//",
        "hunter2",
        "user:hunter2@localhost/db",
        "hunter2:/x",
        "hunter2:x//",
        "hun ter2://x",
        "2hunter://x",
        "hunter\u{e9}2://x",
        " redis://x",
        "localhost:6379",
        "memory",
    ] {
        let text = format!("`url` is none; expected {SCHEMES}");
        assert_eq!(config(url, "billing"), ("url", text), "{url}");
    }
}

#[test]
fn a_name_must_not_be_empty() {
    let text =
        "`name` is empty; expected the prefix or table of one consumer, which no other one has";
    for url in [
        "memory:",
        "redis://127.0.0.1",
        "sqlite:x.db",
        "http://x",
        "",
    ] {
        assert_eq!(config(url, ""), ("name", text.to_owned()), "{url}");
    }
}

#[test]
fn memory_takes_no_more_of_a_url() {
    for url in ["memory:x", "memory:///", "memory://hunter2"] {
        let text = "`url` is of the scheme `memory`; expected `memory:` and nothing after it";
        assert_eq!(config(url, "billing"), ("url", text.to_owned()));
    }
    for url in ["memory:", "memory://"] {
        let store = run(BoxStore::connect(url, "billing")).unwrap();
        assert_eq!(format!("{store:?}"), "BoxStore");
    }
}

#[test]
fn a_feature_that_is_not_on_is_told() {
    let missing = |feature: &str, schemes: &[&str]| {
        for scheme in schemes {
            let (setting, text) = config(&format!("{scheme}://u:hunter2@localhost/x"), "billing");
            let expected = format!(
                "`url` is of the scheme `{scheme}`; expected the feature `{feature}` of \
                 `tower-idempotency` to be on"
            );
            assert_eq!((setting, text), ("url", expected));
        }
    };
    if cfg!(not(feature = "redis")) {
        missing("redis", &["redis", "rediss", "valkey", "valkeys"]);
    }
    if cfg!(not(feature = "postgres")) {
        missing("postgres", &["postgres", "postgresql"]);
    }
    if cfg!(not(feature = "mysql")) {
        missing("mysql", &["mysql", "mariadb"]);
    }
    if cfg!(not(feature = "sqlite")) {
        missing("sqlite", &["sqlite"]);
    }
}

#[test]
fn a_server_needs_a_host() {
    for scheme in [
        "redis",
        "rediss",
        "valkey",
        "valkeys",
        "postgres",
        "postgresql",
        "mysql",
        "mariadb",
    ] {
        let text = format!("`url` is of the scheme `{scheme}`; expected `//` and a host after it");
        for rest in [":hunter2", ":/hunter2", ":"] {
            let told = config(&format!("{scheme}{rest}"), "billing");
            assert_eq!(told, ("url", text.clone()));
        }
    }
}

#[test]
fn no_password_is_told() {
    let schemes = [
        "memory",
        "redis",
        "rediss",
        "valkey",
        "valkeys",
        "postgres",
        "postgresql",
        "mysql",
        "mariadb",
        "sqlite",
        "http",
        "Postgres",
        "",
    ];
    // Nobody is there, or it is no URL; SQLite finds no such folder.
    let rests = [
        "://u:hunter2@127.0.0.1:1/db",
        "://:hunter2@127.0.0.1:1/db",
        "://u:hunter2@127.0.0.1:port/db",
        "://u:hunter2@127.0.0.1:99999/db",
        "://u:hunter2@[::1/db",
        "://u:hunter2@:1/db",
        "://u:hunter2/x@127.0.0.1:1/x/y",
        "://u:hunter2@127.0.0.1:1/db?password=hunter2",
        "://u:hunter2@127.0.0.1:1/db#hunter2",
        ":/u:hunter2@127.0.0.1:1/db",
        ":u:hunter2@127.0.0.1:1/db",
        ":hunter2@127.0.0.1:1/db",
        "//u:hunter2@127.0.0.1:1/db",
        " ://u:hunter2@127.0.0.1:1/db",
    ];
    // A pool tries for some seconds whether the server comes up.
    let mut asked = Vec::new();
    for scheme in schemes {
        asked.extend(rests.map(|rest| format!("{scheme}{rest}")));
    }
    let answers = asked.iter().map(|url| BoxStore::connect(url, "billing"));
    let answers = run(futures_util::future::join_all(answers));
    for (url, answer) in asked.iter().zip(answers) {
        let text = shown(&answer.expect_err(url));
        assert!(!text.contains("hunter2"), "{url}: {text}");
    }
}

#[cfg(feature = "redis")]
#[test]
fn tls_needs_a_feature_of_the_redis_crate() {
    // As the tests are built; with one, the server would have to be there.
    for scheme in ["rediss", "valkeys"] {
        let (setting, text) = config(&format!("{scheme}://u:hunter2@localhost:1"), "billing:");
        let expected = format!(
            "`url` is of the scheme `{scheme}`; expected a TLS feature of the `redis` crate to be on, \
             such as `tokio-rustls-comp`"
        );
        assert_eq!((setting, text), ("url", expected));
    }
}

// ===== each store =====

async fn round_trip(url: &str, name: &str) -> BoxStore {
    let store = BoxStore::connect(url, name).await.unwrap();
    let (owner, m) = (Owner::from_bits(1), MessageId::random());
    let lease = Lease::new(Duration::from_secs(60)).unwrap();
    assert!(!store.seen(&m).await.unwrap());
    assert_eq!(store.claim(&m, owner, lease).await.unwrap(), Claim::Won);
    assert!(!store.seen(&m).await.unwrap());
    assert!(store.renew(&m, owner, lease).await.unwrap());
    assert!(store.release(&m, owner).await.unwrap());
    let other = Owner::from_bits(2);
    assert_eq!(store.claim(&m, other, lease).await.unwrap(), Claim::Won);
    assert!(store.complete(&m, other).await.unwrap());
    assert!(store.seen(&m).await.unwrap());
    assert_eq!(store.claim(&m, owner, lease).await.unwrap(), Claim::Done);
    // Another store of this URL and name has the same record, unless it is in memory.
    let same = BoxStore::connect(url, name).await.unwrap();
    assert_eq!(same.seen(&m).await.unwrap(), !url.starts_with("memory"));
    store.forget(&m).await.unwrap();
    assert!(!store.seen(&m).await.unwrap());
    store.remember(&m).await.unwrap();
    assert!(store.seen(&m).await.unwrap());
    store.forget(&m).await.unwrap();
    store
}

#[test]
fn in_memory() {
    run(round_trip("memory:", "billing"));
}

#[cfg(feature = "redis")]
#[test]
fn in_redis() {
    let Some(url) = services::redis() else { return };
    let prefix = services::unique("boxed");
    run(round_trip(&url, &prefix));
    let (_, rest) = url.split_once("://").unwrap();
    run(round_trip(&format!("valkey://{rest}"), &prefix));
}

#[cfg(feature = "postgres")]
#[test]
fn in_postgres() {
    use sqlx::Connection;

    let Some(url) = services::postgres() else {
        return;
    };
    let (_, rest) = url.split_once("://").unwrap();
    for scheme in ["postgres", "postgresql"] {
        let table = services::unique("boxed");
        run(async {
            round_trip(&format!("{scheme}://{rest}"), &table).await;
            let mut raw = sqlx::PgConnection::connect(&url).await.unwrap();
            let drop = sqlx::AssertSqlSafe(format!("DROP TABLE {table}"));
            sqlx::raw_sql(drop).execute(&mut raw).await.unwrap();
        });
    }
}

#[cfg(feature = "mysql")]
#[test]
fn in_mysql() {
    use sqlx::Connection;

    let Some(url) = services::mysql() else { return };
    let (_, rest) = url.split_once("://").unwrap();
    for scheme in ["mysql", "mariadb"] {
        let table = services::unique("boxed");
        run(async {
            round_trip(&format!("{scheme}://{rest}"), &table).await;
            let mut raw = sqlx::MySqlConnection::connect(&url).await.unwrap();
            let drop = sqlx::AssertSqlSafe(format!("DROP TABLE {table}"));
            sqlx::raw_sql(drop).execute(&mut raw).await.unwrap();
        });
    }
}

#[cfg(feature = "sqlite")]
#[test]
fn in_sqlite() {
    let dir = std::env::temp_dir().join(services::unique("boxed"));
    std::fs::create_dir(&dir).unwrap();
    for (slashes, file) in [("", "a.db"), ("//", "b.db")] {
        let file = dir.join(file);
        run(round_trip(
            &format!("sqlite:{slashes}{}", file.display()),
            "seen",
        ));
        assert!(file.is_file());
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
