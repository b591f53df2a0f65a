//! Many things at once: many transfers, ends that cross beginnings, engines that close under load.

use crate::common::*;
use kvik_core::{Code, Ticket};
use kvik_engine::{Engine, Preference, Region, TransferOptions};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{scope, spawn};
use std::time::Duration;

const THREADS: u32 = 8;
const EACH: u32 = 25;

/// One thread's transfers, all in flight at once, each of other pages of both sides: half reads, half writes.
fn crowd(
    engine: &Engine,
    there: &Region,
    here: &Region,
    tickets: &[Ticket; 2],
    ids: Vec<u32>,
    mut random: Random,
) {
    let mut transfers = Vec::new();
    let mut rest = &ids[..];
    for _ in 0..EACH {
        let count = (1 + random.below(15)) as usize;
        let (mine, more) = rest.split_at(count);
        let writes = random.below(2) == 1;
        let theirs: Vec<u32> = if writes { mine.to_vec() } else { mine.iter().rev().copied().collect() };
        let (set, remote) = (pages(here, mine), Some(theirs.as_slice().into()));
        let transfer = match writes {
            false => engine.read(&set, &tickets[0], remote, TransferOptions::default()),
            true => engine.write(&set, &tickets[1], remote, TransferOptions::default()),
        };
        transfers.push((transfer.unwrap(), mine.to_vec(), theirs));
        rest = more;
    }
    let shift = |region: &Region, id: u32| {
        let mut page = vec![0; PAGE as usize];
        region.read_at(id as usize * PAGE as usize, &mut page).unwrap();
        page
    };
    for (transfer, mine, theirs) in transfers {
        let report = transfer.wait(Some(PATIENCE)).unwrap();
        assert_eq!(report.bytes, mine.len() as u64 * PAGE);
        for (a, b) in mine.iter().zip(&theirs) {
            assert!(shift(here, *a) == shift(there, *b), "page {a} is not page {b}");
        }
    }
}

fn crowds(transport: Preference) {
    let mut random = Random::new();
    let total = THREADS * EACH * 16;
    let (owner, other) = (engine(transport), engine(transport));
    let (there, here) = (region(&owner, total, 1), region(&other, total, 2));
    // Readable and writable at once: the pages that are read and those that are written differ.
    let readable = owner.grant(&all(&there), many()).unwrap();
    let writable = owner.grant(&all(&there), to_write()).unwrap();
    let tickets = [readable.ticket().clone(), writable.ticket().clone()];
    let ids = random.distinct(total, total);
    scope(|scope| {
        for part in ids.chunks((EACH * 16) as usize) {
            let (random, part) = (random.fork(), part.to_vec());
            scope.spawn(|| crowd(&other, &there, &here, &tickets, part, random));
        }
    });
}

#[test]
fn two_hundred_transfers_at_once_over_tcp() {
    crowds(Preference::Tcp);
}

#[test]
fn two_hundred_transfers_at_once_over_shared_memory() {
    crowds(Preference::Local);
}

#[test]
fn many_small_transfers_leave_nothing_behind() {
    for transport in [Preference::Tcp, Preference::Local] {
        let (owner, reader) = (engine(transport), engine(transport));
        let (there, here) = (region(&owner, 500, 1), region(&reader, 500, 2));
        let grant = owner.grant(&all(&there), many()).unwrap();
        let one = |id: u32| {
            let set = pages(&here, &[id]);
            reader.read(&set, grant.ticket(), Some([id].into()), TransferOptions::default()).unwrap()
        };
        let transfers: Vec<_> = (0..500).map(one).collect();
        transfers.into_iter().for_each(|transfer| drop(transfer.wait(Some(PATIENCE)).unwrap()));
        assert!(bytes(&there) == bytes(&here));
        let stats = reader.stats();
        let count = |name| stats.iter().find(|(other, _)| *other == name).unwrap().1;
        assert_eq!((count("transfers_ok"), count("transfers_failed"), count("transfers_open")), (500, 0, 0));
    }
}

#[test]
fn engines_that_connect_to_each_other_at_once_serve_both() {
    for round in 0..20 {
        let transport = if round % 2 == 0 { Preference::Tcp } else { Preference::Auto };
        let (one, two) = (engine(transport), engine(transport));
        let (first, second) = (region(&one, 8, 1), region(&two, 8, 2));
        let granted = |engine: &Engine, region: &Region| {
            engine.grant(&pages(region, &[0, 1, 2, 3]), many()).unwrap().ticket().clone()
        };
        let (of_one, of_two) = (granted(&one, &first), granted(&two, &second));
        let start = Barrier::new(2);
        scope(|scope| {
            for (engine, region, ticket) in [(&one, &first, &of_two), (&two, &second, &of_one)] {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    for _ in 0..5 {
                        read(engine, &pages(region, &[4, 5, 6, 7]), ticket).unwrap();
                    }
                });
            }
        });
        check(&first, &[0, 1, 2, 3], &second, &[4, 5, 6, 7]);
        check(&second, &[0, 1, 2, 3], &first, &[4, 5, 6, 7]);
    }
}

#[test]
fn what_was_cancelled_writes_nothing_afterwards() {
    // The engines do not know each other yet: each cancel meets its transfer before, while or after it begins.
    const COUNT: u32 = 200;
    for round in 0..30 {
        let transport = [Preference::Tcp, Preference::Local][round % 2];
        let (owner, reader) = (engine(transport), engine(transport));
        let (there, here) = (region(&owner, COUNT, 1), region(&reader, COUNT, 2));
        let grant = owner.grant(&all(&there), many()).unwrap();
        let begin = |id| {
            let (set, remote) = (pages(&here, &[id]), Some([id].into()));
            reader.read(&set, grant.ticket(), remote, TransferOptions::default()).unwrap()
        };
        let transfers: Vec<_> = (0..COUNT).map(begin).collect();
        if round >= 10 {
            let some = |(name, count): &(&str, u64)| *name == "sessions_open" && *count > 0;
            wait_until("the session", || reader.stats().iter().any(some));
        }
        let page = |id: usize| {
            let mut page = vec![0; PAGE as usize];
            here.read_at(id * PAGE as usize, &mut page).unwrap();
            page
        };
        let mut cancelled = Vec::new();
        for (id, transfer) in transfers.iter().enumerate() {
            transfer.cancel();
            if let Err(error) = transfer.wait(Some(PATIENCE)) {
                assert_eq!(error.code, Code::Cancelled);
                here.write_at(id * PAGE as usize, &[0xEE; PAGE as usize]).unwrap();
                cancelled.push(id);
            }
        }
        // Another transfer of the same session passes everything that was in flight.
        let last = region(&reader, COUNT, 3);
        read(&reader, &all(&last), grant.ticket()).unwrap();
        for id in cancelled {
            assert!(page(id) == [0xEE; PAGE as usize], "round {round}: page {id} was written after its end");
        }
    }
}

#[test]
fn closing_ends_fifty_transfers_in_flight_within_its_bound() {
    for transport in [Preference::Tcp, Preference::Local, Preference::Auto] {
        let (owner, reader) = (engine(transport), engine(transport));
        let there = owner.allocate(64 << 20).unwrap();
        let here: Vec<Region> = (0..50).map(|_| reader.allocate(64 << 20).unwrap()).collect();
        let grant = owner.grant(&all(&there), many()).unwrap();
        let begin = |region| reader.read(&all(region), grant.ticket(), None, TransferOptions::default());
        let transfers: Vec<_> = here.iter().map(|region| begin(region).unwrap()).collect();
        let began = watch::start();
        reader.close(PATIENCE).unwrap();
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
        for transfer in transfers {
            let ended = transfer.result().expect("ended by then");
            assert!(ended.is_ok() || code(ended) == Code::EngineClosed);
        }
        reader.close(PATIENCE).unwrap();
        assert_eq!(code(begin(&here[0]).map(|_| ())), Code::EngineClosed);
        assert_eq!(code(reader.grant(&all(&here[0]), many()).map(|_| ())), Code::EngineClosed);
        here.iter().for_each(|region| region.close(PATIENCE).unwrap());
    }
}

#[test]
fn an_engine_that_closes_while_transfers_begin_ends_them_all() {
    for round in 0..20 {
        let (owner, reader) = (engine(Preference::Auto), engine(Preference::Auto));
        let (there, here) = (region(&owner, 4, 1), region(&reader, 4, 2));
        let ticket = owner.grant(&all(&there), many()).unwrap().ticket().clone();
        let closed = Arc::new(AtomicBool::new(false));
        let (beginner, done) = (reader.clone(), closed.clone());
        let begins = spawn(move || {
            let mut transfers = Vec::new();
            while !done.load(Ordering::Relaxed) && transfers.len() < 20_000 {
                match beginner.read(&all(&here), &ticket, None, TransferOptions::default()) {
                    Ok(transfer) => transfers.push(transfer),
                    Err(error) => {
                        assert!(matches!(error.code, Code::EngineClosed | Code::MemoryCapReached), "{error}")
                    }
                }
            }
            transfers
        });
        for _ in 0..round * 500 {
            std::thread::yield_now();
        }
        reader.close(PATIENCE).unwrap();
        closed.store(true, Ordering::Relaxed);
        for transfer in begins.join().unwrap() {
            if let Err(error) = transfer.wait(Some(PATIENCE)) {
                assert_ne!(error.code, Code::WaitTimeout, "{error}");
            }
        }
    }
}
