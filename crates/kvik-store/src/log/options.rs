//! How large a log is and when it is made durable.

use kvik_core::{Code, Error, Result, format_size};
use std::time::Duration;

/// The largest segment that is taken unasked.
const USUAL_SEGMENT: u64 = 256 << 20;
/// The smallest segment.
const MIN_SEGMENT: u64 = 64 << 10;
/// The largest segment: places count in 64 bytes.
const MAX_SEGMENT: u64 = 64 << 30;
/// A log has room for at least so many segments.
const MIN_SEGMENTS: u64 = 8;

/// How a [`Log`](crate::Log) is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogOptions {
    /// Bytes that it may take on the disk.
    pub size: u64,
    /// Bytes of a segment, which bound the largest block: room is made segment by segment. `None`: an eighth of the
    /// size, at most 256 MiB.
    pub segment: Option<u64>,
    /// What nobody waits for is durable after this time at the latest.
    pub flush: Duration,
    /// Bytes that may wait to become durable: a sync begins after half of them, and who stores more than all waits.
    pub unsynced: u64,
    /// A segment, or a block of it that is to be kept, that cannot be read for so long is given up: what it holds is
    /// lost, and the log goes on.
    pub unreadable: Duration,
}

impl LogOptions {
    /// A log of so many bytes: synced every second, and after 64 MiB; a minute is what a disk may be away.
    pub fn new(size: u64) -> LogOptions {
        let (flush, unreadable) = (Duration::from_secs(1), Duration::from_secs(60));
        LogOptions { size, segment: None, flush, unsynced: 128 << 20, unreadable }
    }

    /// Bytes of a segment.
    ///
    /// # Errors
    /// `InvalidArgument` for a log of less than 8 segments, a segment of less than 64 KiB or more than 64 GiB, or
    /// nothing that may be unsynced.
    pub fn segment_bytes(&self) -> Result<u64> {
        let largest = self.size / MIN_SEGMENTS;
        let segment = self.segment.unwrap_or(USUAL_SEGMENT.min(largest)) / 4096 * 4096;
        let text = if !(MIN_SEGMENT..=MAX_SEGMENT).contains(&segment) {
            format!(
                "a log's segments have {} to {}, not {}: a log takes at least {}",
                format_size(MIN_SEGMENT),
                format_size(MAX_SEGMENT),
                format_size(segment),
                format_size(MIN_SEGMENT * MIN_SEGMENTS)
            )
        } else if segment > largest {
            format!(
                "a log of {} has room for {MIN_SEGMENTS} segments of at most {}, not of {}: take smaller segments, or \
                 a larger log",
                format_size(self.size),
                format_size(largest),
                format_size(segment)
            )
        } else if self.unsynced == 0 {
            "a log that may hold nothing that is not durable yet can take nothing: let unsynced be at least 1"
                .into()
        } else {
            return Ok(segment);
        };
        Err(Error::new(Code::InvalidArgument, text))
    }
}
