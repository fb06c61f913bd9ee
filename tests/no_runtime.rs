//! The layer on no runtime at all; with the feature `tokio` and without it.

mod support;

use std::{
    future::Future,
    pin::pin,
    task::{Context, Waker},
};
use support::{
    FaultStore, Handler,
    What::{Fail, Hang},
    When::Before,
    deliver, envelope, layer, now,
};
use tower::{Layer, Service};
use tower_idempotency::{
    IdempotencyLayer,
    error::Operation::{Remember, Seen},
};

#[test]
fn nothing_is_timed_and_nothing_panics() {
    let faults = [
        (Remember, Before, Fail),
        (Remember, Before, Fail),
        (Seen, Before, Hang),
    ];
    let (handler, store) = (Handler::default(), FaultStore::new(faults));
    let mut service = IdempotencyLayer::new(store.clone()).layer(handler.clone());
    let mut hanging = pin!(service.call(envelope("a")));
    for _ in 0..3 {
        let polled = hanging
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
    }
    // A mark is sent again without a pause.
    now(deliver(&mut service, envelope("a"))).unwrap();
    assert_eq!(store.calls(), [Seen, Seen, Remember, Remember, Remember]);
    assert!(store.remembers("a"));
}

#[test]
fn a_mark_that_is_dropped_is_reported_as_abandoned() {
    let store = FaultStore::new([(Remember, Before, Hang)]);
    let (layer, events) = layer(store.clone());
    let mut call = Box::pin(layer.layer(Handler::default()).call(envelope("a")));
    assert!(
        call.as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    );
    assert_eq!(store.calls(), [Seen, Remember]);
    drop(call);
    assert_eq!(events.all(), ["abandoned a"]);
    assert_eq!(store.calls(), [Seen, Remember], "the drop calls no store");
}
