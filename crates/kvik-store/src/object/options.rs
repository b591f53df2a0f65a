//! Where an object store is, how much it may hold, and in objects of which size.

use kvik_core::{Code, Error, Result, format_size};
use object_store::ObjectStore;
use std::sync::Arc;
use std::time::Duration;

/// The smallest batch, and the largest: a batch is sent by one request, from memory.
const BATCH: (u64, u64) = (64 << 10, 1 << 30);
/// An object store has room for at least so many batches.
const LEAST_BATCHES: u64 = 4;

/// Where objects are.
#[derive(Debug, Clone)]
pub enum Bucket {
    /// An address: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX` or `file:///FOLDER`. Credentials
    /// and endpoints come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`), never from here.
    Url(String),
    /// A store that the caller has made, and the prefix of all names in it.
    Store(Arc<dyn ObjectStore>, String),
}

/// How the tier of objects is opened.
#[derive(Debug, Clone)]
pub struct ObjectOptions {
    /// Where it is. One server at a time has a prefix: the last one to come takes it over.
    pub bucket: Bucket,
    /// Bytes that its objects may take.
    pub size: u64,
    /// Bytes of an object: blocks are gathered until there are so many. Up to four times as many are in memory.
    pub batch: u64,
    /// What was gathered is sent after this time at the latest.
    pub flush: Duration,
    /// How long one request that reads may take. Who asked for the blocks waits no longer than its own deadline.
    pub patience: Duration,
}

impl ObjectOptions {
    /// Objects of 32 MiB, sent after 10 seconds at the latest; a read takes at most 5 seconds.
    pub fn new(bucket: Bucket, size: u64) -> ObjectOptions {
        let (flush, patience) = (Duration::from_secs(10), Duration::from_secs(5));
        ObjectOptions { bucket, size, batch: 32 << 20, flush, patience }
    }

    /// # Errors
    /// `InvalidArgument` for a batch of less than 64 KiB or more than 1 GiB, or a size of less than four batches.
    pub(crate) fn check(&self) -> Result<()> {
        let text = if !(BATCH.0..=BATCH.1).contains(&self.batch) {
            format!(
                "objects have {} to {}, not {}: 8 to 64 MiB suit most object stores",
                format_size(BATCH.0),
                format_size(BATCH.1),
                format_size(self.batch)
            )
        } else if self.size / LEAST_BATCHES < self.batch {
            format!(
                "an object store of {} has no room for {LEAST_BATCHES} objects of {}: give it more, or take smaller ones",
                format_size(self.size),
                format_size(self.batch)
            )
        } else {
            return Ok(());
        };
        Err(Error::new(Code::InvalidArgument, text))
    }
}
