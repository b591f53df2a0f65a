//! The two steps of the pull protocol: prefill computes and keeps, decode fetches and answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Method, Response};
use hyper::body::{Body, Incoming};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::body::{Kind, RequestBody};
use crate::collect::{CollectError, collect, next_piece};
use crate::exchange::Exchange;
use crate::headers::for_engine;
use crate::metrics::{FailureKind, Outcome, Recompute, Role, Stage};
use crate::pool::Engine;
use crate::release::GrantedKv;
use crate::reply::Reply;
use crate::shared::Shared;
use crate::upstream::{Attached, Call, Failure};

/// Largest prefill answer: one token, and params that may list a hundred thousand pages.
const MOST_PREFILL_ANSWER: usize = 16 << 20;

/// A whole answer up to this size is read before it is passed on; a longer one is passed on as it comes.
const MOST_WHOLE_ANSWER: usize = 4 << 20;

/// An engine's answer on its way to the client.
pub(crate) struct Answer {
    pub(crate) head: http::response::Parts,
    /// What has been read of the body.
    pub(crate) first: Bytes,
    /// The rest of the body and the engine it comes from, unless the body has been read whole.
    pub(crate) rest: Option<(Incoming, Arc<Engine>)>,
    /// How the request is counted once the answer has been passed on completely.
    pub(crate) outcome: Outcome,
}

/// A client's request, as the two steps need it.
pub(crate) struct ClientRequest<'a> {
    pub(crate) kind: Kind,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: RequestBody<'a>,
}

/// What prefill left us with.
enum Prefilled {
    Params(Box<RawValue>),
    NoParams,
    /// A 4xx that the client is to see.
    Refused(Answer),
}

/// Serves one generation request.
pub(crate) async fn serve(exchange: &mut Exchange, request: &ClientRequest<'_>) -> Result<Answer, Reply> {
    let headers = for_engine(&request.headers, &exchange.id);
    let mut params = None;
    if let Some(reason) = request.body.needs_whole_decode(request.kind) {
        recompute(exchange, reason);
    } else {
        match prefill(exchange, request, &headers).await? {
            Prefilled::Refused(answer) => return Ok(answer),
            Prefilled::NoParams => recompute(exchange, Recompute::NoParams),
            Prefilled::Params(granted) => params = Some(granted),
        }
    }
    decode(exchange, request, headers, params.as_deref()).await
}

fn recompute(exchange: &Exchange, reason: Recompute) {
    exchange.shared.metrics.recomputed(reason);
    log::debug!(request:% = exchange.id; "request {}: decode computes the prompt: {}", exchange.id, reason.name());
}

async fn prefill(
    exchange: &mut Exchange,
    request: &ClientRequest<'_>,
    headers: &HeaderMap,
) -> Result<Prefilled, Reply> {
    let body = request.body.for_prefill(request.kind).into();
    let call = Call { method: Method::POST, path: request.path.clone(), headers: headers.clone(), body };
    exchange.stage = Stage::Prefill;
    exchange.timing.routed();
    let began = Instant::now();
    let (engine, response) = ask(exchange, Role::Prefill, &call, &Attached::default()).await?;
    if !response.status().is_success() {
        return Ok(Prefilled::Refused(Answer::passed_on(response, engine)));
    }
    let silence = exchange.shared.upstream.silence(Role::Prefill);
    let answer = collect(response.into_body(), MOST_PREFILL_ANSWER, silence).await;
    let answer = answer.map_err(|e| failed(&exchange.shared, &engine, broken(e)))?;
    exchange.timing.prefilled(began);
    match params_of(&answer) {
        Ok(Some(params)) => Ok(Prefilled::Params(params)),
        Ok(None) => Ok(Prefilled::NoParams),
        Err(e) => {
            let fault = (FailureKind::Protocol, format!("its answer is not a JSON object: {e}"));
            Err(failed(&exchange.shared, &engine, fault))
        }
    }
}

/// The params in a prefill answer; `null` is the same as none. What is in them is the engines' affair.
pub(crate) fn params_of(answer: &[u8]) -> Result<Option<Box<RawValue>>, serde_json::Error> {
    #[derive(Deserialize)]
    struct PrefillAnswer {
        kv_transfer_params: Option<Box<RawValue>>,
    }
    Ok(serde_json::from_slice::<PrefillAnswer>(answer)?.kv_transfer_params)
}

async fn decode(
    exchange: &mut Exchange,
    request: &ClientRequest<'_>,
    headers: HeaderMap,
    params: Option<&RawValue>,
) -> Result<Answer, Reply> {
    let attached = Arc::new(Attached::default());
    let path = request.path.clone();
    exchange.granted = params.map(|params| GrantedKv {
        path: path.clone(),
        headers: headers.clone(),
        body: request.body.for_release(request.kind, params).into(),
        attached: attached.clone(),
    });
    let body = request.body.for_decode(params).into();
    exchange.stage = Stage::Decode;
    exchange.timing.decode_begins();
    let call = Call { method: Method::POST, path, headers, body };
    let (engine, response) = ask(exchange, Role::Decode, &call, &attached).await?;
    exchange.granted = None;
    if !response.status().is_success() {
        return Ok(Answer::passed_on(response, engine));
    }
    let silence = exchange.shared.upstream.silence(Role::Decode);
    let begun = begin_answer(exchange, response, &engine, silence).await;
    begun.map_err(|e| failed(&exchange.shared, &engine, broken(e)))
}

/// Reads as much of an answer as has to be there before its head is passed on: a short whole answer
/// completely, of any other the first bytes. A client waits no longer for that: an engine's head without
/// bytes tells it nothing.
async fn begin_answer(
    exchange: &mut Exchange,
    response: Response<Incoming>,
    engine: &Arc<Engine>,
    silence: Duration,
) -> Result<Answer, CollectError> {
    let (head, mut body) = response.into_parts();
    let size = body.size_hint().exact();
    let (first, rest) = if size.is_some_and(|size| size <= MOST_WHOLE_ANSWER as u64) {
        let whole = collect(body, MOST_WHOLE_ANSWER, silence).await?;
        exchange.timing.decoded();
        (whole, None)
    } else {
        let first = next_piece(&mut body, silence).await?.unwrap_or_default();
        if is_stream(&head.headers) {
            exchange.timing.first_token();
        }
        (first, Some((body, engine.clone())))
    };
    exchange.timing.reported(&head.headers, &first);
    Ok(Answer { head, first, rest, outcome: Outcome::Ok })
}

fn is_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("text/event-stream"))
}

/// Asks the engines of a role in turn, as long as nothing has been sent to any.
pub(crate) async fn ask(
    exchange: &mut Exchange,
    role: Role,
    call: &Call,
    attached: &Attached,
) -> Result<(Arc<Engine>, Response<Incoming>), Reply> {
    let shared = exchange.shared.clone();
    let pool = shared.pool(role);
    let mut last = None;
    for engine in pool.pick() {
        match role {
            Role::Prefill => exchange.prefill = Some(engine.url.clone()),
            Role::Decode => exchange.decode = Some(engine.url.clone()),
        }
        let stale = || shared.metrics.stale_connection(role);
        match shared.upstream.send(engine, call, attached, stale).await {
            Ok(response) => return Ok((engine.clone(), response)),
            Err(failure) => {
                report(&shared, &exchange.id, &failure);
                let try_next = failure.nothing_sent();
                last = Some(failure);
                if !try_next {
                    break;
                }
            }
        }
    }
    Err(last.as_ref().map_or_else(|| Reply::no_engine(role), Reply::engine_failed))
}

fn report(shared: &Shared, id: &str, failure: &Failure) {
    shared.metrics.upstream_error(failure.role, failure.kind);
    log::warn!(request:% = id; "request {id}: {} engine {}: {}", failure.role.name(), failure.url, failure.detail);
}

/// An engine that answered, and then failed within its answer.
fn failed(shared: &Shared, engine: &Engine, (kind, detail): (FailureKind, String)) -> Reply {
    engine.note(Err(kind));
    shared.metrics.upstream_error(engine.role, kind);
    Reply::engine_failed(&Failure::new(engine, kind, detail))
}

fn broken(error: CollectError) -> (FailureKind, String) {
    match error {
        CollectError::TooLarge => {
            (FailureKind::Protocol, "its answer is larger than any it should give".into())
        }
        CollectError::Silent => (FailureKind::Timeout, "it fell silent within its answer".into()),
        CollectError::Broken => (FailureKind::Closed, "its connection ended within its answer".into()),
    }
}

impl Answer {
    /// An answer that goes to the client as it is.
    pub(crate) fn passed_on(response: Response<Incoming>, engine: Arc<Engine>) -> Self {
        let outcome = if response.status().is_success() { Outcome::Ok } else { Outcome::Refused };
        let (head, body) = response.into_parts();
        Self { head, first: Bytes::new(), rest: Some((body, engine)), outcome }
    }
}
