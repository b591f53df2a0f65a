//! Engines that stream, and requests that make a router learn of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use http::Response;
use kvik_router::{RouterConfig, RunningRouter};
use serde_json::Value;
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::{Client, Fake, Gone, Got, complete, config, json, whole, within};

pub const TEMPLATE: &str = r#"{"version":1,"tickets":[ "t" ],"n":1.50}"#;
pub const PROMPT: &str = r#"{"prompt":"hello","max_tokens":5}"#;

pub fn params(offer: bool) -> String {
    let offered = if offer { r#""do_remote_prefill":true,"# } else { "" };
    format!(r#"{{{offered}"kvik":{{"version":5,"stream":{TEMPLATE}}}}}"#)
}

pub fn answer(offer: bool) -> Response<Body> {
    json(200, &format!(r#"{{"id":"p","kv_transfer_params":{}}}"#, params(offer)))
}

pub fn streaming(prefill: &[&str], decode: &[&str]) -> RunningRouter {
    RunningRouter::start(RouterConfig { stream: true, ..config(prefill, decode) }).unwrap()
}

/// A prefill engine that offers its first answer, and later ones as `next` says after being let go.
pub struct Prefill {
    pub fake: Fake,
    pub go: Arc<Semaphore>,
    pub gone: mpsc::UnboundedReceiver<oneshot::Receiver<()>>,
}

pub async fn prefill(next: impl Fn() -> Response<Body> + Clone + Send + Sync + 'static) -> Prefill {
    let (asked, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(Semaphore::new(0)));
    let (tell, gone) = mpsc::unbounded_channel();
    let fake = {
        let go = go.clone();
        Fake::start(move || {
            let (first, go, next) = (asked.fetch_add(1, Ordering::Relaxed) == 0, go.clone(), next.clone());
            let (mark, when) = Gone::new();
            if !first {
                tell.send(when).ok();
            }
            async move {
                if first {
                    mark.ended();
                    return answer(true);
                }
                go.acquire().await.unwrap().forget();
                mark.ended();
                next()
            }
        })
        .await
    };
    Prefill { fake, go, gone }
}

pub fn stream_of(got: &Got) -> Value {
    let body: Value = serde_json::from_slice(&got.body).unwrap();
    body["kv_transfer_params"]["kvik"]["stream"].clone()
}

/// The first request, after which the router has the template.
pub async fn learn(router: &RunningRouter, prefill: &Fake, decode: &Fake) {
    let (status, _, text) = complete(router, PROMPT).await;
    assert_eq!(status, 200, "{text}");
    assert_eq!(stream_of(&prefill.next().await), serde_json::json!({}));
    assert!(decode.next().await.text().contains(r#""do_remote_prefill":true"#));
}

pub fn ask(router: &RunningRouter) -> tokio::task::JoinHandle<(http::StatusCode, http::HeaderMap, String)> {
    let addr = router.addr();
    tokio::spawn(async move {
        let mut client = Client::connect(addr).await;
        let response = within("an answer", client.post("/v1/completions", PROMPT, &[])).await.unwrap();
        whole(response).await
    })
}

/// A decode engine that answers so many requests at once, and each later one when it is let go: what answers
/// before prefill was asked takes prefill's request back.
pub async fn decode_let_go(at_once: usize) -> (Fake, Arc<Semaphore>) {
    let go = Arc::new(Semaphore::new(at_once));
    let fake = {
        let go = go.clone();
        Fake::start(move || {
            let go = go.clone();
            async move {
                go.acquire().await.unwrap().forget();
                json(200, r#"{"choices":[{"text":"ok"}]}"#)
            }
        })
        .await
    };
    (fake, go)
}
