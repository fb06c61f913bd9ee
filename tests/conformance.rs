//! BabelQueue's conformance suite: every block of its `manifest.json`, run against this crate.
//!
//! `BABELQUEUE_CONFORMANCE` names the folder. Without it the tests are skipped, or fail when
//! `REQUIRE_SERVICES=1`. A block, or a field of one, that nobody here reads is a failure.

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value};
use std::{
    collections::BTreeMap,
    env, fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_idempotency::{
    Envelope, ExtractId, IdempotencyLayer, MemoryStore, MessageId, MetaId, Store,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    schema_version: i64,
    cases: Vec<Case>,
    idempotency: Idempotency,
    roundtrip: Cases<RoundTrip>,
    data_shape: Cases<Shape>,
    forbidden_keys: Cases<Forbidden>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Cases<T> {
    cases: Vec<T>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    name: String,
    file: PathBuf,
    valid: bool,
    expect: Option<Expect>,
    #[serde(rename = "reason")]
    _reason: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expect {
    urn: Option<String>,
    data: Option<Value>,
    attempts: Option<i64>,
    lang: Option<String>,
    schema_version: Option<i64>,
    dead_letter: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RoundTrip {
    name: String,
    file: PathBuf,
    expect_after_one_retry: BTreeMap<String, Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Shape {
    name: String,
    file: PathBuf,
    valid: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Forbidden {
    name: String,
    file: PathBuf,
    pointer: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Idempotency {
    dedup_key: DedupKey,
    sequences: Cases<Sequence>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DedupKey {
    envelope_file: PathBuf,
    key_field: String,
    expected_key: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sequence {
    name: String,
    deliveries: Vec<Delivery>,
    expected_effects: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Delivery {
    meta_id: String,
    expect_effect: Effect,
    outcome: Option<Outcome>,
    #[serde(default)]
    forget_before: bool,
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Effect {
    Run,
    Skip,
}

#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Ok,
    Throw,
}

struct Suite {
    folder: PathBuf,
    manifest: Manifest,
}

impl Suite {
    fn load() -> Option<Self> {
        let Some(folder) = env::var_os("BABELQUEUE_CONFORMANCE").filter(|name| !name.is_empty())
        else {
            let required = env::var("REQUIRE_SERVICES").is_ok_and(|value| value == "1");
            assert!(!required, "BABELQUEUE_CONFORMANCE names no folder");
            // Past the capture of a test that passes.
            let _ = writeln!(
                io::stderr(),
                "skipped: BABELQUEUE_CONFORMANCE names no folder"
            );
            return None;
        };
        let folder = PathBuf::from(folder);
        let manifest: Manifest = json(&folder.join("manifest.json"));
        assert_eq!(manifest.schema_version, 1);
        Some(Suite { folder, manifest })
    }

    fn body(&self, file: &Path) -> Vec<u8> {
        read(&self.folder.join(file))
    }
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn json<T: DeserializeOwned>(path: &Path) -> T {
    serde_json::from_slice(&read(path))
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn some<T>(cases: &[T]) -> &[T] {
    assert!(!cases.is_empty(), "a block without cases");
    cases
}

fn reencoded(envelope: &Envelope) -> Value {
    serde_json::from_str(&envelope.encode()).unwrap()
}

/// Decodes and is accepted.
fn is_usable(body: &[u8]) -> bool {
    Envelope::decode(body).is_ok_and(|envelope| envelope.accepts().is_ok())
}

#[test]
fn cases() {
    let Some(suite) = Suite::load() else { return };
    for case in some(&suite.manifest.cases) {
        let (name, body) = (&case.name, suite.body(&case.file));
        assert_eq!(is_usable(&body), case.valid, "{name}");
        assert_eq!(case.expect.is_some(), case.valid, "{name}");
        let Some(expect) = &case.expect else { continue };
        let envelope = Envelope::decode(&body).unwrap();
        if let Some(urn) = &expect.urn {
            assert_eq!(envelope.urn(), urn, "{name}");
        }
        if let Some(data) = &expect.data {
            assert_eq!(&envelope.data::<Value>().unwrap(), data, "{name}");
        }
        if let Some(attempts) = expect.attempts {
            assert_eq!(envelope.attempts(), attempts, "{name}");
        }
        if let Some(lang) = &expect.lang {
            assert_eq!(envelope.meta().lang(), Some(&**lang), "{name}");
        }
        if expect.schema_version.is_some() {
            assert_eq!(
                envelope.meta().schema_version(),
                expect.schema_version,
                "{name}"
            );
        }
        let block = envelope.dead_letter();
        assert_eq!(block.is_some(), expect.dead_letter.is_some(), "{name}");
        for (key, value) in expect.dead_letter.iter().flatten() {
            assert_eq!(
                reencoded(&envelope)["dead_letter"].get(key),
                Some(value),
                "{name}: {key}"
            );
        }
    }
}

#[test]
fn roundtrip() {
    let Some(suite) = Suite::load() else { return };
    for case in some(&suite.manifest.roundtrip.cases) {
        let name = &case.name;
        let envelope = Envelope::decode(&suite.body(&case.file)).expect(name);
        let attempts = envelope.attempts() + 1;
        let written = reencoded(&envelope.with_attempts(attempts));
        assert!(!case.expect_after_one_retry.is_empty(), "{name}");
        for (pointer, value) in &case.expect_after_one_retry {
            assert_eq!(written.pointer(pointer), Some(value), "{name}: {pointer}");
        }
    }
}

#[test]
fn data_shape() {
    let Some(suite) = Suite::load() else { return };
    for case in some(&suite.manifest.data_shape.cases) {
        assert_eq!(
            is_usable(&suite.body(&case.file)),
            case.valid,
            "{}",
            case.name
        );
    }
}

#[test]
fn forbidden_keys() {
    let Some(suite) = Suite::load() else { return };
    for case in some(&suite.manifest.forbidden_keys.cases) {
        let (name, body) = (&case.name, suite.body(&case.file));
        let sent: Value = serde_json::from_slice(&body).unwrap();
        assert!(sent.pointer(&case.pointer).is_some(), "{name}");
        let envelope = Envelope::decode(&body).expect(name);
        let warned: Vec<_> = envelope.warnings().iter().map(|w| w.pointer()).collect();
        assert_eq!(warned, [case.pointer.as_str()], "{name}");
        assert_eq!(reencoded(&envelope).pointer(&case.pointer), None, "{name}");
    }
}

#[test]
fn dedup_key() {
    let Some(suite) = Suite::load() else { return };
    let DedupKey {
        envelope_file,
        key_field,
        expected_key,
    } = &suite.manifest.idempotency.dedup_key;
    assert_eq!(key_field, "meta.id");
    let envelope = Envelope::decode(&suite.body(envelope_file)).unwrap();
    let id = MetaId.extract_id(&envelope);
    assert_eq!(id.as_deref(), Some(expected_key.as_str()));
}

#[tokio::test]
async fn sequences() {
    let Some(suite) = Suite::load() else { return };
    for sequence in some(&suite.manifest.idempotency.sequences.cases) {
        let name = &sequence.name;
        let store = MemoryStore::new();
        let runs = Arc::new(AtomicUsize::new(0));
        for (at, delivery) in some(&sequence.deliveries).iter().enumerate() {
            let id = MessageId::from(delivery.meta_id.as_str());
            if delivery.forget_before {
                store.forget(&id).await.unwrap();
            }
            let (counter, outcome) = (runs.clone(), delivery.outcome);
            let mut service = ServiceBuilder::new()
                .layer(IdempotencyLayer::new(store.clone()))
                .service(service_fn(move |_: Envelope| {
                    counter.fetch_add(1, Ordering::Relaxed);
                    async move {
                        match outcome {
                            Some(Outcome::Throw) => Err("thrown"),
                            _ => Ok(()),
                        }
                    }
                }));
            let envelope = Envelope::new("urn:babel:test", &Map::new())
                .unwrap()
                .with_id(id);
            let before = runs.load(Ordering::Relaxed);
            let answer = service.ready().await.unwrap().call(envelope).await;
            let effect = match runs.load(Ordering::Relaxed) - before {
                0 => Effect::Skip,
                _ => Effect::Run,
            };
            assert_eq!(effect, delivery.expect_effect, "{name}, delivery {at}");
            let thrown = answer.is_err_and(|error| error.to_string() == "thrown");
            assert_eq!(
                thrown,
                effect == Effect::Run && outcome == Some(Outcome::Throw),
                "{name}, delivery {at}"
            );
        }
        assert_eq!(
            runs.load(Ordering::Relaxed),
            sequence.expected_effects,
            "{name}"
        );
    }
}
