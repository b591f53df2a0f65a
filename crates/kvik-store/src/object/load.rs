//! Reading blocks: those that lie together by one request, and each compared with all that is known of it.

use super::state::{Object, Shared, count};
use crate::log::format::{Head, Seed, head_len};
use crate::log::load::{compare, difference};
use crate::log::place::position;
use crate::tier::{Identity, Place};
use kvik_core::{Code, Error, Result};
use kvik_host::Memory;
use object_store::{GetOptions, ObjectStore, ObjectStoreExt};
use std::ops::Range;
use std::sync::Arc;
use tokio::time::{Instant, timeout_at};

/// Bytes between two blocks that are read along with them: about what a store sends in the time of one request.
const GAP: u64 = 256 << 10;
/// Bytes that one request reads at most, unless one block has more.
const RUN: u64 = 8 << 20;

/// A block that is to be read, and where to.
pub(crate) struct Wanted {
    pub place: Place,
    pub identity: Identity,
    pub memory: Arc<Memory>,
    pub offset: usize,
}

/// The sums of a block that was read; `None` where it is there no longer, as its owner knows by now.
pub(crate) type Loaded = Result<Option<Box<[u64]>>>;

/// What is wrong with one object of a store that is well.
pub(super) enum Fault {
    /// It has another size than it had: ranges of it are refused, then.
    Changed,
    /// It is not given to this server, but others are: as one that was archived, or whose key is withdrawn.
    Refused,
}

impl Wanted {
    /// Where its record lies in its object.
    fn range(&self) -> Range<u64> {
        let (from, shape) = (position(self.place).1, &self.identity.shape);
        from..from + head_len(shape.bytes(), shape.sums()) as u64 + shape.bytes()
    }
}

/// Divides blocks into runs, each of which one request reads.
pub(crate) fn runs<T>(mut all: Vec<T>, wanted: impl Fn(&T) -> &Wanted) -> Vec<Vec<T>> {
    all.sort_by_key(|one| wanted(one).place);
    let mut runs: Vec<Vec<T>> = Vec::new();
    for one in all {
        let together = runs.last().and_then(|run| {
            let (first, last, next) = (wanted(run.first()?), wanted(run.last()?), wanted(&one));
            let same = position(first.place).0 == position(next.place).0;
            let near = next.range().start <= last.range().end + GAP;
            Some(same && near && next.range().end - first.range().start <= RUN)
        });
        match runs.last_mut() {
            Some(run) if together == Some(true) => run.push(one),
            _ => runs.push(vec![one]),
        }
    }
    runs
}

impl Shared {
    /// Reads a run; what became of each block.
    pub async fn load_run(&self, run: &[&Wanted]) -> Vec<Loaded> {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { return Vec::new() };
        let number = position(first.place).0;
        let object = {
            let state = self.state();
            if let Some((seed, bytes)) = state.buffered(number) {
                return run.iter().map(|one| self.take(one, &seed, bytes, 0)).collect();
            }
            state.objects.get(&number).copied()
        };
        let Some(Object { seed, size, .. }) = object else { return self.gone(run) };
        let range = first.range().start..last.range().end.min(size);
        let bytes = match self.read((number, size), range.clone()).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => {
                let removed = self.state().objects.remove(&number).map_or(0, |object| object.size);
                let mut state = self.state();
                state.bytes = state.bytes.saturating_sub(removed);
                drop(state);
                return self.gone(run);
            }
            Err(error) => return run.iter().map(|_| Err(error.clone())).collect(),
        };
        run.iter().map(|one| self.take(one, &seed, &bytes, range.start)).collect()
    }

    /// Blocks whose object is not there.
    fn gone(&self, run: &[&Wanted]) -> Vec<Loaded> {
        run.iter().for_each(|one| self.owner.dropped(&one.identity, one.place));
        run.iter().map(|_| Ok(None)).collect()
    }

    /// Reads a range of an object; `None` where there is no such object, or none of that size.
    async fn read(&self, (number, size): (u32, u64), range: Range<u64>) -> Result<Option<bytes::Bytes>> {
        if !self.breaker.admit() {
            let text = format!("the object store at {} did not answer lately", self.name);
            return Err(Error::new(Code::StoreUnavailable, text));
        }
        count(&self.counters.gets, 1);
        let (path, options) =
            (self.path(number), GetOptions { range: Some(range.into()), ..Default::default() });
        let read = async { self.store.get_opts(&path, options).await?.bytes().await };
        let by = Instant::now() + self.options.patience;
        match timeout_at(by, read).await {
            Ok(Ok(bytes)) => {
                self.breaker.answered();
                count(&self.counters.received, bytes.len() as u64);
                Ok(Some(bytes))
            }
            Ok(Err(object_store::Error::NotFound { .. })) => {
                self.breaker.answered();
                Ok(None)
            }
            Ok(Err(error)) => match self.fault_of(number, size, &error, by).await {
                Some(Fault::Changed) => {
                    self.breaker.answered();
                    count(&self.counters.quarantined, 1);
                    Ok(None)
                }
                // It may be given again, as where only its key was away for a time.
                Some(Fault::Refused) => {
                    self.breaker.answered();
                    count(&self.counters.failures, 1);
                    let text = format!("reading object {number} at {} is refused: {error}", self.name);
                    Err(Error::new(Code::StorageFailed, text))
                }
                None => Err(self.failed("reading blocks", &error)),
            },
            Err(late) => Err(self.failed("reading blocks", &late)),
        }
    }

    /// What is wrong with an object whose reading has failed, where the store as such is well.
    pub async fn fault_of(
        &self,
        number: u32,
        size: u64,
        error: &object_store::Error,
        by: Instant,
    ) -> Option<Fault> {
        use object_store::Error::{PermissionDenied, Unauthenticated};
        let head = async |path| {
            count(&self.counters.gets, 1);
            timeout_at(by, self.store.head(&path)).await.ok()?.ok()
        };
        if !matches!(error, PermissionDenied { .. } | Unauthenticated { .. }) {
            return head(self.path(number)).await.filter(|meta| meta.size != size).map(|_| Fault::Changed);
        }
        // Whom it does not know any more it refuses all.
        head(self.owner_path()).await.map(|_| Fault::Refused)
    }

    /// Takes a block out of bytes of its object, which begin at `first`.
    fn take(&self, wanted: &Wanted, seed: &Seed, bytes: &[u8], first: u64) -> Loaded {
        let (number, offset) = position(wanted.place);
        let Range { start, end } = wanted.range();
        let shape = &wanted.identity.shape;
        let (from, to) = ((start - first) as usize, (end - first) as usize);
        let body = to - shape.bytes() as usize;
        let Some(record) = bytes.get(from..to) else {
            return Err(self.damaged(wanted, "it does not come whole"));
        };
        let head = Head::read(&record[..body - from], seed, number, offset);
        let head = head.map_err(|what| self.damaged(wanted, &format!("its {what}")))?;
        if let Some(what) = difference(&head.what, &wanted.identity) {
            return Err(self.damaged(wanted, &what));
        }
        let failed = |error: kvik_host::HostError| Error::new(Code::InvalidArgument, error.to_string());
        let into = (&*wanted.memory, wanted.offset, shape.bytes() as usize);
        wanted.memory.copy_in(wanted.offset, &bytes[body..to]).map_err(failed)?;
        match compare(into, shape, &head.sums).map_err(failed)? {
            None => {
                count(&self.counters.loaded, shape.bytes());
                Ok(Some(head.sums))
            }
            Some(part) => {
                let text = format!("part {part} of {} does not have its checksum", head.sums.len());
                Err(self.damaged(wanted, &text))
            }
        }
    }

    fn damaged(&self, wanted: &Wanted, what: &str) -> Error {
        count(&self.counters.quarantined, 1);
        let (number, offset) = position(wanted.place);
        let text = format!(
            "the record at byte {offset} of object {number} at {} is not the block that was stored: {what}. It is a \
             miss; where there are more, look who else writes there",
            self.name
        );
        Error::new(Code::ChecksumMismatch, text)
    }
}
