//! One client's request, from its first byte to its last.
//!
//! An [`Exchange`] is owned by the handler and then by the answer's body. When the client leaves, hyper drops
//! whichever of the two there is, and with it the request in flight to an engine. So *being dropped before
//! [`Exchange::finish`]* is what it means that a client left; nothing has to watch for it.
//!
//! The exchange also holds KV that prefill has granted and that no decode engine has taken yet. It is given back where
//! decode refuses the request, and where the exchange ends, for whatever reason, before any decode engine knows of it.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use crate::config::EngineUrl;
use crate::metrics::{Endpoint, Outcome, Phase, Stage};
use crate::release::{self, GrantedKv};
use crate::shared::Shared;
use crate::stream_end::Answering;
use crate::timing::Timing;

/// A request in progress.
pub(crate) struct Exchange {
    pub(crate) shared: Arc<Shared>,
    pub(crate) id: String,
    pub(crate) stage: Stage,
    pub(crate) timing: Timing,
    /// Granted by prefill, while no decode engine has answered.
    pub(crate) granted: Option<GrantedKv>,
    /// The answer of a stream, while it is passed on.
    pub(crate) answering: Option<Answering>,
    pub(crate) prefill: Option<EngineUrl>,
    pub(crate) decode: Option<EngineUrl>,
    endpoint: Endpoint,
    outcome: Option<Outcome>,
    _place: OwnedSemaphorePermit,
}

impl Exchange {
    /// Starts an exchange, or gives `None` where as many as allowed are in progress.
    pub(crate) fn begin(shared: &Arc<Shared>, endpoint: Endpoint, id: String) -> Option<Self> {
        let Ok(place) = shared.places.clone().try_acquire_owned() else {
            shared.metrics.request(endpoint, Outcome::Overloaded);
            log::warn!(request:% = id; "request {id}: turned away, {} in progress", shared.config.max_inflight);
            return None;
        };
        shared.metrics.inflight.inc();
        Some(Self {
            shared: shared.clone(),
            id,
            stage: Stage::Body,
            timing: Timing::begin(),
            granted: None,
            answering: None,
            prefill: None,
            decode: None,
            endpoint,
            outcome: None,
            _place: place,
        })
    }

    /// Says how the exchange ended. Without this, its end is the client's leaving.
    pub(crate) fn finish(&mut self, outcome: Outcome) {
        if outcome == Outcome::Ok {
            self.timing.ended();
        }
        self.outcome = Some(outcome);
    }

    /// A decode engine has answered: it has taken what prefill granted, or takes nothing of what it `refused`.
    pub(crate) fn decode_answered(&mut self, refused: bool) {
        if let Some(granted) = self.granted.take().filter(|_| refused) {
            release::start(&self.shared, granted, &self.id);
        }
    }

    /// Where the request stands. The decode stage begins when a connection takes the request, which only the
    /// connection knows.
    fn stage(&self) -> Stage {
        match (&self.granted, self.stage) {
            (Some(granted), Stage::Decode) if !granted.attached.is_attached() => Stage::Gap,
            (_, stage) => stage,
        }
    }

    fn log_end(&self, outcome: Outcome) {
        let url = |url: &Option<EngineUrl>| url.as_ref().map_or_else(|| "-".into(), EngineUrl::to_string);
        log::info!(
            request:% = self.id;
            "request {}: {} {} in stage {} after {:.1} ms (prefill {}, decode {})",
            self.id,
            self.endpoint.name(),
            outcome.name(),
            self.stage().name(),
            self.timing.elapsed().as_secs_f64() * 1e3,
            url(&self.prefill),
            url(&self.decode),
        );
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let outcome = self.outcome.unwrap_or(Outcome::ClientLeft);
        let metrics = &self.shared.metrics;
        if outcome == Outcome::ClientLeft {
            metrics.client_left(self.stage());
        }
        if outcome == Outcome::Ok {
            self.timing.observe(metrics);
        }
        metrics.request(self.endpoint, outcome);
        metrics.inflight.dec();
        self.log_end(outcome);
        if let Some(granted) = self.granted.take().filter(|granted| !granted.attached.is_attached()) {
            release::start(&self.shared, granted, &self.id);
        }
    }
}

/// What `Server-Timing` shows in a header, and what follows in a trailer.
pub(crate) const IN_HEADER: [Phase; 5] =
    [Phase::Route, Phase::Prefill, Phase::FirstToken, Phase::Decode, Phase::KvWait];
pub(crate) const IN_TRAILER: [Phase; 2] = [Phase::Decode, Phase::Total];
