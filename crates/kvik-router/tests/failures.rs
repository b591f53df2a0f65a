//! Engines that fail, and requests that are at fault themselves.

mod common;
#[path = "../../../tests/common/watch.rs"]
mod watch;

use std::time::{Duration, Instant};

use common::*;
use kvik_router::{RouterConfig, RunningRouter};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const SENT: &str = r#"{"prompt":"x"}"#;

/// The message and code of an error in OpenAI's shape.
fn error(text: &str) -> (String, String) {
    let value: serde_json::Value = serde_json::from_str(text).unwrap();
    let error = &value["error"];
    assert!(error["type"].is_string() && error["param"].is_null(), "{text}");
    (error["message"].as_str().unwrap().into(), error["code"].as_str().unwrap().into())
}

/// Sends one request and checks that the error names the role and the engine.
async fn fails(router: &RunningRouter, status: u16, code: &str, role: &str, url: &str) {
    let (got, headers, text) = complete(router, SENT).await;
    let (message, got_code) = error(&text);
    assert_eq!((got.as_u16(), got_code.as_str()), (status, code), "{text}");
    assert!(message.contains(role) && message.contains(url), "{message}");
    assert!(headers.contains_key("x-request-id"));
}

#[tokio::test]
async fn a_dead_prefill_engine() {
    let (dead, decode) = (nobody().await, good_decode().await);
    let router = RunningRouter::start(config(&[&dead], &[&decode.url()])).unwrap();
    fails(&router, 502, "engine_unreachable", "prefill", &dead).await;
    until_metric(&router, r#"kvik_router_upstream_errors_total{role="prefill",kind="connect"} 1"#).await;
    until_metric(&router, r#"kvik_router_requests_total{endpoint="completions",outcome="engine_failed"} 1"#)
        .await;
    assert_eq!(decode.pending().await, 0);
}

#[tokio::test]
async fn an_engine_that_cannot_be_reached_is_skipped() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let (dead, other) = (nobody().await, nobody().await);
    let router = RunningRouter::start(config(&[&dead, &prefill.url()], &[&other, &decode.url()])).unwrap();
    for _ in 0..4 {
        assert_eq!(complete(&router, SENT).await.0, 200);
    }
    assert_eq!((prefill.pending().await, decode.pending().await), (4, 4));
    until_metric(&router, r#"kvik_router_upstream_errors_total{role="decode",kind="connect"} 1"#).await;
}

#[tokio::test]
async fn a_host_that_is_gone_costs_one_request_its_timeout() {
    let (prefill, decode, (listener, _waiting)) = (good_prefill().await, good_decode().await, gone().await);
    let (prefill, decode) = (prefill.url(), decode.url());
    let gone = format!("http://{}", listener.local_addr().unwrap());
    // One of them at a time: a request that waits for two would take as long as the first of them is left alone.
    costs_one_request_its_timeout(config(&[&gone, &prefill], &[&decode])).await;
    costs_one_request_its_timeout(config(&[&prefill], &[&gone, &decode])).await;
}

async fn costs_one_request_its_timeout(mut config: RouterConfig) {
    config.connect_timeout = Duration::from_secs(1);
    let router = RunningRouter::start(config).unwrap();
    let (mut late, mut longest) = (None::<Instant>, Duration::ZERO);
    for number in 0..10 {
        let (began, waited) = (Instant::now(), watch::start());
        assert_eq!(complete(&router, SENT).await.0, 200);
        longest = longest.max(began.elapsed());
        if waited.elapsed() > Duration::from_millis(900) {
            // Two seconds after its timeout it may be tried again, which takes another timeout.
            let since = late.replace(began).map(|first| first.elapsed());
            assert!(
                since.is_none_or(|since| since >= Duration::from_millis(3800)),
                "request {number} has waited for a host that is gone, {since:?} after another one began to"
            );
        }
    }
    assert!(
        longest > Duration::from_millis(900),
        "nobody has asked the host that is gone: {longest:?} at most"
    );
}

#[tokio::test]
async fn an_engine_that_hangs_is_asked_after_the_others() {
    for _ in 0..5 {
        let (failed, steady) = late_of_ten().await;
        if (1..=2).contains(&failed) {
            return;
        }
        assert!(!steady, "{failed} of 10 requests have waited for an engine that hangs");
    }
    panic!("the machine stood still in each of five rounds");
}

/// How many of ten requests waited in vain where one of two prefill engines hangs, and whether nothing else may have made
/// them: on a busy machine the time for which that engine is left alone may pass, or what the other one has for an answer.
async fn late_of_ten() -> (usize, bool) {
    let ((hung, _gone), prefill, decode) = (silent().await, good_prefill().await, good_decode().await);
    let mut config = config(&[&hung.url(), &prefill.url()], &[&decode.url()]);
    config.prefill_timeout = Duration::from_millis(200);
    let router = RunningRouter::start(config).unwrap();
    let (mut failed, began, busy) = (0, Instant::now(), watch::start());
    for _ in 0..10 {
        failed += usize::from(complete(&router, SENT).await.0 == 504);
    }
    let took = began.elapsed();
    (failed, took < Duration::from_secs(2) && took.saturating_sub(busy.elapsed()) < Duration::from_millis(50))
}

#[tokio::test]
async fn a_prefill_engine_that_answers_5xx() {
    let (prefill, decode) = (one_answer(json(500, "{}")).await, good_decode().await);
    let router = router(&prefill, &decode);
    fails(&router, 502, "engine_error", "prefill", &prefill.url()).await;
    assert_eq!(decode.pending().await, 0);
}

#[tokio::test]
async fn a_prefill_engine_that_answers_something_else() {
    let (prefill, decode) = (one_answer(json(200, "<html>")).await, good_decode().await);
    let router = router(&prefill, &decode);
    fails(&router, 502, "engine_answer_invalid", "prefill", &prefill.url()).await;
}

#[tokio::test]
async fn a_prefill_engine_that_hangs() {
    let (prefill, mut gone) = silent().await;
    let decode = good_decode().await;
    let mut config = config(&[&prefill.url()], &[&decode.url()]);
    config.prefill_timeout = Duration::from_millis(200);
    let router = RunningRouter::start(config).unwrap();
    fails(&router, 504, "engine_timeout", "prefill", &prefill.url()).await;
    within("prefill's closed connection", gone.recv().await.unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_decode_engine_that_hangs() {
    let prefill = good_prefill().await;
    let (decode, mut gone) = silent().await;
    let mut config = config(&[&prefill.url()], &[&decode.url()]);
    config.decode_timeout = Duration::from_millis(200);
    let router = RunningRouter::start(config).unwrap();
    fails(&router, 504, "engine_timeout", "decode", &decode.url()).await;
    within("decode's closed connection", gone.recv().await.unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_dead_decode_engine() {
    let (prefill, dead) = (good_prefill().await, nobody().await);
    let router = RunningRouter::start(config(&[&prefill.url()], &[&dead])).unwrap();
    fails(&router, 502, "engine_unreachable", "decode", &dead).await;
    // The KV was granted and nobody was given it, so giving it back was tried, with the one engine there is.
    until_metric(&router, r#"kvik_router_releases_total{outcome="failed"} 1"#).await;
}

#[tokio::test]
async fn what_made_a_decode_engine_fail_is_sent_to_no_other() {
    let (prefill, decode, other) =
        (good_prefill().await, one_answer(json(500, "{}")).await, good_decode().await);
    let router = RunningRouter::start(config(&[&prefill.url()], &[&decode.url(), &other.url()])).unwrap();
    fails(&router, 502, "engine_error", "decode", &decode.url()).await;
    drained(router).await;
    assert_eq!((decode.pending().await, other.pending().await), (1, 0));
}

/// An engine that answers its first request, and dies with the second.
async fn dies_with_the_second() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        drop(listener);
        assert!(read_request(&mut stream).await);
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
        read_request(&mut stream).await;
    });
    url
}

#[tokio::test]
async fn what_a_decode_engine_died_of_is_sent_to_no_other() {
    let (prefill, dies, other) = (good_prefill().await, dies_with_the_second().await, good_decode().await);
    let router = RunningRouter::start(config(&[&prefill.url()], &[&dies, &other.url()])).unwrap();
    for _ in 0..2 {
        assert_eq!(complete(&router, SENT).await.0, 200);
    }
    other.next().await;
    // Its connection was an idle one, so that it is asked once more, and cannot be reached.
    fails(&router, 502, "engine_closed_connection", "decode", &dies).await;
    until_metric(&router, r#"kvik_router_stale_connections_total{role="decode"} 1"#).await;
    drained(router).await;
    assert_eq!(other.pending().await, 0);
}

#[tokio::test]
async fn an_answer_that_cannot_be_told_from_its_beginning_is_refused() {
    let (prefill, listener) = (good_prefill().await, TcpListener::bind("127.0.0.1:0").await.unwrap());
    let decode = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await;
        // Neither a length nor chunks: where the engine dies now, this looks as if it were all.
        let cut = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n";
        stream.write_all(cut.as_bytes()).await.unwrap();
    });
    let router = RunningRouter::start(config(&[&prefill.url()], &[&decode])).unwrap();
    fails(&router, 502, "engine_answer_invalid", "decode", &decode).await;
}

/// Serves HTTP by hand: answers as many requests on each connection as told, then closes it so long after the next one.
async fn closing_after(answers: usize, after: Duration) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                for _ in 0..answers {
                    if !read_request(&mut stream).await {
                        return;
                    }
                    let body = r#"{"choices":[]}"#;
                    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                    stream.write_all(head.as_bytes()).await.unwrap();
                }
                read_request(&mut stream).await;
                tokio::time::sleep(after).await;
            });
        }
    });
    url
}

/// Reads one request; its body is known to be a JSON object that ends the bytes sent.
async fn read_request(stream: &mut TcpStream) -> bool {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return false,
            Ok(n) => all.extend_from_slice(&buffer[..n]),
        }
        if all.ends_with(b"}") {
            return true;
        }
    }
}

#[tokio::test]
async fn an_idle_connection_closed_under_us_costs_nothing() {
    let (engine, decode) = (closing_after(1, Duration::ZERO).await, good_decode().await);
    let router = RunningRouter::start(config(&[&engine], &[&decode.url()])).unwrap();
    for _ in 0..3 {
        assert_eq!(complete(&router, SENT).await.0, 200);
    }
    until_metric(&router, r#"kvik_router_stale_connections_total{role="prefill"} 2"#).await;
}

#[tokio::test]
async fn an_engine_that_dies_over_a_request_gets_it_once() {
    let (engine, decode) = (closing_after(1, Duration::from_millis(1200)).await, good_decode().await);
    let router = RunningRouter::start(config(&[&engine], &[&decode.url()])).unwrap();
    assert_eq!(complete(&router, SENT).await.0, 200);
    // The connection had been idle, and has had the request for longer than it takes to find it closed.
    fails(&router, 502, "engine_closed_connection", "prefill", &engine).await;
    let (_, _, text) = get(&router, "/metrics").await;
    assert!(!text.contains("kvik_router_stale_connections_total{"), "{text}");
}

#[tokio::test]
async fn a_fresh_connection_closed_without_answer_is_the_engines_failure() {
    let (engine, decode) = (closing_after(0, Duration::ZERO).await, good_decode().await);
    let router = RunningRouter::start(config(&[&engine], &[&decode.url()])).unwrap();
    fails(&router, 502, "engine_closed_connection", "prefill", &engine).await;
    let (_, _, text) = get(&router, "/metrics").await;
    assert!(!text.contains("kvik_router_stale_connections_total{"), "{text}");
}

#[tokio::test]
async fn wrong_bodies() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let mut config = config(&[&prefill.url()], &[&decode.url()]);
    config.max_body = 100;
    let router = RunningRouter::start(config).unwrap();
    let long = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(100));
    for (sent, status, want, says) in [
        ("{\"prompt\":", 400, "invalid_json", "not valid JSON"),
        ("[]", 400, "not_an_object", "not an object"),
        ("{}", 400, "missing_prompt", "`prompt`"),
        (r#"{"prompt":"x","kv_transfer_params":{}}"#, 400, "reserved_field", "kv_transfer_params"),
        (&long, 413, "body_too_large", "100 bytes"),
    ] {
        let (got, _, text) = complete(&router, sent).await;
        let (message, code) = error(&text);
        assert_eq!((got.as_u16(), code.as_str()), (status, want), "{sent}");
        assert!(message.contains(says), "{message}");
    }
    until_metric(&router, r#"kvik_router_requests_total{endpoint="completions",outcome="refused"} 5"#).await;
    assert_eq!((prefill.pending().await, decode.pending().await), (0, 0));
}

/// Sends all of a request, and only then reads the answer: its status.
async fn sent_whole(router: &RunningRouter, path: &str, body: &[u8]) -> String {
    let mut stream = TcpStream::connect(router.addr()).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: r\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    within("sending", stream.write_all(&[head.as_bytes(), body].concat())).await.unwrap();
    let mut answer = Vec::new();
    within("the answer", stream.read_to_end(&mut answer)).await.unwrap();
    String::from_utf8(answer).unwrap().split_whitespace().nth(1).unwrap().to_owned()
}

#[tokio::test]
async fn a_client_that_is_still_sending_sees_why_it_is_refused() {
    let ((prefill, _gone), decode) = (silent().await, good_decode().await);
    let mut config = config(&[&prefill.url()], &[&decode.url()]);
    (config.max_inflight, config.max_body) = (1, 1 << 20);
    let router = RunningRouter::start(config).unwrap();
    let long = vec![b' '; 32 << 20];
    for (path, status) in [("/v1/completions", "413"), ("/v1/embeddings", "404"), ("/health", "405")] {
        assert_eq!(sent_whole(&router, path, &long).await, status, "{path}");
    }
    let mut client = Client::connect(router.addr()).await;
    let _held = tokio::spawn(client.post("/v1/completions", SENT, &[]));
    prefill.next().await;
    assert_eq!(sent_whole(&router, "/v1/completions", &long).await, "503");
}

#[tokio::test]
async fn a_body_that_comes_byte_by_byte_is_not_waited_for() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let mut config = config(&[&prefill.url()], &[&decode.url()]);
    config.client_timeout = Duration::from_secs(1);
    let router = RunningRouter::start(config).unwrap();
    let stream = TcpStream::connect(router.addr()).await.unwrap();
    let (mut reading, mut writing) = stream.into_split();
    writing
        .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 4096\r\n\r\n")
        .await
        .unwrap();
    let sending = async {
        // Each is in time, and all of them would take more than any bound of these tests.
        let mut pace = tokio::time::interval(Duration::from_millis(100));
        while writing.write_all(b" ").await.is_ok() {
            pace.tick().await;
        }
        std::future::pending().await
    };
    let mut answer = [0; 12];
    tokio::select! {
        read = within("an answer", reading.read_exact(&mut answer)) => read.unwrap(),
        () = sending => unreachable!(),
    };
    assert_eq!(std::str::from_utf8(&answer).unwrap(), "HTTP/1.1 408");
}

#[tokio::test]
async fn a_head_has_a_bound() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let router = router(&prefill, &decode);
    for (bytes, status) in [(60 << 10, 200), (200 << 10, 431)] {
        let mut client = Client::connect(router.addr()).await;
        let long = "x".repeat(bytes);
        let answer = client.post("/v1/completions", SENT, &[("x-long", &long)]);
        assert_eq!(within("an answer", answer).await.unwrap().status().as_u16(), status);
    }
}

#[tokio::test]
async fn a_chunked_body_over_the_limit_and_one_that_never_ends() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let mut config = config(&[&prefill.url()], &[&decode.url()]);
    config.max_body = 100;
    config.client_timeout = Duration::from_millis(300);
    let router = RunningRouter::start(config).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n";
    for (rest, status) in [(format!("c8\r\n{}\r\n", "x".repeat(200)), "413"), ("1\r\n{\r\n".into(), "408")] {
        let mut stream = TcpStream::connect(router.addr()).await.unwrap();
        stream.write_all(format!("{head}{rest}").as_bytes()).await.unwrap();
        let mut answer = [0; 12];
        within("an answer", stream.read_exact(&mut answer)).await.unwrap();
        assert_eq!(std::str::from_utf8(&answer).unwrap(), format!("HTTP/1.1 {status}"));
    }
}
