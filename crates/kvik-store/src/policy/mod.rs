//! Which block makes room for another one.
//!
//! The index of a store calls a block by its id, the number of its slot, which is used again once the block is gone.
//! A [`Policy`] hears of every insertion and use, and [`Policy::victim`] names the block to evict next. A block that
//! must stay is *held*: it is being read, it is pinned, or a child of it is in the store, as no block is kept whose
//! parent is gone. The policy remembers all about a held block but never names it. So nothing is refused: `victim`
//! does not name one block after another until the index finds one that may go, and no block waits behind one that is
//! pinned.
//!
//! Of a request, the index names the last block first. So a parent was never used before its children, and the order of
//! uses alone lets children go first; to hold parents makes it certain.
//!
//! # The policies
//!
//! | name | what it is good for |
//! |---|---|
//! | `lru` | load whose blocks come back before the store has been filled once more |
//! | `s3-fifo` | a tenth of the bytes for new blocks: most blocks come once, and many others late |
//! | `s3-fifo-half` | half of the bytes for new blocks: between both |
//! | `s3-fifo-admit` | no bytes for new blocks, with an admission filter: hardly any block comes twice in time |
//! | `selector` | the default: does what the best of the others does, as measured on the load that there is |
//!
//! None of the four is good everywhere: on one trace of conversations, each one has at some capacity an eighth to a
//! half fewer hits than another one. They differ in one thing: what part of the store a block may have that was not
//! used again so far. A tenth is what the paper of S3-FIFO found best over its traces; nothing and all are the ends of
//! the scale; a half lies in between.
//!
//! Not to admit a block pays where the store is far too small for its load: hits are within a few percent of the best,
//! on either side, and most writes are saved. Elsewhere it loses hits. So it is one of those that the selector tries,
//! and not a filter in front of all of them.
//!
//! # Cost
//!
//! Arrays by id, no allocation a block: 9 bytes for `lru`, 19 for `s3-fifo`, 28 for the selector, and about 5 MiB in
//! all for what it samples. Every call takes constant time, amortised: a held block that has come to the end of its
//! queue is put aside once, and comes back when it is released.

mod api;
mod ghost;
mod lru;
mod queue;
mod s3fifo;
mod selector;
mod shadow;

pub use api::Policy;

use kvik_core::{Code, Error, Result};

/// The policies there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// S3-FIFO with a tenth of the bytes for its small queue.
    S3Fifo,
    /// S3-FIFO with half of the bytes for its small queue.
    S3FifoHalf,
    /// S3-FIFO without a share for its small queue: an admission filter.
    S3FifoAdmit,
    /// The best of the others, as measured in shadow.
    #[default]
    Selector,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [PolicyKind; 5] = [
        PolicyKind::Lru,
        PolicyKind::S3Fifo,
        PolicyKind::S3FifoHalf,
        PolicyKind::S3FifoAdmit,
        PolicyKind::Selector,
    ];
    /// Those that do the same whatever the load is: what the selector chooses from.
    pub const FIXED: [PolicyKind; 4] =
        [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::S3FifoHalf, PolicyKind::S3FifoAdmit];

    /// Its name, as in options.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Lru => "lru",
            PolicyKind::S3Fifo => "s3-fifo",
            PolicyKind::S3FifoHalf => "s3-fifo-half",
            PolicyKind::S3FifoAdmit => "s3-fifo-admit",
            PolicyKind::Selector => "selector",
        }
    }

    /// The policy of a name.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that none has.
    pub fn parse(name: &str) -> Result<PolicyKind> {
        PolicyKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names = PolicyKind::ALL.map(PolicyKind::name).join(", ");
            Error::new(
                Code::InvalidArgument,
                format!("there is no eviction policy {name:?}: take one of {names}"),
            )
        })
    }

    /// A new one, for a store of `capacity` bytes.
    pub fn build(self, capacity: u64) -> Box<dyn Policy> {
        match (self, self.small_share()) {
            (PolicyKind::Selector, _) => Box::new(selector::Selector::new(capacity)),
            (_, Some(share)) => Box::new(s3fifo::S3Fifo::new(share)),
            (_, None) => Box::new(lru::Lru::new()),
        }
    }

    /// For an S3-FIFO, what the small queue may have of the bytes, in percent.
    fn small_share(self) -> Option<u64> {
        match self {
            PolicyKind::S3Fifo => Some(10),
            PolicyKind::S3FifoHalf => Some(50),
            PolicyKind::S3FifoAdmit => Some(0),
            PolicyKind::Lru | PolicyKind::Selector => None,
        }
    }
}
