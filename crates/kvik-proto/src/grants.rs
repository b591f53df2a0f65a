//! The grants that this engine has given: the one place where it is decided whether a request is served.
//!
//! Invariants:
//! - a grant is live, ending (no new flow may join; it waits for the flows that have pins) or gone;
//! - a gone grant leaves a mark that says how it ended, so that a late request gets its own error;
//! - exactly the live grants are due at their expiry, whatever became of earlier ones;
//! - a grant for n readers is consumed when n different engines have confirmed, and n only rises: it is the largest
//!   of what the owner said and of what every request that took part has declared. So no reader that counts on
//!   others to wait for it loses its pages to one that knows of fewer; where readers disagree or die, the grant
//!   ends by its expiry;
//! - pages of a grant are only ever reached through a [`View`] that this module has made of it, from positions in its
//!   order: no id of a page comes from outside;
//! - a grant that says what its pages hold serves nothing to who states another content, or none: [`Grants::admit`]
//!   looks at each request, whatever its path, before anything of the grant is used.

use crate::frame::{Op, Path, Select};
use crate::nics::NicKey;
use crate::pages::PageList;
use crate::{FlowKey, MAX_PAGES};
use kvik_core::{
    Code, Content, ContentClaim, EngineId, Error, GrantId, GrantState, Order, RegionId, Result, Right, Use,
    View,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Marks of ended grants that are remembered. Older ones read as unknown.
const MARKS: usize = 1 << 16;

/// What the owner offers with a grant.
#[derive(Debug, Clone)]
pub struct Offer<R> {
    /// The memory.
    pub region: R,
    /// Its id.
    pub region_id: RegionId,
    /// The pages.
    pub view: View,
    /// What they hold, a link for each page; none where the owner does not say.
    pub content: Option<Content>,
    /// What may be done.
    pub right: Right,
    /// How often.
    pub uses: Use,
    /// When it ends by itself.
    pub expires: Duration,
    /// No extension goes beyond this.
    pub latest: Duration,
    /// The fence slot that is raised when it ends.
    pub slot: u32,
    /// The slot's generation while the grant lives.
    pub generation: u64,
    /// How each of this engine's NICs knows the memory; none where no NIC does.
    pub keys: Arc<[NicKey]>,
    /// Paths that do not lead to the memory.
    pub closed: Closed,
}

/// Why peers cannot take another path than channels to the memory of a grant, where they cannot. The initiator knows
/// nothing of the owner's memory before it asks, so the owner refuses it with the reason, before anything has moved.
#[derive(Debug, Clone, Default)]
pub struct Closed {
    /// Why no copy within the host reaches it.
    pub memory: Option<Arc<str>>,
    /// Why no NIC does.
    pub nics: Option<Arc<str>>,
}

impl Closed {
    /// # Errors
    /// `TransportUnavailable`: the path does not lead there, and why.
    pub(crate) fn check(&self, path: Path) -> Result<()> {
        let why = match path {
            Path::Channels => &None,
            Path::Memory => &self.memory,
            Path::OneSided => &self.nics,
        };
        why.as_ref().map_or(Ok(()), |why| Err(Error::new(Code::TransportUnavailable, why.to_string())))
    }
}

struct Entry<R> {
    offer: Offer<R>,
    layout: [u8; 8],
    /// How many engines must confirm; none where the grant is not used up.
    readers: Option<u32>,
    confirmed: BTreeSet<EngineId>,
    flows: BTreeSet<FlowKey>,
    ending: Option<GrantState>,
}

impl<R> Entry<R> {
    /// Whether what a request states is what the pages hold that it is about.
    ///
    /// # Errors
    /// `ContentRequired`, `ContentMismatch`; `InvalidArgument` for positions that are no range, `PageNotGranted` for
    /// one that goes beyond the grant.
    fn check_content(
        &self,
        id: GrantId,
        op: Op,
        select: &Select,
        claim: Option<&ContentClaim>,
        confirm: bool,
    ) -> Result<()> {
        let wrong = |code, why: &str| Err(Error::new(code, format!("grant {id} {why}")));
        let (content, claim) = match (&self.offer.content, claim) {
            (None, None) => return Ok(()),
            (None, Some(_)) => {
                return wrong(
                    Code::ContentMismatch,
                    "does not say what its pages hold, and this request takes them to hold something: ask the owner for \
                     a grant with `content`",
                );
            }
            (Some(_), None) => {
                return wrong(
                    Code::ContentRequired,
                    "says what its pages hold: state what you take them to hold, as `content`",
                );
            }
            (Some(content), Some(claim)) => (content, claim),
        };
        let link = match op {
            Op::Read | Op::Write => self.last_page(id, select)?,
            Op::Confirm | Op::Extend => content.links() - 1,
        };
        if content.claim(link).as_ref() != Some(claim) {
            return wrong(
                Code::ContentMismatch,
                "holds other content than this request states (another prompt, order, model, salt, adapter, or part of \
                 the KV): do not use its pages for it, compute them",
            );
        }
        // Other prompts may share a beginning: theirs to read, and not theirs to use up.
        if confirm && self.readers.is_some() && link + 1 < content.links() {
            return wrong(
                Code::ContentMismatch,
                "holds more than this request states, and is used up only by who states all of it: read the beginning \
                 without confirming",
            );
        }
        Ok(())
    }

    /// The last page that is asked for, by its place in the grant.
    fn last_page(&self, id: GrantId, select: &Select) -> Result<usize> {
        let pages = self.offer.view.pages().len();
        let Some(list) = &select.positions else { return Ok(pages - 1) };
        let Some(range) = list.as_range() else {
            let text = format!(
                "grant {id} says what its pages hold, in their order: name one contiguous range of positions of it"
            );
            return Err(Error::new(Code::InvalidArgument, text));
        };
        let times = self.times(select)?;
        match ((range.end - 1) / u64::from(times)) as usize {
            page if page < pages => Ok(page),
            _ => Err(self.beyond(id, range.end - 1, times)),
        }
    }

    /// In how many parts a request sees each page, or part of one, that is granted.
    fn times(&self, select: &Select) -> Result<u32> {
        let granted = self.offer.view.parts();
        match select.parts.unwrap_or(granted) {
            0 => Err(Error::new(Code::InvalidArgument, "a page is not seen in 0 parts: it takes at least 1")),
            parts if parts.is_multiple_of(granted) => Ok(parts / granted),
            parts => {
                let text = format!(
                    "the grant is of pages in {granted} parts: it is seen in {granted} or a multiple of that, not in {parts}"
                );
                Err(Error::new(Code::InvalidArgument, text))
            }
        }
    }

    fn beyond(&self, id: GrantId, position: u64, times: u32) -> Error {
        let text = format!(
            "position {position} was asked for; grant {id} has {}",
            self.offer.view.pages().len() as u64 * u64::from(times)
        );
        Error::new(Code::PageNotGranted, text)
    }

    /// How many ids of pages, or of parts of them, a request is about.
    fn count(&self, select: &Select) -> Result<u64> {
        let whole = &self.offer.view;
        let all = whole.pages().len() as u64 * u64::from(self.times(select)?);
        let named = select.positions.as_ref().map(PageList::count);
        match named {
            Some(named) if named > all => Err(Error::new(
                Code::PageNotGranted,
                format!("{named} pages were asked for where there are {all}"),
            )),
            None if all > MAX_PAGES && all > whole.pages().len() as u64 => Err(Error::new(
                Code::InvalidArgument,
                "the grant has more parts of pages than one transfer takes: name some of them",
            )),
            named => Ok(named.unwrap_or(all)),
        }
    }

    /// The ids of what is asked for.
    fn ids(&self, id: GrantId, select: &Select) -> Result<Arc<[u32]>> {
        let (granted, times, count) = (self.offer.view.pages(), self.times(select)?, self.count(select)?);
        let at = |position: u64| {
            let page = usize::try_from(position / u64::from(times)).ok().and_then(|at| granted.get(at));
            let page = page.ok_or_else(|| self.beyond(id, position, times))?;
            let part = (position % u64::from(times)) as u32;
            page.checked_mul(times).and_then(|first| first.checked_add(part)).ok_or_else(|| {
                Error::new(Code::InvalidArgument, "the layout has too many pages to be seen in so many parts")
            })
        };
        match &select.positions {
            None if times == 1 => Ok(granted.clone()),
            None => (0..count).map(at).collect(),
            Some(list) => list.expand(MAX_PAGES)?.iter().map(|position| at((*position).into())).collect(),
        }
    }
}

/// All grants of an engine.
pub(crate) struct Grants<R> {
    entries: BTreeMap<GrantId, Entry<R>>,
    due: BTreeSet<(Duration, GrantId)>,
    marks: HashMap<GrantId, GrantState>,
    mark_order: VecDeque<GrantId>,
    /// Requests for grants that are not known yet.
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
    /// Adds a live grant.
    pub fn insert(&mut self, id: GrantId, offer: Offer<R>) -> Result<()> {
        if self.entries.contains_key(&id) || self.marks.contains_key(&id) {
            return Err(Error::new(
                Code::InvalidArgument,
                format!("grant {id} was already given; every grant takes a new id"),
            ));
        }
        check_links(&offer.view, offer.content.as_ref())?;
        let layout = offer.view.layout().digest();
        let (confirmed, flows) = (BTreeSet::new(), BTreeSet::new());
        let readers = match offer.uses {
            Use::Once(readers) => Some(readers),
            Use::Many => None,
        };
        let entry = Entry { offer, layout, readers, confirmed, flows, ending: None };
        self.due.insert((entry.offer.expires, id));
        self.entries.insert(id, entry);
        Ok(())
    }

    /// The offer of a live grant, to a request that may have what it asks for.
    ///
    /// # Errors
    /// The way the grant ended, `GrantUnknown`, `GrantWrongRight`, `TicketForeign`, `ContentRequired` or
    /// `ContentMismatch`; of a grant with content also `InvalidArgument` and `PageNotGranted` for its positions.
    pub fn admit(
        &self,
        id: GrantId,
        op: Op,
        layout: &[u8; 8],
        select: &Select,
        claim: Option<&ContentClaim>,
        confirm: bool,
    ) -> Result<&Offer<R>> {
        let Some(entry) = self.entries.get(&id) else { return Err(self.why_gone(id)) };
        if let Some(state) = entry.ending {
            return Err(ended(id, state));
        }
        let right = entry.offer.right;
        if matches!((op, right), (Op::Read, Right::Write) | (Op::Write, Right::Read)) {
            let asked = if op == Op::Read { "read" } else { "write" };
            return Err(Error::new(
                Code::GrantWrongRight,
                format!(
                    "grant {id} is for {}, a {asked} was asked for: ask the owner for a {asked} grant",
                    right.name()
                ),
            ));
        }
        if entry.layout != *layout {
            return Err(Error::new(
                Code::TicketForeign,
                format!(
                    "the ticket for grant {id} was made for another region or layout: use the ticket of the grant itself"
                ),
            ));
        }
        entry.check_content(id, op, select, claim, confirm)?;
        Ok(&entry.offer)
    }

    /// Bytes of page ids that [`Grants::select`] makes for a request, beside those of the grant.
    ///
    /// # Errors
    /// As for [`Grants::select`].
    pub fn unfolded(&self, id: GrantId, select: &Select) -> Result<usize> {
        let entry = self.entries.get(&id).ok_or_else(|| self.why_gone(id))?;
        entry.offer.view.layout().part_bytes(select.parts.unwrap_or(entry.offer.view.parts()))?;
        let count = match (&select.positions, entry.times(select)?) {
            (None, 1) => 0,
            _ => entry.count(select)?,
        };
        Ok(count.min(MAX_PAGES + 1) as usize * size_of::<u32>())
    }

    /// The view of what is asked for, all of it inside the grant.
    ///
    /// # Errors
    /// `PageNotGranted` that names the position, layers or slices; `InvalidArgument` for parts that cannot be.
    pub fn select(&self, id: GrantId, select: &Select, order: Order) -> Result<View> {
        let entry = self.entries.get(&id).ok_or_else(|| self.why_gone(id))?;
        let whole = &entry.offer.view;
        let inside = |what: &str, asked: &Option<Range<u32>>, granted: Range<u32>| match asked {
            None => Ok(granted),
            Some(asked) if asked.start >= granted.start && asked.end <= granted.end => Ok(asked.clone()),
            Some(asked) => Err(Error::new(
                Code::PageNotGranted,
                format!(
                    "{what} {}..{} were asked for; grant {id} covers {}..{}",
                    asked.start, asked.end, granted.start, granted.end
                ),
            )),
        };
        let layers = inside("layers", &select.layers, whole.layers())?;
        let slices = inside("slices", &select.slices, whole.slices())?;
        let parts = select.parts.unwrap_or(whole.parts());
        whole.layout().part_bytes(parts)?;
        let ids = entry.ids(id, select)?;
        View::of_parts(whole.layout().clone(), parts, ids, layers, slices, order)
    }

    /// A request waits for a grant that is not known yet.
    pub fn park(&mut self, id: GrantId, flow: FlowKey) {
        self.parked.entry(id).or_default().push(flow);
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

    /// A flow takes part in the grant, one of so many readers by its own account.
    pub fn attach(&mut self, id: GrantId, flow: FlowKey, readers: u16) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.flows.insert(flow);
            entry.readers = entry.readers.map(|known| known.max(readers.into()));
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

    /// Begins to end a live grant: nothing new joins. Gives the flows that must stop, and the slot to raise.
    pub fn end(&mut self, id: GrantId, state: GrantState) -> Option<(Vec<FlowKey>, u32)> {
        let entry = self.entries.get_mut(&id)?;
        if entry.ending.is_some() {
            return None;
        }
        entry.ending = Some(state);
        self.due.remove(&(entry.offer.expires, id));
        Some((entry.flows.iter().copied().collect(), entry.offer.slot))
    }

    /// Lets an ending grant go when no flow is left in it.
    pub fn settle(&mut self, id: GrantId) -> Option<GrantState> {
        let entry = self.entries.get(&id)?;
        let state = entry.ending?;
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
        let gone = self.why_gone(id);
        let Some(entry) = self.entries.get_mut(&id) else { return Err(gone) };
        if let Some(state) = entry.ending {
            return Err(ended(id, state));
        }
        let offer = &mut entry.offer;
        self.due.remove(&(offer.expires, id));
        offer.expires = offer.expires.saturating_add(by).min(offer.latest).max(offer.expires);
        self.due.insert((offer.expires, id));
        Ok(offer.expires)
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
            Some(entry) => Some(entry.ending.unwrap_or(GrantState::Live)),
            None => self.marks.get(&id).copied(),
        }
    }

    /// The grants over a region.
    pub fn of_region(&self, region: RegionId) -> Vec<GrantId> {
        self.entries.iter().filter(|(_, entry)| entry.offer.region_id == region).map(|(id, _)| *id).collect()
    }

    /// All grants that have not ended.
    pub fn all(&self) -> Vec<GrantId> {
        self.entries.keys().copied().collect()
    }

    /// The pages of a grant that has not ended, and the flows that take part in it.
    pub fn held(&self, id: GrantId) -> Option<(&View, &BTreeSet<FlowKey>)> {
        self.entries.get(&id).map(|entry| (&entry.offer.view, &entry.flows))
    }

    /// Pages of grants that are ending and that a flow still takes part in, each counted once, whatever part of it
    /// is meant and in however many grants it is.
    pub fn quarantined(&self) -> u64 {
        let ending = self.entries.values().filter(|entry| entry.ending.is_some());
        let pages = ending.flat_map(|entry| {
            let (view, place) = (&entry.offer.view, (entry.offer.region_id.0, entry.layout));
            view.pages().iter().map(move |id| (place, id / view.parts()))
        });
        pages.collect::<HashSet<_>>().len() as u64
    }

    /// Pages of a grant that is ending and that a flow still takes part in, counted likewise.
    pub fn ending(&self, id: GrantId) -> Option<u64> {
        let view = &self.entries.get(&id).filter(|entry| entry.ending.is_some())?.offer.view;
        let pages: HashSet<u32> = view.pages().iter().map(|id| id / view.parts()).collect();
        Some(pages.len() as u64)
    }

    /// Number of grants that have not ended.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    fn why_gone(&self, id: GrantId) -> Error {
        match self.marks.get(&id) {
            Some(state) => ended(id, *state),
            None => Error::new(
                Code::GrantUnknown,
                format!(
                    "the owner does not know grant {id}: it never gave it, or forgot it long after its end"
                ),
            ),
        }
    }
}

/// Content has a link for each page of its grant, and pages are whole: who asks for them in parts counts from there.
fn check_links(view: &View, content: Option<&Content>) -> Result<()> {
    let wrong = |why: String| Err(Error::new(Code::InvalidArgument, why));
    match content {
        Some(_) if view.parts() != 1 => {
            wrong("a grant with content is of whole pages, not of parts".to_owned())
        }
        Some(content) if content.links() != view.pages().len() => wrong(format!(
            "a grant of {} pages takes content of as many links, not of {}",
            view.pages().len(),
            content.links()
        )),
        _ => Ok(()),
    }
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
