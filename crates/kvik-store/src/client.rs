//! The client's side: what a serving engine calls.

use crate::choice::{Choice, Choices, Gauge, Reason};
use crate::early::{Early, Like};
use crate::get::Getting;
use crate::host::Host;
use crate::link::{Answers, Link};
use crate::put::Putting;
use crate::remote::Remote;
use crate::service::Service;
use crate::store::Store;
use crate::wire::{Ack, Get, Put, Request, Response};
use crate::{BlockKey, Counts, MAX_KEYS, Namespace, NamespaceId, Shape, StoreOptions};
use kvik_core::{Code, Error, Result, Right, Use};
use kvik_engine::{Engine, Estimate, GrantOptions, PageSet};
use std::sync::Arc;
use std::time::Duration;

/// What a client waits for an answer, unless it says something else.
pub(crate) const DEADLINE: Duration = Duration::from_secs(5);

/// A store, from the side of those who use it. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    inner: Arc<Inner>,
}

struct Inner {
    engine: Engine,
    link: Link,
    choices: Arc<Choices>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Link::Remote(remote) = &self.link {
            remote.close();
        }
    }
}

impl Client {
    /// A store within this process: it lives as long as its last client, and its blocks with it.
    ///
    /// # Errors
    /// `InvalidArgument` for options that cannot be used; the machine gives no threads.
    pub fn embedded(engine: &Engine, options: &StoreOptions) -> Result<Client> {
        let host = Host::start(Service::new(Store::open(engine.clone(), options)?))?;
        Ok(Client::of(engine, host))
    }

    /// The store that a process serves at `address`, such as `"store.example:7500"`. Should it be lost, it is met again
    /// by itself.
    ///
    /// # Errors
    /// What meeting says: `PeerUnreachable`, `SecretMismatch` and others; `StoreUnavailable` where what listens there
    /// is no store, or does not answer by the deadline.
    pub fn connect(engine: &Engine, address: &str, deadline: Option<Duration>) -> Result<Client> {
        let link = Link::Remote(Remote::connect(engine, address, deadline.unwrap_or(DEADLINE))?);
        Ok(Client::over(engine, link))
    }

    pub(crate) fn of(engine: &Engine, host: Host) -> Client {
        let link = Link::Embedded(Arc::new(host), engine.clone());
        Client::over(engine, link)
    }

    fn over(engine: &Engine, link: Link) -> Client {
        let (engine, choices) = (engine.clone(), Arc::default());
        Client { inner: Arc::new(Inner { engine, link, choices }) }
    }

    /// Blocks of one namespace. `tenant` names whose they are; `shape` is that of each.
    ///
    /// # Errors
    /// `InvalidArgument` for a namespace that is none; what the store says.
    pub fn open(&self, tenant: &str, namespace: &Namespace, shape: Shape) -> Result<Space> {
        let (tenant, model, id) = (tenant.to_owned(), namespace.words(), namespace.id()?);
        let request = Request::Open { namespace: id, shape, tenant, model };
        match self.ask(request.clone(), None)?.next(None)? {
            Response::Opened => {
                if let Link::Remote(remote) = &self.inner.link {
                    remote.remember(request);
                }
                Ok(Space { client: self.clone(), namespace: id, shape, like: Like::default() })
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Takes out all blocks of a tenant; how many went.
    ///
    /// # Errors
    /// What the store says.
    pub fn clear_tenant(&self, tenant: &str) -> Result<u64> {
        self.count(Request::ClearTenant { tenant: tenant.to_owned() })
    }

    /// What has happened in the store.
    ///
    /// # Errors
    /// What the store says.
    pub fn stat(&self) -> Result<Counts> {
        match self.ask(Request::Stat, None)?.next(None)? {
            Response::Counts(counts) => Ok(*counts),
            other => Err(unexpected(&other)),
        }
    }

    /// How often [`Space::choose`] has given each reason, by its name.
    pub fn choices(&self) -> [(&'static str, u64); Reason::ALL.len()] {
        self.inner.choices.counts()
    }

    /// All figures of the store, in the Prometheus text format: see [`crate::METRICS`].
    ///
    /// # Errors
    /// What the store says.
    pub fn metrics(&self) -> Result<String> {
        let answers = self.ask(Request::Metrics, None)?;
        let mut text = String::new();
        loop {
            match answers.next(None)? {
                Response::Metrics(part) => {
                    text.push_str(&part.text);
                    if !part.more {
                        return Ok(text);
                    }
                }
                other => return Err(unexpected(&other)),
            }
        }
    }

    fn ask(&self, request: Request, deadline: Option<Duration>) -> Result<Answers> {
        self.inner.link.ask(request, deadline.unwrap_or(DEADLINE))
    }

    fn count(&self, request: Request) -> Result<u64> {
        match self.ask(request, None)?.next(None)? {
            Response::Done(count) => Ok(count),
            other => Err(unexpected(&other)),
        }
    }
}

pub(crate) fn unexpected(response: &Response) -> Error {
    let text = format!("the store answered something else than it was asked: {response:?}");
    Error::new(Code::ProtocolError, text.chars().take(200).collect::<String>())
}

/// Blocks of one namespace in a store. Cheap to clone.
#[derive(Clone)]
pub struct Space {
    client: Client,
    namespace: NamespaceId,
    shape: Shape,
    like: Like,
}

impl Space {
    /// The namespace.
    pub fn namespace(&self) -> NamespaceId {
        self.namespace
    }

    /// The shape of its blocks.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Puts blocks that follow one another behind `parent` (none: from the start of a prompt): page n is the block of
    /// key n. The pages must stay as they are until the put has ended.
    ///
    /// # Errors
    /// `InvalidArgument` for no keys, too many, or another number of pages; `ShapeMismatch` for pages of another shape.
    pub fn put(
        &self,
        parent: Option<BlockKey>,
        keys: &[BlockKey],
        pages: &PageSet,
        ack: Ack,
        deadline: Option<Duration>,
    ) -> Result<Putting> {
        self.check(keys, pages)?;
        let deadline = deadline.unwrap_or(DEADLINE);
        let options = GrantOptions {
            right: Right::Read,
            uses: Use::Once(1),
            expiry: deadline,
            max_expiry: deadline,
            ..GrantOptions::default()
        };
        let grant = self.client.inner.engine.grant(pages, options)?;
        let ticket = grant.ticket().clone();
        let put = Put { namespace: self.namespace, parent, keys: keys.to_vec(), ticket, ack, deadline };
        let answers = self.client.ask(Request::Put(put), Some(deadline))?;
        Ok(Putting::new(answers, grant, ack))
    }

    /// Reads the longest run of blocks that the store has, from the first key on, into pages: page n gets the block of
    /// key n.
    ///
    /// # Errors
    /// As for [`Space::put`].
    pub fn get(&self, keys: &[BlockKey], pages: &PageSet, deadline: Option<Duration>) -> Result<Getting> {
        self.check(keys, pages)?;
        let expiry = deadline.unwrap_or(DEADLINE);
        let Inner { engine, link, .. } = &*self.client.inner;
        let gauge = self.gauge(keys.len() as u64)?;
        let expected = match link {
            Link::Remote(remote) => self.like.next(remote.peer()?, expiry),
            // The store is this engine, which lends before this goes on.
            Link::Embedded(..) => None,
        };
        let ahead = expected.as_ref().map(|(ahead, _)| *ahead);
        let request = Request::Get(Get { namespace: self.namespace, keys: keys.to_vec(), expiry, ahead });
        let answers = self.client.ask(request, deadline)?;
        // Behind the request: the store looks for the block meanwhile. Why it cannot begin, the read that comes in its
        // place says.
        let early = expected.and_then(|(_, ticket)| Early::begin(engine, ticket, pages, expiry).ok());
        let (pages, like) = (pages.clone(), self.like.clone());
        Ok(Getting::new(engine.clone(), (answers, early, like), pages, self.shape.bytes(), gauge))
    }

    /// Whether so many blocks are better fetched than computed, which takes `recompute` by what the caller says. By
    /// what the engine has measured of its own transfers with the store ([`Engine::estimate`]), and what gets took
    /// beside that: nothing is sent, and nobody is asked whether the blocks are there.
    ///
    /// # Errors
    /// `EngineClosed`, `EngineForked`.
    pub fn choose(&self, blocks: u64, recompute: Duration) -> Result<Choice> {
        let Inner { link, choices, .. } = &*self.client.inner;
        let bytes = blocks.saturating_mul(self.shape.bytes());
        if let Link::Remote(remote) = link
            && !remote.is_up()
        {
            return Ok(choices.unavailable(bytes, recompute));
        }
        Ok(choices.choose(bytes, self.estimate(blocks)?, recompute))
    }

    fn gauge(&self, blocks: u64) -> Result<Option<Gauge>> {
        let Inner { engine, link, choices } = &*self.client.inner;
        let Link::Remote(remote) = link else { return Ok(None) };
        let Ok(peer) = remote.peer() else { return Ok(None) };
        let (choices, engine) = (choices.clone(), engine.clone());
        let estimate = self.estimate(blocks)?;
        Ok(Some(Gauge { choices, engine, peer, estimate, waited: Duration::ZERO }))
    }

    /// What the engine says of so many blocks of the store; none where nothing was measured, as of copies within the
    /// process.
    fn estimate(&self, blocks: u64) -> Result<Option<Estimate>> {
        let Inner { engine, link, .. } = &*self.client.inner;
        match link {
            Link::Embedded(..) => Ok(None),
            Link::Remote(remote) => match remote.peer() {
                Ok(peer) => engine.estimate(peer, blocks.saturating_mul(self.shape.bytes())),
                // Whoever asks it hears that it is down.
                Err(_) => Ok(None),
            },
        }
    }

    /// Of each key whether the store has its block.
    ///
    /// # Errors
    /// What the store says.
    pub fn contains(&self, keys: &[BlockKey]) -> Result<Vec<bool>> {
        let request = Request::Contains { namespace: self.namespace, keys: keys.to_vec() };
        match self.client.ask(request, None)?.next(None)? {
            Response::Here(here) if here.len() == keys.len() => Ok(here),
            other => Err(unexpected(&other)),
        }
    }

    /// Has blocks brought into the store's memory; how many are there, from the first key on.
    ///
    /// # Errors
    /// What the store says.
    pub fn prefetch(&self, keys: &[BlockKey]) -> Result<u64> {
        self.client.count(Request::Prefetch { namespace: self.namespace, keys: keys.to_vec() })
    }

    /// Takes blocks out, and all that come after them; how many went.
    ///
    /// # Errors
    /// What the store says.
    pub fn remove(&self, keys: &[BlockKey]) -> Result<u64> {
        self.client.count(Request::Remove { namespace: self.namespace, keys: keys.to_vec() })
    }

    /// Keeps blocks for so long, or lets go of them with no time; how many are kept, from the first key on.
    ///
    /// # Errors
    /// What the store says.
    pub fn pin(&self, keys: &[BlockKey], time: Duration) -> Result<u64> {
        self.client.count(Request::Pin { namespace: self.namespace, keys: keys.to_vec(), time })
    }

    /// Takes out all blocks of the namespace; how many went.
    ///
    /// # Errors
    /// What the store says.
    pub fn clear(&self) -> Result<u64> {
        self.client.count(Request::ClearNamespace { namespace: self.namespace })
    }

    fn check(&self, keys: &[BlockKey], pages: &PageSet) -> Result<()> {
        if keys.is_empty() || keys.len() > MAX_KEYS || keys.len() != pages.len() {
            let text = format!(
                "{} keys and {} pages: a call names 1 to {MAX_KEYS} keys, and a page for each",
                keys.len(),
                pages.len()
            );
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let (layers, slices, run_bytes) = pages.shape();
        if Shape::new(layers, slices, run_bytes)? != self.shape {
            let text = format!(
                "pages of {layers} layers x {slices} slices x {run_bytes} bytes are no blocks of {}",
                self.shape
            );
            return Err(Error::new(Code::ShapeMismatch, text));
        }
        Ok(())
    }
}
