//! A NIC whose port goes down in the middle of a transfer: the others take its work, and it comes back.
//!
//! Runs where `KVIK_TEST_PORTS` names the NICs and the network interfaces behind them, and the process may take those
//! down: `KVIK_TEST_PORTS="verbs:rxe0,rxe1 d0 d1"`. `KVIK_TEST_ROUNDS` says how often. And everywhere, over the
//! stand-in for RoCE devices.

#[path = "engine/common.rs"]
#[allow(dead_code)]
mod common;
#[path = "../../../tests/standins/make.rs"]
#[allow(dead_code)]
mod make;
#[path = "../../../tests/standins/standin.rs"]
#[allow(dead_code)]
mod standin;

use common::{all, bytes, fill, many, region, wait_until, watch, within};
use kvik_core::Code;
use kvik_engine::{Config, Engine, GrantOptions, NicOptions, Preference};
use standin::Standin;
use std::cell::RefCell;
use std::process::Command;
use std::time::Duration;

/// 32 MiB.
const PAGES: u32 = 2048;
/// Longer than all rounds.
const LONG: Duration = Duration::from_secs(3600);
const DEADLINE: Duration = Duration::from_secs(60);
/// What promise P3 gives from the moment in which the connection is gone.
const BOUND: Duration = Duration::from_millis(2500);

/// Something that can be taken down.
trait Link {
    fn name(&self) -> String;
    fn set(&mut self, state: &str);
}

/// A network interface: it is up again when the test ends, however it does.
struct Interface<'a>(&'a str);

impl Link for Interface<'_> {
    fn name(&self) -> String {
        self.0.to_owned()
    }
    fn set(&mut self, state: &str) {
        let set = Command::new("ip").args(["link", "set", self.0, state]).status().unwrap();
        assert!(set.success(), "`ip link set {} {state}`: {set}", self.0);
    }
}

impl Drop for Interface<'_> {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "set", self.0, "up"]).status();
    }
}

/// A port of the stand-in.
struct Device<'a>(usize, &'a RefCell<standin::Control>);

impl Link for Device<'_> {
    fn name(&self) -> String {
        format!("roce{}", self.0)
    }
    fn set(&mut self, state: &str) {
        self.1.borrow_mut().say(&format!("{state} device={}", self.0));
    }
}

/// What the engines say of their NICs belongs to what this test prints.
struct Says;

impl log::Log for Says {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::Level::Warn
    }
    fn log(&self, record: &log::Record) {
        if self.enabled(record.metadata()) {
            println!("    {}", record.args());
        }
    }
    fn flush(&self) {}
}

/// The value of a metric of each NIC.
fn each(engine: &Engine, metric: &str) -> Vec<u64> {
    let text = engine.metrics();
    let lines = text.lines().filter(|line| line.starts_with(&format!("{metric}{{")));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap() as u64).collect()
}

/// Bytes that each NIC has brought.
fn brought(engine: &Engine) -> Vec<u64> {
    each(engine, "kvik_nic_bytes_total").into_iter().step_by(2).collect()
}

fn start(nics: &NicOptions) -> Engine {
    let nics = Some(nics.clone());
    Engine::start(Config { transport: Preference::Nics, nics, ..Config::default() }).unwrap()
}

#[test]
fn a_port_that_goes_down_leaves_its_work_to_the_others_and_comes_back() {
    let Ok(told) = std::env::var("KVIK_TEST_PORTS") else {
        return println!("not run: KVIK_TEST_PORTS names no NICs");
    };
    let (nics, links) = told.split_once(' ').expect("NICs and interfaces");
    let mut links: Vec<Interface> = links.split(' ').map(Interface).collect();
    let rounds = std::env::var("KVIK_TEST_ROUNDS").map_or(4, |rounds| rounds.parse().unwrap());
    let mut links: Vec<&mut dyn Link> = links.iter_mut().map(|link| link as &mut dyn Link).collect();
    let nics: NicOptions = nics.parse().unwrap();
    go_down([&nics, &nics], &mut links, rounds);
}

/// Over ports of the stand-in, of which the first two are taken down: `nics` are those of the owner, and of the reader.
fn over_a_stand_in(test: &str, nics: [&str; 2]) {
    let rounds = std::env::var("KVIK_TEST_ROUNDS").map_or(4, |rounds| rounds.parse().unwrap());
    Standin::Verbs.alone(test, &[("KVIK_STANDIN_DEVICES", "4")], |mut control| {
        // 32 MiB in pieces of 16 KiB over two NICs: about half a second, so that there is a middle.
        control.say("delay micros=300");
        let control = RefCell::new(control);
        let (mut first, mut second) = (Device(0, &control), Device(1, &control));
        let nics = nics.map(|nics| NicOptions {
            library: Some(Standin::Verbs.library()),
            ..nics.parse::<NicOptions>().unwrap()
        });
        let moved = go_down([&nics[0], &nics[1]], &mut [&mut first, &mut second], rounds);
        assert_eq!(moved, rounds, "the other NIC takes the work of the one whose port is down");
    });
}

#[test]
fn a_port_of_both_sides() {
    over_a_stand_in("a_port_of_both_sides", ["verbs:roce0,roce1"; 2]);
}

#[test]
fn a_port_of_the_owner_alone() {
    over_a_stand_in("a_port_of_the_owner_alone", ["verbs:roce0,roce1", "verbs:roce2,roce3"]);
}

#[test]
fn a_port_of_the_reader_alone() {
    over_a_stand_in("a_port_of_the_reader_alone", ["verbs:roce2,roce3", "verbs:roce0,roce1"]);
}

/// Takes one port after the other down in the middle of a transfer: how many transfers ended well all the same.
fn go_down(nics: [&NicOptions; 2], links: &mut [&mut dyn Link], rounds: usize) -> usize {
    log::set_logger(&Says).map(|()| log::set_max_level(log::LevelFilter::Warn)).unwrap();
    let (owner, reader) = (start(nics[0]), start(nics[1]));
    let (there, here) = (region(&owner, PAGES, 1), region(&reader, PAGES, 0));
    let options = GrantOptions { expiry: LONG, max_expiry: LONG, ..many() };
    let grant = owner.grant(&all(&there), options).unwrap();
    let expected = bytes(&there);
    let (mut moved, mut named, mut longest) = (0, 0, Duration::ZERO);
    for round in 0..rounds {
        let count = links.len();
        let link = &mut links[round % count];
        fill(&here, 0x55);
        let before = brought(&reader);
        let transfer = reader.read(&all(&here), grant.ticket(), None, within(DEADLINE)).unwrap();
        // In the middle: every NIC has brought something.
        wait_until("the first bytes over each NIC", || {
            brought(&reader).iter().zip(&before).all(|(now, before)| now > before) || transfer.is_done()
        });
        let middle = !transfer.is_done();
        let since = watch::start();
        link.set("down");
        let outcome = transfer.wait(Some(DEADLINE));
        let took = since.elapsed();
        let after = brought(&reader);
        let shares: Vec<u64> =
            after.iter().zip(&before).map(|(after, before)| (after - before) >> 20).collect();
        println!(
            "round {round}: {} went down, in the middle: {middle}; ended after {took:?}: {}; MiB by each NIC: {shares:?}",
            link.name(),
            outcome.as_ref().map_or_else(ToString::to_string, |_| "ok".into())
        );
        match outcome {
            Ok(_) => {
                assert!(bytes(&here) == expected, "a success with other bytes");
                moved += 1;
            }
            Err(error) => {
                assert_eq!(error.code, Code::PeerLost, "{error}");
                assert!(took < BOUND, "{took:?} until the end was told");
                named += 1;
            }
        }
        longest = longest.max(took);
        link.set("up");
        wait_until("every NIC being in use again", || {
            [&owner, &reader].iter().all(|engine| each(engine, "kvik_nic_up").iter().all(|up| *up == 1))
        });
        // It takes part again, by itself.
        wait_until("each NIC moving bytes again", || {
            let before = brought(&reader);
            let done = reader
                .read(&all(&here), grant.ticket(), None, within(DEADLINE))
                .unwrap()
                .wait(Some(DEADLINE));
            if let Err(error) = &done {
                println!("    a transfer ended: {error}");
            }
            done.is_ok() && brought(&reader).iter().zip(&before).all(|(now, before)| now > before)
        });
    }
    println!("{rounds} rounds: {moved} moved all bytes, {named} ended by name; the longest took {longest:?}");
    moved
}
