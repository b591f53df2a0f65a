//! A workload of puts, removals and compaction, and what may be found after it was interrupted.

use crate::blocks::*;
use crate::owner::{Index, Known};
use kvik_store::{BlockKey, LogOptions, NamespaceId, Tier};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Keys of the workload.
pub const KEYS: u64 = 24;

/// Something that the workload did, or knows. Numbers stand for keys; a version is new with each put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It began to store a block.
    Puts(u64, u64),
    /// It began to remove a block.
    Removes(u64),
    /// It began to remove a namespace.
    RemovesAll(u64),
    /// What it began in the step of this number is durable.
    Durable(u64),
    /// The log dropped a block.
    Drops(u64),
}

impl Step {
    /// A line of text.
    pub fn to_line(self) -> String {
        match self {
            Step::Puts(key, version) => format!("puts {key} {version}"),
            Step::Removes(key) => format!("removes {key} 0"),
            Step::RemovesAll(namespace) => format!("removes_all {namespace} 0"),
            Step::Durable(step) => format!("durable {step} 0"),
            Step::Drops(key) => format!("drops {key} 0"),
        }
    }

    pub fn from_line(line: &str) -> Option<Step> {
        let mut words = line.split(' ');
        let word = words.next()?;
        let (a, b) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some(match word {
            "puts" => Step::Puts(a, b),
            "removes" => Step::Removes(a),
            "removes_all" => Step::RemovesAll(a),
            "durable" => Step::Durable(a),
            "drops" => Step::Drops(a),
            _ => return None,
        })
    }
}

/// Takes each step, in order, and numbers it.
pub trait Journal: Send + Sync {
    fn add(&self, step: Step) -> u64;
}

/// Small segments, so that there is a lot of compaction.
pub fn options() -> LogOptions {
    LogOptions { segment: Some(96 << 10), unsynced: 48 << 10, ..LogOptions::new(768 << 10) }
}

pub fn number_of(key: &BlockKey) -> u64 {
    (0..KEYS).find(|number| Block::key(*number) == *key).unwrap()
}

/// Bytes that are kept when room is made, a quarter of the log: so room can always be made, however badly blocks of up
/// to two thirds of a segment fit.
const KEPT: u64 = 192 << 10;

/// An index that keeps two of three blocks when room is made, the first ones up to [`KEPT`] bytes, and writes down what
/// is dropped.
pub fn index(journal: Arc<dyn Journal>) -> Arc<Index> {
    let wanted = |number: u64| number % 3 != 1;
    let keep = move |known: &Known, key: &BlockKey| {
        let number = number_of(key);
        let bytes = (0..=number)
            .filter(|number| wanted(*number))
            .filter_map(|number| known.blocks.get(&Block::key(number)))
            .map(|(identity, _)| identity.shape.bytes())
            .sum::<u64>();
        wanted(number) && bytes <= KEPT
    };
    Index::telling(keep, move |key| {
        journal.add(Step::Drops(number_of(key)));
    })
}

/// The shape of a version of a block.
pub fn shape_of(version: u64) -> kvik_store::Shape {
    shape(Rng(version).next())
}

/// Runs `steps` steps. Errors end it: the disk was told to fail, or is gone.
pub fn run(
    log: &dyn Tier,
    index: &Index,
    journal: &dyn Journal,
    mut rng: Rng,
    (steps, first_version): (u64, u64),
) -> kvik_core::Result<()> {
    let mut waiting = Vec::new();
    for version in first_version..first_version + steps {
        let number = rng.below(KEYS);
        match rng.below(24) {
            0 => {
                let namespace = rng.below(3);
                let id = crate::blocks::namespace(namespace);
                index.known().blocks.retain(|_, (identity, _)| identity.namespace != id);
                let step = journal.add(Step::RemovesAll(namespace));
                waiting.push((step, log.remove_namespace(&id, LONG)?));
            }
            1..=3 => {
                index.forget(&Block::key(number));
                let step = journal.add(Step::Removes(number));
                waiting.push((step, log.remove(&Block::key(number), LONG)?));
            }
            _ => {
                let block = Block::new(number, version, shape_of(version));
                index.forget(&Block::key(number));
                let step = journal.add(Step::Puts(number, version));
                let place = block.store(log)?;
                index.put(block.identity(), place);
                waiting.push((step, place));
            }
        }
        if rng.below(3) == 0 {
            let places: Vec<_> = waiting.iter().map(|(_, place)| *place).collect();
            log.sync(&places, LONG)?;
            for (step, _) in waiting.drain(..) {
                journal.add(Step::Durable(step));
            }
        }
    }
    Ok(())
}

/// What may be found of each key: versions, and nothing (`None`).
type Allowed = BTreeMap<u64, Vec<Option<u64>>>;

fn namespace_of(number: u64) -> u64 {
    Block::new(number, 0, shape(0)).namespace()
}

/// What may be found after these steps. A durable step settles its keys; later steps that are not durable may have
/// happened or not; a block that was dropped may be gone.
fn allowed(steps: &[Step]) -> Allowed {
    let durable: Vec<u64> =
        steps.iter().filter_map(|step| if let Step::Durable(n) = step { Some(*n) } else { None }).collect();
    let mut allowed: Allowed = (0..KEYS).map(|key| (key, vec![None])).collect();
    for (number, step) in steps.iter().enumerate() {
        let settled = durable.contains(&(number as u64));
        let mut add = |key: u64, what: Option<u64>| {
            let found = allowed.entry(key).or_default();
            if settled {
                found.clear();
            }
            found.push(what);
        };
        match step {
            Step::Puts(key, version) => {
                add(*key, Some(*version));
                // Its owner had forgotten the one before.
                if !settled {
                    add(*key, None);
                }
            }
            Step::Removes(key) => add(*key, None),
            Step::RemovesAll(namespace) => {
                (0..KEYS).filter(|key| namespace_of(*key) == *namespace).for_each(|key| add(key, None));
            }
            Step::Drops(key) => allowed.entry(*key).or_default().push(None),
            Step::Durable(_) => {}
        }
    }
    allowed
}

/// How many keys were looked at, and how many of them had to be there.
#[derive(Debug, Default, Clone, Copy)]
pub struct Checked {
    pub found: u64,
    pub needed: u64,
}

/// Compares what a log has found with what may be found, and every block with its bytes.
pub fn check(log: &dyn Tier, index: &Index, steps: &[Step], context: &str) -> Checked {
    let mut checked = Checked::default();
    let allowed = allowed(steps);
    let known: HashMap<BlockKey, _> = index.known().blocks.clone();
    for (number, versions) in &allowed {
        let found = known.get(&Block::key(*number)).map(|(identity, place)| {
            let bytes =
                load(log, *place, identity).unwrap_or_else(|e| panic!("{context}: block {number}: {e}"));
            let bytes = bytes.unwrap_or_else(|| panic!("{context}: block {number} has no place"));
            let version = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
            let block = Block::new(*number, version, shape_of(version));
            assert!(
                bytes == block.bytes() && *identity == block.identity(),
                "{context}: wrong block {number}"
            );
            version
        });
        let lost = || format!("{context}: block {number} is {found:?}, and may be {versions:?}");
        assert!(versions.contains(&found), "{}", lost());
        checked.found += u64::from(found.is_some());
        checked.needed += u64::from(!versions.contains(&None));
    }
    let meanings: HashMap<NamespaceId, Vec<u8>> = index.known().namespaces.clone();
    for (number, id) in (0..3).map(|number| (number, crate::blocks::namespace(number))) {
        assert!(
            meanings.get(&id).is_none_or(|found| *found == meaning(number)),
            "{context}: namespace {number}"
        );
    }
    checked
}
