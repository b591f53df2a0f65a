//! The paths of the router, and their handlers.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::routing::{get, post};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, EXPECT, HeaderValue};
use http::{HeaderMap, Method, Response, StatusCode, Uri};

use crate::body::{Kind, RequestBody};
use crate::collect::{CollectError, LEAST_RATE, collect, next_piece};
use crate::exchange::Exchange;
use crate::handover::{self, Answer, ClientRequest};
use crate::headers::{for_engine, request_id};
use crate::health;
use crate::memory::Share;
use crate::metrics::{Endpoint, Outcome, Stage};
use crate::relay::{respond, takes_trailers};
use crate::reply::{Reply, json_response};
use crate::shared::Shared;
use crate::upstream::{Attached, Call};

/// The longest silence of a client whose body nobody wants.
const READ_ON: Duration = Duration::from_secs(1);

const PATHS: &str =
    "POST /v1/completions, POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics";

/// The paths and their handlers.
pub(crate) fn app(shared: Arc<Shared>) -> axum::Router {
    axum::Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/models", get(models))
        .route("/health", get(health::health))
        .route("/metrics", get(metrics))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .with_state(shared)
}

async fn completions(State(shared): State<Arc<Shared>>, request: Request) -> Response<Body> {
    generate(shared, request, Kind::Completion, Endpoint::Completions).await
}

async fn chat_completions(State(shared): State<Arc<Shared>>, request: Request) -> Response<Body> {
    generate(shared, request, Kind::Chat, Endpoint::ChatCompletions).await
}

async fn generate(shared: Arc<Shared>, request: Request, kind: Kind, endpoint: Endpoint) -> Response<Body> {
    let id = request_id(request.headers());
    let Some(mut exchange) = Exchange::begin(&shared, endpoint, id.clone()) else {
        return turned_away(&shared, &id, request, Reply::overloaded(shared.config.max_inflight)).await;
    };
    let trailers = takes_trailers(request.headers());
    match run(&mut exchange, request, kind).await {
        Ok(answer) => respond(exchange, answer, trailers),
        Err(reply) => {
            exchange.finish(reply.outcome);
            reply.into_response(&id)
        }
    }
}

async fn run(exchange: &mut Exchange, request: Request, kind: Kind) -> Result<Answer, Reply> {
    let (head, mut body) = request.into_parts();
    let read = read_body(&exchange.shared, &mut body).await;
    if let Err(reply) = &read {
        if reply.outcome == Outcome::Overloaded {
            log::warn!(request:% = exchange.id; "request {}: turned away: {}", exchange.id, reply.message);
        }
        if matches!(reply.status, StatusCode::PAYLOAD_TOO_LARGE | StatusCode::SERVICE_UNAVAILABLE) {
            read_on(&exchange.shared, &head.headers, body).await;
        }
    }
    let (bytes, memory) = read?;
    let parsed = RequestBody::parse(&bytes, kind)?;
    let (path, memory) = (path_of(&head.uri), Arc::new(memory));
    let request = ClientRequest { kind, path, headers: head.headers, body: parsed, memory };
    handover::serve(exchange, &request).await
}

async fn read_body(shared: &Shared, body: &mut Body) -> Result<(Bytes, Share), Reply> {
    let (config, mut memory) = (&shared.config, shared.bodies.begin());
    let read = collect(body, config.max_body, config.client_timeout, |length| memory.grow(length)).await;
    read.map(|bytes| (bytes, memory)).map_err(|e| match e {
        CollectError::TooLarge => {
            let message =
                format!("the request body is larger than {} bytes, this router's limit", config.max_body);
            Reply::refused(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
        }
        CollectError::Silent => {
            let silence = config.client_timeout.as_secs_f64();
            let message = format!(
                "nothing more of the request body came for {silence} s, or for longer than that it came at less than \
                 {LEAST_RATE} bytes a second"
            );
            Reply::refused(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
        }
        CollectError::Broken => Reply::client_left(),
        CollectError::NoMemory => Reply::no_memory(config.max_body_memory),
    })
}

/// Reads and drops what a client sends of a body that nobody wants, before it is answered: a connection that is closed
/// over unread bytes is reset, and the client might never see why. Who waits for `100 Continue` sends nothing.
async fn read_on(shared: &Shared, headers: &HeaderMap, mut body: Body) {
    let all = async { while let Ok(Some(_)) = next_piece(&mut body, READ_ON).await {} };
    if !headers.contains_key(EXPECT) {
        // Past that, it may be reset.
        let _ = tokio::time::timeout(shared.config.client_timeout, all).await;
    }
}

/// The answer to a request whose body is not looked at.
async fn turned_away(shared: &Shared, id: &str, request: Request, reply: Reply) -> Response<Body> {
    let (head, body) = request.into_parts();
    read_on(shared, &head.headers, body).await;
    reply.into_response(id)
}

fn path_of(uri: &Uri) -> String {
    uri.path_and_query().map_or_else(|| uri.path().to_owned(), |path| path.as_str().to_owned())
}

async fn models(State(shared): State<Arc<Shared>>, request: Request) -> Response<Body> {
    let id = request_id(request.headers());
    let Some(mut exchange) = Exchange::begin(&shared, Endpoint::Models, id.clone()) else {
        return turned_away(&shared, &id, request, Reply::overloaded(shared.config.max_inflight)).await;
    };
    let headers = for_engine(request.headers(), &id);
    let call = Call {
        method: Method::GET,
        path: path_of(request.uri()),
        headers,
        body: Bytes::new(),
        _memory: None,
    };
    exchange.stage = Stage::Decode;
    let engines = shared.decode.pick_beside();
    match shared.ask(&id, engines, &call, &Attached::default(), &mut exchange.decode).await {
        Ok((engine, response)) => {
            let answer = Answer::passed_on(response, engine);
            if request.method() == Method::HEAD {
                // The head is all that goes to the client.
                exchange.finish(answer.outcome);
            }
            respond(exchange, answer, false)
        }
        Err(reply) => {
            exchange.finish(reply.outcome);
            reply.into_response(&id)
        }
    }
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response<Body> {
    match shared.metrics.text() {
        Ok(text) => {
            let mut response = Response::new(Body::from(text));
            let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
            response.headers_mut().insert(CONTENT_TYPE, kind);
            response
        }
        Err(e) => {
            let message =
                serde_json::json!({"error": {"message": format!("metrics cannot be written: {e}")}});
            json_response(StatusCode::INTERNAL_SERVER_ERROR, &message)
        }
    }
}

async fn unknown_path(State(shared): State<Arc<Shared>>, request: Request) -> Response<Body> {
    let message = format!("there is no {}; this router serves {PATHS}", request.uri().path());
    let reply = Reply::refused(StatusCode::NOT_FOUND, "unknown_path", message);
    turned_away(&shared, &request_id(request.headers()), request, reply).await
}

async fn wrong_method(State(shared): State<Arc<Shared>>, request: Request) -> Response<Body> {
    let message =
        format!("{} is not for {}; this router serves {PATHS}", request.uri().path(), request.method());
    let reply = Reply::refused(StatusCode::METHOD_NOT_ALLOWED, "wrong_method", message);
    turned_away(&shared, &request_id(request.headers()), request, reply).await
}
