//! A store's client: what `kvik.Store` is made of.

mod survey;

use crate::args::{Ends, Natural, Seconds, maybe_seconds, range, seconds, size, wrong};
use crate::content::{Items, placed};
use crate::engine::PyEngine;
use crate::errors::{OrRaise, error};
use crate::fork::Owned;
use crate::ids::ids;
use crate::layout::PyLayout;
use crate::region::PyPageSet;
use crate::wait::for_end;
use kvik_core::Code;
use kvik_store::policy::PolicyKind;
use kvik_store::replay::{Comparison, Outcome, Trace, compare, parse_capacities};
use kvik_store::{
    Ack, BlockKey, Bucket, Chain, Client, Counts, Etcd, Getting, LogOptions, Namespace, ObjectOptions,
    Putting, Registration, Server, Servers, Shape, Space, StoreOptions, Stored, SurveyOptions, TenantOptions,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What `kvik.Namespace` gives.
#[derive(FromPyObject)]
struct GivenNamespace {
    model: String,
    revision: String,
    kv_dtype: String,
    quantisation: String,
    layers: Ends,
    model_layers: Natural,
    heads: Ends,
    model_heads: Natural,
    block_tokens: Natural,
    layout: String,
    salt: Vec<u8>,
    lora: String,
}

fn read_namespace(given: &Bound<'_, PyAny>) -> PyResult<Namespace> {
    let (py, given) = (given.py(), given.extract::<GivenNamespace>()?);
    Ok(Namespace {
        model: given.model,
        revision: given.revision,
        kv_dtype: given.kv_dtype,
        quantisation: given.quantisation,
        layers: range(py, "layers", given.layers)?,
        model_layers: given.model_layers.within(py, "model_layers")?,
        heads: range(py, "heads", given.heads)?,
        model_heads: given.model_heads.within(py, "model_heads")?,
        block_tokens: given.block_tokens.within(py, "block_tokens")?,
        layout: given.layout,
        salt: given.salt,
        lora: given.lora,
    })
}

/// The id of a namespace: 32 bytes. Raises InvalidArgument for what is none.
#[pyfunction]
pub fn namespace_id<'py>(py: Python<'py>, namespace: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let id = read_namespace(namespace)?.id().or_raise(py)?;
    Ok(PyBytes::new(py, &id.0))
}

/// The keys of all whole blocks of a prompt: 32 bytes each, one after the other.
///
/// tokens, extra, items: as for `content_chain`. Raises InvalidArgument for a namespace that is none, PageOutOfRange for a
/// token that is not a number from 0 to 2^32-1.
#[pyfunction]
pub fn block_keys<'py>(
    py: Python<'py>,
    namespace: &Bound<'py, PyAny>,
    tokens: &Bound<'py, PyAny>,
    extra: &[u8],
    items: Items,
) -> PyResult<Bound<'py, PyBytes>> {
    let (namespace, tokens) = (read_namespace(namespace)?, ids(tokens)?);
    let items = placed(py, &items)?;
    let keys = py.detach(|| namespace.keys(&tokens, extra, &items)).or_raise(py)?;
    Ok(PyBytes::new(py, &joined(&keys)))
}

/// The keys of blocks that a serving engine calls by hashes of its own.
#[pyfunction]
pub fn block_keys_of<'py>(
    py: Python<'py>,
    namespace: &Bound<'py, PyAny>,
    hashes: Vec<Vec<u8>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let namespace = read_namespace(namespace)?;
    let keys: Result<Vec<BlockKey>, _> = hashes.iter().map(|hash| namespace.key_of(hash)).collect();
    Ok(PyBytes::new(py, &joined(&keys.or_raise(py)?)))
}

/// What a store is made with, as `kvik.store.client.StoreOptions` has it.
#[derive(FromPyObject)]
struct GivenOptions<'py> {
    memory: Bound<'py, PyAny>,
    log: Option<PathBuf>,
    log_size: Bound<'py, PyAny>,
    object: Option<String>,
    object_size: Bound<'py, PyAny>,
    object_batch: Bound<'py, PyAny>,
    policy: String,
    tenants: Vec<GivenTenant<'py>>,
}

/// What `kvik.Tenant` gives.
#[derive(FromPyObject)]
struct GivenTenant<'py> {
    name: String,
    quota: Option<Bound<'py, PyAny>>,
    apart: bool,
}

impl GivenTenant<'_> {
    fn options(self) -> PyResult<TenantOptions> {
        let quota = self.quota.map(|quota| size("quota", &quota)).transpose()?;
        Ok(TenantOptions { name: self.name, quota, apart: self.apart })
    }
}

fn options(given: &Bound<'_, PyAny>) -> PyResult<StoreOptions> {
    let GivenOptions { memory, log, log_size, object, object_size, object_batch, policy, tenants } =
        given.extract()?;
    let log =
        log.map(|log| Ok::<_, PyErr>((log, LogOptions::new(size("log_size", &log_size)?)))).transpose()?;
    let object = object.map(|url| {
        let options = ObjectOptions::new(Bucket::Url(url), size("object_size", &object_size)?);
        Ok::<_, PyErr>(ObjectOptions { batch: size("object_batch", &object_batch)?, ..options })
    });
    let object = object.transpose()?;
    let tenants = tenants.into_iter().map(GivenTenant::options).collect::<PyResult<_>>()?;
    let policy = PolicyKind::parse(&policy).or_raise(given.py())?;
    Ok(StoreOptions { memory: size("memory", &memory)?, log, object, policy, tenants })
}

fn joined(keys: &[BlockKey]) -> Vec<u8> {
    keys.iter().flat_map(|key| key.0).collect()
}

/// Keys as Python gives them: 32 bytes each.
fn keys(py: Python<'_>, given: &[u8]) -> PyResult<Vec<BlockKey>> {
    match given.as_chunks::<32>() {
        (keys, []) => Ok(keys.iter().map(|key| BlockKey(*key)).collect()),
        _ => {
            let text = format!("keys have 32 bytes each: {} bytes are no whole number of keys", given.len());
            Err(error(py, Code::InvalidArgument, text))
        }
    }
}

fn ack(py: Python<'_>, name: &str) -> PyResult<Ack> {
    match name {
        "accepted" => Ok(Ack::Accepted),
        "stored" => Ok(Ack::Stored),
        "durable" => Ok(Ack::Durable),
        other => Err(wrong(py, "ack", other, "\"accepted\", \"stored\" or \"durable\"")),
    }
}

/// The client of a store.
#[pyclass(name = "StoreClient", module = "kvik._native", frozen)]
pub struct PyStoreClient(Owned<Client>);

#[pymethods]
impl PyStoreClient {
    /// A store within this process.
    #[staticmethod]
    fn embedded(py: Python<'_>, engine: &Bound<'_, PyEngine>, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        let options = options(given)?;
        let engine = engine.get().0.get(py)?;
        Ok(PyStoreClient(Owned::new(py.detach(|| Client::embedded(engine, &options)).or_raise(py)?)))
    }

    /// The store that a process serves, or several do. deadline: seconds, for meeting them.
    #[staticmethod]
    fn connect(
        py: Python<'_>,
        engine: &Bound<'_, PyEngine>,
        addresses: Vec<String>,
        copies: Natural,
        deadline: Option<Seconds>,
    ) -> PyResult<Self> {
        let (engine, deadline) = (engine.get().0.get(py)?, maybe_seconds(py, "deadline", deadline)?);
        let copies = copies.within::<u32>(py, "copies")? as usize;
        let client = py.detach(|| {
            let servers = Servers::parse(&addresses)?;
            Client::connect_to(engine, &servers, copies, deadline)
        });
        Ok(PyStoreClient(Owned::new(client.or_raise(py)?)))
    }

    /// The servers: of each its name, whether it answers, and how many parts of calls it has not answered.
    fn members(&self, py: Python<'_>) -> PyResult<Vec<(String, bool, u64)>> {
        let members = self.0.get(py)?.members();
        Ok(members.into_iter().map(|member| (member.name, member.up, member.unanswered)).collect())
    }

    /// Blocks of one namespace.
    fn open(
        &self,
        py: Python<'_>,
        tenant: &str,
        namespace: &Bound<'_, PyAny>,
        layout: &Bound<'_, PyLayout>,
    ) -> PyResult<PyStoreSpace> {
        let namespace = read_namespace(namespace)?;
        let layout = &layout.get().0;
        let shape = Shape::new(layout.layers(), layout.slices(), layout.run_bytes()).or_raise(py)?;
        let client = self.0.get(py)?;
        let space = py.detach(|| client.open(tenant, &namespace, shape)).or_raise(py)?;
        Ok(PyStoreSpace(Owned::new(space)))
    }

    /// Take out all blocks of a tenant; how many went.
    fn clear_tenant(&self, py: Python<'_>, tenant: &str) -> PyResult<u64> {
        let client = self.0.get(py)?;
        py.detach(|| client.clear_tenant(tenant)).or_raise(py)
    }

    /// How often `choose` has given each reason, by name.
    fn choices(&self, py: Python<'_>) -> PyResult<BTreeMap<&'static str, u64>> {
        Ok(self.0.get(py)?.choices().into_iter().collect())
    }

    /// What has happened in the store, by name.
    fn stat<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let client = self.0.get(py)?;
        named(py, &py.detach(|| client.stat()).or_raise(py)?)
    }

    /// All figures of the store, in the Prometheus text format.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let client = self.0.get(py)?;
        py.detach(|| client.metrics()).or_raise(py)
    }

    /// What all servers hold. copies: how many keep each block; None: as many as it seems. most: copies of blocks to hold at
    /// once. deadline: seconds for all of it.
    fn survey<'py>(
        &self,
        py: Python<'py>,
        copies: Option<Natural>,
        most: Natural,
        deadline: Seconds,
    ) -> PyResult<Bound<'py, PyDict>> {
        let copies = copies.map(|copies| copies.within::<u32>(py, "copies")).transpose()?;
        let most = most.within::<u32>(py, "most")? as usize;
        let deadline = seconds(py, "deadline", deadline)?;
        let options = SurveyOptions { copies: copies.map(|copies| copies as usize), most, deadline };
        let client = self.0.get(py)?;
        survey::told(py, &py.detach(|| client.survey(&options)).or_raise(py)?)
    }
}

impl Drop for PyStoreClient {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// What `choose` gives.
type Chosen = (bool, &'static str, u64, Option<(f64, u64)>);

/// Blocks of one namespace in a store.
#[pyclass(name = "StoreSpace", module = "kvik._native", frozen)]
pub struct PyStoreSpace(Owned<Space>);

#[pymethods]
impl PyStoreSpace {
    fn put(
        &self,
        py: Python<'_>,
        names: &[u8],
        pages: &Bound<'_, PyPageSet>,
        before: &[u8],
        wanted: &str,
        deadline: Option<Seconds>,
    ) -> PyResult<PyPutting> {
        let (space, wanted) = (self.0.get(py)?, ack(py, wanted)?);
        let (before, keys) = (keys(py, before)?, keys(py, names)?);
        let (set, deadline) = (pages.get().pages.get(py)?, maybe_seconds(py, "deadline", deadline)?);
        let chain = Chain::after(&before, &keys);
        let putting = py.detach(|| space.put(chain, set, wanted, deadline)).or_raise(py)?;
        let (putting, cancelled) = (Owned::new(Mutex::new(putting)), AtomicBool::new(false));
        Ok(PyPutting { putting, cancelled, _pages: pages.clone().unbind() })
    }

    fn get(
        &self,
        py: Python<'_>,
        names: &[u8],
        pages: &Bound<'_, PyPageSet>,
        before: &[u8],
        deadline: Option<Seconds>,
    ) -> PyResult<PyGetting> {
        let (space, before, keys) = (self.0.get(py)?, keys(py, before)?, keys(py, names)?);
        let (set, deadline) = (pages.get().pages.get(py)?, maybe_seconds(py, "deadline", deadline)?);
        let getting = py.detach(|| space.get(Chain::after(&before, &keys), set, deadline)).or_raise(py)?;
        let (getting, cancelled) = (Owned::new(Mutex::new(getting)), AtomicBool::new(false));
        Ok(PyGetting { getting, cancelled, _pages: pages.clone().unbind() })
    }

    /// Whether to fetch, why, bytes, and the estimate where there is one: seconds, and bytes that go before.
    fn choose(&self, py: Python<'_>, blocks: Natural, recompute: Seconds) -> PyResult<Chosen> {
        let recompute = seconds(py, "recompute", recompute)?;
        let choice = self.0.get(py)?.choose(blocks.within(py, "blocks")?, recompute).or_raise(py)?;
        let estimate = choice.fetch.zip(choice.estimate);
        let told = estimate.map(|(fetch, estimate)| (fetch.as_secs_f64(), estimate.queued));
        Ok((choice.reason.fetches(), choice.reason.name(), choice.bytes, told))
    }

    fn contains(&self, py: Python<'_>, names: &[u8], before: &[u8]) -> PyResult<Vec<bool>> {
        let (space, before, keys) = (self.0.get(py)?, keys(py, before)?, keys(py, names)?);
        py.detach(|| space.contains(Chain::after(&before, &keys))).or_raise(py)
    }

    fn prefetch(&self, py: Python<'_>, names: &[u8], before: &[u8]) -> PyResult<u64> {
        let (space, before, keys) = (self.0.get(py)?, keys(py, before)?, keys(py, names)?);
        py.detach(|| space.prefetch(Chain::after(&before, &keys))).or_raise(py)
    }

    fn remove(&self, py: Python<'_>, names: &[u8]) -> PyResult<u64> {
        let (space, keys) = (self.0.get(py)?, keys(py, names)?);
        py.detach(|| space.remove(&keys)).or_raise(py)
    }

    fn pin(&self, py: Python<'_>, names: &[u8], before: &[u8], time: Seconds) -> PyResult<u64> {
        let (space, time) = (self.0.get(py)?, seconds(py, "seconds", time)?);
        let (before, keys) = (keys(py, before)?, keys(py, names)?);
        py.detach(|| space.pin(Chain::after(&before, &keys), time)).or_raise(py)
    }

    fn clear(&self, py: Python<'_>) -> PyResult<u64> {
        let space = self.0.get(py)?;
        py.detach(|| space.clear()).or_raise(py)
    }
}

impl Drop for PyStoreSpace {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// A put that was begun.
#[pyclass(name = "StorePutting", module = "kvik._native", frozen)]
pub struct PyPutting {
    putting: Owned<Mutex<Putting>>,
    cancelled: AtomicBool,
    _pages: Py<PyPageSet>,
}

#[pymethods]
impl PyPutting {
    /// What was asked to be acknowledged; None: the store has taken it up, and nothing is stored yet.
    fn acknowledged(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Option<(u64, u64, u64)>> {
        let putting = self.putting.get(py)?;
        let acknowledged = for_end(py, timeout, |step| self.ended_if_asked(putting).acknowledged(step));
        Ok(acknowledged?.map(counted))
    }

    /// The end: blocks that were stored, were known, were refused.
    fn wait(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<(u64, u64, u64)> {
        let putting = self.putting.get(py)?;
        for_end(py, timeout, |step| self.ended_if_asked(putting).wait(step)).map(counted)
    }

    /// Ask for the end. Where a thread waits for it just now, that one ends it, within a step. Where none does this one
    /// may (`here`), which can take seconds, or else the next that waits.
    fn cancel(&self, py: Python<'_>, here: bool) -> PyResult<()> {
        let putting = self.putting.get(py)?;
        self.cancelled.store(true, Ordering::Relaxed);
        if here {
            py.detach(|| putting.try_lock().map(|mut putting| putting.cancel()).unwrap_or_default());
        }
        Ok(())
    }
}

impl PyPutting {
    /// The put, ended where that was asked for.
    fn ended_if_asked<'a>(&self, putting: &'a Mutex<Putting>) -> MutexGuard<'a, Putting> {
        let mut putting = putting.lock().unwrap_or_else(PoisonError::into_inner);
        if self.cancelled.load(Ordering::Relaxed) {
            putting.cancel();
        }
        putting
    }
}

fn counted(stored: Stored) -> (u64, u64, u64) {
    (stored.stored, stored.known, stored.refused)
}

/// A get that was begun.
#[pyclass(name = "StoreGetting", module = "kvik._native", frozen)]
pub struct PyGetting {
    getting: Owned<Mutex<Getting>>,
    cancelled: AtomicBool,
    _pages: Py<PyPageSet>,
}

#[pymethods]
impl PyGetting {
    /// How many blocks are there and verified by now, after waiting for more; None when no more come.
    fn next(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Option<usize>> {
        let getting = self.getting.get(py)?;
        for_end(py, timeout, |step| {
            let mut getting = getting.lock().unwrap_or_else(PoisonError::into_inner);
            if self.cancelled.load(Ordering::Relaxed) {
                getting.cancel();
            }
            getting.next(step)
        })
    }

    /// Ask for the end. Where a thread waits for it just now, that one ends it, within a step. Where none does this one
    /// may (`here`), which can take seconds, or else the next that waits.
    fn cancel(&self, py: Python<'_>, here: bool) -> PyResult<()> {
        let getting = self.getting.get(py)?;
        self.cancelled.store(true, Ordering::Relaxed);
        if here {
            py.detach(|| getting.try_lock().map(|mut getting| getting.cancel()).unwrap_or_default());
        }
        Ok(())
    }

    /// How many blocks are there and verified.
    #[getter]
    fn verified(&self, py: Python<'_>) -> PyResult<usize> {
        let getting = self.getting.get(py)?;
        // Whoever waits for more has it for a step, and an end of it takes longer.
        Ok(py.detach(|| getting.lock().unwrap_or_else(PoisonError::into_inner).verified()))
    }
}

impl Drop for PyPutting {
    fn drop(&mut self) {
        self.putting.end();
    }
}

impl Drop for PyGetting {
    fn drop(&mut self) {
        self.getting.end();
    }
}

/// A store that other processes use, through an engine.
#[pyclass(name = "StoreServer", module = "kvik._native", frozen)]
pub struct PyStoreServer {
    server: Owned<Server>,
    /// Where it is entered in etcd.
    entry: Owned<Mutex<Option<Registration>>>,
}

#[pymethods]
impl PyStoreServer {
    /// Serve until it is stopped, or the engine closed.
    #[new]
    fn new(py: Python<'_>, engine: &Bound<'_, PyEngine>, given: &Bound<'_, PyAny>) -> PyResult<Self> {
        let options = options(given)?;
        let engine = engine.get().0.get(py)?;
        let server = Owned::new(py.detach(|| Server::start(engine, &options)).or_raise(py)?);
        Ok(PyStoreServer { server, entry: Owned::new(Mutex::new(None)) })
    }

    /// What has happened, by name.
    fn stat<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        named(py, &self.server.get(py)?.counts())
    }

    /// All figures, in the Prometheus text format.
    fn metrics(&self, py: Python<'_>) -> PyResult<String> {
        let server = self.server.get(py)?;
        Ok(py.detach(|| server.metrics()))
    }

    /// Enter it in etcd, by the address at which clients reach it, until it is stopped.
    fn enter(&self, py: Python<'_>, url: &str, address: &str) -> PyResult<()> {
        let entry = self.entry.get(py)?;
        let made = py.detach(|| Registration::start(&Etcd::parse(url)?, address)).or_raise(py)?;
        let before = entry.lock().unwrap_or_else(PoisonError::into_inner).replace(made);
        py.detach(|| drop(before));
        Ok(())
    }

    /// Serve nobody any more. Its entry goes first: so clients leave before it stops to answer.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        let (server, entry) = (self.server.get(py)?, self.entry.get(py)?);
        py.detach(|| {
            drop(entry.lock().unwrap_or_else(PoisonError::into_inner).take());
            server.stop();
        });
        Ok(())
    }
}

impl Drop for PyStoreServer {
    fn drop(&mut self) {
        self.entry.end();
        self.server.end();
    }
}

fn named<'py>(py: Python<'py>, counts: &Counts) -> PyResult<Bound<'py, PyDict>> {
    let named = PyDict::new(py);
    counts.values().into_iter().try_for_each(|(name, value)| named.set_item(name, value))?;
    Ok(named)
}

/// The hit rates of each policy on a trace of requests: for each capacity in blocks a list of names and rates, with
/// that of the offline optimum last; and what the trace has: requests, references, blocks.
#[pyfunction]
pub fn replay_trace(py: Python<'_>, trace: PathBuf, capacities: &str) -> PyResult<(Replayed, [usize; 3])> {
    let replayed = py.detach(|| {
        let capacities = parse_capacities(capacities)?;
        let trace = Trace::read(&trace)?;
        let counts = [trace.requests().len(), trace.references(), trace.blocks()];
        let row = |row: &Comparison| {
            let rate = |(kind, outcome): &(PolicyKind, Outcome)| (kind.name(), outcome.hit_rate());
            let mut rates: Vec<_> = row.outcomes.iter().map(rate).collect();
            rates.push(("optimum", row.optimal_rate()));
            (row.capacity, rates)
        };
        Ok((compare(&trace, &capacities)?.iter().map(row).collect(), counts))
    });
    replayed.or_raise(py)
}

/// Of each capacity in blocks the names of policies and their hit rates.
type Replayed = Vec<(usize, Vec<(&'static str, f64)>)>;
