//! Sending one request to one engine, and saying what came of it.

use std::error::Error as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::client::legacy::connect::{CaptureConnection, HttpConnector, capture_connection};
use hyper_util::client::legacy::{Client, Error as ClientError};
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::config::{EngineUrl, RouterConfig};
use crate::connector::{Answered, MarkingConnector};
use crate::memory::Share;
use crate::metrics::{FailureKind, Role};
use crate::pool::Engine;

/// Idle connections are dropped before the engine drops them: common engine servers do so after five seconds.
const IDLE: Duration = Duration::from_secs(4);
const IDLE_PER_ENGINE: usize = 256;

/// An idle connection that the engine had closed fails at once. One that ends later ends with the engine, or by it, over
/// this request, which is then not sent again.
const STALE: Duration = Duration::from_secs(1);

/// An engine that computes is silent, so silence says nothing of its host, and so is the client that waits for it. A
/// host's kernel answers keepalive probes meanwhile; an engine's that has not acknowledged anything for a minute is gone.
pub(crate) const KEEPALIVE: Duration = Duration::from_secs(15);
const HOST_GONE: Duration = Duration::from_secs(60);

/// How an engine failed.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) role: Role,
    pub(crate) url: EngineUrl,
    pub(crate) kind: FailureKind,
    pub(crate) detail: String,
}

impl Failure {
    pub(crate) fn new(engine: &Engine, kind: FailureKind, detail: impl Into<String>) -> Self {
        Self { role: engine.role, url: engine.url.clone(), kind, detail: detail.into() }
    }

    /// Whether the request never left the router, so that another engine may be asked at no risk.
    pub(crate) fn nothing_sent(&self) -> bool {
        self.kind == FailureKind::Connect
    }
}

/// One request, ready for any engine of a role. Clones share the body.
#[derive(Clone)]
pub(crate) struct Call {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// Of the client's body, where this one is made from it.
    pub(crate) _memory: Option<Arc<Share>>,
}

/// Tells, from outside the future that sends, whether a request has been given to a connection.
#[derive(Default)]
pub(crate) struct Attached(Mutex<Option<CaptureConnection>>);

impl Attached {
    /// Watches an attempt to send. One before it that reached a connection counts on.
    fn watch(&self, connection: CaptureConnection) {
        let mut watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !watched.as_ref().is_some_and(reached) {
            *watched = Some(connection);
        }
    }

    /// True once an engine may have seen the request.
    pub(crate) fn is_attached(&self) -> bool {
        let watched = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        watched.as_ref().is_some_and(reached)
    }
}

fn reached(connection: &CaptureConnection) -> bool {
    connection.connection_metadata().is_some()
}

/// Connections to all engines, kept open between requests.
pub(crate) struct Upstream {
    client: Client<MarkingConnector, Full<Bytes>>,
    prefill_silence: Duration,
    decode_silence: Duration,
}

impl Upstream {
    pub(crate) fn new(config: &RouterConfig) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(config.connect_timeout));
        connector.set_keepalive(Some(KEEPALIVE));
        connector.set_keepalive_interval(Some(KEEPALIVE));
        connector.set_tcp_user_timeout(Some(HOST_GONE));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_PER_ENGINE)
            .build(MarkingConnector(connector, config.connect_timeout));
        Self { client, prefill_silence: config.prefill_timeout, decode_silence: config.decode_timeout }
    }

    /// The longest silence an engine of this role may keep.
    pub(crate) fn silence(&self, role: Role) -> Duration {
        match role {
            Role::Prefill => self.prefill_silence,
            Role::Decode => self.decode_silence,
        }
    }

    /// Sends `call` and waits for the head of the answer: a success, whose body is yet to be read, or a 4xx, with which
    /// the request is at fault and another engine would say the same. No answer and any other is a failure. Dropping the future takes the request back: its
    /// connection is closed, which is how engines learn that nobody wants the answer.
    ///
    /// `on_stale` is told when the request is sent a second time, because the first went to an idle connection
    /// that the engine had just closed.
    pub(crate) async fn send(
        &self,
        engine: &Engine,
        call: &Call,
        attached: &Attached,
        on_stale: impl Fn(),
    ) -> Result<Response<Incoming>, Failure> {
        let silence = self.silence(engine.role);
        let sent = tokio::time::timeout(silence, self.send_fresh(engine, call, attached, on_stale)).await;
        let answered = sent.unwrap_or_else(|_| {
            let detail = format!("no answer within {} s", silence.as_secs_f64());
            Err(Failure::new(engine, FailureKind::Timeout, detail))
        });
        let answered = answered.and_then(|response| match response.status() {
            status if status.is_success() || status.is_client_error() => Ok(response),
            status => {
                let kind = if status.is_server_error() { FailureKind::Status } else { FailureKind::Protocol };
                Err(Failure::new(engine, kind, format!("it answered {status}")))
            }
        });
        engine.note(answered.as_ref().map_or_else(|failure| Err(failure.kind), |_| Ok(())));
        answered
    }

    async fn send_fresh(
        &self,
        engine: &Engine,
        call: &Call,
        attached: &Attached,
        on_stale: impl Fn(),
    ) -> Result<Response<Incoming>, Failure> {
        let began = Instant::now();
        let error = match self.send_once(engine, call, attached).await? {
            Ok(response) => return Ok(response),
            Err(error) => error,
        };
        let kind = kind_of(&error);
        let stale = began.elapsed() < STALE && error.connect_info().is_some_and(Answered::is_marked);
        if kind != FailureKind::Closed || !stale {
            return Err(Failure::new(engine, kind, chain(&error)));
        }
        on_stale();
        match self.send_once(engine, call, attached).await? {
            Ok(response) => Ok(response),
            // The first attempt may have reached the engine: even where the second could not connect, this is
            // not the failure of a request that was never sent.
            Err(error) => {
                let kind = match kind_of(&error) {
                    FailureKind::Connect => FailureKind::Closed,
                    kind => kind,
                };
                Err(Failure::new(engine, kind, chain(&error)))
            }
        }
    }

    async fn send_once(
        &self,
        engine: &Engine,
        call: &Call,
        attached: &Attached,
    ) -> Result<Result<Response<Incoming>, ClientError>, Failure> {
        let malformed = |e: http::Error| Failure::new(engine, FailureKind::Protocol, e.to_string());
        let uri = engine.url.join(&call.path).map_err(malformed)?;
        let mut request = Request::new(Full::new(call.body.clone()));
        *request.method_mut() = call.method.clone();
        *request.uri_mut() = uri;
        *request.headers_mut() = call.headers.clone();
        attached.watch(capture_connection(&mut request));
        let answer = self.client.request(request).await;
        if let Ok(response) = &answer {
            Answered::mark(response.extensions());
        }
        Ok(answer)
    }
}

fn kind_of(error: &ClientError) -> FailureKind {
    if error.is_connect() {
        return FailureKind::Connect;
    }
    let inner = error.source().and_then(|source| source.downcast_ref::<hyper::Error>());
    match inner {
        Some(inner) if inner.is_parse() => FailureKind::Protocol,
        _ => FailureKind::Closed,
    }
}

/// An error with its causes in one line.
fn chain(error: &ClientError) -> String {
    let mut text = String::new();
    let mut next: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = next {
        let said = error.to_string();
        if !text.ends_with(&said) {
            if !text.is_empty() {
                text.push_str(": ");
            }
            text.push_str(&said);
        }
        next = error.source();
    }
    text
}
