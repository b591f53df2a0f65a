//! Pages of GPUs between processes of one host: a real second process, which is this test's own program under another
//! name. CUDA gives a process no way to open its own memory, so none of this can be tried within one.
//!
//! The GPUs are the stand-in's; each test has a process of its own, and each of those has a peer.

use crate::common::*;
use crate::cuda::{self, App, Control};
use crate::faulty::Faults;
use crate::gpus::gpus;
use crate::pair::{Kind, Memories, OPS, Op, foreign, gpu, options, paged_set, whole};
use kvik_core::{Code, Error, Ticket};
use kvik_engine::{Engine, GpuMemory, PageSet, Preference, Region, Report, TransferOptions, Verify};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const ROLE: &str = "KVIK_TEST_IPC_PEER";
/// The peer does not use CUDA.
const BARE: &str = "KVIK_TEST_IPC_BARE";
const FAULTS: &str = "KVIK_STANDIN_CUDA_FAULTS";
const PAGES: u32 = 96;
const PAGE: u64 = 64 << 10;
const BYTES: u64 = PAGES as u64 * PAGE;
const SHORT: Duration = Duration::from_millis(200);
/// Of what the peer's region has in it at the start.
const SEED: u8 = 3;

/// Not a test: the peer. It has a region, and does what it is told until its input ends.
#[test]
fn peer() {
    let Ok(role) = std::env::var(ROLE) else { return };
    if std::env::var_os(BARE).is_none() {
        std::mem::forget(App::on(0));
    }
    let engine = engine(Preference::Auto);
    let region = memory(&role, &engine, SEED);
    let kept = OPS.map(|op| engine.grant(&whole(&region, PAGE), options(op)).unwrap());
    println!("\npeer: {} {}", kept[0].ticket(), kept[1].ticket());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (word, rest) = line.split_once(' ').unwrap_or((&line, ""));
        match word {
            "close" => println!("\npeer: {:?}", region.close(PATIENCE).map_err(|error| error.code)),
            "has" => println!("\npeer: {}", bytes(&region) == pattern(BYTES, rest.parse().unwrap())),
            "read" => {
                let read = engine.read(&whole(&region, PAGE), &rest.parse().unwrap(), None, within(PATIENCE));
                let report = read.unwrap().wait(Some(PATIENCE)).unwrap();
                println!("\npeer: {} {}", report.transport.name(), report.mechanism);
            }
            _ => panic!("{line:?} means nothing"),
        }
    }
}

/// A region of what a word says: on the first or second GPU, in mappings of it, allocated by kvik, or ordinary.
fn memory(role: &str, engine: &Engine, seed: u8) -> Region {
    let region = match role {
        "gpu" => engine.register(gpu(BYTES, Box::new(()))).unwrap(),
        "second" | "mapped" => {
            let app = App::on(i32::from(role == "second"));
            let at = match role {
                "second" => app.alloc(BYTES as usize),
                _ => app.map(BYTES as usize / 2, 2),
            };
            // SAFETY: allocated to the end of the process.
            engine.register(unsafe { GpuMemory::new(at, BYTES as usize, Box::new(app)) }.unwrap()).unwrap()
        }
        "shared" => engine.allocate(BYTES).unwrap(),
        "foreign" => engine.register(foreign(BYTES, |buffer| Box::new(buffer))).unwrap(),
        _ => panic!("{role:?} is no memory"),
    };
    fill(&region, seed);
    region
}

/// How memory of a word is read by another process.
fn mechanism_from(role: &str) -> &'static str {
    match role {
        "shared" => "memfd",
        "foreign" => "process_vm_readv",
        _ => "cuda_ipc",
    }
}

/// A peer in a process of its own, killed when dropped.
struct Peer {
    process: Child,
    said: Receiver<String>,
    tickets: Vec<Ticket>,
}

impl Peer {
    fn start(role: &str, settings: &[(&str, &str)]) -> Peer {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "ipc::peer", "--nocapture"]).env(ROLE, role);
        command.envs(settings.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let (say, said) = channel();
        std::thread::spawn(move || {
            let lines = output.lines().map_while(Result::ok);
            lines
                .filter_map(|line| line.strip_prefix("peer: ").map(str::to_owned))
                .try_for_each(|line| say.send(line))
        });
        let mut peer = Peer { process, said, tickets: Vec::new() };
        peer.tickets = peer.answer().split(' ').map(|text| text.parse().unwrap()).collect();
        peer
    }

    fn tell(&self, command: &str) {
        writeln!(self.process.stdin.as_ref().unwrap(), "{command}").unwrap();
    }

    fn answer(&self) -> String {
        self.said.recv_timeout(PATIENCE).expect("an answer of the peer")
    }

    fn ask(&self, command: &str) -> String {
        self.tell(command);
        self.answer()
    }

    fn ticket(&self, op: Op) -> &Ticket {
        &self.tickets[usize::from(op == Op::Write)]
    }

    fn stop(&self) {
        kill_process(Pid::from_child(&self.process), Signal::STOP).unwrap();
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn with(transport: Preference, verify: Verify) -> TransferOptions {
    TransferOptions { transport: Some(transport), verify: Some(verify), ..within(PATIENCE) }
}

/// Moves all pages between the peer and these, some other way round.
fn move_all(
    engine: &Engine,
    peer: &Peer,
    op: Op,
    (set, remote): (&PageSet, Option<&[u32]>),
    options: TransferOptions,
) -> Result<Report, Error> {
    let (ticket, remote) = (peer.ticket(op), remote.map(Into::into));
    let begun = match op {
        Op::Read => engine.read(set, ticket, remote, options),
        Op::Write => engine.write(set, ticket, remote, options),
    };
    begun?.wait(Some(PATIENCE))
}

/// Every pair of memories of which one lies on a GPU, both ways, pages in order and not.
fn moves(theirs: &'static str, own: &[&str]) {
    let engine = engine(Preference::Local);
    let peer = Peer::start(theirs, &[]);
    let ids: Vec<u32> = (0..PAGES).collect();
    let turned: Vec<u32> = ids.iter().rev().copied().collect();
    let mut seed = 0x40;
    for own in own {
        let here = memory(own, &engine, 0);
        for (verify, order) in [(Verify::Full, &ids), (Verify::Off, &turned)] {
            // From the peer's pages back to the same ones: whatever their order here, the content says it.
            blank(&here, 0xEE);
            let set = paged_set(&here, order, PAGE);
            let expected = pattern(BYTES, SEED);
            let report =
                move_all(&engine, &peer, Op::Read, (&set, Some(order)), with(Preference::Local, verify))
                    .unwrap();
            assert_eq!(
                (report.transport.name(), &*report.mechanism),
                ("local", mechanism_from(theirs)),
                "{theirs} to {own}"
            );
            assert_eq!(report.checks.contains(&"page_checksum"), verify == Verify::Full);
            assert!(bytes(&here) == expected, "{theirs} to {own}: not what was there");
            seed += 1;
            fill(&here, seed);
            let report =
                move_all(&engine, &peer, Op::Write, (&set, Some(order)), with(Preference::Auto, verify))
                    .unwrap();
            assert_eq!(
                (report.transport.name(), &*report.mechanism),
                ("local", mechanism_from(own)),
                "{own} to {theirs}"
            );
            assert_eq!(peer.ask(&format!("has {seed}")), "true", "{own} to {theirs}");
            // As it was, for the next ones.
            fill(&here, SEED);
            move_all(&engine, &peer, Op::Write, (&set, Some(order)), with(Preference::Tcp, verify)).unwrap();
        }
        here.close(PATIENCE).unwrap();
    }
}

gpus! {
    fn pages_of_a_peers_gpu_move_to_and_from_every_memory(control) {
        moves("gpu", &["gpu", "second", "shared", "foreign"]);
        wait_until("the peer's memory to be closed", || control.count("opened") == 0);
    }
    fn pages_of_a_gpu_move_to_and_from_a_peers_memory(_control) {
        moves("shared", &["gpu"]);
        moves("foreign", &["gpu"]);
    }
    fn a_region_of_a_gpu_is_closed_when_nobody_has_it_open_any_more(control) {
        let engine = engine(Preference::Local);
        let here = memory("gpu", &engine, 0);
        let peer = Peer::start("gpu", &[]);
        let set = whole(&here, PAGE);
        move_all(&engine, &peer, Op::Read, (&set, None), with(Preference::Local, Verify::Full)).unwrap();
        assert_eq!(control.count("opened"), 1);
        // The memory is freed only then.
        assert_eq!(peer.ask("close"), "Ok(())");
        assert_eq!(control.count("opened"), 0);
        let error = move_all(&engine, &peer, Op::Read, (&set, None), with(Preference::Local, Verify::Full));
        assert_eq!(code(error), Code::RegionClosed);
    }
    fn what_is_read_while_the_owner_closes_its_region_does_not_count_and_holds_the_memory(control) {
        let engine = engine(Preference::Local);
        let peer = Peer::start("gpu", &[]);
        for own in ["gpu", "shared"] {
            let here = memory(own, &engine, 0);
            let set = whole(&here, PAGE);
            let peer = if own == "gpu" { &peer } else { &Peer::start("gpu", &[]) };
            let warm = move_all(&engine, peer, Op::Read, (&set, None), with(Preference::Local, Verify::Off));
            warm.unwrap();
            let copies = ["cuMemcpyDtoDAsync_v2", "cuMemcpyBatchAsync", "cuMemcpyDtoHAsync_v2", "cuMemcpy2DAsync_v2"];
            let begun = || copies.iter().map(|name| control.count(name)).sum::<i64>();
            let before = begun();
            control.say("stall");
            let read = engine.read(&set, peer.ticket(Op::Read), None, with(Preference::Local, Verify::Full)).unwrap();
            wait_until("a copy to be begun", || begun() > before);
            peer.tell("close");
            let error = read.wait(Some(PATIENCE)).unwrap_err();
            assert_eq!(error.code, Code::PagesQuarantined, "{error}");
            assert!(peer.said.try_recv().is_err(), "memory was given back under a copy");
            control.say("release");
            assert_eq!(peer.answer(), "Ok(())");
            assert_eq!(control.count("opened"), 0);
            here.close(PATIENCE).unwrap();
        }
    }
    fn memory_that_cannot_be_exported_is_refused_by_name_and_written_to_all_the_same(control) {
        let refusals = [("gpu", "fail cuIpcGetMemHandle nth=1 code=801", "NOT_SUPPORTED"), ("mapped", "clear", "expandable_segments")];
        let engine = engine(Preference::Auto);
        for (role, faults, word) in refusals {
            // The peer's.
            let peer = Peer::start(role, &[(FAULTS, faults)]);
            let here = memory("shared", &engine, 0);
            let set = whole(&here, PAGE);
            let why = |text: &str| assert!(text.contains(word) && text.contains("GPU 0"), "{text}");
            let read = |want| move_all(&engine, &peer, Op::Read, (&set, None), with(want, Verify::Full));
            let error = read(Preference::Local).unwrap_err();
            assert_eq!(error.code, Code::TransportUnavailable, "{error}");
            why(&error.text);
            let report = read(Preference::Auto).unwrap();
            assert_eq!(report.transport.name(), "tcp");
            why(&rejected(&report.rejected_transports));
            assert!(bytes(&here) == pattern(BYTES, SEED));
            let report = move_all(&engine, &peer, Op::Write, (&set, None), with(Preference::Local, Verify::Full));
            assert_eq!(report.unwrap().mechanism, "memfd");
            // This side's.
            control.say(faults);
            let here = memory(role, &engine, 9);
            control.say("clear");
            let set = whole(&here, PAGE);
            let write = |want| move_all(&engine, &peer, Op::Write, (&set, None), with(want, Verify::Full));
            let error = write(Preference::Local).unwrap_err();
            assert_eq!(error.code, Code::TransportUnavailable, "{error}");
            why(&error.text);
            let report = write(Preference::Auto).unwrap();
            assert_eq!(report.transport.name(), "tcp");
            why(&rejected(&report.rejected_transports));
            assert_eq!(peer.ask("has 9"), "true");
        }
    }
    fn a_handle_that_the_driver_refuses_sends_the_pages_over_tcp(control) {
        let engine = engine(Preference::Auto);
        let peer = Peer::start("gpu", &[]);
        let here = memory("gpu", &engine, 0);
        // One page, which one thread opens the memory for.
        let set = paged_set(&here, &[0], PAGE);
        let read = |want| move_all(&engine, &peer, Op::Read, (&set, Some(&[0])), with(want, Verify::Full));
        control.say("fail cuIpcOpenMemHandle_v2 nth=1 code=205");
        let error = read(Preference::Local).unwrap_err();
        assert_eq!(error.code, Code::TransportUnavailable, "{error}");
        assert!(error.text.contains("lies on a GPU") && error.text.contains("MAP"), "{error}");
        control.say("fail cuIpcOpenMemHandle_v2 nth=1 code=205");
        let report = read(Preference::Auto).unwrap();
        assert_eq!(report.transport.name(), "tcp");
        assert!(bytes(&here)[..PAGE as usize] == pattern(BYTES, SEED)[..PAGE as usize]);
        // What was refused once is asked for again.
        control.say("clear");
        assert_eq!(read(Preference::Auto).unwrap().mechanism, "cuda_ipc");
    }
    fn a_peer_that_is_killed_ends_the_transfer_and_leaves_nothing_open(control) {
        const LOCAL: &Kind = &Kind { transport: "local", memory: Memories::Gpu, ..Kind::NEW };
        let faults = Faults::new(1);
        let engine = LOCAL.engine(&faults, None);
        let here = memory("gpu", &engine, 0);
        let set = whole(&here, PAGE);
        let mut peer = Peer::start("gpu", &[]);
        let full = || with(Preference::Local, Verify::Full);
        move_all(&engine, &peer, Op::Read, (&set, None), full()).unwrap();
        faults.hold_from(faults.given() + 1);
        let read = engine.read(&set, peer.ticket(Op::Read), None, full()).unwrap();
        assert!(faults.wait_held(1, PATIENCE));
        peer.kill();
        let none = |(name, count): &(&str, u64)| *name == "sessions_open" && *count == 0;
        wait_until("the death to be noticed", || engine.stats().iter().any(none));
        faults.release();
        let error = read.wait(Some(PATIENCE)).unwrap_err();
        assert_eq!(error.code, Code::PeerLost, "{error}");
        wait_until("its memory to be closed", || control.count("opened") == 0);
        let next = Peer::start("gpu", &[]);
        move_all(&engine, &next, Op::Read, (&set, None), full()).unwrap();
        assert!(bytes(&here) == pattern(BYTES, SEED));
        here.close(PATIENCE).unwrap();
    }
    fn a_region_that_a_silent_peer_has_open_is_free_when_the_peer_is_gone(control) {
        let engine = engine(Preference::Local);
        let here = memory("gpu", &engine, 5);
        let grant = engine.grant(&whole(&here, PAGE), many()).unwrap();
        let bare = Peer::start("shared", &[(BARE, "1")]);
        assert!(bare.ask(&format!("read {}", grant.ticket())).starts_with("tcp "));
        assert_eq!(bare.ask("has 5"), "true");
        let mut peer = Peer::start("gpu", &[]);
        assert_eq!(peer.ask(&format!("read {}", grant.ticket())), "local cuda_ipc");
        assert_eq!(peer.ask("has 5"), "true");
        peer.stop();
        let began = watch::start();
        let error = here.close(SHORT).unwrap_err();
        assert_eq!(error.code, Code::RegionBusy, "{error}");
        assert!(error.text.contains("has it open") && began.elapsed() < Duration::from_secs(5), "{error}");
        assert_eq!(control.count("allocations"), 1);
        peer.kill();
        here.close(PATIENCE).unwrap();
        wait_until("the memory to be freed", || control.count("allocations") == 0);
    }
}

#[test]
fn a_process_without_cuda_or_without_the_gpu_takes_another_transport() {
    let name = "ipc::a_process_without_cuda_or_without_the_gpu_takes_another_transport";
    cuda::alone(name, &[("KVIK_STANDIN_CUDA_DEVICES", "1")], |control| {
        let engine = engine(Preference::Auto);
        let peer = Peer::start("second", &[("KVIK_STANDIN_CUDA_DEVICES", "2")]);
        let here = memory("shared", &engine, 0);
        let set = whole(&here, PAGE);
        for word in ["does not use CUDA", "does not see"] {
            let read = |want| move_all(&engine, &peer, Op::Read, (&set, None), with(want, Verify::Full));
            let error = read(Preference::Local).unwrap_err();
            assert_eq!(error.code, Code::TransportUnavailable, "{error}");
            assert!(error.text.contains(word), "{error}");
            blank(&here, 0);
            let report = read(Preference::Auto).unwrap();
            assert_eq!(report.transport.name(), "tcp");
            assert!(rejected(&report.rejected_transports).contains(word), "{report:?}");
            assert!(bytes(&here) == pattern(BYTES, SEED));
            // From now on it does use CUDA.
            std::mem::forget(App::on(0));
        }
        assert_eq!(control.count("opened"), 0);
    });
}
