//! The protocol's node, and what is done about what it says.

use crate::commands::Commands;
use crate::sync::lock;
use crate::transports::Transports;
use kvik_host::FenceTable;
use kvik_host::clock::boottime;
use kvik_proto::{Event, Identity, Node, Timing};
use kvik_transport::{RegionMemory, Transport};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

/// Who carries out what the node has said, after its lock is released.
pub(crate) trait Carrier: Send + Sync {
    /// Something waits on the session's control connection.
    fn flush(&self, session: u64);
    /// Anything but a fence, which is raised by then.
    fn carry_out(&self, event: Event);
}

/// See the module's text.
pub(crate) struct Protocol {
    node: Mutex<Node<RegionMemory>>,
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
        let mut node = Node::new(identity, Timing::default(), boottime());
        node.set_window(window);
        Protocol { node: Mutex::new(node), fence, transports, commands, carrier: OnceLock::new() }
    }

    /// From now on events are carried out, for as long as the carrier lives.
    pub fn set_carrier(&self, carrier: Weak<dyn Carrier>) {
        drop(self.carrier.set(carrier));
    }

    /// Does something with the node, and carries out what that made happen.
    pub fn node<T>(&self, f: impl FnOnce(&mut Node<RegionMemory>, Duration) -> T) -> T {
        let (mut events, mut unsent) = (Vec::new(), Vec::new());
        let (result, timeout) = {
            let mut node = lock(&self.node);
            let now = boottime();
            node.note_time(now);
            let result = f(&mut node, now);
            while let Some(event) = node.next_event() {
                match event {
                    // Under the lock: nobody may learn that pages are free before their fence is up.
                    Event::Raise(slot) => {
                        if let Err(error) = self.fence.raise(slot) {
                            log::error!("a fence could not be raised: {error}");
                        }
                    }
                    event => events.push(event),
                }
            }
            node.take_unsent(&mut unsent);
            if let Some(rma) = self.transports.rma() {
                rma.expose(node.exposed());
            }
            (result, node.next_timeout())
        };
        if !(unsent.is_empty() && events.is_empty())
            && let Some(carrier) = self.carrier.get().and_then(Weak::upgrade)
        {
            unsent.into_iter().for_each(|session| carrier.flush(session));
            events.into_iter().for_each(|event| carrier.carry_out(event));
        }
        if let Some(at) = timeout {
            self.commands.wake_by(at);
        }
        result
    }

    /// What waits to be sent on a session's control connection, in exchange for an empty buffer.
    pub fn take_output(&self, session: u64, buffer: &mut Vec<u8>) {
        lock(&self.node).take_output(session, buffer);
    }

    /// When the node is to be told the time at the latest.
    pub fn next_timeout(&self) -> Option<Duration> {
        lock(&self.node).next_timeout()
    }
}
