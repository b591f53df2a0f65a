//! Streams: both engines get a request at once, and what the router does when one of them does not play along.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use common::streams::{
    PROMPT, TEMPLATE, answer, ask, decode_let_go, learn, params, prefill, stream_of, streaming,
};
use common::{Client, Fake, Gone, complete, config, good_decode, json, nobody, until_metric, within};
use http::Response;
use kvik_router::RunningRouter;
use tokio::sync::{Notify, mpsc, oneshot};

#[tokio::test]
async fn both_engines_get_the_second_request_at_once() {
    let decode_go = Arc::new(Notify::new());
    let mut prefill = prefill(|| answer(false)).await;
    let decode = {
        let (asked, go) = (AtomicUsize::new(0), decode_go.clone());
        Fake::start(move || {
            let (first, go) = (asked.fetch_add(1, Ordering::Relaxed) == 0, go.clone());
            async move {
                if !first {
                    go.notified().await;
                }
                json(200, r#"{"choices":[{"text":"ok"}]}"#)
            }
        })
        .await
    };
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    let mut seeds = Vec::new();
    for _ in 0..2 {
        let asked = ask(&router);
        let (to_prefill, to_decode) = (prefill.fake.next().await, decode.next().await);
        assert!(to_prefill.text().contains(TEMPLATE) && to_decode.text().contains(TEMPLATE));
        assert!(to_prefill.text().contains(r#""do_remote_decode":true"#));
        assert!(to_decode.text().contains(r#""do_remote_prefill":true"#));
        assert_eq!(to_prefill.id(), to_decode.id());
        let told = stream_of(&to_prefill);
        assert_eq!(told, stream_of(&to_decode));
        seeds.push(told["seed"].as_str().unwrap().to_owned());
        prefill.go.add_permits(1);
        let gone = within("prefill's question", prefill.gone.recv()).await.unwrap();
        assert!(within("prefill's end", gone).await.is_err(), "prefill was given up");
        decode_go.notify_one();
        let (status, _, text) = asked.await.unwrap();
        assert_eq!((status.as_u16(), text.as_str()), (200, r#"{"choices":[{"text":"ok"}]}"#));
    }
    assert!(seeds[0].len() == 64 && seeds[0] != seeds[1], "{seeds:?}");
    until_metric(&router, r#"kvik_router_streams_total{outcome="streamed"} 2"#).await;
    until_metric(&router, "kvik_router_streams_open 0").await;
    assert_eq!((prefill.fake.pending().await, decode.pending().await), (0, 0));
}

/// A decode engine that answers what has an offer or no params, and lets a stream wait.
async fn decode_that_waits() -> (Fake, mpsc::UnboundedReceiver<oneshot::Receiver<()>>) {
    let asked = AtomicUsize::new(0);
    let (tell, told) = mpsc::unbounded_channel();
    let fake = Fake::start(move || {
        // The second request is the stream.
        let waits = asked.fetch_add(1, Ordering::Relaxed) == 1;
        let (gone, when) = Gone::new();
        if waits {
            tell.send(when).ok();
        }
        async move {
            if waits {
                std::future::pending::<()>().await;
            }
            gone.ended();
            json(200, r#"{"choices":[{"text":"ok"}]}"#)
        }
    })
    .await;
    (fake, told)
}

#[tokio::test]
async fn an_offer_after_all_is_pulled() {
    let prefill = prefill(|| answer(true)).await;
    let (decode, mut waiting) = decode_that_waits().await;
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    let asked = ask(&router);
    assert!(decode.next().await.text().contains("seed"));
    prefill.go.add_permits(1);
    let (status, _, _) = asked.await.unwrap();
    assert_eq!(status, 200);
    let again = decode.next().await;
    assert!(!again.text().contains("seed") && again.text().contains(&params(true)), "{}", again.text());
    let gone = waiting.recv().await.unwrap();
    within("the first request's end", gone).await.unwrap();
    until_metric(&router, r#"kvik_router_streams_total{outcome="offered"} 1"#).await;
}

#[tokio::test]
async fn a_refusal_of_prefill_takes_decodes_request_back() {
    let prefill = prefill(|| json(400, r#"{"error":"too long"}"#)).await;
    let (decode, mut waiting) = decode_that_waits().await;
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    let asked = ask(&router);
    decode.next().await;
    prefill.go.add_permits(1);
    let (status, _, text) = asked.await.unwrap();
    assert_eq!((status.as_u16(), text.as_str()), (400, r#"{"error":"too long"}"#));
    within("decode's end", waiting.recv().await.unwrap()).await.unwrap();
    assert_eq!(decode.pending().await, 0);
}

#[tokio::test]
async fn what_was_streamed_of_a_request_that_decode_refuses_is_given_back() {
    let newer = || json(200, r#"{"kv_transfer_params":{"kvik":{"stream":{"n":"newer"}}}}"#);
    let prefill = prefill(newer).await;
    let (asked, decode_go) = (AtomicUsize::new(0), Arc::new(Notify::new()));
    let decode = {
        let go = decode_go.clone();
        Fake::start(move || {
            let (refuses, go) = (asked.fetch_add(1, Ordering::Relaxed) == 1, go.clone());
            async move {
                if refuses {
                    go.notified().await;
                    return json(400, r#"{"error":"too many tokens"}"#);
                }
                json(200, r#"{"choices":[{"text":"ok"}]}"#)
            }
        })
        .await
    };
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    let refused = ask(&router);
    let seed = stream_of(&prefill.fake.next().await)["seed"].clone();
    decode.next().await;
    prefill.go.add_permits(1);
    // Prefill's answer has been read once others are sent what it says.
    loop {
        let other = ask(&router);
        let told = stream_of(&prefill.fake.next().await);
        other.abort();
        if told["of"]["n"] == "newer" {
            break;
        }
    }
    decode_go.notify_one();
    assert_eq!(refused.await.unwrap().0, 400);
    let mut release = decode.next().await;
    while !release.id().ends_with("-release") {
        release = decode.next().await;
    }
    assert_eq!(stream_of(&release)["seed"], seed);
    assert!(release.text().contains(r#""max_tokens":1,"#), "{}", release.text());
    until_metric(&router, r#"kvik_router_releases_total{outcome="released"} 1"#).await;
}

#[tokio::test]
async fn a_prefill_engine_that_fails_takes_decodes_request_back() {
    let prefill = prefill(|| json(500, "{}")).await;
    let (decode, mut waiting) = decode_that_waits().await;
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    let asked = ask(&router);
    decode.next().await;
    prefill.go.add_permits(1);
    assert_eq!(asked.await.unwrap().0, 502);
    within("decode's end", waiting.recv().await.unwrap()).await.unwrap();
}

#[tokio::test]
async fn decode_computes_what_a_dead_prefill_engine_leaves() {
    let broken = || {
        let cut = futures_util::stream::once(async { Err::<String, _>(std::io::Error::other("dies")) });
        Response::new(Body::from_stream(cut))
    };
    let prefill = prefill(broken).await;
    let (decode, mut waiting) = decode_that_waits().await;
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    let asked = ask(&router);
    decode.next().await;
    // Its connection was an idle one, so that it is asked once more.
    prefill.go.add_permits(2);
    assert_eq!(asked.await.unwrap().0, 200);
    assert_eq!(decode.next().await.text(), PROMPT);
    within("decode's end", waiting.recv().await.unwrap()).await.unwrap();
    until_metric(&router, r#"kvik_router_recomputed_total{reason="prefill_died"} 1"#).await;
    // What has started again since would not know the template.
    prefill.fake.next().await;
    prefill.fake.next().await;
    let asked = ask(&router);
    assert_eq!(stream_of(&prefill.fake.next().await), serde_json::json!({}));
    drop(asked);
}

#[tokio::test]
async fn prefill_is_given_up_when_decode_has_answered_before_it() {
    let mut prefill = prefill(|| answer(false)).await;
    let (decode, decode_go) = decode_let_go(1).await;
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    let asked = ask(&router);
    prefill.fake.next().await;
    decode_go.add_permits(1);
    assert_eq!(asked.await.unwrap().0, 200);
    let gone = within("prefill's question", prefill.gone.recv()).await.unwrap();
    within("prefill's end", gone).await.unwrap();
}

#[tokio::test]
async fn a_client_that_leaves_takes_both_requests_with_it() {
    let mut prefill = prefill(|| answer(false)).await;
    let (decode, mut waiting) = decode_that_waits().await;
    let router = streaming(&[&prefill.fake.url()], &[&decode.url()]);
    learn(&router, &prefill.fake, &decode).await;
    let mut client = Client::connect(router.addr()).await;
    let asked = tokio::spawn(client.post("/v1/completions", PROMPT, &[]));
    prefill.fake.next().await;
    decode.next().await;
    client.leave().await;
    within("prefill's end", prefill.gone.recv().await.unwrap()).await.unwrap();
    within("decode's end", waiting.recv().await.unwrap()).await.unwrap();
    assert!(asked.await.unwrap().is_err());
    until_metric(&router, r#"kvik_router_client_left_total{stage="prefill"} 1"#).await;
    assert_eq!((prefill.fake.pending().await, decode.pending().await), (0, 0));
}

#[tokio::test]
async fn nothing_is_streamed_unless_asked_for() {
    let prefill = Fake::start(|| async { answer(true) }).await;
    let decode = good_decode().await;
    let router = RunningRouter::start(config(&[&prefill.url()], &[&decode.url()])).unwrap();
    for _ in 0..2 {
        assert_eq!(complete(&router, PROMPT).await.0, 200);
        assert!(!prefill.next().await.text().contains("stream\":{"));
        assert!(!decode.next().await.text().contains("seed"));
    }
}

#[tokio::test]
async fn an_engine_that_cannot_stream_is_pulled_from() {
    let prefill = common::good_prefill().await;
    let decode = good_decode().await;
    let router = streaming(&[&prefill.url()], &[&decode.url()]);
    for _ in 0..3 {
        assert_eq!(complete(&router, PROMPT).await.0, 200);
        assert!(decode.next().await.text().contains(common::PARAMS));
    }
}

/// A prefill engine with a template of this name, which offers its first answer only.
async fn prefill_named(name: &'static str) -> Fake {
    let asked = AtomicUsize::new(0);
    Fake::start(move || {
        let offer = asked.fetch_add(1, Ordering::Relaxed) == 0;
        let params = format!(r#"{{"do_remote_prefill":{offer},"kvik":{{"stream":{{"n":"{name}"}}}}}}"#);
        async move { json(200, &format!(r#"{{"kv_transfer_params":{params}}}"#)) }
    })
    .await
}

#[tokio::test]
async fn each_engine_is_asked_by_its_own_template() {
    let (one, two) = (prefill_named("one").await, prefill_named("two").await);
    let (decode, decode_go) = decode_let_go(2).await;
    let router = streaming(&[&one.url(), &two.url()], &[&decode.url()]);
    for engine in [&one, &two] {
        assert_eq!(complete(&router, PROMPT).await.0, 200);
        engine.next().await;
    }
    for (engine, name) in [(&one, "one"), (&two, "two")] {
        let asked = ask(&router);
        assert_eq!(stream_of(&engine.next().await)["of"]["n"], name);
        decode_go.add_permits(1);
        assert_eq!(asked.await.unwrap().0, 200);
    }
}

#[tokio::test]
async fn an_engine_that_is_gone_leaves_the_request_to_the_others() {
    let prefill = prefill(|| answer(true)).await;
    let decode = good_decode().await;
    let gone = nobody().await;
    let router = streaming(&[&prefill.fake.url(), &gone], &[&decode.url()]);
    // The second of the rotation is gone from the beginning, and the first takes its requests.
    learn(&router, &prefill.fake, &decode).await;
    prefill.go.add_permits(1);
    assert_eq!(complete(&router, PROMPT).await.0, 200);
}

#[tokio::test]
async fn the_time_of_prefill_is_of_the_engine_that_has_answered() {
    let leaves = || {
        let mut answer = answer(true);
        answer.headers_mut().insert("connection", "close".parse().unwrap());
        answer
    };
    let leaves = Fake::start(move || async move { leaves() }).await;
    let (stays, decode) = (common::good_prefill().await, good_decode().await);
    let router = streaming(&[&leaves.url(), &stays.url()], &[&decode.url()]);
    learn(&router, &leaves, &decode).await;
    assert_eq!(complete(&router, PROMPT).await.0, 200);
    let addr = leaves.addr;
    drop(leaves);
    within("its end", async { while tokio::net::TcpStream::connect(addr).await.is_ok() {} }).await;
    let (_, headers, _) = complete(&router, PROMPT).await;
    let timing = headers["server-timing"].to_str().unwrap();
    assert_eq!(timing.matches("prefill;dur=").count(), 1, "{timing}");
    until_metric(&router, r#"kvik_router_upstream_errors_total{role="prefill",kind="connect"} 1"#).await;
}
