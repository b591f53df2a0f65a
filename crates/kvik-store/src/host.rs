//! The threads that answer requests: a few, which take turns between those who ask.
//!
//! The first block of a get is lent by whoever brings the request, before its turn: that takes microseconds, and no
//! more for who asks for much.
//!
//! Invariants:
//! - Who asks for much does not keep others waiting: each has a queue of its own, which is bounded, and threads take
//!   one request of each in turn.
//! - No one has more than half of the threads, if there is more than one: a client that stands still in the middle of
//!   a put keeps the thread that serves it until its transfer ends.

use crate::lending::Lender;
use crate::service::Service;
use crate::wire::{Request, Response};
use kvik_core::{Code, EngineId, Error, Incarnation, Result};
use kvik_engine::Events;
use kvik_host::thread::{ThreadOptions, spawn_named};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// Requests of one client that wait, at most.
const WAITING: usize = 256;
/// Threads that answer, at least.
const LEAST_THREADS: usize = 4;

/// One start of a client's engine: what becomes of it is nothing to the next one, which may have the same id.
pub(crate) type Client = (EngineId, Incarnation);

/// The way back to who asked.
pub(crate) trait Reply: Send {
    /// Answers.
    fn send(&self, response: Response);

    /// Answers at once, or gives the answer back where it would have to wait.
    ///
    /// # Errors
    /// The answer.
    fn try_send(&self, response: Response) -> Result<(), Box<Response>>;
}

/// What is to be done for who asked.
enum Work {
    Request(Box<Request>),
    /// A get that was begun.
    Get(Box<Lender>),
}

struct Job {
    work: Work,
    reply: Box<dyn Reply>,
}

#[derive(Default)]
struct Queue {
    /// With when each came.
    waiting: VecDeque<(Instant, Job)>,
    running: usize,
}

#[derive(Default)]
struct Queues {
    clients: HashMap<Client, Queue>,
    /// Those who have something waiting, and are not in every thread that they may have.
    turn: VecDeque<Client>,
    closed: bool,
}

struct Shared {
    service: Service,
    queues: Mutex<Queues>,
    ready: Condvar,
    /// Threads that one client may have.
    each: usize,
}

/// Answers requests until it is dropped.
pub(crate) struct Host {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Those that the others wait for: they end last.
    movers: Vec<JoinHandle<()>>,
    /// Of the engine: closed, they end the thread that waits for them.
    events: Arc<Events>,
}

impl Shared {
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        let mut queues = self.queues();
        loop {
            let Some((client, came, job)) = queues.next(self.each) else {
                if queues.closed {
                    return;
                }
                queues = self.ready.wait(queues).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queues);
            if let Some(left) = job.answer(&self.service, came, false) {
                self.set_aside(left, came);
            }
            queues = self.queues();
            queues.done(client, self.each);
        }
    }
}

impl Queues {
    /// Whether one more request of a client may wait.
    fn check_room(&self, client: Client) -> Result<()> {
        if self.closed {
            return Err(Error::new(Code::EngineClosed, "the store is closing"));
        }
        if self.clients.get(&client).is_some_and(|client| client.waiting.len() >= WAITING) {
            let text =
                format!("{WAITING} requests of this client wait already: wait for their answers first");
            return Err(Error::new(Code::MemoryCapReached, text));
        }
        Ok(())
    }

    fn next(&mut self, each: usize) -> Option<(Client, Instant, Job)> {
        let id = self.turn.pop_front()?;
        let client = self.clients.get_mut(&id)?;
        let (came, job) = client.waiting.pop_front()?;
        client.running += 1;
        if !client.waiting.is_empty() && client.running < each {
            self.turn.push_back(id);
        }
        Some((id, came, job))
    }

    fn done(&mut self, id: Client, each: usize) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.running -= 1;
        match (client.waiting.is_empty(), client.running) {
            (true, 0) => drop(self.clients.remove(&id)),
            (false, running) if running + 1 == each => self.turn.push_back(id),
            _ => {}
        }
    }
}

impl Shared {
    /// What may wait for the object store has a thread of its own; where too many have one, it is answered without.
    fn set_aside(&self, job: Job, came: Instant) {
        let service = self.service.clone();
        let far = service.store().far();
        match far.and_then(|far| Some((far, far.objects.permit()?))) {
            Some((far, permit)) => {
                let on = service.clone();
                far.objects.aside(permit, move || drop(job.answer(&on, came, true)));
            }
            None => job.refuse(&service),
        }
    }
}

impl Job {
    /// Answers a request, by a thread that may wait for the object store (`far`) or not; what is left if it may not.
    fn answer(self, service: &Service, came: Instant, far: bool) -> Option<Job> {
        let Job { work, reply } = self;
        let answer = |response| reply.send(response);
        let left = match work {
            Work::Request(request) if !far && service.waits_far(&request) => Some(Work::Request(request)),
            Work::Request(request) => {
                service.answer(*request, came, &answer);
                None
            }
            Work::Get(get) => service.lend(*get, far, &answer).map(Work::Get),
        };
        left.map(|work| Job { work, reply })
    }

    /// Answers what may not wait: blocks that only the object store has are a miss.
    fn refuse(self, service: &Service) {
        self.reply.send(match self.work {
            Work::Get(mut get) => get.miss(),
            Work::Request(_) => {
                let text = "too many requests wait for the object store: ask again";
                service.failed(Error::new(Code::MemoryCapReached, text))
            }
        });
    }
}

impl Host {
    /// # Errors
    /// The machine gives no thread, or the engine is closed.
    pub fn start(service: Service) -> Result<Host> {
        let count = std::thread::available_parallelism().map_or(1, usize::from).max(LEAST_THREADS);
        let events = Arc::new(service.store().engine().events()?);
        let (watching, watched) = (service.clone(), events.clone());
        let shared =
            Shared { service, queues: Mutex::default(), ready: Condvar::new(), each: (count / 2).max(1) };
        let mut host = Host { shared: Arc::new(shared), threads: Vec::new(), movers: Vec::new(), events };
        let options = ThreadOptions::default();
        let watch = spawn_named("kvik-store-loan", &options, move || watching.watch(&watched));
        host.threads.push(watch.map_err(crate::no_thread)?);
        host.service().store().clone().start_below(&mut host.movers)?;
        for number in 0..count {
            let shared = host.shared.clone();
            let thread = spawn_named(&format!("kvik-store-{number}"), &options, move || shared.serve());
            host.threads.push(thread.map_err(crate::no_thread)?);
        }
        Ok(host)
    }

    pub fn service(&self) -> &Service {
        &self.shared.service
    }

    /// Has a request of a client answered, in its turn; the first block of a get at once, where nobody has to be waited
    /// for. The caller waits for nothing.
    ///
    /// # Errors
    /// `MemoryCapReached` when too many of this client wait; `EngineClosed` when the store is closing.
    pub fn submit(&self, client: Client, request: Request, reply: Box<dyn Reply>) -> Result<()> {
        let came = Instant::now();
        self.shared.queues().check_room(client)?;
        let work = match request {
            Request::Get(get) => {
                let mut lender = Box::new(Lender::new(self.service(), get, came));
                if let Some(response) = lender.first()
                    && let Err(unsent) = reply.try_send(response)
                {
                    lender.keep(*unsent);
                }
                if lender.is_over() {
                    return Ok(());
                }
                Work::Get(lender)
            }
            request => Work::Request(Box::new(request)),
        };
        let mut queues = self.shared.queues();
        queues.check_room(client)?;
        let entry = queues.clients.entry(client).or_default();
        entry.waiting.push_back((came, Job { work, reply }));
        if entry.waiting.len() == 1 && entry.running < self.shared.each {
            queues.turn.push_back(client);
        }
        drop(queues);
        self.shared.ready.notify_one();
        Ok(())
    }

    /// A client has gone: what it asked for and nobody has begun is not answered.
    pub fn forget(&self, client: Client) {
        let mut queues = self.shared.queues();
        let waiting = queues.clients.get_mut(&client).map(|client| std::mem::take(&mut client.waiting));
        queues.turn.retain(|other| *other != client);
        if queues.clients.get(&client).is_some_and(|client| client.running == 0) {
            queues.clients.remove(&client);
        }
        drop(queues);
        drop(waiting);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let mut queues = self.shared.queues();
        queues.closed = true;
        let left = std::mem::take(&mut queues.clients);
        queues.turn.clear();
        drop(queues);
        drop(left);
        self.shared.ready.notify_all();
        self.events.close();
        join(&mut self.threads);
        self.service().store().end_below();
        join(&mut self.movers);
    }
}

fn join(threads: &mut Vec<JoinHandle<()>>) {
    for thread in threads.drain(..) {
        if thread.join().is_err() {
            log::error!("a thread of the store panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;
    use crate::wire::{Ack, Ahead, Get, Put};
    use crate::{BlockKey, LogOptions, NamespaceId, Shape, StoreOptions};
    use kvik_core::{GrantId, Layout, Ticket};
    use kvik_engine::{Config, Engine, Grant, GrantOptions, PageSet};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    const NAMESPACE: NamespaceId = NamespaceId([1; 32]);
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Who hears answers, at once or not, and as long as the gate is open.
    struct Told {
        to: Sender<Response>,
        at_once: bool,
        gate: Arc<Mutex<()>>,
    }

    impl Reply for Told {
        fn send(&self, response: Response) {
            drop(self.gate.lock().unwrap());
            drop(self.to.send(response));
        }

        fn try_send(&self, response: Response) -> Result<(), Box<Response>> {
            if self.at_once {
                drop(self.to.send(response));
                return Ok(());
            }
            Err(Box::new(response))
        }
    }

    /// A client, by its id and its start.
    fn client(id: u8, start: u64) -> Client {
        (EngineId([id; 16]), Incarnation(start))
    }

    fn ask(host: &Host, request: Request, at_once: bool, gate: &Arc<Mutex<()>>) -> Receiver<Response> {
        ask_as(host, client(9, 1), request, at_once, gate)
    }

    fn ask_as(
        host: &Host,
        client: Client,
        request: Request,
        at_once: bool,
        gate: &Arc<Mutex<()>>,
    ) -> Receiver<Response> {
        let ((to, from), gate) = (channel(), gate.clone());
        host.submit(client, request, Box::new(Told { to, at_once, gate })).unwrap();
        from
    }

    /// A store in which a namespace was opened.
    fn opened(options: &StoreOptions) -> Host {
        let store = Store::open(Engine::start(Config::default()).unwrap(), options).unwrap();
        let (host, shape) = (Host::start(Service::new(store)).unwrap(), Shape::new(1, 1, 4096).unwrap());
        let opens = Request::Open { namespace: NAMESPACE, shape, tenant: "one".into(), model: String::new() };
        let opened = ask(&host, opens, true, &Arc::default()).recv_timeout(PATIENCE).unwrap();
        assert_eq!(opened, Response::Opened);
        host
    }

    /// A grant over so many pages.
    fn granted(engine: &Engine, pages: u32) -> Grant {
        let region = engine.allocate(u64::from(pages) * 4096).unwrap();
        let layout = Arc::new(Layout::contiguous(pages, 4096).unwrap());
        let pages = PageSet::new(&region, layout, (0..pages).collect(), None, None).unwrap();
        engine.grant(&pages, GrantOptions::default()).unwrap()
    }

    /// A put of the first of the keys that are used here.
    fn put(ticket: &Ticket, count: u8) -> Put {
        let (namespace, keys) = (NAMESPACE, (2..2 + count).map(|key| BlockKey([key; 32])).collect());
        Put { namespace, parent: None, keys, ticket: ticket.clone(), ack: Ack::Stored, deadline: PATIENCE }
    }

    /// A store with two blocks, and a get of them.
    fn two_blocks() -> (Host, Request) {
        let host = opened(&StoreOptions::default());
        let grant = granted(host.service().store().engine(), 2);
        let put = put(grant.ticket(), 2);
        let get = Get { namespace: NAMESPACE, keys: put.keys.clone(), expiry: PATIENCE, ahead: None };
        let stored = ask(&host, Request::Put(put), true, &Arc::default()).recv_timeout(PATIENCE).unwrap();
        assert!(matches!(&stored, Response::Stored(stored) if stored.stored == 2), "{stored:?}");
        (host, Request::Get(get))
    }

    /// How many blocks come next.
    fn lent(from: &Receiver<Response>) -> usize {
        match from.recv_timeout(PATIENCE).unwrap() {
            Response::Lent(lending) => lending.blocks.len(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_first_block_of_a_get_waits_for_no_thread() {
        let (host, get) = two_blocks();
        let gate = Arc::new(Mutex::new(()));
        let shut = gate.lock().unwrap();
        // Each keeps a thread, and others wait behind them.
        let busy: Vec<_> =
            (0..2 * host.threads.len()).map(|_| ask(&host, Request::Stat, true, &gate)).collect();
        let from = ask(&host, get, true, &gate);
        assert_eq!(from.try_iter().count(), 1, "it is there when the request was brought");
        drop(shut);
        assert_eq!(lent(&from), 1);
        busy.iter().for_each(|from| assert!(from.recv_timeout(PATIENCE).is_ok()));
    }

    #[test]
    fn the_end_of_a_clients_earlier_start_takes_nothing_of_the_next_one() {
        let (host, gate) = (opened(&StoreOptions::default()), Arc::new(Mutex::new(())));
        let shut = gate.lock().unwrap();
        let stat = |client| ask_as(&host, client, Request::Stat, true, &gate);
        // Two clients keep all threads, so that the next start's request waits.
        let _busy: Vec<_> =
            (0..2 * host.threads.len()).map(|number| stat(client(8 + (number % 2) as u8, 1))).collect();
        let asked = stat(client(9, 2));
        host.forget(client(9, 1));
        drop(shut);
        assert!(asked.recv_timeout(PATIENCE).is_ok(), "it was dropped with the earlier start's");
    }

    #[test]
    fn what_cannot_be_sent_at_once_is_sent_in_its_order() {
        let (host, get) = two_blocks();
        let from = ask(&host, get.clone(), false, &Arc::default());
        assert_eq!((lent(&from), lent(&from), from.recv_timeout(PATIENCE).is_err()), (1, 1, true));
        let Request::Get(get) = get else { return };
        let one = Request::Get(Get { keys: get.keys[..1].to_vec(), ..get });
        let before = host.service().store().counts().hits;
        let from = ask(&host, one, false, &Arc::default());
        assert_eq!((lent(&from), from.recv_timeout(PATIENCE).is_err()), (1, true));
        assert_eq!(host.service().store().counts().hits, before + 1);
    }

    #[test]
    fn an_id_of_a_clients_own_counts_once() {
        let (host, Request::Get(get)) = two_blocks() else { return };
        let one = |ahead| {
            let get = Get { keys: get.keys[..1].to_vec(), ahead, ..get.clone() };
            ask(&host, Request::Get(get), true, &Arc::default()).recv_timeout(PATIENCE).unwrap()
        };
        let ticket = |response| match response {
            Response::Lent(lending) => lending.tickets[0].clone(),
            other => panic!("{other:?}"),
        };
        let (grant, layout) = (GrantId([5; 16]), ticket(one(None)).layout);
        assert_ne!(ticket(one(Some(Ahead { grant, layout: [0; 8] }))).grant, grant);
        assert_eq!(ticket(one(Some(Ahead { grant, layout }))).grant, grant);
        let again = one(Some(Ahead { grant, layout }));
        assert!(matches!(again, Response::Failed(Code::InvalidArgument, _)), "{again:?}");
    }

    #[test]
    fn a_put_that_has_waited_has_no_more_time_than_its_client() {
        let (host, client) = (opened(&StoreOptions::default()), Engine::start(Config::default()).unwrap());
        // A ticket that was never given: a read by it waits for as long as it may.
        let ticket = granted(&client, 1).ticket().with_grant(GrantId([7; 16]), 4 * PATIENCE);
        let put = put(&ticket, 1);
        let ((to, from), began) = (channel(), Instant::now());
        host.service().answer(Request::Put(put), began - PATIENCE, &|response| drop(to.send(response)));
        assert!(matches!(from.recv().unwrap(), Response::Failed(..)));
        assert!(began.elapsed() < PATIENCE / 2, "it took {:?} more", began.elapsed());
    }

    #[test]
    fn what_has_come_of_a_put_that_fails_is_written_to_the_log_too() {
        let folder = std::env::temp_dir().join(format!("kvik-store-half-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&folder));
        let log = Some((folder.clone(), LogOptions::new(8 << 20)));
        let host = opened(&StoreOptions { log, ..StoreOptions::default() });
        // It has one page for three blocks: the first one comes alone, and the others do not.
        let client = Engine::start(Config::default()).unwrap();
        let grant = granted(&client, 1);
        let put = Request::Put(put(grant.ticket(), 3));
        let failed = ask(&host, put, true, &Arc::default()).recv_timeout(PATIENCE).unwrap();
        assert!(matches!(failed, Response::Failed(..)), "{failed:?}");
        let counts = || host.service().store().counts();
        assert_eq!(counts().blocks, 1);
        let until = Instant::now() + PATIENCE;
        while counts().written == 0 {
            assert!(Instant::now() < until, "{:?}", counts());
            std::thread::yield_now();
        }
        drop(host);
        drop(std::fs::remove_dir_all(&folder));
    }

    #[test]
    fn who_brings_a_get_does_not_wait_for_the_blocks() {
        let (host, get) = two_blocks();
        let (store, host) = (host.service().store().clone(), &host);
        let from = std::thread::scope(|scope| {
            let state = store.state();
            let (to, brought) = channel();
            scope.spawn(move || to.send(ask(host, get, true, &Arc::default())).unwrap());
            let from = brought.recv_timeout(PATIENCE);
            drop(state);
            from.expect("it waits")
        });
        assert_eq!((lent(&from), lent(&from)), (1, 1));
    }
}
