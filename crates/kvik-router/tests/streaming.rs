//! Streamed answers: nothing held back, nothing added, nothing hidden.

mod common;

use std::io;
use std::time::Duration;

use bytes::Bytes;
use common::*;
use http_body_util::BodyExt;
use kvik_router::RunningRouter;
use tokio::sync::mpsc;

const SENT: &str = r#"{"prompt":"x","stream":true}"#;

type Chunks = mpsc::Sender<Result<Bytes, io::Error>>;

/// A router before a decode engine whose chunks the test sends.
async fn streaming(
    change: impl FnOnce(&mut kvik_router::RouterConfig),
) -> (RunningRouter, Chunks, [Fake; 2]) {
    let (chunks, receive) = mpsc::channel(1);
    let decode = one_answer(sse(receive, Gone::new().0)).await;
    let prefill = good_prefill().await;
    let mut config = config(&[&prefill.url()], &[&decode.url()]);
    change(&mut config);
    (RunningRouter::start(config).unwrap(), chunks, [prefill, decode])
}

fn bytes(text: &'static str) -> Result<Bytes, io::Error> {
    Ok(Bytes::from_static(text.as_bytes()))
}

#[tokio::test]
async fn every_chunk_arrives_before_the_next_is_made() {
    let (router, chunks, _engines) = streaming(|_| {}).await;
    let mut client = Client::connect(router.addr()).await;
    let answer = tokio::spawn(client.post("/v1/completions", SENT, &[]));
    let pieces = ["data: {\"n\":1}\n\n", "data: {\"n\":", "2}\n\ndata: [DO", "NE]\n\n"];
    chunks.send(bytes(pieces[0])).await.unwrap();
    let answer = within("the head", answer).await.unwrap().unwrap();
    assert_eq!(answer.headers()["content-type"], "text/event-stream; charset=utf-8");
    let timing = answer.headers()["server-timing"].to_str().unwrap().to_owned();
    let names: Vec<_> = timing.split(", ").map(|entry| entry.split(';').next().unwrap()).collect();
    assert_eq!(names, ["route", "prefill", "first_token"], "{timing}");
    assert!(!answer.headers().contains_key("trailer"));
    let mut body = answer.into_body();
    assert_eq!(chunk(&mut body).await.unwrap().unwrap(), pieces[0]);
    for piece in &pieces[1..] {
        chunks.send(bytes(piece)).await.unwrap();
        assert_eq!(chunk(&mut body).await.unwrap().unwrap(), *piece);
    }
    drop(chunks);
    assert!(chunk(&mut body).await.is_none());
    until_metric(&router, r#"kvik_router_requests_total{endpoint="completions",outcome="ok"} 1"#).await;
    until_metric(&router, r#"kvik_router_phase_seconds_count{phase="first_token"} 1"#).await;
    until_metric(&router, "kvik_router_inflight 0").await;
}

#[tokio::test]
async fn a_client_that_takes_trailers_is_told_the_rest_of_the_times() {
    let (router, chunks, _engines) = streaming(|_| {}).await;
    let mut client = Client::connect(router.addr()).await;
    let headers = [("te", "trailers"), ("connection", "TE")];
    let answer = tokio::spawn(client.post("/v1/completions", SENT, &headers));
    chunks.send(bytes("data: {\"kv_transfer_params\":{\"kvik\":{\"kv_wait_ms\":1.5}}}\n\n")).await.unwrap();
    drop(chunks);
    let answer = within("the head", answer).await.unwrap().unwrap();
    assert!(answer.headers()["server-timing"].to_str().unwrap().ends_with("kv_wait;dur=1.500"));
    assert_eq!(answer.headers()["trailer"], "server-timing");
    let whole = within("the answer", answer.into_body().collect()).await.unwrap();
    let timing = whole.trailers().unwrap()["server-timing"].to_str().unwrap().to_owned();
    assert!(timing.starts_with("decode;dur=") && timing.contains("total;dur="), "{timing}");
}

#[tokio::test]
async fn a_whole_answer_says_what_the_engine_reports() {
    let prefill = good_prefill().await;
    let mut answer = json(200, r#"{"choices":[]}"#);
    answer.headers_mut().insert("server-timing", "kv_wait;dur=7".parse().unwrap());
    let decode = one_answer(answer).await;
    let router = router(&prefill, &decode);
    let (_, headers, _) = complete(&router, r#"{"prompt":"x"}"#).await;
    let all: Vec<_> = headers.get_all("server-timing").iter().map(|v| v.to_str().unwrap()).collect();
    assert_eq!(all[0], "kv_wait;dur=7");
    assert!(all[1].contains("decode;dur=") && !all[1].contains("kv_wait"), "{all:?}");
    until_metric(&router, r#"kvik_router_phase_seconds_sum{phase="kv_wait"} 0.007"#).await;
}

#[tokio::test]
async fn an_answer_that_breaks_off_looks_broken() {
    let (router, chunks, _engines) = streaming(|_| {}).await;
    let mut client = Client::connect(router.addr()).await;
    let answer = tokio::spawn(client.post("/v1/completions", SENT, &[]));
    chunks.send(bytes("data: 1\n\n")).await.unwrap();
    let mut body = within("the head", answer).await.unwrap().unwrap().into_body();
    assert!(chunk(&mut body).await.unwrap().is_ok());
    chunks.send(Err(io::Error::other("the engine died"))).await.unwrap();
    assert!(chunk(&mut body).await.unwrap().is_err());
    until_metric(&router, r#"kvik_router_requests_total{endpoint="completions",outcome="cut"} 1"#).await;
    until_metric(&router, r#"kvik_router_upstream_errors_total{role="decode",kind="closed"} 1"#).await;
}

#[tokio::test]
async fn an_engine_that_falls_silent_is_given_up() {
    let (router, chunks, _engines) = streaming(|c| c.decode_timeout = Duration::from_millis(300)).await;
    let mut client = Client::connect(router.addr()).await;
    // It is there when the engine is asked.
    chunks.send(bytes("data: 1\n\n")).await.unwrap();
    let answer = tokio::spawn(client.post("/v1/completions", SENT, &[]));
    let mut body = within("the head", answer).await.unwrap().unwrap().into_body();
    assert!(chunk(&mut body).await.unwrap().is_ok());
    assert!(chunk(&mut body).await.unwrap().is_err());
    within("the engine's side", chunks.closed()).await;
    until_metric(&router, r#"kvik_router_upstream_errors_total{role="decode",kind="timeout"} 1"#).await;
}

#[tokio::test]
async fn a_slow_client_slows_its_engine_and_loses_nothing() {
    for _ in 0..5 {
        if nothing_is_lost().await {
            return;
        }
    }
    panic!("an answer that its client took slowly was cut each time");
}

/// False where this test's own thread stood still, so that the engine was silent for too long.
async fn nothing_is_lost() -> bool {
    // The silence allowed is far shorter than the pause of the client, which must not count as the engine's.
    let (router, chunks, _engines) = streaming(|c| c.decode_timeout = Duration::from_millis(400)).await;
    let mut client = Client::connect(router.addr()).await;
    let answer = tokio::spawn(client.post("/v1/completions", SENT, &[]));
    let piece = Bytes::from(vec![b'x'; 1 << 20]);
    chunks.send(Ok(piece.clone())).await.unwrap();
    let mut body = within("the head", answer).await.unwrap().unwrap().into_body();
    let mut sent = 1u64 << 20;
    // Every buffer on the way fills up, and then the engine cannot send: that is the event to wait for.
    while let Ok(gone) =
        tokio::time::timeout(Duration::from_millis(600), chunks.send(Ok(piece.clone()))).await
    {
        if gone.is_err() {
            return was_silent(&router).await;
        }
        sent += 1 << 20;
        assert!(sent < 1 << 30, "a gigabyte went into buffers");
    }
    drop(chunks);
    let mut received = 0;
    while let Some(piece) = chunk(&mut body).await {
        let Ok(piece) = piece else { return was_silent(&router).await };
        received += piece.len() as u64;
    }
    assert_eq!(received, sent);
    true
}

/// Nothing else may have cut the answer.
async fn was_silent(router: &RunningRouter) -> bool {
    until_metric(router, r#"kvik_router_upstream_errors_total{role="decode",kind="timeout"} 1"#).await;
    false
}

#[tokio::test]
async fn a_client_that_reads_nothing_at_all_is_cut_off() {
    let (router, chunks, _engines) = streaming(|c| c.client_timeout = Duration::from_millis(500)).await;
    let mut client = Client::connect(router.addr()).await;
    let answer = tokio::spawn(client.post("/v1/completions", SENT, &[]));
    let piece = Bytes::from(vec![b'x'; 1 << 20]);
    chunks.send(Ok(piece.clone())).await.unwrap();
    let answer = within("the head", answer).await.unwrap().unwrap();
    within("the cut", async { while chunks.send(Ok(piece.clone())).await.is_ok() {} }).await;
    until_metric(&router, r#"kvik_router_client_left_total{stage="stream"} 1"#).await;
    drop(answer);
}
