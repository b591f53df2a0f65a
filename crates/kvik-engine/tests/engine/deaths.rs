//! Peers that are stopped or killed: real processes, which are this test's own program under another name.

use crate::common::*;
use crate::local::foreign;
use kvik_core::{Code, GrantId, Layout, Ticket};
use kvik_engine::{Engine, PageSet, Preference, Read, Region, Transfer, TransferOptions, TransportId};
use rustix::process::{Pid, Resource, Signal, getrlimit, kill_process};
use std::io::{BufRead, BufReader, Read as _};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

const ROLE: &str = "KVIK_TEST_PEER";
/// 256 MiB: no transfer of it is over before a test has done what it wants to do.
const PAGES: u32 = 16 << 10;
const SMALL: u32 = 64;

/// Not a test: the peer. It owns pages until its input ends.
#[test]
fn peer() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let transport = if role == "tcp" { Preference::Tcp } else { Preference::Auto };
    let owner = engine(transport);
    let count = if role == "namespace" { SMALL } else { PAGES };
    let (readable, writable) =
        (owner.allocate(u64::from(count) * PAGE).unwrap(), owner.allocate(64 << 20).unwrap());
    mark(&readable);
    let kept =
        [owner.grant(&all(&readable), many()).unwrap(), owner.grant(&all(&writable), to_write()).unwrap(), {
            let region = foreign(&owner, SMALL, 0);
            mark(&region);
            owner.grant(&all(&region), many()).unwrap()
        }];
    let tickets: Vec<String> = kept.iter().map(|grant| grant.ticket().to_string()).collect();
    println!("\npeer: {} {}", std::process::id(), tickets.join(" "));
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// The content of page `id`, whatever the region's size: its number, all over.
fn mark(region: &Region) {
    for id in 0..(region.bytes() / PAGE) as u32 {
        region.write_at(id as usize * PAGE as usize, &id.to_le_bytes().repeat(PAGE as usize / 4)).unwrap();
    }
}

/// A peer in a process of its own, killed when dropped.
pub struct Child {
    process: std::process::Child,
    /// Its number as this process sees it.
    pid: Pid,
    tickets: Vec<Ticket>,
    small: bool,
}

impl Child {
    fn start(role: &str) -> Child {
        Child::launch(Command::new(std::env::current_exe().unwrap()), role).unwrap()
    }

    /// None where this user may not make one.
    pub fn start_in_pid_namespace() -> Option<Child> {
        let mut command = Command::new("unshare");
        command
            .args(["--pid", "--fork", "--kill-child", "--mount-proc"])
            .arg(std::env::current_exe().unwrap());
        Child::launch(command, "namespace")
    }

    fn launch(mut command: Command, role: &str) -> Option<Child> {
        command.args(["--exact", "deaths::peer", "--nocapture"]).env(ROLE, role);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().ok()?;
        let output = BufReader::new(process.stdout.take().unwrap());
        let pid = Pid::from_child(&process);
        // A thread reads on, so that the child never waits for somebody to read its output.
        let (said, heard) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix("peer: ") {
                    drop(said.send(line.to_owned()));
                }
            }
        });
        let mut child = Child { process, pid, tickets: Vec::new(), small: role == "namespace" };
        let line = match heard.recv_timeout(PATIENCE) {
            Ok(line) => line,
            Err(mpsc::RecvTimeoutError::Disconnected) if child.small => return None,
            Err(error) => panic!("the peer says nothing: {error}"),
        };
        child.tickets = line.split(' ').skip(1).map(|text| text.parse().unwrap()).collect();
        Some(child)
    }

    pub fn readable(&self) -> &Ticket {
        &self.tickets[0]
    }
    pub fn writable(&self) -> &Ticket {
        &self.tickets[1]
    }
    pub fn foreign(&self) -> &Ticket {
        &self.tickets[2]
    }
    pub fn pages(&self) -> u32 {
        if self.small { SMALL } else { PAGES }
    }

    pub fn check(&self, region: &Region) {
        for (id, page) in bytes(region).chunks(PAGE as usize).enumerate() {
            assert!(page == (id as u32).to_le_bytes().repeat(PAGE as usize / 4), "page {id}");
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid, signal).unwrap();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// Begins to read all of the child's pages, and waits until some have come.
fn read_in_flight(
    reader: &kvik_engine::Engine,
    child: &Child,
    here: &Region,
    deadline: Duration,
) -> Transfer {
    blank(here, 0xEE);
    let transfer = reader.read(&all(here), child.readable(), None, within(deadline)).unwrap();
    wait_until("the first page", || byte(here, PAGE) != 0xEE || transfer.is_done());
    transfer
}

/// Stops the child while both read all of its pages. A fast machine may be through with one of them before that;
/// then it goes on, and they begin again.
fn stopped_amid(child: &Child, readers: [(&kvik_engine::Engine, &Region); 2]) -> (Transfer, Transfer) {
    for _ in 0..20 {
        readers.iter().for_each(|(_, here)| blank(here, 0xEE));
        let [lost, closed] = readers.map(|(reader, here)| {
            reader.read(&all(here), child.readable(), None, within(Duration::from_secs(60))).unwrap()
        });
        let came = |(_, here): (&kvik_engine::Engine, &Region)| byte(here, PAGE) != 0xEE;
        wait_until("the first page of both", || readers.into_iter().all(came));
        child.signal(Signal::STOP);
        if !lost.is_done() && !closed.is_done() {
            return (lost, closed);
        }
        child.signal(Signal::CONT);
        [lost, closed].iter().for_each(|transfer| drop(transfer.wait(Some(PATIENCE)).unwrap()));
    }
    panic!("both transfers were never in flight when the child was stopped");
}

#[test]
fn after_its_deadline_a_transfer_from_a_stopped_peer_writes_nothing_more() {
    let child = Child::start("tcp");
    let reader =
        kvik_engine::Engine::start(kvik_engine::Config { transport: Preference::Tcp, ..Default::default() })
            .unwrap();
    let here = reader.allocate(u64::from(PAGES) * PAGE).unwrap();
    // The session exists, so that the deadline is the transfer's own.
    let few = region(&reader, 4, 1);
    let four = Some([0, 1, 2, 3].as_slice().into());
    let some = |region: &Region| {
        reader.read(&pages(region, &[0, 1, 2, 3]), child.readable(), four.clone(), within(PATIENCE)).unwrap()
    };
    some(&few).wait(Some(PATIENCE)).unwrap();
    // A fast machine may be through before the child is stopped: then it begins again.
    let transfer = (0..20).find_map(|_| {
        let transfer = read_in_flight(&reader, &child, &here, Duration::from_millis(1200));
        child.signal(Signal::STOP);
        if !transfer.is_done() {
            return Some(transfer);
        }
        child.signal(Signal::CONT);
        if let Err(error) = transfer.wait(Some(PATIENCE)) {
            assert_eq!(error.code, Code::DeadlineExceeded, "{error}");
        }
        None
    });
    let transfer = transfer.expect("the transfer was through each time before the peer was stopped");
    let began = watch::start();
    let error = transfer.wait(Some(PATIENCE)).unwrap_err();
    assert_eq!(error.code, Code::DeadlineExceeded, "{error}");
    // The deadline, and a second in which threads may wait for a processor; the peer's loss has another code.
    assert!(began.elapsed() < Duration::from_millis(2200), "{:?}", began.elapsed());
    let seen = bytes(&here);
    // What the peer still sends is thrown away: a later transfer on the same channels comes behind it.
    child.signal(Signal::CONT);
    some(&few).wait(Some(PATIENCE)).unwrap();
    assert!(bytes(&here) == seen, "memory of an ended transfer was written");
    assert!(seen.contains(&0xEE), "all of it has come, and its deadline has passed");
}

/// Of several reads that end as one: what one peer still sends when another one has gone is thrown away.
#[test]
fn after_the_first_failure_of_several_nothing_more_is_written() {
    let child = Child::start("tcp");
    let reader = engine(Preference::Tcp);
    let (here, few) = (reader.allocate(u64::from(PAGES) * PAGE).unwrap(), region(&reader, 4, 1));
    // The owner of the first read is stopped in its middle, so that it is in flight when the other peer goes. Where all of
    // it had come before, it begins again.
    for _ in 0..10 {
        blank(&here, 0xEE);
        let goes = engine(Preference::Tcp);
        let wanted = vec![one_of(all(&here), child.readable()), one_of(all(&few), &to_come(&goes))];
        let reads = reader.read_all(wanted, Some(PATIENCE)).unwrap();
        wait_until("both sessions", || reader.stats().contains(&("sessions_open", 2)));
        wait_until("the first page", || byte(&here, PAGE) != 0xEE);
        child.signal(Signal::STOP);
        goes.close(PATIENCE).unwrap();
        let error = reads.wait(Some(PATIENCE)).unwrap_err();
        let (seen, mut outcomes) = (bytes(&here), reads.outcomes().expect("all have ended"));
        child.signal(Signal::CONT);
        assert_eq!((error.code, error.subject().read), (Code::PeerLost, Some(1)), "{error}");
        let four = Some([0, 1, 2, 3].as_slice().into());
        let after = reader.read(&pages(&few, &[0, 1, 2, 3]), child.readable(), four, within(PATIENCE));
        after.unwrap().wait(Some(PATIENCE)).unwrap();
        assert!(bytes(&here) == seen, "memory of an ended read was written");
        if let Err(error) = outcomes.remove(0) {
            assert_eq!(error.code, Code::Cancelled, "{error}");
            assert!(seen.contains(&0xEE), "all of it has come, and it was cancelled");
            return;
        }
    }
    panic!("the read was never in flight when the other one failed");
}

fn one_of(local: PageSet, ticket: &Ticket) -> Read {
    Read { local, ticket: ticket.clone(), positions: None, options: TransferOptions::default() }
}

/// A ticket of a grant of four pages that is not given.
fn to_come(owner: &Engine) -> Ticket {
    let layout = Layout::contiguous(4, PAGE).unwrap();
    owner.ticket_template(&layout).unwrap().with_grant(GrantId::random().unwrap(), PATIENCE)
}

#[test]
fn a_killed_peer_ends_the_reads_from_others_in_time() {
    for role in ["tcp", "auto"] {
        let child = Child::start(role);
        let transport = if role == "tcp" { Preference::Tcp } else { Preference::Auto };
        let (reader, lives) = (engine(transport), engine(transport));
        let (here, few) = (region(&reader, 4, 1), region(&reader, 4, 2));
        let dies = child.readable().with_grant(GrantId::random().unwrap(), PATIENCE);
        let wanted = vec![one_of(all(&few), &to_come(&lives)), one_of(all(&here), &dies)];
        let reads = reader.read_all(wanted, Some(PATIENCE)).unwrap();
        // With what the reads go over: one that still waits for its local link would look for a new session.
        let over = if role == "tcp" { TransportId::Tcp } else { TransportId::Local };
        wait_until("both sessions", || {
            reader.peers().iter().filter(|peer| peer.transports.contains(&over)).count() == 2
        });
        child.signal(Signal::KILL);
        let killed = watch::start();
        let error = reads.wait(Some(PATIENCE)).unwrap_err();
        assert!(killed.elapsed() < Duration::from_millis(2500), "{:?}", killed.elapsed());
        let subject = error.subject();
        assert_eq!((error.code, subject.read), (Code::PeerLost, Some(1)), "{error}");
        assert_eq!(subject.peer, Some(child.readable().engine));
        assert_eq!(code(reads.outcomes().unwrap().remove(0)), Code::Cancelled);
    }
}

#[test]
fn a_killed_peer_ends_transfers_both_ways_and_the_next_one_serves() {
    for role in ["tcp", "auto"] {
        assert!((0..5).any(|_| killed_amid_transfers(role)), "nothing was ever in flight any more");
    }
}

/// False where all of them were through before.
fn killed_amid_transfers(role: &str) -> bool {
    let transport = if role == "tcp" { Preference::Tcp } else { Preference::Auto };
    let child = Child::start(role);
    let reader = engine(transport);
    let here = reader.allocate(u64::from(PAGES) * PAGE).unwrap();
    let source = reader.allocate(64 << 20).unwrap();
    let read = read_in_flight(&reader, &child, &here, PATIENCE);
    let wrote: Vec<Transfer> = (0..20)
        .map(|_| reader.write(&all(&source), child.writable(), None, TransferOptions::default()).unwrap())
        .collect();
    child.signal(Signal::KILL);
    let killed = watch::start();
    let mut lost = 0;
    for transfer in wrote.into_iter().chain([read]) {
        match transfer.wait(Some(PATIENCE)) {
            // It was through before, or copied out of memory that outlives its owner.
            Ok(_) => {}
            Err(error) if error.code == Code::PeerLost => lost += 1,
            Err(error) => panic!("{error}"),
        }
        assert!(killed.elapsed() < Duration::from_millis(2500), "{:?}", killed.elapsed());
    }
    drop(child);
    let child = Child::start(role);
    read_with(&reader, &all(&here), child.readable(), within(PATIENCE)).unwrap();
    child.check(&here);
    lost > 0
}

#[test]
fn a_stopped_peer_is_lost_in_time_and_closing_does_not_wait_for_it() {
    let child = Child::start("tcp");
    let (reader, other) = (engine(Preference::Tcp), engine(Preference::Tcp));
    let here = reader.allocate(u64::from(PAGES) * PAGE).unwrap();
    let there = other.allocate(u64::from(PAGES) * PAGE).unwrap();
    let (lost, closed) = stopped_amid(&child, [(&reader, &here), (&other, &there)]);
    let stopped = watch::start();
    other.close(PATIENCE).unwrap();
    assert!(stopped.elapsed() < Duration::from_millis(1500), "{:?}", stopped.elapsed());
    assert_eq!(code(closed.result().expect("ended by then")), Code::EngineClosed);
    let error = lost.wait(Some(PATIENCE)).unwrap_err();
    assert_eq!(error.code, Code::PeerLost, "{error}");
    assert!(stopped.elapsed() < Duration::from_millis(2700), "{:?}", stopped.elapsed());
    // A transfer that now begins finds nobody, within its deadline.
    let late = reader.read(&all(&here), child.readable(), None, within(Duration::from_secs(1))).unwrap();
    assert_eq!(code(late.wait(Some(PATIENCE))), Code::PeerUnreachable);
}

#[test]
fn an_owner_gets_its_pages_back_from_a_stopped_reader() {
    // The child is written to by this side's reads; here this side owns, and a stopped peer holds a transfer open.
    let child = Child::start("auto");
    let other = engine(Preference::Tcp);
    let source = other.allocate(64 << 20).unwrap();
    // Long before the peer counts as lost, which were another error.
    let deadline = within(Duration::from_millis(500));
    let few = pages(&source, &[0]);
    other.write(&few, child.writable(), Some([0].into()), within(PATIENCE)).unwrap().wait(None).unwrap();
    child.signal(Signal::STOP);
    let began = watch::start();
    let wrote = other.write(&all(&source), child.writable(), None, deadline).unwrap();
    assert_eq!(code(wrote.wait(Some(PATIENCE))), Code::DeadlineExceeded);
    // Its memory is its own again, without the peer's help.
    source.close(PATIENCE).unwrap();
    assert!(began.elapsed() < Duration::from_millis(1700), "{:?}", began.elapsed());
}

/// Who opens a descriptor for which the kernel's table has no place may stand still for longer than a peer may be silent.
#[test]
fn no_peer_falls_silent_because_the_table_of_descriptors_grows() {
    let child = Child::start("auto");
    let reader = engine(Preference::Auto);
    let here = reader.allocate(PAGE).unwrap();
    let first = reader.read(&all(&here), child.readable(), Some([0].into()), within(PATIENCE)).unwrap();
    first.wait(Some(PATIENCE)).unwrap();
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.pid.as_raw_nonzero())).unwrap();
    let places = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX).min(4096);
    assert!(places.trim().parse::<u64>().unwrap() >= allowed, "{places} places for descriptors");
}
