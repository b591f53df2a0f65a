//! Handshakes and joins: what anybody can send who reaches the port.

use crate::most_held;
use arbitrary::Unstructured;
use kvik_core::{EngineId, Incarnation};
use kvik_proto::{
    Established, Facts, Greeting, Handshake, Identity, Join, JoinKind, Local, Secret, joined, read_joined,
    refusal,
};

/// No message of a handshake is longer, so no more is held than came and one answer.
const ANSWER: usize = 16 << 10;

pub fn identity(number: u8) -> Identity {
    Identity { engine: EngineId([number; 16]), incarnation: Incarnation(number.into()) }
}

fn local(number: u8, secret: Option<&[u8]>) -> Local {
    let facts = Facts { name: format!("engine {number}"), local_name: "kvik-x".into(), ..Facts::default() };
    Local { identity: identity(number), secret: Secret::new(secret), facts }
}

/// A whole handshake of engines 1 (which opens) and 2: what each holds then.
pub fn shaken(secret: Option<&[u8]>) -> (Established, Established) {
    let (mut opener, mut to_listener) = Handshake::open(local(1, secret), [7; 32], Some(identity(2)));
    let mut listener = Handshake::listen(local(2, secret), [9; 32]);
    let (mut to_opener, mut found) = (Vec::new(), (None, None));
    for _ in 0..3 {
        let step = listener.receive(&mut to_listener, &mut to_opener).expect("an honest handshake");
        found.1 = control(step).or(found.1);
        let step = opener.receive(&mut to_opener, &mut to_listener).expect("an honest handshake");
        found.0 = control(step).or(found.0);
    }
    (found.0.expect("the opener is through"), found.1.expect("the listener is through"))
}

fn control(greeting: Option<Greeting>) -> Option<Established> {
    match greeting {
        Some(Greeting::Control(established)) => Some(established),
        _ => None,
    }
}

/// Both sides of a handshake, with raw bytes or with an honest peer's messages damaged on the way.
pub fn greeting(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    let secret = (mode & 1 != 0).then_some(&b"a secret"[..]);
    match (mode >> 1) % 3 {
        0 => raw(Handshake::listen(local(2, secret), [9; 32]), data),
        1 => raw(Handshake::open(local(1, secret), [7; 32], Some(identity(2))).0, data),
        _ => drop(damaged(secret, &mut Unstructured::new(data))),
    }
}

/// Pieces as long as their first byte says. Nobody who does not know the secret is let in.
fn raw(mut shake: Handshake, mut data: &[u8]) {
    let (mut input, mut output) = (Vec::new(), Vec::new());
    while let Some((len, rest)) = data.split_first() {
        let (piece, rest) = rest.split_at(rest.len().min(usize::from(*len)));
        data = rest;
        input.extend_from_slice(piece);
        let came = input.len();
        let (step, held) = most_held(|| shake.receive(&mut input, &mut output));
        assert!(held <= 4 * came + ANSWER, "{held} bytes for {came} of a greeting");
        assert!(output.len() <= ANSWER);
        match step {
            Ok(Some(Greeting::Join(join))) => {
                let (left, _) = shaken(None);
                assert!(!join.is_signed_with(&left.key) || join.session == left.session);
                return;
            }
            // Raw bytes with the proof of a transcript would be a break of the hash. Without a secret there is a
            // proof that anybody can make, but not of nonces that the fuzzer does not see.
            Ok(Some(Greeting::Control(_))) => return,
            Ok(None) => {}
            Err(_) => return,
        }
    }
}

/// One edit of what an honest side sends.
fn edit(u: &mut Unstructured, bytes: &mut Vec<u8>) -> arbitrary::Result<bool> {
    if bytes.is_empty() || u.ratio(1, 2)? {
        return Ok(false);
    }
    let before = bytes.clone();
    let at = u.int_in_range(0..=bytes.len() - 1)?;
    match u.int_in_range(0u8..=3)? {
        0 => bytes[at] ^= u.arbitrary::<u8>()?,
        1 => bytes.truncate(at),
        2 => bytes.insert(at, u.arbitrary()?),
        _ => bytes.extend(before.clone()),
    }
    Ok(*bytes != before)
}

fn damaged(secret: Option<&[u8]>, u: &mut Unstructured) -> arbitrary::Result<()> {
    let (mut opener, mut to_listener) = Handshake::open(local(1, secret), [7; 32], Some(identity(2)));
    let mut listener = Handshake::listen(local(2, secret), [9; 32]);
    let (mut to_opener, mut found) = (Vec::new(), (None, None));
    let mut whole = true;
    for _ in 0..3 {
        whole &= !edit(u, &mut to_listener)?;
        match listener.receive(&mut to_listener, &mut to_opener) {
            Ok(step) => found.1 = control(step).or(found.1),
            Err(_) => whole = false,
        }
        whole &= !edit(u, &mut to_opener)?;
        match opener.receive(&mut to_opener, &mut to_listener) {
            Ok(step) => found.0 = control(step).or(found.0),
            Err(_) => whole = false,
        }
    }
    if let (Some(left), Some(right)) = (&found.0, &found.1) {
        assert_eq!((left.session, left.version), (right.session, right.version));
        let join = Join::new(left.session, 0, JoinKind::Data, &left.key, [3; 32]);
        assert!(join.is_signed_with(&right.key), "both sides have ended well with two keys");
    }
    assert!(!whole || (found.0.is_some() && found.1.is_some()), "an honest handshake failed");
    Ok(())
}

/// Joins and the answers to them.
pub fn join(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    match mode % 3 {
        0 => drop(read_joined(&mut data.to_vec())),
        1 => raw(Handshake::listen(local(2, None), [9; 32]), data),
        _ => drop(signed(&mut Unstructured::new(data))),
    }
}

/// A join comes back; signed with another key, or altered, it is not of the session.
fn signed(u: &mut Unstructured) -> arbitrary::Result<()> {
    let (left, _) = shaken(None);
    let kind = if u.arbitrary()? { JoinKind::Data } else { JoinKind::Local };
    let join = Join::new(u.arbitrary()?, u.arbitrary()?, kind, &left.key, u.arbitrary()?);
    let mut bytes = join.encode();
    let at = u.int_in_range(0..=bytes.len() - 1)?;
    let flip: u8 = u.arbitrary()?;
    bytes[at] ^= flip;
    let step = Handshake::listen(local(2, None), [9; 32]).receive(&mut bytes, &mut Vec::new());
    match step {
        Ok(Some(Greeting::Join(back))) => {
            // Byte 5 and the padding behind the kind are nobody's.
            let same = (back.session, back.index, back.kind) == (join.session, join.index, join.kind);
            assert!(!back.is_signed_with(&left.key) || same, "an altered join was believed");
            assert!(flip != 0 || back.is_signed_with(&left.key));
        }
        Ok(None | Some(Greeting::Control(_))) | Err(_) => assert!(flip != 0, "an honest join was refused"),
    }
    assert!(read_joined(&mut joined()).is_ok_and(|answer| answer.is_some()));
    let error = kvik_core::Error::new(kvik_core::Code::ProtocolError, "x".repeat(u.int_in_range(0..=3000)?));
    assert!(read_joined(&mut refusal(&error)).is_err());
    Ok(())
}
