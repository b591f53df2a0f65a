//! What users hear: of peers that come, fall silent, die, come back or are started anew; of grants; and from each
//! other. Peers are real processes: this test's own program under another name.

use crate::common::*;
use kvik_core::{Code, Ticket};
use kvik_engine::{Config, Engine, Event, Events, PeerState, Preference, Region, TransportId};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const ROLE: &str = "KVIK_TEST_EVENTS";
const ARGUMENT: &str = "KVIK_TEST_EVENTS_ARGUMENT";

/// Not a test: the peer, until its input ends.
#[test]
fn peer() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let argument = std::env::var(ARGUMENT).unwrap();
    match role.as_str() {
        "owner" => {
            let listen = vec![argument.parse().unwrap()];
            let owner = Engine::start(Config { listen, name: role, ..Config::default() }).unwrap();
            let there = region(&owner, 8, 1);
            let grant = owner.grant(&all(&there), many()).unwrap();
            println!("\npeer: {}", grant.ticket());
            std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
            owner.close(PATIENCE).unwrap();
        }
        "sender" => {
            let (ticket, own) = (argument.parse::<Ticket>().unwrap(), engine(Preference::Auto));
            let notices: Vec<_> = (0..5000u32)
                .map(|number| own.notify(&ticket, &number.to_le_bytes(), Some(PATIENCE)).unwrap())
                .collect();
            notices.iter().for_each(|notice| notice.wait(Some(PATIENCE)).unwrap());
            println!("\npeer: done");
        }
        other => panic!("{other}"),
    }
}

pub struct Child {
    process: std::process::Child,
    said: mpsc::Receiver<String>,
}

impl Child {
    fn start(role: &str, argument: &str) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "events::peer", "--nocapture"]).env(ROLE, role).env(ARGUMENT, argument);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let (say, said) = mpsc::channel();
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix("peer: ") {
                    drop(say.send(line.to_owned()));
                }
            }
        });
        Child { process, said }
    }

    fn hear(&self) -> String {
        self.said.recv_timeout(PATIENCE).expect("the peer says nothing")
    }

    /// At an address where only these listen, so that its port stays free when it is gone.
    pub fn owner() -> (Child, Ticket) {
        Child::owner_at("127.0.0.3:0")
    }

    pub fn owner_at(listen: &str) -> (Child, Ticket) {
        let child = Child::start("owner", listen);
        let ticket = child.hear().parse().unwrap();
        (child, ticket)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

/// The next event, which must be this one, within so many seconds.
pub fn expect(events: &Events, name: &str, seconds: f32) -> Event {
    let began = watch::start();
    let event = events.next(PATIENCE).unwrap();
    let event = event.unwrap_or_else(|| panic!("no {name} in {PATIENCE:?}"));
    assert_eq!(event.name(), name, "{event:?}");
    assert!(began.elapsed().as_secs_f32() < seconds, "{name} after {:?}", began.elapsed());
    event
}

fn nothing(events: &Events, seconds: f32) {
    let event = events.next(Duration::from_secs_f32(seconds)).unwrap();
    assert!(event.is_none(), "{event:?}");
}

fn state(engine: &Engine, ticket: &Ticket) -> Option<PeerState> {
    engine.peers().iter().find(|peer| peer.engine == ticket.engine).map(|peer| peer.state)
}

fn try_read(engine: &Engine, ticket: &Ticket) -> Result<(), Code> {
    let here: Region = region(engine, 8, 2);
    read(engine, &all(&here), ticket).map(|_| ()).map_err(|error| error.code)
}

#[test]
fn a_peer_is_heard_of_from_its_coming_to_its_death() {
    let (child, ticket) = Child::owner();
    let reader = engine(Preference::Tcp);
    let events = reader.events().unwrap();
    assert!(reader.peers().is_empty());
    try_read(&reader, &ticket).unwrap();
    let Event::PeerUp(who, why) = expect(&events, "peer_up", 5.0) else { unreachable!() };
    assert_eq!((who.engine, who.incarnation), (ticket.engine, ticket.incarnation));
    assert_eq!((who.name.as_str(), why), ("owner", "connected"));
    let peer = &reader.peers()[0];
    assert_eq!((peer.state, peer.address), (PeerState::Up, Some(ticket.addresses[0])));
    let heard = |silent: Option<Duration>| silent.unwrap() < Duration::from_millis(700);
    wait_until("a sign of life", || heard(reader.peers()[0].silent));
    assert_eq!((peer.transports.as_slice(), peer.channels), ([TransportId::Tcp].as_slice(), 4));

    child.signal(Signal::STOP);
    let stopped = watch::start();
    expect(&events, "peer_suspect", 2.0);
    assert!(stopped.elapsed() < Duration::from_millis(1700), "{:?}", stopped.elapsed());
    assert_eq!(state(&reader, &ticket), Some(PeerState::Suspect));
    child.signal(Signal::CONT);
    let Event::PeerUp(_, why) = expect(&events, "peer_up", 2.0) else { unreachable!() };
    assert_eq!(why, "heard again");
    assert_eq!(state(&reader, &ticket), Some(PeerState::Up));

    child.signal(Signal::KILL);
    let Event::PeerLost(_, error) = expect(&events, "peer_lost", 2.0) else { unreachable!() };
    assert_eq!(error.code, Code::PeerLost);
    let dead = &reader.peers()[0];
    assert_eq!((dead.state, dead.reconnecting), (PeerState::Dead, true));
    assert!(!dead.reason.is_empty() && dead.transfers == 0);
}

#[test]
fn whoever_hears_of_a_peer_finds_it_among_the_peers() {
    let owner = engine(Preference::Tcp);
    let grant = owner.grant(&all(&region(&owner, 1, 1)), many()).unwrap();
    for _ in 0..100 {
        let reader = engine(Preference::Tcp);
        let (events, here) = (reader.events().unwrap(), region(&reader, 1, 2));
        let transfer = reader.read(&all(&here), grant.ticket(), None, within(PATIENCE)).unwrap();
        // Looks all the time, to be there at once.
        wait_until("the peer", || events.next(Duration::ZERO).unwrap().is_some());
        assert_eq!(state(&reader, grant.ticket()), Some(PeerState::Up));
        transfer.wait(Some(PATIENCE)).unwrap();
    }
}

#[test]
fn a_peer_that_was_only_silent_is_connected_to_again_by_itself() {
    let (child, ticket) = Child::owner();
    let reader = engine(Preference::Tcp);
    try_read(&reader, &ticket).unwrap();
    let events = reader.events().unwrap();
    child.signal(Signal::STOP);
    expect(&events, "peer_suspect", 2.0);
    expect(&events, "peer_lost", 2.0);
    // Longer than an attempt takes.
    nothing(&events, 3.5);
    child.signal(Signal::CONT);
    let awake = Instant::now();
    expect(&events, "peer_up", 6.0);
    println!("up {:?} after it was awake again", awake.elapsed());
    assert_eq!(state(&reader, &ticket), Some(PeerState::Up));
    try_read(&reader, &ticket).unwrap();
}

#[test]
fn a_goodbye_is_not_answered_by_dialling() {
    let (mut child, ticket) = Child::owner();
    let reader = engine(Preference::Tcp);
    try_read(&reader, &ticket).unwrap();
    let events = reader.events().unwrap();
    drop(child.process.stdin.take());
    let Event::PeerLost(_, error) = expect(&events, "peer_lost", 3.0) else { unreachable!() };
    assert!(error.text.contains("in order"), "{error}");
    let peer = &reader.peers()[0];
    assert!(peer.state == PeerState::Dead && !peer.reconnecting, "{peer:?}");
}

#[test]
fn a_peer_that_was_started_anew_voids_its_tickets_without_a_dial() {
    let (child, ticket) = Child::owner();
    let reader = engine(Preference::Tcp);
    try_read(&reader, &ticket).unwrap();
    let events = reader.events().unwrap();
    drop(child);
    expect(&events, "peer_lost", 3.0);
    let (again, fresh) = Child::owner_at(&ticket.addresses[0].to_string());
    let Event::PeerRestarted(who, error) = expect(&events, "peer_restarted", 8.0) else { unreachable!() };
    assert_eq!(who.engine, ticket.engine);
    assert!(error.text.contains(&fresh.engine.to_string()), "{error}");
    // Without a dial: the engine at the address does not answer any more.
    again.signal(Signal::STOP);
    let began = watch::start();
    assert_eq!(try_read(&reader, &ticket), Err(Code::PeerRestarted));
    assert_eq!(reader.notify(&ticket, b"hello", None).err().unwrap().code, Code::PeerRestarted);
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    again.signal(Signal::CONT);
    try_read(&reader, &fresh).unwrap();
    expect(&events, "peer_up", 1.0);
}

#[test]
fn ten_thousand_notifications_of_two_processes_come_in_order() {
    let owner = engine(Preference::Auto);
    let grant = owner.grant(&all(&region(&owner, 1, 1)), many()).unwrap();
    let events = owner.events().unwrap();
    let children: Vec<Child> = (0..2).map(|_| Child::start("sender", &grant.ticket().to_string())).collect();
    let mut next = std::collections::HashMap::new();
    while next.len() < 2 || next.values().any(|count| *count < 5000) {
        match events.next(PATIENCE).unwrap().expect("a notification") {
            Event::Notification(who, payload) => {
                let count = next.entry(who.engine).or_insert(0u32);
                assert_eq!(payload[..], count.to_le_bytes());
                *count += 1;
            }
            Event::PeerUp(..) => {}
            // One that is through.
            Event::PeerLost(who, _) => assert_eq!(next.get(&who.engine), Some(&5000)),
            other => panic!("{other:?}"),
        }
    }
    for child in &children {
        assert_eq!(child.hear(), "done");
    }
}

#[test]
fn a_consumer_that_never_takes_holds_a_window_and_loses_nothing() {
    let (owner, sender) = (engine(Preference::Auto), engine(Preference::Auto));
    let grant = owner.grant(&all(&region(&owner, 1, 1)), many()).unwrap();
    let payload = |number: u32| {
        let mut payload = vec![0; 60 << 10];
        payload[..4].copy_from_slice(&number.to_le_bytes());
        payload
    };
    let soon = Some(Duration::from_millis(300));
    let mut notices = Vec::new();
    let full = loop {
        let deadline = if notices.len() < 17 { Some(PATIENCE) } else { soon };
        match sender.notify(grant.ticket(), &payload(notices.len() as u32), deadline) {
            Ok(notice) => notices.push(notice),
            Err(error) => break error,
        }
        assert!(notices.len() < 100);
    };
    assert_eq!(full.code, Code::NotificationsFull, "{full}");
    assert_eq!(notices.len(), 17, "of 60 KiB in a window of 1 MiB");
    assert!(notices.iter().all(|notice| !notice.is_done()));
    let held = owner.stats().iter().find(|(name, _)| *name == "memory_held_bytes").unwrap().1;
    assert!((1_000_000..2_000_000).contains(&held), "{held}");
    // Transfers do not wait behind them.
    read(&sender, &all(&region(&sender, 1, 2)), grant.ticket()).unwrap();
    let events = owner.events().unwrap();
    for number in 0..17u32 {
        let Event::Notification(_, got) = expect(&events, "notification", 2.0) else { unreachable!() };
        assert_eq!(got[..], payload(number));
    }
    notices.iter().for_each(|notice| notice.wait(Some(PATIENCE)).unwrap());
    sender.notify(grant.ticket(), b"room", Some(PATIENCE)).unwrap();
}

#[test]
fn what_a_lost_peer_has_not_taken_fails() {
    let (child, ticket) = Child::owner();
    let sender = engine(Preference::Auto);
    let notice = sender.notify(&ticket, b"unheard", Some(PATIENCE)).unwrap();
    let late = sender.notify(&ticket, b"late", Some(Duration::from_millis(200))).unwrap();
    assert_eq!(code(late.wait(Some(PATIENCE))), Code::DeadlineExceeded);
    assert!(!notice.is_done());
    child.signal(Signal::KILL);
    let killed = watch::start();
    assert_eq!(code(notice.wait(Some(PATIENCE))), Code::PeerLost);
    assert!(killed.elapsed() < Duration::from_secs(3), "{:?}", killed.elapsed());
    let refused = |error: kvik_core::Error| error.code;
    assert_eq!(
        sender.notify(&ticket, &vec![0; (64 << 10) + 1], None).err().map(refused),
        Some(Code::InvalidArgument)
    );
    let stranger = kvik_core::EngineId::random().unwrap();
    assert_eq!(sender.notify(stranger, b"", None).err().map(refused), Some(Code::PeerUnreachable));
    assert_eq!(sender.notify(sender.id(), b"", None).err().map(refused), Some(Code::InvalidArgument));
}

#[test]
fn events_that_nobody_takes_are_dropped_and_counted() {
    let owner = engine(Preference::Auto);
    let there = region(&owner, 1, 1);
    let (events, other) = (owner.events().unwrap(), owner.events().unwrap());
    let ids: Vec<_> = (0..1500)
        .map(|_| {
            let grant = owner.grant(&all(&there), many()).unwrap();
            grant.revoke(PATIENCE).unwrap();
            grant.id()
        })
        .collect();
    let Event::EventsLost(lost) = expect(&events, "events_lost", 1.0) else { unreachable!() };
    assert_eq!(lost, 476);
    for id in &ids[476..] {
        let Event::GrantEnded(ended, _) = expect(&events, "grant_ended", 1.0) else { unreachable!() };
        assert_eq!(ended, *id);
    }
    nothing(&events, 0.0);
    drop(events);
    expect(&other, "events_lost", 1.0);
    owner.close(PATIENCE).unwrap();
    assert_eq!(code(other.next(PATIENCE)), Code::EngineClosed);
    assert!(other.is_closed());
    assert_eq!(code(owner.events().map(|_| ())), Code::EngineClosed);
}

#[test]
fn each_user_gets_everything_and_the_slowest_sets_the_pace() {
    let (owner, sender) = (engine(Preference::Auto), engine(Preference::Auto));
    let grant = owner.grant(&all(&region(&owner, 1, 1)), many()).unwrap();
    let first = sender.notify(grant.ticket(), b"before anybody", Some(PATIENCE)).unwrap();
    wait_until("a session", || !owner.peers().is_empty());
    let a = owner.events().unwrap();
    let payload = |event: Event| match event {
        Event::Notification(_, payload) => String::from_utf8(payload.to_vec()).unwrap(),
        other => panic!("{other:?}"),
    };
    assert_eq!(payload(expect(&a, "notification", 2.0)), "before anybody");
    first.wait(Some(PATIENCE)).unwrap();
    let b = owner.events().unwrap();
    let second = sender.notify(grant.ticket(), b"for both", Some(PATIENCE)).unwrap();
    assert_eq!(payload(expect(&a, "notification", 2.0)), "for both");
    assert_eq!(code(second.wait(Some(Duration::from_millis(100)))), Code::WaitTimeout);
    assert_eq!(payload(expect(&b, "notification", 2.0)), "for both");
    second.wait(Some(PATIENCE)).unwrap();
    // A user that goes holds nothing back; what the last one leaves waits for the next.
    let third = sender.notify(grant.ticket(), b"third", Some(PATIENCE)).unwrap();
    assert_eq!(payload(expect(&a, "notification", 2.0)), "third");
    drop(b);
    third.wait(Some(PATIENCE)).unwrap();
    let fourth = sender.notify(grant.ticket(), b"fourth", Some(PATIENCE)).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    drop(a);
    assert!(!fourth.is_done());
    assert_eq!(payload(expect(&owner.events().unwrap(), "notification", 2.0)), "fourth");
    fourth.wait(Some(PATIENCE)).unwrap();
}

/// Whether an engine has closed after an event of it was handed on. It waits for that no longer than a second, in which
/// who hands it on may stand still.
fn closes_after_its_event() -> bool {
    let owner = engine(Preference::Auto);
    let there = region(&owner, 1, 1);
    let events = owner.events().unwrap();
    owner.grant(&all(&there), many()).unwrap().revoke(PATIENCE).unwrap();
    let (began, handing) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let event = events.next_to_hand_on(PATIENCE).unwrap();
        began.send(()).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        // Whoever closes the engine may go on before this thread does, once the event is gone.
        let done = Instant::now();
        drop(event);
        assert_eq!(code(events.next_to_hand_on(PATIENCE)), Code::EngineClosed);
        done
    });
    handing.recv_timeout(PATIENCE).unwrap();
    let began = Instant::now();
    owner.close(PATIENCE).unwrap();
    let closed = Instant::now();
    let in_time = thread.join().unwrap() <= closed;
    assert!(in_time || closed - began >= Duration::from_secs(1), "closed while an event was being handed on");
    in_time
}

#[test]
fn closing_waits_for_whoever_hands_an_event_on_and_not_for_itself() {
    assert!((0..5).any(|_| closes_after_its_event()), "whoever handed an event on stood still each time");

    let owner = engine(Preference::Auto);
    let there = region(&owner, 1, 1);
    let events = owner.events().unwrap();
    owner.grant(&all(&there), many()).unwrap().revoke(PATIENCE).unwrap();
    assert!(events.next_to_hand_on(PATIENCE).unwrap().is_some());
    let began = watch::start();
    owner.close(PATIENCE).unwrap();
    assert!(began.elapsed() < Duration::from_millis(800), "{:?}", began.elapsed());
}
