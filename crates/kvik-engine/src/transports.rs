//! The transports of an engine, in the order of its preference. Only this place knows which there are.

use crate::inner::Inner;
use kvik_core::{RegionId, Result};
use kvik_host::thread::ThreadOptions;
use kvik_proto::{Closed, NicKey, Op, Path};
use kvik_transport::local::{Local, LocalConfig};
use kvik_transport::nics::NicOptions;
use kvik_transport::rma::Rma;
use kvik_transport::tcp::{Tcp, TcpConfig};
use kvik_transport::{Answer, RegionMemory, Request, Services, Transport, TransportId};
use std::net::IpAddr;
use std::sync::Arc;

/// See the module's text. Those that have connections of their own are also reached by their types: the control thread
/// hands connections and messages to them.
pub(crate) struct Transports {
    list: Vec<Arc<dyn Transport>>,
    pub local: Arc<Local>,
    pub rma: Option<Arc<Rma>>,
    pub tcp: Arc<Tcp>,
}

impl Transports {
    /// Starts them all. `source` is the address that the engine listens on, which means the network that it belongs
    /// to.
    ///
    /// # Errors
    /// `TransportUnavailable` for NICs that cannot be used as they are asked for; `InvalidArgument` where a thread
    /// cannot be started.
    pub fn start(inner: &Arc<Inner>, source: Option<IpAddr>, options: &ThreadOptions) -> Result<Transports> {
        let config = &inner.config;
        let services = match &config.faults {
            Some(faults) => faults.stand_before(Services::of(inner)),
            None => Services::of(inner),
        };
        let rma = match &config.nics {
            Some(nics) => {
                let nics = NicOptions { source: nics.source.or(source), ..nics.clone() };
                Some(Arc::new(Rma::start(&nics, options)?))
            }
            None => None,
        };
        if let Some(rma) = &rma {
            rma.serve(&services);
        }
        let threads = usize::from(config.io_threads);
        let tcp = TcpConfig { threads, channels: config.channels, tls: inner.tls.is_some() };
        let local = LocalConfig {
            listens: inner.has_local(),
            threads,
            host: inner.host.clone(),
            fence: inner.fence.clone(),
        };
        let tcp = Arc::new(Tcp::start(tcp, &services, options)?);
        let local = Arc::new(Local::start(local, &services, options)?);
        let mut list: Vec<Arc<dyn Transport>> = vec![local.clone()];
        list.extend(rma.clone().map(|rma| -> Arc<dyn Transport> { rma }));
        list.push(tcp.clone());
        Ok(Transports { list, local, rma, tcp })
    }

    /// All of them, the preferred ones first.
    pub fn all(&self) -> &[Arc<dyn Transport>] {
        &self.list
    }

    /// What the transfers are called that the protocol moves in this way.
    pub fn of(&self, path: Path) -> Option<TransportId> {
        self.list.iter().find(|transport| transport.path() == path).map(|transport| transport.id())
    }

    /// Those that reach a session's peer now.
    pub fn reaching(&self, session: u64) -> impl Iterator<Item = TransportId> {
        let bare = Request { session, op: None, memory: None, bytes: 0 };
        let there = move |one: &&Arc<dyn Transport>| matches!(one.answer(&bare), Answer::Ready(_));
        self.list.iter().filter(there).map(|transport| transport.id())
    }

    /// What a grant over a region says of it: how NICs know it, and over what peers do not reach it.
    pub fn offer(&self, region: RegionId, memory: &RegionMemory, op: Op) -> (Arc<[NicKey]>, Closed) {
        let keys = self.rma.as_ref().map(|rma| rma.keys(region)).unwrap_or_default();
        let mut closed = Closed::default();
        for transport in &self.list {
            let why = transport.closed(region, memory, op);
            match transport.path() {
                Path::Memory => closed.memory = why,
                Path::OneSided => closed.nics = why,
                Path::Channels => {}
            }
        }
        (keys, closed)
    }
}
