//! Where an engine listens, what its tickets say of it, and what others hear who cannot reach it.

use crate::common::*;
use kvik_core::{Code, HostTag};
use kvik_engine::{Config, Engine, Preference};
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

fn start(listen: &[&str], advertise: &[&str], secret: Option<&str>) -> Result<Engine, kvik_core::Error> {
    Engine::start(Config {
        listen: listen.iter().map(|text| kvik_engine::parse_listen(text).unwrap()).collect(),
        advertise: advertise.iter().map(|text| text.to_string()).collect(),
        secret: secret.map(|secret| secret.as_bytes().to_vec()),
        ..Config::default()
    })
}

#[test]
fn both_families_at_once_are_listened_on_and_advertised() {
    let owner = match start(&["127.0.0.1:0", "[::1]:0"], &[], None) {
        Ok(owner) => owner,
        Err(error) => return println!("not run: this machine has no IPv6 loopback ({error})"),
    };
    let reader = engine(Preference::Tcp);
    let (there, here) = (region(&owner, 4, 1), region(&reader, 4, 2));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let addresses = &grant.ticket().addresses;
    assert_eq!(addresses.len(), 2, "{addresses:?}");
    assert!(addresses.iter().all(|address| address.ip().is_loopback() && address.port() != 0));
    for address in addresses {
        let mut ticket = grant.ticket().clone();
        ticket.addresses = vec![*address];
        let reader = engine(Preference::Tcp);
        let here = region(&reader, 4, 2);
        read(&reader, &all(&here), &ticket).unwrap();
        check(&there, &[0, 1, 2, 3], &here, &[0, 1, 2, 3]);
    }
    // The second address is tried where the first one does not answer.
    let mut ticket = grant.ticket().clone();
    ticket.addresses.insert(0, closed_port());
    read(&reader, &all(&here), &ticket).unwrap();
}

#[test]
fn a_wildcard_is_never_put_into_a_ticket() {
    let owner = start(&["0.0.0.0:0"], &["127.0.0.1:1234"], Some("a long secret")).unwrap();
    assert_eq!(owner.addresses(), ["127.0.0.1:1234".parse().unwrap()]);
    for bad in ["0.0.0.0", "[::]:7", "127.0.0.1:0"] {
        let error = start(&["127.0.0.1:0"], &[bad], None).err().unwrap();
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.text.contains("advertise"), "{error}");
    }
}

#[test]
fn what_is_advertised_is_what_tickets_say() {
    let owner = start(&["127.0.0.1:0"], &["192.0.2.7", "192.0.2.8:999", "192.0.2.7"], None).unwrap();
    let first = owner.addresses()[0];
    assert_ne!(first.port(), 0);
    let second: SocketAddr = "192.0.2.8:999".parse().unwrap();
    assert_eq!(owner.addresses(), [SocketAddr::new("192.0.2.7".parse().unwrap(), first.port()), second]);
    let there = region(&owner, 1, 1);
    assert_eq!(owner.grant(&all(&there), many()).unwrap().ticket().addresses, owner.addresses());
}

#[test]
fn a_loopback_address_of_another_host_is_refused_and_the_option_named() {
    let (owner, reader) = (engine(Preference::Auto), engine(Preference::Auto));
    let (there, here) = (region(&owner, 1, 1), region(&reader, 1, 2));
    let mut ticket = owner.grant(&all(&there), many()).unwrap().ticket().clone();
    ticket.host = HostTag([7; 8]);
    let error = read(&reader, &all(&here), &ticket).unwrap_err();
    assert_eq!(error.code, Code::PeerUnreachable);
    assert!(error.text.contains("`listen`") && error.text.contains("127.0.0.1"), "{error}");
}

#[test]
fn listening_beyond_loopback_takes_a_secret() {
    let error = start(&["0.0.0.0:0"], &[], None).err().unwrap();
    assert_eq!(error.code, Code::SecretRequired);
    assert!(error.text.contains("secret") && error.text.contains("0.0.0.0"), "{error}");
}

#[test]
fn an_engine_that_is_not_there_is_unreachable_and_the_options_are_named() {
    let (owner, reader) = (engine(Preference::Auto), engine(Preference::Auto));
    let (there, here) = (region(&owner, 1, 1), region(&reader, 1, 2));
    let ticket = owner.grant(&all(&there), many()).unwrap().ticket().clone();
    let address = owner.addresses()[0].to_string();
    owner.close(PATIENCE).unwrap();
    let began = watch::start();
    let error = read(&reader, &all(&here), &ticket).unwrap_err();
    assert_eq!(error.code, Code::PeerUnreachable);
    for word in ["`listen`", "`advertise`", &address] {
        assert!(error.text.contains(word), "{error}");
    }
    assert!(began.elapsed() < Duration::from_secs(1));
}

/// An address of this host where nobody listens, and where no other test does.
pub fn closed_port() -> SocketAddr {
    TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap()
}
