//! Passing an engine's answer on to the client, piece by piece as it comes.
//!
//! Nothing is buffered: hyper asks for a piece when the client's connection can take one, and only then is the
//! engine's connection read, so a slow client slows its engine down and nobody else.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderMap, HeaderValue, TE, TRAILER};
use http::{Response, Version};
use hyper::body::{Body, Frame, Incoming};
use std::sync::Arc;
use tokio::time::{Instant, Sleep};

use crate::exchange::{Exchange, IN_HEADER, IN_TRAILER};
use crate::handover::Answer;
use crate::headers::for_client;
use crate::metrics::{FailureKind, Outcome, Stage};
use crate::pool::Engine;
use crate::timing::SERVER_TIMING;

/// The response to the client, which takes the exchange along until its last byte.
pub(crate) fn respond(mut exchange: Exchange, answer: Answer, trailers: bool) -> Response<axum::body::Body> {
    let Answer { mut head, first, rest, outcome } = answer;
    head.headers = for_client(&head.headers, &exchange.id);
    head.version = Version::HTTP_11;
    head.extensions.clear();
    if let Some(value) = exchange.timing.header(&IN_HEADER) {
        head.headers.append(SERVER_TIMING, value);
    }
    let body = match rest.filter(|(rest, _)| !(first.is_empty() && rest.is_end_stream())) {
        None => {
            exchange.finish(outcome);
            axum::body::Body::from(first)
        }
        Some((rest, engine)) => {
            if trailers {
                head.headers.insert(TRAILER, HeaderValue::from_static("server-timing"));
            }
            exchange.stage = Stage::Stream;
            let silence = exchange.shared.upstream.silence(engine.role);
            let quiet =
                Quiet { limit: silence, sleep: Box::pin(tokio::time::sleep(silence)), waiting: false };
            let first = Some(first).filter(|first| !first.is_empty());
            let relay = Relay { exchange: Some(exchange), first, rest, engine, quiet, outcome };
            axum::body::Body::new(relay)
        }
    };
    Response::from_parts(head, body)
}

/// Whether the client reads trailers.
pub(crate) fn takes_trailers(headers: &HeaderMap) -> bool {
    let values = headers.get_all(TE).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|list| list.split(',')).any(|coding| coding.trim().eq_ignore_ascii_case("trailers"))
}

/// The body of an answer in flight. Dropping it before its end closes the engine's connection.
struct Relay {
    /// Gone once the answer has ended, one way or the other.
    exchange: Option<Exchange>,
    first: Option<Bytes>,
    rest: Incoming,
    engine: Arc<Engine>,
    quiet: Quiet,
    outcome: Outcome,
}

impl Relay {
    fn ended(&mut self) -> Option<Result<Frame<Bytes>, io::Error>> {
        let mut exchange = self.exchange.take()?;
        exchange.timing.decoded();
        exchange.finish(self.outcome);
        let value = exchange.timing.header(&IN_TRAILER)?;
        Some(Ok(Frame::trailers(HeaderMap::from_iter([(SERVER_TIMING, value)]))))
    }

    /// Ends the client's connection without the end mark of its body: a broken answer must look broken.
    fn broke(&mut self, kind: FailureKind, why: String) -> Option<Result<Frame<Bytes>, io::Error>> {
        let mut exchange = self.exchange.take()?;
        let (role, url) = (self.engine.role.name(), &self.engine.url);
        log::warn!(request:% = exchange.id; "request {}: {role} engine {url} broke off its answer: {why}", exchange.id);
        self.engine.note(Err(kind));
        exchange.shared.metrics.upstream_error(self.engine.role, kind);
        exchange.finish(Outcome::Cut);
        Some(Err(io::Error::other(why)))
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = io::Error;

    fn is_end_stream(&self) -> bool {
        self.exchange.is_none()
    }

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = &mut *self;
        if this.exchange.is_none() {
            return Poll::Ready(None);
        }
        if let Some(first) = this.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        loop {
            match Pin::new(&mut this.rest).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    this.quiet.broken();
                    // An engine's own trailers end here: the client was promised ours alone.
                    if let Ok(data) = frame.into_data() {
                        if let Some(answering) = this.exchange.as_mut().and_then(|e| e.answering.as_mut()) {
                            answering.read(&data);
                        }
                        // Of an answer of known length this is the last that hyper asks for.
                        if this.rest.is_end_stream() {
                            this.ended();
                        }
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                }
                Poll::Ready(Some(Err(e))) => {
                    return Poll::Ready(this.broke(FailureKind::Closed, e.to_string()));
                }
                Poll::Ready(None) => return Poll::Ready(this.ended()),
                Poll::Pending => {
                    std::task::ready!(this.quiet.poll(cx));
                    let why = format!("nothing came for {} s", this.quiet.limit.as_secs_f64());
                    return Poll::Ready(this.broke(FailureKind::Timeout, why));
                }
            }
        }
    }
}

/// Measures an engine's silence, and nothing else: the time in which a slow client keeps us from asking the
/// engine does not count.
struct Quiet {
    limit: Duration,
    sleep: Pin<Box<Sleep>>,
    waiting: bool,
}

impl Quiet {
    fn broken(&mut self) {
        self.waiting = false;
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.waiting {
            self.waiting = true;
            self.sleep.as_mut().reset(Instant::now() + self.limit);
        }
        self.sleep.as_mut().poll(cx)
    }
}
