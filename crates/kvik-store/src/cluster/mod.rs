//! A store of several servers.

mod following;
mod gather;
mod members;
mod scatter;
mod spread;
mod text;

pub(crate) use following::Following;
pub(crate) use gather::Gathering;
pub(crate) use members::Cluster;
pub use members::MemberState;
pub(crate) use scatter::Scattering;
pub(crate) use spread::{Likes, Spread};
