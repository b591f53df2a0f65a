//! What a grant allows, and how it ends: every refusal has its own code.

use crate::common::*;
use kvik_core::{Code, GrantState, Layout, Right, Ticket, Use};
use kvik_engine::{GrantOptions, PageSet, Preference, TransferOptions};
use std::sync::Arc;
use std::time::Duration;

const BOTH: [Preference; 2] = [Preference::Tcp, Preference::Local];

#[test]
fn a_ticket_gives_its_right_and_no_other() {
    for transport in BOTH {
        let (owner, other) = (engine(transport), engine(transport));
        let (there, here) = (region(&owner, 2, 1), region(&other, 2, 2));
        let readable = owner.grant(&all(&there), many()).unwrap();
        let written = other.write(&all(&here), readable.ticket(), None, TransferOptions::default());
        assert_eq!(code(written.map(|_| ())), Code::GrantWrongRight);
        // Who alters the ticket hears it from the owner.
        let altered = Ticket { right: Right::Write, ..readable.ticket().clone() };
        let written = other.write(&all(&here), &altered, None, TransferOptions::default()).unwrap();
        assert_eq!(code(written.wait(Some(PATIENCE))), Code::GrantWrongRight);
        check(&there, &[0, 1], &region(&owner, 2, 1), &[0, 1]);
    }
}

#[test]
fn pages_outside_the_grant_are_refused() {
    for transport in BOTH {
        let (owner, reader) = (engine(transport), engine(transport));
        let (there, here) = (region(&owner, 8, 1), region(&reader, 8, 2));
        let grant = owner.grant(&pages(&there, &[1, 3]), many()).unwrap();
        let mine = pages(&here, &[0]);
        for (asked, expected) in [(5, Code::PageNotGranted), (1 << 30, Code::PageNotGranted)] {
            let read = reader.read(&mine, grant.ticket(), Some([asked].into()), TransferOptions::default());
            let error = read.unwrap().wait(Some(PATIENCE)).unwrap_err();
            assert_eq!(error.code, expected);
            assert!(error.text.contains(&asked.to_string()), "{error}");
        }
        let layout = Arc::new(Layout::contiguous(8, PAGE).unwrap());
        let beyond = PageSet::new(&here, layout, [8].into(), None, None);
        assert_eq!(code(beyond.map(|_| ())), Code::PageOutOfRange);
        let layout = Arc::new(Layout::contiguous(9, PAGE).unwrap());
        let beyond = PageSet::new(&here, layout, [0].into(), None, None);
        assert_eq!(code(beyond.map(|_| ())), Code::PageOutOfRange);
        let twice = reader.read(&pages(&here, &[4, 4]), grant.ticket(), None, TransferOptions::default());
        assert_eq!(code(twice.map(|_| ())), Code::DuplicatePage);
        let writable = owner.grant(&pages(&there, &[1, 3]), to_write()).unwrap();
        let both = pages(&here, &[0, 1]);
        let twice =
            reader.write(&both, writable.ticket(), Some([1, 1].into()), TransferOptions::default()).unwrap();
        assert_eq!(code(twice.wait(Some(PATIENCE))), Code::DuplicatePage);
        let twice = owner.grant(&pages(&there, &[1, 1]), to_write());
        assert_eq!(code(twice.map(|_| ())), Code::DuplicatePage);
    }
}

#[test]
fn a_mismatch_names_both_shapes() {
    for transport in BOTH {
        let (owner, reader) = (engine(transport), engine(transport));
        let (there, here) = (region(&owner, 8, 1), region(&reader, 8, 2));
        let grant = owner.grant(&pages(&there, &[1, 3, 5]), many()).unwrap();
        let error = read(&reader, &pages(&here, &[0, 1]), grant.ticket()).unwrap_err();
        assert_eq!(error.code, Code::ShapeMismatch);
        assert!(error.text.contains("2 pages") && error.text.contains("3 pages"), "{error}");
        let small = paged(&here, &[0, 1, 2], PAGE - 4096);
        let error = read(&reader, &small, grant.ticket()).unwrap_err();
        assert_eq!(error.code, Code::ShapeMismatch);
        assert!(error.text.contains("16384") && error.text.contains("12288"), "{error}");
    }
}

#[test]
fn ended_grants_say_how_they_ended() {
    for transport in BOTH {
        let (owner, reader) = (engine(transport), engine(transport));
        let (there, here) = (region(&owner, 2, 1), region(&reader, 2, 2));
        let brief = GrantOptions { expiry: Duration::from_millis(100), ..many() };
        let expired = owner.grant(&all(&there), brief).unwrap();
        assert_eq!(expired.wait(PATIENCE), Some(GrantState::Expired));
        assert_eq!(code(read(&reader, &all(&here), expired.ticket())), Code::GrantExpired);
        let consumed = owner.grant(&all(&there), GrantOptions::default()).unwrap();
        read(&reader, &all(&here), consumed.ticket()).unwrap();
        assert_eq!(consumed.wait(PATIENCE), Some(GrantState::Consumed));
        assert_eq!(code(read(&reader, &all(&here), consumed.ticket())), Code::GrantConsumed);
        let revoked = owner.grant(&all(&there), many()).unwrap();
        revoked.revoke(PATIENCE).unwrap();
        assert_eq!(revoked.state(), GrantState::Revoked);
        assert_eq!(code(read(&reader, &all(&here), revoked.ticket())), Code::GrantRevoked);
        let closed = owner.grant(&all(&there), many()).unwrap();
        there.close(PATIENCE).unwrap();
        assert_eq!(closed.wait(PATIENCE), Some(GrantState::Closed));
        assert_eq!(code(read(&reader, &all(&here), closed.ticket())), Code::RegionClosed);
        assert_eq!(code(owner.grant(&all_of_closed(&there), many()).map(|_| ())), Code::RegionClosed);
    }
}

fn all_of_closed(region: &kvik_engine::Region) -> PageSet {
    assert!(region.is_closed());
    pages(region, &[0])
}

#[test]
fn a_grant_that_ends_under_a_transfer_ends_it() {
    for transport in BOTH {
        for how in 0..3 {
            let amid = (0..20).any(|_| ends_under_a_transfer(transport, how));
            assert!(amid, "the transfer was through each time before its grant ended");
        }
    }
}

/// Ends a grant while it is read, by its expiry, by its owner or with its region. False when a fast machine was
/// through before.
fn ends_under_a_transfer(transport: Preference, how: usize) -> bool {
    let (owner, reader) = (engine(transport), engine(transport));
    let there = owner.allocate(192 << 20).unwrap();
    let here = reader.allocate(192 << 20).unwrap();
    blank(&there, 1);
    blank(&here, 2);
    let expiry = if how == 0 { Duration::from_millis(20) } else { Duration::from_secs(60) };
    let grant = owner.grant(&all(&there), GrantOptions { expiry, ..many() }).unwrap();
    let transfer = reader.read(&all(&here), grant.ticket(), None, TransferOptions::default()).unwrap();
    if how > 0 {
        wait_until("the first page", || byte(&here, 0) == 1 || transfer.is_done());
    }
    match how {
        0 => assert_eq!(grant.wait(PATIENCE), Some(GrantState::Expired)),
        1 => grant.revoke(PATIENCE).unwrap(),
        _ => there.close(PATIENCE).unwrap(),
    }
    let Err(error) = transfer.wait(Some(PATIENCE)) else { return false };
    let own = [Code::GrantExpired, Code::GrantRevoked, Code::RegionClosed][how];
    assert!([own, Code::StaleGeneration].contains(&error.code), "{error}");
    true
}

#[test]
fn a_region_with_a_transfer_in_flight_is_busy() {
    for transport in BOTH {
        let amid = (0..20).any(|_| is_busy_amid_a_transfer(transport));
        assert!(amid, "the transfer was through each time before it was cancelled");
    }
}

/// False when the transfer was through before.
fn is_busy_amid_a_transfer(transport: Preference) -> bool {
    let (owner, reader) = (engine(transport), engine(transport));
    let there = owner.allocate(192 << 20).unwrap();
    let here = reader.allocate(192 << 20).unwrap();
    let grant = owner.grant(&all(&there), many()).unwrap();
    let transfer = reader.read(&all(&here), grant.ticket(), None, TransferOptions::default()).unwrap();
    let closed = here.close(Duration::ZERO);
    if transfer.is_done() {
        return false;
    }
    assert_eq!(code(closed), Code::RegionBusy);
    assert!(!here.is_closed());
    transfer.cancel();
    let Err(error) = transfer.wait(Some(PATIENCE)) else { return false };
    assert_eq!(error.code, Code::Cancelled);
    let began = watch::start();
    here.close(PATIENCE).unwrap();
    here.close(PATIENCE).unwrap();
    assert!(began.elapsed() < Duration::from_secs(1));
    true
}

#[test]
fn two_readers_consume_what_is_for_two() {
    for transport in BOTH {
        let (owner, one, two) = (engine(transport), engine(transport), engine(transport));
        let (there, first, second) = (region(&owner, 4, 1), region(&one, 4, 2), region(&two, 4, 3));
        let options = GrantOptions { uses: Use::Once(2), ..GrantOptions::default() };
        let grant = owner.grant(&all(&there), options).unwrap();
        read(&one, &all(&first), grant.ticket()).unwrap();
        // The same reader again does not count twice.
        read(&one, &all(&first), grant.ticket()).unwrap();
        assert_eq!(grant.wait(Duration::from_millis(50)), None);
        read(&two, &all(&second), grant.ticket()).unwrap();
        assert_eq!(grant.wait(PATIENCE), Some(GrantState::Consumed));
        check(&there, &[0, 1, 2, 3], &second, &[0, 1, 2, 3]);
    }
}

#[test]
fn parts_that_are_not_the_last_do_not_confirm() {
    for transport in BOTH {
        let (owner, reader) = (engine(transport), engine(transport));
        let (there, here) = (region(&owner, 9, 1), region(&reader, 9, 2));
        let grant = owner.grant(&all(&there), GrantOptions::default()).unwrap();
        for part in 0..3u32 {
            let ids: Vec<u32> = (part * 3..part * 3 + 3).collect();
            let options = TransferOptions { confirm: Some(part == 2), ..TransferOptions::default() };
            let read = reader
                .read(&pages(&here, &ids), grant.ticket(), Some(ids.as_slice().into()), options)
                .unwrap();
            read.wait(Some(PATIENCE)).unwrap();
            if part < 2 {
                assert_eq!(grant.state(), GrantState::Live);
            }
        }
        assert_eq!(grant.wait(PATIENCE), Some(GrantState::Consumed));
        assert_eq!(bytes(&there), bytes(&here));
    }
}

#[test]
fn a_use_is_confirmed_and_extended_without_moving_anything() {
    let (owner, reader) = (engine(Preference::Auto), engine(Preference::Auto));
    let there = region(&owner, 2, 1);
    let grant = owner.grant(&all(&there), GrantOptions::default()).unwrap();
    let extended = reader.extend(grant.ticket(), Duration::from_secs(5), TransferOptions::default()).unwrap();
    assert_eq!(extended.wait(Some(PATIENCE)).unwrap().checks, ["grant"]);
    let released =
        reader.release(grant.ticket(), TransferOptions::default()).unwrap().wait(Some(PATIENCE)).unwrap();
    assert_eq!((released.bytes, &released.checks[..]), (0, &["grant"][..]));
    assert_eq!(grant.wait(PATIENCE), Some(GrantState::Consumed));
}

#[test]
fn a_region_that_its_grant_keeps_goes_with_the_grant() {
    for transport in BOTH {
        let (owner, reader) = (engine(transport), engine(transport));
        let here = region(&reader, 2, 2);
        let held = |regions: u32| owner.metrics().contains(&format!("\nkvik_regions {regions}\n"));
        for revoked in [false, true] {
            let there = region(&owner, 2, 1);
            let grant = owner.grant(&all(&there), GrantOptions::default()).unwrap();
            grant.keep_region();
            let ticket = grant.ticket().clone();
            drop(there);
            if revoked {
                assert!(held(1));
                grant.revoke(PATIENCE).unwrap();
                drop(grant);
            } else {
                drop(grant);
                read(&reader, &all(&here), &ticket).unwrap();
                check(&region(&owner, 2, 1), &[0, 1], &here, &[0, 1]);
            }
            wait_until("the region's end", || held(0));
        }
        // Without it a grant ends with the last of those who refer to its region.
        let lone = owner.grant(&all(&region(&owner, 2, 1)), many()).unwrap().ticket().clone();
        assert_eq!(code(read(&reader, &all(&here), &lone)), Code::RegionClosed);
        assert!(held(0));
    }
}

#[test]
fn an_id_that_a_live_grant_has_is_refused_and_the_grant_stays_as_it_was() {
    let (owner, reader) = (engine(Preference::Local), engine(Preference::Local));
    let (there, here) = (region(&owner, 2, 1), region(&reader, 2, 2));
    let first = owner.grant(&all(&there), many()).unwrap();
    let again = || GrantOptions { id: Some(first.id()), ..many() };
    let error = owner.grant(&all(&there), again()).map(|_| ()).unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(error.text.contains(&first.id().to_string()), "{error}");
    // Its slot is its own still, also for a grant that comes later.
    let other = owner.grant(&all(&there), many()).unwrap();
    read(&reader, &all(&here), first.ticket()).unwrap();
    check(&there, &[0, 1], &here, &[0, 1]);
    other.revoke(PATIENCE).unwrap();
    read(&reader, &all(&here), first.ticket()).unwrap();
    first.revoke(PATIENCE).unwrap();
    assert_eq!(first.wait(PATIENCE), Some(GrantState::Revoked));
    // One that is over is refused in the same words, and nothing is left of the attempt.
    assert_eq!(owner.grant(&all(&there), again()).map(|_| ()).unwrap_err().text, error.text);
    there.close(PATIENCE).unwrap();
}
