//! Connections that are opened before anything moves over them.
//!
//! A connection that is open may not be set up on the wire yet: most kinds of NIC do that when the first operation is
//! posted. So this NIC asks the peer's for the key of a page which that one keeps for nothing else, and reads a few
//! bytes of it: its *probe*. Nobody looks at them. Where the peer keeps no such page (a release before there was one)
//! the connection is open, and its first transfer proves it.

use super::device::{Done, Operation, Posted, RmaDevice, Run};
use super::probes::{Page, Step};
use super::worker::Worker;
use kvik_core::{Error, Result};
use kvik_proto::{NicAnswer, NicCall, NicCallKind, NicKey, Op};
use std::time::Instant;

/// Bytes of the page that are read.
const READ: usize = 8;

impl<C: RmaDevice> Worker<C> {
    /// Sees to it that something goes over the connection to the session's peer.
    pub(super) fn warm_up(&mut self, session: u64, until: Instant) {
        match self.peers.get(session).filter(|peer| peer.is_warm()) {
            Some(peer) => self.services.rma.warm_up_done(session, self.number, peer.nic(), Ok(false)),
            None => self.probes.add(session, until),
        }
    }

    pub(super) fn progress_probes(&mut self) {
        for session in self.probes.sessions() {
            if let Err(why) = self.progress_probe(session) {
                self.warm_up_ended(session, Err(&why));
            }
        }
    }

    fn progress_probe(&mut self, session: u64) -> Result<()> {
        if self.probes.is_wanted(session) && self.peers.get(session).is_some_and(|peer| peer.is_warm()) {
            self.warm_up_ended(session, Ok(()));
            return Ok(());
        }
        match self.probes.step(session) {
            Step::Wait => return Ok(()),
            Step::Ask => {
                self.request_probe_page(session);
                return Ok(());
            }
            Step::Stop => {
                if self.probes.is_in_flight(session) {
                    self.cut(session);
                }
                self.probes.remove(session);
                self.forget(session);
                return Ok(());
            }
            Step::Connect => {}
        }
        let Some((conn, nic)) = self.conn(session)? else { return Ok(()) };
        match self.probes.page(session, nic) {
            Page::Key(key) => self.probe(session, conn, key)?,
            Page::None => self.warm_up_ended(session, Ok(())),
            Page::Unknown => self.request_probe_page(session),
            Page::Asked => {}
        }
        Ok(())
    }

    fn request_probe_page(&mut self, session: u64) {
        let (from, to) = (self.number as u8, self.peers.of(session).nic() as u8);
        self.probes.asked(session, usize::from(to));
        let kind = NicCallKind::ProbePage;
        self.services.rma.call(session, NicCall { from, to, kind, address: Vec::new() });
    }

    /// Reads of the peer's page.
    fn probe(&mut self, session: u64, conn: C::Conn, key: NicKey) -> Result<()> {
        let (memory, _) = self.memories.page(&mut self.device)?;
        let operation = Operation {
            op: Op::Read,
            memory,
            pieces: &[Run { offset: 0, len: READ }],
            conn,
            remote: key.base,
            key: key.key,
            token: self.probes.token(),
        };
        match self.device.post(&operation) {
            // The next turn finds room.
            Ok(Posted::Full) => {}
            Ok(Posted::Yes) => {
                self.device.flush();
                self.probes.posted(session);
            }
            // As a work request's: the connection has to be mended.
            Err(error) => {
                log::debug!("a probe was refused: {error}");
                self.stats.operation_failed();
                self.peers.fail(session);
            }
        }
        Ok(())
    }

    /// A probe has ended.
    pub(super) fn probe_done(&mut self, ended: Done) {
        let Some(session) = self.probes.ended(ended.token) else { return };
        if let Err(error) = ended.result {
            log::debug!("a probe has failed: {error}");
            self.stats.operation_failed();
            if self.probes.is_wanted(session) {
                self.peers.fail(session);
            }
        } else if let Some(peer) = self.peers.get(session) {
            peer.works();
        }
    }

    /// Something went over the connection to the session's peer, or there is none for now.
    pub(super) fn warm_up_ended(&mut self, session: u64, outcome: Result<(), &Error>) {
        if self.probes.take(session) {
            let outcome = outcome.map(|()| true).map_err(Error::clone);
            self.services.rma.warm_up_done(session, self.number, self.peers.of(session).nic(), outcome);
        }
    }

    /// The session's peer has said what its page is.
    pub(super) fn on_probe_page(&mut self, session: u64, answer: NicAnswer) {
        if !self.probes.is_wanted(session) {
            return;
        }
        let key = answer.outcome.map(|told| key_of(&told));
        if !matches!(key, Ok(Some(_))) {
            let (name, why) =
                (self.stats.name(), key.as_ref().err().map_or("it keeps none", |why| &why.text));
            log::info!(
                "the connection of NIC {name} to NIC {} of a peer is open, and untried: no page ({why})",
                answer.to
            );
        }
        self.probes.answered(session, usize::from(answer.to), key.ok().flatten());
    }

    /// A NIC of the session's peer asks for this one's page.
    pub(super) fn answer_probe_page(&mut self, session: u64, call: NicCall) {
        let outcome = self.memories.page(&mut self.device).map(|(_, key)| {
            self.probes.expect_reads();
            [key.key.to_le_bytes(), key.base.to_le_bytes()].concat()
        });
        let NicCall { from, to, kind, .. } = call;
        self.services.rma.answer(session, NicAnswer { from, to, kind, moved: false, outcome });
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
