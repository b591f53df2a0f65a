//! Who does not get in, and what both sides are told.

use crate::certs::{self, Authority, Directory, config, engine};
use crate::common::*;
use kvik_core::{Code, Error};
use kvik_engine::{Config, Engine, Preference};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

fn plain() -> Engine {
    Engine::start(Config { transport: Preference::Tcp, ..Config::default() }).unwrap()
}

/// What the reader hears, soon, when it reads from the owner.
fn refused(owner: &Engine, reader: &Engine) -> Error {
    let (there, here) = (region(owner, 2, 1), region(reader, 2, 9));
    let grant = owner.grant(&all(&there), many()).unwrap();
    let began = watch::start();
    let error = read(reader, &all(&here), grant.ticket()).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(2), "{error} took {:?}", began.elapsed());
    assert!(bytes(&here) != bytes(&there));
    error
}

fn starting(directory: &Directory) -> String {
    let error = Engine::start(config(directory)).err().expect("it started");
    assert_eq!(error.code, Code::InvalidArgument, "{error}");
    assert!(error.text.contains(&directory.path().display().to_string()), "{error}");
    error.text
}

#[test]
fn one_side_without_tls_is_told_what_to_set_on_which_side() {
    let authority = Authority::new();
    let directory = authority.admit();
    let (secure, open) = (engine(&directory), plain());
    for (owner, reader) in [(&secure, &open), (&open, &secure)] {
        let error = refused(owner, reader);
        assert_eq!(error.code, Code::TlsRequired, "{error}");
        let address = owner.addresses()[0].to_string();
        assert!(error.text.contains("`tls`") && error.text.contains(&address), "{error}");
    }
    // Both hear of it where somebody looks who did not connect.
    for engine in [&secure, &open] {
        let refused = engine.metrics();
        let line = refused.lines().find(|line| line.starts_with("kvik_handshakes_refused_total{"));
        assert!(line.is_some_and(|line| line.contains("tls_required")), "{line:?}");
    }
}

#[test]
fn a_certificate_of_another_authority_is_refused_by_either_side() {
    a_certificate_is_refused(Authority::new(), Authority::new());
    // Whoever takes the authority's name has not its key.
    a_certificate_is_refused(Authority::named("the same"), Authority::named("the same"));
}

fn a_certificate_is_refused(ours: Authority, theirs: Authority) {
    let both = format!("{}{}", ours.pem(), theirs.pem());
    // The one that trusts both authorities connects, or is connected to: the other one refuses it either way.
    let strict = engine(&ours.admit());
    let lenient = theirs.admit();
    lenient.write("ca.crt", &both);
    let lenient = engine(&lenient);
    let error = refused(&strict, &lenient);
    assert_eq!(error.code, Code::TlsFailed, "{error}");
    assert!(error.text.contains("broke off") && error.text.contains("authority"), "{error}");
    let error = refused(&lenient, &strict);
    assert_eq!(error.code, Code::TlsFailed, "{error}");
    assert!(error.text.contains("ca.crt"), "{error}");
    assert!(error.text.contains(&lenient.addresses()[0].to_string()), "{error}");
    // Where both trust both, it is no matter which of them signed: a new authority can take over.
    let renewed = ours.admit();
    renewed.write("ca.crt", &both);
    let renewed = engine(&renewed);
    let (there, here) = (region(&renewed, 2, 1), region(&lenient, 2, 9));
    let grant = renewed.grant(&all(&there), many()).unwrap();
    read(&lenient, &all(&here), grant.ticket()).unwrap();
}

#[test]
fn files_that_cannot_be_used_are_named_at_the_start() {
    let authority = Authority::new();
    let cases: [(&str, Option<&str>, &str); 5] = [
        ("ca.crt", None, "cannot be read"),
        ("tls.crt", Some("no certificate"), "has no certificate"),
        ("tls.key", Some("no key"), "has no private key"),
        ("ca.crt", Some("-----BEGIN CERTIFICATE-----\n????\n-----END CERTIFICATE-----\n"), "damaged"),
        (
            "tls.crt",
            Some("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
            "no peer would admit",
        ),
    ];
    for (name, text, expected) in cases {
        let directory = authority.admit();
        match text {
            None => std::fs::remove_file(directory.path().join(name)).unwrap(),
            Some(text) => directory.write(name, text),
        }
        let error = starting(&directory);
        assert!(error.contains(name) && error.contains(expected), "{error}");
    }
    let directory = authority.admit();
    directory.write("tls.key", &std::fs::read_to_string(authority.admit().path().join("tls.key")).unwrap());
    let error = starting(&directory);
    assert!(error.contains("tls.key") && error.contains("not the key of"), "{error}");
}

#[test]
fn a_certificate_that_no_peer_would_admit_is_refused_at_the_start() {
    let (authority, other) = (Authority::new(), Authority::new());
    let cases = [
        (authority.admit_as(certs::expired), "expired"),
        (authority.admit_as(certs::not_yet), "clocks"),
        (authority.admit_as(certs::for_servers_only), "for servers and for clients"),
    ];
    for (directory, expected) in cases {
        let error = starting(&directory);
        assert!(error.contains("tls.crt") && error.contains(expected), "{error}");
    }
    let directory = authority.admit();
    directory.write("ca.crt", other.pem());
    assert!(starting(&directory).contains("authority"));
}

#[test]
fn strangers_are_cut_off_and_engines_are_served_meanwhile() {
    let authority = Authority::new();
    let (owner, reader) = (engine(&authority.admit()), engine(&authority.admit()));
    let address = owner.addresses()[0];
    let mut strangers: Vec<TcpStream> = (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (number, stranger) in strangers.iter_mut().enumerate() {
        let said: &[u8] = match number % 4 {
            0 => b"GET / HTTP/1.1\r\n\r\n",
            // A handshake record, and one of the greatest length, that say nothing.
            1 => &[0x16, 3, 1, 0, 4, 1, 0xff, 0xff, 0xff],
            2 => &[0x16, 3, 1, 0xff, 0xff],
            _ => &[0x16],
        };
        stranger.write_all(said).unwrap();
    }
    let (there, here) = (region(&owner, 64, 1), region(&reader, 64, 2));
    let grant = owner.grant(&all(&there), many()).unwrap();
    read(&reader, &all(&here), grant.ticket()).unwrap();
    for mut stranger in strangers {
        stranger.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut heard = Vec::new();
        // It ends: by its refusal, or by the time that a handshake may take.
        let ended = stranger.read_to_end(&mut heard);
        assert!(ended.is_ok() || ended.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset));
    }
}
