//! Segments of a store's log: they come from a disk, which may be damaged, or from whoever wrote to it.

use crate::most_held;
use kvik_core::page_sum;
use kvik_host::{HugePages, Memory};
use kvik_store::{Files, Found, Identity, Log, LogFile, LogOptions, MemoryRange, Place, Tier, TierOwner};
use std::io;
use std::sync::{Arc, Mutex};

/// One file, which may only be read.
struct OneFile(Arc<[u8]>);

impl Files for OneFile {
    fn name(&self) -> String {
        "memory".into()
    }
    fn read_only(&self) -> bool {
        true
    }
    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        Ok(vec![("0000000000.kvik".into(), self.0.len() as u64)])
    }
    fn create(&self, _: &str) -> io::Result<Arc<dyn LogFile>> {
        panic!("a log that may only be read makes a file")
    }
    fn open(&self, _: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(Arc::new(OneFile(self.0.clone())))
    }
    fn remove(&self, _: &str) -> io::Result<()> {
        panic!("a log that may only be read removes a file")
    }
    fn sync(&self) -> io::Result<()> {
        panic!("a log that may only be read syncs")
    }
}

impl LogFile for OneFile {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.len() as u64)
    }
    fn allocate(&self, _: u64) -> io::Result<()> {
        panic!("a log that may only be read takes room")
    }
    fn truncate(&self, _: u64) -> io::Result<()> {
        panic!("a log that may only be read cuts a file off")
    }
    fn write(&self, _: u64, _: &[u8], _: Option<MemoryRange<'_>>) -> io::Result<()> {
        panic!("a log that may only be read writes")
    }
    fn read(&self, offset: u64, head: &mut [u8], body: Option<MemoryRange<'_>>) -> io::Result<usize> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let there = self.0.get(from..).unwrap_or_default();
        let first = there.len().min(head.len());
        head[..first].copy_from_slice(&there[..first]);
        let Some((memory, at, len)) = body else { return Ok(first) };
        let rest = &there[first..];
        let len = len.min(rest.len());
        memory.copy_in(at, &rest[..len]).map_err(io::Error::other)?;
        Ok(first + len)
    }
    fn sync(&self) -> io::Result<()> {
        panic!("a log that may only be read syncs")
    }
}

#[derive(Default)]
struct Owner(Mutex<Vec<(Identity, Place)>>);

impl TierOwner for Owner {
    fn found(&self, found: Found<'_>) {
        if let (Found::Block(identity, place), Ok(mut blocks)) = (found, self.0.lock()) {
            blocks.push((identity, place));
        }
    }
    fn keep(&self, _: &Identity, _: Place) -> bool {
        false
    }
    fn moved(&self, _: &Identity, _: Place, _: Place) {}
    fn dropped(&self, _: &Identity, _: Place) {}
    fn gone(&self, _: Place, _: Place) {}
}

/// Sums over what is there, so that what lies behind them is decoded too.
fn honest(bytes: &mut [u8]) {
    if bytes.len() < 128 {
        return;
    }
    let seed = bytes[24..40].to_vec();
    let heads: Vec<usize> =
        (64..bytes.len()).step_by(64).filter(|at| bytes[*at..].starts_with(b"KREC")).collect();
    for at in heads {
        let Some(len) = bytes.get(at + 6..at + 8) else { continue };
        let len = 8 * usize::from(u16::from_le_bytes([len[0], len[1]]));
        let Some(head) = bytes.get_mut(at..at + len).filter(|head| head.len() >= 144) else { continue };
        let sum = page_sum(&[&seed, &head[..136], &head[144..]].concat());
        head[136..144].copy_from_slice(&sum.to_le_bytes());
    }
    let edges = [0, bytes.len().saturating_sub(64)];
    if let Some(at) = bytes.get(edges[1] + 40..edges[1] + 48) {
        let footer =
            usize::try_from(u64::from_le_bytes(at.try_into().unwrap_or_default())).unwrap_or(usize::MAX);
        let sum = page_sum(bytes.get(footer..edges[1]).unwrap_or_default());
        bytes[edges[1] + 48..edges[1] + 56].copy_from_slice(&sum.to_le_bytes());
    }
    for at in edges {
        let Some(edge) = bytes.get_mut(at..at + 64) else { continue };
        let sum = page_sum(&edge[..12]) as u32;
        edge[12..16].copy_from_slice(&sum.to_le_bytes());
        let sum = page_sum(&edge[..56]);
        edge[56..].copy_from_slice(&sum.to_le_bytes());
    }
}

/// A segment as it is, or behind honest sums. Whatever it is, opening ends, and what is loaded is what was expected.
pub fn segment(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    let mut bytes = data.to_vec();
    if mode % 2 == 1 {
        honest(&mut bytes);
    }
    let len = bytes.len();
    let (files, owner) = (Box::new(OneFile(bytes.into())), Arc::new(Owner::default()));
    let (log, held) = most_held(|| Log::open_on(files, LogOptions::new(1 << 20), owner.clone()));
    assert!(held <= 16 * len + (64 << 10), "{held} bytes for a segment of {len}");
    let Ok(log) = log else { return };
    let blocks = owner.0.lock().map(|blocks| blocks.clone()).unwrap_or_default();
    for (identity, place) in blocks {
        if identity.shape.bytes() > len as u64 {
            continue;
        }
        let Ok(memory) = Memory::shared(identity.shape.bytes() as usize, HugePages::Never) else { return };
        if let Ok(loaded) = log.load(place, &identity, &memory, 0) {
            assert_eq!(loaded.map(|sums| sums.len()), Some(identity.shape.sums()));
        }
    }
}
