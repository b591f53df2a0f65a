//! What an owner offers with a grant, and what of it a request is about.
//!
//! Nothing of it changes while the grant lives, so requests look at it without a lock. Invariants:
//! - pages of a grant are only ever reached through a [`View`] that this module has made of it, from positions in its
//!   order: no id of a page comes from outside;
//! - a grant that says what its pages hold serves nothing to who states another content, or none: [`Given::check`]
//!   looks at each request, whatever its path, before anything of the grant is used.

use crate::MAX_PAGES;
use crate::frame::{Op, Path, Select};
use crate::nics::NicKey;
use crate::pages::PageList;
use crate::ring::Ring;
use kvik_core::{Code, Content, ContentClaim, Error, GrantId, Order, RegionId, Result, Right, Use, View};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

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
    /// Where no NIC knows the memory: what they reach in its place.
    pub ring: Option<Arc<Ring<R>>>,
    /// Paths that do not lead to the memory; by NICs, not without the ring.
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

/// What a request asks of a grant.
pub(crate) struct Request<'a> {
    pub op: Op,
    /// Digest of the layout that the ticket was made for.
    pub layout: &'a [u8; 8],
    pub select: &'a Select,
    /// What the initiator takes the pages to hold, or brings.
    pub claim: Option<&'a ContentClaim>,
    pub confirm: bool,
}

/// A grant as it was given.
pub(crate) struct Given<R> {
    id: GrantId,
    offer: Offer<R>,
    layout: [u8; 8],
}

impl<R> Given<R> {
    /// # Errors
    /// `InvalidArgument` for content that has not a link for each page, or that is of parts of pages: who asks for them
    /// in parts counts from whole ones.
    pub fn new(id: GrantId, offer: Offer<R>) -> Result<Given<R>> {
        let (view, wrong) = (&offer.view, |why: String| Err(Error::new(Code::InvalidArgument, why)));
        match &offer.content {
            Some(_) if view.parts() != 1 => {
                return wrong("a grant with content is of whole pages, not of parts".to_owned());
            }
            Some(content) if content.links() != view.pages().len() => {
                return wrong(format!(
                    "a grant of {} pages takes content of as many links, not of {}",
                    view.pages().len(),
                    content.links()
                ));
            }
            _ => {}
        }
        let layout = offer.view.layout().digest();
        Ok(Given { id, offer, layout })
    }

    pub fn offer(&self) -> &Offer<R> {
        &self.offer
    }

    /// Where its pages lie.
    pub fn place(&self) -> (u32, [u8; 8]) {
        (self.offer.region_id.0, self.layout)
    }

    /// The one check of every request, whatever its path, before anything of the grant is used.
    ///
    /// # Errors
    /// `GrantWrongRight`, `TicketForeign`, `ContentRequired` or `ContentMismatch`; of a grant with content also
    /// `InvalidArgument` and `PageNotGranted` for its positions.
    pub fn check(&self, asked: &Request<'_>) -> Result<()> {
        let (id, right) = (self.id, self.offer.right);
        if matches!((asked.op, right), (Op::Read, Right::Write) | (Op::Write, Right::Read)) {
            let asked = if asked.op == Op::Read { "read" } else { "write" };
            return Err(Error::new(
                Code::GrantWrongRight,
                format!(
                    "grant {id} is for {}, a {asked} was asked for: ask the owner for a {asked} grant",
                    right.name()
                ),
            ));
        }
        if self.layout != *asked.layout {
            return Err(Error::new(
                Code::TicketForeign,
                format!(
                    "the ticket for grant {id} was made for another region or layout: use the ticket of the grant itself"
                ),
            ));
        }
        self.check_content(asked)
    }

    /// Whether what a request states is what the pages hold that it is about.
    ///
    /// # Errors
    /// `ContentRequired`, `ContentMismatch`; `InvalidArgument` for positions that are no range, `PageNotGranted` for
    /// one that goes beyond the grant.
    fn check_content(&self, asked: &Request<'_>) -> Result<()> {
        let wrong = |code, why: &str| Err(Error::new(code, format!("grant {} {why}", self.id)));
        let (content, claim) = match (&self.offer.content, asked.claim) {
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
        let link = match asked.op {
            Op::Read | Op::Write => self.last_page(asked.select)?,
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
        if asked.confirm && matches!(self.offer.uses, Use::Once(_)) && link + 1 < content.links() {
            return wrong(
                Code::ContentMismatch,
                "holds more than this request states, and is used up only by who states all of it: read the beginning \
                 without confirming",
            );
        }
        Ok(())
    }

    /// The last page that is asked for, by its place in the grant.
    fn last_page(&self, select: &Select) -> Result<usize> {
        let pages = self.offer.view.pages().len();
        let Some(list) = &select.positions else { return Ok(pages - 1) };
        let Some(range) = list.as_range() else {
            let text = format!(
                "grant {} says what its pages hold, in their order: name one contiguous range of positions of it",
                self.id
            );
            return Err(Error::new(Code::InvalidArgument, text));
        };
        let times = self.times(select)?;
        match ((range.end - 1) / u64::from(times)) as usize {
            page if page < pages => Ok(page),
            _ => Err(self.beyond(range.end - 1, times)),
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

    fn beyond(&self, position: u64, times: u32) -> Error {
        let text = format!(
            "position {position} was asked for; grant {} has {}",
            self.id,
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
    fn ids(&self, select: &Select) -> Result<Arc<[u32]>> {
        let (granted, times, count) = (self.offer.view.pages(), self.times(select)?, self.count(select)?);
        let at = |position: u64| {
            let page = usize::try_from(position / u64::from(times)).ok().and_then(|at| granted.get(at));
            let page = page.ok_or_else(|| self.beyond(position, times))?;
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

    /// Bytes of page ids that [`Given::select`] makes for a request, beside those of the grant.
    ///
    /// # Errors
    /// As for [`Given::select`].
    pub fn unfolded(&self, select: &Select) -> Result<usize> {
        let view = &self.offer.view;
        view.layout().part_bytes(select.parts.unwrap_or(view.parts()))?;
        let count = match (&select.positions, self.times(select)?) {
            (None, 1) => 0,
            _ => self.count(select)?,
        };
        Ok(count.min(MAX_PAGES + 1) as usize * size_of::<u32>())
    }

    /// The view of what is asked for, all of it inside the grant.
    ///
    /// # Errors
    /// `PageNotGranted` that names the position, layers or slices; `InvalidArgument` for parts that cannot be.
    pub fn select(&self, select: &Select, order: Order) -> Result<View> {
        let (id, whole) = (self.id, &self.offer.view);
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
        let ids = self.ids(select)?;
        View::of_parts(whole.layout().clone(), parts, ids, layers, slices, order)
    }
}
