//! Whether the router can serve: each role needs an engine that is there.
//!
//! Traffic itself is the best probe, so what the last requests showed counts first. Only for a role in which no
//! engine has answered lately are the engines asked, all at once and within a second.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, Method, Response, StatusCode};
use serde_json::{Value, json};

use crate::metrics::FailureKind;
use crate::pool::{Engine, Pool};
use crate::reply::json_response;
use crate::shared::Shared;
use crate::upstream::{Attached, Call};

/// An answer older than this is no news.
const FRESH: Duration = Duration::from_secs(10);
const CHECK: Duration = Duration::from_secs(1);

pub(crate) async fn health(State(shared): State<Arc<Shared>>) -> Response<Body> {
    let (prefill, decode) = tokio::join!(is_up(&shared, &shared.prefill), is_up(&shared, &shared.decode));
    let status = if prefill && decode { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({
        "status": if prefill && decode { "ok" } else { "unavailable" },
        "prefill": role_report(&shared.prefill, prefill),
        "decode": role_report(&shared.decode, decode),
    });
    json_response(status, &body)
}

async fn is_up(shared: &Shared, pool: &Pool) -> bool {
    if pool.engines().iter().any(|engine| answered_lately(engine)) {
        return true;
    }
    let asked = join_all(pool.engines().iter().map(|engine| ask(shared, engine))).await;
    asked.contains(&true)
}

fn answered_lately(engine: &Engine) -> bool {
    engine.last().is_some_and(|(seen, when)| seen.is_ok() && when.elapsed() < FRESH)
}

/// Asks one engine; any answer but a 5xx says that it is there.
async fn ask(shared: &Shared, engine: &Engine) -> bool {
    let call = Call {
        method: Method::GET,
        path: "/health".into(),
        headers: HeaderMap::new(),
        body: Bytes::new(),
        _memory: None,
    };
    let attached = Attached::default();
    let asked = tokio::time::timeout(CHECK, shared.upstream.send(engine, &call, &attached, || {})).await;
    if asked.is_err() {
        engine.note_last(Err(FailureKind::Timeout));
    }
    matches!(asked, Ok(Ok(_)))
}

fn role_report(pool: &Pool, up: bool) -> Value {
    let engines: Vec<Value> = pool.engines().iter().map(|engine| engine_report(engine)).collect();
    json!({"role": pool.role.name(), "reachable": up, "engines": engines})
}

fn engine_report(engine: &Engine) -> Value {
    let (last, ago) = match engine.last() {
        None => ("none", None),
        Some((Ok(()), when)) => ("answered", Some(when)),
        Some((Err(kind), when)) => (kind.name(), Some(when)),
    };
    let ago = ago.map(|when| when.elapsed().as_secs_f64());
    json!({"url": engine.url.to_string(), "last": last, "seconds_ago": ago})
}
