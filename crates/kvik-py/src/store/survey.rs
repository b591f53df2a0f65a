//! What the servers of a store hold, as `kvik store doctor` takes it.

use kvik_store::{Amount, Looked, NamespaceSurvey, ServerSurvey, Survey};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// Blocks, and their bytes.
fn pair(amount: &Amount) -> (u64, u64) {
    (amount.blocks, amount.bytes)
}

/// Everything, by the names of `kvik.store.doctor.survey`.
pub fn told<'py>(py: Python<'py>, survey: &Survey) -> PyResult<Bound<'py, PyDict>> {
    let told = PyDict::new(py);
    let servers = survey.servers.iter().map(|one| server(py, one)).collect::<PyResult<Vec<_>>>()?;
    told.set_item("servers", PyList::new(py, servers)?)?;
    let namespaces = survey.namespaces.iter().map(|one| namespace(py, one)).collect::<PyResult<Vec<_>>>()?;
    told.set_item("namespaces", PyList::new(py, namespaces)?)?;
    told.set_item("sample", survey.sample)?;
    told.set_item("rows", survey.rows)?;
    told.set_item("copies", survey.copies)?;
    told.set_item("by_copies", survey.by_copies.iter().map(pair).collect::<Vec<_>>())?;
    told.set_item("short", pair(&survey.short))?;
    told.set_item("short_unseen", pair(&survey.short_unseen))?;
    let segments = &survey.segments;
    told.set_item("segments", segments.count)?;
    told.set_item("segment_blocks", segments.blocks)?;
    told.set_item("segment_squares", segments.squares)?;
    told.set_item("largest_segment", segments.largest)?;
    Ok(told)
}

fn server<'py>(py: Python<'py>, one: &ServerSurvey) -> PyResult<Bound<'py, PyDict>> {
    let (state, why) = match &one.looked {
        Looked::Whole => ("whole", String::new()),
        Looked::Part(error) => ("part", error.to_string()),
        Looked::Older(error) => ("older", error.to_string()),
        Looked::Down(error) => ("down", error.to_string()),
    };
    let told = PyDict::new(py);
    told.set_item("name", &one.name)?;
    told.set_item("state", state)?;
    told.set_item("why", why)?;
    told.set_item("version", &one.version)?;
    told.set_item("metrics", &one.metrics)?;
    let [memory, log, object] = &one.tiers;
    let amounts = [
        ("held", &one.held),
        ("memory", memory),
        ("log", log),
        ("object", object),
        ("stray", &one.stray),
        ("unplaced", &one.unplaced),
        ("owed", &one.owed),
        ("lacking", &one.lacking),
        ("lost", &one.lost),
        ("away", &one.away),
    ];
    amounts.into_iter().try_for_each(|(name, amount)| told.set_item(name, pair(amount)))?;
    Ok(told)
}

fn namespace<'py>(py: Python<'py>, one: &NamespaceSurvey) -> PyResult<Bound<'py, PyDict>> {
    let told = PyDict::new(py);
    // As the id itself is written, as far as it is known.
    let id: String = one.id.to_le_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    told.set_item("id", id)?;
    told.set_item("tenant", &one.tenant)?;
    told.set_item("model", &one.model)?;
    told.set_item("block_bytes", one.block_bytes)?;
    told.set_item("held", pair(&one.held))?;
    told.set_item("copies", pair(&one.copies))?;
    Ok(told)
}
