//! A queue on Redis in the list layout of BabelQueue's SDKs: `<queue>` has what waits, `<queue>:processing` what is in
//! hand or to be delivered later, `<queue>:processing:deadlines` until when. Each step is one script, by the server's clock.
#![allow(dead_code)]

use redis::{RedisResult, Script, aio::MultiplexedConnection};
use std::time::Duration;

/// Takes the oldest message, for a number of seconds, in the name of a token.
const RESERVE: &str = "local raw = redis.call('LMOVE', KEYS[1], KEYS[2], 'LEFT', 'RIGHT')
if raw then redis.call('ZADD', KEYS[3], redis.call('TIME')[1] + ARGV[2], ARGV[1] .. ':' .. raw) end
return raw";
/// Gives a reservation so many seconds from now, if it is still there.
const KEEP: &str = "if not redis.call('ZSCORE', KEYS[3], ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[3], 'XX', redis.call('TIME')[1] + ARGV[2], ARGV[1])
return 1";
/// Takes a message away, to the dead letters if there is something to put there; unless its reservation has lapsed.
const SETTLE: &str = "if not redis.call('ZSCORE', KEYS[3], ARGV[1]) then return 0 end
if ARGV[2] then redis.call('RPUSH', KEYS[4], ARGV[2]) end
redis.call('LREM', KEYS[2], 1, string.sub(ARGV[1], 34))
redis.call('ZREM', KEYS[3], ARGV[1])
return 1";
/// Puts messages whose reservation has lapsed behind all others.
const SWEEP: &str = "local due = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', redis.call('TIME')[1], 'LIMIT', 0, ARGV[1])
for _, member in ipairs(due) do
  local raw = string.sub(member, 34)
  if #member >= 34 and string.byte(member, 33) == 58 and redis.call('LPOS', KEYS[2], raw) then
    redis.call('RPUSH', KEYS[1], raw)
    redis.call('LREM', KEYS[2], 1, raw)
  end
  redis.call('ZREM', KEYS[3], member)
end
return #due";

/// So many at once, so that no sweep keeps others waiting for long.
const BATCH: usize = 100;

#[derive(Clone)]
pub struct Queue {
    pub connection: MultiplexedConnection,
    pub name: String,
    /// For how long a message is taken.
    pub window: Duration,
}

/// A message in hand.
#[derive(Clone)]
pub struct Reservation {
    /// `<32 hex digits>:<the stored value>`.
    member: Vec<u8>,
}

impl Reservation {
    /// The message as it is stored.
    pub fn stored(&self) -> &[u8] {
        &self.member[33..]
    }
}

impl Queue {
    /// The oldest message, if there is one. When the reply is lost, so is the reservation, after a while.
    pub async fn reserve(&mut self) -> RedisResult<Option<Reservation>> {
        let token = format!("{:032x}", rand::random::<u128>());
        let taken: Option<Vec<u8>> = self
            .run(RESERVE, &[token.as_bytes(), &seconds(self.window)])
            .await?;
        Ok(taken.map(|stored| Reservation {
            member: [token.as_bytes(), b":", &stored].concat(),
        }))
    }

    /// Has the message delivered again after so long from now, unless it is settled before. False when the
    /// reservation had lapsed, as below.
    pub async fn keep(&mut self, reservation: &Reservation, time: Duration) -> RedisResult<bool> {
        self.run(KEEP, &[&reservation.member, &seconds(time)]).await
    }

    /// False when the reservation had lapsed: the message is, or will be, delivered again.
    pub async fn ack(&mut self, reservation: &Reservation) -> RedisResult<bool> {
        self.run(SETTLE, &[&reservation.member]).await
    }

    /// An ack, and this on the dead-letter queue.
    pub async fn dead_letter(
        &mut self,
        reservation: &Reservation,
        stored: &[u8],
    ) -> RedisResult<bool> {
        self.run(SETTLE, &[&reservation.member, stored]).await
    }

    /// Another one on the dead-letter queue.
    pub async fn bury(&mut self, stored: &[u8]) -> RedisResult<()> {
        let mut push = redis::cmd("RPUSH");
        push.arg(format!("{}.dlq", self.name))
            .arg(stored)
            .query_async(&mut self.connection)
            .await
    }

    /// Brings back what lapsed.
    pub async fn sweep(&mut self) -> RedisResult<()> {
        let batch = BATCH.to_string();
        while self.run::<usize>(SWEEP, &[batch.as_bytes()]).await? == BATCH {}
        Ok(())
    }

    async fn run<T: redis::FromRedisValue>(
        &mut self,
        script: &str,
        arguments: &[&[u8]],
    ) -> RedisResult<T> {
        let script = Script::new(script);
        let mut call = script.prepare_invoke();
        for suffix in ["", ":processing", ":processing:deadlines", ".dlq"] {
            call.key(format!("{}{suffix}", self.name));
        }
        for argument in arguments {
            call.arg(argument);
        }
        call.invoke_async(&mut self.connection).await
    }
}

/// Whole ones, as the scores are.
fn seconds(time: Duration) -> Vec<u8> {
    let up = u64::from(time.subsec_nanos() > 0);
    (time.as_secs() + up).to_string().into()
}
