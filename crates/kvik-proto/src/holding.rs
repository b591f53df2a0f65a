//! Who keeps the pages of a grant that is over from their owner: for errors that say whom to wait for.

use kvik_core::GrantId;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A grant whose pages are not the owner's again yet.
#[derive(Debug, Clone)]
pub struct Holding {
    /// Which.
    pub grant: GrantId,
    /// Its pages, or parts of pages.
    pub pages: Arc<[u32]>,
    /// In how many parts its pages are seen.
    pub parts: u32,
    /// Who still takes part in it, in words: peers, or this engine itself.
    pub by: BTreeSet<String>,
}
