//! Somebody on the wire: what a proxy between two engines sees, and what comes of what it does.

use crate::certs::{Authority, config};
use crate::common::*;
use kvik_core::{Code, Error, Ticket};
use kvik_engine::{Config, Engine, Region, Report, TransferOptions, Verify};
use kvik_host::Io;
use kvik_host::event::{Interest, wait_ready};
use kvik_host::socket::{TcpConn, TcpOptions};
use kvik_transport::tls::{Tls, TlsLink};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::spawn;
use std::time::{Duration, Instant};

const SECRET: &[u8] = b"a secret that must not be seen";
const PATTERN: &[u8] = b"pages of keys and values, in plain";

/// What is done to the bytes that one side sends on a connection, given how many came before them: the pieces in
/// which they go on, and whether more may follow.
type Meddle = dyn Fn(&mut [u8], usize) -> (Vec<usize>, bool) + Send + Sync;

/// All of it goes on.
fn whole(bytes: &mut [u8], _before: usize) -> (Vec<usize>, bool) {
    (vec![bytes.len()], true)
}

fn pass(mut from: TcpStream, mut to: TcpStream, meddle: Arc<Meddle>) {
    let (mut buffer, mut passed) = (vec![0; 16 << 10], 0);
    to.set_nodelay(true).unwrap();
    'over: while let Ok(len @ 1..) = from.read(&mut buffer) {
        let (pieces, goes_on) = meddle(&mut buffer[..len], passed);
        passed += len;
        let mut left = &buffer[..len];
        for piece in pieces {
            let (piece, rest) = left.split_at(piece);
            if to.write_all(piece).is_err() {
                break 'over;
            }
            left = rest;
        }
        if !goes_on {
            break;
        }
    }
    for end in [from, to] {
        // The other direction of the connection may have ended it already.
        let _ = end.shutdown(Shutdown::Both);
    }
}

/// Passes five connections on: the control connection as it is, four channels through `meddle`.
fn proxy(
    to: SocketAddr,
    meddle: impl Fn(&mut [u8], usize) -> (Vec<usize>, bool) + Send + Sync + 'static,
    all: bool,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (meddle, nothing): (Arc<Meddle>, Arc<Meddle>) = (Arc::new(meddle), Arc::new(whole));
    spawn(move || {
        for number in 0..5 {
            let Ok((near, _)) = listener.accept() else { return };
            let Ok(far) = TcpStream::connect(to) else { return };
            let (near_too, far_too) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            let of = |chosen: bool| if chosen { meddle.clone() } else { nothing.clone() };
            let (up, down) = (of(all), of(all || number > 0));
            spawn(move || pass(near, far, up));
            spawn(move || pass(far_too, near_too, down));
        }
    });
    address
}

fn start(directory: Option<&crate::certs::Directory>) -> Engine {
    let secret = Some(SECRET.to_vec());
    let plain = Config { transport: kvik_engine::Preference::Tcp, ..Config::default() };
    Engine::start(Config { secret, ..directory.map_or(plain, config) }).unwrap()
}

fn written(engine: &Engine) -> Region {
    let region = region(engine, 64, 1);
    let pattern: Vec<u8> = PATTERN.iter().copied().cycle().take(region.bytes() as usize).collect();
    region.write_at(0, &pattern).unwrap();
    region
}

/// A read through the proxy, and whether it brought what it should.
fn through(
    secure: bool,
    deadline: Duration,
    all_of_it: bool,
    meddle: impl Fn(&mut [u8], usize) -> (Vec<usize>, bool) + Send + Sync + 'static,
) -> (Result<Report, Error>, bool) {
    let authority = Authority::new();
    let directory = secure.then(|| authority.admit());
    let (owner, reader) = (start(directory.as_ref()), start(directory.as_ref()));
    let (there, here) = (written(&owner), region(&reader, 64, 99));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let at = proxy(owner.addresses()[0], meddle, all_of_it);
    let ticket = Ticket { addresses: vec![at], ..grant.ticket().clone() };
    // No checksums of kvik's: what is found here, TLS finds.
    let options = TransferOptions { verify: Some(Verify::Off), ..within(deadline) };
    let result = read_with(&reader, &all(&here), &ticket, options);
    (result, bytes(&there) == bytes(&here))
}

fn holds(seen: &[u8], what: &[u8]) -> bool {
    seen.windows(what.len()).any(|window| window == what)
}

#[test]
fn nothing_can_be_read_on_the_wire() {
    for secure in [false, true] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let recorder = seen.clone();
        let (result, equal) = through(secure, PATIENCE, true, move |bytes, before| {
            recorder.lock().unwrap().extend_from_slice(bytes);
            whole(bytes, before)
        });
        result.unwrap();
        let seen = seen.lock().unwrap();
        assert!(equal && seen.len() as u64 > 64 * PAGE);
        assert!(!holds(&seen, SECRET));
        // Without TLS the same proxy reads every page, and sees that it is kvik.
        assert_eq!((holds(&seen, PATTERN), holds(&seen, b"kvik")), (!secure, !secure));
    }
}

#[test]
fn a_bit_that_flips_ends_the_channel_and_no_wrong_byte_is_used() {
    let mut random = Random::new();
    // In the payload, and anywhere from the first byte of the handshake on.
    let places: Vec<usize> =
        (0..10).map(|_| random.below(100_000) as usize).chain([0, 5, 200, 50_000]).collect();
    for at in places {
        let (result, equal) = through(true, Duration::from_secs(4), false, move |bytes, before| {
            if let Some(byte) = at.checked_sub(before).and_then(|at| bytes.get_mut(at)) {
                *byte ^= 1;
            }
            whole(bytes, before)
        });
        match result {
            Err(error) => {
                // A record whose length is damaged can wait for bytes that never come, until the heartbeats miss it.
                let known = [Code::TlsFailed, Code::PeerLost, Code::DeadlineExceeded];
                assert!(known.contains(&error.code), "at {at}: {error:?}");
            }
            // The channel ended before it carried that byte, or the transfer went on over the others.
            Ok(_) => assert!(equal, "at {at}: wrong bytes were called right"),
        }
    }
}

#[test]
fn records_split_anywhere_are_one_stream_and_a_cut_in_the_middle_is_a_loss() {
    let random = Mutex::new(Random::new());
    let (result, equal) = through(true, PATIENCE, true, move |bytes, _| {
        let (mut random, mut left, mut pieces) = (random.lock().unwrap(), bytes.len(), Vec::new());
        // The handshake byte by byte, later ones in pieces that no record's end falls on.
        while left > 0 {
            let most = if bytes.len() < 4096 { 1 } else { 2000 };
            pieces.push(left.min(1 + random.below(most) as usize));
            left -= pieces[pieces.len() - 1];
        }
        (pieces, true)
    });
    result.unwrap();
    assert!(equal);
    for at in [3_usize, 700, 60_000] {
        let (result, _) = through(true, PATIENCE, false, move |bytes, before| {
            (vec![bytes.len().min(at.saturating_sub(before))], before + bytes.len() < at)
        });
        assert_eq!(result.unwrap_err().code, Code::PeerLost, "cut after {at} bytes");
    }
}

/// Ends both TLS connections itself, and passes on in plain what comes on either.
fn splice(tls: &Tls, near: TcpConn, far: TcpConn, seen: &AtomicUsize) {
    let at = near.local_addr().unwrap();
    let mut ends = [(TlsLink::server(tls, at).unwrap(), near), (TlsLink::client(tls, at).unwrap(), far)];
    ends[1].0.flush(&ends[1].1).unwrap();
    let (until, mut buffer) = (Instant::now() + PATIENCE, vec![0; 64 << 10]);
    while Instant::now() < until {
        for (from, to) in [(0, 1), (1, 0)] {
            let (link, conn) = &mut ends[from];
            wait_ready(&*conn, Interest::READ, Duration::from_millis(5)).unwrap();
            let mut left = match link.recv(conn, &mut buffer) {
                Ok(Io::Done(len)) => &buffer[..len],
                Ok(Io::Blocked) => continue,
                Ok(Io::Closed) | Err(_) => return,
            };
            seen.fetch_add(left.len(), Ordering::Relaxed);
            let (link, conn) = &mut ends[to];
            while !left.is_empty() {
                match link.send(conn, left) {
                    Ok(Io::Done(sent)) => left = &left[sent..],
                    Ok(_) => std::thread::yield_now(),
                    Err(_) => return,
                }
            }
        }
    }
}

#[test]
fn a_stolen_certificate_without_the_secret_gets_nobody_between_two_engines() {
    let authority = Authority::new();
    let (owner, reader) = (start(Some(&authority.admit())), start(Some(&authority.admit())));
    let stolen = Tls::load(&authority.admit().files()).unwrap();
    let (there, here) = (written(&owner), region(&reader, 64, 99));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let options = TcpOptions::default();
    let listener = kvik_host::socket::TcpListener::bind("127.0.0.1:0".parse().unwrap(), 4, &options).unwrap();
    let (at, to) = (listener.local_addr().unwrap(), owner.addresses()[0]);
    let seen = Arc::new(AtomicUsize::new(0));
    let heard = seen.clone();
    let between = spawn(move || {
        wait_ready(&listener, Interest::READ, PATIENCE).unwrap();
        let (near, _) = listener.accept().unwrap().unwrap();
        splice(&stolen, near, TcpConn::connect_within(to, &options, PATIENCE).unwrap(), &heard);
    });
    let ticket = Ticket { addresses: vec![at], ..grant.ticket().clone() };
    let error = read(&reader, &all(&here), &ticket).unwrap_err();
    assert_eq!(error.code, Code::SecretMismatch, "{error}");
    assert!(error.text.contains("between"), "{error}");
    between.join().unwrap();
    assert!(seen.load(Ordering::Relaxed) > 100, "nothing went through it, so it shows nothing");
    // The same two engines, with nobody between them.
    read(&reader, &all(&here), grant.ticket()).unwrap();
}
