//! A channel, step by step: in a directory of its own, as it is no test target but a module of `tcp::worker`.

use super::*;
use crate::tls::tests::{Side, pair, tls};
use crate::{Ended, Placement, Queue, RegionMemory, RmaPeers, SessionEvents};
use kvik_host::Io;
use kvik_host::event::wait_ready;
use kvik_proto::{Batch, ChunkHeader, NicAnswer, NicCall, Nics, WorkId, WorkOutcome, WorkRequest};
use nobody::Nobody;
use rustls::crypto::ring::default_provider;

#[path = "nobody.rs"]
mod nobody;

/// The last bytes of a chunk wait for room in the socket, and go while something of the peer is decrypted.
#[test]
fn a_channel_whose_last_bytes_went_as_it_read_sends_again() {
    let (ours, Side { conn, mut link }) = pair(&tls(default_provider()));
    let inbox = Inbox { waiting: Default::default(), waker: kvik_host::event::EventFd::new().unwrap() };
    let services = Services::of(&Arc::new(Nobody(true)));
    let mut worker = Worker::new(services.clone(), Arc::new(inbox)).unwrap();
    worker.add(1, Stream::tls(ours.conn, ours.link), Place::default());
    let mut channel = worker.channels.remove(&(STREAMS + 1)).unwrap();
    let mut step = |channel: &mut Channel, ready| {
        channel.ready = ready;
        channel.blocked = step(channel, &services, &mut worker.tools, &[Claim::Next]).unwrap();
    };
    while channel.stream.send(&[5; 64 << 10]).unwrap() != Io::Blocked {}
    step(&mut channel, [false, true]);
    assert!(channel.blocked && channel.stream.is_behind());
    let (mut taken, mut into) = (0, vec![0; 1 << 20]);
    while channel.stream.is_behind() {
        assert!(taken < 20, "what is left of 64 KiB has no room");
        // What came is read until there is room. A byte of a header is what the peer has to say.
        while !wait_ready(&channel.stream, Interest::WRITE, Duration::from_millis(10)).unwrap() {
            while let Io::Done(_) = link.recv(&conn, &mut into).unwrap() {}
        }
        assert_eq!(link.send(&conn, &[0]).unwrap(), Io::Done(1));
        assert!(wait_ready(&channel.stream, Interest::READ, Duration::from_secs(60)).unwrap());
        step(&mut channel, [true, false]);
        taken += 1;
    }
    step(&mut channel, [false, true]);
    assert!(!channel.blocked, "it waits for room that it does not need, and takes no work");
}
