//! Fake engines and a client that can leave, on real sockets.
#![allow(dead_code, reason = "each test file uses its own part of this module")]

pub mod streams;

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use kvik_router::{RouterConfig, RunningRouter};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinHandle;

/// No event in these tests takes longer than this.
pub const BOUND: Duration = Duration::from_secs(60);

/// Fails the test where the future takes longer than [`BOUND`].
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(BOUND, future).await.unwrap_or_else(|_| panic!("{what} took longer than {BOUND:?}"))
}

/// A request as an engine got it.
#[derive(Debug)]
pub struct Got {
    pub method: Method,
    pub path: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Got {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn id(&self) -> &str {
        self.headers["x-request-id"].to_str().unwrap()
    }
}

type Answering = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// An HTTP server that keeps what it got and answers as it is told.
pub struct Fake {
    pub addr: SocketAddr,
    got: Mutex<mpsc::UnboundedReceiver<Got>>,
    server: JoinHandle<()>,
}

impl Fake {
    pub async fn start<F, A>(answer: F) -> Self
    where
        F: Fn() -> A + Send + Sync + 'static,
        A: Future<Output = Response<Body>> + Send + 'static,
    {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), answer)
    }

    pub fn on<F, A>(listener: TcpListener, answer: F) -> Self
    where
        F: Fn() -> A + Send + Sync + 'static,
        A: Future<Output = Response<Body>> + Send + 'static,
    {
        let addr = listener.local_addr().unwrap();
        let (keep, got) = mpsc::unbounded_channel();
        let answer: Arc<dyn Fn() -> Answering + Send + Sync> = Arc::new(move || Box::pin(answer()));
        let app = axum::Router::new().fallback(move |request: Request<Body>| {
            let (keep, answer) = (keep.clone(), answer.clone());
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.unwrap().to_bytes();
                let path = head.uri.path_and_query().unwrap().to_string();
                keep.send(Got { method: head.method, path, headers: head.headers, body }).ok();
                answer().await
            }
        });
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { addr, got: Mutex::new(got), server }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// The next request that arrives.
    pub async fn next(&self) -> Got {
        within("a request to an engine", async { self.got.lock().await.recv().await.unwrap() }).await
    }

    /// How many requests have arrived that nobody has taken with [`next`](Self::next).
    pub async fn pending(&self) -> usize {
        self.got.lock().await.len()
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// A listener that drops whoever connects, as a host that is gone does, with what fills its queue.
pub async fn gone() -> (TcpListener, Vec<TcpStream>) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let (addr, mut waiting) = (listener.local_addr().unwrap(), Vec::new());
    let connect = || tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(addr));
    while let Ok(connected) = connect().await {
        waiting.push(connected.unwrap());
    }
    (listener, waiting)
}

/// A JSON answer.
pub fn json(status: u16, text: &str) -> Response<Body> {
    let mut response = Response::new(Body::from(text.to_owned()));
    *response.status_mut() = StatusCode::from_u16(status).unwrap();
    response.headers_mut().insert("content-type", "application/json".parse().unwrap());
    response
}

/// A streamed answer whose chunks the test sends one by one; it ends when the sender goes. The receiver of
/// `Gone` resolves when the router closes the connection before that.
pub fn sse(chunks: mpsc::Receiver<Result<Bytes, std::io::Error>>, gone: Gone) -> Response<Body> {
    let body = stream::unfold((chunks, gone), |(mut chunks, gone)| async move {
        match chunks.recv().await {
            Some(chunk) => Some((chunk, (chunks, gone))),
            None => {
                gone.ended();
                None
            }
        }
    });
    let mut response = Response::new(Body::from_stream(body));
    response.headers_mut().insert("content-type", "text/event-stream; charset=utf-8".parse().unwrap());
    response
}

/// Tells the test when it is dropped: that is, when the work it was put into was given up.
pub struct Gone(Option<oneshot::Sender<()>>);

impl Gone {
    pub fn new() -> (Self, oneshot::Receiver<()>) {
        let (tell, told) = oneshot::channel();
        (Self(Some(tell)), told)
    }

    /// The work ended by itself.
    pub fn ended(mut self) {
        self.0.take();
    }
}

impl Drop for Gone {
    fn drop(&mut self) {
        if let Some(tell) = self.0.take() {
            tell.send(()).ok();
        }
    }
}

/// What prefill answers where nothing else matters.
pub const PARAMS: &str = r#"{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"remote_engine_id":"p"}"#;

pub fn prefill_answer() -> Response<Body> {
    json(200, &format!(r#"{{"id":"cmpl","choices":[],"kv_transfer_params":{PARAMS}}}"#))
}

pub async fn good_prefill() -> Fake {
    Fake::start(|| async { prefill_answer() }).await
}

pub async fn good_decode() -> Fake {
    Fake::start(|| async { json(200, r#"{"choices":[{"text":"ok"}]}"#) }).await
}

/// A fake whose one answer is handed over by the test.
pub async fn one_answer(response: Response<Body>) -> Fake {
    let slot = Arc::new(std::sync::Mutex::new(Some(response)));
    Fake::start(move || {
        let response = slot.lock().unwrap().take();
        async move { response.unwrap_or_else(|| json(500, r#"{"error":"asked twice"}"#)) }
    })
    .await
}

/// A fake that takes requests and never answers, and a signal for each that it was given up.
pub async fn silent() -> (Fake, mpsc::UnboundedReceiver<oneshot::Receiver<()>>) {
    let (tell, told) = mpsc::unbounded_channel();
    let fake = Fake::start(move || {
        let (gone, when) = Gone::new();
        tell.send(when).ok();
        async move {
            let _gone = gone;
            std::future::pending().await
        }
    })
    .await;
    (fake, told)
}

/// An address where nothing listens.
pub async fn nobody() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

/// A configuration between these engines, on a free port, with the defaults otherwise.
pub fn config(prefill: &[&str], decode: &[&str]) -> RouterConfig {
    let urls = |list: &[&str]| list.iter().map(|url| url.parse().unwrap()).collect();
    RouterConfig { port: 0, ..RouterConfig::new(urls(prefill), urls(decode)) }
}

pub fn router(prefill: &Fake, decode: &Fake) -> RunningRouter {
    RunningRouter::start(config(&[&prefill.url()], &[&decode.url()])).unwrap()
}

/// A client's connection to the router.
pub struct Client {
    sender: SendRequest<Full<Bytes>>,
    connection: JoinHandle<()>,
}

impl Client {
    pub async fn connect(addr: SocketAddr) -> Self {
        let stream = within("connecting", TcpStream::connect(addr)).await.unwrap();
        let (sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(async move {
            connection.await.ok();
        });
        Self { sender, connection }
    }

    pub fn post(
        &mut self,
        path: &str,
        body: impl Into<Bytes>,
        headers: &[(&str, &str)],
    ) -> impl Future<Output = hyper::Result<Response<Incoming>>> + Send + 'static {
        let mut request = Request::post(path).header("host", "router");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.sender.send_request(request.body(Full::new(body.into())).unwrap())
    }

    /// Closes the connection.
    pub async fn leave(self) {
        self.connection.abort();
        self.connection.await.ok();
    }
}

/// Posts a body and reads the whole answer.
pub async fn post(router: &RunningRouter, path: &str, body: &str) -> (StatusCode, HeaderMap, String) {
    let mut client = Client::connect(router.addr()).await;
    let response = within("an answer", client.post(path, body.to_owned(), &[])).await.unwrap();
    whole(response).await
}

pub async fn complete(router: &RunningRouter, body: &str) -> (StatusCode, HeaderMap, String) {
    post(router, "/v1/completions", body).await
}

pub async fn get(router: &RunningRouter, path: &str) -> (StatusCode, HeaderMap, String) {
    asked(router, Method::GET, path).await
}

/// Asks without a body.
pub async fn asked(router: &RunningRouter, method: Method, path: &str) -> (StatusCode, HeaderMap, String) {
    let mut client = Client::connect(router.addr()).await;
    let request = Request::builder().method(method).uri(path).header("host", "router");
    let request = request.body(Full::default()).unwrap();
    let response = within("an answer", client.sender.send_request(request)).await.unwrap();
    whole(response).await
}

pub async fn whole(response: Response<Incoming>) -> (StatusCode, HeaderMap, String) {
    let (head, body) = response.into_parts();
    let body = within("the whole answer", body.collect()).await.unwrap().to_bytes();
    (head.status, head.headers, String::from_utf8(body.to_vec()).unwrap())
}

/// Asks for the metrics until they have this line.
pub async fn until_metric(router: &RunningRouter, line: &str) {
    let until = Instant::now() + BOUND;
    loop {
        let (_, _, text) = get(router, "/metrics").await;
        if text.lines().any(|l| l == line) {
            return;
        }
        assert!(Instant::now() < until, "no {line} in\n{text}");
    }
}

/// Ends a router and waits for all that it still does, releases too.
pub async fn drained(router: RunningRouter) {
    router.stop();
    let ended = tokio::task::spawn_blocking(move || router.wait(Some(BOUND))).await.unwrap();
    assert!(matches!(ended, Some(Ok(0))), "{ended:?}");
}

/// The next bytes of a body.
pub async fn chunk(body: &mut Incoming) -> Option<Result<Bytes, hyper::Error>> {
    let frame = within("a chunk", body.frame()).await?;
    Some(frame.map(|frame| frame.into_data().unwrap()))
}
