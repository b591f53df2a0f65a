//! What a NIC is told of a session that is over.

#[path = "../../../tests/standins/make.rs"]
#[allow(dead_code)]
mod make;
#[path = "unit/nobody.rs"]
mod nobody;
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
use kvik_transport::rma::Rma;
use kvik_transport::{
    Ended, Placement, Queue, RegionMemory, RmaPeers, Services, SessionEvents, Transport, WorkSource,
};
use nobody::Nobody;
use standin::Standin;
use std::sync::Arc;
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
        let mut options: kvik_transport::nics::NicOptions = "verbs:roce0".parse().unwrap();
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
