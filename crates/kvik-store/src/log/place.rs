//! Where a record lies, in 8 bytes: its segment and its offset there in units of 64 bytes.

use crate::tier::Place;

/// Records begin at multiples of so many bytes.
pub(crate) const UNIT: u64 = 64;

/// The place of the record at `offset` of a segment.
pub(crate) fn place(segment: u32, offset: u64) -> Place {
    Place((u64::from(segment) << 32) | (offset / UNIT))
}

/// Segment and offset of a place.
pub(crate) fn position(place: Place) -> (u32, u64) {
    ((place.0 >> 32) as u32, (place.0 & u64::from(u32::MAX)) * UNIT)
}

/// The first place for a record from `offset` on.
pub(crate) fn next_unit(offset: u64) -> u64 {
    offset.next_multiple_of(UNIT)
}
