//! Networks between two engines: one that damages data (it flips one bit of what the owner sends on a channel), one on
//! which a connection is slower than the others, and one that holds a connection up, and breaks it.

use crate::common::*;
use crate::events::expect;
use kvik_core::{Code, Ticket};
use kvik_engine::{Engine, Event, PeerState, Preference, TransferOptions, Verify};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread::{sleep, spawn};
use std::time::Duration;

/// Where in the owner's bytes on each channel a bit is flipped: inside the payload of the first chunk.
const FLIPPED: usize = 50_000;

fn pass(mut from: TcpStream, mut to: TcpStream, flip: Option<usize>) {
    let (mut buffer, mut passed) = ([0; 16 << 10], 0);
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        if let Some(at) = flip.filter(|at| (passed..passed + len).contains(at)) {
            buffer[at - passed] ^= 1;
        }
        passed += len;
        if to.write_all(&buffer[..len]).is_err() {
            break;
        }
    }
    for end in [from, to] {
        // The other direction of the connection may have ended it already.
        let _ = end.shutdown(Shutdown::Both);
    }
}

/// Passes `connections` connections on to `to`; the first is the control connection, and is left as it is.
fn damaging_proxy(to: SocketAddr, connections: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    spawn(move || {
        for number in 0..connections {
            let Ok((near, _)) = listener.accept() else { return };
            let far = TcpStream::connect(to).unwrap();
            let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            spawn(move || pass(near, far, None));
            spawn(move || pass(far_too, near_too, (number > 0).then_some(FLIPPED)));
        }
    });
    address
}

fn read_through_damage(verify: Verify) -> (Result<kvik_engine::Report, kvik_core::Error>, bool) {
    let (owner, reader) = (engine(Preference::Tcp), engine(Preference::Tcp));
    let (there, here) = (region(&owner, 64, 1), region(&reader, 64, 99));
    let grant = owner.grant(&all(&there), many()).unwrap();
    // The control connection and the four channels that a reader opens by default.
    let proxy = damaging_proxy(owner.addresses()[0], 5);
    let ticket = Ticket { addresses: vec![proxy], ..grant.ticket().clone() };
    let options = TransferOptions { verify: Some(verify), ..within(PATIENCE) };
    let result = read_with(&reader, &all(&here), &ticket, options);
    (result, bytes(&there) == bytes(&here))
}

#[test]
fn a_bit_that_flips_on_the_way_fails_the_transfer_and_names_the_page() {
    let (result, _) = read_through_damage(Verify::Auto);
    let error = result.unwrap_err();
    assert_eq!(error.code, Code::ChecksumMismatch, "{error}");
    assert!(error.text.contains("page "), "{error}");
}

#[test]
fn without_checksums_the_same_bit_goes_unseen() {
    let (result, equal) = read_through_damage(Verify::Off);
    assert!(!result.unwrap().checks.contains(&"page_checksum"));
    assert!(!equal, "nothing was damaged, so the other test shows nothing");
}

/// Longer than the ends of connections take to be seen.
const BEHIND: Duration = Duration::from_millis(100);

/// Passes connections on to `to`; what comes from there on the first one, the control connection, comes later.
fn lagging_proxy(to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    spawn(move || {
        for number in 0.. {
            let (Ok((near, _)), Ok(far)) = (listener.accept(), TcpStream::connect(to)) else { return };
            let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            if number > 0 {
                spawn(move || pass(near, far, None));
                spawn(move || pass(far_too, near_too, None));
                continue;
            }
            // That the owner hears nothing any more cuts nothing that it has said before.
            spawn(move || std::io::copy(&mut { near }, &mut { far }));
            spawn(move || {
                let (mut from, mut to, mut buffer) = (far_too, near_too, [0; 16 << 10]);
                while let Ok(len @ 1..) = from.read(&mut buffer) {
                    sleep(BEHIND);
                    if to.write_all(&buffer[..len]).is_err() {
                        break;
                    }
                }
                sleep(BEHIND);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    });
    address
}

#[test]
fn a_goodbye_that_the_ends_of_data_channels_overtake_is_still_one() {
    let (owner, reader) = (engine(Preference::Tcp), engine(Preference::Tcp));
    let (there, here) = (region(&owner, 4, 1), region(&reader, 4, 99));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let proxy = lagging_proxy(owner.addresses()[0]);
    let ticket = Ticket { addresses: vec![proxy], ..grant.ticket().clone() };
    read_with(&reader, &all(&here), &ticket, within(PATIENCE)).unwrap();
    let events = reader.events().unwrap();
    owner.close(PATIENCE).unwrap();
    let lost = events.next(PATIENCE).unwrap().expect("an event");
    let Event::PeerLost(_, error) = lost else { panic!("{lost:?}") };
    assert!(error.text.contains("in order"), "{error}");
    let peer = &reader.peers()[0];
    assert!(peer.state == PeerState::Dead && !peer.reconnecting, "{peer:?}");
}

/// Passes so many connections on to `to`, and gives them; the first one waits for a word.
fn gated_proxy(to: SocketAddr, most: usize) -> (SocketAddr, mpsc::Sender<()>, mpsc::Receiver<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let ((open, opened), (tell, came)) = (mpsc::channel(), mpsc::channel());
    spawn(move || {
        for number in 0..most {
            let Ok((near, _)) = listener.accept() else { return };
            // Nobody may ask for the later ones.
            let _ = tell.send(near.try_clone().unwrap());
            if number == 0 && opened.recv().is_err() {
                return;
            }
            let Ok(far) = TcpStream::connect(to) else { return };
            let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            spawn(move || pass(near, far, None));
            spawn(move || pass(far_too, near_too, None));
        }
    });
    (address, open, came)
}

/// Two engines with two connections, which were made at once.
struct Two {
    low: Engine,
    high: Engine,
    /// The connection that the one of the lower id has dialled, which stays.
    of_low: TcpStream,
    /// The other one.
    of_high: TcpStream,
}

impl Two {
    fn new() -> Two {
        let mut both = [engine(Preference::Tcp), engine(Preference::Tcp)];
        both.sort_by_key(Engine::id);
        let [low, high] = both;
        let pages = || [&low, &high].map(|engine| region(engine, 1, 1));
        let (there, here) = (pages(), pages());
        let (to_high, open, of_low) = gated_proxy(high.addresses()[0], usize::MAX);
        // The control connection and the four channels that a reader opens by default: once.
        let (to_low, pass_on, of_high) = gated_proxy(low.addresses()[0], 5);
        let [low_s, high_s] = [(&low, to_low, 0), (&high, to_high, 1)].map(|(owner, proxy, at)| {
            let grant = owner.grant(&all(&there[at]), many()).unwrap();
            (Ticket { addresses: vec![proxy], ..grant.ticket().clone() }, grant)
        });
        let first = low.read(&all(&here[0]), &high_s.0, None, within(PATIENCE)).unwrap();
        let of_low = of_low.recv_timeout(PATIENCE).unwrap();
        pass_on.send(()).unwrap();
        read(&high, &all(&here[1]), &low_s.0).unwrap();
        let of_high = of_high.recv_timeout(PATIENCE).unwrap();
        assert_eq!(count(&low, "sessions_opened"), 1);
        open.send(()).unwrap();
        wait_until("the second connection", || count(&low, "sessions_opened") == 2);
        first.wait(Some(PATIENCE)).unwrap();
        Two { low, high, of_low, of_high }
    }
}

fn count(engine: &Engine, of: &str) -> u64 {
    engine.stats().iter().find(|(name, _)| *name == of).unwrap().1
}

#[test]
fn the_connection_that_is_left_of_two_heals_by_itself() {
    let Two { low, high, of_low, .. } = Two::new();
    wait_until("the end of the other one", || count(&low, "sessions_lost") == 1);
    let [events, theirs] = [&low, &high].map(|engine| engine.events().unwrap());
    of_low.shutdown(Shutdown::Both).unwrap();
    expect(&theirs, "peer_lost", 3.0);
    assert!(!high.peers()[0].reconnecting, "it had closed the one that it had dialled");
    expect(&events, "peer_lost", 3.0);
    expect(&events, "peer_up", 6.0);
    assert_eq!(low.peers()[0].state, PeerState::Up);
}

#[test]
fn two_connections_that_are_lost_heal_by_themselves_whichever_ends_last() {
    let Two { low, of_low, of_high, high: _there } = Two::new();
    let events = low.events().unwrap();
    of_low.shutdown(Shutdown::Both).unwrap();
    wait_until("the end of the one that was dialled here", || count(&low, "sessions_lost") > 0);
    of_high.shutdown(Shutdown::Both).unwrap();
    expect(&events, "peer_lost", 3.0);
    // Where the other one had found this engine, nobody listens any more.
    expect(&events, "peer_up", 6.0);
    assert_eq!(low.peers()[0].state, PeerState::Up);
}
