//! Everything that plain connections do is done under TLS.

use crate::certs::{self, Authority, config, engine};
use crate::common::*;
use kvik_core::Code;
use kvik_engine::{Config, Engine, Preference, TransferOptions, Verify};
use std::time::Duration;

fn pair() -> (Engine, Engine) {
    let authority = Authority::new();
    (engine(&authority.admit()), engine(&authority.admit()))
}

#[test]
fn reads_and_writes_of_any_pages_arrive() {
    let mut random = Random::new();
    let (owner, reader) = pair();
    let (there, here) = (region(&owner, 300, 1), region(&reader, 300, 2));
    let (grant, to_fill) =
        (owner.grant(&all(&there), many()).unwrap(), owner.grant(&all(&there), to_write()).unwrap());
    // Otherwise the first transfer may be over before the last channel has joined, and says so.
    reader.warm_up(grant.ticket(), Some(PATIENCE)).unwrap().wait(None).unwrap();
    for round in 0..6 {
        let count = 1 + random.below(250);
        let (theirs, mine) = (random.distinct(count, 300), random.distinct(count, 300));
        fill(&here, 10 + round);
        let remote = Some(theirs.clone().into());
        let report = if round % 2 == 0 {
            let read = reader.read(&pages(&here, &mine), grant.ticket(), remote, within(PATIENCE));
            read.unwrap().wait(Some(PATIENCE)).unwrap()
        } else {
            let write = reader.write(&pages(&here, &mine), to_fill.ticket(), remote, within(PATIENCE));
            write.unwrap().wait(Some(PATIENCE)).unwrap()
        };
        check(&there, &theirs, &here, &mine);
        assert_eq!((report.transport.name(), report.mechanism.as_str()), ("tcp", "4 channels, tls"));
        assert!(report.checks.contains(&"page_checksum"), "{:?}", report.checks);
    }
    let told = reader.explain(grant.ticket()).unwrap();
    assert_eq!((told.transport.name(), told.mechanism.as_str()), ("tcp", "4 channels, tls"));
}

#[test]
fn much_goes_both_ways_at_once_over_both_families() {
    let authority = Authority::new();
    for address in ["127.0.0.1:0", "[::1]:0"] {
        let listening = |directory: &certs::Directory| {
            Engine::start(Config { listen: vec![address.parse().unwrap()], ..config(directory) })
        };
        let (one, other) = match (listening(&authority.admit()), listening(&authority.admit())) {
            (Ok(one), Ok(other)) => (one, other),
            (Err(error), _) | (_, Err(error)) => {
                println!("not run: {address} cannot be listened on ({error})");
                continue;
            }
        };
        let (a, b) = (region(&one, 512, 1), region(&other, 512, 2));
        let (from_a, into_a) = (region(&one, 512, 3), region(&one, 512, 4));
        let (read, write) =
            (one.grant(&all(&from_a), many()).unwrap(), one.grant(&all(&into_a), to_write()).unwrap());
        let full = || TransferOptions { verify: Some(Verify::Full), ..within(PATIENCE) };
        let (back, c) = (other.grant(&all(&b), many()).unwrap(), region(&other, 512, 5));
        let transfers = [
            other.read(&all(&c), read.ticket(), None, full()).unwrap(),
            other.write(&all(&b), write.ticket(), None, full()).unwrap(),
            one.read(&all(&a), back.ticket(), None, full()).unwrap(),
        ];
        for transfer in transfers {
            assert_eq!(transfer.wait(Some(PATIENCE)).unwrap().bytes, 512 * PAGE);
        }
        assert!(bytes(&c) == bytes(&from_a) && bytes(&into_a) == bytes(&b) && bytes(&a) == bytes(&b));
    }
}

#[test]
fn beyond_loopback_tls_is_enough_and_with_a_secret_both_are_checked() {
    let authority = Authority::new();
    let open = |secret: Option<&str>| {
        let directory = authority.admit();
        let secret = secret.map(|secret| secret.as_bytes().to_vec());
        let (listen, advertise) = (vec!["0.0.0.0:0".parse().unwrap()], vec!["127.0.0.1".to_owned()]);
        Engine::start(Config { listen, advertise, secret, ..config(&directory) }).unwrap()
    };
    let cases = [
        (None, None, None),
        (Some("one secret"), Some("one secret"), None),
        (Some("one secret"), Some("another secret"), Some(Code::SecretMismatch)),
        (Some("one secret"), None, Some(Code::SecretRequired)),
    ];
    for (theirs, mine, expected) in cases {
        let (owner, reader) = (open(theirs), open(mine));
        let (there, here) = (region(&owner, 4, 1), region(&reader, 4, 2));
        let grant = owner.grant(&all(&there), many()).unwrap();
        let got = read(&reader, &all(&here), grant.ticket());
        assert_eq!(got.err().map(|error| error.code), expected, "{theirs:?} and {mine:?}");
        assert_eq!(bytes(&there) == bytes(&here), expected.is_none());
    }
}

#[test]
fn within_a_host_pages_still_go_from_memory_to_memory() {
    let authority = Authority::new();
    let start =
        || Engine::start(Config { transport: Preference::Auto, ..config(&authority.admit()) }).unwrap();
    let (owner, reader) = (start(), start());
    let (there, here) = (region(&owner, 8, 1), region(&reader, 8, 2));
    let grant = owner.grant(&all(&there), many()).unwrap();
    assert_eq!(read(&reader, &all(&here), grant.ticket()).unwrap().transport.name(), "local");
    assert!(bytes(&there) == bytes(&here));
}

#[test]
fn a_peer_that_ends_is_lost_at_once_and_a_cancelled_transfer_leaves_its_pages() {
    let (owner, reader) = pair();
    let (there, here) = (region(&owner, 4096, 1), region(&reader, 4096, 2));
    let grant = owner.grant(&all(&there), many()).unwrap();
    // It may be through before it is cancelled.
    let cancelled = (0..20).find_map(|_| {
        let transfer = reader.read(&all(&here), grant.ticket(), None, within(PATIENCE)).unwrap();
        transfer.cancel();
        transfer.wait(Some(PATIENCE)).err()
    });
    assert_eq!(cancelled.expect("one that was cancelled").code, Code::Cancelled);
    blank(&here, 7);
    std::thread::sleep(Duration::from_millis(200));
    assert!(bytes(&here).iter().all(|byte| *byte == 7), "a byte came after the end");

    read(&reader, &all(&here), grant.ticket()).unwrap();
    let transfer = reader.read(&all(&here), grant.ticket(), None, within(PATIENCE)).unwrap();
    let began = watch::start();
    owner.close(Duration::ZERO).ok();
    if let Err(error) = transfer.wait(Some(PATIENCE)) {
        assert!(matches!(error.code, Code::PeerLost | Code::GrantRevoked | Code::RegionClosed), "{error:?}");
    }
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}
