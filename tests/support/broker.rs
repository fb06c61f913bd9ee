//! A broker whose workers are processes that it kills at random moments. It hands messages to them over
//! their stdin, and brings back what a worker held when it died.

#![allow(dead_code, unreachable_pub, missing_docs)]

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    env,
    io::{BufRead, BufReader, Write},
    ops::Range,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

// ===== the worker =====

/// What a worker makes of a delivery: it acks it, or gives it back for later; and why.
pub enum Answer {
    Ack(&'static str),
    Back(&'static str, Duration),
}

/// In a worker process: handles what it is sent, all at once, until it is killed. `handle` is given the id.
/// Says `| ack <id> <why>` or `| back <id> <why> <milliseconds>`.
pub async fn work<F>(handle: impl Fn(String) -> F)
where
    F: Future<Output = Answer> + Send + 'static,
{
    println!("| ready");
    let (deliver, mut deliveries) = tokio::sync::mpsc::unbounded_channel();
    thread::spawn(move || {
        for line in std::io::stdin().lines() {
            let Ok(id) = line else { return };
            if deliver.send(id).is_err() {
                return;
            }
        }
    });
    while let Some(id) = deliveries.recv().await {
        let handled = handle(id.clone());
        tokio::spawn(async move {
            match handled.await {
                Answer::Ack(why) => println!("| ack {id} {why}"),
                Answer::Back(why, pause) => println!("| back {id} {why} {}", pause.as_millis()),
            }
        });
    }
}

pub fn micros() -> u128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap().as_micros()
}

// ===== the broker =====

/// How the workers are treated.
pub struct Plan {
    pub workers: usize,
    /// How many messages a worker holds at most.
    pub in_flight: usize,
    /// After so many the workers are left alone.
    pub kills: usize,
    /// How many more deliveries are acked before the next kill is due,
    pub acks: Range<usize>,
    /// and how many milliseconds later it falls.
    pub pause: Range<u64>,
    /// By when each delivery is acked.
    pub patience: Duration,
}

struct Worker {
    child: Child,
    stdin: ChildStdin,
    ready: bool,
    killed: bool,
    /// Each delivery that it has not settled: an id may be there twice.
    holds: Vec<String>,
}

/// What a worker said; `None` at its end.
type Said = (u32, Option<String>);

pub struct Broker {
    plan: Plan,
    /// What tells the test, started anew, that it is a worker.
    variables: Vec<(&'static str, String)>,
    workers: HashMap<u32, Worker>,
    said: Receiver<Said>,
    say: Sender<Said>,
    queue: VecDeque<String>,
    later: Vec<(Instant, String)>,
    /// When a process was dead for sure, and what it held.
    pub killed: HashMap<u32, (u128, HashSet<String>)>,
    open: usize,
    acked: usize,
    /// How often a worker said why it acked a delivery or gave it back.
    said_why: BTreeMap<String, usize>,
}

impl Broker {
    /// Its workers are this program, which is to run the test `worker` under these variables.
    pub fn new(plan: Plan, variables: Vec<(&'static str, String)>) -> Broker {
        let (say, said) = channel();
        Broker {
            plan,
            variables,
            workers: HashMap::new(),
            said,
            say,
            queue: VecDeque::new(),
            later: Vec::new(),
            killed: HashMap::new(),
            open: 0,
            acked: 0,
            said_why: BTreeMap::new(),
        }
    }

    /// Makes these deliveries, kills workers meanwhile, and ends when each was acked.
    pub fn deliver(&mut self, ids: impl IntoIterator<Item = String>) {
        self.queue.extend(ids);
        self.open = self.queue.len();
        for _ in 0..self.plan.workers {
            self.start();
        }
        let begun = Instant::now();
        let mut enough = rand::random_range(self.plan.acks.clone());
        let mut due = None;
        while self.open > 0 {
            assert!(
                begun.elapsed() < self.plan.patience,
                "{} deliveries are still open",
                self.open
            );
            self.hand_out();
            match self.said.recv_timeout(Duration::from_millis(5)) {
                Ok((pid, said)) => self.hear(pid, said),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("the broker says, too"),
            }
            if self.killed.len() < self.plan.kills && self.acked >= enough {
                let pause = || Duration::from_millis(rand::random_range(self.plan.pause.clone()));
                if Instant::now() >= *due.get_or_insert_with(|| Instant::now() + pause()) {
                    due = None;
                    enough += rand::random_range(self.plan.acks.clone());
                    self.kill();
                }
            }
        }
        self.end();
    }

    pub fn count(&self, why: &str) -> usize {
        self.said_why.get(why).copied().unwrap_or_default()
    }

    fn start(&mut self) {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "worker", "--nocapture"])
            .envs(self.variables.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (pid, say) = (child.id(), self.say.clone());
        let stdout = child.stdout.take().unwrap();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                let Ok(line) = line else { break };
                if let Some(said) = line.split_once("| ").map(|(_, said)| said.to_owned()) {
                    let _ = say.send((pid, Some(said)));
                }
            }
            let _ = say.send((pid, None));
        });
        let worker = Worker {
            stdin: child.stdin.take().unwrap(),
            child,
            ready: false,
            killed: false,
            holds: Vec::new(),
        };
        self.workers.insert(pid, worker);
    }

    fn hand_out(&mut self) {
        let now = Instant::now();
        let (due, later) = self.later.drain(..).partition(|(at, _)| *at <= now);
        self.later = later;
        let due: Vec<(Instant, String)> = due;
        self.queue.extend(due.into_iter().map(|(_, id)| id));
        for worker in self.workers.values_mut() {
            while worker.ready && !worker.killed && worker.holds.len() < self.plan.in_flight {
                let Some(id) = self.queue.pop_front() else {
                    return;
                };
                // One that is dead takes nothing; what it holds comes back.
                let _ = worker.stdin.write_all(format!("{id}\n").as_bytes());
                worker.holds.push(id);
            }
        }
    }

    fn hear(&mut self, pid: u32, said: Option<String>) {
        let worker = self.workers.get_mut(&pid).unwrap();
        let Some(said) = said else {
            assert!(worker.killed, "worker {pid} ended by itself");
            let worker = self.workers.remove(&pid).unwrap();
            self.queue.extend(worker.holds);
            self.start();
            return;
        };
        let words: Vec<&str> = said.split(' ').collect();
        let (id, why) = match words[..] {
            ["ready"] => {
                worker.ready = true;
                return;
            }
            ["ack", id, why] => {
                self.open -= 1;
                self.acked += 1;
                (id, why)
            }
            ["back", id, why, pause] => {
                let due = Instant::now() + Duration::from_millis(pause.parse().unwrap());
                self.later.push((due, id.to_owned()));
                (id, why)
            }
            _ => panic!("worker {pid} said {said:?}"),
        };
        let at = worker.holds.iter().position(|held| held == id).unwrap();
        worker.holds.swap_remove(at);
        *self.said_why.entry(why.to_owned()).or_default() += 1;
    }

    /// Kills one that is at work.
    fn kill(&mut self) {
        let busy = self.workers.iter_mut();
        let mut busy: Vec<_> = busy
            .filter(|(_, it)| !it.killed && !it.holds.is_empty())
            .collect();
        if busy.is_empty() {
            return;
        }
        let chance = rand::random_range(0..busy.len());
        let (pid, worker) = &mut busy[chance];
        worker.child.kill().unwrap();
        worker.child.wait().unwrap();
        worker.killed = true;
        let held = worker.holds.iter().cloned().collect();
        self.killed.insert(**pid, (micros(), held));
    }

    fn end(&mut self) {
        for (_, mut worker) in self.workers.drain() {
            let _ = worker.child.kill();
            let _ = worker.child.wait();
        }
    }
}

/// Of a test that failed, too, no worker stays.
impl Drop for Broker {
    fn drop(&mut self) {
        self.end();
    }
}
