//! What an engine shows of itself: its metrics, and recordings, to whoever asks over its UNIX socket.

#[path = "../../kvik-engine/tests/engine/common.rs"]
#[allow(dead_code)]
mod common;

use common::{PATIENCE, all, code, many, pages, read, region, wait_until};
use kvik_core::Code;
use kvik_engine::{Config, Engine, GrantOptions, METRICS, Preference, TransferOptions};
use kvik_host::unix::UnixConn;
use kvik_observe::observe;
use std::time::{Duration, Instant};

/// An engine that is shown.
fn engine(transport: Preference) -> Engine {
    let engine = common::engine(transport);
    observe(&engine).unwrap();
    engine
}

/// Asks an engine: all messages until the end, or until `enough` says that there are enough.
fn ask(engine: &Engine, request: &str, enough: impl Fn(&[String]) -> bool) -> (UnixConn, Vec<String>) {
    let conn = connect(engine);
    conn.send_within(format!("kvik-stat/1 {request}").as_bytes(), &[], PATIENCE).unwrap();
    let heard = hear(&conn, enough);
    (conn, heard)
}

fn connect(engine: &Engine) -> UnixConn {
    UnixConn::connect(&format!("kvik-stat-{}", engine.id()), PATIENCE).unwrap()
}

fn hear(conn: &UnixConn, enough: impl Fn(&[String]) -> bool) -> Vec<String> {
    let (mut bytes, mut heard) = (vec![0; 1 << 20], Vec::new());
    while !enough(&heard) {
        let Some(message) = conn.recv_within(&mut bytes, 0, PATIENCE).unwrap() else { break };
        heard.push(String::from_utf8(bytes[..message.len].to_vec()).unwrap());
    }
    heard
}

fn to_the_end(_: &[String]) -> bool {
    false
}

/// The value of a series that begins like this.
fn value(text: &str, series: &str) -> Option<f64> {
    let line = text.lines().find(|line| line.starts_with(series))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// The sum of all series of a metric with these words in their labels.
fn sum(text: &str, metric: &str, words: &[&str]) -> f64 {
    let of = |line: &&str| {
        line.starts_with(&format!("{metric}{{")) && words.iter().all(|word| line.contains(word))
    };
    text.lines().filter(of).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[test]
fn a_snapshot_tells_of_the_engine_over_every_transport() {
    for transport in [Preference::Auto, Preference::Tcp, Preference::Local] {
        let engine = engine(transport);
        let (_, heard) = ask(&engine, "snapshot", to_the_end);
        assert!(heard[0].contains(&engine.id().to_string()) && heard[0].starts_with('{'), "{}", heard[0]);
        let text = heard[1..].concat();
        for metric in METRICS {
            assert!(
                text.contains(&format!("# TYPE {} {}\n", metric.name, metric.kind.name())),
                "{}",
                metric.name
            );
        }
        assert_eq!(value(&text, "kvik_transfers_open "), Some(0.0));
    }
}

#[test]
fn both_sides_count_what_passed_between_them() {
    for (transport, name) in [(Preference::Tcp, "tcp"), (Preference::Local, "local")] {
        let (owner, reader) = (engine(transport), engine(transport));
        let (source, target) = (region(&owner, 8, 1), region(&reader, 8, 0));
        let given = owner.grant(&all(&source), GrantOptions::default()).unwrap();
        let report = read(&reader, &all(&target), given.ticket()).unwrap();
        assert_eq!(code(read(&reader, &all(&target), given.ticket())), Code::GrantConsumed);
        // An owner answers first and counts afterwards.
        let ended =
            |text: &str| sum(text, "kvik_transfers_total", &[]) + sum(text, "kvik_grants_ended_total", &[]);
        wait_until("the owner's count", || ended(&owner.metrics()) == 3.0);
        let (here, there) = (reader.metrics(), owner.metrics());
        let (from, to) = (format!("peer=\"{}\"", owner.id()), format!("peer=\"{}\"", reader.id()));
        let mechanism = format!("transport=\"{name}\"");
        let (bytes, sides) =
            (report.bytes as f64, [(&here, &from, "initiator", "in"), (&there, &to, "owner", "out")]);
        for (text, peer, role, direction) in sides {
            let labels = |outcome| [peer.as_str(), role, &mechanism, outcome];
            assert_eq!(sum(text, "kvik_transfers_total", &labels("\"ok\"")), 1.0, "{text}");
            assert_eq!(sum(text, "kvik_transfers_total", &labels("\"grant_consumed\"")), 1.0, "{text}");
            assert_eq!(sum(text, "kvik_transfer_bytes_total", &[peer, direction, "\"ok\""]), bytes, "{text}");
        }
        assert_eq!(sum(&here, "kvik_transfer_extents_total", &[&mechanism]), report.extents as f64);
        assert_eq!(value(&here, "kvik_transfer_seconds_count"), Some(1.0));
        assert_eq!(sum(&there, "kvik_refusals_total", &[&to, "grant_consumed"]), 1.0);
        assert_eq!(sum(&there, "kvik_grants_ended_total", &["consumed"]), 1.0);
        assert_eq!(value(&there, "kvik_registered_bytes"), Some(source.bytes() as f64));
        assert!(sum(&here, "kvik_thread_cpu_seconds_total", &["kvik-ctl"]) > 0.0);
    }
}

#[test]
fn a_handshake_that_is_refused_is_counted_by_its_reason() {
    let secret = |text: &str| Config { secret: Some(text.into()), ..Config::default() };
    let owner = Engine::start(secret("the one and only")).unwrap();
    let reader = Engine::start(secret("another one")).unwrap();
    let (source, target) = (region(&owner, 1, 1), region(&reader, 1, 0));
    let given = owner.grant(&all(&source), many()).unwrap();
    assert_eq!(code(read(&reader, &all(&target), given.ticket())), Code::SecretMismatch);
    assert_eq!(sum(&reader.metrics(), "kvik_transfers_total", &["secret_mismatch", "\"none\""]), 1.0);
    wait_until("a refused handshake in the metrics", || {
        sum(&owner.metrics(), "kvik_handshakes_refused_total", &[]) == 1.0
    });
}

#[test]
fn whoever_does_not_ask_or_asks_for_something_else_is_let_go() {
    let engine = engine(Preference::Tcp);
    let begun = Instant::now();
    let silent = connect(&engine);
    assert!(hear(&silent, to_the_end).is_empty());
    assert!(begun.elapsed() >= Duration::from_millis(900), "{:?}", begun.elapsed());
    let (_, heard) = ask(&engine, "everything", to_the_end);
    assert!(heard.len() == 1 && heard[0].contains("snapshot, trace"), "{heard:?}");
    let waiting: Vec<UnixConn> = (0..16).map(|_| connect(&engine)).collect();
    // The seventeenth is closed unheard; when the others' time is over, there is room again.
    assert!(hear(&connect(&engine), to_the_end).is_empty());
    waiting.iter().for_each(|conn| assert!(hear(conn, to_the_end).is_empty()));
    assert_eq!(ask(&engine, "snapshot", |heard| heard.len() > 1).1.len(), 2);
}

#[test]
fn a_recording_has_every_transfer_and_says_how_it_ended() {
    let (owner, reader) = (engine(Preference::Auto), engine(Preference::Auto));
    let (source, target) = (region(&owner, 8, 1), region(&reader, 8, 0));
    let given = owner.grant(&all(&source), many()).unwrap();
    let begun = |heard: &[String]| heard.len() >= 2;
    let (conn, heard) = ask(&reader, "trace", begun);
    assert!(heard[1].contains("kvik-trace/2"), "{heard:?}");
    let (_, refused) = ask(&reader, "trace", to_the_end);
    assert!(refused.concat().contains("one recording at a time"), "{refused:?}");
    for transport in [Preference::Tcp, Preference::Local] {
        let options = TransferOptions { transport: Some(transport), ..TransferOptions::default() };
        let remote = Some([7, 6, 3].as_slice().into());
        let transfer = reader.read(&pages(&target, &[0, 1, 2]), given.ticket(), remote, options).unwrap();
        transfer.wait(Some(PATIENCE)).unwrap();
    }
    conn.send_within(b"end", &[], PATIENCE).unwrap();
    let text = hear(&conn, to_the_end).concat();
    let lines: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert_eq!(lines[0]["dims"]["pages"], 8);
    for (line, transport) in lines[1..3].iter().zip(["tcp", "local"]) {
        assert_eq!(line["transport"], transport);
        // In the order of positions, as they were moved.
        assert_eq!(line["remote"]["positions"].to_string(), "[3,[6,2]]");
        assert_eq!(line["pages"].to_string(), "[2,1,0]");
        assert_eq!(line["outcome"], "ok");
    }
    assert_eq!(lines[3]["end"]["transfers"], 2);
    assert!(!text.contains(&owner.id().to_string()) && !text.contains("127.0.0.1"), "{text}");
}

#[test]
fn an_engine_that_closes_ends_its_recording() {
    let engine = engine(Preference::Tcp);
    let (conn, _) = ask(&engine, "trace", |heard| heard.len() >= 2);
    engine.close(PATIENCE).unwrap();
    let text = hear(&conn, to_the_end).concat();
    assert!(text.contains("\"end\""), "{text:?}");
    assert!(UnixConn::connect(&format!("kvik-stat-{}", engine.id()), Duration::from_millis(100)).is_err());
}
