//! Accepting connections, and ending.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use crate::running::LAST_TASKS;
use crate::service::app;
use crate::shared::Shared;
use crate::upstream::KEEPALIVE;

/// How far a router has been told to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stop {
    /// Not at all.
    Run,
    /// Take nothing new, finish what is there.
    Drain,
    /// Finish nothing.
    Now,
}

/// Connections beyond the requests in progress: idle ones, and those that are told 503.
const SPARE_CONNECTIONS: usize = 1024;

/// Bytes of a request's head, and what one read brings beyond: as much as most proxies take. A request holds copies of it.
const MOST_HEAD: usize = 64 << 10;

/// Where no other connection has room, those that are as old and have no request in progress are closed.
const TIME_TO_ASK: Duration = Duration::from_secs(1);
/// How often they are told so, at most.
const TELL: Duration = Duration::from_millis(100);

/// Accepting fails mostly for want of file descriptors, and no event says when there are some again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until told to stop, then drains: how many requests were cut off.
pub(crate) async fn run(
    listener: TcpListener,
    shared: Arc<Shared>,
    mut stop: watch::Receiver<Stop>,
) -> usize {
    let most = shared.config.max_inflight + SPARE_CONNECTIONS;
    let room = Room { places: Arc::new(Semaphore::new(most)), full: watch::Sender::new(Instant::now()) };
    let all = u32::try_from(most).unwrap_or(u32::MAX);
    accept(&listener, &shared, &room, &mut stop).await;
    drop(listener);
    let limit = shared.config.drain_timeout;
    log::info!("draining {} connections for at most {limit:?}", most - room.places.available_permits());
    shared.tasks.close();
    let drained = async {
        // Whoever has one has been told to end.
        let _all = room.places.acquire_many(all).await;
        shared.tasks.wait().await;
    };
    let why = tokio::select! {
        () = drained => "all has ended",
        () = tokio::time::sleep(limit) => "the time to drain is over",
        () = told(&mut stop, Stop::Now) => "told to end now",
    };
    let cut = shared.config.max_inflight - shared.places.available_permits();
    match cut {
        0 => log::info!("drained: {why}"),
        _ => log::warn!("{cut} requests are cut off: {why}"),
    }
    // Clients' connections go first: the ends of engines' would be told as failures of engines.
    drop(room.full);
    let _ = tokio::time::timeout(LAST_TASKS, room.places.acquire_many(all)).await;
    cut
}

async fn accept(listener: &TcpListener, shared: &Arc<Shared>, room: &Room, stop: &mut watch::Receiver<Stop>) {
    let app = app(shared.clone());
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(shared.config.client_timeout).max_buf_size(MOST_HEAD);
    loop {
        let next = async {
            let place = room.place().await?;
            Some((place, listener.accept().await))
        };
        let accepted = tokio::select! {
            next = next => next,
            () = told(stop, Stop::Drain) => return,
        };
        let Some((place, accepted)) = accepted else { return };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(e) => {
                log::warn!("a connection could not be accepted: {e}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        prepare(&stream, shared.config.client_timeout);
        let serving = serve(stream, http.clone(), app.clone(), stop.clone(), room.full.subscribe());
        tokio::spawn(async move {
            if let Err(e) = serving.await {
                log::debug!("a client's connection ended: {e}");
            }
            drop(place);
        });
    }
}

/// Places for connections.
struct Room {
    places: Arc<Semaphore>,
    /// When connections were last told that there is no place; they are cut off with it.
    full: watch::Sender<Instant>,
}

impl Room {
    /// A place for one connection more. Where there is none, those that ask for nothing are told to make room: else
    /// whoever opens as many as there may be keeps all others out.
    async fn place(&self) -> Option<OwnedSemaphorePermit> {
        if let Ok(place) = self.places.clone().try_acquire_owned() {
            return Some(place);
        }
        loop {
            if self.full.borrow().elapsed() >= TELL {
                self.full.send_replace(Instant::now());
            }
            if let Ok(place) = tokio::time::timeout(TELL, self.places.clone().acquire_owned()).await {
                return place.ok();
            }
        }
    }
}

/// Serves a connection to its end; once it is to end, only what is in progress.
async fn serve(
    stream: TcpStream,
    http: http1::Builder,
    app: axum::Router,
    mut stop: watch::Receiver<Stop>,
    mut full: watch::Receiver<Instant>,
) -> hyper::Result<()> {
    let (since, asked) = (Instant::now(), AtomicBool::new(false));
    let app = TowerToHyperService::new(app);
    let service = service_fn(|request| {
        asked.store(true, Ordering::Relaxed);
        app.call(request)
    });
    let connection = http.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let crowded =
        async { full.wait_for(|when| when.saturating_duration_since(since) >= TIME_TO_ASK).await.is_ok() };
    tokio::select! {
        biased;
        crowded = crowded => {
            if !crowded || !asked.load(Ordering::Relaxed) {
                log::debug!("a client's connection is closed: it asks for nothing, and others want its place");
                return Ok(());
            }
        }
        () = told(&mut stop, Stop::Drain) => {}
        ended = connection.as_mut() => return ended,
    }
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        biased;
        () = async { while full.changed().await.is_ok() {} } => Ok(()),
        ended = connection => ended,
    }
}

/// Chunks leave at once, and a client that acknowledges nothing for `silence`, or whose window stays shut for
/// so long, is cut off by the kernel: no answer waits for ever in a buffer. Where nothing is sent, as during prefill, it
/// asks whether the client's host is still there.
fn prepare(stream: &TcpStream, silence: Duration) {
    let millis = u32::try_from(silence.as_millis()).unwrap_or(u32::MAX);
    let set = || -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        sockopt::set_tcp_user_timeout(stream, millis)?;
        sockopt::set_tcp_keepidle(stream, KEEPALIVE)?;
        sockopt::set_tcp_keepintvl(stream, KEEPALIVE)?;
        Ok(sockopt::set_socket_keepalive(stream, true)?)
    };
    if let Err(e) = set() {
        log::debug!("a client's connection cannot be tuned: {e}");
    }
}

/// Resolves when the router has been told at least `level`, or when nobody can tell it any more.
async fn told(stop: &mut watch::Receiver<Stop>, level: Stop) {
    // The error means that the handle is gone, which ends the router as well.
    let _ = stop.wait_for(|now| *now >= level).await;
}
