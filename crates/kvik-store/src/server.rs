//! A store that other processes use, over the connections of its engine.

use crate::StoreOptions;
use crate::host::{Host, Reply};
use crate::no_thread;
use crate::service::Service;
use crate::store::Store;
use crate::wire::{REQUESTS, RESPONSES, Request, Response};
use kvik_core::{EngineId, Result};
use kvik_engine::{Engine, Inbox, Message, Notifying, Who};
use kvik_host::thread::{ThreadOptions, spawn_named};
use std::sync::Arc;
use std::time::Duration;

/// How long an answer may wait until its client takes it. A client that does not is as good as gone.
const PATIENCE: Duration = Duration::from_secs(2);

/// Serves until it is dropped, or its engine closed.
pub struct Server {
    host: Arc<Host>,
    inbox: Arc<Inbox>,
}

impl Server {
    /// Serves a store to whom the engine admits.
    ///
    /// # Errors
    /// `InvalidArgument` for options that cannot be used, or where the engine serves a store already; the machine gives
    /// no threads.
    pub fn start(engine: &Engine, options: &StoreOptions) -> Result<Server> {
        let host = Arc::new(Host::start(Service::new(Store::open(engine.clone(), options)?))?);
        let weak = Arc::downgrade(&host);
        // The thread below has the host for as long as this is called, so this never ends it.
        let take = move |who: &Who, message: &[u8]| {
            weak.upgrade().into_iter().for_each(|host| receive(&host, who, message));
        };
        let inbox = Arc::new(Inbox::handing(engine, REQUESTS, take)?);
        let (receiver, from) = (host.clone(), inbox.clone());
        let serve = move || hear(&from, receiver);
        drop(spawn_named("kvik-store-in", &ThreadOptions::default(), serve).map_err(no_thread)?);
        Ok(Server { host, inbox })
    }

    /// Serves nobody any more. Its blocks are gone when what was begun has ended. What was put is sent to the object store
    /// before this returns, for a time.
    pub fn stop(&self) {
        self.inbox.close();
        self.store().far().iter().for_each(|far| far.end());
    }

    /// What has happened.
    pub fn counts(&self) -> crate::Counts {
        self.store().counts()
    }

    /// All figures, in the Prometheus text format: see [`crate::METRICS`].
    pub fn metrics(&self) -> String {
        self.store().metrics()
    }

    pub(crate) fn store(&self) -> &Store {
        self.host.service().store()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Hears of clients that have gone, until the server ends.
fn hear(inbox: &Inbox, host: Arc<Host>) {
    while let Ok(message) = inbox.next(crate::NOTHING_ELSE) {
        match message {
            Some(Message::PeerLost(who, _)) => host.forget((who.engine, who.incarnation)),
            None if inbox.is_closed() => break,
            _ => {}
        }
    }
    // Before the host is let go of: then no request is being received.
    inbox.close();
    drop(host);
}

/// A request has come. On the engine's control thread, so nothing is waited for here.
fn receive(host: &Host, who: &Who, message: &[u8]) {
    let (client, engine) = (who.engine, host.service().store().engine());
    let (number, outcome) = match Request::decode(message) {
        Ok((number, request)) => {
            let reply = Box::new(Answer { engine: engine.clone(), client, number });
            (Some(number), host.submit((client, who.incarnation), request, reply))
        }
        Err((number, error)) => {
            log::warn!("{who} sent something that is no request: {error}");
            (number, Err(error))
        }
    };
    if let Err(error) = outcome {
        let failed = host.service().failed(error);
        // A client that has no room even for that does not read its answers, and misses nothing.
        let answer = number.map(|number| Answer { engine: engine.clone(), client, number });
        drop(answer.map(|answer| answer.try_send(failed)));
    }
}

/// The way back to a client of another process.
struct Answer {
    engine: Engine,
    client: EngineId,
    number: u64,
}

impl Reply for Answer {
    fn send(&self, response: Response) {
        let message = response.encode(self.number);
        if let Err(error) = self.engine.notify_on(RESPONSES, self.client, &message, Some(PATIENCE)) {
            log::debug!("an answer did not reach engine {}: {error}", self.client);
        }
    }

    fn try_send(&self, response: Response) -> Result<(), Box<Response>> {
        let message = response.encode(self.number);
        let sent = Notifying::begin(&self.engine, RESPONSES, self.client, &message, Some(PATIENCE));
        match sent.and_then(|sending| sending.wait(Duration::ZERO)) {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err(Box::new(response)),
            Err(error) => {
                log::debug!("an answer did not reach engine {}: {error}", self.client);
                Ok(())
            }
        }
    }
}
