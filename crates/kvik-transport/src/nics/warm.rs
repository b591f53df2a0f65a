//! Ways that are opened before anything moves over them.
//!
//! An open way is no connection yet: most kinds of NIC connect when the first operation is posted. So this NIC asks
//! the peer's for the key of a page which that one keeps for nothing else, and reads a few bytes of it: it *knocks*.
//! Nobody looks at them. Where the peer keeps no such page (a release before there was one) the way is open, and its
//! first transfer proves it.

use super::card::{Card, Done, Operation, Posted, Run};
use super::hand::PATIENCE;
use super::roads::CALL;
use super::worker::Worker;
use crate::{Held, Services, from_host};
use kvik_core::{Code, Error, Result};
use kvik_host::{HugePages, Memory};
use kvik_proto::{NicAnswer, NicAsk, NicCall, NicKey, Op};
use std::time::{Duration, Instant};

/// Bytes of the page, and what of it is read.
const PAGE_BYTES: usize = 4096;
const READ: usize = 8;
/// How long this NIC's thread looks after whoever reads its page, and how often it is asked again meanwhile.
const VISIT: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(500);
/// Tokens of knocks: beyond those of orders.
const FIRST: u64 = 1 << 32;

/// A way that is to be warm.
pub(super) struct Knock {
    /// Until when somebody waits for it.
    until: Instant,
    /// When the peer was asked for its page.
    asked: Option<Instant>,
    /// The peer's NIC that has answered, and the key of its page, if it keeps one.
    page: Option<(usize, Option<NicKey>)>,
    /// The operation that is under way.
    out: Option<u64>,
    /// Since when the session is over.
    over: Option<Instant>,
}

impl Knock {
    pub fn is_under_way(&self) -> bool {
        self.out.is_some()
    }

    /// Nothing is heard of its operation any more.
    pub fn stop(&mut self) {
        self.out = None;
    }
}

impl<C: Card> Worker<C> {
    /// Sees to it that something goes over the way to the session's peer.
    pub(super) fn warm(&mut self, session: u64, until: Instant) {
        let Some(services) = self.services.clone() else { return };
        if let Some(peer) = self.peers.get(&session).filter(|peer| peer.is_warm()) {
            return services.rma.warmed(session, self.number, peer.nic(), Ok(false));
        }
        let new = || Knock { until, asked: None, page: None, out: None, over: None };
        let knock = self.knocks.entry(session).or_insert_with(new);
        knock.until = knock.until.max(until);
    }

    /// Whether the thread has to look after knocks, its own or a peer's.
    pub(super) fn is_warming(&self) -> bool {
        let now = Instant::now();
        self.visited.is_some_and(|until| now < until)
            || self.knocks.values().any(|knock| knock.over.is_some() || now < knock.until)
    }

    pub(super) fn tend_knocks(&mut self, services: &Services) {
        if self.knocks.is_empty() {
            return;
        }
        for session in self.knocks.keys().copied().collect::<Vec<_>>() {
            if let Err(why) = self.tend_knock(services, session) {
                self.stays_cold(services, session, &why);
            }
        }
    }

    fn tend_knock(&mut self, services: &Services, session: u64) -> Result<()> {
        let is_warm = self.peers.get(&session).is_some_and(|peer| peer.is_warm());
        let Some(knock) = self.knocks.get(&session) else { return Ok(()) };
        let (now, asked) = (Instant::now(), knock.asked);
        match (knock.over, knock.out) {
            (None, _) if is_warm => {
                self.is_warm(services, session);
                return Ok(());
            }
            (Some(since), Some(_)) if since.elapsed() < PATIENCE => return Ok(()),
            (Some(_), out) => {
                if out.is_some() {
                    self.cut(session);
                }
                self.knocks.remove(&session);
                self.forget(session);
                return Ok(());
            }
            (None, Some(_)) => {
                // The peer's thread looks after it for a while only.
                if now < knock.until && asked.is_none_or(|asked| asked.elapsed() > AGAIN) {
                    self.ask_for_page(services, session);
                }
                return Ok(());
            }
            (None, None) if now >= knock.until => {
                self.knocks.remove(&session);
                return Ok(());
            }
            (None, None) => {}
        }
        let Some((way, nic)) = self.way(services, session)? else { return Ok(()) };
        let Some(knock) = self.knocks.get(&session) else { return Ok(()) };
        match knock.page {
            Some((of, Some(key))) if of == nic => self.knock(session, way, key),
            Some((of, None)) if of == nic => {
                self.is_warm(services, session);
                Ok(())
            }
            _ if asked.is_none_or(|asked| asked.elapsed() > CALL) => {
                self.ask_for_page(services, session);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn ask_for_page(&mut self, services: &Services, session: u64) {
        let to = self.peer(session).nic() as u8;
        if let Some(knock) = self.knocks.get_mut(&session) {
            knock.asked = Some(Instant::now());
        }
        let (from, ask) = (self.number as u8, NicAsk::Page);
        services.rma.call(session, NicCall { from, to, ask, address: Vec::new() });
    }

    /// Reads of the peer's page.
    fn knock(&mut self, session: u64, way: C::Way, key: NicKey) -> Result<()> {
        self.keep_page()?;
        let Some((memory, _)) = &self.page else { return Ok(()) };
        let token = FIRST + self.next_knock;
        let operation = Operation {
            op: Op::Read,
            memory,
            pieces: &[Run { offset: 0, len: READ }],
            way,
            remote: key.base,
            key: key.key,
            token,
        };
        match self.card.post(&operation) {
            // The next turn finds room.
            Ok(Posted::Full) => {}
            Ok(Posted::Yes) => {
                self.card.flush();
                self.next_knock += 1;
                if let Some(knock) = self.knocks.get_mut(&session) {
                    knock.out = Some(token);
                }
            }
            // As an order's: the way has to be mended.
            Err(error) => {
                log::debug!("a knock was refused: {error}");
                self.stats.operation_failed();
                self.sick.insert(session);
            }
        }
        Ok(())
    }

    /// A knock has ended.
    pub(super) fn knocked(&mut self, ended: Done) {
        let knock = self.knocks.iter_mut().find(|(_, knock)| knock.out == Some(ended.token));
        let Some((&session, knock)) = knock else { return };
        knock.stop();
        if let Err(error) = ended.result {
            log::debug!("a knock has failed: {error}");
            self.stats.operation_failed();
            if knock.over.is_none() {
                self.sick.insert(session);
            }
        } else if let Some(peer) = self.peers.get_mut(&session) {
            peer.works();
        }
    }

    /// Something went over the way.
    fn is_warm(&mut self, services: &Services, session: u64) {
        // One that is under way still is heard of, and then forgotten.
        let Some(knock) = self.knocks.get(&session).filter(|knock| knock.over.is_none()) else { return };
        if knock.out.is_none() {
            self.knocks.remove(&session);
            let nic = self.peer(session).nic();
            services.rma.warmed(session, self.number, nic, Ok(true));
        }
    }

    /// There is no way to the session's peer for now.
    pub(super) fn stays_cold(&mut self, services: &Services, session: u64, why: &Error) {
        let Some(knock) = self.knocks.get(&session).filter(|knock| knock.over.is_none()) else { return };
        if knock.out.is_none() {
            self.knocks.remove(&session);
            let nic = self.peer(session).nic();
            services.rma.warmed(session, self.number, nic, Err(why.clone()));
        }
    }

    /// The session is over: what is under way has a moment to end, before it is stopped.
    pub(super) fn leave_knock(&mut self, session: u64) {
        match self.knocks.get_mut(&session) {
            Some(knock) if knock.out.is_some() => drop(knock.over.get_or_insert_with(Instant::now)),
            _ => drop(self.knocks.remove(&session)),
        }
    }

    /// The session's peer has said what its page is.
    pub(super) fn page_told(&mut self, session: u64, answer: NicAnswer) {
        let Some(knock) = self.knocks.get_mut(&session) else { return };
        let key = answer.outcome.map(|told| key_of(&told));
        if !matches!(key, Ok(Some(_))) {
            let (name, why) =
                (self.stats.name(), key.as_ref().err().map_or("it keeps none", |why| &why.text));
            log::info!(
                "the way of NIC {name} to NIC {} of a peer is open, and untried: no page ({why})",
                answer.to
            );
        }
        knock.page = Some((usize::from(answer.to), key.ok().flatten()));
    }

    /// A NIC of the session's peer asks for this one's page.
    pub(super) fn show_page(&mut self, session: u64, call: NicCall) {
        let Some(services) = self.services.clone() else { return };
        let outcome = self.keep_page().map(|key| {
            self.visited = Some(Instant::now() + VISIT);
            [key.key.to_le_bytes(), key.base.to_le_bytes()].concat()
        });
        let NicCall { from, to, ask, .. } = call;
        services.rma.answer(session, NicAnswer { from, to, ask, outcome });
    }

    /// The page's key; the NIC learns of the page when it is first needed.
    fn keep_page(&mut self) -> Result<NicKey> {
        if let Some((_, key)) = &self.page {
            return Ok(*key);
        }
        let memory = Memory::shared(PAGE_BYTES, HugePages::Never);
        let memory = Held::from(memory.map_err(|error| from_host(Code::MemoryCapReached, error))?);
        let (known, key) = self.card.register(memory)?;
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
