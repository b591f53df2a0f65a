//! What all requests of one router share.

use std::sync::Arc;

use http::Response;
use hyper::body::Incoming;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;

use crate::config::{EngineUrl, RouterConfig};
use crate::memory::BodyMemory;
use crate::metrics::{Metrics, Role};
use crate::pool::{Engine, Pool};
use crate::reply::Reply;
use crate::upstream::{Attached, Call, Failure, Upstream};

/// Most releases at work at once: under a wave of leaving clients the decode engines have better to do.
pub(crate) const MOST_RELEASES: usize = 64;

/// Most answers of prefill engines that are waited for beyond their requests.
pub(crate) const MOST_LATE: usize = 64;

/// See the module's text.
pub(crate) struct Shared {
    pub(crate) config: RouterConfig,
    pub(crate) prefill: Pool,
    pub(crate) decode: Pool,
    pub(crate) upstream: Upstream,
    pub(crate) metrics: Metrics,
    /// One place a request in progress.
    pub(crate) places: Arc<Semaphore>,
    /// What the bodies of all requests may take.
    pub(crate) bodies: BodyMemory,
    /// One place a release at work.
    pub(crate) releases: Arc<Semaphore>,
    /// One place an answer of a prefill engine that is waited for beyond its request.
    pub(crate) late: Arc<Semaphore>,
    /// Work that outlives its request.
    pub(crate) tasks: TaskTracker,
    pub(crate) handle: Handle,
}

impl Shared {
    pub(crate) fn new(config: RouterConfig, handle: Handle) -> Self {
        Self {
            prefill: Pool::new(Role::Prefill, &config.prefill),
            decode: Pool::new(Role::Decode, &config.decode),
            upstream: Upstream::new(&config),
            metrics: Metrics::new(),
            places: Arc::new(Semaphore::new(config.max_inflight)),
            bodies: BodyMemory::new(config.max_body_memory),
            releases: Arc::new(Semaphore::new(MOST_RELEASES)),
            late: Arc::new(Semaphore::new(MOST_LATE)),
            tasks: TaskTracker::new(),
            handle,
            config,
        }
    }

    /// Asks these engines of one role in turn, as long as nothing has been sent to any; `chosen` tells the last.
    pub(crate) async fn ask(
        &self,
        id: &str,
        engines: Vec<Arc<Engine>>,
        call: &Call,
        attached: &Attached,
        chosen: &mut Option<EngineUrl>,
    ) -> Result<(Arc<Engine>, Response<Incoming>), Reply> {
        let mut last = None;
        for engine in engines {
            *chosen = Some(engine.url.clone());
            let stale = || self.metrics.stale_connection(engine.role);
            match self.upstream.send(&engine, call, attached, stale).await {
                Ok(response) => return Ok((engine, response)),
                Err(failure) => {
                    self.report(id, &failure);
                    let try_next = failure.nothing_sent();
                    last = Some(failure);
                    if !try_next {
                        break;
                    }
                }
            }
        }
        Err(last.as_ref().map_or_else(Reply::no_engine, Reply::engine_failed))
    }

    /// Counts an engine's failure over this request, and says it.
    pub(crate) fn report(&self, id: &str, failure: &Failure) {
        let Failure { role, url, kind, detail } = failure;
        self.metrics.upstream_error(*role, *kind);
        log::warn!(request:% = id; "request {id}: {} engine {url}: {detail}", role.name());
    }
}
