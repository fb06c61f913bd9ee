//! What the dead-letter layer publishes, passes on and answers.

mod support;

use std::{
    future::{Ready, pending, ready},
    task::{Context, Poll},
};
use support::{Broken, Declined, Do, Handler, deliver, envelope, now};
use tokio::sync::mpsc;
use tower::{Layer, Service, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_idempotency::{
    BoxError, DeadLetter, DeadLetterLayer, Envelope, IdempotencyLayer, MemoryStore, Outcome,
    StoreError,
    envelope::{Headers, Reason},
    error::{Operation, Unpublished},
};

type Publisher = fn(Envelope) -> Ready<Result<(), BoxError>>;

/// Dead-letters one message; answers what was published.
fn published(
    layer: impl FnOnce(DeadLetterLayer<Publish>) -> DeadLetterLayer<Publish>,
    message: Envelope,
) -> Envelope {
    let (queue, mut dead) = mpsc::unbounded_channel();
    let layer = layer(DeadLetterLayer::new(Publish(queue)));
    now(deliver(&mut layer.layer(Handler::new([Do::Fail])), message)).unwrap();
    let message = dead.try_recv().unwrap();
    assert!(dead.try_recv().is_err(), "published twice");
    message
}

#[derive(Clone)]
struct Publish(mpsc::UnboundedSender<Envelope>);

impl Service<Envelope> for Publish {
    type Response = &'static str;
    type Error = mpsc::error::SendError<Envelope>;
    type Future = Ready<Result<&'static str, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, message: Envelope) -> Self::Future {
        ready(self.0.send(message).map(|()| "confirmed"))
    }
}

#[test]
fn the_message_is_annotated_and_otherwise_as_it_was() {
    let message = envelope("a")
        .with_queue("orders")
        .with_attempts(2)
        .with_extra("vendor", &[1, 2])
        .unwrap()
        .with_headers(Headers::new().with("traceparent", "00-ab"));
    let dead = published(|layer| layer, message.clone());
    let block = dead.dead_letter().unwrap();
    assert_eq!(block.reason(), Some("failed"));
    assert_eq!(block.error(), Some("card declined"));
    assert_eq!(block.exception(), None);
    assert_eq!(block.original_queue(), Some("orders"));
    assert_eq!(block.attempts(), Some(3));
    assert_eq!(block.lang(), Some("rust"));
    assert!(block.failed_at().unwrap() >= message.meta().created_at().unwrap());
    assert_eq!(dead.attempts(), 3);
    assert_eq!(dead.headers(), message.headers());
    assert_eq!(dead.redriven(), message.with_attempts(0));
}

#[test]
fn the_original_queue_is_the_messages_own_else_the_one_received_from() {
    let no_queue = Envelope::decode(br#"{"job":"urn:x","meta":{"id":"a"}}"#).unwrap();
    let empty = envelope("a").with_queue("");
    let received = Headers::new().with_queue("received");
    for message in [no_queue, empty] {
        let queue = |message: Envelope| {
            let dead = published(|layer| layer.queue("configured"), message);
            dead.dead_letter()
                .unwrap()
                .original_queue()
                .map(str::to_owned)
        };
        assert_eq!(queue(message.clone()).as_deref(), Some("configured"));
        let message = message.with_headers(received.clone());
        assert_eq!(queue(message.clone()).as_deref(), Some("received"));
        assert_eq!(queue(message.with_queue("own")).as_deref(), Some("own"));
    }
}

#[test]
fn the_reason_is_the_closures() {
    let dead = published(
        |layer| {
            layer.reason(|error| {
                assert!(error.is::<Declined>());
                Reason::UnknownUrn
            })
        },
        envelope("a"),
    );
    assert_eq!(dead.dead_letter().unwrap().reason(), Some("unknown_urn"));
}

#[test]
fn an_ok_passes_through_and_publishes_nothing() {
    let publisher: Publisher = |_| panic!("nothing to publish");
    let mut service = DeadLetter::new(
        service_fn(|_: Envelope| ready(Ok::<_, BoxError>(Some(7)))),
        service_fn(publisher),
    );
    assert_eq!(now(deliver(&mut service, envelope("a"))).unwrap(), Some(7));
}

#[test]
fn a_transient_error_passes_through_untouched() {
    let publisher: Publisher = |_| panic!("nothing to publish");
    let errors: [fn() -> BoxError; 2] = [
        || StoreError::new(Operation::Seen, "down").into(),
        || Unpublished::new("declined", "down").into(),
    ];
    for error in errors {
        let mut service = DeadLetter::new(
            service_fn(move |_: Envelope| ready(Err::<(), _>(error()))),
            service_fn(publisher),
        );
        let passed = now(deliver(&mut service, envelope("a"))).unwrap_err();
        assert_eq!(passed.to_string(), error().to_string());
    }
}

#[test]
fn a_handlers_own_error_is_a_failure_whatever_caused_it() {
    // Only the error itself is looked at: a store error somewhere below it is the handler's affair.
    #[derive(Debug)]
    struct Wrapped(StoreError);

    impl std::fmt::Display for Wrapped {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("wrapped")
        }
    }

    impl std::error::Error for Wrapped {
        fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
            Some(&self.0)
        }
    }

    let (queue, mut dead) = mpsc::unbounded_channel();
    let mut service = DeadLetter::new(
        service_fn(|_: Envelope| {
            ready(Err::<(), _>(Wrapped(StoreError::new(
                Operation::Seen,
                "down",
            ))))
        }),
        Publish(queue),
    );
    now(deliver(&mut service, envelope("a"))).unwrap();
    assert!(dead.try_recv().is_ok());
}

#[test]
fn when_publishing_fails_both_errors_go_up() {
    let (queue, dead) = mpsc::unbounded_channel();
    drop(dead);
    let mut service = DeadLetter::new(Handler::new([Do::Fail]), Publish(queue));
    let error = now(deliver(&mut service, envelope("a"))).unwrap_err();
    let error = error.downcast_ref::<Unpublished>().unwrap();
    assert!(error.failure().is::<Declined>());
    let source = std::error::Error::source(error).unwrap();
    assert!(source.is::<mpsc::error::SendError<Envelope>>());
    assert_eq!(
        error.to_string(),
        "not put on the dead-letter queue: channel closed; the message failed: card declined"
    );
}

#[test]
fn a_publisher_that_breaks_before_it_is_called_loses_nothing() {
    let mut service = DeadLetter::new(Handler::new([Do::Fail]), Broken);
    let error = now(deliver(&mut service, envelope("a"))).unwrap_err();
    assert!(error.is::<Unpublished>());
}

#[tokio::test]
async fn the_publisher_is_called_only_when_ready() {
    let (queue, mut dead) = mpsc::unbounded_channel();
    let mut publisher = ConcurrencyLimit::new(Publish(queue), 1);
    let service = DeadLetter::new(Handler::new([Do::Fail]), publisher.clone());
    // Somebody else holds the one permit there is.
    publisher.ready().await.unwrap();
    let mut call = tokio_test::task::spawn(service.oneshot(envelope("a")));
    tokio_test::assert_pending!(call.poll());
    assert!(dead.try_recv().is_err());
    drop(publisher);
    assert!(call.is_woken());
    tokio_test::assert_ready_ok!(call.poll());
    assert!(dead.try_recv().is_ok());
}

#[test]
fn the_answer_says_where_the_message_went() {
    let (queue, _dead) = mpsc::unbounded_channel();
    let idempotency = IdempotencyLayer::new(MemoryStore::new()).outcome();
    let mut service = DeadLetter::new(idempotency.layer(Handler::new([Do::Fail])), Publish(queue));
    let mut answer = || now(deliver(&mut service, envelope("a"))).unwrap();
    assert_eq!(answer(), Outcome::DeadLettered);
    assert_eq!(answer(), Outcome::Ran(()));
    assert_eq!(answer(), Outcome::Duplicate);
}

#[tokio::test]
async fn dropped_while_publishing_it_answers_nothing() {
    let mut service = DeadLetter::new(
        Handler::new([Do::Fail]),
        service_fn(|_| pending::<Result<(), BoxError>>()),
    );
    let mut call = tokio_test::task::spawn(service.call(envelope("a")));
    tokio_test::assert_pending!(call.poll());
    assert_eq!(format!("{:?}", &*call), "ResponseFuture(Publishing)");
    drop(call);
    deliver(&mut service, envelope("a")).await.unwrap();
    assert_eq!(service.get_ref().runs(), 2);
    assert_eq!(service.get_mut().runs(), 2);
    assert_eq!(service.into_inner().runs(), 2);
}

#[test]
fn a_clone_with_another_setting_leaves_the_original_alone() {
    let (queue, mut dead) = mpsc::unbounded_channel();
    let layer = DeadLetterLayer::new(Publish(queue));
    let _other = layer.clone().reason(|_| Reason::Poison);
    now(deliver(
        &mut layer.layer(Handler::new([Do::Fail])),
        envelope("a"),
    ))
    .unwrap();
    assert_eq!(
        dead.try_recv().unwrap().dead_letter().unwrap().reason(),
        Some("failed")
    );
}
