//! How much memory a remembered id takes: the growth of a process that fills one record, each
//! contender in a process of its own, so that nothing carries over.
//!
//! `cargo bench --bench memory`, optionally with other counts: `-- 2000000 3000000`. Without
//! `--bench`, or with `--test`, one small count.

mod rivals;

use dashmap::DashSet;
use futures_util::FutureExt;
use rivals::{IdSet, Random};
use std::{
    collections::HashSet,
    env, fs, io,
    process::{Command, ExitCode},
    sync::Mutex,
};
use tower_idempotency::{BoxError, MemoryStore, MessageId, Store};

/// Fills a record with so many ids and answers how many bytes the process grew by meanwhile.
type Fill = fn(usize) -> io::Result<u64>;

struct Contender {
    name: &'static str,
    /// Bytes per id, at most.
    target: Option<u64>,
    fill: Fill,
}

const CONTENDERS: [Contender; 7] = [
    Contender {
        name: "MemoryStore, UUIDs",
        target: Some(40),
        fill: |count| fill_store(count, uuid),
    },
    Contender {
        name: "HashSet<u128>, UUIDs",
        target: None,
        fill: fill_bare_set,
    },
    Contender {
        name: "Mutex<HashSet<String>>, UUIDs",
        target: None,
        fill: |count| fill_rival(Mutex::<HashSet<String>>::default(), count, uuid),
    },
    Contender {
        name: "DashSet<String>, UUIDs",
        target: None,
        fill: |count| fill_rival(DashSet::default(), count, uuid),
    },
    Contender {
        name: "moka with TTL, UUIDs",
        target: None,
        fill: |count| fill_rival(rivals::cache(), count, uuid),
    },
    Contender {
        name: "MemoryStore, other ids",
        target: Some(100),
        fill: |count| fill_store(count, other),
    },
    Contender {
        name: "Mutex<HashSet<String>>, other ids",
        target: None,
        fill: |count| fill_rival(Mutex::<HashSet<String>>::default(), count, other),
    },
];

fn uuid(random: &mut Random) -> String {
    random.uuid().hyphenated().to_string()
}

/// 36 bytes that are no UUID.
fn other(random: &mut Random) -> String {
    let mut id = format!("order:{:030x}", random.uuid().as_u128() >> 8);
    id.shrink_to_fit();
    id
}

fn fill_store(count: usize, id: fn(&mut Random) -> String) -> io::Result<u64> {
    let store = MemoryStore::new();
    let grown = grown(count, |random| {
        let id = MessageId::from(id(random));
        let remembered = store.remember(&id).now_or_never();
        remembered.expect("nothing waits").expect("remembered");
    });
    assert_eq!(store.len(), count);
    grown
}

fn fill_rival(set: impl IdSet, count: usize, id: fn(&mut Random) -> String) -> io::Result<u64> {
    let grown = grown(count, |random| set.insert(id(random)));
    assert!(set.contains(&id(&mut Random(1))));
    grown
}

fn fill_bare_set(count: usize) -> io::Result<u64> {
    let mut set = HashSet::new();
    let grown = grown(count, |random| {
        set.insert(random.uuid().as_u128());
    });
    assert_eq!(set.len(), count);
    grown
}

fn grown(count: usize, mut insert: impl FnMut(&mut Random)) -> io::Result<u64> {
    let before = resident()?;
    let mut random = Random(1);
    for _ in 0..count {
        insert(&mut random);
    }
    Ok(resident()?.saturating_sub(before))
}

/// Bytes of this process that are in memory.
fn resident() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024)
        .ok_or_else(|| io::Error::other("no VmRSS"))
}

/// Runs one contender in a process of its own.
fn measure(name: &str, count: usize) -> Result<u64, BoxError> {
    let output = Command::new(env::current_exe()?)
        .args(["--fill", name, &count.to_string()])
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}

fn main() -> Result<ExitCode, BoxError> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let given = |name: &str| arguments.iter().any(|argument| argument == name);

    if let [flag, name, count] = &arguments[..]
        && flag == "--fill"
    {
        let contender = CONTENDERS.iter().find(|contender| contender.name == name);
        let fill = contender.ok_or("no such contender")?.fill;
        println!("{}", fill(count.parse()?)?);
        return Ok(ExitCode::SUCCESS);
    }
    if given("--list") {
        return Ok(ExitCode::SUCCESS);
    }
    if let Err(error) = resident() {
        println!("not measured: {error}");
        return Ok(ExitCode::SUCCESS);
    }

    let trial = !given("--bench") || given("--test");
    let mut counts: Vec<usize> = arguments.iter().filter_map(|a| a.parse().ok()).collect();
    if counts.is_empty() {
        counts = if trial {
            vec![100_000]
        } else {
            vec![1_000_000, 5_000_000]
        };
    }

    print!("{:<36}", "bytes of memory per id");
    for count in &counts {
        print!("{count:>12}");
    }
    println!();
    for Contender { name, target, .. } in CONTENDERS {
        print!("{name:<36}");
        let mut most = 0.0_f64;
        for &count in &counts {
            let bytes = measure(name, count)? as f64 / count as f64;
            print!("{bytes:>12.1}");
            most = most.max(bytes);
        }
        if let Some(target) = target {
            let verdict = if most <= target as f64 {
                "ok"
            } else {
                "missed"
            };
            print!("   <= {target}   {verdict}");
        }
        println!();
    }
    Ok(ExitCode::SUCCESS)
}
