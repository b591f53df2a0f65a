//! The transports of an engine, in the order of its preference. Only this place knows which there are.

use crate::setup::Setup;
use kvik_core::{Code, Error, RegionId, Result};
use kvik_host::FenceTable;
use kvik_host::thread::ThreadOptions;
use kvik_proto::{Closed, NicAnswer, NicCall, NicKey, Op, Path, Ring};
use kvik_transport::local::{Local, LocalConfig};
use kvik_transport::nics::NicOptions;
use kvik_transport::rma::Rma;
use kvik_transport::tcp::{Tcp, TcpConfig};
use kvik_transport::{Answer, RegionMemory, Request, Services, Transport, TransportId};
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

/// See the module's text: none before they have started. Those that have connections of their own are also reached by
/// their types: the control thread hands connections and messages to them.
#[derive(Default)]
pub(crate) struct Transports {
    started: OnceLock<Started>,
}

/// How NICs know a region, what they reach in its place, and why peers do not reach it.
type Reached = (Arc<[NicKey]>, Option<Arc<Ring<RegionMemory>>>, Closed);

struct Started {
    list: Vec<Arc<dyn Transport>>,
    local: Arc<Local>,
    rma: Option<Arc<Rma>>,
    tcp: Arc<Tcp>,
}

impl Transports {
    /// Starts them all.
    ///
    /// # Errors
    /// `TransportUnavailable` for NICs that cannot be used as they are asked for; `InvalidArgument` where a thread
    /// cannot be started.
    pub fn start(
        &self,
        setup: &Setup,
        fence: Arc<FenceTable>,
        services: Services,
        options: &ThreadOptions,
    ) -> Result<()> {
        let config = &setup.config;
        let services = match &config.between {
            Some(between) => between(services),
            None => services,
        };
        // Who listens on one address means the network that it belongs to.
        let source = config.listen.first().map(SocketAddr::ip).filter(|ip| !ip.is_unspecified());
        let start_rma = |nics: &NicOptions| {
            let nics = NicOptions { source: nics.source.or(source), ..nics.clone() };
            Rma::start(&nics, config.nic_threads.into(), options).map(Arc::new)
        };
        let rma = config.nics.as_ref().map(start_rma).transpose()?;
        if let Some(rma) = &rma {
            rma.serve(&services);
        }
        let threads = usize::from(config.io_threads);
        let tcp = TcpConfig { threads, channels: config.channels, tls: setup.tls.is_some() };
        let local = LocalConfig { listens: setup.has_local(), threads, host: setup.host.clone(), fence };
        let tcp = Arc::new(Tcp::start(tcp, &services, options)?);
        let local = Arc::new(Local::start(local, &services, options)?);
        let mut list: Vec<Arc<dyn Transport>> = vec![local.clone()];
        list.extend(rma.clone().map(|rma| -> Arc<dyn Transport> { rma }));
        list.push(tcp.clone());
        drop(self.started.set(Started { list, local, rma, tcp }));
        Ok(())
    }

    /// All of them, the preferred ones first.
    pub fn all(&self) -> &[Arc<dyn Transport>] {
        self.started.get().map_or(&[], |started| &started.list)
    }

    pub fn local(&self) -> Option<&Local> {
        self.started.get().map(|started| &*started.local)
    }

    pub fn rma(&self) -> Option<&Rma> {
        self.started.get()?.rma.as_deref()
    }

    pub fn tcp(&self) -> Option<&Tcp> {
        self.started.get().map(|started| &*started.tcp)
    }

    /// Data channels of a session that have joined.
    pub fn channels(&self, session: u64) -> u16 {
        self.tcp().map_or(0, |tcp| tcp.joined(session))
    }

    /// Whether a device moves bytes, which holds memory by itself.
    pub fn has_devices(&self) -> bool {
        self.all().iter().any(|one| !one.devices().is_empty())
    }

    /// What the transfers are called that the protocol moves in this way.
    pub fn of(&self, path: Path) -> Option<TransportId> {
        self.all().iter().find(|transport| transport.path() == path).map(|transport| transport.id())
    }

    /// What a NIC here says to one of a session's peer; none when it is to be heard later.
    pub fn called(&self, session: u64, call: NicCall) -> Option<NicAnswer> {
        match self.rma() {
            Some(rma) => rma.called(session, call),
            None => Some(NicAnswer {
                from: call.from,
                to: call.to,
                kind: call.kind,
                moved: false,
                outcome: Err(Error::new(Code::TransportUnavailable, "this engine has no NICs")),
            }),
        }
    }

    /// Those that reach a session's peer now.
    pub fn reaching(&self, session: u64) -> impl Iterator<Item = TransportId> {
        let bare = Request { session, op: None, memory: None, bytes: 0 };
        let there = move |one: &&Arc<dyn Transport>| matches!(one.answer(&bare), Answer::Ready(_));
        self.all().iter().filter(there).map(|transport| transport.id())
    }

    /// What a grant over a region says of it: how NICs know it, or what they reach in its place, and over what peers do not
    /// reach it.
    pub fn offer(&self, region: RegionId, memory: &RegionMemory, op: Op) -> Reached {
        let keys = self.rma().map(|rma| rma.keys(region)).unwrap_or_default();
        let ring = self.rma().and_then(|rma| rma.ring(region));
        let mut closed = Closed::default();
        for transport in self.all() {
            let why = transport.closed(region, memory, op);
            match transport.path() {
                Path::Memory => closed.memory = why,
                Path::OneSided => closed.nics = why,
                Path::Channels => {}
            }
        }
        (keys, ring, closed)
    }
}
