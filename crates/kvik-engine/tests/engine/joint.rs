//! Several reads as one: they succeed together, and the first that fails ends the others.

use crate::common::*;
use kvik_core::{Code, EngineId, Error, GrantId, GrantState, Layout, Ticket};
use kvik_engine::{
    Engine, Grant, GrantOptions, JointRead, PageSet, Preference, Read, Region, TransferOptions,
};
use rustix::event::{PollFd, PollFlags, poll};
use std::time::Duration;

const COUNT: u32 = 8;
/// What a read that is cancelled with the others would have taken otherwise.
const LONG: Duration = Duration::from_secs(60);

fn of(local: &PageSet, ticket: &Ticket) -> Read {
    let (local, ticket) = (local.clone(), ticket.clone());
    Read { local, ticket, positions: None, options: TransferOptions::default() }
}

/// A ticket of a grant that is not given: a read of it waits at the owner.
fn to_come(owner: &Engine) -> Ticket {
    let layout = Layout::contiguous(COUNT, PAGE).unwrap();
    owner.ticket_template(&layout).unwrap().with_grant(GrantId::random().unwrap(), LONG)
}

/// Gives that grant.
fn give(owner: &Engine, source: &Region, ticket: &Ticket) -> Grant {
    owner.grant(&all(source), GrantOptions { id: Some(ticket.grant), ..GrantOptions::default() }).unwrap()
}

/// Its error, when nothing of the others was waited for; `began` is when it was to fail at the latest.
fn failed(reads: &JointRead, place: u32, owner: &EngineId, began: watch::Watch) -> Error {
    let error = reads.wait(Some(PATIENCE)).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let subject = error.subject();
    assert_eq!((subject.read, subject.peer.as_ref()), (Some(place), Some(owner)), "{error}");
    assert!(error.text.contains(&format!("reads[{place}] of 3 (from engine {owner})")), "{error}");
    for (at, outcome) in reads.outcomes().expect("all have ended").into_iter().enumerate() {
        match at as u32 == place {
            true => assert_eq!(code(outcome), error.code),
            false => assert_eq!(code(outcome), Code::Cancelled),
        }
    }
    error
}

/// Three owners. The grants of the first and the last are to come, and the read from the second fails: of the grant that
/// `second` gives, or of one to come, when `fail` has been called.
fn one_fails(
    transport: Preference,
    expected: Code,
    second: impl FnOnce(&Engine) -> Option<Grant>,
    fail: impl FnOnce(&Engine),
) {
    let reader = engine(transport);
    let owners = [engine(transport), engine(transport), engine(transport)];
    let sources = [1, 2, 3].map(|seed| region(&owners[seed - 1], COUNT, seed as u8));
    let targets = [(); 3].map(|()| region(&reader, COUNT, 99));
    let untouched = bytes(&targets[0]);
    let given = second(&owners[1]);
    let mut tickets = [0, 1, 2].map(|owner| to_come(&owners[owner]));
    if let Some(grant) = &given {
        tickets[1] = grant.ticket().clone();
    }
    let began = watch::start();
    let reads = (0..3).map(|one| of(&all(&targets[one]), &tickets[one])).collect();
    let reads = reader.read_all(reads, Some(LONG)).unwrap();
    if given.is_none() {
        wait_until("the sessions", || reader.stats().contains(&("sessions_open", 3)));
        assert!(reads.result().is_none() && reads.outcomes().is_none(), "its grants are not given");
    }
    fail(&owners[1]);
    assert_eq!(failed(&reads, 1, &owners[1].id(), began).code, expected);
    // What the others waited for comes too late for them.
    for place in [0, 2] {
        let _grant = give(&owners[place], &sources[place], &tickets[place]);
        let again = region(&reader, COUNT, 5);
        read(&reader, &all(&again), &tickets[place]).unwrap();
        assert_eq!(bytes(&again), bytes(&sources[place]));
    }
    assert!(targets.iter().all(|target| bytes(target) == untouched), "memory of an ended read was written");
    assert_eq!(reads.wait(None).unwrap_err().code, expected, "it stays");
}

#[test]
fn all_succeed_as_one() {
    for (transport, name) in [(Preference::Tcp, "tcp"), (Preference::Local, "local")] {
        let reader = engine(transport);
        let owners: Vec<Engine> = (0..3).map(|_| engine(transport)).collect();
        let sources: Vec<Region> = (0..6).map(|part| region(&owners[part % 3], COUNT, part as u8)).collect();
        let target = region(&reader, 6 * COUNT, 99);
        let ids = |part: u32| (part * COUNT..(part + 1) * COUNT).collect::<Vec<u32>>();
        let tickets: Vec<Ticket> = (0..6).map(|part| to_come(&owners[part % 3])).collect();
        let reads = (0..6).map(|part| of(&pages(&target, &ids(part as u32)), &tickets[part])).collect();
        let reads = reader.read_all(reads, None).unwrap();
        let ended = reads.done_fd().unwrap();
        let is_readable = || {
            let mut of = [PollFd::new(&ended, PollFlags::IN)];
            poll(&mut of, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
        };
        let given = |part: usize| {
            assert!(!reads.is_done() && !is_readable(), "{part} is not given yet");
            give(&owners[part % 3], &sources[part], &tickets[part])
        };
        let grants: Vec<Grant> = (0..6).rev().map(given).collect();
        let report = reads.wait(Some(PATIENCE)).unwrap();
        assert!(is_readable());
        assert!(grants.iter().all(|grant| grant.wait(PATIENCE) == Some(GrantState::Consumed)));
        assert_eq!(report.bytes, 6 * u64::from(COUNT) * PAGE);
        assert_eq!(report.reads.len(), 6);
        for (part, one) in report.reads.iter().enumerate() {
            assert_eq!((one.bytes, one.transport.name()), (u64::from(COUNT) * PAGE, name));
            assert!(one.total <= report.total && one.plan + one.post + one.wire <= one.total, "{one:?}");
            check(&sources[part], &ids(0), &target, &ids(part as u32));
        }
        let outcomes = reads.outcomes().unwrap();
        assert!(outcomes.len() == 6 && outcomes.iter().all(Result::is_ok));
        reads.cancel();
        assert!(reads.wait(None).is_ok(), "an ended one stays as it is");
    }
}

#[test]
fn a_refusal_ends_the_others() {
    for transport in [Preference::Tcp, Preference::Local] {
        let taken_back = |owner: &Engine| {
            let grant = owner.grant(&all(&region(owner, COUNT, 2)), many()).unwrap();
            grant.revoke(PATIENCE).unwrap();
            Some(grant)
        };
        one_fails(transport, Code::GrantRevoked, taken_back, |_| ());
        let expired = |owner: &Engine| {
            let expiry = Duration::from_millis(20);
            let options = GrantOptions { expiry, max_expiry: expiry, ..GrantOptions::default() };
            let grant = owner.grant(&all(&region(owner, COUNT, 2)), options).unwrap();
            assert_eq!(grant.wait(PATIENCE), Some(GrantState::Expired));
            Some(grant)
        };
        one_fails(transport, Code::GrantExpired, expired, |_| ());
        let small = |owner: &Engine| Some(owner.grant(&all(&region(owner, COUNT - 1, 2)), many()).unwrap());
        one_fails(transport, Code::ShapeMismatch, small, |_| ());
    }
}

#[test]
fn a_peer_that_goes_ends_the_reads_from_others() {
    let goes = |owner: &Engine| owner.close(PATIENCE).unwrap();
    one_fails(Preference::Tcp, Code::PeerLost, |_| None, goes);
}

#[test]
fn a_peer_that_is_not_there_ends_the_reads_from_others() {
    let (reader, owner, gone) = (engine(Preference::Tcp), engine(Preference::Tcp), engine(Preference::Tcp));
    let target = region(&reader, COUNT, 99);
    let tickets = [to_come(&gone), to_come(&owner), to_come(&owner)];
    let who = gone.id();
    gone.close(PATIENCE).unwrap();
    drop(gone);
    let began = watch::start();
    let reads = tickets.iter().map(|ticket| of(&all(&target), ticket)).collect();
    let reads = reader.read_all(reads, Some(LONG)).unwrap();
    assert_eq!(failed(&reads, 0, &who, began).code, Code::PeerUnreachable);
}

#[test]
fn they_have_one_deadline() {
    in_time(Duration::from_secs(1), |deadline| {
        let (reader, owner) = (engine(Preference::Tcp), engine(Preference::Tcp));
        let (source, target) = (region(&owner, COUNT, 1), region(&reader, 2 * COUNT, 99));
        let there = owner.grant(&all(&source), GrantOptions::default()).unwrap();
        let ids: Vec<u32> = (COUNT..2 * COUNT).collect();
        let first: Vec<u32> = (0..COUNT).collect();
        let wanted =
            vec![of(&pages(&target, &first), there.ticket()), of(&pages(&target, &ids), &to_come(&owner))];
        let (began, busy) = (std::time::Instant::now(), watch::start());
        let reads = reader.read_all(wanted, Some(deadline)).unwrap();
        let error = reads.wait(Some(PATIENCE)).unwrap_err();
        // The owner says first that it has never had the grant, or the reader that the time is over.
        assert!(began.elapsed() >= deadline / 2, "{:?}", began.elapsed());
        assert!(busy.elapsed() < deadline + Duration::from_secs(2), "{:?}", busy.elapsed());
        // What was there first stays.
        if let Err(error) = &reads.outcomes().unwrap()[0] {
            assert!([Code::DeadlineExceeded, Code::Cancelled].contains(&error.code), "{error}");
            return None;
        }
        assert!([Code::DeadlineExceeded, Code::GrantUnknown].contains(&error.code), "{error}");
        assert_eq!(error.subject().read, Some(1), "{error}");
        assert_eq!(there.wait(PATIENCE), Some(GrantState::Consumed));
        check(&source, &first, &target, &first);
        Some(())
    });
}

#[test]
fn a_cancellation_is_of_all() {
    let (reader, owner) = (engine(Preference::Tcp), engine(Preference::Tcp));
    let target = region(&reader, COUNT, 99);
    let tickets: Vec<Ticket> = (0..100).map(|_| to_come(&owner)).collect();
    let wanted = tickets.iter().map(|ticket| of(&all(&target), ticket)).collect();
    let reads = reader.read_all(wanted, Some(LONG)).unwrap();
    assert_eq!(code(reads.wait(Some(Duration::from_millis(20)))), Code::WaitTimeout);
    let began = watch::start();
    reads.cancel();
    let error = reads.wait(Some(PATIENCE)).unwrap_err();
    assert_eq!((error.code, error.subject().read), (Code::Cancelled, None), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(reads.outcomes().unwrap().into_iter().all(|outcome| code(outcome) == Code::Cancelled));
    assert!(reader.stats().contains(&("transfers_open", 0)));
}

#[test]
fn an_engine_that_closes_ends_all() {
    let (reader, owner) = (engine(Preference::Tcp), engine(Preference::Tcp));
    let target = region(&reader, COUNT, 99);
    let wanted = (0..20).map(|_| of(&all(&target), &to_come(&owner))).collect();
    let reads = reader.read_all(wanted, Some(LONG)).unwrap();
    reader.close(PATIENCE).unwrap();
    assert_eq!(code(reads.result().expect("ended by then")), Code::EngineClosed);
    assert_eq!(code(reader.read_all(Vec::new(), None).map(drop)), Code::EngineClosed);
}

#[test]
fn its_own_grants_are_read_with_those_of_others() {
    let (reader, owner) = (engine(Preference::Auto), engine(Preference::Auto));
    let (mine, theirs) = (region(&reader, COUNT, 1), region(&owner, COUNT, 2));
    let targets = [(); 2].map(|()| region(&reader, COUNT, 99));
    let tickets = [reader.grant(&all(&mine), many()).unwrap(), owner.grant(&all(&theirs), many()).unwrap()];
    let wanted = || targets.iter().zip(&tickets).map(|(to, grant)| of(&all(to), grant.ticket())).collect();
    let report = reader.read_all(wanted(), None).unwrap().wait(Some(PATIENCE)).unwrap();
    assert_eq!(report.reads[0].transport.name(), "self");
    assert!(bytes(&targets[0]) == bytes(&mine) && bytes(&targets[1]) == bytes(&theirs));
    tickets[0].revoke(PATIENCE).unwrap();
    let error = reader.read_all(wanted(), None).unwrap().wait(Some(PATIENCE)).unwrap_err();
    assert_eq!((error.code, error.subject().read), (Code::GrantRevoked, Some(0)), "{error}");
}

#[test]
fn what_is_refused_at_once_begins_none() {
    let (reader, owner, other) = (engine(Preference::Tcp), engine(Preference::Tcp), engine(Preference::Tcp));
    let (source, target) = (region(&owner, COUNT, 1), region(&reader, COUNT, 99));
    let (grant, writable) =
        (owner.grant(&all(&source), many()).unwrap(), owner.grant(&all(&source), to_write()).unwrap());
    let good = || of(&all(&target), grant.ticket());
    let foreign = region(&other, COUNT, 1);
    let with = |options| Read { options, ..good() };
    for (bad, expected) in [
        (of(&pages(&target, &[1, 1]), grant.ticket()), Code::DuplicatePage),
        (of(&all(&target), writable.ticket()), Code::GrantWrongRight),
        (of(&all(&foreign), grant.ticket()), Code::InvalidArgument),
        (with(within(PATIENCE)), Code::InvalidArgument),
        (with(TransferOptions { readers: Some(0), ..TransferOptions::default() }), Code::InvalidArgument),
    ] {
        let error = reader.read_all(vec![good(), good(), bad], None).err().expect("refused");
        assert_eq!((error.code, error.subject().read), (expected, Some(2)), "{error}");
        assert!(error.text.starts_with("reads[2] of 3: "), "{error}");
    }
    assert_eq!(code(reader.read_all(vec![good()], Some(Duration::ZERO)).map(drop)), Code::InvalidArgument);
    assert!(reader.stats().contains(&("transfers_open", 0)) && reader.peers().is_empty(), "one has begun");
    let none = reader.read_all(Vec::new(), None).unwrap();
    assert!(none.is_done() && none.wait(None).unwrap().bytes == 0 && none.outcomes().unwrap().is_empty());
    reader.read_all(vec![good()], None).unwrap().wait(Some(PATIENCE)).unwrap();
}
