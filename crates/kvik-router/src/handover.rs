//! The two steps of the pull protocol: prefill computes and keeps, decode fetches and answers. Where the router
//! streams, the two may also go at once: [`crate::stream`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, TRANSFER_ENCODING};
use http::{HeaderMap, Method, Response};
use hyper::body::{Body, Incoming};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::body::{Kind, RequestBody};
use crate::collect::{CollectError, collect, next_piece};
use crate::config::EngineUrl;
use crate::exchange::Exchange;
use crate::headers::for_engine;
use crate::memory::Share;
use crate::metrics::{FailureKind, Outcome, Recompute, Role, Stage};
use crate::pool::Engine;
use crate::release::GrantedKv;
use crate::reply::Reply;
use crate::shared::Shared;
use crate::stream;
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
    pub(crate) memory: Arc<Share>,
}

impl ClientRequest<'_> {
    /// One of the requests that it becomes.
    pub(crate) fn call(&self, headers: &HeaderMap, body: Vec<u8>) -> Call {
        Call {
            method: Method::POST,
            path: self.path.clone(),
            headers: headers.clone(),
            body: body.into(),
            _memory: Some(self.memory.clone()),
        }
    }
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
        recompute(&exchange.shared, &exchange.id, reason);
    } else {
        let mut engines = exchange.shared.prefill.pick();
        let first = engines.first().cloned().filter(|_| exchange.shared.config.stream);
        if let Some(engine) = first.filter(|engine| engine.template().is_some()) {
            if let Some(answer) = stream::serve(exchange, request, &headers, &engine).await? {
                return Ok(answer);
            }
            engines.rotate_left(1);
        }
        match prefill(exchange, request, &headers, engines).await? {
            Prefilled::Refused(answer) => return Ok(answer),
            Prefilled::NoParams => recompute(&exchange.shared, &exchange.id, Recompute::NoParams),
            Prefilled::Params(granted) => params = Some(granted),
        }
    }
    decode(exchange, request, &headers, params.as_deref()).await
}

pub(crate) fn recompute(shared: &Shared, id: &str, reason: Recompute) {
    shared.metrics.recomputed(reason);
    log::debug!(request:% = id; "request {id}: decode computes the prompt: {}", reason.name());
}

async fn prefill(
    exchange: &mut Exchange,
    request: &ClientRequest<'_>,
    headers: &HeaderMap,
    engines: Vec<Arc<Engine>>,
) -> Result<Prefilled, Reply> {
    let asks = exchange.shared.config.stream.then_some("{}");
    let call = request.call(headers, request.body.for_prefill(request.kind, asks));
    exchange.stage = Stage::Prefill;
    exchange.timing.routed();
    let began = Instant::now();
    let (shared, nothing) = (exchange.shared.clone(), Attached::default());
    let chosen = &mut exchange.prefill;
    let (engine, response) = shared.ask(&exchange.id, engines, &call, &nothing, chosen).await?;
    if !response.status().is_success() {
        return Ok(Prefilled::Refused(Answer::passed_on(response, engine)));
    }
    let params = read_params(&shared, response).await;
    let params = params.map_err(|fault| failed(&shared, &exchange.id, &engine, fault))?;
    exchange.timing.prefilled(began);
    let Some(params) = params else { return Ok(Prefilled::NoParams) };
    engine.keep_template(stream::template_of(&params));
    Ok(Prefilled::Params(params))
}

/// Reads a prefill engine's answer: the params in it.
pub(crate) async fn read_params(
    shared: &Shared,
    response: Response<Incoming>,
) -> Result<Option<Box<RawValue>>, (FailureKind, String)> {
    let silence = shared.upstream.silence(Role::Prefill);
    let answer =
        collect(response.into_body(), MOST_PREFILL_ANSWER, silence, |_| true).await.map_err(broken)?;
    params_of(&answer).map_err(|e| (FailureKind::Protocol, format!("its answer is not a JSON object: {e}")))
}

/// The params in a prefill answer; `null` is the same as none. What is in them is the engines' affair.
pub(crate) fn params_of(answer: &[u8]) -> Result<Option<Box<RawValue>>, serde_json::Error> {
    #[derive(Deserialize)]
    struct PrefillAnswer {
        kv_transfer_params: Option<Box<RawValue>>,
    }
    Ok(serde_json::from_slice::<PrefillAnswer>(answer)?.kv_transfer_params)
}

pub(crate) async fn decode(
    exchange: &mut Exchange,
    request: &ClientRequest<'_>,
    headers: &HeaderMap,
    params: Option<&RawValue>,
) -> Result<Answer, Reply> {
    let attached = Arc::new(Attached::default());
    let call = request.call(headers, request.body.for_decode(params));
    exchange.granted =
        params.map(|_| GrantedKv { call: call.clone(), kind: request.kind, attached: attached.clone() });
    exchange.stage = Stage::Decode;
    exchange.timing.decode_begins();
    let shared = exchange.shared.clone();
    let (engine, begun) = begin(&shared, &exchange.id, &call, &attached, &mut exchange.decode).await?;
    exchange.decode_answered(matches!(begun, Begun::Refused(_)));
    Ok(answer(exchange, engine, begun))
}

/// As much of a decode engine's answer as has to be there before its head is passed on.
pub(crate) enum Begun {
    /// A 4xx.
    Refused(Response<Incoming>),
    /// All of a short answer.
    Whole(http::response::Parts, Bytes),
    /// The first bytes of any other.
    First(http::response::Parts, Bytes, Incoming),
}

/// Asks the decode engines in turn, and reads the beginning of the answer; `chosen` tells the last that was asked.
pub(crate) async fn begin(
    shared: &Shared,
    id: &str,
    call: &Call,
    attached: &Attached,
    chosen: &mut Option<EngineUrl>,
) -> Result<(Arc<Engine>, Begun), Reply> {
    let (engine, response) = shared.ask(id, shared.decode.pick(), call, attached, chosen).await?;
    if !response.status().is_success() {
        return Ok((engine, Begun::Refused(response)));
    }
    if !says_its_end(&response) {
        let why = "its answer has neither a length nor chunks, so that a cut one would look whole";
        return Err(failed(shared, id, &engine, (FailureKind::Protocol, why.into())));
    }
    match read_beginning(response, shared.upstream.silence(Role::Decode)).await {
        Ok(begun) => Ok((engine, begun)),
        Err(e) => Err(failed(shared, id, &engine, broken(e))),
    }
}

/// Whether the end of an answer can be told from the end of its connection.
fn says_its_end(response: &Response<Incoming>) -> bool {
    let codings = response.headers().get_all(TRANSFER_ENCODING).iter().next_back();
    let chunked =
        codings.is_some_and(|codings| codings.as_bytes().to_ascii_lowercase().ends_with(b"chunked"));
    chunked || response.body().size_hint().exact().is_some()
}

/// Reads the beginning of a success. A client waits no longer for that: an engine's head without bytes tells
/// it nothing.
async fn read_beginning(response: Response<Incoming>, silence: Duration) -> Result<Begun, CollectError> {
    let (head, mut body) = response.into_parts();
    if body.size_hint().exact().is_some_and(|size| size <= MOST_WHOLE_ANSWER as u64) {
        return Ok(Begun::Whole(head, collect(body, MOST_WHOLE_ANSWER, silence, |_| true).await?));
    }
    let first = next_piece(&mut body, silence).await?.unwrap_or_default();
    Ok(Begun::First(head, first, body))
}

/// The answer that begins so.
pub(crate) fn answer(exchange: &mut Exchange, engine: Arc<Engine>, begun: Begun) -> Answer {
    let (head, first, rest) = match begun {
        Begun::Refused(response) => return Answer::passed_on(response, engine),
        Begun::Whole(head, whole) => {
            exchange.timing.decoded();
            (head, whole, None)
        }
        Begun::First(head, first, body) => {
            if is_stream(&head.headers) {
                exchange.timing.first_token();
            }
            (head, first, Some((body, engine)))
        }
    };
    exchange.timing.reported(&head.headers, &first);
    Answer { head, first, rest, outcome: Outcome::Ok }
}

fn is_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("text/event-stream"))
}

/// An engine that answered, and then failed within its answer.
fn failed(shared: &Shared, id: &str, engine: &Engine, (kind, detail): (FailureKind, String)) -> Reply {
    engine.note(Err(kind));
    let failure = Failure::new(engine, kind, detail);
    shared.report(id, &failure);
    Reply::engine_failed(&failure)
}

fn broken(error: CollectError) -> (FailureKind, String) {
    match error {
        CollectError::TooLarge => {
            (FailureKind::Protocol, "its answer is larger than any it should give".into())
        }
        CollectError::Silent => {
            (FailureKind::Timeout, "it fell silent within its answer, or sent it too slowly".into())
        }
        CollectError::Broken | CollectError::NoMemory => {
            (FailureKind::Closed, "its connection ended within its answer".into())
        }
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
