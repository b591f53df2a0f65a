//! Engines that were admitted, and call themselves by the id of another one.

use crate::certs::{Authority, Directory, engine};
use crate::common::*;
use kvik_core::{Code, EngineId, Error, Incarnation};
use kvik_engine::{Engine, Message, PeerState};
use kvik_host::event::{Interest, wait_ready};
use kvik_host::socket::{TcpConn, TcpListener, TcpOptions};
use kvik_host::{Io, identity};
use kvik_proto::{Facts, Frame, Greeting, Handshake, Identity, Local, Secret};
use kvik_transport::tcp::Stream;
use kvik_transport::tls::{Tls, TlsLink};
use std::time::{Duration, Instant};

/// Of the notifications of a test.
const TOPIC: u8 = 7;

/// Shakes hands with an engine as `identity`, under this certificate.
fn call_as(identity: Identity, directory: &Directory, to: &Engine) -> Result<Stream, Error> {
    let tls = Tls::load(&directory.files()).unwrap();
    let at = to.addresses()[0];
    let conn = TcpConn::connect_within(at, &TcpOptions::default(), PATIENCE).unwrap();
    let mut stream = Stream::tls(conn, TlsLink::client(&tls, at).unwrap());
    let until = Instant::now() + PATIENCE;
    let wait = |stream: &Stream| {
        assert!(Instant::now() < until, "no answer");
        wait_ready(stream, Interest::READ, Duration::from_millis(100)).unwrap();
    };
    while let Io::Blocked = stream.shake().unwrap() {
        wait(&stream);
    }
    let local = Local { identity, secret: Secret::new(None), facts: Facts::default() };
    let (mut shake, hello) = Handshake::open(local, identity::nonce().unwrap(), None);
    shake.bind(stream.binding().unwrap());
    stream.send(&hello).unwrap();
    let (mut input, mut bytes) = (Vec::new(), [0; 4096]);
    loop {
        match stream.recv(&mut bytes)? {
            Io::Done(len) => input.extend_from_slice(&bytes[..len]),
            Io::Blocked => wait(&stream),
            Io::Closed => panic!("it hung up without a word"),
        }
        let mut output = Vec::new();
        let greeting = shake.receive(&mut input, &mut output)?;
        stream.send(&output).unwrap();
        if let Some(Greeting::Control(_)) = greeting {
            return Ok(stream);
        }
    }
}

#[test]
fn nobody_takes_the_id_of_an_engine_that_is_connected_under_another_certificate() {
    let authority = Authority::new();
    let (own, strange) = (authority.admit(), authority.admit());
    let (owner, reader) = (engine(&authority.admit()), engine(&own));
    let (there, here) = (region(&owner, 4, 1), region(&reader, 4, 99));
    let grant = owner.grant(&all(&there), many()).unwrap();
    read(&reader, &all(&here), grant.ticket()).unwrap();
    let claims = Identity { engine: reader.id(), incarnation: reader.incarnation() };
    let anew = Identity { incarnation: Incarnation(claims.incarnation.0 ^ 1), ..claims };
    // This start of it or another one: it is refused by name, and the engine itself notices nothing.
    for identity in [claims, anew] {
        let error = call_as(identity, &strange, &owner).err().unwrap();
        assert_eq!(error.code, Code::TlsFailed, "{error}");
        assert!(error.text.contains("under another certificate"), "{error}");
    }
    let peers = owner.peers();
    assert!(peers.len() == 1 && peers[0].state == PeerState::Up, "{peers:?}");
    read(&reader, &all(&here), grant.ticket()).unwrap();
    // With the engine's own certificate it is the engine: it may have lost a session that still lives here.
    drop(call_as(claims, &own, &owner).unwrap());
    // An id is bound to no certificate for ever: certificates are renewed.
    reader.close(PATIENCE).unwrap();
    wait_until("the reader's end", || owner.peers().iter().all(|peer| peer.state == PeerState::Dead));
    drop(call_as(anew, &strange, &owner).unwrap());
}

/// Takes one connection, and greets whoever comes as `identity`, under this certificate. `more` goes with the last
/// word of the greeting, and nothing after it.
fn answer_as(identity: Identity, directory: &Directory, listener: &TcpListener, more: &[u8]) {
    let tls = Tls::load(&directory.files()).unwrap();
    let until = Instant::now() + PATIENCE;
    let (conn, from) = loop {
        wait_ready(listener, Interest::READ, Duration::from_millis(100)).unwrap();
        if let Some(accepted) = listener.accept().unwrap() {
            break accepted;
        }
        assert!(Instant::now() < until, "nobody comes");
    };
    let mut stream = Stream::tls(conn, TlsLink::server(&tls, from).unwrap());
    while let Io::Blocked = stream.shake().unwrap() {
        assert!(Instant::now() < until, "no handshake");
        wait_ready(&stream, Interest::READ, Duration::from_millis(100)).unwrap();
    }
    let local = Local { identity, secret: Secret::new(None), facts: Facts::default() };
    let mut shake = Handshake::listen(local, identity::nonce().unwrap());
    shake.bind(stream.binding().unwrap());
    let (mut input, mut bytes, mut greeted) = (Vec::new(), [0; 4096], false);
    // Until it hears what the other side makes of it.
    loop {
        match stream.recv(&mut bytes) {
            Ok(Io::Done(len)) => input.extend_from_slice(&bytes[..len]),
            Ok(Io::Blocked) => drop(wait_ready(&stream, Interest::READ, Duration::from_millis(100)).unwrap()),
            Ok(Io::Closed) | Err(_) => return,
        }
        if greeted {
            continue;
        }
        let mut output = Vec::new();
        match shake.receive(&mut input, &mut output) {
            Ok(greeting) => greeted = greeting.is_some(),
            Err(_) => return,
        }
        if greeted {
            output.extend_from_slice(more);
        }
        assert_eq!(stream.send(&output).unwrap(), Io::Done(output.len()));
    }
}

#[test]
fn who_is_met_does_not_pass_for_an_engine_that_is_connected_under_another_certificate() {
    let authority = Authority::new();
    let strange = authority.admit();
    let (server, client) = (engine(&authority.admit()), engine(&authority.admit()));
    assert_eq!(client.meet(server.addresses()[0], Some(PATIENCE)).unwrap().engine, server.id());
    let claims = Identity { engine: server.id(), incarnation: server.incarnation() };
    let anew = Identity { incarnation: Incarnation(claims.incarnation.0 ^ 1), ..claims };
    for identity in [claims, anew] {
        let any = "127.0.0.1:0".parse().unwrap();
        let listener = TcpListener::bind(any, 8, &TcpOptions::default()).unwrap();
        let at = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| answer_as(identity, &strange, &listener, &[]));
            let error = client.meet(at, Some(PATIENCE)).unwrap_err();
            assert_eq!(error.code, Code::TlsFailed, "{error}");
            assert!(error.text.contains("under another certificate"), "{error}");
        });
    }
    let peers = client.peers();
    assert!(peers.len() == 1 && peers[0].state == PeerState::Up, "{peers:?}");
}

#[test]
fn what_comes_with_the_end_of_the_handshake_is_read_at_once() {
    const NOTES: u64 = 8;
    let authority = Authority::new();
    let (strange, client) = (authority.admit(), engine(&authority.admit()));
    let inbox = client.inbox(TOPIC).unwrap();
    let mut frames = Vec::new();
    for number in 1..=NOTES {
        // Together more than is read at a time, and in one record.
        let payload = vec![number as u8; 1000].into();
        Frame::Notify { topic: TOPIC, number, payload }.encode(&mut frames);
    }
    let any = "127.0.0.1:0".parse().unwrap();
    let listener = TcpListener::bind(any, 8, &TcpOptions::default()).unwrap();
    let at = listener.local_addr().unwrap();
    let identity = Identity { engine: EngineId::random().unwrap(), incarnation: Incarnation(1) };
    std::thread::scope(|scope| {
        scope.spawn(|| answer_as(identity, &strange, &listener, &frames));
        client.meet(at, Some(PATIENCE)).unwrap();
        for number in 1..=NOTES {
            // What is not read before is not read at all: the peer says nothing more, and is lost for that.
            match inbox.next(PATIENCE).unwrap() {
                Some(Message::Notification(_, payload)) => assert_eq!(payload[0], number as u8),
                Some(Message::PeerLost(_, error)) => panic!("{number}: {error}"),
                None => panic!("{number}: nothing"),
            }
        }
        client.close(PATIENCE).unwrap();
    });
}
