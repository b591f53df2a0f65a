//! The threads that answer requests: a few, which take turns between those who ask.
//!
//! Invariants:
//! - Who asks for much does not keep others waiting: each has a queue of its own, which is bounded, and threads take
//!   one request of each in turn.
//! - No one has more than half of the threads, if there is more than one: a client that stands still in the middle of
//!   a put keeps the thread that serves it until its transfer ends.

use crate::service::Service;
use crate::wire::{Request, Response};
use kvik_core::{Code, EngineId, Error, Result};
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

/// A request, and the way back.
pub(crate) struct Job {
    pub request: Request,
    pub reply: Box<dyn Fn(Response) + Send>,
}

#[derive(Default)]
struct Client {
    /// With when each came.
    waiting: VecDeque<(Instant, Job)>,
    running: usize,
}

#[derive(Default)]
struct Queues {
    clients: HashMap<EngineId, Client>,
    /// Those who have something waiting, and are not in every thread that they may have.
    turn: VecDeque<EngineId>,
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
            self.service.answer(job.request, came, &*job.reply);
            queues = self.queues();
            queues.done(client, self.each);
        }
    }
}

impl Queues {
    fn next(&mut self, each: usize) -> Option<(EngineId, Instant, Job)> {
        let id = self.turn.pop_front()?;
        let client = self.clients.get_mut(&id)?;
        let (came, job) = client.waiting.pop_front()?;
        client.running += 1;
        if !client.waiting.is_empty() && client.running < each {
            self.turn.push_back(id);
        }
        Some((id, came, job))
    }

    fn done(&mut self, id: EngineId, each: usize) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.running -= 1;
        match (client.waiting.is_empty(), client.running) {
            (true, 0) => drop(self.clients.remove(&id)),
            (false, running) if running + 1 == each => self.turn.push_back(id),
            _ => {}
        }
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

    /// Has a request of a client answered, in its turn.
    ///
    /// # Errors
    /// `MemoryCapReached` when too many of this client wait; `EngineClosed` when the store is closing.
    pub fn submit(&self, client: EngineId, job: Job) -> Result<()> {
        let mut queues = self.shared.queues();
        if queues.closed {
            return Err(Error::new(Code::EngineClosed, "the store is closing"));
        }
        let entry = queues.clients.entry(client).or_default();
        if entry.waiting.len() >= WAITING {
            let text =
                format!("{WAITING} requests of this client wait already: wait for their answers first");
            return Err(Error::new(Code::MemoryCapReached, text));
        }
        entry.waiting.push_back((Instant::now(), job));
        if entry.waiting.len() == 1 && entry.running < self.shared.each {
            queues.turn.push_back(client);
        }
        drop(queues);
        self.shared.ready.notify_one();
        Ok(())
    }

    /// A client has gone: what it asked for and nobody has begun is not answered.
    pub fn forget(&self, client: EngineId) {
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
