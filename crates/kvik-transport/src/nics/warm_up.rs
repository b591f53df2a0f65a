//! Connections that are opened before anything moves over them.
//!
//! A connection that is open may not be set up on the wire yet: most kinds of NIC do that when the first operation is
//! posted. So this NIC asks the peer's for the key of a page which that one keeps for nothing else, and reads a few
//! bytes of it: its *probe*. Nobody looks at them. Where the peer keeps no such page (a release before there was one)
//! the connection is open, and its first transfer proves it.

use super::connections::CALL;
use super::device::{Done, Operation, Posted, RmaDevice, Run};
use super::posting::PATIENCE;
use super::worker::Worker;
use crate::{RegionMemory, Services, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::{HugePages, Memory};
use kvik_proto::{NicAnswer, NicCall, NicCallKind, NicKey, Op};
use std::time::{Duration, Instant};

/// Bytes of the page, and what of it is read.
const PAGE_BYTES: usize = 4096;
const READ: usize = 8;
/// How long this NIC's thread looks after whoever reads its page, and how often it is asked again meanwhile.
const PROBE_WINDOW: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(500);
/// Tokens of probes: beyond those of work requests.
const FIRST: u64 = 1 << 32;

/// A connection that is to be warmed up.
pub(super) struct Probe {
    /// Until when somebody waits for it.
    until: Instant,
    /// When the peer was asked for its page.
    asked: Option<Instant>,
    /// The peer's NIC that has answered, and the key of its page, if it keeps one.
    page: Option<(usize, Option<NicKey>)>,
    /// The operation that is in flight.
    out: Option<u64>,
    /// Since when the session is over.
    over: Option<Instant>,
}

impl Probe {
    pub fn is_in_flight(&self) -> bool {
        self.out.is_some()
    }

    /// Nothing is heard of its operation any more.
    pub fn stop(&mut self) {
        self.out = None;
    }
}

impl<C: RmaDevice> Worker<C> {
    /// Sees to it that something goes over the connection to the session's peer.
    pub(super) fn warm_up(&mut self, session: u64, until: Instant) {
        let Some(services) = self.services.clone() else { return };
        if let Some(peer) = self.peers.get(&session).filter(|peer| peer.is_warm()) {
            return services.rma.warm_up_done(session, self.number, peer.nic(), Ok(false));
        }
        let new = || Probe { until, asked: None, page: None, out: None, over: None };
        let probe = self.probes.entry(session).or_insert_with(new);
        probe.until = probe.until.max(until);
    }

    /// Whether the thread has to look after probes, its own or a peer's.
    pub(super) fn is_warming_up(&self) -> bool {
        let now = Instant::now();
        self.probed_until.is_some_and(|until| now < until)
            || self.probes.values().any(|probe| probe.over.is_some() || now < probe.until)
    }

    pub(super) fn progress_probes(&mut self, services: &Services) {
        if self.probes.is_empty() {
            return;
        }
        for session in self.probes.keys().copied().collect::<Vec<_>>() {
            if let Err(why) = self.progress_probe(services, session) {
                self.warm_up_failed(services, session, &why);
            }
        }
    }

    fn progress_probe(&mut self, services: &Services, session: u64) -> Result<()> {
        let is_warm = self.peers.get(&session).is_some_and(|peer| peer.is_warm());
        let Some(probe) = self.probes.get(&session) else { return Ok(()) };
        let (now, asked) = (Instant::now(), probe.asked);
        match (probe.over, probe.out) {
            (None, _) if is_warm => {
                self.is_warm(services, session);
                return Ok(());
            }
            (Some(since), Some(_)) if since.elapsed() < PATIENCE => return Ok(()),
            (Some(_), out) => {
                if out.is_some() {
                    self.cut(session);
                }
                self.probes.remove(&session);
                self.forget(session);
                return Ok(());
            }
            (None, Some(_)) => {
                // The peer's thread looks after it for a while only.
                if now < probe.until && asked.is_none_or(|asked| asked.elapsed() > AGAIN) {
                    self.request_probe_page(services, session);
                }
                return Ok(());
            }
            (None, None) if now >= probe.until => {
                self.probes.remove(&session);
                return Ok(());
            }
            (None, None) => {}
        }
        let Some((conn, nic)) = self.conn(services, session)? else { return Ok(()) };
        let Some(probe) = self.probes.get(&session) else { return Ok(()) };
        match probe.page {
            Some((of, Some(key))) if of == nic => self.probe(session, conn, key),
            Some((of, None)) if of == nic => {
                self.is_warm(services, session);
                Ok(())
            }
            _ if asked.is_none_or(|asked| asked.elapsed() > CALL) => {
                self.request_probe_page(services, session);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn request_probe_page(&mut self, services: &Services, session: u64) {
        let to = self.peer(session).nic() as u8;
        if let Some(probe) = self.probes.get_mut(&session) {
            probe.asked = Some(Instant::now());
        }
        let (from, kind) = (self.number as u8, NicCallKind::ProbePage);
        services.rma.call(session, NicCall { from, to, kind, address: Vec::new() });
    }

    /// Reads of the peer's page.
    fn probe(&mut self, session: u64, conn: C::Conn, key: NicKey) -> Result<()> {
        self.probe_page()?;
        let Some((memory, _)) = &self.page else { return Ok(()) };
        let token = FIRST + self.next_probe;
        let operation = Operation {
            op: Op::Read,
            memory,
            pieces: &[Run { offset: 0, len: READ }],
            conn,
            remote: key.base,
            key: key.key,
            token,
        };
        match self.device.post(&operation) {
            // The next turn finds room.
            Ok(Posted::Full) => {}
            Ok(Posted::Yes) => {
                self.device.flush();
                self.next_probe += 1;
                if let Some(probe) = self.probes.get_mut(&session) {
                    probe.out = Some(token);
                }
            }
            // As a work request's: the connection has to be mended.
            Err(error) => {
                log::debug!("a probe was refused: {error}");
                self.stats.operation_failed();
                self.degraded.insert(session);
            }
        }
        Ok(())
    }

    /// A probe has ended.
    pub(super) fn probe_done(&mut self, ended: Done) {
        let probe = self.probes.iter_mut().find(|(_, probe)| probe.out == Some(ended.token));
        let Some((&session, probe)) = probe else { return };
        probe.stop();
        if let Err(error) = ended.result {
            log::debug!("a probe has failed: {error}");
            self.stats.operation_failed();
            if probe.over.is_none() {
                self.degraded.insert(session);
            }
        } else if let Some(peer) = self.peers.get_mut(&session) {
            peer.works();
        }
    }

    /// Something went over the connection.
    fn is_warm(&mut self, services: &Services, session: u64) {
        // One that is in flight still is heard of, and then forgotten.
        let Some(probe) = self.probes.get(&session).filter(|probe| probe.over.is_none()) else { return };
        if probe.out.is_none() {
            self.probes.remove(&session);
            let nic = self.peer(session).nic();
            services.rma.warm_up_done(session, self.number, nic, Ok(true));
        }
    }

    /// There is no connection to the session's peer for now.
    pub(super) fn warm_up_failed(&mut self, services: &Services, session: u64, why: &Error) {
        let Some(probe) = self.probes.get(&session).filter(|probe| probe.over.is_none()) else { return };
        if probe.out.is_none() {
            self.probes.remove(&session);
            let nic = self.peer(session).nic();
            services.rma.warm_up_done(session, self.number, nic, Err(why.clone()));
        }
    }

    /// The session is over: what is in flight has a moment to end, before it is stopped.
    pub(super) fn end_probe(&mut self, session: u64) {
        match self.probes.get_mut(&session) {
            Some(probe) if probe.out.is_some() => drop(probe.over.get_or_insert_with(Instant::now)),
            _ => drop(self.probes.remove(&session)),
        }
    }

    /// The session's peer has said what its page is.
    pub(super) fn on_probe_page(&mut self, session: u64, answer: NicAnswer) {
        let Some(probe) = self.probes.get_mut(&session) else { return };
        let key = answer.outcome.map(|told| key_of(&told));
        if !matches!(key, Ok(Some(_))) {
            let (name, why) =
                (self.stats.name(), key.as_ref().err().map_or("it keeps none", |why| &why.text));
            log::info!(
                "the connection of NIC {name} to NIC {} of a peer is open, and untried: no page ({why})",
                answer.to
            );
        }
        probe.page = Some((usize::from(answer.to), key.ok().flatten()));
    }

    /// A NIC of the session's peer asks for this one's page.
    pub(super) fn answer_probe_page(&mut self, session: u64, call: NicCall) {
        let Some(services) = self.services.clone() else { return };
        let outcome = self.probe_page().map(|key| {
            self.probed_until = Some(Instant::now() + PROBE_WINDOW);
            [key.key.to_le_bytes(), key.base.to_le_bytes()].concat()
        });
        let NicCall { from, to, kind, .. } = call;
        services.rma.answer(session, NicAnswer { from, to, kind, outcome });
    }

    /// The page's key; the NIC learns of the page when it is first needed.
    fn probe_page(&mut self) -> Result<NicKey> {
        if let Some((_, key)) = &self.page {
            return Ok(*key);
        }
        let memory = Memory::shared(PAGE_BYTES, HugePages::Never);
        let memory = RegionMemory::from(memory.map_err(|error| from_host(Code::MemoryCapReached, error))?);
        let (known, key) = self.device.register(memory)?;
        self.page = Some((known, key));
        Ok(key)
    }
}

/// The key in a peer's answer.
fn key_of(told: &[u8]) -> Option<NicKey> {
    let (key, base) = told.split_at_checked(8)?;
    let number = |bytes: &[u8]| Some(u64::from_le_bytes(bytes.try_into().ok()?));
    Some(NicKey { key: number(key)?, base: number(base)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_of_a_page_is_told_whole_or_not_at_all() {
        let key = NicKey { key: 7, base: u64::MAX - 1 };
        let told = [key.key.to_le_bytes(), key.base.to_le_bytes()].concat();
        assert_eq!(key_of(&told), Some(key));
        for other in [&told[1..], &[told.clone(), vec![0]].concat(), &[]] {
            assert_eq!(key_of(other), None, "{other:?}");
        }
    }
}
