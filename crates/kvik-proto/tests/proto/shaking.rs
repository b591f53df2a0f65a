//! The handshake: who is let in, who is not, and what they are told.

use crate::world::{identity, local, shake};
use kvik_core::{Code, EngineId, Incarnation};
use kvik_proto::{Greeting, Handshake, Identity, Join, JoinKind, joined, read_joined, refusal};
use proptest::prelude::*;

#[test]
fn secrets_are_compared_without_being_told() {
    type Shared = Option<&'static [u8]>;
    let cases: [(Shared, Shared, Option<Code>); 5] = [
        (None, None, None),
        (Some(b"s"), Some(b"s"), None),
        (Some(b"s"), Some(b"t"), Some(Code::SecretMismatch)),
        (Some(b"s"), None, Some(Code::SecretRequired)),
        (None, Some(b"s"), Some(Code::SecretRequired)),
    ];
    for (left, right, code) in cases {
        let (opener, listener) = shake(local(1, left), local(2, right), None, 3);
        match code {
            None => {
                let (opener, listener) = (opener.unwrap(), listener.unwrap());
                assert_eq!(opener.session, listener.session);
                assert_eq!((opener.peer, listener.peer), (identity(2), identity(1)));
                assert!(opener.opener && !listener.opener);
                let join = Join::new(opener.session, 0, JoinKind::Data, &opener.key, [1; 32]);
                assert!(join.is_signed_with(&listener.key));
            }
            Some(code) => {
                assert_eq!(opener.unwrap_err().code, code, "{left:?} {right:?}");
                assert_eq!(listener.unwrap_err().code, code, "{left:?} {right:?}");
            }
        }
    }
}

/// Somebody with a certificate that both sides admit passes greetings from one TLS connection to another. Whose
/// bindings differ has no session, and a join is worth nothing on another connection.
#[test]
fn greetings_passed_on_between_two_tls_connections_prove_nothing() {
    let greet = |bindings: [Option<[u8; 32]>; 2]| {
        let (mut opener, mut hello) = Handshake::open(local(1, Some(b"s")), [1; 32], None);
        let mut listener = Handshake::listen(local(2, Some(b"s")), [2; 32]);
        for (side, binding) in [&mut opener, &mut listener].into_iter().zip(bindings) {
            binding.into_iter().for_each(|binding| side.bind(binding));
        }
        let mut welcome = Vec::new();
        listener.receive(&mut hello, &mut welcome).unwrap();
        opener.receive(&mut welcome, &mut Vec::new()).map(drop)
    };
    assert_eq!(greet([Some([7; 32]), Some([7; 32])]), Ok(()));
    assert_eq!(greet([None, None]), Ok(()));
    for bindings in [[Some([7; 32]), Some([8; 32])], [Some([7; 32]), None], [None, Some([7; 32])]] {
        assert_eq!(greet(bindings).unwrap_err().code, Code::SecretMismatch);
    }

    let (opener, _) = shake(local(1, None), local(2, None), None, 3);
    let key = opener.unwrap().key;
    let came_on = |join: &Join, binding: Option<[u8; 32]>| {
        let mut listener = Handshake::listen(local(2, None), [2; 32]);
        binding.into_iter().for_each(|binding| listener.bind(binding));
        match listener.receive(&mut join.encode(), &mut Vec::new()) {
            Ok(Some(Greeting::Join(join))) => join.is_signed_with(&key),
            _ => panic!("no join"),
        }
    };
    let plain = Join::new(5, 1, JoinKind::Data, &key, [4; 32]);
    let bound = plain.clone().bound(&key, [7; 32]);
    assert!(came_on(&plain, None) && came_on(&bound, Some([7; 32])));
    for (join, binding) in [(&plain, Some([7; 32])), (&bound, Some([8; 32])), (&bound, None)] {
        assert!(!came_on(join, binding));
    }
}

#[test]
fn another_engine_or_start_than_wanted_is_named_on_both_sides() {
    let other = Identity { engine: EngineId([9; 16]), ..identity(2) };
    // Incarnations are random: an earlier start may have the larger number or the smaller.
    let [larger, smaller] = [77, 1].map(|start| Identity { incarnation: Incarnation(start), ..identity(2) });
    let restarted = Code::PeerRestarted;
    for (want, code) in [(other, Code::TicketForeign), (larger, restarted), (smaller, restarted)] {
        let (opener, listener) = shake(local(1, None), local(2, None), Some(want), 3);
        assert_eq!(opener.unwrap_err().code, code);
        assert_eq!(listener.unwrap_err().code, code);
    }
    let (opener, listener) = shake(local(1, None), local(1, None), None, 3);
    assert_eq!(opener.unwrap_err().code, Code::InvalidArgument);
    assert_eq!(listener.unwrap_err().code, Code::InvalidArgument);
}

/// What was proven in one handshake proves nothing in the next: the listener's nonce is another.
#[test]
fn a_recorded_handshake_cannot_be_played_again() {
    let (mut opener, hello) = Handshake::open(local(1, Some(b"s")), [1; 32], None);
    let mut listener = Handshake::listen(local(2, Some(b"s")), [2; 32]);
    let (mut welcome, mut prove) = (Vec::new(), Vec::new());
    assert!(listener.receive(&mut hello.clone(), &mut welcome).unwrap().is_none());
    assert!(opener.receive(&mut welcome, &mut prove).unwrap().is_none());
    assert!(listener.receive(&mut prove.clone(), &mut Vec::new()).unwrap().is_some());
    let mut again = Handshake::listen(local(2, Some(b"s")), [3; 32]);
    assert!(again.receive(&mut hello.clone(), &mut Vec::new()).unwrap().is_none());
    let error = again.receive(&mut prove, &mut Vec::new()).err().unwrap();
    assert_eq!(error.code, Code::SecretMismatch);
}

/// An opener that named nobody learns who listens before it has proven itself, and only from who has the secret.
#[test]
fn an_opener_learns_who_has_answered_from_whoever_has_the_secret() {
    for (theirs, answered) in [(&b"s"[..], Some(identity(2))), (b"t", None)] {
        let (mut opener, mut hello) = Handshake::open(local(1, Some(b"s")), [1; 32], None);
        let mut listener = Handshake::listen(local(2, Some(theirs)), [2; 32]);
        let (mut welcome, mut prove) = (Vec::new(), Vec::new());
        assert!(listener.receive(&mut hello, &mut welcome).unwrap().is_none());
        assert_eq!((opener.answered(), listener.answered()), (None, None));
        let heard = opener.receive(&mut welcome, &mut prove).map(|greeting| greeting.is_none());
        assert_eq!(heard.map_err(|error| error.code), answered.map(|_| true).ok_or(Code::SecretMismatch));
        assert_eq!((opener.answered(), listener.answered()), (answered, None));
    }
}

/// The versions stand first in the greeting, so that all else may change behind them.
#[test]
fn no_common_version_is_refused_with_both_ranges() {
    for (oldest, newest) in [(6u16, 7u16), (0, 0), (2, 2)] {
        let (mut opener, mut hello) = Handshake::open(local(1, None), [1; 32], None);
        hello[8..10].copy_from_slice(&oldest.to_le_bytes());
        hello[10..12].copy_from_slice(&newest.to_le_bytes());
        let (mut listener, mut answer) = (Handshake::listen(local(2, None), [2; 32]), Vec::new());
        let error = listener.receive(&mut hello, &mut answer).err().unwrap();
        let told = opener.receive(&mut answer, &mut Vec::new()).err().unwrap();
        assert_eq!(error, told);
        assert_eq!(told.code, Code::VersionMismatch);
        assert!(
            told.text.contains(&format!("{oldest} to {newest}")) && told.text.contains("3 to 5"),
            "{told}"
        );
    }
    // The version before is spoken with who knows no other.
    let (_, mut hello) = Handshake::open(local(1, None), [1; 32], None);
    hello[10..12].copy_from_slice(&3u16.to_le_bytes());
    let (mut listener, mut answer) = (Handshake::listen(local(2, None), [2; 32]), Vec::new());
    assert!(listener.receive(&mut hello, &mut answer).unwrap().is_none());
    assert_eq!(answer[8..10], 3u16.to_le_bytes());
    // A later engine that also speaks this version is welcome; an answer that was not offered is not.
    let (mut opener, mut hello) = Handshake::open(local(1, None), [1; 32], None);
    hello[10..12].copy_from_slice(&9u16.to_le_bytes());
    let (mut listener, mut answer) = (Handshake::listen(local(2, None), [2; 32]), Vec::new());
    assert!(listener.receive(&mut hello, &mut answer).unwrap().is_none());
    assert_eq!(answer[8..10], 5u16.to_le_bytes());
    answer[8] = 6;
    assert_eq!(opener.receive(&mut answer, &mut Vec::new()).err().unwrap().code, Code::ProtocolError);
}

#[test]
fn who_does_not_speak_kvik_is_told_apart() {
    for text in ["GET / HTTP/1.1\r\n", "HTTP/1.1 400 Bad Request\r\n", "\0", "kvi\0"] {
        let (mut opener, _) = Handshake::open(local(1, None), [1; 32], None);
        let mut listener = Handshake::listen(local(2, None), [2; 32]);
        for side in [&mut opener, &mut listener] {
            let mut out = Vec::new();
            let error = side.receive(&mut text.as_bytes().to_vec(), &mut out).err().unwrap();
            assert_eq!(error.code, Code::PeerNotKvik, "{text:?}");
            assert!(out.is_empty(), "nothing is said to a stranger");
        }
        assert_eq!(read_joined(&mut text.as_bytes().to_vec()).unwrap_err().code, Code::PeerNotKvik);
    }
    let mut long = b"kvik\x01\0\xff\xff".to_vec();
    let mut listener = Handshake::listen(local(2, None), [2; 32]);
    assert_eq!(listener.receive(&mut long, &mut Vec::new()).err().unwrap().code, Code::ProtocolError);
}

#[test]
fn a_greeting_may_come_byte_by_byte_and_leaves_what_follows() {
    let (mut opener, hello) = Handshake::open(local(1, Some(b"x")), [1; 32], Some(identity(2)));
    let mut listener = Handshake::listen(local(2, Some(b"x")), [2; 32]);
    let mut wires = [hello, Vec::new()];
    let mut inputs = [Vec::new(), Vec::new()];
    let mut done = [false; 2];
    while wires.iter().any(|wire| !wire.is_empty()) {
        for side in [0, 1] {
            if wires[side].is_empty() {
                continue;
            }
            inputs[side].push(wires[side].remove(0));
            let mut out = Vec::new();
            let node = if side == 0 { &mut listener } else { &mut opener };
            if let Some(Greeting::Control(_)) = node.receive(&mut inputs[side], &mut out).unwrap() {
                done[side] = true;
                assert!(inputs[side].is_empty());
            }
            wires[1 - side].extend(out);
        }
    }
    assert_eq!(done, [true, true]);
}

#[test]
fn a_join_and_its_answers_come_back() {
    let (opener, _) = shake(local(1, None), local(2, None), None, 3);
    let opener = opener.unwrap();
    let join = Join::new(opener.session, 7, JoinKind::Local, &opener.key, [4; 32]);
    let mut message = join.encode();
    message.extend(b"rest");
    let mut listener = Handshake::listen(local(2, None), [2; 32]);
    let Some(Greeting::Join(back)) = listener.receive(&mut message, &mut Vec::new()).unwrap() else {
        panic!("no join")
    };
    assert_eq!((back.session, back.index, back.kind), (join.session, 7, JoinKind::Local));
    assert!(back.is_signed_with(&opener.key));
    assert_eq!(message, b"rest");
    let mut answer = joined();
    answer.extend(b"rest");
    assert_eq!(read_joined(&mut answer).unwrap(), Some(()));
    assert_eq!(answer, b"rest");
    let why = kvik_core::Error::new(Code::EngineClosed, "closed");
    assert_eq!(read_joined(&mut refusal(&why)).unwrap_err(), why);
    assert_eq!(read_joined(&mut Vec::new()).unwrap(), None);
}

proptest! {
    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400), kind in 0u8..8, magic: bool) {
        let mut input = match magic {
            true => [b"kvik", &[kind, 0][..], &(bytes.len() as u16).to_le_bytes(), &bytes].concat(),
            false => bytes,
        };
        let (mut opener, _) = Handshake::open(local(1, None), [1; 32], None);
        let mut listener = Handshake::listen(local(2, None), [2; 32]);
        let _ = opener.receive(&mut input.clone(), &mut Vec::new());
        let _ = read_joined(&mut input.clone());
        let _ = listener.receive(&mut input, &mut Vec::new());
    }

    /// Whatever bit is flipped on the wire, two sides that both call it a session mean the same one.
    #[test]
    fn a_flipped_bit_makes_no_session_or_the_same(step in 0usize..4, bit in 0usize..4000) {
        let (mut opener, mut wire) = Handshake::open(local(1, Some(b"x")), [1; 32], Some(identity(2)));
        let mut listener = Handshake::listen(local(2, Some(b"x")), [2; 32]);
        let mut sessions = Vec::new();
        for at in 0..4 {
            if at == step && !wire.is_empty() {
                let bit = bit % (wire.len() * 8);
                wire[bit / 8] ^= 1 << (bit % 8);
            }
            let mut out = Vec::new();
            let side = if at % 2 == 0 { &mut listener } else { &mut opener };
            if let Ok(Some(Greeting::Control(session))) = side.receive(&mut wire, &mut out) {
                sessions.push((session.session, session.version));
            }
            wire = out;
        }
        prop_assert!(sessions.windows(2).all(|pair| pair[0] == pair[1]));
    }
}
