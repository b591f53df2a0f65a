//! Copies of pages that another process may take back at any time.

use crate::devices::Broken;
use crate::from_host;
use crate::local::PeerRegion;
use kvik_core::{Code, Error, Result};
use kvik_host::{HostError, PeerFence};
use kvik_proto::Source;

/// Copies only what the peer still grants, and lets it count only if the peer granted it until the last byte: pages
/// that changed hands during the copy may have been read half before and half after. What a GPU does not come to the
/// end of counts for nothing anyway, and is handed on.
pub(crate) fn within_fence<T>(
    fence: &PeerFence,
    (source, region): (&Source, &PeerRegion),
    copy: impl FnOnce() -> Result<T, Broken>,
) -> Result<T, Broken> {
    check_fence(fence, source)?;
    match copy() {
        Err(left @ (Broken::Left | Broken::Stuck(_))) => Err(left),
        copied => {
            // A stale source may well be gone: that it was stale is the better reason.
            check_fence(fence, source)?;
            if let (Ok(_), PeerRegion::Process { process, .. }) = (&copied, region) {
                // Who has replaced its program has raised no fence.
                process.prove_again().map_err(replaced)?;
            }
            copied
        }
    }
}

fn replaced(error: HostError) -> Error {
    let text = format!("the peer's process ended, or began another program, while it was read: {error}");
    Error::new(Code::PeerLost, text)
}

/// Whether the source's pages still are what the peer granted.
fn check_fence(fence: &PeerFence, source: &Source) -> Result<()> {
    match fence.generation(source.slot) {
        Ok(generation) if generation == source.generation => Ok(()),
        Ok(_) => Err(Error::new(
            Code::StaleGeneration,
            "the grant ended while its pages were copied; what was copied is thrown away: ask for a new ticket",
        )),
        Err(error) => Err(from_host(Code::ProtocolError, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvik_core::{Layout, Order as Stream, RegionId, View};
    use kvik_host::{FenceTable, ProcessMemory};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU8, Ordering};

    /// A table of fences, and a source of pages under one of them.
    fn fenced() -> (Arc<FenceTable>, PeerFence, kvik_host::FenceSlot, Source) {
        let table = FenceTable::new(8).unwrap();
        let fence = PeerFence::map(table.fd().try_clone_to_owned().unwrap()).unwrap();
        let slot = table.slot().unwrap();
        let layout = Arc::new(Layout::contiguous(1, 4096).unwrap());
        let view = View::new(layout, [0].into(), 0..1, 0..1, Stream::LayerFirst).unwrap();
        let generation = slot.generation().unwrap();
        let source =
            Source { region: RegionId(1), view, slot: slot.index(), generation, keys: Arc::default() };
        (table, fence, slot, source)
    }

    /// What this process is proven by, as a peer that is read by the kernel.
    struct Nonce(Box<[AtomicU8; 32]>);

    impl Nonce {
        fn new() -> Nonce {
            Nonce(Box::new(std::array::from_fn(|at| AtomicU8::new(at as u8))))
        }

        fn region(&self) -> PeerRegion {
            let process = ProcessMemory::open(std::process::id()).unwrap();
            let nonce = self.0.each_ref().map(|byte| byte.load(Ordering::Relaxed));
            process.probe(self.0.as_ptr() as u64, &nonce).unwrap();
            PeerRegion::Process { process: Arc::new(process), addr: 0, len: 0 }
        }
    }

    /// What came of a copy that no GPU has in flight.
    fn error<T>(copied: Result<T, Broken>) -> Result<T> {
        copied.map_err(|broken| match broken {
            Broken::Failed(error) => error,
            Broken::Left | Broken::Stuck(_) => panic!("it was left"),
        })
    }

    #[test]
    fn a_source_whose_fence_was_raised_or_is_not_there_is_stale() {
        let (_table, fence, slot, source) = fenced();
        check_fence(&fence, &source).unwrap();
        slot.raise().unwrap();
        assert_eq!(check_fence(&fence, &source).unwrap_err().code, Code::StaleGeneration);
        let beyond = Source { slot: 8, ..source };
        assert_eq!(check_fence(&fence, &beyond).unwrap_err().code, Code::ProtocolError);
    }

    #[test]
    fn what_is_stale_already_is_not_copied_at_all() {
        let (_table, fence, slot, source) = fenced();
        let nonce = Nonce::new();
        slot.raise().unwrap();
        let stale = within_fence(&fence, (&source, &nonce.region()), || -> Result<(), Broken> {
            panic!("stale pages were copied")
        });
        assert_eq!(error(stale).unwrap_err().code, Code::StaleGeneration);
    }

    #[test]
    fn what_becomes_stale_during_the_copy_does_not_count() {
        for result in [Ok(7), Err(Error::new(Code::PeerLost, "the memory has gone"))] {
            let (_table, fence, slot, source) = fenced();
            let nonce = Nonce::new();
            let copied = || result.clone().map_err(Broken::from);
            assert_eq!(error(within_fence(&fence, (&source, &nonce.region()), copied)), result);
            let stale = within_fence(&fence, (&source, &nonce.region()), || {
                slot.raise().unwrap();
                copied()
            });
            assert_eq!(error(stale).unwrap_err().code, Code::StaleGeneration);
        }
    }

    #[test]
    fn what_a_process_read_of_another_program_of_its_peer_does_not_count() {
        let (_table, fence, _slot, source) = fenced();
        let nonce = Nonce::new();
        let region = nonce.region();
        let copied = within_fence(&fence, (&source, &region), || {
            nonce.0[31].store(0, Ordering::Relaxed);
            Ok(7)
        });
        assert_eq!(error(copied).unwrap_err().code, Code::PeerLost);
    }
}
