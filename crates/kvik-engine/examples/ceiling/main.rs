//! How many chunks a second the protocol can hand out, place and take back, when nothing moves.
//!
//! `cargo run --release -p kvik-engine --example ceiling [SECONDS] [ROUNDS]`
//!
//! One engine, which owns the pages, serves reads of many peers, each an engine of its own with a session of its own.
//! All of them are in this process, and the counted threads do all of the work of both sides: for each chunk the owner
//! claims it, the reader places it, and both report it done, one by one. Between claim and report it is pinned, as by a
//! transport, but no byte moves. Grants, begins, accepts and ends are part of it: each transfer has a grant of its own
//! with one reader, who confirms it.
//!
//! `claim` is how many chunks the owner claims at once, and reports at once. Channels and copies claim one; a NIC claims
//! and reports as many as it has places for, and nobody places what it moves. The reader's calls are for one chunk in any
//! case. Printed are medians over the rounds, in which the cells take turns: chunks a second; the bytes a second that these would
//! carry; and the CPU time of both sides for a chunk, which says what a chunk costs where a machine is shared.

mod side;

use kvik_core::{Layout, Result, View};
use kvik_host::clock::{boottime, thread_cpu};
use kvik_proto::{Established, Greeting, Handshake, WorkKind, WorkOutcome};
use side::{Chunks, Ended, Engine, identity, local};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::scope;
use std::time::{Duration, Instant};

const PAGE: u64 = 64 << 10;
/// 64 chunks of 512 KiB, as tcp and NICs cut 32 MiB.
const PAGES: u32 = 512;
const CHUNK: u64 = 512 << 10;
/// Transfers of a peer that are open at once.
const OPEN: usize = 2;
/// Time passes for the sessions so often.
const TICK: Duration = Duration::from_millis(100);

/// What is measured together.
#[derive(Debug, Clone, Copy)]
struct Cell {
    threads: usize,
    peers: usize,
    claim: usize,
}

struct Figure {
    /// Chunks a second.
    rate: f64,
    /// CPU nanoseconds a chunk.
    cost: f64,
}

/// A peer with its session, whose transfers one thread keeps going.
struct Peer {
    engine: Engine,
    session: u64,
    open: usize,
    // Kept for their room.
    sent: Chunks,
    placed: Chunks,
    ended: Vec<Ended>,
}

fn main() {
    let mut args = std::env::args().skip(1);
    let seconds = args.next().map_or(0.3, |arg| arg.parse().expect("seconds"));
    let rounds = args.next().map_or(9, |arg| arg.parse().expect("a number of rounds"));
    let mut cells = Vec::new();
    for threads in [1, 2] {
        for peers in [1, 8, 64, 512] {
            // A session is one thread's: with fewer peers than threads there is nothing to share.
            if peers >= threads {
                cells.extend([1, 8].map(|claim| Cell { threads, peers, claim }));
            }
        }
    }
    let mut figures: Vec<Vec<Figure>> = cells.iter().map(|_| Vec::new()).collect();
    for _ in 0..rounds {
        for (cell, figures) in cells.iter().zip(&mut figures) {
            figures.push(measure(*cell, Duration::from_secs_f64(seconds)));
        }
    }
    println!("threads  peers  claim   million chunks/s (low..high)    would carry   CPU a chunk");
    for (cell, figures) in cells.iter().zip(&figures) {
        let rates = sorted(figures.iter().map(|figure| figure.rate / 1e6));
        let costs = sorted(figures.iter().map(|figure| figure.cost));
        let rate = rates[rates.len() / 2];
        println!(
            "{:7}  {:5}  {:5}   {:7.3} ({:.3}..{:.3})          {:8.1} GB/s   {:7.0} ns",
            cell.threads,
            cell.peers,
            cell.claim,
            rate,
            rates[0],
            rates[rates.len() - 1],
            rate * CHUNK as f64 / 1e3,
            costs[costs.len() / 2]
        );
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

fn measure(cell: Cell, time: Duration) -> Figure {
    let layout = Arc::new(Layout::contiguous(PAGES, PAGE).expect("a layout"));
    let pages = (0..PAGES).collect::<Vec<_>>().into();
    let view = View::new(layout, pages, 0..1, 0..1, kvik_core::Order::PageFirst).expect("a view");
    let owner = Engine::new(identity(0), &view);
    let mut groups: Vec<Vec<Peer>> = (0..cell.threads).map(|_| Vec::new()).collect();
    for number in 1..=cell.peers {
        groups[number % cell.threads].push(connect(&owner, number, &view));
    }
    let (over, start) = (AtomicBool::new(false), Barrier::new(cell.threads + 1));
    scope(|scope| {
        let work = |mut peers: Vec<Peer>, first: bool| {
            let (owner, over, start) = (&owner, &over, &start);
            scope.spawn(move || {
                start.wait();
                let (cpu, mut chunks, mut ticked) = (thread_cpu(), 0, Instant::now());
                while !over.load(Ordering::Relaxed) {
                    for peer in &mut peers {
                        chunks += turn(owner, peer, cell.claim);
                    }
                    if ticked.elapsed() > TICK {
                        ticked = Instant::now();
                        peers.iter().for_each(|peer| peer.engine.tick());
                        if first {
                            owner.tick();
                        }
                    }
                }
                (chunks, thread_cpu() - cpu)
            })
        };
        let threads: Vec<_> =
            groups.into_iter().enumerate().map(|(at, peers)| work(peers, at == 0)).collect();
        start.wait();
        let began = Instant::now();
        std::thread::sleep(time);
        over.store(true, Ordering::Relaxed);
        let ends: Vec<(u64, Duration)> =
            threads.into_iter().map(|thread| thread.join().expect("a thread")).collect();
        let elapsed = began.elapsed();
        let chunks: u64 = ends.iter().map(|(chunks, _)| chunks).sum();
        let cpu: Duration = ends.iter().map(|(_, cpu)| *cpu).sum();
        assert!(chunks > 0, "nothing moved: {cell:?}");
        Figure { rate: chunks as f64 / elapsed.as_secs_f64(), cost: cpu.as_nanos() as f64 / chunks as f64 }
    })
}

/// A peer that has opened a session with the owner.
fn connect(owner: &Engine, number: usize, view: &View) -> Peer {
    let engine = Engine::new(identity(number), view);
    let (theirs, ours) = shake(number).expect("a handshake");
    let session = ours.session;
    owner.add_session(ours);
    engine.add_session(theirs);
    Peer { engine, session, open: 0, sent: Vec::new(), placed: Vec::new(), ended: Vec::new() }
}

fn shake(number: usize) -> Result<(Established, Established)> {
    let nonce = |salt: u8| std::array::from_fn(|at| (number >> (8 * (at % 4))) as u8 ^ salt ^ at as u8);
    let (mut left, mut to_right) = Handshake::open(local(number), nonce(1), Some(identity(0)));
    let (mut right, mut to_left) = (Handshake::listen(local(0), nonce(2)), Vec::new());
    let mut both = (None, None);
    while both.0.is_none() || both.1.is_none() {
        let taken = right.receive(&mut to_right, &mut to_left)?;
        both.1 = both.1.or(taken.and_then(control));
        let taken = left.receive(&mut to_left, &mut to_right)?;
        both.0 = both.0.or(taken.and_then(control));
    }
    Ok((both.0.expect("the opener's"), both.1.expect("the listener's")))
}

fn control(greeting: Greeting) -> Option<Established> {
    match greeting {
        Greeting::Control(established) => Some(established),
        _ => None,
    }
}

/// One turn of a session: its transfers are kept open, and some chunks go. How many went.
fn turn(owner: &Engine, peer: &mut Peer, claim: usize) -> u64 {
    peer.open -= peer.engine.take_ended();
    while peer.open < OPEN {
        let grant = owner.grant();
        peer.engine.begin(peer.session, grant);
        peer.open += 1;
        exchange(owner, peer);
    }
    let Peer { engine, session, sent, placed, ended, .. } = &mut *peer;
    owner.claim(*session, claim, sent);
    if sent.is_empty() {
        exchange(owner, peer);
        return 0;
    }
    for order in &*sent {
        let WorkKind::Send(header) = &order.kind else { panic!("a work request that is not to send") };
        placed.push(engine.place(*session, header).expect("a place for the chunk"));
    }
    let count = sent.len() as u64;
    placed.drain(..).for_each(|order| engine.done(order.id, done()));
    match claim {
        1 => sent.drain(..).for_each(|order| owner.done(order.id, done())),
        _ => {
            ended.extend(sent.drain(..).map(|order| (order.id, done())));
            owner.batch_done(ended);
        }
    }
    if peer.engine.has_output() {
        exchange(owner, peer);
    }
    count
}

fn done() -> WorkOutcome {
    WorkOutcome::Done { extents: 1, verify: Duration::ZERO }
}

/// Carries frames between the two sides until both are silent.
fn exchange(owner: &Engine, peer: &Peer) {
    let mut bytes = Vec::new();
    loop {
        let mut moved = false;
        for (from, to) in [(&peer.engine, owner), (owner, &peer.engine)] {
            bytes.clear();
            from.take_output(peer.session, &mut bytes);
            if !bytes.is_empty() {
                to.receive(peer.session, &bytes);
                moved = true;
            }
        }
        if !moved {
            return;
        }
    }
}

/// Now, on the clock of the protocol.
fn now() -> Duration {
    boottime()
}
