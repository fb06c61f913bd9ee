//! Subjects of NATS JetStream.

use super::{Move, Refused, Run};
use crate::Usage;
use async_nats::{
    HeaderMap,
    jetstream::{
        self, Context, context::PublishErrorKind, message::StreamMessage,
        stream::LastRawMessageErrorKind,
    },
};
use tower_idempotency::BoxError;

const BYPASS: &str = "bq-replay-bypass";

pub(super) async fn redrive(run: &mut Run<'_>) -> Result<(), BoxError> {
    let from = &*run.order.from;
    if !is_subject(from) || run.order.to.as_deref().is_some_and(|to| !is_subject(to)) {
        return Err(Usage("--from and --to are subjects without wildcards".into()).into());
    }
    let jetstream = jetstream::new(async_nats::connect(&*run.order.broker).await?);
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
            Err(error) => return Err(error.into()),
        };
        sequence = found.sequence + 1;
        let it = match run.plan(&found.payload) {
            Ok(it) if is_subject(&it.to) => it,
            Ok(it) => {
                let why = format!("{:?} is no subject without wildcards", it.to);
                run.stays(&found.payload, Refused(why));
                continue;
            }
            Err(why) => {
                run.stays(&found.payload, why);
                continue;
            }
        };
        if run.order.dry_run {
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
        if own || bypass && text.eq_ignore_ascii_case(BYPASS) {
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

fn is_subject(text: &str) -> bool {
    let is_token = |token: &str| {
        let odd =
            |char: char| char.is_whitespace() || char.is_control() || matches!(char, '*' | '>');
        !token.is_empty() && !token.contains(odd)
    };
    text.split('.').all(is_token)
}
