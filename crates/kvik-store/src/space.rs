//! Blocks of one namespace: what a serving engine puts, gets and asks for.

use crate::chain::Chain;
use crate::choice::{Choice, Gauge};
use crate::client::{Client, Inner, Stores};
use crate::cluster::{Cluster, Gathering, Likes, Scattering, Spread};
use crate::early::Like;
use crate::get::{Reading, Wanted};
use crate::link::{Link, unexpected};
use crate::moving::{Getting, Putting};
use crate::opened::Needed;
use crate::placement::SEGMENT;
use crate::put::{Given, Writing};
use crate::wire::{Ack, DEADLINE, Request, Response};
use crate::{BlockKey, MAX_KEYS, NamespaceId, Shape};
use kvik_core::{Code, Error, Result};
use kvik_engine::{Estimate, PageSet};
use std::sync::Arc;
use std::time::Duration;

/// Blocks of one namespace in a store. Cheap to clone.
///
/// Each call names blocks by a [`Chain`]: keys alone begin a prompt, and blocks amid a prompt are named with all keys
/// before them.
#[derive(Clone)]
pub struct Space {
    client: Client,
    namespace: NamespaceId,
    shape: Shape,
    /// What is lent first by the one store, or by each of several.
    like: Like,
    likes: Likes,
    /// Stores are told of the namespace for as long as it may be asked for.
    _needed: Arc<Needed>,
}

impl Space {
    pub(crate) fn new(client: &Client, namespace: NamespaceId, shape: Shape, needed: Needed) -> Space {
        let (client, like, likes) = (client.clone(), Like::default(), Likes::default());
        Space { client, namespace, shape, like, likes, _needed: Arc::new(needed) }
    }

    /// The namespace.
    pub fn namespace(&self) -> NamespaceId {
        self.namespace
    }

    /// The shape of its blocks.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Puts blocks that follow one another, behind those before them: page n is the block of key n. The pages must stay as
    /// they are until the put has ended.
    ///
    /// # Errors
    /// `InvalidArgument` for no keys, too many, or another number of pages; `ShapeMismatch` for pages of another shape.
    pub fn put<'a>(
        &self,
        blocks: impl Into<Chain<'a>>,
        pages: &PageSet,
        ack: Ack,
        deadline: Option<Duration>,
    ) -> Result<Putting> {
        let (chain, deadline) = (blocks.into(), deadline.unwrap_or(DEADLINE));
        self.check(chain.keys(), pages)?;
        let Inner { engine, stores, .. } = &*self.client.inner;
        match stores {
            Stores::Many(cluster) => {
                Scattering::begin(&self.spread(cluster), chain, pages, ack, deadline).map(Putting::many)
            }
            Stores::One(link) => {
                let (namespace, parent, keys) = (self.namespace, chain.parent(), chain.keys());
                let given = Given { namespace, parent, keys, pages, ack };
                Writing::begin_at((engine, link), given, deadline).map(Putting::one)
            }
        }
    }

    /// Reads the longest run of blocks that the store has, from the first key on, into pages: page n gets the block of
    /// key n.
    ///
    /// # Errors
    /// As for [`Space::put`].
    pub fn get<'a>(
        &self,
        blocks: impl Into<Chain<'a>>,
        pages: &PageSet,
        deadline: Option<Duration>,
    ) -> Result<Getting> {
        let (chain, deadline) = (blocks.into(), deadline.unwrap_or(DEADLINE));
        self.check(chain.keys(), pages)?;
        let Inner { engine, stores, .. } = &*self.client.inner;
        match stores {
            Stores::Many(cluster) => {
                Gathering::begin(self.spread(cluster), chain, pages, deadline).map(Getting::many)
            }
            Stores::One(link) => {
                let (namespace, shape, keys) = (self.namespace, self.shape, chain.keys());
                let gauge = self.gauge(link, keys.len() as u64)?;
                let wanted = Wanted { namespace, shape, keys, pages };
                Reading::begin_at((engine, link, &self.like), &wanted, deadline, gauge).map(Getting::one)
            }
        }
    }

    /// Whether so many blocks are better fetched than computed, which takes `recompute` by what the caller says. By
    /// what the engine has measured of its own transfers with the store ([`kvik_engine::Engine::estimate`]), and what gets
    /// took beside that: nothing is sent, and nobody is asked whether the blocks are there. Of several servers it is
    /// the slowest that counts, with an equal share of the segments, and what gets took beside that is not known.
    ///
    /// # Errors
    /// `EngineClosed`, `EngineForked`.
    pub fn choose(&self, blocks: u64, recompute: Duration) -> Result<Choice> {
        let Inner { stores, choices, .. } = &*self.client.inner;
        let bytes = blocks.saturating_mul(self.shape.bytes());
        let estimate = match stores {
            Stores::One(Link::Remote(remote)) if !remote.is_up() => {
                return Ok(choices.unavailable(bytes, recompute));
            }
            Stores::One(link) => self.estimate(link, blocks)?,
            Stores::Many(cluster) => match cluster.estimate(bytes, blocks.div_ceil(SEGMENT as u64))? {
                Some(estimate) => estimate,
                None => return Ok(choices.unavailable(bytes, recompute)),
            },
        };
        Ok(choices.choose(bytes, estimate, recompute))
    }

    fn gauge(&self, link: &Link, blocks: u64) -> Result<Option<Gauge>> {
        let Inner { engine, choices, .. } = &*self.client.inner;
        let Link::Remote(remote) = link else { return Ok(None) };
        let Ok(peer) = remote.peer() else { return Ok(None) };
        let (choices, engine) = (choices.clone(), engine.clone());
        let estimate = self.estimate(link, blocks)?;
        Ok(Some(Gauge { choices, engine, peer, estimate, waited: Duration::ZERO }))
    }

    /// What the engine says of so many blocks of the store; none where nothing was measured, as of copies within the
    /// process.
    fn estimate(&self, link: &Link, blocks: u64) -> Result<Option<Estimate>> {
        match link {
            Link::Embedded(..) => Ok(None),
            Link::Remote(remote) => match remote.peer() {
                Ok(peer) => {
                    self.client.inner.engine.estimate(peer, blocks.saturating_mul(self.shape.bytes()))
                }
                // Whoever asks it hears that it is down.
                Err(_) => Ok(None),
            },
        }
    }

    /// Of each key whether the store has its block.
    ///
    /// # Errors
    /// What the store says; of several servers, where none of them answers.
    pub fn contains<'a>(&self, blocks: impl Into<Chain<'a>>) -> Result<Vec<bool>> {
        let chain = blocks.into();
        let link = match &self.client.inner.stores {
            Stores::One(link) => link,
            Stores::Many(cluster) => return self.spread(cluster).contains(chain),
        };
        let request = Request::Contains { namespace: self.namespace, keys: chain.keys().to_vec() };
        match link.ask(request, DEADLINE)?.next(None)? {
            Response::Here(here) if here.len() == chain.keys().len() => Ok(here),
            other => Err(unexpected(&other)),
        }
    }

    /// Has blocks brought into the store's memory; how many are there, from the first key on. A store that is slow
    /// answers within five seconds, with what is there by then.
    ///
    /// # Errors
    /// As for [`Space::contains`].
    pub fn prefetch<'a>(&self, blocks: impl Into<Chain<'a>>) -> Result<u64> {
        let chain = blocks.into();
        match &self.client.inner.stores {
            Stores::One(link) => {
                let request = Request::Prefetch { namespace: self.namespace, keys: chain.keys().to_vec() };
                link.ask(request, DEADLINE)?.count()
            }
            Stores::Many(cluster) => self.spread(cluster).prefetch(chain),
        }
    }

    /// Takes blocks out, and all that come after them; how many went. Of several servers all are asked, each copy counts,
    /// and what comes after them goes at least as far as their segment does: name what is to go of later ones.
    ///
    /// # Errors
    /// What the store says; of several servers `StoreUnavailable` where one of them did not answer: it names that one,
    /// and the others have taken theirs out.
    pub fn remove(&self, keys: &[BlockKey]) -> Result<u64> {
        self.client.count(Request::Remove { namespace: self.namespace, keys: keys.to_vec() })
    }

    /// Keeps blocks for so long, or lets go of them with no time; how many are kept, from the first key on.
    ///
    /// # Errors
    /// As for [`Space::contains`].
    pub fn pin<'a>(&self, blocks: impl Into<Chain<'a>>, time: Duration) -> Result<u64> {
        let chain = blocks.into();
        match &self.client.inner.stores {
            Stores::One(link) => {
                let (namespace, keys) = (self.namespace, chain.keys().to_vec());
                link.ask(Request::Pin { namespace, keys, time }, DEADLINE)?.count()
            }
            Stores::Many(cluster) => self.spread(cluster).pin(chain, time),
        }
    }

    /// Takes out all blocks of the namespace; how many went, each copy counted.
    ///
    /// # Errors
    /// As for [`Space::remove`].
    pub fn clear(&self) -> Result<u64> {
        self.client.count(Request::ClearNamespace { namespace: self.namespace })
    }

    fn spread(&self, cluster: &Arc<Cluster>) -> Spread {
        Spread::new(cluster, self.namespace, self.shape, &self.likes)
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
