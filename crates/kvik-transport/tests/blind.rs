//! Threads that cannot wait any more: something in the process has closed the descriptor that they sleep on, as a program
//! does that closes all that it knows nothing of. All tests of this process are about its descriptors: one at a time.

#[path = "../../../tests/standins/make.rs"]
#[allow(dead_code)]
mod make;
#[path = "unit/nobody.rs"]
mod nobody;
#[path = "../../../tests/common/sets.rs"]
mod sets;
#[path = "../../../tests/standins/standin.rs"]
#[allow(dead_code)]
mod standin;

use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::event::{Interest, wait_ready};
use kvik_host::socket::{TcpConn, TcpListener, TcpOptions};
use kvik_host::thread::ThreadOptions;
use kvik_host::{HugePages, Memory};
use kvik_proto::{
    Batch, ChunkHeader, Claim, NicAnswer, NicCall, NicCallKind, Nics, WorkId, WorkOutcome, WorkRequest,
};
use kvik_transport::nics::NicOptions;
use kvik_transport::rma::Rma;
use kvik_transport::tcp::{Tcp, TcpConfig};
use kvik_transport::{
    Ended, Placement, Queue, RegionMemory, RmaPeers, Services, SessionEvents, Transport, WorkSource,
};
use nobody::Nobody;
use sets::{sets, take_away};
use standin::Standin;
use std::os::fd::RawFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

/// What threads say of sessions: that one was heard of, or cut off, or why one has lost a channel or gets no connection.
struct Sessions(Mutex<Sender<(u64, Option<Error>)>>);

impl Sessions {
    fn say(&self, session: u64, why: Option<Error>) -> bool {
        self.0.lock().unwrap().send((session, why)).is_ok()
    }
}

impl SessionEvents for Sessions {
    fn heard(&self, session: u64) -> bool {
        self.say(session, None)
    }
    fn connect(&self, _: u64) {}
    fn broken(&self, session: u64, error: Error) {
        self.say(session, Some(error));
    }
    fn flush_local(&self) {}
    fn fenced(&self, session: u64) {
        self.say(session, None);
    }
}

impl RmaPeers for Sessions {
    fn nics(&self, _: u64) -> Option<Nics> {
        Some(Nics { provider: "libfabric:efa".into(), addresses: vec![vec![0; 32]; 2] })
    }
    fn moved(&self, _: Nics) {}
    fn call(&self, _: u64, _: NicCall) {}
    fn answer(&self, session: u64, answer: NicAnswer) {
        self.say(session, answer.outcome.err());
    }
    fn warm_up_done(&self, _: u64, _: usize, _: usize, _: Result<bool>) {}
}

fn services() -> (Services, Receiver<(u64, Option<Error>)>) {
    let (tell, told) = channel();
    let sessions = Arc::new(Sessions(Mutex::new(tell)));
    (Services { sessions: sessions.clone(), rma: sessions, ..Services::of(&Arc::new(Nobody(true))) }, told)
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

#[test]
fn nics_whose_thread_cannot_wait_are_out_of_use_by_name_and_still_cut_off_peers() {
    let name = "nics_whose_thread_cannot_wait_are_out_of_use_by_name_and_still_cut_off_peers";
    Standin::Fabric.alone(name, &[("KVIK_STANDIN_DEVICES", "2")], |_| {
        let ((services, told), before) = (services(), sets());
        let options =
            NicOptions { library: Some(Standin::Fabric.library()), ..("efa".parse::<NicOptions>().unwrap()) };
        let rma = Rma::start(&options, 1, &ThreadOptions::default()).unwrap();
        rma.serve(&services);
        sets().difference(&before).for_each(|set| take_away(*set));
        // It is woken once more.
        let memory = RegionMemory::from(Memory::shared(4096, HugePages::Never).unwrap());
        rma.register(RegionId(1), &memory, PATIENCE).unwrap();
        for to in 0..2 {
            let call = NicCall { from: 0, to, kind: NicCallKind::Connect, address: vec![0; 32] };
            rma.called(3, call);
            let (_, refused) = told.recv_timeout(PATIENCE).expect("somebody answers");
            let refused = refused.expect("it gives no connection");
            assert!(refused.text.contains("cannot wait"), "{refused}");
            assert!(!rma.devices()[usize::from(to)].is_up());
        }
        rma.fence(3);
        assert_eq!(told.recv_timeout(PATIENCE).expect("the peer is cut off"), (3, None));
        rma.stop();
    });
}
