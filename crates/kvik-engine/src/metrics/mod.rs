//! What an engine counts for those who watch it.
//!
//! - [`table`]: every metric, its labels and meaning;
//! - [`peers`]: which peers have series of their own;
//! - [`tables`]: what is counted, a few table rows at the end of a transfer, never for a page;
//! - [`expose`]: all of it as text, together with what is only looked at then;
//! - [`text`]: the format.
//!
//! The clocks of threads, the memory, the sessions and the grants are read when somebody asks, and cost nothing
//! otherwise.

mod expose;
mod peers;
mod table;
mod tables;
mod text;

pub(crate) use expose::metrics_text;
pub use table::{Kind, METRICS, Metric};
pub(crate) use tables::{Metrics, op_name};
pub use text::Text;
