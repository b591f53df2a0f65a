//! Finding what an object store holds: by the names and the ends of its objects, and in the background.
//!
//! All ends are read before the owner hears of a block, so that no block is served that a later object removes.

use super::batch::{self, Contents, Read};
use super::load::Fault;
use super::state::{Object, Shared, Stage, count, number_in};
use super::upload::LIMIT;
use crate::log::format::What;
use crate::tier::Found;
use crate::{BlockKey, NamespaceId};
use futures_util::StreamExt;
use kvik_core::{Code, Error, Result};
use object_store::ObjectStoreExt;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

/// Bytes of an object's end that are read at once: the list of 700 blocks.
const END: u64 = 64 << 10;
/// A larger object is none of ours.
const LARGEST: u64 = 2 << 30;
/// Ends that are read at a time.
const AT_ONCE: usize = 8;
/// Names that a store lists by one request.
const LISTED_AT_ONCE: u64 = 1000;
/// How long it is until opening is tried again.
const AGAIN: Duration = Duration::from_millis(500);

/// The objects that were listed, with their sizes, and the ends that were read.
#[derive(Default)]
struct Ends {
    listed: Option<BTreeMap<u32, u64>>,
    read: BTreeMap<u32, Contents>,
}

impl Shared {
    /// Finds what is there, however long the store is away; false where the tier was closed before.
    pub async fn open(&self) -> bool {
        let mut ends = Ends::default();
        while !self.state().closed {
            if self.breaker.admit() {
                match self.try_to_open(&mut ends).await {
                    Ok(()) => {
                        self.breaker.answered();
                        self.tell(ends);
                        return true;
                    }
                    Err(error) => log::debug!("{error}"),
                }
            }
            self.rest(Some(self.breaker.closed_for().unwrap_or(AGAIN))).await;
        }
        false
    }

    async fn try_to_open(&self, ends: &mut Ends) -> Result<()> {
        let listed = match &mut ends.listed {
            Some(listed) => listed,
            none => {
                self.claim().await?;
                let listed = self.list().await?;
                let mut state = self.state();
                state.next_number = listed.last_key_value().map_or(1, |(number, _)| number.saturating_add(1));
                state.stage = Stage::Reading;
                drop(state);
                self.progress.notify_all();
                none.insert(listed)
            }
        };
        let read = &mut ends.read;
        let left: Vec<(u32, u64)> = listed
            .iter()
            .filter(|(number, _)| !read.contains_key(number))
            .map(|(n, size)| (*n, *size))
            .collect();
        let one = |(number, size)| async move { (number, read_end(self, number, size).await) };
        let mut reads = futures_util::stream::iter(left).map(one).buffer_unordered(AT_ONCE);
        while let Some((number, end)) = reads.next().await {
            match end? {
                Read::Contents(contents) => drop(read.insert(number, contents)),
                Read::From(_) => {}
                Read::Damaged(why) => {
                    count(&self.counters.quarantined, 1);
                    listed.remove(&number);
                    log::warn!(
                        "object {} at {} is left as it is, and not used: {why}; remove it if nobody misses it",
                        self.path(number),
                        self.name
                    );
                }
            }
        }
        Ok(())
    }

    /// The objects that are there, with their sizes.
    async fn list(&self) -> Result<BTreeMap<u32, u64>> {
        let prefix = (!self.prefix.as_ref().is_empty()).then_some(&self.prefix);
        let (mut stream, mut found, mut seen) = (self.store.list(prefix), BTreeMap::new(), 0);
        loop {
            if seen % LISTED_AT_ONCE == 0 {
                count(&self.counters.lists, 1);
            }
            seen += 1;
            match tokio::time::timeout(LIMIT, stream.next()).await {
                Ok(Some(Ok(meta))) => {
                    let number =
                        number_in(&meta.location).filter(|number| self.path(*number) == meta.location);
                    found.extend(number.map(|number| (number, meta.size)));
                }
                Ok(None) => return Ok(found),
                Ok(Some(Err(error))) => return Err(self.failed("listing objects", &error)),
                Err(late) => return Err(self.failed("listing objects", &late)),
            }
        }
    }

    /// Tells the owner of every block that no later record removes.
    fn tell(&self, ends: Ends) {
        let sizes = ends.listed.unwrap_or_default();
        let removals = Removals::of(&ends.read);
        for (number, contents) in &ends.read {
            let live = |(at, (_, what)): &(usize, &(_, What))| match what {
                What::Block(identity) => !removals.void((*number, *at), &identity.key, &identity.namespace),
                _ => false,
            };
            let records = || contents.records.iter().enumerate().filter(live);
            let removals =
                contents.records.iter().filter(|(_, what)| !matches!(what, What::Block(_))).count();
            let object = Object {
                seed: contents.seed,
                size: sizes.get(number).copied().unwrap_or_default(),
                live: records().count() as u32,
                removals: removals as u32,
            };
            let mut state = self.state();
            state.bytes += object.size;
            state.objects.insert(*number, object);
            drop(state);
            let mut told = HashSet::new();
            for (_, (place, what)) in records() {
                let What::Block(identity) = what else { continue };
                if told.insert(identity.namespace) {
                    let meaning = contents.namespaces.iter().find(|(id, _)| *id == identity.namespace);
                    meaning.iter().for_each(|(id, meaning)| self.owner.found(Found::Namespace(*id, meaning)));
                }
                self.owner.found(Found::Block(*identity, *place));
            }
        }
        log::info!("the object store at {} has {} objects", self.name, ends.read.len());
        self.state().stage = Stage::Open;
        self.progress.notify_all();
    }
}

/// Where a record is: its object, and which of its records it is.
type At = (u32, usize);

/// The last removal of each key and namespace.
#[derive(Default)]
struct Removals {
    keys: HashMap<BlockKey, At>,
    namespaces: HashMap<NamespaceId, At>,
}

impl Removals {
    fn of(ends: &BTreeMap<u32, Contents>) -> Removals {
        let mut removals = Removals::default();
        for (number, contents) in ends {
            for (at, (_, what)) in contents.records.iter().enumerate() {
                match what {
                    What::Removed(key) => drop(removals.keys.insert(*key, (*number, at))),
                    What::NamespaceRemoved(id) => drop(removals.namespaces.insert(*id, (*number, at))),
                    _ => {}
                }
            }
        }
        removals
    }

    /// Whether a block was removed after it was stored.
    fn void(&self, at: At, key: &BlockKey, namespace: &NamespaceId) -> bool {
        let later = |removal: Option<&At>| removal.is_some_and(|removal| *removal > at);
        later(self.keys.get(key)) || later(self.namespaces.get(namespace))
    }
}

/// Reads what the end of an object says.
///
/// # Errors
/// `StorageFailed` where the store does not answer.
pub(super) async fn read_end(shared: &Shared, number: u32, size: u64) -> Result<Read> {
    // Of an empty one no range can be asked for: what refuses that is no store that fails.
    if size == 0 || size > LARGEST {
        return Ok(Read::Damaged("it is empty, or larger than what kvik writes"));
    }
    let (path, mut from) = (shared.path(number), size.saturating_sub(END));
    loop {
        count(&shared.counters.gets, 1);
        let read = shared.store.get_range(&path, from..size);
        let tail = match tokio::time::timeout(LIMIT, read).await {
            Ok(Ok(tail)) => tail,
            Ok(Err(object_store::Error::NotFound { .. })) => {
                return Ok(Read::Damaged("it is not there any more"));
            }
            Ok(Err(error)) => {
                let by = tokio::time::Instant::now() + shared.options.patience;
                return match shared.fault_of(number, size, &error, by).await {
                    Some(Fault::Changed) => Ok(Read::Damaged("it is not as long any more as it was")),
                    Some(Fault::Refused) => Ok(Read::Damaged("reading it is refused")),
                    None => Err(shared.failed("reading the end of an object", &error)),
                };
            }
            Err(late) => return Err(shared.failed("reading the end of an object", &late)),
        };
        count(&shared.counters.received, tail.len() as u64);
        if tail.len() as u64 != size - from {
            return Ok(Read::Damaged("less of it came than was asked for"));
        }
        match batch::read(number, size, &tail) {
            Read::From(earlier) if earlier < from => from = earlier,
            Read::From(_) => return Err(Error::new(Code::StorageFailed, "an end names no beginning")),
            read => return Ok(read),
        }
    }
}
