//! The messages before a session: two whole handshakes, connections that join, and refusals.

use crate::format::{Entry, Fields, Golden, all, unhex};
use crate::formats;
use kvik_core::{Code, EngineId, Error, Incarnation};
use kvik_proto::{
    Established, Facts, Greeting, Handshake, Identity, Join, JoinKind, Local, Nics, Nonce, Secret, joined,
    read_joined, refusal,
};
use std::collections::BTreeSet;

/// One side of a handshake, as its golden file tells it.
struct Side {
    local: Local,
    nonce: Nonce,
}

fn side(number: u8, secret: &str) -> Side {
    let identity = Identity {
        engine: EngineId(std::array::from_fn(|at| number * 16 + at as u8)),
        incarnation: Incarnation(0x0102_0304_0506_0700 + u64::from(number)),
    };
    let facts = Facts {
        boot: [number; 16],
        pid_namespace: 4_026_531_836,
        user_namespace: 4_026_531_837,
        network_namespace: 4_026_531_840 + u64::from(number),
        uid: 1000,
        pid: 70_000 + u32::from(number),
        local_name: format!("kvik-{}", identity.engine),
        name: format!("größe-{number}"),
        nics: Nics { provider: "tcp;ofi_rxm".into(), addresses: vec![vec![number; 16], vec![7]] },
    };
    let secret = Secret::new((!secret.is_empty()).then_some(secret.as_bytes()));
    Side { local: Local { identity, secret, facts }, nonce: [number ^ 0x5A; 32] }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn show(identity: &Identity) -> String {
    format!("{} {:x}", identity.engine, identity.incarnation.0)
}

fn show_facts(facts: &Facts) -> Fields {
    let Facts { boot, pid_namespace, user_namespace, network_namespace, uid, pid, local_name, name, nics } =
        facts;
    vec![
        ("boot", hex(boot)),
        ("namespaces", format!("pid {pid_namespace}, user {user_namespace}, network {network_namespace}")),
        ("uid", uid.to_string()),
        ("pid", pid.to_string()),
        ("local_name", local_name.clone()),
        ("name", name.clone()),
        ("nics", format!("{} {:?}", nics.provider, nics.addresses)),
    ]
}

fn show_established(established: &Established) -> Fields {
    let Established { session, key: _, version, peer, facts, opener, one_sided: _ } = established;
    let mut fields = vec![
        ("session", session.to_string()),
        ("version", version.to_string()),
        ("peer", show(peer)),
        ("opener", opener.to_string()),
    ];
    fields.extend(show_facts(facts));
    fields
}

fn hear(side: &mut Handshake, said: &[u8]) -> (Vec<u8>, Option<Established>) {
    let (mut input, mut output) = (said.to_vec(), Vec::new());
    match side.receive(&mut input, &mut output).unwrap() {
        None => (output, None),
        Some(Greeting::Control(established)) => (output, Some(established)),
        Some(Greeting::Join(_)) => panic!("a connection that joins was not meant"),
    }
}

/// A conversation's four messages, and what both sides know after it.
struct Conversation {
    said: [Vec<u8>; 4],
    opener: Established,
    listener: Established,
}

fn converse(opener: Side, listener: Side, want: bool) -> Conversation {
    let want = want.then_some(listener.local.identity);
    let (mut left, hello) = Handshake::open(opener.local, opener.nonce, want);
    let mut right = Handshake::listen(listener.local, listener.nonce);
    let (welcome, _) = hear(&mut right, &hello);
    let (prove, _) = hear(&mut left, &welcome);
    let (ready, listener) = hear(&mut right, &prove);
    let (_, opener) = hear(&mut left, &ready);
    Conversation {
        said: [hello, welcome, prove, ready],
        opener: opener.unwrap(),
        listener: listener.unwrap(),
    }
}

const CONVERSATIONS: [(&str, &str, bool); 2] = [("open", "", true), ("secret", "a shared secret", false)];
const MESSAGES: [&str; 4] = ["hello", "welcome", "prove", "ready"];

fn speak(secret: &str, want: bool) -> Conversation {
    converse(side(1, secret), side(2, secret), want)
}

fn refused() -> Error {
    Error::new(Code::SecretMismatch, "the two engines have different secrets")
}

fn show_join(join: &Join) -> Fields {
    let kind = match join.kind {
        JoinKind::Data => "data",
        JoinKind::Local => "local",
    };
    vec![("session", join.session.to_string()), ("index", join.index.to_string()), ("kind", kind.to_owned())]
}

fn today() -> Vec<Entry> {
    let mut entries = Vec::new();
    for (name, secret, want) in CONVERSATIONS {
        let Conversation { said, opener, listener } = speak(secret, want);
        let who = |side: Side| vec![("engine", show(&side.local.identity)), ("nonce", hex(&side.nonce))];
        let mut hello = who(side(1, secret));
        hello.push(("wants", if want { show(&side(2, secret).local.identity) } else { "none".to_owned() }));
        let told = [hello, who(side(2, secret)), show_established(&listener), show_established(&opener)];
        for ((message, bytes), fields) in MESSAGES.iter().zip(said).zip(told) {
            entries.push(Entry::new(&format!("{name}/{message}"), fields, bytes));
        }
        for (kind, index, joins) in [("join-data", 3, JoinKind::Data), ("join-local", 0, JoinKind::Local)] {
            let join = Join::new(opener.session, index, joins, &opener.key, [0x33; 32]);
            entries.push(Entry::new(&format!("{name}/{kind}"), show_join(&join), join.encode()));
        }
    }
    let error = refused();
    let fields = vec![("code", error.code.to_string()), ("text", error.text.clone())];
    entries.push(Entry::new("refuse", fields, refusal(&error)));
    entries.push(Entry::new("joined", vec![], joined()));
    entries
}

fn said<'g>(golden: &'g Golden, name: &str) -> &'g Entry {
    let found = golden.entries.iter().find(|entry| entry.name == name);
    found.unwrap_or_else(|| panic!("{:?} has no {name}", golden.path))
}

#[test]
fn handshakes_of_every_release_are_understood() {
    for golden in all("greetings", &formats(), &today()) {
        for (name, secret, want) in CONVERSATIONS {
            let [hello, welcome, prove, ready] =
                MESSAGES.map(|message| said(&golden, &format!("{name}/{message}")));
            // The older engine opens, and this one listens.
            let (right, other) = (side(2, secret), side(1, secret));
            let mut listener = Handshake::listen(right.local.clone(), right.nonce);
            assert_eq!(hear(&mut listener, &hello.bytes).0, welcome.bytes, "{:?} {name}", golden.path);
            let (answer, heard) = hear(&mut listener, &prove.bytes);
            assert_eq!(answer, ready.bytes, "{:?} {name}", golden.path);
            let heard = heard.unwrap();
            assert_eq!(
                Entry::new("", show_established(&heard), vec![]).fields,
                prove.fields,
                "{:?}",
                golden.path
            );
            assert_eq!((&heard.peer, &heard.facts), (&other.local.identity, &other.local.facts));
            for kind in ["join-data", "join-local"] {
                check_join(said(&golden, &format!("{name}/{kind}")), &heard, &golden);
            }
            // This engine opens: what it says first names what it speaks, so only a file of today's can go on.
            if golden.is_written_today {
                let want = want.then_some(right.local.identity);
                let (mut opener, first) = Handshake::open(other.local, other.nonce, want);
                assert_eq!(first, hello.bytes, "{:?} {name}", golden.path);
                assert_eq!(hear(&mut opener, &welcome.bytes).0, prove.bytes, "{:?} {name}", golden.path);
                let heard = hear(&mut opener, &ready.bytes).1.unwrap();
                assert_eq!(
                    Entry::new("", show_established(&heard), vec![]).fields,
                    ready.fields,
                    "{:?}",
                    golden.path
                );
            }
        }
        let mut answer = said(&golden, "joined").bytes.clone();
        assert_eq!(read_joined(&mut answer), Ok(Some(())));
        let refuse = said(&golden, "refuse");
        assert_eq!(read_joined(&mut refuse.bytes.clone()), Err(refused()));
        assert_eq!(refusal(&refused()), refuse.bytes);
    }
}

fn check_join(entry: &Entry, session: &Established, golden: &Golden) {
    let mut listener = Handshake::listen(side(2, "").local, [0; 32]);
    let mut input = entry.bytes.clone();
    let Some(Greeting::Join(join)) = listener.receive(&mut input, &mut Vec::new()).unwrap() else {
        panic!("{:?} {} is no join", golden.path, entry.name)
    };
    assert_eq!(Entry::new("", show_join(&join), vec![]).fields, entry.fields, "{:?}", golden.path);
    assert!(join.session == session.session && join.is_signed_with(&session.key), "{:?}", golden.path);
    if golden.is_written_today {
        assert_eq!(join.encode(), entry.bytes, "{:?}", golden.path);
    }
}

/// A kind of greeting that this release understands has a golden file.
#[test]
fn no_kind_of_greeting_is_without_its_golden_file() {
    let kept: BTreeSet<u8> = today().iter().map(|entry| entry.bytes[4]).collect();
    let understood = (0..=u8::MAX).filter(|kind| {
        let mut bytes = unhex("6b76696b00000000");
        bytes[4] = *kind;
        let heard = Handshake::listen(side(2, "").local, [0; 32]).receive(&mut bytes, &mut Vec::new());
        !heard.is_err_and(|error| error.text.contains("unknown kind"))
    });
    assert_eq!(understood.collect::<BTreeSet<u8>>(), kept);
}
