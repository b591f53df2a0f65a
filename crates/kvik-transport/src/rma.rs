//! One-sided operations of NICs as a transport, whatever library speaks to them: which peers they reach, and which
//! memory they know.

use crate::basics::lock;
use crate::nics::{Command, NicOptions, NicPool, NicStats};
use crate::pace::Pace;
use crate::{Answer, Moved, Queue, RegionMemory, Request, Services, Transport, TransportId, from_host};
use kvik_core::{Code, RegionId, Result};
use kvik_host::thread::ThreadOptions;
use kvik_host::{HugePages, Memory};
use kvik_proto::{Facts, NicAnswer, NicCall, NicKey, Nics, Op, Path, Ring};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Bytes of a slot of the ring for peers: a chunk of a large transfer.
const SLOT: u64 = 512 << 10;
/// Its slots: half of them are one peer's while no other wants any.
const SLOTS: usize = 16;

/// The NICs of an engine: this side's ones read from and write to memory of peers, whose processors know of nothing.
pub struct Rma {
    pool: NicPool,
    sessions: Mutex<HashMap<u64, Session>>,
    regions: Mutex<HashMap<RegionId, Known>>,
    /// What peers reach in place of pages that the NICs do not, made when the first such region registers.
    ring: Mutex<Option<Arc<Ring<RegionMemory>>>>,
}

struct Session {
    /// Why the NICs do not reach the peer's, where they do not.
    why_not: Option<Arc<str>>,
    pace: Pace,
}

/// A region as the NICs know it.
struct Known {
    /// What stands for its memory there.
    name: usize,
    reach: Reach,
}

/// How NICs come to a region's pages.
enum Reach {
    /// By themselves: how each of them knows the memory.
    Direct(Arc<[NicKey]>),
    /// Through page-locked memory, and why not by themselves. For transfers that peers begin there is a ring that their
    /// NICs reach, unless the NICs of this side did not take it.
    Staged(Arc<str>, Option<Arc<Ring<RegionMemory>>>),
    /// Not at all, and why.
    No(Arc<str>),
}

impl Rma {
    /// Opens the NICs, in so many threads, or in one for each where there are fewer of them.
    ///
    /// # Errors
    /// `TransportUnavailable`: no library, no such NIC, or one that cannot be opened.
    pub fn start(options: &NicOptions, count: usize, threads: &ThreadOptions) -> Result<Rma> {
        let pool = NicPool::start(options, count, threads)?;
        Ok(Rma { pool, sessions: Mutex::default(), regions: Mutex::default(), ring: Mutex::default() })
    }

    /// Begins to serve.
    pub fn serve(&self, services: &Services) {
        self.pool.serve(&Arc::new(services.clone()));
    }

    /// What peers are told of the NICs.
    pub fn nics(&self) -> Nics {
        self.pool.told.nics()
    }

    /// Whether the NICs reach those of a session's peer.
    pub fn reaches(&self, session: u64) -> bool {
        lock(&self.sessions).get(&session).is_some_and(|session| session.why_not.is_none())
    }

    /// How each NIC knows a region; none for one that they do not know.
    pub fn keys(&self, region: RegionId) -> Arc<[NicKey]> {
        let regions = lock(&self.regions);
        match regions.get(&region).map(|known| &known.reach) {
            Some(Reach::Direct(keys)) => keys.clone(),
            _ => Arc::default(),
        }
    }

    /// What peers' NICs reach in place of a region's pages, where they need it and there is one.
    pub fn ring(&self, region: RegionId) -> Option<Arc<Ring<RegionMemory>>> {
        match &lock(&self.regions).get(&region)?.reach {
            Reach::Staged(_, ring) => ring.clone(),
            Reach::Direct(_) | Reach::No(_) => None,
        }
    }

    /// The ring for peers. None where the NICs do not take it: the regions' pages go to peers over another transport.
    fn ring_for_peers(&self, limit: Duration) -> Option<Arc<Ring<RegionMemory>>> {
        let mut ring = lock(&self.ring);
        if ring.is_none() {
            let memory = Memory::shared(SLOTS * SLOT as usize, HugePages::Auto);
            let made = memory.map_err(|error| from_host(Code::MemoryCapReached, error)).and_then(|memory| {
                let memory = RegionMemory::from(memory);
                let keys = self.pool.register(&memory, limit)?;
                Ok(Ring::new(memory, keys, SLOTS, SLOT))
            });
            match made {
                Ok(made) => *ring = Some(made),
                Err(error) => {
                    log::warn!("peers' NICs have no ring here in place of memory of devices: {error}")
                }
            }
        }
        ring.clone()
    }

    /// How NICs come to a region, of which they have not heard before.
    fn reach(&self, region: RegionId, memory: &RegionMemory, limit: Duration) -> Result<Reach> {
        let began = Instant::now();
        match self.pool.register(memory, limit) {
            Ok(keys) => Ok(Reach::Direct(keys)),
            // Its pages move all the same.
            Err(error) if memory.device().is_some() => {
                let why = format!("region {} is not known to the NICs: {}", region.0, error.text);
                log::info!("{why}");
                Ok(self.staged(memory, why.into(), limit.saturating_sub(began.elapsed())))
            }
            Err(error) => Err(error),
        }
    }

    /// The same of memory of a device that they do not know, for this reason.
    fn staged(&self, memory: &RegionMemory, why: Arc<str>, limit: Duration) -> Reach {
        let began = Instant::now();
        match self.pool.stage(memory, limit) {
            Ok(()) => Reach::Staged(why, self.ring_for_peers(limit.saturating_sub(began.elapsed()))),
            Err(error) => {
                let why = format!("{why}; nor can it go through page-locked memory: {}", error.text);
                log::info!("{why}");
                Reach::No(why.into())
            }
        }
    }

    /// The NICs of a session's peer have other addresses.
    pub fn find_again(&self, session: u64) {
        self.pool.tell(|| Command::Find(session));
    }

    /// A NIC of a peer wants a connection to one of these. The answer, where none of them will give it.
    pub fn called(&self, session: u64, call: NicCall) -> Option<NicAnswer> {
        self.pool.called(session, call)
    }

    /// A peer has answered one of these.
    pub fn answered(&self, session: u64, answer: NicAnswer) {
        self.pool.answered(session, answer);
    }

    fn why_not(&self, peer: &Facts) -> Option<Arc<str>> {
        let own = self.pool.told.nics();
        let text = match peer.nics.provider.as_str() {
            _ if own.reach(&peer.nics) => return None,
            "" => "the peer has no NICs for it: set `nics` (KVIK_NICS) there".into(),
            other => format!("this engine has NICs of {:?}, and the peer of {other:?}", own.provider),
        };
        Some(text.into())
    }
}

impl Transport for Rma {
    fn id(&self) -> TransportId {
        self.pool.transport
    }

    fn path(&self) -> Path {
        Path::OneSided
    }

    fn add_session(&self, session: u64, peer: &Facts) {
        let state = Session { why_not: self.why_not(peer), pace: Pace::default() };
        lock(&self.sessions).insert(session, state);
    }

    fn end_session(&self, session: u64) {
        lock(&self.sessions).remove(&session);
        self.pool.tell(|| Command::Forget(session));
    }

    fn register(&self, region: RegionId, memory: &RegionMemory, limit: Duration) -> Result<()> {
        // One that was withdrawn and is still held.
        if let Some(known) = lock(&self.regions).get(&region) {
            match known.reach {
                Reach::Direct(_) => self.pool.tell(|| Command::Keep(known.name)),
                Reach::Staged(..) => self.pool.stage_again(memory),
                Reach::No(_) => {}
            }
            return Ok(());
        }
        let reach = self.reach(region, memory, limit)?;
        lock(&self.regions).insert(region, Known { name: memory.name(), reach });
        Ok(())
    }

    fn withdraw(&self, region: RegionId, limit: Duration) {
        let regions = lock(&self.regions);
        let known = regions.get(&region).filter(|known| !matches!(known.reach, Reach::No(_)));
        let name = known.map(|known| known.name);
        drop(regions);
        if let Some(name) = name {
            self.pool.unregister(name, limit);
        }
    }

    fn forget(&self, region: RegionId) {
        lock(&self.regions).remove(&region);
    }

    fn closed(&self, region: RegionId, _memory: &RegionMemory, _op: Op) -> Option<Arc<str>> {
        lock(&self.regions).get(&region).and_then(|known| match &known.reach {
            Reach::Direct(_) => None,
            Reach::Staged(why, _) | Reach::No(why) => Some(why.clone()),
        })
    }

    fn answer(&self, request: &Request<'_>) -> Answer {
        let closed = request.memory.and_then(|(region, _)| match lock(&self.regions).get(&region)?.reach {
            Reach::No(ref why) => Some(why.clone()),
            Reach::Direct(_) | Reach::Staged(..) => None,
        });
        let sessions = lock(&self.sessions);
        let Some(session) = sessions.get(&request.session) else {
            return Answer::No("the session with the peer has ended".into());
        };
        match session.why_not.clone().or(closed) {
            Some(why) => Answer::No(why),
            None => Answer::Ready(session.pace.estimate(request.bytes)),
        }
    }

    fn warm(&self, session: u64, until: Instant) {
        if self.reaches(session) {
            self.pool.tell(|| Command::WarmUp(session, until));
        }
    }

    fn wake(&self, queue: Queue) {
        if let Queue::Post(session) = queue {
            self.pool.tell(|| Command::Post(session));
        }
    }

    /// NICs' threads look at all that they have in flight.
    fn cancel(&self, _session: u64) {
        self.pool.tell(|| Command::Halt);
    }

    fn fence(&self, session: u64) {
        self.pool.fence(session);
    }

    fn expose(&self, transfers: usize) {
        if self.pool.told.expose(transfers) {
            self.pool.tell(|| Command::Expose);
        }
    }

    fn mechanism(&self, of: &Moved<'_>) -> String {
        let regions = lock(&self.regions);
        let reach = |region| regions.get(&region).map(|known: &Known| &known.reach);
        let mut text = self.pool.mechanism.clone();
        if of.staged_there {
            text += ", through a ring of the owner's";
        }
        if let Some((region, memory)) = of.request.memory
            && let (Some(Reach::Staged(why, _)), Some(device)) = (reach(region), memory.device())
        {
            text += &format!(", staged for {device}: {why}");
        }
        text
    }

    fn measured(&self, session: u64, bytes: u64, took: Duration) {
        if let Some(session) = lock(&self.sessions).get_mut(&session) {
            session.pace.add(bytes, took);
        }
    }

    fn devices(&self) -> &[Arc<NicStats>] {
        &self.pool.stats
    }

    fn stop(&self) {
        self.pool.stop();
    }
}
