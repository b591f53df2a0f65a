//! Two sides in one thread, over a real connection.

use super::files::{Tls, TlsFiles};
use super::link::{OUT, TlsLink};
use kvik_core::Code;
use kvik_host::event::{Interest, wait_ready};
use kvik_host::socket::{TcpConn, TcpListener, TcpOptions};
use kvik_host::{Io, RecvRun, RunBuffer, SendRun};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::crypto::{CipherSuiteCommon, CryptoProvider, ring};
use rustls::{SupportedCipherSuite, Tls13CipherSuite};
use std::sync::LazyLock;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// What both sides have: one certificate that is its own authority's.
pub(crate) fn tls(provider: CryptoProvider) -> Tls {
    let directory =
        std::env::temp_dir().join(format!("kvik-tls-unit-{}-{:p}", std::process::id(), &provider));
    std::fs::create_dir_all(&directory).unwrap();
    let (authority, own) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root = params.self_signed(&authority).unwrap().pem();
    let issuer = Issuer::new(params, authority);
    let cert = CertificateParams::new(vec!["x".to_owned()]).unwrap().signed_by(&own, &issuer).unwrap();
    let files = TlsFiles::within(&directory);
    std::fs::write(&files.ca, root).unwrap();
    std::fs::write(&files.cert, cert.pem()).unwrap();
    std::fs::write(&files.key, own.serialize_pem()).unwrap();
    let tls = Tls::load_with(&files, provider);
    std::fs::remove_dir_all(&directory).unwrap();
    tls.unwrap()
}

pub(crate) struct Side {
    pub conn: TcpConn,
    pub link: TlsLink,
}

/// Two sides whose handshake is over.
pub(crate) fn pair(tls: &Tls) -> (Side, Side) {
    let listener = TcpListener::bind("127.0.0.1:0".parse().unwrap(), 1, &TcpOptions::default()).unwrap();
    let at = listener.local_addr().unwrap();
    let conn = TcpConn::connect_within(at, &TcpOptions::default(), PATIENCE).unwrap();
    wait_ready(&listener, Interest::READ, PATIENCE).unwrap();
    let (accepted, from) = listener.accept().unwrap().unwrap();
    let mut client = Side { link: TlsLink::client(tls, at).unwrap(), conn };
    let mut server = Side { link: TlsLink::server(tls, from).unwrap(), conn: accepted };
    client.link.flush(&client.conn).unwrap();
    while client.link.is_shaking() || server.link.is_shaking() {
        for side in [&mut server, &mut client] {
            wait_ready(&side.conn, Interest::READ, Duration::from_millis(20)).unwrap();
            assert_eq!(side.link.recv(&side.conn, &mut [0]).unwrap(), Io::Blocked);
        }
    }
    (client, server)
}

/// Sends `total` bytes of a pattern as far as they go, and takes them on the other side: what went.
fn carry(from: &mut Side, to: &mut Side, total: usize) -> usize {
    let (mut sent, mut got, mut into) = (0, 0, vec![0; 100_000]);
    let pattern: Vec<u8> = (0..100_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
    while got < total {
        if sent < total {
            let at = sent % pattern.len();
            let most = (pattern.len() - at).min(total - sent);
            match from.link.send(&from.conn, &pattern[at..at + most]).unwrap() {
                Io::Done(len) => sent += len,
                Io::Blocked => {}
                Io::Closed => panic!("closed"),
            }
        } else {
            from.link.flush(&from.conn).unwrap();
        }
        while let Io::Done(len) = to.link.recv(&to.conn, &mut into).unwrap() {
            for (i, byte) in into[..len].iter().enumerate() {
                assert_eq!(*byte, pattern[(got + i) % pattern.len()], "byte {}", got + i);
            }
            got += len;
        }
    }
    got
}

/// After 2^24 records, 256 GiB, a key of AES-GCM must not be used any more. Here it is worn out after a few.
#[test]
fn keys_are_renewed_before_they_are_worn_out() {
    let mut provider = ring::default_provider();
    provider.cipher_suites = SHORT_LIVED.iter().map(SupportedCipherSuite::Tls13).collect();
    let tls = tls(provider);
    let (mut one, mut other) = pair(&tls);
    for _ in 0..3 {
        assert_eq!(carry(&mut one, &mut other, 3 << 20), 3 << 20);
        // The side that has only received until now answers that it has new keys too.
        assert_eq!(carry(&mut other, &mut one, 1 << 20), 1 << 20);
    }
}

/// The suites whose keys are worn out after a few records. The library wants them for ever.
static SHORT_LIVED: LazyLock<Vec<Tls13CipherSuite>> = LazyLock::new(|| {
    let short_lived = |suite: &SupportedCipherSuite| {
        let suite = suite.tls13()?;
        let common = CipherSuiteCommon { confidentiality_limit: 20, ..suite.common };
        let Tls13CipherSuite { hkdf_provider, aead_alg, quic, .. } = *suite;
        Some(Tls13CipherSuite { common, hkdf_provider, aead_alg, quic })
    };
    ring::default_provider().cipher_suites.iter().filter_map(short_lived).collect()
});

#[test]
fn a_side_that_does_not_read_is_not_written_for() {
    let tls = tls(ring::default_provider());
    let (mut one, mut other) = pair(&tls);
    let page = vec![5u8; 1 << 20];
    let mut taken = 0;
    while let Io::Done(len) = one.link.send(&one.conn, &page).unwrap() {
        assert!(len <= OUT, "{len} bytes were taken at once");
        taken += len;
        assert!(taken < 64 << 20, "the socket never fills");
    }
    assert!(one.link.is_behind());
    for _ in 0..10 {
        assert_eq!(one.link.send(&one.conn, &page).unwrap(), Io::Blocked);
    }
    // All of it arrives, once it is read.
    let (mut got, mut into) = (0, vec![0; 1 << 20]);
    while got < taken {
        one.link.flush(&one.conn).unwrap();
        if let Io::Done(len) = other.link.recv(&other.conn, &mut into).unwrap() {
            assert!(into[..len].iter().all(|byte| *byte == 5));
            got += len;
        }
    }
    assert_eq!((got, one.link.is_behind()), (taken, false));
}

#[test]
fn batches_leave_what_has_no_room_for_later() {
    let tls = tls(ring::default_provider());
    let (mut one, mut other) = pair(&tls);
    let (a, b): (Vec<u8>, Vec<u8>) = ((0..100).collect(), (100..250).collect());
    let mut runs = RunBuffer::new(4);
    let mut batch = runs.begin_send();
    assert!(batch.push(SendRun::from(&a[..])) && batch.push(SendRun::from(&b[..])));
    assert_eq!(one.link.send_batch(&one.conn, &batch, &mut [0; 4096]).unwrap(), Io::Done(250));
    wait_ready(&other.conn, Interest::READ, PATIENCE).unwrap();
    let mut into = vec![0u8; 250];
    for (at, len) in [(0, 1), (1, 99), (100, 150)] {
        let (before, after) = into.split_at_mut(at + len / 2);
        let mut batch = runs.begin_recv();
        assert!(batch.push(RecvRun::from(&mut before[at..])));
        assert!(batch.push(RecvRun::from(&mut after[..len - len / 2])));
        assert_eq!(other.link.recv_batch(&other.conn, &mut batch).unwrap(), Io::Done(len));
        assert_eq!(other.link.has_input(), at + len < 250);
    }
    assert!(into.iter().copied().eq(0..250));
    assert_eq!(other.link.recv(&other.conn, &mut [0; 9]).unwrap(), Io::Blocked);
    assert!(!other.link.has_input());
}

#[test]
fn the_two_ends_know_the_same_and_no_other_connection_does() {
    let tls = tls(ring::default_provider());
    let ((one, other), (third, _)) = (pair(&tls), pair(&tls));
    assert_eq!(one.link.binding().unwrap(), other.link.binding().unwrap());
    assert_ne!(one.link.binding(), third.link.binding());
}

#[test]
fn an_end_with_or_without_notice_and_an_altered_record() {
    let tls = tls(ring::default_provider());
    for notice in [true, false] {
        let (mut one, mut other) = pair(&tls);
        one.link.send(&one.conn, b"last words").unwrap();
        if notice {
            one.link.close(&one.conn);
        }
        one.conn.shutdown_both().unwrap();
        let mut into = [0; 64];
        wait_ready(&other.conn, Interest::READ, PATIENCE).unwrap();
        assert_eq!(other.link.recv(&other.conn, &mut into).unwrap(), Io::Done(10));
        match other.link.recv(&other.conn, &mut into) {
            Ok(Io::Closed) => assert!(!notice),
            Err(error) => assert!(notice && error.code == Code::PeerLost, "{error:?}"),
            other => panic!("{other:?}"),
        }
    }
    let (mut one, mut other) = pair(&tls);
    // A whole record of nonsense.
    one.conn.send(&[0x17, 3, 3, 0, 40].into_iter().chain([9; 40]).collect::<Vec<u8>>()).unwrap();
    wait_ready(&other.conn, Interest::READ, PATIENCE).unwrap();
    let error = other.link.recv(&other.conn, &mut [0; 64]).unwrap_err();
    assert_eq!(error.code, Code::TlsFailed);
    assert!(error.text.contains("altered"), "{error}");
    // The other side hears of it.
    wait_ready(&one.conn, Interest::READ, PATIENCE).unwrap();
    assert_eq!(one.link.recv(&one.conn, &mut [0; 64]).unwrap_err().code, Code::TlsFailed);
}
