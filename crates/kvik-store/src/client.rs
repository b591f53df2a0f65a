//! The client's side: what a serving engine calls.

use crate::choice::{Choices, Reason};
use crate::cluster::{Cluster, MemberState};
use crate::host::Host;
use crate::link::{Link, unexpected};
use crate::opened::Opened;
use crate::remote::Remote;
use crate::servers::Servers;
use crate::service::Service;
use crate::space::Space;
use crate::store::Store;
use crate::wire::{DEADLINE, Request, Response};
use crate::{Counts, Namespace, Shape, StoreOptions};
use kvik_core::{Code, Error, Result};
use kvik_engine::Engine;
use std::sync::Arc;
use std::time::Duration;

/// The copies that may be asked for.
const MAX_COPIES: usize = 16;

/// A store, from the side of those who use it. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub engine: Engine,
    pub stores: Stores,
    pub choices: Arc<Choices>,
}

/// Where blocks are.
pub(crate) enum Stores {
    One(Link),
    Many(Arc<Cluster>),
}

impl Stores {
    /// What is said to them of namespaces.
    fn opened(&self) -> &Opened {
        match self {
            Stores::One(link) => link.opened(),
            Stores::Many(cluster) => &cluster.opened,
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        match &self.stores {
            Stores::One(Link::Remote(remote)) => remote.close(),
            Stores::One(Link::Embedded(..)) => {}
            Stores::Many(cluster) => cluster.close(),
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
        Ok(Client::over(engine, Stores::One(link)))
    }

    /// The store of several servers: each prompt lies, segment by segment, on `copies` of them, and every client of
    /// the same servers finds it there. Returns when each of them was met, or could not be, but not later than the deadline.
    /// One that is not there costs its blocks, not the call. A single address is as for [`Client::connect`].
    ///
    /// # Errors
    /// `InvalidArgument` for no servers, the same one twice, or no copies; `StoreUnavailable` where none of them
    /// can be met, or nothing says which they are.
    pub fn connect_to(
        engine: &Engine,
        servers: &Servers,
        copies: usize,
        deadline: Option<Duration>,
    ) -> Result<Client> {
        if copies == 0 || copies > MAX_COPIES {
            let text = format!("{copies} copies of a block: a store keeps from 1 to {MAX_COPIES}");
            return Err(Error::new(Code::InvalidArgument, text));
        }
        if let Some(address) = servers.single() {
            return Client::connect(engine, address, deadline);
        }
        let deadline = deadline.unwrap_or(DEADLINE);
        let cluster = servers.follow(engine, copies, deadline)?;
        Ok(Client::over(engine, Stores::Many(cluster)))
    }

    pub(crate) fn of(engine: &Engine, host: Host) -> Client {
        let link = Link::Embedded(Arc::new(host), engine.clone(), Opened::default());
        Client::over(engine, Stores::One(link))
    }

    fn over(engine: &Engine, stores: Stores) -> Client {
        let (engine, choices) = (engine.clone(), Arc::default());
        Client { inner: Arc::new(Inner { engine, stores, choices }) }
    }

    /// The servers at present; none of a store within this process.
    pub fn members(&self) -> Vec<MemberState> {
        match &self.inner.stores {
            Stores::One(Link::Embedded(..)) => Vec::new(),
            Stores::One(Link::Remote(remote)) => vec![MemberState::of(remote, 0)],
            Stores::Many(cluster) => cluster.states(),
        }
    }

    /// Blocks of one namespace. `tenant` names whose they are; `shape` is that of each.
    ///
    /// # Errors
    /// `InvalidArgument` for a namespace that is none; what the store says.
    pub fn open(&self, tenant: &str, namespace: &Namespace, shape: Shape) -> Result<Space> {
        let (tenant, model, id) = (tenant.to_owned(), namespace.words(), namespace.id()?);
        let request = Request::Open { namespace: id, shape, tenant, model };
        // A store that is met meanwhile hears of it, too.
        let needed = self.inner.stores.opened().need(&request);
        match &self.inner.stores {
            Stores::One(link) => match link.ask(request, DEADLINE)?.next(None)? {
                Response::Opened => {}
                other => return Err(unexpected(&other)),
            },
            Stores::Many(cluster) => cluster.open(&request)?,
        }
        Ok(Space::new(self, id, shape, needed))
    }

    /// Takes out all blocks of a tenant; how many went, each copy counted.
    ///
    /// # Errors
    /// What the store says; of several servers `StoreUnavailable` where one of them did not answer: it names that one,
    /// and the others have taken theirs out.
    pub fn clear_tenant(&self, tenant: &str) -> Result<u64> {
        self.count(Request::ClearTenant { tenant: tenant.to_owned() })
    }

    /// What has happened in the store: the sum over the servers that answer, of which [`Client::members`] tells.
    ///
    /// # Errors
    /// What the store says; of several servers, where none of them answers.
    pub fn stat(&self) -> Result<Counts> {
        match &self.inner.stores {
            Stores::One(link) => match link.ask(Request::Stat, DEADLINE)?.next(None)? {
                Response::Counts(counts) => Ok(*counts),
                other => Err(unexpected(&other)),
            },
            Stores::Many(cluster) => cluster.counts(),
        }
    }

    /// How often [`Space::choose`] has given each reason, by its name.
    pub fn choices(&self) -> [(&'static str, u64); Reason::ALL.len()] {
        self.inner.choices.counts()
    }

    /// All figures of the store, in the Prometheus text format: see [`crate::METRICS`]. Of several servers each sample has
    /// the label `member`; those that do not answer have none.
    ///
    /// # Errors
    /// What the store says; of several servers, where none of them answers.
    pub fn metrics(&self) -> Result<String> {
        match &self.inner.stores {
            Stores::One(link) => link.ask(Request::Metrics, DEADLINE)?.text(),
            Stores::Many(cluster) => cluster.metrics(),
        }
    }

    /// Has all of the store do something; how many blocks it was.
    pub(crate) fn count(&self, request: Request) -> Result<u64> {
        match &self.inner.stores {
            Stores::One(link) => link.ask(request, DEADLINE)?.count(),
            Stores::Many(cluster) => cluster.count(&request),
        }
    }
}
