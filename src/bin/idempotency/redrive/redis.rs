//! Lists in Redis, as BabelQueue's SDKs have them.

use super::{BYPASS, Refused, Run};
use crate::{Usage, say};
use ::redis::{AsyncConnectionConfig, Client, Script, aio::MultiplexedConnection};
use std::time::Duration;
use tower_idempotency::{
    BoxError,
    envelope::{Headers, frame, unframe},
};

/// Puts a message on another list, then takes it from this one; unless it is not there any more. In this
/// order, as an error in the middle undoes nothing.
const MOVE: &str = "if not redis.call('LPOS', KEYS[1], ARGV[1]) then return 0 end
redis.call('RPUSH', KEYS[2], ARGV[2])
redis.call('LREM', KEYS[1], 1, ARGV[1])
return 1";

/// So many are read at once.
const BATCH: usize = 100;

pub(super) async fn redrive(run: &mut Run<'_>) -> Result<(), BoxError> {
    let client = Client::open(&*run.order.broker).map_err(|error| Usage(error.to_string()))?;
    let limits = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(Duration::from_secs(5)))
        .set_response_timeout(Some(Duration::from_secs(10)));
    let connecting = client.get_multiplexed_async_connection_with_config(&limits);
    let mut redis = connecting.await?;
    let script = Script::new(MOVE);
    let from = &*run.order.from;
    let length: u64 = ::redis::cmd("LLEN")
        .arg(from)
        .query_async(&mut redis)
        .await?;
    if length == 0 {
        say(format_args!("the list {from:?} is empty, or not there"));
    }
    // Those before it are the ones that stay.
    let mut at = 0;
    while run.goes_on(length) {
        let batch: Vec<Vec<u8>> = ::redis::cmd("LRANGE")
            .arg(from)
            .arg(at)
            .arg(at + BATCH - 1)
            .query_async(&mut redis)
            .await?;
        if batch.is_empty() {
            return Ok(());
        }
        for stored in batch {
            if !run.goes_on(length) {
                break;
            }
            let (body, headers) = match unframe(&stored) {
                Some((body, headers)) => (body.into_bytes(), headers),
                None => (stored.clone(), Default::default()),
            };
            let mut it = match run.plan(&body) {
                Ok(it) => it,
                Err(why) => {
                    run.stays(&body, why);
                    at += 1;
                    continue;
                }
            };
            if run.order.dry_run {
                run.could_forget(&it).await?;
                match refuses(&mut redis, &it.to).await? {
                    None => run.moved(&it),
                    Some(why) => run.stays(&body, why),
                }
                at += 1;
                continue;
            }
            // Somebody else may have taken it since, and its effect may have happened.
            if run.order.forget && !is_there(&mut redis, from, &stored).await? {
                continue;
            }
            run.forget(&it).await?;
            let kept = headers.iter().filter(|(name, _)| *name != BYPASS);
            it.message = it.message.with_headers(kept.collect::<Headers>());
            if run.order.bypass {
                it.message = it.message.with_replay_bypass();
            }
            let mut call = script.prepare_invoke();
            call.key(from).key(&it.to);
            call.arg(&stored).arg(frame(&it.message));
            match call.invoke_async::<u8>(&mut redis).await {
                Ok(1) => run.moved(&it),
                // Somebody else took it.
                Ok(_) => {}
                Err(error) if error.code() == Some("WRONGTYPE") => {
                    run.stays(&body, no_list(&it.to));
                    at += 1;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

fn no_list(key: &str) -> Refused {
    Refused(format!("{key:?} is no list"))
}

/// Why it would not go to a key.
async fn refuses(
    redis: &mut MultiplexedConnection,
    key: &str,
) -> Result<Option<Refused>, BoxError> {
    let kind: String = ::redis::cmd("TYPE").arg(key).query_async(redis).await?;
    Ok((kind != "list" && kind != "none").then(|| no_list(key)))
}

async fn is_there(
    redis: &mut MultiplexedConnection,
    list: &str,
    stored: &[u8],
) -> Result<bool, BoxError> {
    let at: Option<u64> = ::redis::cmd("LPOS")
        .arg(list)
        .arg(stored)
        .query_async(redis)
        .await?;
    Ok(at.is_some())
}
