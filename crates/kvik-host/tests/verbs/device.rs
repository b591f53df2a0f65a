//! Ports, GIDs, events, and what is left behind.

use super::{LIMIT, PAGE, all_are, connected, devices, names, pair, port, verbs};
use kvik_host::event::{Epoll, Events};
use kvik_host::verbs::{Device, Event, Link, PortState, Posted, Queue, RmaOp, Verbs};
use std::rc::Rc;
use std::time::{Duration, Instant};

#[test]
fn the_library_says_where_it_came_from_and_lists_what_there_is() {
    let verbs = Verbs::load(None).unwrap();
    assert!(verbs.path().is_absolute() && verbs.path().exists(), "{}", verbs.path().display());
    // None, on most hosts that build this.
    for port in verbs.ports().unwrap().ports {
        assert!(!port.device.is_empty() && port.number > 0 && port.mtu >= 256, "{port:?}");
    }
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn a_port_says_what_it_is() {
    let verbs = verbs();
    for name in names() {
        let port = port(&verbs, &name);
        assert_eq!((port.number, port.state), (1, PortState::Active), "{port:?}");
        assert!(port.longest >= 1 << 20 && !port.gids.is_empty(), "{port:?}");
        let gid = port.choose_gid(None).unwrap();
        if port.link == Link::Ethernet {
            assert!(gid.ip().is_ipv4() && !gid.interface.is_empty(), "{gid} of {port:?}");
        }
        let error = port.choose_gid(Some(200)).unwrap_err().to_string();
        assert!(error.contains(&name) && error.contains(&gid.to_string()), "{error}");
        assert!(Device::open(&verbs, &port, 200).is_err());
    }
}

/// Runs `ip link set`.
fn set_link(interface: &str, state: &str) {
    let ran = std::process::Command::new("ip").args(["link", "set", interface, state]).status().unwrap();
    assert!(ran.success(), "ip link set {interface} {state}: {ran}");
}

#[test]
#[ignore = "needs an RDMA device whose interface may go down: KVIK_TEST_VERBS_DOWN=rxe1"]
fn a_port_that_loses_its_link_is_an_event() {
    let name = std::env::var("KVIK_TEST_VERBS_DOWN").expect("KVIK_TEST_VERBS_DOWN names an RDMA device");
    loses_its_link(&name, set_link);
}

/// `set` takes the network interface of a port `down` or `up`.
pub fn loses_its_link(name: &str, mut set: impl FnMut(&str, &str)) {
    let verbs = verbs();
    let port = port(&verbs, name);
    let gid = port.choose_gid(None).unwrap();
    let device = Device::open(&verbs, &port, gid.index).unwrap();
    let epoll = Epoll::new().unwrap();
    device.watch_events(&epoll, 9).unwrap();
    let until = |wanted: Event| {
        let (mut told, mut events, began) = (Vec::new(), Events::new(4), Instant::now());
        while !told.contains(&wanted) {
            assert!(began.elapsed() < LIMIT, "never {wanted:?}, but {told:?}");
            epoll.wait(&mut events, LIMIT).unwrap();
            device.events(&mut told).unwrap();
        }
    };
    set(&gid.interface, "down");
    until(Event::PortDown { port: 1 });
    assert_eq!(self::port(&verbs, name).state, PortState::Down);
    set(&gid.interface, "up");
    until(Event::PortUp { port: 1 });
    assert_eq!(self::port(&verbs, name).state, PortState::Active);
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn any_gid_of_the_table_can_be_named() {
    let verbs = verbs();
    let port = port(&verbs, &names()[0]);
    assert!(port.gids.len() > 1, "one GID shows nothing: {port:?}");
    let depth = 4;
    let mut first = None;
    for gid in &port.gids {
        let device = Device::open(&verbs, &port, gid.index).unwrap();
        assert_eq!(device.gid(), gid);
        let (mut a, b) = connected(&(device.clone(), device.clone()), depth);
        assert_eq!(a.queue.address().gid, gid.raw);
        assert_eq!(a.gather(RmaOp::Write, &b.known, 0, PAGE, 0), Posted::Yes);
        a.queue.flush().unwrap();
        a.until_ended(1);
        assert!(a.ended()[0].1.is_ok() && all_are(&b.bytes()[..PAGE], 1), "{gid}: {:?}", a.done);
        // A peer of another kind or family is refused by name.
        let (address, ip) = first.get_or_insert((a.queue.address(), gid.ip()));
        if ip.is_ipv4() != gid.ip().is_ipv4() {
            let error = Queue::open(&device, depth).unwrap().connect(address).unwrap_err().to_string();
            assert!(error.contains(&ip.to_string()) && error.contains(&gid.ip().to_string()), "{error}");
        }
    }
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn a_descriptor_tells_of_completions() {
    let (mut a, b) = pair(16);
    let epoll = Epoll::new().unwrap();
    a.device.watch(&epoll, 5).unwrap();
    a.device.watch_events(&epoll, 6).unwrap();
    let mut events = Events::new(4);
    for round in 0..20 {
        assert!(a.device.may_wait().unwrap());
        epoll.wait(&mut events, Duration::ZERO).unwrap();
        assert!(events.is_empty(), "nothing has come: {events:?}");
        assert_eq!(a.gather(RmaOp::Write, &b.known, 0, PAGE, round), Posted::Yes);
        a.queue.flush().unwrap();
        // What came before it was asked for is there; else the descriptor tells.
        let began = Instant::now();
        while a.done.len() as u64 <= round {
            assert!(began.elapsed() < LIMIT, "no event told of the completion");
            if a.device.may_wait().unwrap() {
                epoll.wait(&mut events, LIMIT).unwrap();
                assert!(events.iter().all(|event| event.token == 5), "{events:?}");
            }
            a.poll();
        }
    }
}

#[test]
#[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
pub fn a_hundred_connections_leave_nothing_behind() {
    // In a process of its own, where other tests hold nothing.
    if std::env::var_os("KVIK_TEST_VERBS_ALONE").is_none() {
        let own = std::env::current_exe().unwrap();
        let name = "device::a_hundred_connections_leave_nothing_behind";
        let ran = std::process::Command::new(own)
            .args(["--exact", name, "--include-ignored", "--nocapture"])
            .env("KVIK_TEST_VERBS_ALONE", "1")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        assert!(ran.status.success() && said.contains("1 passed"), "{said}");
        return;
    }
    let devices = devices();
    let depth = 1000;
    let round = || {
        let (mut a, mut b) = connected(&devices, depth);
        assert_eq!(a.gather(RmaOp::Write, &b.known, 0, PAGE, 7), Posted::Yes);
        a.queue.flush().unwrap();
        a.until_ended(1);
        b.queue.fail().unwrap();
        b.until("drained", |side| side.queue.is_drained());
    };
    // Descriptors, and mappings that queue pairs have of the driver; of the stand-in, its memory and its pipes.
    let held = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let of_driver =
            maps.lines().filter(|line| ["uverbs", "memfd:standin"].iter().any(|of| line.contains(of)));
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|file| {
            let target = std::fs::read_link(file.unwrap().path()).ok()?;
            let target = target.to_string_lossy();
            ["uverbs", "memfd:standin", "pipe:"].iter().any(|of| target.contains(of)).then_some(())
        });
        (of_driver.count(), descriptors.count())
    };
    round();
    let before = held();
    // Were places of the completion queue not given back, there would soon be none left.
    for _ in 0..100 {
        round();
    }
    assert_eq!(held(), before);
    assert_eq!((Rc::strong_count(&devices.0), Rc::strong_count(&devices.1)), (1, 1));
}
