//! Somebody who has no work, and whom nothing moves: the services of threads of a transport that are to do nothing.

use super::{
    Batch, ChunkHeader, Claim, Ended, Error, NicAnswer, NicCall, Nics, Placement, Queue, RegionMemory,
    Result, RmaPeers, SessionEvents, WorkId, WorkOutcome, WorkRequest, WorkSource,
};

/// With whether its session is there.
pub struct Nobody(pub bool);

impl WorkSource for Nobody {
    fn claim(&self, _: Queue, _: Claim) -> Option<WorkRequest<RegionMemory>> {
        None
    }
    fn claim_batch(&self, _: Queue, _: Claim, _: Batch, _: &mut Vec<WorkRequest<RegionMemory>>) {}
    fn done(&self, _: WorkId, _: WorkOutcome) {}
    fn batch_done(&self, _: &mut Vec<Ended>) {}
    fn stuck(&self, _: WorkId, _: Error) {}
    fn landed(&self, _: &mut WorkId) {}
}

impl Placement for Nobody {
    fn place(&self, _: u64, _: &ChunkHeader) -> Result<Option<WorkRequest<RegionMemory>>> {
        Ok(None)
    }
}

impl SessionEvents for Nobody {
    fn heard(&self, _: u64) -> bool {
        self.0
    }
    fn connect(&self, _: u64) {}
    fn broken(&self, _: u64, _: Error) {}
    fn flush_local(&self) {}
    fn fenced(&self, _: u64) {}
}

impl RmaPeers for Nobody {
    fn nics(&self, _: u64) -> Option<Nics> {
        None
    }
    fn moved(&self, _: Nics) {}
    fn call(&self, _: u64, _: NicCall) {}
    fn answer(&self, _: u64, _: NicAnswer) {}
    fn warm_up_done(&self, _: u64, _: usize, _: usize, _: Result<bool>) {}
}
