//! A router on threads of its own, for a process that is not itself asynchronous.

use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nix::sys::signal::SigSet;
use tokio::sync::watch;

use crate::config::{RouterConfig, RouterError};
use crate::server::{self, Stop};
use crate::shared::Shared;

/// After draining, tasks get this long to notice that they are over.
pub(crate) const LAST_TASKS: Duration = Duration::from_secs(1);

/// A router that listens. Dropping it cuts it off without waiting; to end well, [`stop`](Self::stop) and
/// [`wait`](Self::wait).
///
/// ```no_run
/// # fn main() -> Result<(), kvik_router::RouterError> {
/// use kvik_router::{RouterConfig, RunningRouter};
/// let config = RouterConfig::new(vec!["http://p0:8100".parse()?], vec!["http://d0:8200".parse()?]);
/// let router = RunningRouter::start(config)?;
/// println!("listening on http://{}", router.addr());
/// router.stop();
/// router.wait(None);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RunningRouter {
    addr: SocketAddr,
    stop: watch::Sender<Stop>,
    ended: Arc<Ended>,
}

#[derive(Debug, Default)]
struct Ended {
    result: Mutex<Option<Result<usize, RouterError>>>,
    changed: Condvar,
}

impl RunningRouter {
    /// Checks the configuration, opens the listening socket and starts serving. When this returns, connections
    /// are accepted. No thread of the router takes signals: they stay the caller's.
    pub fn start(config: RouterConfig) -> Result<Self, RouterError> {
        config.check()?;
        let at = format!("{}:{}", config.host, config.port);
        let cannot = |e: std::io::Error| RouterError::Failed(format!("cannot listen on {at}: {e}"));
        let listener = TcpListener::bind((config.host.as_str(), config.port)).map_err(cannot)?;
        listener.set_nonblocking(true).map_err(cannot)?;
        let addr = listener.local_addr().map_err(cannot)?;
        let no_threads =
            |e: std::io::Error| RouterError::Failed(format!("cannot start the router's threads: {e}"));
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .thread_name_fn(thread_name)
            .on_thread_start(block_signals)
            .build()
            .map_err(no_threads)?;
        let (stop, stopped) = watch::channel(Stop::Run);
        let ended = Arc::new(Ended::default());
        let teller = Teller { ended: ended.clone(), addr };
        thread::Builder::new()
            .name("kvik-router-main".into())
            .spawn(move || {
                block_signals();
                let result = serve(&runtime, listener, config, stopped);
                runtime.shutdown_timeout(LAST_TASKS);
                teller.tell(result);
            })
            .map_err(no_threads)?;
        Ok(Self { addr, stop, ended })
    }

    /// Where the router listens, with the port it was given.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Tells the router to take nothing new, to finish what it has within the drain timeout, and to end.
    /// Returns at once; may be called more than once.
    pub fn stop(&self) {
        self.stop.send_modify(|now| *now = Stop::Drain.max(*now));
    }

    /// Tells the router to end without finishing anything. Returns at once.
    pub fn stop_now(&self) {
        self.stop.send_modify(|now| *now = Stop::Now);
    }

    /// Waits until the router has ended, at most for `timeout` (`None`: a day): how many requests it has cut off.
    /// `None` means it still runs.
    pub fn wait(&self, timeout: Option<Duration>) -> Option<Result<usize, RouterError>> {
        let timeout = timeout.unwrap_or(A_DAY).min(A_DAY);
        let result = self.ended.result.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.ended.changed.wait_timeout_while(result, timeout, |result| result.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }
}

const A_DAY: Duration = Duration::from_secs(24 * 3600);

fn serve(
    runtime: &tokio::runtime::Runtime,
    listener: TcpListener,
    config: RouterConfig,
    stopped: watch::Receiver<Stop>,
) -> Result<usize, String> {
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener).map_err(|e| e.to_string())?;
        let shared = Arc::new(Shared::new(config, runtime.handle().clone()));
        Ok(server::run(listener, shared, stopped).await)
    })
}

fn thread_name() -> String {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("kvik-router-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

fn block_signals() {
    if let Err(e) = SigSet::all().thread_block() {
        log::warn!("a router thread cannot block signals: {e}");
    }
}

/// Tells the waiters how it ended, also where the thread unwinds without saying so.
struct Teller {
    ended: Arc<Ended>,
    addr: SocketAddr,
}

impl Teller {
    fn tell(&self, result: Result<usize, String>) {
        let by_itself =
            |why| RouterError::Failed(format!("the router on {} ended by itself: {why}", self.addr));
        let result = result.map_err(by_itself);
        let mut slot = self.ended.result.lock().unwrap_or_else(PoisonError::into_inner);
        slot.get_or_insert(result);
        self.ended.changed.notify_all();
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.tell(Err("its main thread failed".into()));
    }
}
