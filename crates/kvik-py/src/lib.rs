//! The Python face: `kvik._native`.
//!
//! Thin on purpose. Each class holds one object of `kvik_engine` and does four things: it checks what Python
//! gives ([`args`], [`ids`], [`buffers`]), it lets go of the GIL for whatever may take time, it turns errors
//! into exceptions ([`errors`]), and it keeps a forked child away from what is its parent's ([`fork`]). What
//! Python code sees of it is written down in `python/kvik/_native.pyi`.

mod args;
mod buffers;
mod content;
mod engine;
mod errors;
mod events;
mod fork;
mod gpus;
mod grant;
mod ids;
mod joint;
mod kept;
mod layout;
mod logs;
mod mark;
mod notice;
mod options;
mod process;
mod region;
mod requests;
mod router;
mod store;
mod ticket;
mod transfer;
mod wait;
mod warm_up;

use errors::OrRaise;
use pyo3::prelude::*;

/// Bytes of a size such as "16KiB" (1,024-based), "16kB" (1,000-based) or "4096". Raises InvalidArgument.
#[pyfunction]
fn parse_size(py: Python<'_>, text: &str) -> PyResult<u64> {
    kvik_core::parse_size(text).or_raise(py)
}

/// Name, kind, labels and meaning of a metric.
type Told = (&'static str, &'static str, Vec<&'static str>, &'static str);

fn told(metrics: &[kvik_engine::Metric]) -> Vec<Told> {
    let told =
        |metric: &kvik_engine::Metric| (metric.name, metric.kind.name(), metric.labels.to_vec(), metric.help);
    metrics.iter().map(told).collect()
}

/// Every metric of an engine: name, kind, labels and meaning, in the order of `Engine.metrics`.
#[pyfunction]
fn engine_metrics() -> Vec<Told> {
    told(kvik_engine::METRICS)
}

/// The same of a store, in the order of `Store.metrics`.
#[pyfunction]
fn store_metrics() -> Vec<Told> {
    told(kvik_store::METRICS)
}

/// The native module.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    errors::install(module)?;
    logs::install();
    module.add_class::<engine::PyEngine>()?;
    module.add_class::<region::PyRegion>()?;
    module.add_class::<region::PyPageSet>()?;
    module.add_class::<layout::PyLayout>()?;
    module.add_class::<content::PyContent>()?;
    module.add_class::<grant::PyGrant>()?;
    module.add_class::<ticket::PyTicket>()?;
    module.add_class::<transfer::PyTransfer>()?;
    module.add_class::<joint::PyRead>()?;
    module.add_class::<joint::PyJointRead>()?;
    module.add_class::<events::PyEvents>()?;
    module.add_class::<notice::PyNotice>()?;
    module.add_class::<warm_up::PyWarmUp>()?;
    module.add_class::<mark::PyStreamMark>()?;
    module.add_class::<router::PyRouter>()?;
    module.add_class::<store::PyStoreClient>()?;
    module.add_class::<store::PyStoreSpace>()?;
    module.add_class::<store::PyStoreServer>()?;
    module.add_class::<store::PyPutting>()?;
    module.add_class::<store::PyGetting>()?;
    module.add_function(wrap_pyfunction!(store::namespace_id, module)?)?;
    module.add_function(wrap_pyfunction!(store::block_keys, module)?)?;
    module.add_function(wrap_pyfunction!(store::block_keys_of, module)?)?;
    module.add_function(wrap_pyfunction!(store::replay_trace, module)?)?;
    module.add_function(wrap_pyfunction!(router::serve_router, module)?)?;
    module.add_function(wrap_pyfunction!(options::engine_defaults, module)?)?;
    module.add_function(wrap_pyfunction!(parse_size, module)?)?;
    module.add_function(wrap_pyfunction!(content::content_chain, module)?)?;
    module.add_function(wrap_pyfunction!(gpus::gpu_address, module)?)?;
    module.add_function(wrap_pyfunction!(engine_metrics, module)?)?;
    module.add_function(wrap_pyfunction!(store_metrics, module)?)?;
    module.add_function(wrap_pyfunction!(logs::set_log_level, module)?)?;
    module.add_function(wrap_pyfunction!(logs::next_records, module)?)?;
    module.add_function(wrap_pyfunction!(logs::flush_records, module)?)?;
    module.add_function(wrap_pyfunction!(logs::stop_records, module)?)?;
    module.add_function(wrap_pyfunction!(logs::name_thread, module)?)?;
    module.add_function(wrap_pyfunction!(logs::close_all, module)?)?;
    Ok(())
}
