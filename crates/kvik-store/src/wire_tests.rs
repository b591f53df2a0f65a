//! Messages of the store: each comes back as it was, and nothing else is one.

use crate::wire::{Ack, Ahead, Get, Lending, MAX_GROUPS, MetricsPart, Put, Request, Response};
use crate::{BlockKey, Counts, MAX_KEYS, NamespaceId, Shape, Stored};
use kvik_core::{Code, EngineId, GrantId, HostTag, Incarnation, Right, Ticket};
use std::time::Duration;

fn key(number: u8) -> BlockKey {
    BlockKey([number; 32])
}

fn ticket(number: u8) -> Ticket {
    let address = |port| std::net::SocketAddr::from(([0xfe80, 1, 2, 3, 4, 5, 6, 7], port));
    Ticket {
        engine: EngineId([number; 16]),
        incarnation: Incarnation(u64::MAX),
        grant: GrantId([7; 16]),
        right: Right::Read,
        expiry: Duration::from_millis(1500),
        layout: [3; 8],
        host: HostTag([4; 8]),
        addresses: (0..4).map(|at| address(60_000 + at)).collect(),
    }
}

fn requests() -> Vec<Request> {
    let (namespace, keys) = (NamespaceId([9; 32]), vec![key(1), key(2)]);
    let put = |parent, ack| {
        let (keys, ticket, deadline) = (keys.clone(), ticket(1), Duration::from_secs(5));
        Request::Put(Put { namespace, parent, keys, ticket, ack, deadline })
    };
    let shape = Shape::new(64, 2, 32768).unwrap();
    let time = Duration::from_millis(250);
    let ahead = Ahead { grant: GrantId([8; 16]), layout: [6; 8] };
    vec![
        Request::Open { namespace, shape, tenant: "größe".into(), model: String::new() },
        put(None, Ack::Accepted),
        put(Some(key(3)), Ack::Durable),
        Request::Get(Get { namespace, keys: vec![key(5); MAX_KEYS], expiry: time, ahead: None }),
        Request::Get(Get { namespace, keys: keys.clone(), expiry: time, ahead: Some(ahead) }),
        Request::Contains { namespace, keys: Vec::new() },
        Request::Prefetch { namespace, keys: keys.clone() },
        Request::Remove { namespace, keys: keys.clone() },
        Request::Pin { namespace, keys, time },
        Request::ClearNamespace { namespace },
        Request::ClearTenant { tenant: "one".into() },
        Request::Stat,
        Request::Metrics,
    ]
}

fn responses() -> Vec<Response> {
    let blocks = (0..MAX_KEYS).map(|at| ((at % MAX_GROUPS) as u16, at as u64)).collect();
    let tickets = (0..MAX_GROUPS).map(|at| ticket(at as u8)).collect();
    vec![
        Response::Opened,
        Response::Accepted,
        Response::Stored(Stored { stored: 1, known: 2, refused: u64::MAX }),
        Response::Lent(Lending { blocks, tickets, more: true }),
        Response::Lent(Lending { blocks: Vec::new(), tickets: Vec::new(), more: false }),
        Response::Here(vec![true, false, true]),
        Response::Done(3),
        Response::Counts(Box::new(Counts { stored: 5, hits: 6, ..Counts::default() })),
        Response::Metrics(MetricsPart { text: "a_total 7\n".repeat(3000), more: true }),
        Response::Failed(Code::NamespaceUnknown, "why".into()),
    ]
}

#[test]
fn messages_come_back_as_they_were_and_fit_a_notification() {
    for (number, request) in requests().into_iter().enumerate() {
        let message = request.encode(number as u64);
        assert!(message.len() <= 60 << 10, "{} bytes", message.len());
        assert_eq!(Request::decode(&message).unwrap(), (number as u64, request));
    }
    for (number, response) in responses().into_iter().enumerate() {
        let message = response.encode(number as u64);
        assert!(message.len() <= 60 << 10, "{} bytes", message.len());
        assert_eq!(Response::decode(&message).unwrap(), (number as u64, response));
    }
}

#[test]
fn what_is_cut_or_longer_is_no_message() {
    let whole = |message: &[u8]| Request::decode(message).is_ok() || Response::decode(message).is_ok();
    let messages = requests().iter().map(|one| one.encode(1)).collect::<Vec<_>>();
    for message in messages.into_iter().chain(responses().iter().map(|one| one.encode(1))) {
        assert!(whole(&message));
        (0..message.len()).for_each(|len| assert!(!whole(&message[..len]), "{len} of {}", message.len()));
        assert!(!whole(&[&message[..], &[0]].concat()));
        assert!(!whole(&[&[9], &message[1..]].concat()), "another version");
    }
}

#[test]
fn flipped_bits_never_do_more_than_give_another_message() {
    for message in
        requests().iter().map(|one| one.encode(1)).chain(responses().iter().map(|one| one.encode(1)))
    {
        for at in 0..message.len().min(400) {
            for bit in 0..8 {
                let mut other = message.clone();
                other[at] ^= 1 << bit;
                if let Ok((number, request)) = Request::decode(&other) {
                    assert_eq!(Request::decode(&request.encode(number)).unwrap(), (number, request));
                }
                if let Ok((number, response)) = Response::decode(&other) {
                    assert_eq!(Response::decode(&response.encode(number)).unwrap().0, number);
                }
            }
        }
    }
}

#[test]
fn a_request_that_cannot_be_read_is_answered_by_its_number() {
    let mut message = requests()[0].encode(77);
    message.truncate(20);
    assert_eq!(Request::decode(&message).unwrap_err().0, Some(77));
    assert_eq!(Request::decode(&message[..5]).unwrap_err().0, None);
}

#[test]
fn figures_are_divided_at_lines_and_come_back_as_they_were() {
    let text: String = (0..20_000).map(|number| format!("kvik_x{{n=\"{number}\"}} {number}\n")).collect();
    let parts = MetricsPart::divide(&text);
    assert!(parts.len() > 10);
    assert!(parts.iter().all(|part| part.text.ends_with('\n')));
    let more: Vec<bool> = parts.iter().map(|part| part.more).collect();
    assert!(!more[parts.len() - 1] && more[..parts.len() - 1].iter().all(|more| *more));
    let all: String = parts
        .into_iter()
        .map(|part| match Response::decode(&Response::Metrics(part).encode(1)).unwrap() {
            (_, Response::Metrics(part)) => part.text,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(all, text);
}
