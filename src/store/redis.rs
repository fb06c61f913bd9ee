//! A record in Redis, shared by all workers of a consumer.
//!
//! # Example
//!
//! ```no_run
//! use std::time::Duration;
//! use tower_idempotency::{BoxError, IdempotencyLayer, store::RedisStore};
//!
//! # async fn run() -> Result<(), BoxError> {
//! let store = RedisStore::builder("billing:seen:")
//!     .ttl(Duration::from_secs(7 * 24 * 3600))
//!     .connect("redis://127.0.0.1:6379")
//!     .await?;
//! if let Some(policy) = store.eviction_policy().filter(|&policy| policy != "noeviction") {
//!     return Err(format!("this Redis drops keys when it is full: {policy}").into());
//! }
//! let layer = IdempotencyLayer::new(store);
//! # let _: IdempotencyLayer<RedisStore> = layer;
//! # Ok(())
//! # }
//! ```
//!
//! # What is stored
//!
//! One key for each id, the prefix followed by the id, byte for byte. Expiry is by the server's clock.
//!
//! | value | what it says | how long it lasts |
//! |---|---|---|
//! | `2` | the message had its effect | the TTL, or for ever |
//! | `1:` and the [`Owner`], 32 lower-case hex digits | that one has claimed it | the lease |
//! | anything else | somebody else is busy with it | as long as whoever wrote it said |
//!
//! Each operation of a [`Store`] is one command on one key: `GET`, `SET … PX`, `DEL`. Each one of a
//! [`ClaimStore`] is one script on one key, sent by its hash (`EVALSHA`), and whole (`EVAL`) to a
//! server that does not have it: after a start, a failover, `SCRIPT FLUSH`, and once to each node of a
//! cluster. That takes Redis 6 or later and, where there are access rules, the commands `EVAL` and
//! `EVALSHA` besides `GET`, `SET`, `PTTL`, `PEXPIRE` and `DEL`.
//!
//! A value that is neither mark nor claim of ours is never taken away, and one without an end is busy
//! for ever: what claims it is told to come again after its own lease, and it is warned of (with the
//! feature `tracing`) until somebody deletes the key.
//!
//! Two consumers need two prefixes, or each would skip what the other one did. No prefix may be the
//! beginning of another one: `a:` with the id `b:c` is the same key as `a:b:` with the id `c`.
//!
//! # What Redis may lose
//!
//! * At a failover, the last writes that the old primary had not sent to the replica. Where the old
//!   one lives on as a replica and the connection with it, it goes on answering `seen`, without what
//!   was written elsewhere, until the first write meets it.
//! * Under an evicting `maxmemory-policy` (anything but `noeviction`), any key at any time.
//!   Connecting warns of it (with the feature `tracing`) and
//!   [`eviction_policy`](RedisStore::eviction_policy) tells it.
//! * With a restart, what was not persisted.
//!
//! A record that is lost takes the claim with it as it does the mark: another worker can claim the
//! message while the first one still runs it. That one's next renewal is answered false; it marks the
//! message done all the same when it ends, and is told that the claim was not its own any more.
//!
//! Then an effect can repeat; no message is lost.
//!
//! # Connections
//!
//! A store and its clones share one multiplexed connection; with a cluster, one to each node. It is
//! replaced when it is lost, when the server turns out to be a replica (the address is resolved, and
//! Sentinel asked, anew), and when it no longer answers. One attempt to connect serves all who
//! wait for it, goes on when they are dropped, and is answered to all of them when it fails; the
//! next command tries again.
//!
//! Renewals of claims have a connection of their own, made at the first of them: a slow command, or a
//! connection that hangs, must not cost the claims of all the handlers that run.
//!
//! A command whose connection was lost, or that met a replica, is sent once more on a new
//! connection: all commands here may be sent twice. One that got no answer in time is not. Sent
//! again after it took effect, a claim is won as before, and a mark stands; a release or a completion
//! answers that the claim was held, since nothing tells that it was not. (In a cluster the `redis` crate sends
//! again by itself, and then they answer that it was not.)
//!
//! A store is used in a tokio runtime; a command polled outside of one is an error, and one in a
//! runtime without I/O or time driver panics. A store may outlive the runtime it was made in: the
//! next command connects in its own.
//!
//! # TLS
//!
//! `rediss://` addresses need a TLS feature of the `redis` crate, which the application turns on:
//!
//! ```toml
//! redis = { version = "1.2", default-features = false, features = ["tokio-rustls-comp", "tls-rustls-webpki-roots"] }
//! ```
//!
//! # Together with PHP workers
//!
//! BabelQueue's PHP SDK writes and reads the same record: `2` for done, and `1` for a message that
//! a worker is busy with. Give its prefix, `bq:idem:` unless set there, and the same TTL on all
//! workers. For Go workers there is [`GoRedisStore`](super::foreign::GoRedisStore).
//!
//! * Its `claim` (`SET … 1 NX EX`) fails on our claims and marks, and what it wrote is
//!   [`Claim::Busy`] here until it ends: PHP does not renew it.
//! * Its `release` (`DEL`) looks at no owner. From a worker whose claim ended while it ran it drops
//!   ours, or a mark: then a copy can run at the same time or again. No message is lost.
//! * Its `remember` (`SET … 2 EX`) marks done whoever has the claim. Our renewals are false from then
//!   on; what our handler does besides is told as a lost lease, and its mark starts the TTL anew.
//! * Its `seen` (`GET`, compared with `2`) takes our claims for not seen.

use super::{
    Claim, ClaimStore, Entry, EntryState, Lease, Owner, Stats, Store,
    ttl::{DEFAULT_TTL, Ttl},
};
use crate::{
    error::{BackendError, BackendErrorKind, ConfigError},
    id::MessageId,
};
use redis::{
    Client, Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value,
    aio::MultiplexedConnection,
    cluster::{ClusterClient, ClusterConfig},
    cluster_async::ClusterConnection,
    sentinel::SentinelClient,
};
use std::{
    collections::HashMap,
    fmt,
    future::{Future, poll_fn},
    io,
    pin::{Pin, pin},
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{runtime::Handle, sync::watch, time::timeout};

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(3);
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection this young is kept although it leads to a replica: the address leads nowhere else
/// yet, and connecting anew for every command would not change that.
const YOUNG: Duration = Duration::from_millis(500);

/// A [`ClaimStore`] in Redis: standalone, with Sentinel, or a cluster.
///
/// # Errors
///
/// A command fails with a [`BackendError`]: it is [`Unavailable`](BackendErrorKind::Unavailable)
/// when the server cannot be reached, gives no answer in time, is loading its data or its cluster is
/// down, [`ReadOnly`](BackendErrorKind::ReadOnly) when it is a replica,
/// [`Denied`](BackendErrorKind::Denied) for credentials and permissions,
/// [`Schema`](BackendErrorKind::Schema) when there is no string at the key, and
/// [`Other`](BackendErrorKind::Other) for the rest, such as a Redis that is full, or one that lets a
/// user run scripts and not the commands in them. No error tells a password.
///
/// # Cancel safety
///
/// A command that is dropped may or may not take effect. The connection stays usable, and no
/// answer is ever taken for that of another command.
///
/// # Clone
///
/// Clones share one record and its connections.
///
/// See the [module docs](self) for what is stored, and for what Redis may lose.
#[derive(Clone)]
pub struct RedisStore {
    record: Arc<Record>,
}

/// Sets up a [`RedisStore`].
#[derive(Clone, Debug)]
#[must_use]
pub struct RedisStoreBuilder {
    prefix: String,
    ttl: Option<Duration>,
    limits: Limits,
}

struct Record {
    prefix: String,
    ttl: Ttl,
    link: Arc<Link>,
    /// Whose connection nothing else can clog.
    renewals: Arc<Link>,
    eviction_policy: Option<String>,
}

/// How long is waited.
#[derive(Clone, Copy, Debug)]
struct Limits {
    connection: Duration,
    response: Duration,
}

// ===== impl RedisStore =====

impl RedisStore {
    /// Connects to one server, for ids that are kept for 24 hours under this prefix.
    ///
    /// The URL is `redis://[user][:password@]host[:port][/database]`.
    ///
    /// # Errors
    ///
    /// As [`RedisStoreBuilder::connect`].
    pub async fn connect(url: &str, prefix: impl Into<String>) -> Result<Self, BackendError> {
        Self::builder(prefix).connect(url).await
    }

    /// Sets up a record under this prefix, which begins the keys of one consumer and no other's.
    pub fn builder(prefix: impl Into<String>) -> RedisStoreBuilder {
        RedisStoreBuilder {
            prefix: prefix.into(),
            ttl: Some(DEFAULT_TTL),
            limits: Limits {
                connection: CONNECTION_TIMEOUT,
                response: RESPONSE_TIMEOUT,
            },
        }
    }

    /// The server's `maxmemory-policy` when the store was connected; `None` where the server does
    /// not tell. Of a cluster, that of one of its nodes.
    ///
    /// Under any policy but `noeviction`, ids can be dropped before their time, and their duplicates
    /// run again.
    #[must_use]
    pub fn eviction_policy(&self) -> Option<&str> {
        self.record.eviction_policy.as_deref()
    }

    /// What is recorded of this message: why its next delivery would be skipped or parked.
    ///
    /// Redis keeps neither since when it is so nor who marked it done.
    ///
    /// # Errors
    ///
    /// As of [any command](RedisStore#errors).
    ///
    /// # Cancel safety
    ///
    /// It writes nothing.
    pub async fn entry(&self, id: &MessageId) -> Result<Option<Entry>, BackendError> {
        let read = |answer: Answer, _: &str| told_of_entry(&answer.value);
        self.run(&self.record.link, &ENTRY, id, Vec::new(), read)
            .await
    }

    /// Counts the keys under the prefix, which takes a look at every key of the database (`SCAN`, a
    /// thousand at a time, and `MGET` for their values).
    ///
    /// Keys that come or go meanwhile may be counted or not, and one may be counted twice while the server
    /// moves its keys to a larger table.
    ///
    /// # Errors
    ///
    /// As of [any command](RedisStore#errors), and [`Config`](BackendErrorKind::Config) with a
    /// cluster, where keys are to be counted node by node.
    ///
    /// # Cancel safety
    ///
    /// It writes nothing.
    pub async fn stats(&self) -> Result<Stats, BackendError> {
        let record = self.record.clone();
        if let Source::Cluster(_) = *record.link.source {
            let expected = "a connection to each of its nodes, whose counts make the sum";
            return Err(ConfigError::new("stats", "asked of a cluster", expected).into());
        }
        in_runtime(async move {
            let counted = count(&record.link, &record.prefix).await;
            counted.map_err(|error| backend_error(error, &record.prefix))
        })
        .await
    }

    fn key(&self, id: &MessageId) -> String {
        let prefix = &self.record.prefix;
        let mut key = String::with_capacity(prefix.len() + id.as_str().len());
        key.push_str(prefix);
        key.push_str(id.as_str());
        key
    }

    /// The command of this name on the key of this id.
    pub(super) fn on(&self, name: &str, id: &MessageId) -> Cmd {
        let mut command = redis::cmd(name);
        command.arg(self.key(id));
        command
    }

    /// Writes with the TTL: one command, so that no crash leaves a key without it.
    pub(super) fn set(&self, id: &MessageId, value: &str) -> Reply<()> {
        let mut command = self.on("SET", id);
        command.arg(value);
        if let Some(millis) = self.record.ttl.millis() {
            command.arg("PX").arg(millis);
        }
        self.send(command, |_| ())
    }

    pub(super) fn send<T: 'static>(&self, command: Cmd, read: fn(Value) -> T) -> Reply<T> {
        let record = self.record.clone();
        in_runtime(async move {
            let answer = record.link.query(&command).await;
            answer
                .map(read)
                .map_err(|error| backend_error(error, &record.prefix))
        })
    }

    /// Runs a script on the key of this id.
    fn run<T: 'static>(
        &self,
        link: &Arc<Link>,
        script: &'static Script,
        id: &MessageId,
        arguments: Vec<String>,
        read: impl FnOnce(Answer, &str) -> T + Send + 'static,
    ) -> Reply<T> {
        let (record, link, key) = (self.record.clone(), link.clone(), self.key(id));
        in_runtime(async move {
            let answer = link.run(script, &key, &arguments).await;
            answer
                .map(|answer| read(answer, &key))
                .map_err(|error| backend_error(error, &record.prefix))
        })
    }
}

impl Store for RedisStore {
    type Error = BackendError;
    type Future<T: Send + 'static> = Reply<T>;

    fn seen(&self, id: &MessageId) -> Self::Future<bool> {
        // Anything else that is there is a claim, which says nothing of an effect.
        self.send(
            self.on("GET", id),
            |value| matches!(value, Value::BulkString(bytes) if bytes == b"2"),
        )
    }

    fn remember(&self, id: &MessageId) -> Self::Future<()> {
        self.set(id, "2")
    }

    fn forget(&self, id: &MessageId) -> Self::Future<()> {
        self.send(self.on("DEL", id), |_| ())
    }
}

impl ClaimStore for RedisStore {
    fn claim(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<Claim> {
        let asked = lease.length();
        let arguments = vec![held_by(owner), millis(asked)];
        let read = move |answer: Answer, key: &str| told_of_claim(&answer.value, key, asked);
        self.run(&self.record.link, &CLAIM, id, arguments, read)
    }

    fn renew(&self, id: &MessageId, owner: Owner, lease: Lease) -> Self::Future<bool> {
        let arguments = vec![held_by(owner), millis(lease.length())];
        self.run(&self.record.renewals, &RENEW, id, arguments, yes)
    }

    fn complete(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        let mut arguments = vec![held_by(owner)];
        if let Some(millis) = self.record.ttl.millis() {
            arguments.extend(["PX".to_owned(), millis.to_string()]);
        }
        self.run(&self.record.link, &COMPLETE, id, arguments, was_held)
    }

    fn release(&self, id: &MessageId, owner: Owner) -> Self::Future<bool> {
        let arguments = vec![held_by(owner)];
        self.run(&self.record.link, &RELEASE, id, arguments, was_held)
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("prefix", &self.record.prefix)
            .field("ttl", &self.record.ttl)
            .field("limits", &self.record.link.limits)
            .field("eviction_policy", &self.record.eviction_policy)
            .finish_non_exhaustive()
    }
}

// ===== scripts =====

/// A script on one key. Each reads before it writes.
struct Script {
    code: String,
    hash: String,
}

/// Calls a command and answers its error as it would be without a script: its code tells the kind.
///
/// `redis.call` would end the script with an error of its own on Redis 6, which also puts the place in
/// the script before what it refuses to run at all, such as a write on a replica.
const CALL: &str = "local function call(...)
local answer = redis.pcall(...)
if type(answer) == 'table' and answer.err then
return {err = string.match(answer.err, '^@user_script: %d+: %-(.*)') or answer.err}
end
return answer
end
";

/// `OK` when it is won, `2` when it is done, otherwise what is left of somebody's claim.
static CLAIM: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local found = call('GET', KEYS[1])
if found == '2' or type(found) == 'table' then return found end
if found and found ~= ARGV[1] then return call('PTTL', KEYS[1]) end
return call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])",
    )
});

static RENEW: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local found = call('GET', KEYS[1])
if found == ARGV[1] then return call('PEXPIRE', KEYS[1], ARGV[2]) end
if type(found) == 'table' then return found end
return 0",
    )
});

static COMPLETE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local found = call('GET', KEYS[1])
if type(found) == 'table' then return found end
local set = call('SET', KEYS[1], '2', unpack(ARGV, 2))
if set.err then return set end
return found == ARGV[1] and 1 or 0",
    )
});

static RELEASE: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local found = call('GET', KEYS[1])
if found == ARGV[1] then return call('DEL', KEYS[1]) end
if type(found) == 'table' then return found end
return 0",
    )
});

/// The value with what is left of it.
static ENTRY: LazyLock<Script> = LazyLock::new(|| {
    Script::new(
        "local found = call('GET', KEYS[1])
if not found or type(found) == 'table' then return found end
return {found, call('PTTL', KEYS[1])}",
    )
});

impl Script {
    fn new(steps: &str) -> Self {
        let code = [CALL, steps].concat();
        let hash = redis::Script::new(&code).get_hash().to_owned();
        Script { code, hash }
    }
}

/// What is at the key of a message that this one has claimed.
fn held_by(owner: Owner) -> String {
    format!("1:{owner}")
}

fn millis(length: Duration) -> String {
    length.as_millis().to_string()
}

fn yes(answer: Answer, _key: &str) -> bool {
    matches!(answer.value, Value::Int(1))
}

/// Whether a claim was held by who ended it. When that was sent twice, the first one may have ended it, so
/// nothing says that it was not.
fn was_held(answer: Answer, _key: &str) -> bool {
    answer.again || matches!(answer.value, Value::Int(1))
}

fn told_of_claim(answer: &Value, key: &str, asked: Duration) -> Claim {
    let retry_after = match answer {
        Value::Okay => return Claim::Won,
        Value::BulkString(value) if value == b"2" => return Claim::Done,
        Value::Int(-1) => {
            warn_of_no_end(key);
            asked
        }
        Value::Int(left) => Duration::from_millis(u64::try_from(*left).unwrap_or(0).max(1)),
        _ => asked,
    };
    Claim::Busy { retry_after }
}

fn told_of_entry(answer: &Value) -> Option<Entry> {
    let Value::Array(answer) = answer else {
        return None;
    };
    let [Value::BulkString(found), Value::Int(left)] = answer.as_slice() else {
        return None;
    };
    let owner = found.strip_prefix(b"1:").filter(|owner| is_owner(owner));
    Some(Entry {
        state: match found.as_slice() {
            b"2" => EntryState::Done,
            // As BabelQueue's PHP SDK claims.
            b"1" => EntryState::Claimed,
            _ if owner.is_some() => EntryState::Claimed,
            _ => EntryState::Foreign,
        },
        owner: owner.map(|owner| String::from_utf8_lossy(owner).into_owned()),
        since: None,
        expires_in: u64::try_from(*left).ok().map(Duration::from_millis),
    })
}

fn is_owner(text: &[u8]) -> bool {
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    text.len() == 32 && text.iter().all(is_digit)
}

async fn count(link: &Arc<Link>, prefix: &str) -> RedisResult<Stats> {
    let pattern = format!("{}*", as_pattern(prefix));
    let mut stats = Stats::default();
    let mut cursor = "0".to_owned();
    loop {
        let mut scan = redis::cmd("SCAN");
        scan.arg(&cursor).arg("MATCH").arg(&pattern);
        scan.arg("COUNT").arg(1000);
        let answer = link.query(&scan).await?;
        let (next, keys): (String, Vec<Vec<u8>>) = redis::from_redis_value(answer)?;
        if !keys.is_empty() {
            let mut get = redis::cmd("MGET");
            get.arg(keys);
            let values: Vec<Option<Vec<u8>>> = redis::from_redis_value(link.query(&get).await?)?;
            for value in values.into_iter().flatten() {
                stats.count += 1;
                stats.claimed += u64::from(value != b"2");
            }
        }
        if next == "0" {
            return Ok(stats);
        }
        cursor = next;
    }
}

/// A text as a pattern of `SCAN` that matches it alone.
fn as_pattern(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for char in text.chars() {
        if matches!(char, '*' | '?' | '[' | '\\') {
            pattern.push('\\');
        }
        pattern.push(char);
    }
    pattern
}

#[cfg_attr(not(feature = "tracing"), allow(unused_variables))]
fn warn_of_no_end(key: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: "tower_idempotency",
        key,
        "somebody else's claim has no end: the message does not run until its key is deleted"
    );
}

// ===== impl RedisStoreBuilder =====

impl RedisStoreBuilder {
    /// How long an id is remembered, counted from when it was remembered last; 24 hours unless set,
    /// `None` for ever.
    ///
    /// Rounded up to whole milliseconds; above 140,000 years it is for ever. 0 is refused.
    pub fn ttl(mut self, ttl: impl Into<Option<Duration>>) -> Self {
        self.ttl = ttl.into();
        self
    }

    /// How long a command waits for its answer; 3 seconds unless set. 0 is refused.
    ///
    /// A connection that gave no answer to anything for so long is replaced, the next time that a
    /// command is sent. Best below the layer's own
    /// [limit](crate::IdempotencyLayer::store_timeout), which covers connecting and sending again.
    /// A script that the server turns out not to have is sent whole, with this limit anew.
    pub fn response_timeout(mut self, limit: Duration) -> Self {
        self.limits.response = limit;
        self
    }

    /// How long connecting to a server may take, authentication included; 2 seconds unless set. 0 is
    /// refused.
    ///
    /// With Sentinel it is counted from when the primary was found, and with a cluster for each
    /// node.
    pub fn connection_timeout(mut self, limit: Duration) -> Self {
        self.limits.connection = limit;
        self
    }

    /// Connects to one server.
    ///
    /// The URL is `redis://[user][:password@]host[:port][/database]`.
    ///
    /// # Errors
    ///
    /// A URL that is none; a setting that cannot be held to, with the [`ConfigError`] as the source;
    /// what [commands](RedisStore#errors) fail with.
    pub async fn connect(self, url: &str) -> Result<RedisStore, BackendError> {
        let client = Client::open(url).map_err(|error| backend_error(error, &self.prefix))?;
        self.client(client).await
    }

    /// Connects to the server of this client.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn client(self, client: Client) -> Result<RedisStore, BackendError> {
        self.open(Source::Server(client)).await
    }

    /// Connects to the primary that the sentinels name. The client has to be one for the primary.
    ///
    /// The sentinels themselves are asked with the time limits of the `redis` crate.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn sentinel(self, client: SentinelClient) -> Result<RedisStore, BackendError> {
        self.open(Source::Sentinel(tokio::sync::Mutex::new(client)))
            .await
    }

    /// Connects to a cluster.
    ///
    /// The time limits set here replace those of the client, whose
    /// [`overall_response_timeout`](redis::cluster::ClusterClientBuilder::overall_response_timeout)
    /// should not be set. The client should know several nodes, since each new connection begins with
    /// these. It must not read from replicas: they lag behind, and a duplicate would run again.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect); a password that is refused by every node is
    /// [`Unavailable`](BackendErrorKind::Unavailable) here, since the `redis` crate does not tell.
    pub async fn cluster(self, client: ClusterClient) -> Result<RedisStore, BackendError> {
        self.open(Source::Cluster(client)).await
    }

    async fn open(self, source: Source) -> Result<RedisStore, BackendError> {
        let ttl = self.check()?;
        let prefix = self.prefix;
        let source = Arc::new(source);
        let link = Arc::new(Link::new(source.clone(), self.limits));
        let renewals = Arc::new(Link::new(source, self.limits));
        let asked = link.clone();
        let eviction_policy = in_runtime(async move {
            let policy = asked.eviction_policy().await;
            policy.map_err(|error| backend_error(error, ""))
        })
        .await?;
        #[cfg(feature = "tracing")]
        if let Some(policy) = eviction_policy.as_deref().filter(|&it| it != "noeviction") {
            tracing::warn!(
                target: "tower_idempotency",
                policy,
                "this Redis drops keys when it is full: duplicates of dropped ids run again"
            );
        }
        Ok(RedisStore {
            record: Arc::new(Record {
                prefix,
                ttl,
                link,
                renewals,
                eviction_policy,
            }),
        })
    }

    fn check(&self) -> Result<Ttl, ConfigError> {
        if self.prefix.is_empty() {
            return Err(ConfigError::new(
                "prefix",
                "empty",
                "one that no other consumer has",
            ));
        }
        let limits = [
            ("response_timeout", self.limits.response),
            ("connection_timeout", self.limits.connection),
        ];
        for (setting, limit) in limits {
            if limit.is_zero() {
                return Err(ConfigError::new(setting, "0", "a time above zero"));
            }
        }
        Ttl::new(self.ttl)
    }
}

// ===== futures =====

/// What a command of a Redis store answers with.
type Reply<T> = Pin<Box<dyn Future<Output = Result<T, BackendError>> + Send>>;

/// Polls in the runtime that it is polled in first, wherever it goes afterwards: timers and
/// connections are bound to one.
fn in_runtime<T>(
    future: impl Future<Output = Result<T, BackendError>> + Send + 'static,
) -> Reply<T> {
    Box::pin(async move {
        let runtime = Handle::try_current()
            .map_err(|error| BackendError::new(BackendErrorKind::Unavailable, error))?;
        let mut future = pin!(future);
        poll_fn(|cx| {
            let _entered = runtime.enter();
            future.as_mut().poll(cx)
        })
        .await
    })
}

// ===== Link =====

/// Where connections come from.
enum Source {
    Server(Client),
    Sentinel(tokio::sync::Mutex<SentinelClient>),
    Cluster(ClusterClient),
}

#[derive(Clone)]
enum Connection {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
}

/// What a command was answered, perhaps the second time.
struct Answer {
    value: Value,
    /// It was sent twice, and the first one may have taken effect.
    again: bool,
}

/// The way to the server: one connection, replaced when it is of no use any more.
///
/// The `redis` crate's own manager keeps a connection that leads to a replica or that no longer
/// answers, and knows no Sentinel; its cluster connection keeps a node's that no longer answers.
struct Link {
    source: Arc<Source>,
    limits: Limits,
    state: Mutex<State>,
    attempts: AtomicU64,
}

enum State {
    Down,
    /// A task is connecting, and tells the outcome to all who wait.
    Connecting {
        outcome: watch::Receiver<Outcome>,
        since: Instant,
        number: u64,
    },
    Up {
        live: Arc<Live>,
        /// When something was sent first after the last answer.
        silent_since: Option<Instant>,
    },
}

/// `None` while it is open.
type Outcome = Option<RedisResult<Arc<Live>>>;

struct Live {
    connection: Connection,
    since: Instant,
}

impl Source {
    async fn connect(&self, limits: Limits) -> RedisResult<Connection> {
        // The limit of answers is kept by `Link`, which replaces a connection that is silent.
        let config = redis::AsyncConnectionConfig::new()
            .set_connection_timeout(Some(limits.connection))
            .set_response_timeout(None);
        match self {
            Source::Server(client) => {
                let connecting = client.get_multiplexed_async_connection_with_config(&config);
                Ok(Connection::One(connecting.await?))
            }
            Source::Sentinel(client) => {
                // Not locked while connecting, which another link has not to wait for.
                let primary = client.lock().await.async_get_client().await?;
                let connecting = primary.get_multiplexed_async_connection_with_config(&config);
                Ok(Connection::One(connecting.await?))
            }
            Source::Cluster(client) => {
                let config = ClusterConfig::new()
                    .set_connection_timeout(limits.connection)
                    .set_response_timeout(limits.response);
                let connecting = client.get_async_connection_with_config(config);
                Ok(Connection::Cluster(connecting.await?))
            }
        }
    }
}

impl Link {
    fn new(source: Arc<Source>, limits: Limits) -> Self {
        Link {
            source,
            limits,
            state: Mutex::new(State::Down),
            attempts: AtomicU64::new(0),
        }
    }

    /// Sends a command that may be sent twice.
    async fn query(self: &Arc<Self>, command: &Cmd) -> RedisResult<Value> {
        self.query_and_tell(command, &mut false).await
    }

    /// Tells whether it was sent twice although the first one may have taken effect.
    async fn query_and_tell(
        self: &Arc<Self>,
        command: &Cmd,
        again: &mut bool,
    ) -> RedisResult<Value> {
        let live = self.live().await?;
        let error = match self.ask(&live, command).await {
            Err(error) if is_of_no_use(&error) && !error.is_timeout() => error,
            answer => return answer,
        };
        // What was kept although it is of no use would say the same again.
        if self.is_up(&live) {
            return Err(error);
        }
        let live = self.live().await?;
        *again |= !leads_to_a_replica(&error);
        self.ask(&live, command).await
    }

    /// Runs a script that may run twice.
    async fn run(
        self: &Arc<Self>,
        script: &Script,
        key: &str,
        arguments: &[String],
    ) -> RedisResult<Answer> {
        let call = |name, script| {
            let mut command = redis::cmd(name);
            command.arg(script).arg(1).arg(key).arg(arguments);
            command
        };
        let mut again = false;
        let short = call("EVALSHA", script.hash.as_str());
        let value = match self.query_and_tell(&short, &mut again).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                let whole = call("EVAL", script.code.as_str());
                self.query_and_tell(&whole, &mut again).await
            }
            answer => answer,
        }?;
        Ok(Answer { value, again })
    }

    async fn ask(&self, live: &Arc<Live>, command: &Cmd) -> RedisResult<Value> {
        let asking = async {
            match live.connection.clone() {
                Connection::One(mut one) => command.query_async(&mut one).await,
                Connection::Cluster(mut cluster) => command.query_async(&mut cluster).await,
            }
        };
        let answer = tokio::time::timeout(self.limits.response, asking)
            .await
            .unwrap_or_else(|_| {
                let limit = self.limits.response;
                let error = format!("no answer within {limit:?}");
                Err(io::Error::new(io::ErrorKind::TimedOut, error).into())
            });
        self.settle(live, answer.as_ref().err());
        answer
    }

    /// Keeps or drops a connection after its answer. Commands under way on it keep it open.
    fn settle(&self, live: &Arc<Live>, error: Option<&RedisError>) {
        let mut state = self.lock();
        let State::Up {
            live: current,
            silent_since,
        } = &mut *state
        else {
            return;
        };
        if !Arc::ptr_eq(current, live) {
            return;
        }
        let kept = |error| leads_to_a_replica(error) && live.since.elapsed() <= YOUNG;
        match error {
            Some(error) if is_of_no_use(error) && !kept(error) => *state = State::Down,
            _ => *silent_since = None,
        }
    }

    /// The connection there is, or the next one.
    async fn live(self: &Arc<Self>) -> RedisResult<Arc<Live>> {
        let mut outcome = {
            let mut state = self.lock();
            match &mut *state {
                State::Up { live, silent_since } => match silent_since {
                    // Callers that give up before the limit leave no other sign of a dead connection.
                    Some(since) if since.elapsed() > self.limits.response => self.start(&mut state),
                    _ => {
                        silent_since.get_or_insert_with(Instant::now);
                        return Ok(live.clone());
                    }
                },
                // A task that is gone went with its runtime; one that takes too long is on a runtime
                // that nobody drives any more.
                State::Connecting { outcome, since, .. }
                    if outcome.has_changed().is_ok() && since.elapsed() < self.patience() =>
                {
                    outcome.clone()
                }
                State::Connecting { .. } | State::Down => self.start(&mut state),
            }
        };
        let told = timeout(self.patience(), outcome.wait_for(Option::is_some)).await;
        let outcome = match told {
            Ok(Ok(outcome)) => outcome.clone(),
            Ok(Err(_)) | Err(_) => None,
        };
        outcome.unwrap_or_else(|| {
            let error = "connecting ended with its runtime";
            Err(io::Error::new(io::ErrorKind::ConnectionAborted, error).into())
        })
    }

    /// How long an attempt to connect may take: more than it ever does where its runtime is driven.
    fn patience(&self) -> Duration {
        let once = self.limits.connection.saturating_add(self.limits.response);
        once.saturating_mul(4)
    }

    /// Connects in a task, which does not end with a caller that is dropped.
    fn start(self: &Arc<Self>, state: &mut State) -> watch::Receiver<Outcome> {
        let (tell, outcome) = watch::channel(None);
        let number = self.attempts.fetch_add(1, Ordering::Relaxed);
        *state = State::Connecting {
            outcome: outcome.clone(),
            since: Instant::now(),
            number,
        };
        let link = self.clone();
        tokio::spawn(async move {
            let connection = link.source.connect(link.limits).await;
            let live = connection.map_err(without_arguments).map(|connection| {
                Arc::new(Live {
                    connection,
                    since: Instant::now(),
                })
            });
            let mut state = link.lock();
            // Unless another one was started in its place.
            if matches!(&*state, State::Connecting { number: current, .. } if *current == number) {
                *state = match &live {
                    Ok(live) => State::Up {
                        live: live.clone(),
                        silent_since: Some(live.since),
                    },
                    Err(_) => State::Down,
                };
            }
            drop(state);
            tell.send_replace(Some(live));
        });
        outcome
    }

    /// `None` where it is not told, because of permissions or by a server that is no Redis.
    async fn eviction_policy(self: &Arc<Self>) -> RedisResult<Option<String>> {
        let mut command = redis::cmd("CONFIG");
        command.arg("GET").arg("maxmemory-policy");
        let live = self.live().await?;
        match self.ask(&live, &command).await {
            Ok(value) => {
                let settings: RedisResult<HashMap<String, String>> =
                    redis::from_redis_value(value).map_err(RedisError::from);
                Ok(settings
                    .ok()
                    .and_then(|mut all| all.remove("maxmemory-policy")))
            }
            // Without a password that is asked for, nothing else would work.
            Err(error) if error.code().is_some_and(|code| code != "NOAUTH") => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn is_up(&self, live: &Arc<Live>) -> bool {
        matches!(&*self.lock(), State::Up { live: current, .. } if Arc::ptr_eq(current, live))
    }

    /// Nothing panics under the lock that would leave half a state.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// ===== errors =====

/// Whether the next command had better go elsewhere.
fn is_of_no_use(error: &RedisError) -> bool {
    error.is_io_error() || error.is_unrecoverable_error() || leads_to_a_replica(error)
}

fn leads_to_a_replica(error: &RedisError) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::MasterDown)
    )
}

/// A server that does not know the command to log in with repeats its arguments.
fn without_arguments(error: RedisError) -> RedisError {
    let text = error.to_string();
    if text.contains("args beginning with") {
        return RedisError::from((
            error.kind(),
            "a command to set up the connection is unknown",
        ));
    }
    error
}

fn backend_error(error: RedisError, prefix: &str) -> BackendError {
    let kind = match error.kind() {
        ErrorKind::Io
        | ErrorKind::ClusterConnectionNotFound
        | ErrorKind::MasterNameNotFoundBySentinel
        | ErrorKind::NoValidReplicasFoundBySentinel
        | ErrorKind::Server(
            ServerErrorKind::BusyLoading
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::MasterDown
            | ServerErrorKind::TryAgain,
        ) => BackendErrorKind::Unavailable,
        ErrorKind::Server(ServerErrorKind::ReadOnly) => BackendErrorKind::ReadOnly,
        ErrorKind::AuthenticationFailed | ErrorKind::Server(ServerErrorKind::NoPerm) => {
            BackendErrorKind::Denied
        }
        ErrorKind::InvalidClientConfig => BackendErrorKind::Config,
        _ => match error.code() {
            Some("NOAUTH" | "WRONGPASS") => BackendErrorKind::Denied,
            Some("WRONGTYPE") => BackendErrorKind::Schema,
            // A script that runs for long; a primary that waits for its replicas.
            Some("BUSY" | "NOREPLICAS") => BackendErrorKind::Unavailable,
            _ => BackendErrorKind::Other,
        },
    };
    let moved = matches!(
        error.kind(),
        ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask)
    );
    let error = BackendError::new(kind, error);
    if kind == BackendErrorKind::Schema {
        return error.expected(format!("expected a string at each key under `{prefix}`"));
    }
    if moved {
        return error.expected("this is a node of a cluster, which needs a cluster client");
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(reply: &str) -> (BackendErrorKind, String) {
        let value = redis::parse_redis_value(format!("-{reply}\r\n").as_bytes()).unwrap();
        let error = value.extract_error().unwrap_err();
        let error = backend_error(error, "billing:");
        (error.kind(), error.to_string())
    }

    #[test]
    fn a_kind_is_told_by_the_code() {
        use BackendErrorKind::{Denied, Other, ReadOnly, Schema, Unavailable};

        for (reply, expected) in [
            (
                "LOADING Redis is loading the dataset in memory",
                Unavailable,
            ),
            ("CLUSTERDOWN The cluster is down", Unavailable),
            ("MASTERDOWN Link with MASTER is down", Unavailable),
            (
                "TRYAGAIN Multiple keys request during rehashing of slot",
                Unavailable,
            ),
            ("BUSY Redis is busy running a script", Unavailable),
            ("NOREPLICAS Not enough good replicas to write.", Unavailable),
            (
                "READONLY You can't write against a read only replica.",
                ReadOnly,
            ),
            ("NOAUTH Authentication required.", Denied),
            ("WRONGPASS invalid username-password pair", Denied),
            ("NOPERM this user has no permissions", Denied),
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                Other,
            ),
            ("MISCONF Redis is configured to save RDB snapshots", Other),
            ("ERR READONLY is only a word here", Other),
            (
                "WRONGTYPE Operation against a key holding the wrong kind of value",
                Schema,
            ),
        ] {
            assert_eq!(kind(reply).0, expected, "{reply}");
        }
        assert!(kind("WRONGTYPE x").1.contains("`billing:`"));
        assert!(kind("MOVED 1 127.0.0.1:1").1.contains("cluster client"));
    }

    #[test]
    fn who_is_told_of_a_claim_never_comes_again_at_once() {
        let asked = Duration::from_secs(30);
        let told = |answer| told_of_claim(&answer, "billing:m", asked);
        for (left, millis) in [(i64::MAX, i64::MAX as u64), (2, 2), (1, 1), (0, 1), (-2, 1)] {
            let retry_after = Duration::from_millis(millis);
            assert_eq!(told(Value::Int(left)), Claim::Busy { retry_after });
        }
        // Without an end, and whatever else it may be: nobody's permission to run.
        for answer in [Value::Int(-1), Value::Nil, Value::SimpleString("x".into())] {
            assert_eq!(told(answer), Claim::Busy { retry_after: asked });
        }
        assert_eq!(told(Value::Okay), Claim::Won);
        assert_eq!(told(Value::BulkString(b"2".to_vec())), Claim::Done);
    }
}
