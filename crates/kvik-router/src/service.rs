//! The paths of the router, and their handlers.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::routing::{get, post};
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Response, StatusCode, Uri};

use crate::body::{Kind, RequestBody};
use crate::collect::{CollectError, collect};
use crate::config::RouterConfig;
use crate::exchange::Exchange;
use crate::handover::{self, Answer, ClientRequest};
use crate::headers::{for_engine, request_id};
use crate::health;
use crate::metrics::{Endpoint, Stage};
use crate::relay::{respond, takes_trailers};
use crate::reply::{Reply, json_response};
use crate::shared::Shared;
use crate::upstream::{Attached, Call};

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
        return Reply::overloaded(shared.config.max_inflight).into_response(&id);
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
    let (head, body) = request.into_parts();
    let bytes = read_body(&exchange.shared.config, body).await?;
    let parsed = RequestBody::parse(&bytes, kind)?;
    let request = ClientRequest { kind, path: path_of(&head.uri), headers: head.headers, body: parsed };
    handover::serve(exchange, &request).await
}

async fn read_body(config: &RouterConfig, body: Body) -> Result<Bytes, Reply> {
    collect(body, config.max_body, config.client_timeout).await.map_err(|e| match e {
        CollectError::TooLarge => {
            let message =
                format!("the request body is larger than {} bytes, this router's limit", config.max_body);
            Reply::refused(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
        }
        CollectError::Silent => {
            let silence = config.client_timeout.as_secs_f64();
            let message = format!("nothing more of the request body came for {silence} s");
            Reply::refused(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
        }
        CollectError::Broken => Reply::client_left(),
    })
}

fn path_of(uri: &Uri) -> String {
    uri.path_and_query().map_or_else(|| uri.path().to_owned(), |path| path.as_str().to_owned())
}

async fn models(State(shared): State<Arc<Shared>>, request: Request) -> Response<Body> {
    let id = request_id(request.headers());
    let Some(mut exchange) = Exchange::begin(&shared, Endpoint::Models, id.clone()) else {
        return Reply::overloaded(shared.config.max_inflight).into_response(&id);
    };
    let headers = for_engine(request.headers(), &id);
    let call = Call { method: Method::GET, path: path_of(request.uri()), headers, body: Bytes::new() };
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

async fn unknown_path(request: Request) -> Response<Body> {
    let message = format!("there is no {}; this router serves {PATHS}", request.uri().path());
    Reply::refused(StatusCode::NOT_FOUND, "unknown_path", message)
        .into_response(&request_id(request.headers()))
}

async fn wrong_method(request: Request) -> Response<Body> {
    let message =
        format!("{} is not for {}; this router serves {PATHS}", request.uri().path(), request.method());
    Reply::refused(StatusCode::METHOD_NOT_ALLOWED, "wrong_method", message)
        .into_response(&request_id(request.headers()))
}
