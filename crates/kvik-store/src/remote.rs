//! The way to a store that another process serves, and what happens while it does not answer.
//!
//! ```text
//!         meets, and it answers             no answer, or lost
//!  Down ------------------------> Up ---------------------------> Down: the thread `kvik-store-met` tries again
//! ```
//!
//! Invariants:
//! - A store that is lost, because its process or its connection ends, costs nobody more than the time to notice that.
//!   One that is there and does not answer costs whoever asks at that time his deadline. From then on everybody hears
//!   at once that it is down, until the thread has met it again and had an answer: no request is sent to find that out.
//! - One that is slow is not down: what was not answered in a part of its time makes it be asked something that takes none.
//! - A request is answered once: by the store, or by what went wrong; not by what the store says to an earlier start of
//!   this engine, whose requests had other numbers.

use crate::link::{ANSWERS, Answer};
use crate::no_thread;
use crate::opened::Opened;
use crate::sync::lock;
use crate::wire::{DEADLINE, REQUESTS, RESPONSES, Request, Response};
use kvik_core::{Code, EngineId, Error, Incarnation, Result};
use kvik_engine::{Engine, Inbox, Message, To, Who};
use kvik_host::thread::{ThreadOptions, spawn_named};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// How long a store is given to be met, and to answer, by the thread that tries again.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a question to a store that is doubted may take to be sent.
const MOMENT: Duration = Duration::from_millis(10);
/// The times between two tries: the first, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// One start of a store: another one may have the same engine id.
type Start = (EngineId, Incarnation);

enum Health {
    Up(Start),
    Down(Error),
    Closed,
}

/// A store that is reached at an address.
pub(crate) struct Remote {
    engine: Engine,
    address: String,
    answers: Arc<AnswersOf>,
    health: Mutex<Health>,
    /// The health has changed.
    changed: Condvar,
    /// What is said of namespaces when the store is met again: it may be another start of it.
    opened: Opened,
    /// It was met, or could not be: set under the lock of the health.
    tried: AtomicBool,
    doubt: Mutex<Option<Doubt>>,
}

/// A store is asked whether it answers, and is down where it has not by then.
struct Doubt {
    asked: Expected,
    until: Instant,
}

impl Remote {
    /// Meets the store at `address`.
    ///
    /// # Errors
    /// Why it cannot be met by the deadline, or does not answer.
    pub fn connect(engine: &Engine, address: &str, deadline: Duration) -> Result<Arc<Remote>> {
        let remote = Remote::new(engine, address, &Opened::default())?;
        remote.meet(deadline)?;
        remote.watched()
    }

    /// A store at `address` that is met by a thread, and told of these namespaces then.
    ///
    /// # Errors
    /// The machine gives no thread.
    pub fn begin(engine: &Engine, address: &str, opened: &Opened) -> Result<Arc<Remote>> {
        Remote::new(engine, address, opened)?.watched()
    }

    fn new(engine: &Engine, address: &str, opened: &Opened) -> Result<Arc<Remote>> {
        let remote = Arc::new(Remote {
            engine: engine.clone(),
            address: address.to_owned(),
            answers: AnswersOf::engine(engine)?,
            health: Mutex::new(Health::Down(Error::new(Code::StoreUnavailable, "it was not met yet"))),
            changed: Condvar::new(),
            opened: opened.clone(),
            tried: AtomicBool::new(false),
            doubt: Mutex::default(),
        });
        lock(&remote.answers.stores).retain(|store| store.strong_count() > 0);
        lock(&remote.answers.stores).push(Arc::downgrade(&remote));
        Ok(remote)
    }

    /// From now on a thread meets it whenever it is down.
    fn watched(self: Arc<Remote>) -> Result<Arc<Remote>> {
        let weak = Arc::downgrade(&self);
        let watching = move || watch(&weak);
        drop(spawn_named("kvik-store-met", &ThreadOptions::default(), watching).map_err(no_thread)?);
        Ok(self)
    }

    /// Sends a request.
    ///
    /// # Errors
    /// `StoreUnavailable` where it is down, or is found to be so now.
    pub fn ask(&self, request: &Request, deadline: Duration) -> Result<Expected> {
        let start = self.start()?;
        self.send(start, request, deadline).map_err(|error| self.failed(start, error))
    }

    /// The store's engine.
    ///
    /// # Errors
    /// `StoreUnavailable` where it is down.
    pub fn peer(&self) -> Result<EngineId> {
        self.start().map(|(peer, _)| peer)
    }

    fn start(&self) -> Result<Start> {
        self.settle();
        match &*lock(&self.health) {
            Health::Up(start) => Ok(*start),
            Health::Down(error) => Err(self.unavailable(error)),
            Health::Closed => Err(Error::new(Code::EngineClosed, "the store's client was closed")),
        }
    }

    /// Waits until it was met, or could not be, but not beyond `until`.
    pub fn wait_until_tried(&self, until: Instant) {
        let health = lock(&self.health);
        let left = until.saturating_duration_since(Instant::now());
        let untried = |_: &mut Health| !self.tried.load(Ordering::Relaxed);
        drop(self.changed.wait_timeout_while(health, left, untried));
    }

    /// What is said to it of namespaces.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    fn send(&self, start: Start, request: &Request, deadline: Duration) -> Result<Expected> {
        let expected = AnswersOf::expect(&self.answers, start);
        let message = request.encode(expected.number);
        // Without a connection it is down: to wait for one is the thread's part, and not of who asks.
        self.engine.notify_on(REQUESTS, To::Connected(start.0), &message, Some(deadline)).map(|_| expected)
    }

    fn unavailable(&self, error: &Error) -> Error {
        let text = format!(
            "the store at {} is not available ({error}); it is tried again by itself, and until then its blocks are misses",
            self.address
        );
        Error::new(Code::StoreUnavailable, text)
    }

    /// A request was not answered by this start. Where that tells of the store's health it is down from now on, unless another
    /// start is up by now, and the error is that for whoever asked.
    pub fn failed(&self, start: Start, error: Error) -> Error {
        let of_health = [
            Code::DeadlineExceeded,
            Code::PeerLost,
            Code::PeerRestarted,
            Code::PeerUnreachable,
            Code::NotificationsFull,
        ];
        if !of_health.contains(&error.code) {
            return error;
        }
        self.down(&error, start);
        self.unavailable(&error)
    }

    /// A request was not answered in a part of its time. Whoever looks at the store's health later finds out by another one
    /// whether it answers.
    pub fn doubt(&self) {
        let Ok(start) = self.start() else { return };
        let mut doubt = lock(&self.doubt);
        if doubt.is_none()
            && let Ok(asked) = self.send(start, &Request::Stat, MOMENT)
        {
            *doubt = Some(Doubt { asked, until: Instant::now() + DEADLINE });
        }
    }

    /// Finds out what has come of a doubt.
    fn settle(&self) {
        let mut doubt = lock(&self.doubt);
        let Some(Doubt { asked, until }) = &*doubt else { return };
        match asked.from.try_recv() {
            Err(TryRecvError::Empty) if Instant::now() < *until => return,
            Err(TryRecvError::Empty) => {
                let error = Error::new(Code::DeadlineExceeded, "the store does not answer in its time");
                self.down(&error, asked.start);
            }
            // It has answered, or everybody has heard that it is lost.
            _ => {}
        }
        *doubt = None;
    }

    /// A transport has failed with this error. That of a store that has gone may be noticed before the end of its
    /// session, and then tells of the store's health, too: so it is asked.
    pub fn unless_it_answers(&self, error: Error, left: Duration) -> Error {
        let time = left.clamp(Duration::from_millis(1), PATIENCE);
        let asked = match self.ask(&Request::Stat, time) {
            Ok(asked) => asked,
            Err(gone) => return gone,
        };
        match asked.from.recv_timeout(time) {
            Err(RecvTimeoutError::Disconnected) => {
                self.failed(asked.start, Error::new(Code::PeerLost, error.text))
            }
            _ => error,
        }
    }

    /// It is down from now on, where it was up by this start.
    fn down(&self, error: &Error, start: Start) {
        let mut health = lock(&self.health);
        if matches!(&*health, Health::Up(up) if *up == start) {
            log::warn!("the store at {} is not available: {error}", self.address);
            *health = Health::Down(error.clone());
            self.changed.notify_all();
        }
    }

    /// Meets the store, says what namespaces are, and waits for its answers: to each of these as long as any call does, since
    /// others may have to be forgotten for it.
    fn meet(&self, deadline: Duration) -> Result<()> {
        let until = Instant::now() + deadline;
        let who = self.engine.meet(self.address.as_str(), Some(deadline))?;
        let start = (who.engine, who.incarnation);
        self.answers.inbox.follow(&who)?;
        self.wait_until_it_serves(start, until)?;
        let mut said = Vec::new();
        // What is opened meanwhile is said, too, before anybody takes it for up.
        while let Some(request) = self.opened.next(&said, || self.up(start)) {
            let answers = self.send(start, &request, DEADLINE)?;
            said.push(request);
            match answers.from.recv_timeout(DEADLINE).map(Answer::take) {
                Ok(Response::Failed(code, text)) => {
                    log::warn!("the store at {} refuses a namespace: {code}: {text}", self.address);
                }
                Ok(_) => {}
                Err(_) => return Err(self.no_answer()),
            }
        }
        Ok(())
    }

    /// Its engine listens before it serves, and drops what comes until then: so it is asked again until it answers. What
    /// never does may be no store.
    fn wait_until_it_serves(&self, start: Start, until: Instant) -> Result<()> {
        let mut pause = BACKOFF.0;
        loop {
            let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let asked = self.send(start, &Request::Stat, left)?;
            match asked.from.recv_timeout(pause.min(left)) {
                Ok(_) => return Ok(()),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {
                    pause = (pause * 2).min(BACKOFF.1)
                }
                Err(_) => return Err(self.no_answer()),
            }
        }
    }

    fn no_answer(&self) -> Error {
        let text = format!(
            "what listens at {} does not answer as a store: is it `kvik store serve`, and is it well?",
            self.address
        );
        Error::new(Code::StoreUnavailable, text)
    }

    fn up(&self, start: Start) {
        let mut health = lock(&self.health);
        if !matches!(&*health, Health::Closed) {
            *health = Health::Up(start);
        }
        self.tried.store(true, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// It could not be met. Of one that never was, this is why it is down.
    fn not_met(&self, error: Error) {
        let mut health = lock(&self.health);
        if !self.tried.swap(true, Ordering::Relaxed) && matches!(&*health, Health::Down(_)) {
            *health = Health::Down(error);
        }
        self.changed.notify_all();
    }

    /// Waits until the store is down; false when nobody needs it any more.
    fn wait_until_down(&self) -> bool {
        let health = lock(&self.health);
        let waited = self.changed.wait_while(health, |health| matches!(health, Health::Up(_)));
        let health = waited.unwrap_or_else(PoisonError::into_inner);
        !matches!(&*health, Health::Closed) && !self.engine.is_closed()
    }

    /// Where it is.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Whether the store answers.
    pub fn is_up(&self) -> bool {
        self.settle();
        matches!(&*lock(&self.health), Health::Up(_))
    }

    fn pause(&self, time: Duration) {
        let health = lock(&self.health);
        let open = |health: &mut Health| !matches!(health, Health::Closed);
        drop(self.changed.wait_timeout_while(health, time, open));
    }

    /// Ends it.
    pub fn close(&self) {
        *lock(&self.health) = Health::Closed;
        self.changed.notify_all();
    }
}

/// Meets a store again that is down, for as long as somebody uses it.
fn watch(remote: &Weak<Remote>) {
    let mut backoff = BACKOFF.0;
    while let Some(remote) = remote.upgrade() {
        if !remote.wait_until_down() {
            return;
        }
        if remote.is_up() {
            continue;
        }
        match remote.meet(PATIENCE) {
            Ok(()) => {
                log::info!("the store at {} answers again", remote.address);
                backoff = BACKOFF.0;
            }
            Err(error) => {
                log::debug!("the store at {} is still down: {error}", remote.address);
                remote.not_met(error);
                remote.pause(backoff);
                backoff = (backoff * 2).min(BACKOFF.1);
            }
        }
    }
}

/// Takes the answers of all stores that an engine asks, and hands each to who waits for it.
struct AnswersOf {
    takes: Arc<Takes>,
    number: AtomicU64,
    inbox: Arc<Inbox>,
    /// Those that are to hear when a peer is lost.
    stores: Mutex<Vec<Weak<Remote>>>,
}

/// The answers to a request, as they come. Dropped, nobody waits for them any more.
pub(crate) struct Expected {
    pub from: Receiver<Answer>,
    /// Whose they are.
    pub start: Start,
    number: u64,
    answers: Arc<AnswersOf>,
}

impl Drop for Expected {
    fn drop(&mut self) {
        lock(&self.answers.takes.waiting).remove(&self.number);
    }
}

/// Where answers go as they come.
struct Takes {
    engine: Engine,
    waiting: Mutex<HashMap<u64, Waiting>>,
}

/// Who waits for the answers to a request.
struct Waiting {
    /// Whose they are.
    start: Start,
    to: Sender<Answer>,
    /// How many may still come: that bounds what is held of a client that does not read.
    left: usize,
}

/// One for each engine of this process that asks a store. An engine that has closed may leave its id to another one, as its
/// address may be the next one's: so it goes by the start, too.
static ALL: Mutex<Vec<Weak<AnswersOf>>> = Mutex::new(Vec::new());

impl AnswersOf {
    fn engine(engine: &Engine) -> Result<Arc<AnswersOf>> {
        let mut all = lock(&ALL);
        all.retain(|answers| answers.strong_count() > 0);
        let start = |of: &Engine| (of.id(), of.incarnation());
        let same = |answers: &Arc<AnswersOf>| start(&answers.takes.engine) == start(engine);
        if let Some(answers) = all.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(answers);
        }
        let takes = Arc::new(Takes { engine: engine.clone(), waiting: Mutex::default() });
        let take = {
            let takes = takes.clone();
            move |who: &Who, message: &[u8]| takes.receive(who, message)
        };
        // What an earlier start of this engine has asked may be answered only now: a store answers by the id, which both
        // have. So no two of them begin with the same number.
        let mut first = [0; 8];
        getrandom::fill(&mut first).map_err(|error| {
            Error::new(Code::StoreUnavailable, format!("the system gives no random numbers: {error}"))
        })?;
        let number = AtomicU64::new(u64::from_le_bytes(first));
        let inbox = Arc::new(Inbox::handing(engine, RESPONSES, take)?);
        let answers = Arc::new(AnswersOf { takes, number, inbox: inbox.clone(), stores: Mutex::default() });
        let weak = Arc::downgrade(&answers);
        drop(
            spawn_named("kvik-store-rx", &ThreadOptions::default(), move || hear(&inbox, &weak))
                .map_err(no_thread)?,
        );
        all.push(Arc::downgrade(&answers));
        Ok(answers)
    }

    fn expect(answers: &Arc<AnswersOf>, start: Start) -> Expected {
        let (to, from) = channel();
        let number = answers.number.fetch_add(1, Ordering::Relaxed);
        lock(&answers.takes.waiting).insert(number, Waiting { start, to, left: ANSWERS });
        Expected { from, start, number, answers: answers.clone() }
    }

    /// Nobody answers any more: the store is down, and who waits hears it at once.
    fn lost(&self, start: Start, error: &Error) {
        let stores: Vec<Arc<Remote>> = lock(&self.stores).iter().filter_map(Weak::upgrade).collect();
        // An engine that closes loses all of its peers, which is no news of them.
        let open = stores.iter().filter(|store| !store.engine.is_closed());
        open.for_each(|store| store.down(error, start));
        lock(&self.takes.waiting).retain(|_, waiting| waiting.start != start);
    }
}

impl Takes {
    /// An answer has come. On the engine's control thread, so nothing is waited for here.
    fn receive(&self, who: &Who, message: &[u8]) {
        match Response::decode(message) {
            Ok((number, response)) => self.take(who, number, response),
            Err(error) => log::warn!("{who} sent something that is no answer: {error}"),
        }
    }

    fn take(&self, who: &Who, number: u64, response: Response) {
        let last = response.is_last();
        let start = (who.engine, who.incarnation);
        let answer = Answer::new(response, &self.engine, start);
        let mut waiting = lock(&self.waiting);
        // Where nobody waits any more, what it lends is given back with it, when the lock is free.
        let Some(one) = waiting.get_mut(&number).filter(|one| one.start == start) else { return };
        one.left -= 1;
        let over = last || one.left == 0;
        let unread = one.to.send(answer);
        if over || unread.is_err() {
            waiting.remove(&number);
        }
        drop(waiting);
        drop(unread);
    }
}

impl Drop for AnswersOf {
    /// Another client of the engine may open the inbox at once.
    fn drop(&mut self) {
        self.inbox.close();
    }
}

/// Hears of stores that are lost.
fn hear(inbox: &Inbox, answers: &Weak<AnswersOf>) {
    while let Ok(message) = inbox.next(crate::NOTHING_ELSE) {
        let Some(answers) = answers.upgrade() else { return };
        if let Some(Message::PeerLost(who, error)) = message {
            answers.lost((who.engine, who.incarnation), &error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Lending;
    use crate::{Server, StoreOptions};
    use kvik_engine::Config;

    /// Where no other test listens, so that a port stays free.
    fn own() -> Vec<std::net::SocketAddr> {
        vec![([127, 0, 0, 2], 0).into()]
    }

    #[test]
    fn an_engine_at_the_address_of_one_that_has_closed_has_answers_of_its_own() {
        let first = Engine::start(Config { listen: own(), ..Config::default() }).unwrap();
        let kept = AnswersOf::engine(&first).unwrap();
        assert!(Arc::ptr_eq(&kept, &AnswersOf::engine(&first).unwrap()));
        let listen = first.listening().to_vec();
        first.close(Duration::from_secs(60)).unwrap();
        let second = Engine::start(Config { listen, ..Config::default() }).unwrap();
        assert_eq!(first.id(), second.id());
        let other = AnswersOf::engine(&second).unwrap();
        assert!(!Arc::ptr_eq(&kept, &other));
        // A store that answers the first one by its id reaches the second one.
        let start = (EngineId([7; 16]), first.incarnation());
        let who = Who { engine: start.0, incarnation: start.1, name: String::new() };
        let (late, asked) = (AnswersOf::expect(&kept, start), AnswersOf::expect(&other, start));
        other.takes.take(&who, late.number, Response::Lent(Lending::default()));
        assert!(asked.from.try_recv().is_err(), "blocks of the first one's are taken for its own");
        other.takes.take(&who, asked.number, Response::Done(3));
        assert!(matches!(asked.from.try_recv().map(Answer::take), Ok(Response::Done(3))));
    }

    #[test]
    fn a_store_that_listens_before_it_serves_is_met_once_it_does() {
        const LIMIT: Duration = Duration::from_secs(60);
        let there = Engine::start(Config::default()).unwrap();
        let here = Engine::start(Config::default()).unwrap();
        let address = there.addresses()[0].to_string();
        std::thread::scope(|threads| {
            let met = threads.spawn(|| Remote::connect(&here, &address, LIMIT).map(|_| Instant::now()));
            let until = Instant::now() + LIMIT;
            // The first question has come, and was dropped.
            while !there.metrics().contains("kvik_notifications_dropped_total 1") {
                assert!(Instant::now() < until, "nothing was asked");
                std::thread::sleep(Duration::from_millis(1));
            }
            let _server = Server::start(&there, &StoreOptions::default()).unwrap();
            let met = met.join().unwrap();
            assert!(met.expect("it serves") < until, "the question that was dropped was waited for");
        });
    }

    #[test]
    fn what_one_start_did_not_answer_says_nothing_of_the_next_one() {
        const LIMIT: Duration = Duration::from_secs(60);
        let here = Engine::start(Config::default()).unwrap();
        let start = |listen| {
            let engine = Engine::start(Config { listen, ..Config::default() }).unwrap();
            (Server::start(&engine, &StoreOptions::default()).unwrap(), engine)
        };
        let (server, first) = start(own());
        let (listen, address) = (first.listening().to_vec(), first.addresses()[0].to_string());
        // No thread meets it, so it stays as it is found.
        let remote = Remote::new(&here, &address, &Opened::default()).unwrap();
        remote.meet(LIMIT).unwrap();
        let asked = remote.ask(&Request::Stat, LIMIT).unwrap();
        drop(server);
        first.close(LIMIT).unwrap();
        let _next = start(listen);
        let until = Instant::now() + LIMIT;
        while let Err(error) = remote.meet(PATIENCE) {
            assert!(Instant::now() < until, "{error}");
        }
        assert_eq!(remote.peer().unwrap(), asked.start.0, "they have one id");
        // Whoever has asked the first one looks for its answer only now.
        let told = remote.failed(asked.start, Error::new(Code::PeerLost, "it was lost"));
        assert!(told.code == Code::StoreUnavailable && remote.is_up());
    }

    #[test]
    fn who_gives_up_leaves_nothing_behind() {
        let engine = Engine::start(Config::default()).unwrap();
        let (answers, peer) = (AnswersOf::engine(&engine).unwrap(), EngineId([7; 16]));
        let who = Who { engine: peer, incarnation: engine.incarnation(), name: String::new() };
        let start = (peer, engine.incarnation());
        let (first, other) = (AnswersOf::expect(&answers, start), AnswersOf::expect(&answers, start));
        answers.takes.take(&who, first.number, Response::Lent(Lending { more: true, ..Lending::default() }));
        assert!(matches!(first.from.try_recv().map(Answer::take), Ok(Response::Lent(_))));
        drop(first);
        assert_eq!(lock(&answers.takes.waiting).len(), 1);
        (0..9).for_each(|_| drop(Remote::new(&engine, "127.0.0.1:1", &Opened::default()).unwrap()));
        assert_eq!(lock(&answers.stores).len(), 1, "stores that nobody uses any more are remembered");
        answers.takes.take(&who, other.number, Response::Done(3));
        assert!(matches!(other.from.try_recv().map(Answer::take), Ok(Response::Done(3))));
        assert_eq!(lock(&answers.takes.waiting).len(), 0);
    }
}
