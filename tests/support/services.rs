//! What the tests of the stores need of the world: the services, a proxy that breaks connections
//! as told, a Redis of one's own.
#![allow(dead_code, unreachable_pub, missing_docs)]

use std::{
    env, fmt, fs,
    future::{Future, poll_fn},
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs},
    os::unix::fs::MetadataExt,
    path::PathBuf,
    pin::Pin,
    process::{Child, Command, Stdio},
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::watch,
    task::{AbortHandle, JoinSet},
};

/// How long anything may take that a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(30);

// ===== services =====

pub fn redis_url() -> String {
    url("REDIS_URL", "redis://127.0.0.1:6379")
}

pub fn postgres_url() -> String {
    url("POSTGRES_URL", "postgres://postgres@127.0.0.1:5432/test")
}

pub fn mysql_url() -> String {
    url("MYSQL_URL", "mysql://root@127.0.0.1:3306/test")
}

/// Where Redis is. A test that gets `None` is over.
pub fn redis() -> Option<String> {
    present(redis_url())
}

/// Where PostgreSQL is. A test that gets `None` is over.
pub fn postgres() -> Option<String> {
    present(postgres_url())
}

/// Where MySQL or MariaDB is. A test that gets `None` is over.
pub fn mysql() -> Option<String> {
    present(mysql_url())
}

/// Where RabbitMQ is. A test that gets `None` is over.
pub fn rabbitmq() -> Option<String> {
    present(url("RABBITMQ_URL", "amqp://127.0.0.1:5672"))
}

/// Where NATS is. A test that gets `None` is over.
pub fn nats() -> Option<String> {
    present(url("NATS_URL", "nats://127.0.0.1:4222"))
}

/// Where a program is. A test that gets `None` is over.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file());
    if found.is_none() {
        skip(name);
    }
    found
}

/// Whether somebody listens at the host and port of a URL.
pub fn reachable(url: &str) -> bool {
    let addresses = host_and_port(url).to_socket_addrs();
    addresses.is_ok_and(|mut all| {
        all.any(|addr| TcpStream::connect_timeout(&addr, Duration::from_secs(2)).is_ok())
    })
}

/// The host and port of a URL, as `host:port`.
pub fn host_and_port(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").expect("a URL");
    let authority = rest.split(['/', '?']).next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    let has_port = host
        .rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if has_port {
        return host.to_owned();
    }
    let port = match scheme {
        "redis" => 6379,
        "mysql" => 3306,
        "amqp" => 5672,
        "nats" => 4222,
        _ => 5432,
    };
    format!("{host}:{port}")
}

/// A name for the records of one test alone: `[a-z0-9_]`, at most 40 bytes.
pub fn unique(name: &str) -> String {
    let mut unique: String = name
        .chars()
        .map(|c| c.to_ascii_lowercase())
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .take(22)
        .collect();
    unique.push('_');
    unique.push_str(&uuid::Uuid::new_v4().simple().to_string()[..16]);
    // A table's name begins with a letter.
    if unique.starts_with(|c: char| c.is_ascii_digit()) {
        unique.replace_range(..1, "t");
    }
    unique
}

fn url(variable: &str, otherwise: &str) -> String {
    env::var(variable).unwrap_or_else(|_| otherwise.to_owned())
}

fn present(url: String) -> Option<String> {
    if reachable(&url) {
        return Some(url);
    }
    skip(&host_and_port(&url));
    None
}

/// Written past the capture of the test's output: a skipped test must not look like a passed one.
fn skip(what: &str) {
    assert!(
        env::var("REQUIRE_SERVICES").as_deref() != Ok("1"),
        "{what} is not there"
    );
    let test = thread::current().name().unwrap_or("a test").to_owned();
    let _ = writeln!(io::stderr(), "skipped: {test}: {what} is not there");
}

// ===== Proxy =====

/// A TCP proxy that treats connections as told. It ends with its last connections when dropped.
pub struct Proxy {
    addr: SocketAddr,
    switches: watch::Sender<Switches>,
    acceptor: AbortHandle,
}

/// Connections are numbered from 1 in the order they came in; what is done *through* a number is
/// done to that one and those before it.
#[derive(Clone)]
struct Switches {
    target: SocketAddr,
    accepted: u64,
    refuse: bool,
    delay: Duration,
    hold: bool,
    /// How many pieces of replies were held so far.
    held: u64,
    swallow_through: u64,
    cut_through: u64,
    trap: Option<Trap>,
    /// The connection that a trap was sprung on, and what befalls its replies.
    trapped: Option<(u64, At)>,
}

#[derive(Clone)]
struct Trap {
    words: Vec<u8>,
    passes: usize,
    at: At,
}

/// What befalls a connection when its client sends what was waited for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum At {
    /// It is closed, and what the client sent does not arrive.
    CutBefore,
    /// It is closed as soon as the server has replied; the reply is lost.
    CutReply,
    /// That reply is lost and all further ones of this connection; it stays open.
    SwallowReply,
    /// Replies wait for [`Proxy::release`].
    HoldReply,
}

impl Proxy {
    pub async fn start(target: SocketAddr) -> Proxy {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (switches, _) = watch::channel(Switches {
            target,
            accepted: 0,
            refuse: false,
            delay: Duration::ZERO,
            hold: false,
            held: 0,
            swallow_through: 0,
            cut_through: 0,
            trap: None,
            trapped: None,
        });
        let acceptor = tokio::spawn(accept(listener, switches.clone())).abort_handle();
        Proxy {
            addr,
            switches,
            acceptor,
        }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many connections were accepted so far, refused ones included.
    pub fn connections(&self) -> u64 {
        self.switches.borrow().accepted
    }

    /// Closes all connections there are.
    pub fn cut(&self) {
        self.switch(|s| s.cut_through = s.accepted);
    }

    /// Whether new connections are closed as soon as they are accepted.
    pub fn refuse(&self, refuse: bool) {
        self.switch(|s| s.refuse = refuse);
    }

    /// Each piece of a reply is sent on this much later.
    pub fn delay_replies(&self, delay: Duration) {
        self.switch(|s| s.delay = delay);
    }

    /// Whether replies are lost, on new connections too.
    pub fn swallow_replies(&self, swallow: bool) {
        self.switch(|s| s.swallow_through = if swallow { u64::MAX } else { 0 });
    }

    /// Replies are lost from now on, on the connections that there are now.
    pub fn swallow_present(&self) {
        self.switch(|s| s.swallow_through = s.accepted);
    }

    /// Replies wait for [`release`](Self::release).
    pub fn hold_replies(&self) {
        self.switch(|s| s.hold = true);
    }

    pub fn release(&self) {
        self.switch(|s| s.hold = false);
    }

    /// Waits until a reply is held.
    pub async fn holds(&self) {
        self.seen("a reply is held", |s| s.held > 0).await;
    }

    /// Does this once, when a client sends these words in one piece, after it has passed so many such
    /// pieces.
    pub fn trap(&self, words: &str, passes: usize, at: At) {
        let words = words.as_bytes().to_vec();
        self.switch(|s| {
            s.held = 0;
            s.trapped = None;
            s.trap = Some(Trap { words, passes, at });
        });
    }

    /// Whether a client has sent what the trap is for.
    pub fn has_sprung(&self) -> bool {
        self.switches.borrow().trap.is_none()
    }

    /// Waits until a client has sent it.
    pub async fn sprung(&self) {
        self.seen("the trap is sprung", |s| s.trap.is_none()).await;
    }

    async fn seen(&self, what: &str, so: impl FnMut(&Switches) -> bool) {
        let mut switches = self.switches.subscribe();
        let seen = tokio::time::timeout(PATIENCE, switches.wait_for(so)).await;
        assert!(seen.is_ok(), "not in time: {what}");
    }

    /// New connections go there; present ones stay.
    pub fn retarget(&self, target: SocketAddr) {
        self.switch(|s| s.target = target);
    }

    fn switch(&self, change: impl FnOnce(&mut Switches)) {
        self.switches.send_modify(change);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

async fn accept(listener: tokio::net::TcpListener, switches: watch::Sender<Switches>) {
    // Dropped with this task, and the connections with it.
    let mut connections = JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        switches.send_modify(|s| s.accepted += 1);
        let (number, refuse) = {
            let now = switches.borrow();
            (now.accepted, now.refuse)
        };
        if !refuse {
            connections.spawn(carry(client, number, switches.clone()));
        }
        while connections.try_join_next().is_some() {}
    }
}

async fn carry(client: tokio::net::TcpStream, number: u64, told: watch::Sender<Switches>) {
    let mut switches = told.subscribe();
    let target = switches.borrow().target;
    let Ok(server) = tokio::net::TcpStream::connect(target).await else {
        return;
    };
    let (_, _) = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let requests = carry_requests(from_client, to_server, number, told.clone());
    let replies = carry_replies(from_server, to_client, number, told);
    tokio::select! {
        // What is cut carries nothing more, whatever else was switched at the same time.
        biased;
        _ = switches.wait_for(|s| s.cut_through >= number) => {}
        _ = requests => {}
        _ = replies => {}
    }
}

async fn carry_requests(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    number: u64,
    switches: watch::Sender<Switches>,
) -> io::Result<()> {
    let mut piece = vec![0; 64 * 1024];
    loop {
        let len = from.read(&mut piece).await?;
        if len == 0 || springs(&switches, number, &piece[..len]) == Some(At::CutBefore) {
            return Ok(());
        }
        to.write_all(&piece[..len]).await?;
    }
}

/// What befalls the connection whose client sends this, from now on.
fn springs(switches: &watch::Sender<Switches>, number: u64, piece: &[u8]) -> Option<At> {
    let mut sprung = None;
    switches.send_if_modified(|s| {
        let Some(trap) = &mut s.trap else {
            return false;
        };
        if !piece.windows(trap.words.len()).any(|it| it == trap.words) {
            return false;
        }
        if trap.passes > 0 {
            trap.passes -= 1;
            return false;
        }
        let at = trap.at;
        s.hold |= at == At::HoldReply;
        s.trapped = Some((number, at));
        s.trap = None;
        sprung = Some(at);
        true
    });
    sprung
}

async fn carry_replies(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    number: u64,
    told: watch::Sender<Switches>,
) -> io::Result<()> {
    let mut switches = told.subscribe();
    let mut piece = vec![0; 64 * 1024];
    loop {
        let len = from.read(&mut piece).await?;
        if len == 0 {
            return Ok(());
        }
        let delay = switches.borrow().delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        told.send_if_modified(|s| {
            s.held += u64::from(s.hold);
            s.hold
        });
        let (swallow, cut) = match switches.wait_for(|s| !s.hold).await {
            Ok(now) => (
                now.swallow_through >= number || now.trapped == Some((number, At::SwallowReply)),
                now.trapped == Some((number, At::CutReply)),
            ),
            Err(_) => return Ok(()),
        };
        if cut {
            return Ok(());
        }
        if !swallow {
            to.write_all(&piece[..len]).await?;
        }
    }
}

// ===== OwnRedis =====

/// A `redis-server` of the test's own, killed when dropped. Nothing is saved to disk unless the
/// arguments say so.
///
/// Its functions block, for some hundredths of a second as a rule.
pub struct OwnRedis {
    child: Option<Child>,
    port: u16,
    dir: PathBuf,
    args: Vec<String>,
}

impl OwnRedis {
    pub fn start(args: &[&str]) -> OwnRedis {
        OwnRedis::launch(|dir, port| {
            let (port, dir) = (port.to_string(), dir.display().to_string());
            let own = [
                ["--port", &port],
                ["--bind", "127.0.0.1"],
                ["--dir", &dir],
                ["--save", ""],
                ["--appendonly", "no"],
                // A replica is served at once.
                ["--repl-diskless-sync-delay", "0"],
            ];
            let all = own.as_flattened().iter().chain(args);
            all.map(|&arg| arg.to_owned()).collect()
        })
    }

    /// A sentinel with this configuration, `port` and `dir` aside.
    pub fn start_sentinel(config: &str) -> OwnRedis {
        OwnRedis::launch(|dir, port| {
            let file = dir.join("sentinel.conf");
            let dir = dir.display();
            fs::write(
                &file,
                format!("port {port}\nbind 127.0.0.1\ndir {dir}\n{config}\n"),
            )
            .unwrap();
            vec![file.display().to_string(), "--sentinel".to_owned()]
        })
    }

    fn launch(args: impl Fn(&PathBuf, u16) -> Vec<String>) -> OwnRedis {
        // Somebody else may take the port between the look and the start.
        for _ in 0..10 {
            let (port, dir) = (free_port(), env::temp_dir().join(unique("redis")));
            fs::create_dir(&dir).unwrap();
            let args = args(&dir, port);
            let mut server = OwnRedis {
                child: None,
                port,
                dir,
                args,
            };
            if server.spawn() {
                return server;
            }
        }
        panic!("redis-server does not start");
    }

    /// Answers whether it serves.
    fn spawn(&mut self) -> bool {
        let child = Command::new("redis-server")
            .args(&self.args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let child = self.child.insert(child);
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if child.try_wait().unwrap().is_some() {
                return false;
            }
            let answer = command(self.port, &["PING"]);
            if answer.is_ok_and(|answer| answer == "PONG" || answer.starts_with("-NOAUTH")) {
                return true;
            }
            thread::sleep(Duration::from_millis(20));
        }
        false
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Kills it if it runs, then starts it on the same port.
    pub fn restart(&mut self) {
        self.kill();
        assert!(self.spawn(), "redis-server does not start again");
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// Its answer to a command, which is no array; an error begins with `-`.
    pub fn command(&self, words: &[&str]) -> String {
        command(self.port, words).unwrap()
    }

    /// A line of `INFO`.
    pub fn info(&self, section: &str, field: &str) -> Option<String> {
        let info = self.command(&["INFO", section]);
        let mut lines = info.lines().filter_map(|line| line.split_once(':'));
        lines
            .find(|(name, _)| *name == field)
            .map(|(_, value)| value.to_owned())
    }
}

impl Drop for OwnRedis {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl fmt::Debug for OwnRedis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnRedis({})", self.port)
    }
}

/// Three primaries that share the slots, each of which knows that all is well.
pub fn cluster() -> Vec<OwnRedis> {
    let nodes: Vec<OwnRedis> = (0..3)
        .map(|_| OwnRedis::start(&["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]))
        .collect();
    let slots = [("0", "5460"), ("5461", "10922"), ("10923", "16383")];
    let ok = |node: &OwnRedis, words: &[&str]| assert_eq!(node.command(words), "OK");
    for (epoch, (node, (first, last))) in nodes.iter().zip(slots).enumerate() {
        // Nodes of one epoch would have to settle that first, and elect nobody until then.
        let epoch = (epoch + 1).to_string();
        ok(node, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch]);
        ok(node, &["CLUSTER", "ADDSLOTSRANGE", first, last]);
    }
    for node in &nodes[1..] {
        let port = node.port().to_string();
        ok(&nodes[0], &["CLUSTER", "MEET", "127.0.0.1", &port]);
    }
    wait_until("the cluster is up", || {
        nodes.iter().all(|node| {
            let info = node.command(&["CLUSTER", "INFO"]);
            info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3")
        })
    });
    nodes
}

/// Looks until it is so, blocking. What Redis does in its own time, such as to demote an old primary, may take it
/// several rounds.
pub fn wait_until(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < 3 * PATIENCE, "not in time: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A port that nobody has, nor the one 10,000 above it, which is that of a cluster's bus.
fn free_port() -> u16 {
    loop {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        if let Some(bus) = port.checked_add(10_000) {
            if TcpListener::bind(("127.0.0.1", bus)).is_ok() {
                return port;
            }
        }
    }
}

fn command(port: u16, words: &[&str]) -> io::Result<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut request = format!("*{}\r\n", words.len());
    for word in words {
        request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    stream.write_all(request.as_bytes())?;
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let line = line.trim_end();
    match line.split_at_checked(1) {
        Some(("+" | ":", rest)) => Ok(rest.to_owned()),
        Some(("-", _)) => Ok(line.to_owned()),
        Some(("$", len)) => {
            let mut text = vec![0; len.parse().unwrap_or(0)];
            reader.read_exact(&mut text)?;
            Ok(String::from_utf8_lossy(&text).into_owned())
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

// ===== PgBouncer =====

/// PgBouncer in transaction mode in front of a PostgreSQL server, ended when dropped.
pub struct Bouncer {
    child: Child,
    port: u16,
    dir: PathBuf,
}

impl Bouncer {
    /// In front of the server of this URL. A test that gets `None` is over.
    pub fn start(server: &str) -> Option<Bouncer> {
        let program = program("pgbouncer")?;
        let server = host_and_port(server);
        let (host, server_port) = server.rsplit_once(':').unwrap();
        // Somebody else may take the port between the look and the start.
        for _ in 0..10 {
            let (port, dir) = (free_port(), env::temp_dir().join(unique("bouncer")));
            fs::create_dir(&dir).unwrap();
            let file = dir.join("pgbouncer.ini");
            let text = format!(
                "[databases]\ntest = host={host} port={server_port} dbname=test user=postgres\n[pgbouncer]\n\
                 listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nmax_client_conn = 500\n\
                 default_pool_size = 2\nauth_type = any\n\
                 pool_mode = transaction\nignore_startup_parameters = extra_float_digits\n"
            );
            fs::write(&file, text).unwrap();
            let mut command = Command::new(&program);
            // It does not want to be root.
            if fs::metadata(&dir).unwrap().uid() == 0 {
                command.args(["-u", "nobody"]);
            }
            let child = command
                .arg(&file)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let mut bouncer = Bouncer { child, port, dir };
            let mut up = None;
            wait_until("pgbouncer is up or has ended", || {
                let listens = reachable(&bouncer.url());
                up = match bouncer.child.try_wait().unwrap() {
                    Some(_) => Some(false),
                    None => listens.then_some(true),
                };
                up.is_some()
            });
            if up == Some(true) {
                return Some(bouncer);
            }
        }
        panic!("pgbouncer does not start");
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/test", self.port)
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

// ===== dropped and foreign calls =====

/// Polls a call so often, some time between, and drops it.
pub async fn drop_after<T>(polls: usize, call: impl Future<Output = T>) {
    let mut call = Box::pin(call);
    for _ in 0..polls {
        let over = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx).is_ready())).await;
        if over {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Asks on a thread without a runtime, once.
pub fn poll_outside<T: Send + 'static>(
    mut call: Pin<Box<dyn Future<Output = T> + Send>>,
) -> Option<T> {
    let poll = move || match call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    };
    thread::spawn(poll).join().expect("no panic")
}
