//! What a NIC is told that is not to be done: of a session that is over, of a NIC that its peer has not, or when it is of no use
//! itself.

#[path = "../../../tests/standins/make.rs"]
#[allow(dead_code)]
mod make;
#[path = "unit/nobody.rs"]
mod nobody;
#[path = "../../../tests/plugin/built.rs"]
#[allow(dead_code)]
mod plugins;
#[path = "../../../tests/standins/standin.rs"]
#[allow(dead_code)]
mod standin;

use kvik_core::{Error, RegionId, Result};
use kvik_host::thread::ThreadOptions;
use kvik_host::verbs::{self, Device, Verbs};
use kvik_host::{HugePages, Memory};
use kvik_proto::{
    Batch, ChunkHeader, Claim, NicAnswer, NicCall, NicCallKind, Nics, WorkId, WorkOutcome, WorkRequest,
};
use kvik_transport::nics::NicOptions;
use kvik_transport::rma::Rma;
use kvik_transport::{
    Ended, Placement, Queue, RegionMemory, RmaPeers, Services, SessionEvents, Transport, WorkSource,
};
use nobody::Nobody;
use standin::Standin;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);
const SESSION: u64 = 7;

/// Who carries the call to the NIC may be overtaken by who ends the session. Then the session's end has been here before,
/// and nobody would ever cut the peer off again.
#[test]
fn a_nic_that_calls_after_the_end_of_its_session_gets_no_connection() {
    let name = "a_nic_that_calls_after_the_end_of_its_session_gets_no_connection";
    Standin::Verbs.alone(name, &[("KVIK_STANDIN_DEVICES", "2")], |mut control| {
        let library = Standin::Verbs.library();
        let mut options: NicOptions = "verbs:roce0".parse().unwrap();
        options.library = Some(library.clone());
        let rma = Rma::start(&options, 1, &ThreadOptions::default()).unwrap();
        // All sessions of this engine have ended.
        rma.serve(&Services::of(&Arc::new(Nobody(false))));
        let verbs = Verbs::load(Some(&library)).unwrap();
        let port = verbs.ports().unwrap().ports.into_iter().find(|port| port.device == "roce1").unwrap();
        let device = Device::open(&verbs, &port, port.choose_gid(None).unwrap().index).unwrap();
        let theirs = verbs::Queue::open(&device, 16).unwrap();
        rma.end_session(SESSION);
        rma.fence(SESSION);
        let address = theirs.address().encode();
        rma.called(SESSION, NicCall { from: 0, to: 0, kind: NicCallKind::Connect, address });
        // It has heard of all that when it knows this.
        let memory = RegionMemory::from(Memory::shared(4096, HugePages::Never).unwrap());
        rma.register(RegionId(1), &memory, PATIENCE).unwrap();
        assert_eq!(control.counts()["queues"], 1, "there is one at the other end");
        rma.stop();
    });
}

/// A peer of one NIC: what it is answered, and how often the NICs here have moved.
struct Peer(Mutex<Sender<NicAnswer>>, Mutex<Sender<Nics>>);

impl RmaPeers for Peer {
    fn nics(&self, _: u64) -> Option<Nics> {
        Some(Nics { provider: "verbs:rc".into(), addresses: vec![vec![0; 16]] })
    }
    fn moved(&self, nics: Nics) {
        self.1.lock().unwrap().send(nics).unwrap();
    }
    fn call(&self, _: u64, _: NicCall) {}
    fn answer(&self, _: u64, answer: NicAnswer) {
        self.0.lock().unwrap().send(answer).unwrap();
    }
    fn warm_up_done(&self, _: u64, _: usize, _: usize, _: Result<bool>) {}
}

/// NICs that serve it, and are told this before.
fn served(options: &NicOptions, before: impl FnOnce(&Rma)) -> (Rma, Receiver<NicAnswer>, Receiver<Nics>) {
    let rma = Rma::start(options, 1, &ThreadOptions::default()).unwrap();
    before(&rma);
    let ((answer, answers), (tell, told)) = (channel(), channel());
    let peer = Arc::new(Peer(Mutex::new(answer), Mutex::new(tell)));
    rma.serve(&Services { rma: peer, ..Services::of(&Arc::new(Nobody(true))) });
    (rma, answers, told)
}

/// Calls of these NICs of a peer, and what each is answered; `before` is done to the NIC first.
fn called(
    test: &str,
    from: &[u8],
    before: impl FnOnce(&mut standin::Control),
    check: impl FnOnce(Vec<Result<Vec<u8>>>, u64),
) {
    Standin::Verbs.alone(test, &[("KVIK_STANDIN_DEVICES", "2")], |mut control| {
        let library = Standin::Verbs.library();
        let mut options: NicOptions = "verbs:roce0".parse().unwrap();
        options.library = Some(library.clone());
        let (rma, told, _moves) = served(&options, |_| {});
        let verbs = Verbs::load(Some(&library)).unwrap();
        let port = verbs.ports().unwrap().ports.into_iter().find(|port| port.device == "roce1").unwrap();
        let device = Device::open(&verbs, &port, port.choose_gid(None).unwrap().index).unwrap();
        let theirs = verbs::Queue::open(&device, 16).unwrap();
        before(&mut control);
        // It has had a turn since when it has taken this in and the next.
        for id in 1..=2 {
            let memory = RegionMemory::from(Memory::shared(4096, HugePages::Never).unwrap());
            rma.register(RegionId(id), &memory, PATIENCE).unwrap();
        }
        let answers = from.iter().map(|from| {
            let address = theirs.address().encode();
            rma.called(SESSION, NicCall { from: *from, to: 0, kind: NicCallKind::Connect, address });
            told.recv_timeout(PATIENCE).unwrap().outcome
        });
        check(answers.collect(), control.counts()["queues"] - 1);
        rma.stop();
    });
}

#[test]
fn a_peer_gets_no_connection_for_a_nic_that_it_has_not() {
    called(
        "a_peer_gets_no_connection_for_a_nic_that_it_has_not",
        &[0, 1, 127],
        |_| {},
        |answers, queues| {
            assert_eq!(answers.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, false]);
            let error = answers[2].as_ref().unwrap_err();
            assert!(error.text.contains("number 127") && error.text.contains("told of 1 NIC"), "{error}");
            assert_eq!(queues, 1);
        },
    );
}

#[test]
fn a_nic_that_is_of_no_use_any_more_gives_no_connection_and_says_why() {
    let blind = |control: &mut standin::Control| drop(control.say("blind device=0"));
    called(
        "a_nic_that_is_of_no_use_any_more_gives_no_connection_and_says_why",
        &[0],
        blind,
        |answers, queues| {
            let error = answers[0].as_ref().unwrap_err();
            assert!(error.text.contains("taking the completions of device roce0"), "{error}");
            assert_eq!(queues, 0);
        },
    );
}

#[test]
fn a_plug_in_whose_device_is_down_gives_no_connection_and_says_so() {
    let options =
        NicOptions { library: Some(plugins::broken("down")), ..("plugin:n0".parse::<NicOptions>().unwrap()) };
    let (rma, told, _moves) = served(&options, |_| {});
    let address = rma.nics().addresses.remove(0);
    rma.called(SESSION, NicCall { from: 0, to: 0, kind: NicCallKind::Connect, address });
    let error = told.recv_timeout(PATIENCE).unwrap().outcome.unwrap_err();
    assert!(error.text.contains("its device cannot be used now"), "{error}");
    rma.stop();
}

/// Each move costs all its other peers what they have in flight, and a second one in a row the transfers.
#[test]
fn a_nic_that_cuts_off_several_peers_at_once_moves_once() {
    let name = "a_nic_that_cuts_off_several_peers_at_once_moves_once";
    Standin::Fabric.alone(name, &[("KVIK_STANDIN_DEVICES", "1")], |_| {
        let options =
            NicOptions { library: Some(Standin::Fabric.library()), ..("efa".parse::<NicOptions>().unwrap()) };
        let (rma, _answers, moves) = served(&options, |rma| (1..=8).for_each(|session| rma.fence(session)));
        let told = moves.recv_timeout(PATIENCE).unwrap();
        rma.stop();
        assert_eq!(moves.try_iter().count(), 0, "it has moved again");
        assert_eq!(told.addresses.len(), 1);
    });
}
