//! Subjects of NATS JetStream.

use super::{BYPASS, Move, Refused, Run};
use crate::{Usage, chain};
use async_nats::{
    HeaderMap,
    jetstream::{
        self, Context,
        context::{GetStreamByNameErrorKind, PublishErrorKind, RequestError},
        message::StreamMessage,
        response::Response,
        stream::{DiscardPolicy, LastRawMessageErrorKind, RetentionPolicy},
    },
};
use futures_util::TryStreamExt;
use serde_json::{Value, json};
use std::{collections::HashMap, error::Error, iter};
use tower_idempotency::BoxError;

pub(super) async fn redrive(run: &mut Run<'_>) -> Result<(), BoxError> {
    let from = &*run.order.from;
    if !is_subject(from) || run.order.to.as_deref().is_some_and(|to| !is_subject(to)) {
        return Err(Usage(
            "--from and --to are subjects of queues: without wildcards, not of the server's own"
                .into(),
        )
        .into());
    }
    let jetstream = jetstream::new(async_nats::connect(&*run.order.broker).await?);
    let mut targets = HashMap::new();
    let name = jetstream.stream_by_subject(from).await;
    let name = name.map_err(|error| format!("no stream has the subject {from:?}: {error}"))?;
    let stream = jetstream.get_stream(name).await?;
    let info = stream.cached_info();
    if info.config.deny_delete {
        let why = format!(
            "the stream {:?} denies that messages are deleted: redriven, they would stay",
            info.config.name
        );
        return Err(Usage(why).into());
    }
    // The stream may have other subjects as well.
    let (last, most) = (info.state.last_sequence, info.state.messages);
    let mut sequence = info.state.first_sequence;
    while run.goes_on(most) {
        let next = stream.get_first_raw_message_by_subject(from, sequence);
        let found = match next.await {
            Ok(found) if found.sequence > last => return Ok(()),
            Ok(found) => found,
            Err(error) if matches!(error.kind(), LastRawMessageErrorKind::NoMessageFound) => {
                return Ok(());
            }
            // Headers that the client does not read; it does not say either which message has them.
            Err(error)
                if matches!(error.kind(), LastRawMessageErrorKind::Other)
                    && !error
                        .source()
                        .is_some_and(|error| error.is::<RequestError>()) =>
            {
                match next_sequence(&jetstream, &info.config.name, from, sequence).await? {
                    Some(at) if at <= last => {
                        run.looked_at += 1;
                        run.stays(b"", Refused(format!("at sequence {at}: {}", chain(&error))));
                        sequence = at + 1;
                        continue;
                    }
                    _ => return Err(error.into()),
                }
            }
            Err(error) => return Err(error.into()),
        };
        sequence = found.sequence + 1;
        let it = match run.plan(&found.payload) {
            Ok(it) if is_subject(&it.to) => it,
            Ok(it) => {
                let why = format!("{:?} is no subject of a queue", it.to);
                run.stays(&found.payload, Refused(why));
                continue;
            }
            Err(why) => {
                run.stays(&found.payload, why);
                continue;
            }
        };
        let refused = match targets.get(&it.to) {
            Some(known) => known,
            None => {
                let found = refuses(&jetstream, &it.to).await?;
                targets.entry(it.to.clone()).or_insert(found)
            }
        };
        if let Some(why) = refused {
            run.stays(&found.payload, Refused(why.clone()));
            continue;
        }
        if run.order.dry_run {
            run.could_forget(&it).await?;
            run.moved(&it);
            continue;
        }
        run.forget(&it).await?;
        match publish(&jetstream, &it, &found, run.order.bypass).await? {
            Ok(()) => {
                stream.delete_message(found.sequence).await?;
                run.moved(&it);
            }
            Err(why) => run.stays(&found.payload, why),
        }
    }
    Ok(())
}

/// Answers when a stream has it. The server's own headers stay behind: with the id that it knows a message by, it
/// would be taken for a duplicate. Of a header with several values the client's raw reader knows only the last.
async fn publish(
    jetstream: &Context,
    it: &Move,
    found: &StreamMessage,
    bypass: bool,
) -> Result<Result<(), Refused>, BoxError> {
    let mut headers = HeaderMap::new();
    for (name, values) in found.headers.iter() {
        let text: &str = name.as_ref();
        let own = text.to_ascii_lowercase().starts_with("nats-");
        if own || text.eq_ignore_ascii_case(BYPASS) {
            continue;
        }
        for value in values {
            headers.append(name.clone(), value.clone());
        }
    }
    if bypass {
        headers.insert(BYPASS, "1");
    }
    let body = it.message.encode().into_bytes().into();
    let sent = jetstream.publish_with_headers(it.to.clone(), headers, body);
    let answer = match sent.await {
        Ok(answer) => answer.await,
        Err(error) => Err(error),
    };
    match answer {
        Ok(_) => Ok(Ok(())),
        Err(error) => match error.kind() {
            PublishErrorKind::StreamNotFound => {
                let why = format!("no stream has the subject {:?}", it.to);
                Ok(Err(Refused(why)))
            }
            PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe => Err(error.into()),
            _ => Ok(Err(Refused(format!(
                "{:?} does not take it: {error}",
                it.to
            )))),
        },
    }
}

/// Why not all would be kept there, or nobody would know. A stream of `interest` confirms what no consumer of it would get, and drops it.
async fn refuses(jetstream: &Context, subject: &str) -> Result<Option<String>, BoxError> {
    let name = match jetstream.stream_by_subject(subject).await {
        Ok(name) => name,
        Err(error) if matches!(error.kind(), GetStreamByNameErrorKind::NotFound) => {
            return Ok(Some(format!("no stream has the subject {subject:?}")));
        }
        Err(error) => return Err(error.into()),
    };
    let stream = jetstream.get_stream(name).await?;
    let config = &stream.cached_info().config;
    if config.no_ack {
        let why = format!("the stream {:?} does not say what it has", config.name);
        return Ok(Some(why));
    }
    if config.max_messages_per_subject > 0 && config.discard == DiscardPolicy::Old {
        let why = format!(
            "the stream {:?} drops messages above {} of one subject",
            config.name, config.max_messages_per_subject
        );
        return Ok(Some(why));
    }
    if config.retention != RetentionPolicy::Interest {
        return Ok(None);
    }
    let mut consumers = stream.consumers();
    while let Some(consumer) = consumers.try_next().await? {
        let config = consumer.config;
        let all = config.filter_subject.is_empty() && config.filter_subjects.is_empty();
        let mut filters = iter::once(&config.filter_subject).chain(&config.filter_subjects);
        if config.durable_name.is_some() && (all || filters.any(|filter| covers(filter, subject))) {
            return Ok(None);
        }
    }
    Ok(Some(format!(
        "the stream {:?} keeps what a consumer is to get, and no durable one takes {subject:?}",
        config.name
    )))
}

/// Whether a consumer with this filter gets what is published to this subject.
fn covers(filter: &str, subject: &str) -> bool {
    let mut tokens = subject.split('.');
    for part in filter.split('.') {
        match (part, tokens.next()) {
            (">", Some(_)) => return true,
            ("*", Some(_)) => {}
            (part, Some(token)) if part == token => {}
            _ => return false,
        }
    }
    tokens.next().is_none()
}

/// Of the first message on a subject from there on.
async fn next_sequence(
    jetstream: &Context,
    stream: &str,
    subject: &str,
    from: u64,
) -> Result<Option<u64>, BoxError> {
    let api = format!("STREAM.MSG.GET.{stream}");
    let order = json!({"seq": from, "next_by_subj": subject});
    let answer: Value = match jetstream.request(api, &order).await? {
        Response::Ok(answer) => answer,
        Response::Err { error } => return Err(error.into()),
    };
    Ok(answer["message"]["seq"].as_u64())
}

/// One that a queue may have: without wildcards, and none of the server's own.
fn is_subject(text: &str) -> bool {
    let is_token = |token: &str| {
        let odd =
            |char: char| char.is_whitespace() || char.is_control() || matches!(char, '*' | '>');
        !token.is_empty() && !token.contains(odd)
    };
    !text.starts_with('$') && !text.starts_with("_INBOX.") && text.split('.').all(is_token)
}
