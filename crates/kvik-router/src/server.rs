//! Accepting connections, and ending.

use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

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

/// Accepting fails mostly for want of file descriptors, and no event says when there are some again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until told to stop, then drains: how many requests were cut off.
pub(crate) async fn run(
    listener: TcpListener,
    shared: Arc<Shared>,
    mut stop: watch::Receiver<Stop>,
) -> usize {
    let graceful = GracefulShutdown::new();
    accept(&listener, &shared, &graceful, &mut stop).await;
    drop(listener);
    let limit = shared.config.drain_timeout;
    log::info!("draining {} connections for at most {limit:?}", graceful.count());
    shared.tasks.close();
    let drained = async {
        graceful.shutdown().await;
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
    cut
}

async fn accept(
    listener: &TcpListener,
    shared: &Arc<Shared>,
    graceful: &GracefulShutdown,
    stop: &mut watch::Receiver<Stop>,
) {
    let app = app(shared.clone());
    let places = Arc::new(Semaphore::new(shared.config.max_inflight + SPARE_CONNECTIONS));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(shared.config.client_timeout);
    loop {
        let next = async {
            let place = places.clone().acquire_owned().await.ok()?;
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
        let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(app.clone()));
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            if let Err(e) = connection.await {
                log::debug!("a client's connection ended: {e}");
            }
            drop(place);
        });
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
