//! What a router makes of a stream that decode could not load: it counts it as that, and asks prefill anew.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use bytes::Bytes;
use common::streams::{PROMPT, Prefill, answer, ask, learn, prefill, stream_of, streaming};
use common::{Fake, Gone, complete, json, sse, until_metric, within};
use http::Response;
use tokio::sync::{Semaphore, mpsc};

const RECOMPUTED: &str = r#"{"kvik":{"outcome":"recomputed","reason":"peer_restarted"}}"#;
const LOADED: &str = r#"{"kvik":{"outcome":"loaded","kv_wait_ms":1.5}}"#;
const NOT_NEEDED: &str = r#"{"kvik":{"outcome":"not_needed"}}"#;

fn whole(params: &str) -> Response<Body> {
    json(200, &format!(r#"{{"choices":[],"kv_transfer_params":{params}}}"#))
}

fn streams(outcome: &str) -> String {
    format!(r#"kvik_router_streams_total{{outcome="{outcome}"}} 1"#)
}

/// A decode engine that answers its first request at once, and later ones so when it is let go.
async fn decode(next: impl Fn() -> Response<Body> + Clone + Send + Sync + 'static) -> (Fake, Arc<Semaphore>) {
    let (asked, go) = (AtomicUsize::new(0), Arc::new(Semaphore::new(0)));
    let fake = {
        let go = go.clone();
        Fake::start(move || {
            let (first, go, next) = (asked.fetch_add(1, Ordering::Relaxed) == 0, go.clone(), next.clone());
            async move {
                if first {
                    return json(200, r#"{"choices":[]}"#);
                }
                go.acquire().await.unwrap().forget();
                next()
            }
        })
        .await
    };
    (fake, go)
}

/// A streamed answer of these events.
fn events(events: &[&str]) -> Response<Body> {
    let (chunks, receive) = mpsc::channel(8);
    for event in events {
        chunks.try_send(Ok(Bytes::from(format!("data: {event}\n\n")))).unwrap();
    }
    sse(receive, Gone::new().0)
}

const TOKEN: &str = r#"{"choices":[{"text":"a"}]}"#;

/// Whether the next request to prefill asks for its template, as a pull does.
async fn next_is_a_pull(router: &kvik_router::RunningRouter, prefill: &Prefill) -> bool {
    let asked = ask(router);
    let told = stream_of(&prefill.fake.next().await);
    asked.abort();
    told == serde_json::json!({})
}

/// The second request, which is a stream: decode answers it so while prefill computes.
async fn decode_first(answered: &str) -> (kvik_router::RunningRouter, Prefill, Fake) {
    let answered = whole(answered);
    let body = Arc::new(std::sync::Mutex::new(Some(answered)));
    let mut prefill = prefill(|| answer(false)).await;
    let (decode, go) = decode(move || body.lock().unwrap().take().unwrap_or_else(|| json(200, "{}"))).await;
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    let asked = ask(&router);
    assert!(stream_of(&prefill.fake.next().await)["seed"].is_string());
    decode.next().await;
    go.add_permits(1);
    assert_eq!(asked.await.unwrap().0, 200);
    let gone = within("prefill's question", prefill.gone.recv()).await.unwrap();
    within("prefill's end", gone).await.unwrap();
    (router, prefill, decode)
}

#[tokio::test]
async fn the_template_of_a_stream_that_decode_recomputed_is_forgotten() {
    let (router, prefill, _decode) = decode_first(RECOMPUTED).await;
    until_metric(&router, &streams("recomputed")).await;
    until_metric(&router, r#"kvik_router_recomputed_total{reason="stream_failed"} 1"#).await;
    assert!(next_is_a_pull(&router, &prefill).await);
}

#[tokio::test]
async fn the_template_of_a_stream_that_decode_loaded_is_kept() {
    for (params, outcome) in [(LOADED, "streamed"), (NOT_NEEDED, "not_needed")] {
        let (router, prefill, _decode) = decode_first(params).await;
        until_metric(&router, &streams(outcome)).await;
        assert!(!next_is_a_pull(&router, &prefill).await);
    }
}

#[tokio::test]
async fn the_last_event_of_a_streamed_answer_is_read() {
    let prefill = prefill(|| answer(false)).await;
    let last = format!(r#"{{"choices":[],"kv_transfer_params":{RECOMPUTED}}}"#);
    let (decode, go) = decode(move || events(&[TOKEN, TOKEN, &last, "[DONE]"])).await;
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    let asked = ask(&router);
    prefill.go.add_permits(1);
    decode.next().await;
    prefill.fake.next().await;
    go.add_permits(1);
    let (_, _, text) = asked.await.unwrap();
    assert!(text.ends_with("data: [DONE]\n\n") && text.contains(RECOMPUTED), "{text}");
    until_metric(&router, &streams("recomputed")).await;
    assert!(next_is_a_pull(&router, &prefill).await);
}

/// A stream whose answer says nothing, and has begun before prefill's.
async fn nothing_said(prefill: &Prefill) -> (kvik_router::RunningRouter, Fake) {
    let (decode, go) = decode(|| events(&[TOKEN, "[DONE]"])).await;
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    let asked = ask(&router);
    decode.next().await;
    prefill.fake.next().await;
    go.add_permits(64);
    assert_eq!(asked.await.unwrap().0, 200);
    (router, decode)
}

#[tokio::test]
async fn an_offer_after_decodes_answer_says_that_nothing_was_streamed() {
    let offer =
        || json(200, r#"{"kv_transfer_params":{"do_remote_prefill":true,"kvik":{"stream":{"n":"newer"}}}}"#);
    let prefill = prefill(offer).await;
    let (router, decode) = nothing_said(&prefill).await;
    prefill.go.add_permits(1);
    until_metric(&router, &streams("recomputed")).await;
    let release = decode.next().await;
    assert!(release.id().ends_with("-release"), "{}", release.id());
    let text = release.text();
    assert!(text.contains(r#""do_remote_prefill":true"#) && text.contains(r#""max_tokens":1"#), "{text}");
    until_metric(&router, r#"kvik_router_releases_total{outcome="released"} 1"#).await;
    // What has come since the stream was sent is kept.
    let _asked = ask(&router);
    assert_eq!(stream_of(&prefill.fake.next().await)["of"]["n"], "newer");
}

#[tokio::test]
async fn prefills_own_word_counts_where_decode_says_nothing() {
    let prefill = prefill(|| answer(false)).await;
    let (router, _decode) = nothing_said(&prefill).await;
    prefill.go.add_permits(1);
    until_metric(&router, &streams("streamed")).await;
    assert!(!next_is_a_pull(&router, &prefill).await);
}

/// On a busy machine the time in which prefill may be the second to answer passes before anybody asks again.
#[tokio::test]
async fn decode_may_be_the_first_to_answer() {
    for _ in 0..10 {
        let prefill = prefill(|| answer(false)).await;
        let (router, _decode) = nothing_said(&prefill).await;
        if !next_is_a_pull(&router, &prefill).await {
            return;
        }
    }
    panic!("no request was streamed while prefill had not answered");
}

#[tokio::test]
async fn a_stream_of_which_nobody_says_anything_is_not_trusted() {
    let mut prefill = prefill(|| answer(false)).await;
    let (router, _decode) = nothing_said(&prefill).await;
    let gone = within("prefill's question", prefill.gone.recv()).await.unwrap();
    within("prefill's end", gone).await.unwrap();
    until_metric(&router, &streams("unconfirmed")).await;
    assert!(next_is_a_pull(&router, &prefill).await);
}

#[tokio::test]
async fn a_refusal_of_decode_says_nothing_of_the_stream() {
    let prefill = prefill(|| answer(false)).await;
    let (decode, go) = decode(|| json(400, r#"{"error":"too long"}"#)).await;
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    go.add_permits(1);
    assert_eq!(complete(&router, PROMPT).await.0, 400);
    let (_, _, metrics) = common::get(&router, "/metrics").await;
    assert!(!metrics.contains("kvik_router_streams_total{"), "{metrics}");
}
