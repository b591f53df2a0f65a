//! What is concluded from pages, without servers; and a server that knows no such request.

use crate::figures::Where;
use crate::scan::bit;
use crate::survey::join::Rows;
use crate::wire::scan::{Described, Page, Seen, Segment, ShortKey};
use crate::wire::{MetricsPart, REQUESTS, RESPONSES, Request, Response};
use crate::{Amount, Client, Looked, Server, ServerSurvey, Servers, StoreOptions, Survey, SurveyOptions};
use kvik_core::{Code, EngineId, Error};
use kvik_engine::{Config, Engine, Inbox, Who};
use std::sync::mpsc::channel;
use std::time::Duration;

#[path = "../../../tests/common/watch.rs"]
pub mod watch;

const BYTES: u64 = 100;
const MEMORY: u8 = 1;
const LOG: u8 = 2;

fn namespaces() -> Vec<Described> {
    let named = |id| {
        let (tenant, model) = (format!("tenant {id}"), "m@1".to_owned());
        Described { id: ShortKey(id), tenant, model, block_bytes: BYTES }
    };
    vec![named(7), named(8)]
}

/// A page with blocks of one segment.
fn page(head: u64, order: &[u16], blocks: &[(u64, u8)]) -> Page {
    let block = |(key, tiers): &(u64, u8)| Seen {
        key: ShortKey(*key),
        namespace: 0,
        tiers: *tiers,
        segment: Some(0),
    };
    let segments = vec![Segment { head: ShortKey(head), order: order.to_vec() }];
    Page { blocks: blocks.iter().map(block).collect(), segments, next: None }
}

fn servers(looked: &[Looked]) -> Vec<ServerSurvey> {
    let server = |(at, looked): (usize, &Looked)| {
        let (name, looked) = (format!("s{at}:1"), looked.clone());
        ServerSurvey { name, looked, ..ServerSurvey::default() }
    };
    looked.iter().enumerate().map(server).collect()
}

fn of(blocks: u64) -> Amount {
    Amount { blocks, bytes: blocks * BYTES }
}

/// Three servers: one segment of ten blocks with two copies, one whose second copy has a part, one that lies elsewhere.
fn joined(copies: Option<usize>, looked: &[Looked; 3]) -> Survey {
    assert_eq!([MEMORY, LOG], [bit(Where::Memory), bit(Where::Log)]);
    let mut rows = Rows::new(0, 1000, (3, 3));
    let mut add = |server, page: Page| rows.add(server, &page, &namespaces()).unwrap();
    let some = |keys: std::ops::Range<u64>, tiers| keys.map(|key| (key, tiers)).collect::<Vec<_>>();
    add(0, page(1, &[0, 1, 2], &some(100..110, MEMORY)));
    add(1, page(1, &[0, 1, 2], &some(100..110, MEMORY | LOG)));
    add(1, page(2, &[1, 2, 0], &some(200..210, MEMORY | LOG)));
    add(2, page(2, &[1, 2, 0], &some(200..204, MEMORY)));
    add(0, page(3, &[2, 1, 0], &some(300..305, MEMORY)));
    rows.join(servers(looked), copies)
}

#[test]
fn copies_are_counted_where_clients_look() {
    let whole = [const { Looked::Whole }; 3];
    let two = joined(Some(2), &whole);
    assert_eq!((two.rows, two.sample, two.copies), (39, 1, 2));
    assert_eq!(two.by_copies, [of(5), of(6), of(14)]);
    assert_eq!((two.short, two.short_unseen), (of(11), of(0)));
    let by = |get: fn(&ServerSurvey) -> Amount| two.servers.iter().map(get).map(|one| one.blocks).collect();
    let all: [Vec<u64>; 6] = [
        by(|one| one.held),
        by(|one| one.stray),
        by(|one| one.owed),
        by(|one| one.lacking),
        by(|one| one.lost),
        by(|one| one.away),
    ];
    // Of the six that only the second server has all are in its log; the five of the first are where nobody looks.
    let expected = [[15, 20, 4], [5, 0, 0], [10, 25, 15], [0, 5, 11], [0, 0, 0], [0, 6, 0]];
    assert_eq!(all, expected.map(Vec::from));
    assert_eq!(two.servers[1].tiers, [of(20), of(20), of(0)]);
    assert_eq!((two.segments.count, two.segments.blocks, two.segments.largest), (3, 25, 10));
    assert_eq!(two.segments.squares, 225.0);
    assert_eq!((two.namespaces.len(), two.namespaces[0].held, two.namespaces[0].copies), (1, of(25), of(39)));
    // With one copy the second ones are where nobody looks.
    let one = joined(Some(1), &whole);
    assert_eq!(one.by_copies, [of(5), of(20)]);
    assert_eq!(one.servers.iter().map(|one| one.stray.blocks).collect::<Vec<_>>(), [5, 10, 4]);
    assert_eq!(one.servers.iter().map(|one| one.lost.blocks).collect::<Vec<_>>(), [10, 0, 0]);
    assert_eq!(one.servers.iter().map(|one| one.away.blocks).collect::<Vec<_>>(), [0, 10, 0]);
}

#[test]
fn the_number_of_copies_is_concluded_from_most_blocks() {
    let whole = [const { Looked::Whole }; 3];
    assert_eq!(joined(None, &whole).copies, 2);
    // What was not looked at is no sign, neither for copies nor against them.
    let down = || Looked::Down(Error::new(Code::StoreUnavailable, "away"));
    let two = joined(None, &[Looked::Whole, Looked::Whole, down()]);
    assert_eq!(two.copies, 2);
    assert_eq!((two.short, two.short_unseen), (of(11), of(6)));
    assert_eq!(Rows::new(0, 1, (1, 1)).join(servers(&[Looked::Whole]), None).copies, 1);
}

#[test]
fn a_sample_stands_for_all_and_what_is_held_is_bounded() {
    let mut rows = Rows::new(3, 4, (2, 2));
    let blocks: Vec<(u64, u8)> = (0..8).map(|key| (key * 8, MEMORY)).collect();
    rows.add(0, &page(1, &[0, 1], &blocks), &namespaces()).unwrap();
    // One that went and came again, and one of a namespace that nobody has described.
    rows.add(0, &page(1, &[0, 1], &blocks[..1]), &namespaces()).unwrap();
    rows.add(0, &page(1, &[0, 1], &blocks), &[]).unwrap();
    let full: Vec<(u64, u8)> = (0..1024).map(|key| (key, MEMORY)).collect();
    let error = rows.add(1, &page(2, &[0, 1], &full), &namespaces()).unwrap_err();
    assert_eq!(error.code, Code::MemoryCapReached);
    let survey = rows.join(servers(&[Looked::Whole, Looked::Whole]), Some(1));
    assert_eq!((survey.sample, survey.rows), (8, 8));
    assert_eq!((survey.servers[0].held, survey.servers[0].lost), (of(64), of(64)));
    assert_eq!((survey.segments.blocks, survey.segments.squares), (64, 64.0 * 56.0 + 64.0));
}

/// A server of a kvik that lists nothing: it knows its figures, and says of the rest that there is no such request.
fn old() -> (Engine, Inbox) {
    let engine = Engine::start(Config::default()).unwrap();
    let (to, from) = channel::<(EngineId, Vec<u8>)>();
    let take = move |who: &Who, message: &[u8]| drop(to.send((who.engine, message.to_vec())));
    let inbox = Inbox::handing(&engine, REQUESTS, take).unwrap();
    let answering = engine.clone();
    std::thread::spawn(move || {
        for (client, message) in from {
            let (number, request) = Request::decode(&message).unwrap();
            let response = match request {
                Request::Stat => Response::Counts(Box::default()),
                Request::Metrics => {
                    Response::Metrics(MetricsPart { text: "kvik_store_blocks 5\n".into(), more: false })
                }
                _ => Response::Failed(Code::ProtocolError, "it asks for something that there is not".into()),
            };
            let message = response.encode(number);
            drop(answering.notify_on(RESPONSES, client, &message, Some(Duration::from_secs(60))));
        }
    });
    (engine, inbox)
}

#[test]
fn a_server_that_knows_no_such_request_is_named_and_the_others_are_looked_at() {
    let ((older, _inbox), engine) = (old(), Engine::start(Config::default()).unwrap());
    let server = Server::start(&engine, &StoreOptions::default()).unwrap();
    let nobody = std::net::TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap();
    let names = [older.addresses()[0].to_string(), engine.addresses()[0].to_string(), nobody.to_string()];
    let asking = Engine::start(Config::default()).unwrap();
    let client = Client::connect_to(&asking, &Servers::parse(&names).unwrap(), 1, None).unwrap();
    let began = watch::start();
    let survey = client.survey(&SurveyOptions::default()).unwrap();
    println!("it took {:?}", began.elapsed());
    assert!(began.elapsed() < Duration::from_secs(5));
    let of = |name: &String| survey.servers.iter().find(|server| server.name == *name).unwrap();
    assert!(matches!(&of(&names[0]).looked, Looked::Older(error) if error.code == Code::ProtocolError));
    assert_eq!(of(&names[0]).metrics.as_deref(), Some("kvik_store_blocks 5\n"));
    assert_eq!((&of(&names[1]).looked, of(&names[1]).version.is_empty()), (&Looked::Whole, false));
    assert!(matches!(&of(&names[2]).looked, Looked::Down(_)));
    assert_eq!((of(&names[2]).metrics.as_deref(), of(&names[2]).version.as_str()), (None, ""));
    drop(server);
}
