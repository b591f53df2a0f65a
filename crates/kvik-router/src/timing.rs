//! Where a request's time went.
//!
//! Each figure is measured on the router's clock, between events that the router itself sees:
//!
//! * `route`: from the arrival of the request's head until the first request to an engine is made. The upload
//!   of the client's body is in it.
//! * `prefill`: from making the prefill request until its answer is read whole, connecting included.
//! * `first_token`, of a streamed answer: from making the decode request until the first bytes of the answer's
//!   body. It *contains* the time in which decode fetches the KV and computes the first token: from outside an
//!   engine these cannot be told apart.
//!   Of a stream it contains prefill's time as well, since both requests are made at once.
//! * `decode`: from making the decode request until the last byte of its answer. A whole answer comes at once,
//!   so there is no `first_token` for it.
//! * `kv_wait`: the part of the above that decode spent waiting for KV, when the decode engine says so, in its own
//!   `Server-Timing` header or as `kv_transfer_params.kvik.kv_wait_ms` in the first event of a stream or in a
//!   whole answer. Absent otherwise.
//! * `total`: from the arrival of the request's head until the last byte has been passed on.
//!
//! A streamed answer's `Server-Timing` header has what is known when its first bytes are; `decode` and `total`
//! follow as a trailer for clients that sent `TE: trailers`.

use std::fmt::Write;
use std::time::{Duration, Instant};

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};

use crate::metrics::{Metrics, Phase};
use crate::note::Note;

pub(crate) const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// The times of one request.
#[derive(Debug)]
pub(crate) struct Timing {
    began: Instant,
    decode_began: Option<Instant>,
    phases: Vec<(Phase, Duration)>,
    /// The engine's own header has the wait, and goes to the client beside ours.
    wait_is_in_headers: bool,
}

impl Timing {
    pub(crate) fn begin() -> Self {
        Self {
            began: Instant::now(),
            decode_began: None,
            phases: Vec::with_capacity(6),
            wait_is_in_headers: false,
        }
    }

    /// The time since the request began.
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// The first request to an engine is about to be made.
    pub(crate) fn routed(&mut self) {
        if !self.phases.iter().any(|(phase, _)| *phase == Phase::Route) {
            self.phases.push((Phase::Route, self.elapsed()));
        }
    }

    /// The prefill answer has been read.
    pub(crate) fn prefilled(&mut self, began: Instant) {
        self.phases.push((Phase::Prefill, began.elapsed()));
    }

    /// The decode request is about to be made.
    pub(crate) fn decode_begins(&mut self) {
        self.routed();
        self.decode_began = Some(Instant::now());
    }

    /// The first bytes of a streamed answer are there.
    pub(crate) fn first_token(&mut self) {
        self.since_decode(Phase::FirstToken);
    }

    /// The last byte of the answer is there.
    pub(crate) fn decoded(&mut self) {
        self.since_decode(Phase::Decode);
    }

    /// The whole request is done.
    pub(crate) fn ended(&mut self) {
        self.phases.push((Phase::Total, self.elapsed()));
    }

    /// Takes over what the decode engine says of its wait, from its headers or from a piece of its answer.
    pub(crate) fn reported(&mut self, headers: &HeaderMap, answer: &[u8]) {
        let in_headers = kv_wait_in_headers(headers);
        self.wait_is_in_headers = in_headers.is_some();
        let millis = in_headers.or_else(|| Note::of(answer)?.kv_wait_ms);
        if let Some(wait) = millis.and_then(|ms| Duration::try_from_secs_f64(ms / 1e3).ok()) {
            self.phases.push((Phase::KvWait, wait));
        }
    }

    fn since_decode(&mut self, phase: Phase) {
        if let Some(began) = self.decode_began {
            self.phases.push((phase, began.elapsed()));
        }
    }

    /// The value of a `Server-Timing` header: the given phases, as far as they are known, in milliseconds.
    pub(crate) fn header(&self, wanted: &[Phase]) -> Option<HeaderValue> {
        let mut text = String::new();
        let ours =
            |phase: &Phase| wanted.contains(phase) && !(*phase == Phase::KvWait && self.wait_is_in_headers);
        for (phase, time) in self.phases.iter().filter(|(phase, _)| ours(phase)) {
            let comma = if text.is_empty() { "" } else { ", " };
            // Writing to a string does not fail.
            let _ = write!(text, "{comma}{};dur={:.3}", phase.name(), time.as_secs_f64() * 1e3);
        }
        if text.is_empty() { None } else { HeaderValue::from_str(&text).ok() }
    }

    pub(crate) fn observe(&self, metrics: &Metrics) {
        for (phase, time) in &self.phases {
            metrics.phase(*phase, time.as_secs_f64());
        }
    }
}

fn kv_wait_in_headers(headers: &HeaderMap) -> Option<f64> {
    let values = headers.get_all(SERVER_TIMING).iter().filter_map(|value| value.to_str().ok());
    for entry in values.flat_map(|list| list.split(',')) {
        let mut parts = entry.split(';').map(str::trim);
        if parts.next() == Some(Phase::KvWait.name()) {
            return parts.find_map(|part| part.strip_prefix("dur=")).and_then(|ms| ms.parse().ok());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_is_read_from_an_engines_header() {
        let mut headers = HeaderMap::new();
        headers.insert(SERVER_TIMING, HeaderValue::from_static("queue;dur=1, kv_wait;desc=x;dur=4.5"));
        assert_eq!(kv_wait_in_headers(&headers), Some(4.5));
        assert_eq!(kv_wait_in_headers(&HeaderMap::new()), None);
    }

    #[test]
    fn a_wait_that_is_no_time_is_left_out() {
        let mut timing = Timing::begin();
        timing.reported(&HeaderMap::new(), br#"{"kv_transfer_params":{"kvik":{"kv_wait_ms":-1}}}"#);
        assert!(timing.header(&[Phase::KvWait]).is_none());
        timing.routed();
        let value = timing.header(&[Phase::Route, Phase::Total]).unwrap();
        assert!(value.to_str().unwrap().starts_with("route;dur="));
    }
}
