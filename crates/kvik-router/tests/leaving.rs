//! Clients that leave take their engine requests with them, and leave no KV behind.

mod common;

use std::time::Duration;

use bytes::Bytes;
use common::*;
use kvik_router::RunningRouter;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::mpsc;

const SENT: &str = r#"{"prompt":"x","max_tokens":9,"stream":true,"stream_options":{"include_usage":true}}"#;

#[tokio::test]
async fn during_prefill() {
    let (prefill, mut gone) = silent().await;
    let decode = good_decode().await;
    let router = router(&prefill, &decode);
    let mut client = Client::connect(router.addr()).await;
    let answer = tokio::spawn(client.post("/v1/completions", SENT, &[]));
    prefill.next().await;
    client.leave().await;
    within("prefill's closed connection", gone.recv().await.unwrap()).await.unwrap();
    until_metric(&router, r#"kvik_router_client_left_total{stage="prefill"} 1"#).await;
    until_metric(&router, "kvik_router_inflight 0").await;
    assert!(answer.await.unwrap().is_err());
    assert_eq!(decode.pending().await, 0);
}

#[tokio::test]
async fn during_decode_before_any_answer() {
    let prefill = good_prefill().await;
    let (decode, mut gone) = silent().await;
    let router = router(&prefill, &decode);
    let mut client = Client::connect(router.addr()).await;
    let answer = tokio::spawn(client.post("/v1/completions", SENT, &[]));
    decode.next().await;
    client.leave().await;
    within("decode's closed connection", gone.recv().await.unwrap()).await.unwrap();
    until_metric(&router, r#"kvik_router_client_left_total{stage="decode"} 1"#).await;
    assert!(answer.await.unwrap().is_err());
    // Decode had the request, so it tells prefill itself.
    assert_eq!(decode.pending().await, 0);
}

#[tokio::test]
async fn during_the_stream() {
    let prefill = good_prefill().await;
    let (gone, when) = Gone::new();
    let (chunks, receive) = mpsc::channel(1);
    let decode = one_answer(sse(receive, gone)).await;
    let router = router(&prefill, &decode);
    let mut client = Client::connect(router.addr()).await;
    let answer = tokio::spawn(client.post("/v1/completions", SENT, &[]));
    chunks.send(Ok(Bytes::from_static(b"data: 1\n\n"))).await.unwrap();
    let mut body = within("the head", answer).await.unwrap().unwrap().into_body();
    assert!(chunk(&mut body).await.unwrap().is_ok());
    client.leave().await;
    within("decode's closed connection", when).await.unwrap();
    until_metric(&router, r#"kvik_router_client_left_total{stage="stream"} 1"#).await;
    until_metric(&router, "kvik_router_inflight 0").await;
}

#[tokio::test]
async fn with_half_a_body() {
    let (prefill, decode) = (good_prefill().await, good_decode().await);
    let router = router(&prefill, &decode);
    let mut stream = TcpStream::connect(router.addr()).await.unwrap();
    let half = "POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 99\r\n\r\n{\"prompt\":";
    stream.write_all(half.as_bytes()).await.unwrap();
    until_metric(&router, "kvik_router_inflight 1").await;
    drop(stream);
    until_metric(&router, r#"kvik_router_client_left_total{stage="body"} 1"#).await;
    assert_eq!(prefill.pending().await, 0);
}

/// A listener that is so full that a further connection to it neither succeeds nor fails.
async fn clogged() -> (tokio::net::TcpListener, Vec<TcpStream>) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let mut plugs = Vec::new();
    let addr = listener.local_addr().unwrap();
    // A connection that the kernel queues succeeds within microseconds; the first that does not found it full.
    while let Ok(plug) = tokio::time::timeout(Duration::from_millis(500), TcpStream::connect(addr)).await {
        plugs.push(plug.unwrap());
    }
    (listener, plugs)
}

/// Waits until a socket of this machine is connecting to this port of the loopback address.
async fn until_connecting(port: u16) {
    const CONNECTING: &str = "02";
    let to = format!("0100007F:{port:04X}");
    let until = std::time::Instant::now() + BOUND;
    loop {
        let table = tokio::fs::read_to_string("/proc/self/net/tcp").await.unwrap();
        let mut sockets = table.lines().map(|line| line.split_whitespace().skip(2));
        if sockets.any(|mut socket| socket.next() == Some(&to) && socket.next() == Some(CONNECTING)) {
            return;
        }
        assert!(std::time::Instant::now() < until, "nobody connects to {to}");
    }
}

/// The timer of a connection of this machine, as `/proc/net/tcp` has it: its kind, and hundredths of a second.
async fn timer_of(here: u16, there: u16) -> (String, u64) {
    let ends = [here, there].map(|port| format!("0100007F:{port:04X}"));
    let table = tokio::fs::read_to_string("/proc/self/net/tcp").await.unwrap();
    let mut rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let row = rows.find(|row| row[1..3] == ends).unwrap();
    let (kind, left) = row[5].split_once(':').unwrap();
    (kind.to_owned(), u64::from_str_radix(left, 16).unwrap())
}

#[tokio::test]
async fn a_host_that_goes_without_a_word_is_asked_whether_it_is_there() {
    const KEEPALIVE: &str = "02";
    let ((prefill, _gone), decode) = (silent().await, good_decode().await);
    let router = router(&prefill, &decode);
    let mut client = TcpStream::connect(router.addr()).await.unwrap();
    let text =
        format!("POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: {}\r\n\r\n{SENT}", SENT.len());
    client.write_all(text.as_bytes()).await.unwrap();
    prefill.next().await;
    let timer = timer_of(router.addr().port(), client.local_addr().unwrap().port()).await;
    assert!(timer.0 == KEEPALIVE && timer.1 <= 1500, "{timer:?}");
}

#[tokio::test]
async fn in_the_gap_between_prefill_and_decode() {
    let prefill = good_prefill().await;
    let (full, _plugs) = clogged().await;
    let (gone, when) = Gone::new();
    let (chunks, receive) = mpsc::channel(1);
    let decode = one_answer(sse(receive, gone)).await;
    let full_url = format!("http://{}", full.local_addr().unwrap());
    let mut config = config(&[&prefill.url()], &[&full_url, &decode.url()]);
    config.connect_timeout = BOUND * 2;
    let router = RunningRouter::start(config).unwrap();
    let mut client = Client::connect(router.addr()).await;
    let answer = tokio::spawn(client.post("/v1/completions", SENT, &[("x-request-id", "left")]));
    until_connecting(full.local_addr().unwrap().port()).await;
    client.leave().await;
    assert!(answer.await.unwrap().is_err());
    let release = decode.next().await;
    assert_eq!(release.id(), "left-release");
    let want = format!(r#"{{"prompt":"x","max_tokens":1,"stream":true,"kv_transfer_params":{PARAMS}}}"#);
    assert_eq!(release.text(), want);
    until_metric(&router, r#"kvik_router_client_left_total{stage="gap"} 1"#).await;
    // Not before the first bytes, which prove that decode took the KV over; and not a byte longer.
    chunks.send(Ok(Bytes::from_static(b"data: 1\n\n"))).await.unwrap();
    until_metric(&router, r#"kvik_router_releases_total{outcome="released"} 1"#).await;
    within("the end of the release", when).await.unwrap();
}
