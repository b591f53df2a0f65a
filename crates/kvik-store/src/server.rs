//! A store that other processes use, over the connections of its engine.

use crate::StoreOptions;
use crate::host::{Host, Job};
use crate::no_thread;
use crate::service::Service;
use crate::store::Store;
use crate::wire::{REQUESTS, RESPONSES, Request, Response};
use kvik_core::{EngineId, Result};
use kvik_engine::{Engine, Inbox, Message};
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
        let inbox = Arc::new(engine.inbox(REQUESTS)?);
        let (receiver, from, engine) = (host.clone(), inbox.clone(), engine.clone());
        let serve = move || receive(&from, &engine, &receiver);
        drop(spawn_named("kvik-store-in", &ThreadOptions::default(), serve).map_err(no_thread)?);
        Ok(Server { host, inbox })
    }

    /// Serves nobody any more. Its blocks are gone when what was begun has ended.
    pub fn stop(&self) {
        self.inbox.close();
    }

    /// What has happened.
    pub fn counts(&self) -> crate::Counts {
        self.host.service().store().counts()
    }

    /// All figures, in the Prometheus text format: see [`crate::METRICS`].
    pub fn metrics(&self) -> String {
        self.host.service().store().metrics()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn receive(inbox: &Inbox, engine: &Engine, host: &Host) {
    while let Ok(message) = inbox.next(crate::NOTHING_ELSE) {
        let (who, message) = match message {
            Some(Message::Notification(who, message)) => (who, message),
            Some(Message::PeerLost(who, _)) => {
                host.forget(who.engine);
                continue;
            }
            None if inbox.is_closed() => return,
            None => continue,
        };
        let client = who.engine;
        let (number, request) = match Request::decode(&message) {
            Ok(whole) => whole,
            Err((number, error)) => {
                log::warn!("{who} sent something that is no request: {error}");
                let failed = host.service().failed(error);
                if let Some(number) = number {
                    reply(&failed, number, client, engine);
                }
                continue;
            }
        };
        let back = engine.clone();
        let answer = Box::new(move |response| reply(&response, number, client, &back));
        if let Err(error) = host.submit(client, Job { request, reply: answer }) {
            reply(&host.service().failed(error), number, client, engine);
        }
    }
}

fn reply(response: &Response, number: u64, client: EngineId, engine: &Engine) {
    if let Err(error) = engine.notify_on(RESPONSES, client, &response.encode(number), Some(PATIENCE)) {
        log::debug!("an answer did not reach engine {client}: {error}");
    }
}
