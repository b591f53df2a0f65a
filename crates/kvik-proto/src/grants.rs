//! The grants that this engine has given: the one place where it is decided whether a request is served.
//!
//! Invariants:
//! - a grant is live, ending (no new flow may join; it waits for its fence, and for the flows that have pins) or gone;
//! - no flow takes part in a grant before it is ready: somebody else still writes or reads its pages until then;
//! - a gone grant leaves a mark that says how it ended, so that a late request gets its own error;
//! - exactly the live grants are due at their expiry, whatever became of earlier ones;
//! - a grant for n readers is consumed when n different engines have confirmed, and n only rises: it is the largest
//!   of what the owner said and of what every request that took part has declared. So no reader that counts on
//!   others to wait for it loses its pages to one that knows of fewer; where readers disagree or die, the grant
//!   ends by its expiry;
//! - a request takes part in a grant from the moment in which it was looked at: [`Grants::admit`] does both at once,
//!   so that an end which comes between them cannot miss it. See [`crate::offer`] for what is looked at.

use crate::FlowKey;
use crate::offer::{Given, Offer, Request};
use kvik_core::{Code, EngineId, Error, GrantId, GrantState, RegionId, Result, Use};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Marks of ended grants that are remembered. Older ones read as unknown.
const MARKS: usize = 1 << 16;

struct Entry<R> {
    given: Arc<Given<R>>,
    /// What the pages wait for has ended. Requests that come before wait.
    ready: bool,
    /// When it ends by itself.
    expires: Duration,
    /// How many engines must confirm; none where the grant is not used up.
    readers: Option<u32>,
    confirmed: BTreeSet<EngineId>,
    flows: BTreeSet<FlowKey>,
    ending: Option<Ending>,
}

/// How a grant ends, and whether its fence is up and its flows were told: its pages are not free before.
struct Ending {
    state: GrantState,
    stopped: bool,
}

/// Why a grant is not given: its id is not new.
pub fn already_given(id: GrantId) -> Error {
    Error::new(Code::InvalidArgument, format!("grant {id} was already given; every grant takes a new id"))
}

/// All grants of an engine.
pub(crate) struct Grants<R> {
    entries: BTreeMap<GrantId, Entry<R>>,
    due: BTreeSet<(Duration, GrantId)>,
    marks: HashMap<GrantId, GrantState>,
    mark_order: VecDeque<GrantId>,
    /// Requests for grants that are not known yet, or not ready.
    parked: HashMap<GrantId, Vec<FlowKey>>,
}

impl<R> Default for Grants<R> {
    fn default() -> Self {
        Grants {
            entries: BTreeMap::new(),
            due: BTreeSet::new(),
            marks: HashMap::new(),
            mark_order: VecDeque::new(),
            parked: HashMap::new(),
        }
    }
}

impl<R: Clone> Grants<R> {
    /// Adds a live grant, ready or not.
    pub fn insert(&mut self, id: GrantId, offer: Offer<R>, ready: bool) -> Result<()> {
        if self.entries.contains_key(&id) || self.marks.contains_key(&id) {
            return Err(already_given(id));
        }
        let (expires, uses) = (offer.expires, offer.uses);
        let given = Arc::new(Given::new(id, offer)?);
        let (confirmed, flows) = (BTreeSet::new(), BTreeSet::new());
        let readers = match uses {
            Use::Once(readers) => Some(readers),
            Use::Many => None,
        };
        self.due.insert((expires, id));
        self.entries.insert(id, Entry { given, ready, expires, readers, confirmed, flows, ending: None });
        Ok(())
    }

    /// What the pages of a grant waited for has ended.
    pub fn set_ready(&mut self, id: GrantId) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.ready = true;
        }
    }

    /// A flow takes part in a live grant, if it may have what it asks for; none where the grant is not known or not
    /// ready.
    ///
    /// # Errors
    /// The way the grant ended; of [`Given::check`].
    pub fn admit(
        &mut self,
        id: GrantId,
        asked: &Request<'_>,
        flow: FlowKey,
    ) -> Result<Option<Arc<Given<R>>>> {
        let Some(entry) = self.entries.get_mut(&id) else {
            return self.marks.get(&id).map_or(Ok(None), |state| Err(ended(id, *state)));
        };
        if let Some(ending) = &entry.ending {
            return Err(ended(id, ending.state));
        }
        if !entry.ready {
            return Ok(None);
        }
        entry.given.check(asked)?;
        entry.flows.insert(flow);
        Ok(Some(entry.given.clone()))
    }

    /// A request that takes part says how many readers the grant is for.
    pub fn count_readers(&mut self, id: GrantId, readers: u16) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.readers = entry.readers.map(|known| known.max(readers.into()));
        }
    }

    /// A request waits for a grant, if it is not known yet, or live and not ready.
    pub fn park(&mut self, id: GrantId, flow: FlowKey) -> bool {
        let waits = match self.entries.get(&id) {
            Some(entry) => !entry.ready && entry.ending.is_none(),
            None => !self.marks.contains_key(&id),
        };
        if waits {
            self.parked.entry(id).or_default().push(flow);
        }
        waits
    }

    /// The requests that waited for a grant.
    pub fn take_parked(&mut self, id: GrantId) -> Vec<FlowKey> {
        self.parked.remove(&id).unwrap_or_default()
    }

    /// A request that waited has ended.
    pub fn forget_parked(&mut self, id: GrantId, flow: FlowKey) {
        if let Some(waiting) = self.parked.get_mut(&id) {
            waiting.retain(|other| *other != flow);
            if waiting.is_empty() {
                self.parked.remove(&id);
            }
        }
    }

    /// A flow takes no further part. Gives the final state when that ended the grant.
    pub fn detach(&mut self, id: GrantId, flow: FlowKey) -> Option<GrantState> {
        self.entries.get_mut(&id)?.flows.remove(&flow);
        self.settle(id)
    }

    /// Whether the grant is over, and this flow is the last that it waits for.
    pub fn waits_for_only(&self, id: GrantId, flow: FlowKey) -> bool {
        let entry = self.entries.get(&id).filter(|entry| entry.ending.is_some());
        entry.is_some_and(|entry| entry.flows.len() == 1 && entry.flows.contains(&flow))
    }

    /// A reader has confirmed: true when it was the last one that the grant was for.
    pub fn confirm(&mut self, id: GrantId, reader: EngineId) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        let Some(readers) = entry.readers else { return false };
        entry.confirmed.insert(reader);
        entry.ending.is_none() && entry.confirmed.len() >= readers as usize
    }

    /// Begins to end a live grant: nothing new joins. Gives the flows that must stop, and the slot to raise; when both
    /// is done, [`Grants::stopped`].
    pub fn end(&mut self, id: GrantId, state: GrantState) -> Option<(Vec<FlowKey>, u32)> {
        let entry = self.entries.get_mut(&id)?;
        if entry.ending.is_some() {
            return None;
        }
        entry.ending = Some(Ending { state, stopped: false });
        self.due.remove(&(entry.expires, id));
        // Those that wait for it to be ready hear of its end too.
        let waiting = self.parked.get(&id).into_iter().flatten();
        Some((entry.flows.iter().chain(waiting).copied().collect(), entry.given.offer().slot))
    }

    /// The fence of an ending grant is up, and its flows were told. Gives the final state when none is left in it.
    pub fn stopped(&mut self, id: GrantId) -> Option<GrantState> {
        self.entries.get_mut(&id)?.ending.as_mut()?.stopped = true;
        self.settle(id)
    }

    /// Lets an ending grant go when no flow is left in it.
    fn settle(&mut self, id: GrantId) -> Option<GrantState> {
        let entry = self.entries.get(&id)?;
        let state = entry.ending.as_ref().filter(|ending| ending.stopped)?.state;
        if !entry.flows.is_empty() {
            return None;
        }
        self.entries.remove(&id);
        if self.marks.insert(id, state).is_none() {
            self.mark_order.push_back(id);
        }
        if self.mark_order.len() > MARKS
            && let Some(oldest) = self.mark_order.pop_front()
        {
            self.marks.remove(&oldest);
        }
        Some(state)
    }

    /// Gives a live grant more time, up to its latest: the new end.
    pub fn extend(&mut self, id: GrantId, by: Duration) -> Result<Duration> {
        let Some(entry) = self.entries.get_mut(&id) else {
            return Err(self.marks.get(&id).map_or_else(|| unknown(id), |state| ended(id, *state)));
        };
        if let Some(ending) = &entry.ending {
            return Err(ended(id, ending.state));
        }
        self.due.remove(&(entry.expires, id));
        entry.expires = entry.expires.saturating_add(by).min(entry.given.offer().latest).max(entry.expires);
        self.due.insert((entry.expires, id));
        Ok(entry.expires)
    }

    /// When the next live grant ends by itself.
    pub fn next_due(&self) -> Option<Duration> {
        self.due.first().map(|(at, _)| *at)
    }

    /// A live grant whose time is over.
    pub fn overdue(&self, now: Duration) -> Option<GrantId> {
        self.due.first().filter(|(at, _)| *at <= now).map(|(_, id)| *id)
    }

    /// Where a grant stands; `None` when it is unknown.
    pub fn state(&self, id: GrantId) -> Option<GrantState> {
        match self.entries.get(&id) {
            Some(entry) => Some(entry.ending.as_ref().map_or(GrantState::Live, |ending| ending.state)),
            None => self.marks.get(&id).copied(),
        }
    }

    /// The grants over a region.
    pub fn of_region(&self, region: RegionId) -> Vec<GrantId> {
        self.entries
            .iter()
            .filter(|(_, entry)| entry.given.offer().region_id == region)
            .map(|(id, _)| *id)
            .collect()
    }

    /// All grants that have not ended.
    pub fn all(&self) -> Vec<GrantId> {
        self.entries.keys().copied().collect()
    }

    /// The pages of a grant that has not ended, and the flows that take part in it.
    pub fn held(&self, id: GrantId) -> Option<(Arc<Given<R>>, Vec<FlowKey>)> {
        self.entries.get(&id).map(|entry| (entry.given.clone(), entry.flows.iter().copied().collect()))
    }

    /// Pages of grants that are ending and that a flow still takes part in, each counted once, whatever part of it
    /// is meant and in however many grants it is.
    pub fn quarantined(&self) -> u64 {
        let ending = self.entries.values().filter(|entry| entry.ending.is_some());
        let pages = ending.flat_map(|entry| {
            let (view, place) = (&entry.given.offer().view, entry.given.place());
            view.pages().iter().map(move |id| (place, id / view.parts()))
        });
        pages.collect::<HashSet<_>>().len() as u64
    }

    /// Pages of a grant that is ending and that a flow still takes part in, counted likewise.
    pub fn ending(&self, id: GrantId) -> Option<u64> {
        let view = &self.entries.get(&id).filter(|entry| entry.ending.is_some())?.given.offer().view;
        let pages: HashSet<u32> = view.pages().iter().map(|id| id / view.parts()).collect();
        Some(pages.len() as u64)
    }

    /// Number of grants that have not ended.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Why a request was not admitted, for who cannot wait.
    pub fn why_not_admitted(&self, id: GrantId) -> Error {
        if !self.entries.contains_key(&id) {
            return unknown(id);
        }
        let text = format!(
            "the pages of grant {id} are still in use by a device: wait for it before a transfer within one engine"
        );
        Error::new(Code::GrantUnknown, text)
    }
}

/// The error for a request on a grant that is neither there nor remembered.
pub(crate) fn unknown(id: GrantId) -> Error {
    let text =
        format!("the owner does not know grant {id}: it never gave it, or forgot it long after its end");
    Error::new(Code::GrantUnknown, text)
}

/// The error for a request on a grant that ended this way.
pub(crate) fn ended(id: GrantId, state: GrantState) -> Error {
    let (code, why) = match state {
        GrantState::Consumed => (Code::GrantConsumed, "every reader that it was for has confirmed"),
        GrantState::Expired => (Code::GrantExpired, "its time is over; ask for a longer expiry or extend it"),
        GrantState::Revoked => (Code::GrantRevoked, "the owner took it back"),
        GrantState::Closed | GrantState::Live => (Code::RegionClosed, "its region or engine was closed"),
    };
    Error::new(code, format!("grant {id} has ended: {why}; the pages belong to the owner again"))
}
