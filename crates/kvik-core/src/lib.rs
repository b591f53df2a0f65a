//! The words of kvik as types.
//!
//! Everything here is plain data and arithmetic: no sockets, no clock, no memory access, no `unsafe`. The other
//! crates speak to each other in these words.
//!
//! A reader who wants to follow a page starts with [`Layout`] (where an element lies in a region), then [`View`]
//! (which elements take part in a transfer, and in which order: the *stream*), then [`Extents`] (what is
//! contiguous on both sides).

#![forbid(unsafe_code)]

mod class;
mod digest;
mod error;
mod grant;
mod id;
mod layout;
mod page_sums;
mod size;
mod sums;
mod ticket;
mod view;

pub use class::{Class, ClassQueue};
pub use digest::{
    CONTENT_DIGEST_BYTES, Content, ContentClaim, ContentDigest, MAX_CONTENT_PART, content_chain,
};
pub use error::{Code, Error, Result, Subject};
pub use grant::{GrantState, Right, Use};
pub use id::{EngineId, GrantId, HostTag, Incarnation, RegionId};
pub use layout::{Layers, Layout, MAX_PARTS};
pub use page_sums::PageSums;
pub use size::{format_size, parse_size};
pub use sums::{PageSum, page_sum};
pub use ticket::{MAX_TICKET_ADDRESSES, MAX_TICKET_TEXT, Ticket};
pub use view::{Extent, Extents, Order, Run, Runs, Shape, View, page_name};
