//! Crowds of strangers that begin TLS: who is there already notices nothing, and who is honest still gets in.

use crate::certs::{Authority, engine};
use crate::common::*;
use kvik_core::Code;
use kvik_engine::Engine;
use kvik_host::Io;
use kvik_host::event::{Interest, wait_ready};
use kvik_host::socket::{TcpConn, TcpOptions};
use kvik_transport::tcp::Stream;
use kvik_transport::tls::{Tls, TlsLink};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{scope, spawn};
use std::time::{Duration, Instant};

/// CPU seconds of one of an engine's threads.
fn cpu(engine: &Engine, thread: &str) -> f64 {
    let wanted = format!("kvik_thread_cpu_seconds_total{{thread=\"{thread}\"}} ");
    let text = engine.metrics();
    let line = text.lines().find_map(|line| line.strip_prefix(&*wanted));
    line.map_or(0.0, |figure| figure.trim().parse().unwrap())
}

/// One whole handshake with a certificate of another authority, up to the refusal.
fn strange_handshake(tls: &Tls, to: SocketAddr) {
    let conn = TcpConn::connect_within(to, &TcpOptions::default(), PATIENCE).unwrap();
    let mut stream = Stream::tls(conn, TlsLink::client(tls, to).unwrap());
    let until = Instant::now() + PATIENCE;
    while let Ok(Io::Blocked) = stream.shake() {
        assert!(Instant::now() < until, "the handshake did not end");
        wait_ready(&stream, Interest::READ, Duration::from_millis(100)).unwrap();
    }
    // What the other side says of the certificate: nothing is left unread, and the connection ends in order.
    let mut buffer = [0; 4096];
    while let Ok(Io::Blocked | Io::Done(1..)) = stream.recv(&mut buffer) {
        assert!(Instant::now() < until, "it was not refused");
        wait_ready(&stream, Interest::READ, Duration::from_millis(100)).unwrap();
    }
}

#[test]
fn handshakes_of_strangers_are_no_work_of_the_thread_that_sends_heartbeats() {
    let authority = Authority::new();
    let (owner, reader) = (engine(&authority.admit()), engine(&authority.admit()));
    let (there, here) = (region(&owner, 4, 1), region(&reader, 4, 99));
    let grant = owner.grant(&all(&there), many()).unwrap();
    read(&reader, &all(&here), grant.ticket()).unwrap();
    let events = reader.events().unwrap();
    let before = (cpu(&owner, "kvik-ctl"), cpu(&owner, "kvik-tls"));
    let (over, made) = (AtomicBool::new(false), AtomicUsize::new(0));
    let strange = Tls::load(&Authority::new().admit().files()).unwrap();
    scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    strange_handshake(&strange, owner.addresses()[0]);
                    made.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Nothing moves meanwhile: what the control thread does is for the strangers.
        wait_until("the strangers", || made.load(Ordering::Relaxed) >= 400);
        over.store(true, Ordering::Relaxed);
    });
    let (control, tls) = (cpu(&owner, "kvik-ctl") - before.0, cpu(&owner, "kvik-tls") - before.1);
    let made = made.load(Ordering::Relaxed);
    println!("{made} handshakes: {control:.3} s of kvik-ctl, {tls:.3} s of kvik-tls");
    assert!(made >= 100, "{made}");
    assert!(
        tls > 2.0 * control,
        "{control} s of the control thread for {made} handshakes, {tls} s of kvik-tls"
    );
    assert!(events.next(Duration::ZERO).unwrap().is_none(), "the session did not outlive it");
    read(&reader, &all(&here), grant.ticket()).unwrap();
}

#[test]
fn a_crowd_that_begins_tls_and_says_no_more_keeps_nobody_out() {
    let authority = Authority::new();
    let owner = engine(&authority.admit());
    let grant = owner.grant(&all(&region(&owner, 4, 1)), many()).unwrap();
    let (at, over) = (owner.addresses()[0], Arc::new(AtomicBool::new(false)));
    let (came, goes_on) = (Arc::new(AtomicUsize::new(0)), over.clone());
    let counted = came.clone();
    let crowd = spawn(move || {
        let mut silent = std::collections::VecDeque::new();
        while !goes_on.load(Ordering::Relaxed) {
            let mut one = TcpStream::connect(at).unwrap();
            // The first bytes of a handshake whose rest never comes.
            one.write_all(&[0x16, 3, 1, 2, 0]).unwrap();
            silent.push_back(one);
            counted.fetch_add(1, Ordering::Relaxed);
            if silent.len() > 600 {
                silent.pop_front();
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    });
    wait_until("the crowd", || came.load(Ordering::Relaxed) > 600);
    for _ in 0..3 {
        let reader = engine(&authority.admit());
        let here = region(&reader, 4, 99);
        read(&reader, &all(&here), grant.ticket()).unwrap();
    }
    over.store(true, Ordering::Relaxed);
    crowd.join().unwrap();
    // It has not taken more than it may: those that were too many were counted as refused.
    let text = owner.metrics();
    let refused = |line: &&str| {
        line.starts_with("kvik_handshakes_refused_total") && line.contains(Code::MemoryCapReached.name())
    };
    assert!(text.lines().find(refused).is_some_and(|line| !line.ends_with(" 0")), "{text}");
}
