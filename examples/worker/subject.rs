//! A queue on JetStream: a subject, with a stream of its own, from which a message goes when it is acked.
#![allow(dead_code)]

use async_nats::{
    HeaderMap, HeaderName, HeaderValue,
    jetstream::{Context, stream},
};
use tower_idempotency::{BoxError, envelope::Headers};

/// The stream, made if it is not there. Its name is the subject's, which may have dots.
pub async fn declare(jetstream: &Context, subject: &str) -> Result<stream::Stream, BoxError> {
    let config = stream::Config {
        name: subject.replace('.', "_"),
        subjects: vec![subject.to_owned()],
        retention: stream::RetentionPolicy::WorkQueue,
        ..Default::default()
    };
    let stream = jetstream.get_or_create_stream(config).await?;
    // One that was there is as it is.
    let found = &stream.cached_info().config;
    if !found.subjects.iter().any(|it| it == subject) {
        return Err(format!(
            "the stream {:?} is not of the subject {subject:?}",
            found.name
        )
        .into());
    }
    if found.retention == stream::RetentionPolicy::Interest {
        let why = "is of interest: it confirms what no consumer waits for, and drops it";
        return Err(format!("the stream {:?} {why}", found.name).into());
    }
    Ok(stream)
}

/// Answers when the stream has it. The server's own headers stay behind: with the id that it knows a message by,
/// a redrive would be taken for a duplicate.
pub async fn publish(
    jetstream: &Context,
    subject: String,
    headers: &Headers,
    body: Vec<u8>,
) -> Result<(), BoxError> {
    let mut sent = HeaderMap::new();
    for (name, value) in headers
        .iter()
        .filter(|(name, _)| !name.starts_with("Nats-"))
    {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse::<HeaderValue>()) {
            sent.insert(name, value);
        }
    }
    jetstream
        .publish_with_headers(subject, sent, body.into())
        .await?
        .await?;
    Ok(())
}
