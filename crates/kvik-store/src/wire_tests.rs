//! Messages of the store: each comes back as it was, and nothing else is one.

use crate::placement::Lot;
use crate::wire::scan::{
    Described, Description, MAX_ORDER, MAX_SERVERS, PAGE, PART, Page, Scan, Seen, Segment, ShortKey,
};
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
        Request::Describe { from: 4095 },
        Request::Scan(Scan { from: u32::MAX, sample: 63, order: 0, lots: Vec::new() }),
        Request::Scan(Scan { from: 7, sample: 0, order: 16, lots: vec![Lot([5; 32]); 3] }),
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
        Response::Described(description(3)),
        Response::Scanned(page(40, Some(1 << 20))),
        Response::Scanned(Page::default()),
    ]
}

/// A description of so many namespaces, with the longest names.
fn description(count: usize) -> Description {
    let namespace = |at: usize| {
        let (tenant, model) = ("ü".repeat(64), "m".repeat(128));
        Described { id: ShortKey(at as u64), tenant, model, block_bytes: u64::MAX }
    };
    let namespaces = (0..count).map(namespace).collect();
    Description { version: "0.1.0".into(), blocks: u64::MAX, namespaces, more: true }
}

/// A page of so many blocks, each in a segment of its own or in none.
fn page(count: usize, next: Option<u32>) -> Page {
    let head = |at: usize| ShortKey(u64::MAX - at as u64);
    let segment = |at| Segment { head: head(at), order: (0..MAX_ORDER as u16).collect() };
    let block = |at: usize| {
        let segment = Some(at as u16).filter(|at| at % 2 == 0);
        Seen { key: head(at), namespace: 9, tiers: (at % 8) as u8, segment }
    };
    Page { blocks: (0..count).map(block).collect(), segments: (0..count).map(segment).collect(), next }
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
fn the_longest_pages_and_descriptions_fit_a_notification() {
    let scan = Request::Scan(Scan { lots: vec![Lot([5; 32]); MAX_SERVERS], ..Scan::default() });
    let message = scan.encode(1);
    assert!(message.len() <= 60 << 10, "{} bytes", message.len());
    assert_eq!(Request::decode(&message).unwrap(), (1, scan));
    for response in [Response::Described(description(PART)), Response::Scanned(page(PAGE, Some(9)))] {
        let message = response.encode(1);
        assert!(message.len() <= 60 << 10, "{} bytes", message.len());
        assert_eq!(Response::decode(&message).unwrap(), (1, response));
    }
}

#[test]
fn a_page_names_no_tier_segment_or_page_that_there_is_not() {
    let short = Page {
        blocks: vec![Seen { key: ShortKey(1), namespace: 0, tiers: 7, segment: Some(0) }],
        segments: vec![Segment { head: ShortKey(2), order: vec![0, 1] }],
        next: None,
    };
    let message = Response::Scanned(short).encode(1);
    assert!(Response::decode(&message).is_ok());
    let end = message.len();
    // From the end: the place of the segment, and the tiers before it. Behind the number: whether a page follows, and where.
    for (at, value) in [(end - 2, 1), (end - 3, 8), (10, 2), (11, 1)] {
        let mut other = message.clone();
        other[at] = value;
        assert!(Response::decode(&other).is_err(), "byte {at} is {value}");
    }
    for (at, value) in [(14, 64), (15, MAX_ORDER as u8 + 1)] {
        let mut other = Request::Scan(Scan::default()).encode(1);
        assert!(Request::decode(&other).is_ok());
        other[at] = value;
        assert!(Request::decode(&other).is_err(), "byte {at} is {value}");
    }
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
