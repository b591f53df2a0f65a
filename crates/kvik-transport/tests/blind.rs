//! Threads that cannot wait any more: something in the process has closed the descriptor that they sleep on, as a program
//! does that closes all that it knows nothing of. All tests of this process are about its descriptors: one at a time.

#[path = "unit/nobody.rs"]
mod nobody;

use kvik_core::{Code, Error, Result};
use kvik_host::event::{EventFd, Interest, wait_ready};
use kvik_host::socket::{TcpConn, TcpListener, TcpOptions};
use kvik_host::thread::ThreadOptions;
use kvik_proto::{Batch, ChunkHeader, Claim, NicAnswer, NicCall, Nics, WorkId, WorkOutcome, WorkRequest};
use kvik_transport::tcp::{Tcp, TcpConfig};
use kvik_transport::{
    Ended, Placement, Queue, RegionMemory, RmaPeers, Services, SessionEvents, Transport, WorkSource,
};
use nobody::Nobody;
use std::collections::BTreeSet;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// What threads say of sessions: that one was heard of, or why one has lost a channel.
struct Sessions(Mutex<Sender<(u64, Option<Error>)>>);

impl SessionEvents for Sessions {
    fn heard(&self, session: u64) -> bool {
        self.0.lock().unwrap().send((session, None)).is_ok()
    }
    fn connect(&self, _: u64) {}
    fn broken(&self, session: u64, error: Error) {
        self.0.lock().unwrap().send((session, Some(error))).unwrap();
    }
    fn flush_local(&self) {}
    fn fenced(&self, _: u64) {}
}

fn services() -> (Services, Receiver<(u64, Option<Error>)>) {
    let (tell, told) = channel();
    (
        Services { sessions: Arc::new(Sessions(Mutex::new(tell))), ..Services::of(&Arc::new(Nobody(true))) },
        told,
    )
}

/// The sets that threads of this process sleep on.
fn sets() -> BTreeSet<RawFd> {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let sets = descriptors.filter(|path| {
        std::fs::read_link(path).is_ok_and(|what| what.as_os_str() == "anon_inode:[eventpoll]")
    });
    sets.map(|path| path.file_name().unwrap().to_str().unwrap().parse().unwrap()).collect()
}

/// Puts something else in the place of a set; who waits on it notices when it waits again.
fn take_away(set: RawFd) {
    // SAFETY: it is open, and not closed by this value.
    let mut taken = std::mem::ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(set) });
    rustix::io::dup2(EventFd::new().unwrap(), &mut taken).unwrap();
}

fn connected() -> (TcpConn, TcpConn) {
    let options = TcpOptions::default();
    let listener = TcpListener::bind("127.0.0.1:0".parse().unwrap(), 1, &options).unwrap();
    let mine = TcpConn::connect_within(listener.local_addr().unwrap(), &options, PATIENCE).unwrap();
    assert!(wait_ready(&listener, Interest::READ, PATIENCE).unwrap());
    (mine, listener.accept().unwrap().unwrap().0)
}

#[test]
fn a_data_thread_that_cannot_wait_tells_its_sessions_and_leaves_new_channels_to_others() {
    let (services, told) = services();
    let before = sets();
    let config = TcpConfig { threads: 2, channels: 1, tls: false };
    let tcp = Tcp::start(config, &services, &ThreadOptions::default()).unwrap();
    let sets: Vec<RawFd> = sets().difference(&before).copied().collect();
    assert_eq!(sets.len(), 2);
    let add = |session| {
        let (mine, theirs) = connected();
        tcp.add_session(session, &kvik_proto::Facts::default());
        tcp.add(session, mine);
        (told.recv_timeout(PATIENCE).unwrap(), theirs)
    };
    // Each of the threads has one of these.
    let mut ends: Vec<_> = (0..2).map(add).collect();
    for (number, set) in sets.into_iter().enumerate() {
        take_away(set);
        tcp.wake(Queue::Send(0));
        // The first one's, and then all that there are.
        for _ in 0..=number {
            let (session, lost) = told.recv_timeout(PATIENCE).expect("somebody hears of it");
            let lost = lost.expect("it has lost its channel");
            assert!(lost.code == Code::PeerLost && lost.text.contains("cannot wait"), "{lost}");
            assert!(lost.text.contains("restart the process"), "{lost}");
            assert!(number == 1 || session == 0, "session {session} has lost the channel of another thread");
            assert!(wait_ready(&ends[session as usize].1, Interest::READ, PATIENCE).unwrap());
        }
        ends.push(add(ends.len() as u64));
    }
    let lost = ends.iter().map(|((_, lost), _)| lost.as_ref().map(|lost| lost.code));
    assert_eq!(lost.collect::<Vec<_>>(), [None, None, None, Some(Code::PeerLost)]);
    tcp.stop();
}
