//! What a message costs in heap allocations, and what an idle record gives back.

mod support;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use support::now;
use tower::{Layer, Service, service_fn};
use tower_idempotency::{BoxError, Envelope, IdempotencyLayer, MemoryStore, MessageId, Store};

/// Counts what the thread it is asked on allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<i64> = const { Cell::new(0) };
}

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: hands every request to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        BYTES.set(BYTES.get() + layout.size() as i64);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.set(BYTES.get() - layout.size() as i64);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

fn allocations(work: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

/// Every service here is ready, so that the count is the layer's alone.
fn call<Req, S: Service<Req>>(service: &mut S, request: Req) -> S::Response
where
    S::Error: std::fmt::Debug,
{
    now(std::future::poll_fn(|cx| service.poll_ready(cx))).unwrap();
    now(service.call(request)).unwrap()
}

#[test]
fn the_count_counts() {
    assert_eq!(allocations(|| drop(Box::new(1))), 1);
    assert_eq!(allocations(|| drop(String::from("a"))), 1);
}

#[test]
fn an_envelope_is_deduplicated_without_the_heap() {
    // One shard, whose table has room for 1792 ids once it holds 1000: growth is the record's
    // affair and not the messages'.
    let store = MemoryStore::builder().capacity(20_000).build().unwrap();
    for _ in 0..1000 {
        now(store.remember(&MessageId::random())).unwrap();
    }
    let handler = service_fn(|_: Envelope| ready(Ok::<_, BoxError>(())));
    let mut service = IdempotencyLayer::new(store.clone()).layer(handler);
    let messages: Vec<_> = (0..700)
        .map(|_| Envelope::new("urn:x", &serde_json::json!({"cents": 1})).unwrap())
        .collect();
    let mut deliver = || {
        allocations(|| {
            for message in &messages {
                call(&mut service, message.clone());
            }
        })
    };
    assert_eq!(deliver(), 0, "first deliveries");
    assert_eq!(store.len(), 1700);
    assert_eq!(deliver(), 0, "duplicates");
    assert_eq!(store.len(), 1700);
}

#[test]
fn a_foreign_request_is_deduplicated_without_the_heap() {
    struct Job {
        key: &'static str,
    }

    // Up to 36 bytes, a UUID or not. The record copies an id that is no UUID, once, when it is new.
    let keys = [
        "a",
        "order-1042",
        "ORDER-1042-THAT-TAKES-36-CHARACTERS!",
        "f1e2d3c4-b5a6-4789-90ab-cdef01234567",
    ];
    let store = MemoryStore::new();
    let mut service = IdempotencyLayer::new(store.clone())
        .id_from(|job: &Job| Some(MessageId::from(job.key)))
        .done_if(|(): &()| true)
        .on_event(|_| {})
        .layer(service_fn(|_: Job| ready(Ok::<_, BoxError>(()))));
    for key in keys {
        let growth = allocations(|| now(store.remember(&key.into())).unwrap());
        now(store.forget(&key.into())).unwrap();
        let again = allocations(|| now(store.remember(&key.into())).unwrap());
        now(store.forget(&key.into())).unwrap();
        let first = allocations(|| call(&mut service, Job { key }));
        let duplicate = allocations(|| call(&mut service, Job { key }));
        let copy = usize::from(MessageId::from(key).as_uuid().is_none());
        assert_eq!(
            (again, first, duplicate),
            (copy, copy, 0),
            "{key}, after {growth} of growth"
        );
    }
}

#[test]
#[cfg(feature = "tokio")]
fn a_claim_takes_nothing_of_the_heap() {
    use tower_idempotency::{Claim, ClaimStore, Lease, Owner};

    // The task that renews is started by the first claim. It looks again in a month, so the count
    // is the calls' alone.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    let _entered = runtime.enter();
    let lease = Lease::new(Lease::MAX).unwrap();
    let other = |number| MessageId::from(format!("order-{number:030}"));
    let ids: [&dyn Fn(usize) -> MessageId; 2] = [&|_| MessageId::random(), &other];
    for id in ids {
        // Room for all of them.
        let store = MemoryStore::builder().capacity(20_000).build().unwrap();
        for number in 10_000..11_000 {
            now(store.remember(&id(number))).unwrap();
        }
        let layer = IdempotencyLayer::new(store.clone())
            .id_from(|id: &MessageId| Some(id.clone()))
            .on_event(|_| {})
            .claim(lease);
        let mut service = layer.layer(service_fn(|_: MessageId| ready(Ok::<_, BoxError>(()))));
        call(&mut service, id(0));
        let messages: Vec<_> = (1..=700).map(id).collect();
        let mut deliver = || {
            allocations(|| {
                for message in &messages {
                    call(&mut service, message.clone());
                }
            })
        };
        // The record copies an id that is no UUID, once.
        let copies = if messages[0].as_uuid().is_some() {
            0
        } else {
            messages.len()
        };
        assert_eq!(deliver(), copies, "first deliveries");
        assert_eq!(deliver(), 0, "duplicates");
        assert_eq!(store.len(), 1701);
        // Parked: the error's box.
        let busy = id(1000);
        let claim = now(store.claim(&busy, Owner::random(), lease)).unwrap();
        assert_eq!(claim, Claim::Won);
        for _ in 0..10 {
            let parked = allocations(|| {
                now(service.call(busy.clone())).unwrap_err();
            });
            assert_eq!(parked, 1);
        }
    }
}

#[test]
fn expired_ids_give_their_memory_back_though_nobody_asks_for_them() {
    for id in [
        |_: u64| MessageId::random(),
        |number: u64| MessageId::from(format!("order-{number:030}")),
    ] {
        let clock = Arc::new(AtomicU64::new(0));
        let store = MemoryStore::builder()
            .ttl(Duration::from_secs(1))
            .clock({
                let clock = clock.clone();
                move || Duration::from_secs(clock.load(Ordering::Relaxed))
            })
            .build()
            .unwrap();
        let baseline = BYTES.get();
        for number in 0..1_000_000 {
            now(store.remember(&id(number))).unwrap();
        }
        assert!(BYTES.get() - baseline > 16_000_000);
        clock.store(10, Ordering::Relaxed);
        for number in 1_000_000..1_001_000 {
            now(store.remember(&id(number))).unwrap();
        }
        let held = BYTES.get() - baseline;
        assert!(held < 1_000_000, "{held} bytes for 1000 ids");
        assert_eq!(store.len(), 1000);
        clock.store(20, Ordering::Relaxed);
        assert_eq!(store.len(), 0);
        let held = BYTES.get() - baseline;
        assert!(held < 100_000, "{held} bytes for none");
    }
}

#[test]
fn a_duplicate_never_pays_for_its_data() {
    let data = format!(r#"{{"blob":"{}"}}"#, "x".repeat(1 << 20));
    let body = format!(
        r#"{{"job":"urn:x","trace_id":"t","data":{data},"meta":{{"id":"a","schema_version":1}}}}"#
    );
    let before = BYTES.get();
    let envelope = Envelope::decode(body.as_bytes()).unwrap();
    let held = BYTES.get() - before;
    assert!(held < (1 << 20) + 4096, "{held} bytes for 1 MiB of data");
    assert_eq!(allocations(|| drop(envelope.clone())), 0);
}
