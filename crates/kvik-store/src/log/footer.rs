//! What the end of a segment lists of its records: enough to rebuild an index without looking at them.
//!
//! ```text
//! listed = offset / 64(4) kind(1) flags(1) 0(2) namespace(4) layers(4) slices(4) run bytes(4) key(32) parent(32)
//! ```
//!
//! A namespace is given by its number among those of the segment; the record that says what it means comes before its
//! blocks, so a segment can be read without any other.

use super::format::{What, bytes_at, u32_at};
use super::place::UNIT;
use crate::tier::Identity;
use crate::{BlockKey, NamespaceId, Shape};
use std::collections::HashMap;

/// Bytes that a footer has for a record.
pub(crate) const LISTED: usize = 88;
/// The most namespaces of a segment.
pub(crate) const MAX_NAMESPACES: usize = 1 << 16;

/// A record as a footer has it.
pub(crate) type Listed = [u8; LISTED];

/// A record as a footer has it. `namespace` is the number of its namespace, 0 for a removal.
pub(crate) fn listed(offset: u64, what: &What, namespace: u32) -> Listed {
    let mut out = [0; LISTED];
    out[..4].copy_from_slice(&((offset / UNIT) as u32).to_le_bytes());
    out[4] = what.kind();
    out[8..12].copy_from_slice(&namespace.to_le_bytes());
    match what {
        What::Block(Identity { key, parent, shape, .. }) => {
            out[5] = u8::from(parent.is_some());
            out[12..16].copy_from_slice(&shape.layers().to_le_bytes());
            out[16..20].copy_from_slice(&shape.slices().to_le_bytes());
            // A block has at most 1 GiB, and so have its runs.
            out[20..24].copy_from_slice(&(shape.run_bytes() as u32).to_le_bytes());
            out[24..56].copy_from_slice(&key.0);
            out[56..].copy_from_slice(&parent.map_or([0; 32], |parent| parent.0));
        }
        What::Removed(key) => out[24..56].copy_from_slice(&key.0),
        What::Namespace(id) | What::NamespaceRemoved(id) => out[24..56].copy_from_slice(&id.0),
    }
    out
}

/// The offset of a listed record.
pub(crate) fn offset_of(listed: &Listed) -> u64 {
    u64::from(u32_at(listed, 0)) * UNIT
}

/// Reads a footer, record by record.
#[derive(Debug, Default)]
pub(crate) struct Lister {
    namespaces: HashMap<u32, NamespaceId>,
}

impl Lister {
    /// Offset and meaning of the next record; `None` where it is none that this version writes.
    pub fn read(&mut self, listed: &[u8]) -> Option<(u64, What)> {
        if listed.len() != LISTED {
            return None;
        }
        let (number, key) = (u32_at(listed, 8), bytes_at(listed, 24));
        let what = match (listed[4], listed[5]) {
            (1, flags @ 0..=1) => What::Block(Identity {
                key: BlockKey(key),
                parent: (flags == 1).then(|| BlockKey(bytes_at(listed, 56))),
                namespace: *self.namespaces.get(&number)?,
                shape: Shape::new(u32_at(listed, 12), u32_at(listed, 16), u32_at(listed, 20).into()).ok()?,
            }),
            (2, 0) => {
                if self.namespaces.len() >= MAX_NAMESPACES {
                    return None;
                }
                self.namespaces.insert(number, NamespaceId(key));
                What::Namespace(NamespaceId(key))
            }
            (3, 0) => What::Removed(BlockKey(key)),
            (4, 0) => What::NamespaceRemoved(NamespaceId(key)),
            _ => return None,
        };
        Some((u64::from(u32_at(listed, 0)) * UNIT, what))
    }
}
