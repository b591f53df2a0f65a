//! What one-sided operations have in common, whatever library posts them.

/// The direction of an operation, seen from who posts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RmaOp {
    /// Remote bytes come here.
    Read,
    /// Own bytes go there.
    Write,
}

/// What became of a post.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posted {
    /// It is in flight.
    Yes,
    /// There is no room: take completions first.
    Full,
}

/// An operation has ended: its memory is not touched any more by it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion<E> {
    /// Of the operation.
    pub token: u64,
    /// Whether the bytes were delivered.
    pub result: Result<(), E>,
}

/// A run of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first byte in the memory.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
}
