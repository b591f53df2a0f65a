//! What a policy is asked, and told.

/// How long the past matters, in fillings of the store: what is remembered of blocks that left it, and by what hits a
/// policy is chosen.
///
/// Blocks that came back stay for longer than others, as they are replaced by others of their kind alone. Where one of
/// four blocks comes back (published traces of serving: 0.24 to 0.42), this is after four times as many insertions as
/// the store has room for. A block that comes back within that time is worth its place, and what a policy does shows
/// within that time. With twice or half of it hit rates differ by a tenth where a store has room for few requests, and
/// by a hundredth where it has room for many.
pub(super) const HORIZON: usize = 4;

/// Decides what is evicted. It owns no block: the index tells it what is there.
///
/// A call about a block that is not resident does nothing.
pub trait Policy: Send {
    /// The blocks named from here on belong to another request. Those of one request are named last block first. Where
    /// only the end of a prompt is inserted, the resident block before it is touched last: so it is known to be the
    /// parent.
    fn request(&mut self) {}

    /// Whether a block of `bytes` bytes that is not resident is worth another one's place. Asked only where room must
    /// be made. A block that is not is remembered, and may be when it comes again: so the index asks for each block of
    /// a request, also for those behind one that is not admitted, which it does not keep without their parent.
    fn admits(&mut self, fingerprint: u64, bytes: u32) -> bool {
        let _ = (fingerprint, bytes);
        true
    }

    /// A block is resident from now on. `fingerprint` is evenly spread and the same whenever the block comes back, such
    /// as 8 bytes of its key. Ids are small: arrays reach as far as the highest one.
    fn insert(&mut self, id: u32, fingerprint: u64, bytes: u32);

    /// A resident block is used.
    fn touch(&mut self, id: u32, fingerprint: u64);

    /// A resident block is not to be named before it is released. A second time changes nothing: the index counts.
    fn hold(&mut self, id: u32);

    /// A resident block may be named again.
    fn release(&mut self, id: u32);

    /// The block to evict next; none where all are held. It stays resident until the index says that it is evicted,
    /// and is named again until then, unless something else happens. The index may evict another one instead.
    fn victim(&mut self) -> Option<u32>;

    /// A block was evicted to make room.
    fn evict(&mut self, id: u32, fingerprint: u64) {
        let _ = fingerprint;
        self.remove(id);
    }

    /// A block is gone for another reason: nothing is concluded from it.
    fn remove(&mut self, id: u32);

    /// The name of the policy that decides at present, where it is another one's turn.
    fn chosen(&self) -> Option<&'static str> {
        None
    }

    /// Bytes of memory that the policy takes.
    fn memory(&self) -> usize;
}
