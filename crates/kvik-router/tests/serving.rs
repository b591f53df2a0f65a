//! The other paths, many clients at once, limits, starting and ending.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::*;
use kvik_router::{EngineUrl, RouterConfig, RouterError, RunningRouter};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::{Barrier, mpsc};

const SENT: &str = r#"{"prompt":"x"}"#;

#[tokio::test]
async fn models_are_a_decode_engines() {
    let prefill = good_prefill().await;
    let decode = one_answer(json(200, r#"{"data":[{"id":"m"}]}"#)).await;
    let router = router(&prefill, &decode);
    let (status, headers, text) = get(&router, "/v1/models").await;
    assert_eq!((status.as_u16(), text.as_str()), (200, r#"{"data":[{"id":"m"}]}"#));
    let got = decode.next().await;
    assert_eq!((got.method.as_str(), got.path.as_str()), ("GET", "/v1/models"));
    assert_eq!(got.id(), headers["x-request-id"]);
    until_metric(&router, r#"kvik_router_requests_total{endpoint="models",outcome="ok"} 1"#).await;
}

#[tokio::test]
async fn a_head_without_its_answer_is_no_client_that_left() {
    let prefill = good_prefill().await;
    let decode = Fake::start(|| async { json(200, r#"{"data":[{"id":"m"}]}"#) }).await;
    let router = router(&prefill, &decode);
    let (status, headers, text) = asked(&router, http::Method::HEAD, "/v1/models").await;
    assert_eq!(
        (status.as_u16(), text.as_str(), &headers["content-length"]),
        (200, "", &"21".parse().unwrap())
    );
    until_metric(&router, r#"kvik_router_requests_total{endpoint="models",outcome="ok"} 1"#).await;
    let (_, _, metrics) = get(&router, "/metrics").await;
    assert!(!metrics.contains("client_left_total{"), "{metrics}");
}

#[tokio::test]
async fn who_asks_for_models_takes_nobodys_turn() {
    let (prefill, one, other) = (good_prefill().await, good_decode().await, good_decode().await);
    let router = RunningRouter::start(config(&[&prefill.url()], &[&one.url(), &other.url()])).unwrap();
    for _ in 0..4 {
        assert_eq!(get(&router, "/v1/models").await.0, 200);
        assert_eq!(complete(&router, SENT).await.0, 200);
    }
    for engine in [one, other] {
        let mut paths = Vec::new();
        while engine.pending().await > 0 {
            paths.push(engine.next().await.path);
        }
        paths.sort();
        assert_eq!(paths, ["/v1/completions", "/v1/completions", "/v1/models", "/v1/models"]);
    }
}

#[tokio::test]
async fn other_paths_and_methods_are_told_what_there_is() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let router = router(&prefill, &decode);
    let (status, _, text) = get(&router, "/v1/embeddings").await;
    assert!(
        status == 404 && text.contains("/v1/embeddings") && text.contains("/v1/chat/completions"),
        "{text}"
    );
    let (status, _, text) = get(&router, "/v1/completions").await;
    assert!(status == 405 && text.contains("POST /v1/completions"), "{text}");
}

#[tokio::test]
async fn health_is_traffic_first_and_then_asks() {
    let (prefill, dead) = (good_prefill().await, nobody().await);
    let decode = good_decode().await;
    let healthy = RunningRouter::start(config(&[&dead, &prefill.url()], &[&decode.url()])).unwrap();
    let (status, _, text) = get(&healthy, "/health").await;
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status, 200, "{text}");
    assert_eq!(report["prefill"]["engines"][0]["url"], dead.as_str());
    assert_eq!(report["prefill"]["engines"][0]["last"], "connect");
    assert_eq!(report["prefill"]["engines"][1]["last"], "answered");
    assert_eq!(
        (prefill.next().await.path.as_str(), decode.next().await.path.as_str()),
        ("/health", "/health")
    );
    // An answer of a moment ago is enough.
    assert_eq!(get(&healthy, "/health").await.0, 200);
    assert_eq!((prefill.pending().await, decode.pending().await), (0, 0));

    let sick = RunningRouter::start(config(&[&prefill.url()], &[&dead])).unwrap();
    let (status, _, text) = get(&sick, "/health").await;
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status, 503, "{text}");
    assert_eq!(
        (report["prefill"]["reachable"].as_bool(), report["decode"]["reachable"].as_bool()),
        (Some(true), Some(false))
    );

    let (silent, _gone) = silent().await;
    let hung = RunningRouter::start(config(&[&prefill.url()], &[&silent.url()])).unwrap();
    let (status, _, text) = get(&hung, "/health").await;
    assert!(status == 503 && text.contains(r#""last":"timeout""#), "{text}");
}

#[tokio::test]
async fn sixty_four_at_once_are_spread_evenly() {
    // Every engine holds its answers until all of its share is there: fewer at once, or uneven, would hang.
    async fn engines(answer: fn() -> http::Response<axum::body::Body>) -> Vec<Fake> {
        let mut engines = Vec::new();
        for _ in 0..4 {
            let all = Arc::new(Barrier::new(16));
            engines.push(
                Fake::start(move || {
                    let all = all.clone();
                    async move {
                        all.wait().await;
                        answer()
                    }
                })
                .await,
            );
        }
        engines
    }
    let prefill = engines(prefill_answer).await;
    let decode = engines(|| json(200, "{}")).await;
    let urls = |fakes: &[Fake]| fakes.iter().map(Fake::url).collect::<Vec<_>>();
    let (p, d) = (urls(&prefill), urls(&decode));
    let strs = |urls: &[String]| urls.iter().map(|url| url.parse().unwrap()).collect();
    let config = RouterConfig { port: 0, ..RouterConfig::new(strs(&p), strs(&d)) };
    let router = Arc::new(RunningRouter::start(config).unwrap());
    let asked = (0..64).map(|_| {
        let router = router.clone();
        tokio::spawn(async move { complete(&router, SENT).await.0 })
    });
    for status in futures_util::future::join_all(asked).await {
        assert_eq!(status.unwrap(), 200);
    }
    for engine in prefill.iter().chain(&decode) {
        assert_eq!(engine.pending().await, 16);
    }
    until_metric(&router, r#"kvik_router_requests_total{endpoint="completions",outcome="ok"} 64"#).await;
}

#[tokio::test]
async fn who_asks_for_nothing_keeps_nobody_out() {
    // More connections than a process may have by default, at both of their ends.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let mut config = config(&[&prefill.url()], &[&decode.url()]);
    (config.max_inflight, config.client_timeout) = (1, 60 * BOUND);
    let router = RunningRouter::start(config).unwrap();
    let mut idle = Vec::new();
    for number in 0..1 + 1024 {
        let mut stream = within("connecting", TcpStream::connect(router.addr())).await.unwrap();
        if number % 2 == 0 {
            stream.write_all(b"P").await.unwrap();
        }
        idle.push(stream);
    }
    assert_eq!(complete(&router, SENT).await.0, 200);
}

#[tokio::test]
async fn one_request_too_many_is_turned_away() {
    let (prefill, _gone) = silent().await;
    let decode = good_decode().await;
    let mut config = config(&[&prefill.url()], &[&decode.url()]);
    config.max_inflight = 1;
    let router = RunningRouter::start(config).unwrap();
    let mut client = Client::connect(router.addr()).await;
    let held = tokio::spawn(client.post("/v1/completions", SENT, &[]));
    prefill.next().await;
    let (status, headers, text) = complete(&router, SENT).await;
    assert_eq!((status.as_u16(), headers["retry-after"].to_str().unwrap()), (503, "1"));
    assert!(text.contains("overloaded"), "{text}");
    until_metric(&router, r#"kvik_router_requests_total{endpoint="completions",outcome="overloaded"} 1"#)
        .await;
    until_metric(&router, "kvik_router_inflight 1").await;
    client.leave().await;
    assert!(held.await.unwrap().is_err());
    until_metric(&router, "kvik_router_inflight 0").await;
}

/// The bound is on what the bodies of all requests take, each three times: one more is turned away at once, whatever
/// length it announces, and can be served as soon as another has gone.
#[tokio::test]
async fn bodies_have_a_bound_in_bytes_over_all_requests() {
    let (prefill, _gone) = silent().await;
    let decode = good_decode().await;
    let mut config = config(&[&prefill.url()], &[&decode.url()]);
    (config.max_body, config.max_body_memory) = (1 << 20, 3 << 20);
    let router = RunningRouter::start(config).unwrap();
    let body = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(400 << 10));
    let mut held = Vec::new();
    for _ in 0..2 {
        let mut client = Client::connect(router.addr()).await;
        held.push((tokio::spawn(client.post("/v1/completions", body.clone(), &[])), client));
        prefill.next().await;
    }
    let (status, headers, text) = complete(&router, &body).await;
    assert_eq!((status.as_u16(), headers["retry-after"].to_str().unwrap()), (503, "1"));
    assert!(text.contains("body_memory_full") && text.contains("3145728 bytes"), "{text}");
    until_metric(&router, r#"kvik_router_requests_total{endpoint="completions",outcome="overloaded"} 1"#)
        .await;
    let (answer, client) = held.pop().unwrap();
    client.leave().await;
    assert!(answer.await.unwrap().is_err());
    until_metric(&router, "kvik_router_inflight 1").await;
    let mut client = Client::connect(router.addr()).await;
    let _third = tokio::spawn(client.post("/v1/completions", body, &[]));
    prefill.next().await;
}

/// An answer that is being passed on keeps none of what its request took.
#[tokio::test]
async fn bodies_that_all_engines_have_take_no_room() {
    let (chunks, receive) = mpsc::channel(1);
    let (prefill, decode) = (good_prefill().await, one_answer(sse(receive, Gone::new().0)).await);
    let mut config = config(&[&prefill.url()], &[&decode.url()]);
    (config.max_body, config.max_body_memory) = (1 << 20, 3 << 20);
    let router = RunningRouter::start(config).unwrap();
    let body = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(1000 << 10));
    let mut client = Client::connect(router.addr()).await;
    chunks.send(Ok(Bytes::from_static(b"1"))).await.unwrap();
    let answer = client.post("/v1/completions", body.clone(), &[]);
    let _answer = within("the head", answer).await.unwrap();
    // The stand-in's second answer: it was asked.
    let (status, _, text) = complete(&router, &body).await;
    assert!(status == 502 && text.contains("engine_error"), "{text}");
}

async fn ended(router: Arc<RunningRouter>) -> Option<Result<usize, RouterError>> {
    tokio::task::spawn_blocking(move || router.wait(Some(BOUND))).await.unwrap()
}

#[tokio::test]
async fn a_stop_finishes_what_is_there_and_takes_nothing_new() {
    let (chunks, receive) = mpsc::channel(1);
    let (prefill, decode) = (good_prefill().await, one_answer(sse(receive, Gone::new().0)).await);
    let router = Arc::new(router(&prefill, &decode));
    let _idle = Client::connect(router.addr()).await;
    let mut client = Client::connect(router.addr()).await;
    let answer = tokio::spawn(client.post("/v1/completions", r#"{"prompt":"x","stream":true}"#, &[]));
    chunks.send(Ok(Bytes::from_static(b"1"))).await.unwrap();
    let mut body = within("the head", answer).await.unwrap().unwrap().into_body();
    assert_eq!(chunk(&mut body).await.unwrap().unwrap(), "1");
    router.stop();
    within("the closed door", async { while TcpStream::connect(router.addr()).await.is_ok() {} }).await;
    assert!(router.wait(Some(Duration::ZERO)).is_none());
    chunks.send(Ok(Bytes::from_static(b"2"))).await.unwrap();
    assert_eq!(chunk(&mut body).await.unwrap().unwrap(), "2");
    drop(chunks);
    assert!(chunk(&mut body).await.is_none());
    assert!(matches!(ended(router).await, Some(Ok(0))));
}

#[tokio::test]
async fn who_has_nothing_to_finish_cuts_nothing_off() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let router = Arc::new(router(&prefill, &decode));
    let mut idle = Client::connect(router.addr()).await;
    assert_eq!(idle.post("/v1/completions", SENT, &[]).await.unwrap().status(), 200);
    router.stop();
    router.stop_now();
    assert!(matches!(ended(router).await, Some(Ok(0))));
}

#[tokio::test]
async fn draining_is_bounded_and_can_be_cut_short() {
    for (drain, cut) in [(Duration::from_millis(200), false), (BOUND * 2, true)] {
        let (prefill, mut gone) = silent().await;
        let decode = good_decode().await;
        let mut config = config(&[&prefill.url()], &[&decode.url()]);
        config.drain_timeout = drain;
        let router = Arc::new(RunningRouter::start(config).unwrap());
        let mut client = Client::connect(router.addr()).await;
        let answer = tokio::spawn(client.post("/v1/completions", SENT, &[]));
        prefill.next().await;
        let began = Instant::now();
        router.stop();
        if cut {
            router.stop_now();
        }
        assert!(matches!(ended(router.clone()).await, Some(Ok(1))));
        assert!(began.elapsed() < BOUND);
        within("prefill's closed connection", gone.recv().await.unwrap()).await.unwrap();
        let answer = answer.await.unwrap();
        assert!(answer.is_err(), "{answer:?} {cut}");
    }
}

#[tokio::test]
async fn a_taken_port_and_a_useless_configuration_are_said_at_start() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let mut taken = config(&[&prefill.url()], &[&decode.url()]);
    taken.port = decode.addr.port();
    let said = RunningRouter::start(taken).unwrap_err().to_string();
    assert!(said.contains(&decode.addr.to_string()), "{said}");
    let good = config(&[&prefill.url()], &[&decode.url()]);
    for (bad, word) in [
        (RouterConfig { prefill: Vec::new(), ..good.clone() }, "no prefill engine"),
        (RouterConfig { decode: Vec::new(), ..good.clone() }, "no decode engine"),
        (RouterConfig { prefill_timeout: Duration::ZERO, ..good.clone() }, "prefill_timeout"),
        (RouterConfig { max_inflight: 0, ..good.clone() }, "max_inflight"),
        (RouterConfig { max_body: 0, ..good.clone() }, "max_body"),
        (RouterConfig { max_body: 100, max_body_memory: 299, ..good }, "max_body_memory is 299"),
    ] {
        let said = RunningRouter::start(bad).unwrap_err().to_string();
        assert!(said.contains(word), "{said}");
    }
    for wrong in ["p0:8100", "https://p0:8100", "ftp://p0", "http://", "http://a b", "http://u@p0", "/x", ""]
    {
        let said = wrong.parse::<EngineUrl>().unwrap_err().to_string();
        assert!(said.contains("cannot be used"), "{wrong}: {said}");
    }
}

#[tokio::test]
async fn the_routers_threads_take_no_signals() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let router = router(&prefill, &decode);
    assert_eq!(complete(&router, SENT).await.0, 200);
    let mut seen = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let Ok(status) = std::fs::read_to_string(task.unwrap().path().join("status")) else { continue };
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_whitespace().nth(1).unwrap().to_owned()
        };
        if field("Name:").starts_with("kvik-router") {
            seen += 1;
            let blocked = u64::from_str_radix(&field("SigBlk:"), 16).unwrap();
            let interrupt_and_terminate = (1 << 1) | (1 << 14);
            assert_eq!(blocked & interrupt_and_terminate, interrupt_and_terminate, "{status}");
        }
    }
    assert!(seen >= 2, "{seen} threads");
}
