//! What an engine was started with, which does not change; and whether it may still be used.

use crate::config::{Config, MAX_DEADLINE};
use kvik_core::{Code, EngineId, Error, HostTag, Result};
use kvik_host::{ForkGuard, HostFacts};
use kvik_proto::{Facts, Identity, Local, Nics, Secret};
use kvik_transport::from_host;
use kvik_transport::tls::Tls;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// See the module's text.
pub(crate) struct Setup {
    pub config: Config,
    /// What it says of itself in a handshake, but for its NICs.
    pub local: Local,
    /// Every TCP connection is under it, or none is.
    pub tls: Option<Tls>,
    pub host: HostFacts,
    /// Those in its tickets.
    pub addresses: Vec<SocketAddr>,
    guard: ForkGuard,
    closed: AtomicBool,
}

impl Setup {
    pub fn new(config: Config, addresses: Vec<SocketAddr>) -> Result<Setup> {
        let fail = |error| from_host(Code::InvalidArgument, error);
        let host = HostFacts::read().map_err(fail)?;
        let identity = Identity {
            engine: EngineId::at(
                &host.boot_id,
                host.net_namespace,
                &[&config.listen[..], &addresses].concat(),
            ),
            incarnation: kvik_core::Incarnation::random()?,
        };
        let facts = Facts {
            boot: host.boot_id,
            pid_namespace: host.pid_namespace,
            user_namespace: host.user_namespace,
            network_namespace: host.net_namespace,
            uid: host.uid,
            pid: host.pid,
            // Of this start alone: a forked child of an earlier one may still hold that one's socket.
            local_name: format!("kvik-{}-{:016x}", identity.engine, identity.incarnation.0),
            name: config.name.clone(),
            nics: Nics::default(),
        };
        let local = Local { identity, secret: Secret::new(config.secret.as_deref()), facts };
        let tls = config.tls.as_ref().map(Tls::load).transpose()?;
        let guard = ForkGuard::new().map_err(fail)?;
        Ok(Setup { config, local, tls, host, addresses, guard, closed: AtomicBool::new(false) })
    }

    /// Its id.
    pub fn id(&self) -> EngineId {
        self.local.identity.engine
    }

    /// Eight bytes that tell whether a loopback address here means the same there.
    pub fn host_tag(&self) -> HostTag {
        HostTag::new(&self.host.boot_id, self.host.net_namespace)
    }

    /// Whether processes on this host may be shown memory.
    pub fn has_local(&self) -> bool {
        !self.local.facts.local_name.is_empty()
    }

    /// # Errors
    /// `EngineForked` in a child of the process that started the engine.
    pub fn check_fork(&self) -> Result<()> {
        match self.guard.is_child() {
            false => Ok(()),
            true => Err(Error::new(
                Code::EngineForked,
                "the engine belongs to the parent of this process: start one of its own in the child",
            )),
        }
    }

    /// # Errors
    /// `EngineForked`, or `EngineClosed`.
    pub fn check(&self) -> Result<()> {
        self.check_fork()?;
        match self.is_closed() {
            false => Ok(()),
            true => Err(Error::new(Code::EngineClosed, "the engine was closed; start another one")),
        }
    }

    /// How long something may take.
    ///
    /// # Errors
    /// `InvalidArgument` for none, or more than a day.
    pub fn time(&self, deadline: Option<Duration>) -> Result<Duration> {
        match deadline.unwrap_or(self.config.deadline) {
            time if time.is_zero() || time > MAX_DEADLINE => Err(Error::new(
                Code::InvalidArgument,
                format!("a deadline is more than 0 s and at most {MAX_DEADLINE:?}, not {time:?}"),
            )),
            time => Ok(time),
        }
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// True for the one who closes it.
    pub fn set_closed(&self) -> bool {
        !self.closed.swap(true, Ordering::AcqRel)
    }
}
