//! The calls of the protocol, and what is done about what they made happen.
//!
//! The protocol calls nothing of the engine: what a call made happen is carried out when the protocol's locks are
//! released, by the thread that made the call. So several threads carry out at once, and in no order among them.

use crate::commands::Commands;
use crate::sync::lock;
use crate::transports::Transports;
use kvik_host::FenceTable;
use kvik_host::clock::boottime;
use kvik_proto::{Event, Identity, Node, Timing};
use kvik_transport::{RegionMemory, Transport};
use std::sync::Mutex;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// One thread's calls of the protocol.
pub(crate) type Calls<'a> = Node<RegionMemory, &'a kvik_proto::Protocol<RegionMemory>>;

/// Who carries out what the calls made happen.
pub(crate) trait Carrier: Send + Sync {
    /// Something waits on the session's control connection.
    fn flush(&self, session: u64);
    /// Anything but a fence, which is raised by then: the protocol says that pages are free only afterwards.
    fn carry_out(&self, event: Event);
}

/// See the module's text.
pub(crate) struct Protocol {
    shared: kvik_proto::Protocol<RegionMemory>,
    /// What NICs are told of exposed pages is the latest.
    exposing: Mutex<()>,
    fence: Arc<FenceTable>,
    transports: Arc<Transports>,
    commands: Arc<Commands>,
    carrier: OnceLock<Weak<dyn Carrier>>,
}

impl Protocol {
    pub fn new(
        identity: Identity,
        window: u64,
        fence: Arc<FenceTable>,
        transports: Arc<Transports>,
        commands: Arc<Commands>,
    ) -> Protocol {
        let shared = kvik_proto::Protocol::new(identity, Timing::default());
        shared.set_window(window);
        let (exposing, carrier) = (Mutex::default(), OnceLock::new());
        Protocol { shared, exposing, fence, transports, commands, carrier }
    }

    /// From now on events are carried out, for as long as the carrier lives.
    pub fn set_carrier(&self, carrier: Weak<dyn Carrier>) {
        drop(self.carrier.set(carrier));
    }

    /// Makes calls, and carries out what they made happen.
    pub fn node<T>(&self, f: impl FnOnce(&mut Calls<'_>, Duration) -> T) -> T {
        self.calls(f, |carrier, unsent| unsent.into_iter().for_each(|session| carrier.flush(session)))
    }

    /// The same, but for what waits on the control connections of these sessions then: it goes with what is sent there
    /// next, or at the next [`Protocol::flush`].
    pub fn node_unsent(&self, f: impl FnOnce(&mut Calls<'_>)) -> Vec<u64> {
        let mut sessions = Vec::new();
        self.calls(|node, _| f(node), |_, unsent| sessions = unsent);
        sessions
    }

    /// Sends what waits on the control connections of these sessions.
    pub fn flush(&self, sessions: impl IntoIterator<Item = u64>) {
        if let Some(carrier) = self.carrier() {
            sessions.into_iter().for_each(|session| carrier.flush(session));
        }
    }

    fn carrier(&self) -> Option<Arc<dyn Carrier>> {
        self.carrier.get().and_then(Weak::upgrade)
    }

    fn calls<T>(
        &self,
        f: impl FnOnce(&mut Calls<'_>, Duration) -> T,
        send: impl FnOnce(&dyn Carrier, Vec<u64>),
    ) -> T {
        let now = boottime();
        let mut node = Calls::on(&self.shared, now);
        let result = f(&mut node, now);
        let (mut events, mut unsent) = (Vec::new(), Vec::new());
        while let Some(event) = node.next_event() {
            match event {
                Event::Raise(slot) => {
                    if let Err(error) = self.fence.raise(slot) {
                        log::error!("a fence could not be raised: {error}");
                    }
                }
                Event::Exposed => self.expose(),
                event => events.push(event),
            }
        }
        node.take_unsent(&mut unsent);
        if !(unsent.is_empty() && events.is_empty())
            && let Some(carrier) = self.carrier()
        {
            send(&*carrier, unsent);
            events.into_iter().for_each(|event| carrier.carry_out(event));
        }
        if let Some(at) = self.next_timeout() {
            self.commands.wake_by(at);
        }
        result
    }

    fn expose(&self) {
        if let Some(rma) = self.transports.rma() {
            let _latest = lock(&self.exposing);
            rma.expose(self.shared.exposed());
        }
    }

    /// What waits to be sent on a session's control connection, in exchange for an empty buffer.
    pub fn take_output(&self, session: u64, buffer: &mut Vec<u8>) {
        Calls::on(&self.shared, Duration::ZERO).session(session).take_output(buffer);
    }

    /// When the protocol is to be told the time at the latest.
    pub fn next_timeout(&self) -> Option<Duration> {
        self.shared.next_timeout()
    }
}
