//! A get, on the client's side: blocks are read window by window, and each is compared as it comes.
//!
//! Invariants:
//! - What is counted was compared with the checksum that the store has of it.
//! - When a get has ended, or was given up, nothing lands in the caller's pages any more, and what the store has lent is
//!   given back: what is read by then, what is not ([`Borrowed`]), and what is still on its way ([`Answer`]).

use crate::choice::Gauge;
use crate::early::{Early, Like, reading};
#[cfg(doc)]
use crate::link::Answer;
use crate::link::{Answers, Link, give_back, unexpected};
use crate::sums::sums_after;
use crate::windows::Windows;
use crate::wire::{Get, Lending, Request, Response};
use crate::{BlockKey, NamespaceId, Shape};
use kvik_core::{Code, Error, Result, Ticket};
use kvik_engine::{Engine, PageSet, Transfer};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Windows that are begun before one is waited for: with one more each time there are soon enough, and the first block is
/// not kept waiting for the beginning of all of them.
const BEGUN: usize = 2;

/// A get from one store that was begun: blocks come in their order.
pub(crate) struct Reading {
    engine: Engine,
    /// None when the get was given up.
    answers: Option<Answers>,
    /// The first block's read, until the store has answered.
    early: Option<Early>,
    like: Like,
    pages: PageSet,
    windows: Windows,
    part: Option<Part>,
    more: bool,
    moving: VecDeque<Moving>,
    verified: usize,
    gauge: Option<Gauge>,
    /// What [`Reading::pump`] has met, for who waits next.
    failed: Option<Error>,
}

/// Blocks that are asked for, and the pages that they are for.
pub(crate) struct Wanted<'a> {
    pub namespace: NamespaceId,
    pub shape: Shape,
    pub keys: &'a [BlockKey],
    pub pages: &'a PageSet,
}

/// What the store lends at once.
struct Part {
    /// Of each block its group, and its checksum.
    blocks: Vec<(u16, u64)>,
    groups: Vec<Lent>,
    /// Where its blocks begin among the keys.
    first: usize,
    /// Blocks of it that were begun to read.
    begun: usize,
}

/// Blocks of one grant.
struct Lent {
    /// None when all of its positions were asked for: then the transfers have it.
    grant: Option<Arc<Borrowed>>,
    /// How many of its positions were asked for, and how many it has.
    asked: u32,
    all: u32,
}

/// A grant of the store. When nobody reads by it any more, it is given back.
struct Borrowed {
    engine: Engine,
    ticket: Ticket,
    /// A transfer has done so.
    confirmed: bool,
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        if !self.confirmed {
            give_back(&self.ticket, &self.engine);
        }
    }
}

/// Blocks of one grant that are read at once: their positions in it, and of each its place and checksum.
#[derive(Default)]
struct Named {
    positions: Vec<u32>,
    places: Vec<(usize, u64)>,
}

/// Blocks that are on their way.
struct Moving {
    count: usize,
    groups: Vec<Group>,
}

/// Those of one grant.
struct Group {
    into: PageSet,
    /// Of each block its place among the keys, and its checksum.
    places: Vec<(usize, u64)>,
    transfer: Transfer,
    /// Given back after the last of its transfers, which confirms it where it is the only one.
    grant: Arc<Borrowed>,
    alone: bool,
    finished: bool,
}

impl Reading {
    /// Asks one store for blocks.
    ///
    /// # Errors
    /// The request could not be sent.
    pub fn begin_at(
        (engine, link, like): (&Engine, &Link, &Like),
        wanted: &Wanted<'_>,
        deadline: Duration,
        gauge: Option<Gauge>,
    ) -> Result<Reading> {
        let expected = match link {
            Link::Remote(remote) => like.next(remote.peer()?, deadline),
            // The store is this engine, which lends before this goes on.
            Link::Embedded(..) => None,
        };
        let ahead = expected.as_ref().map(|(ahead, _)| *ahead);
        let Wanted { namespace, shape, keys, pages } = *wanted;
        let request = Request::Get(Get { namespace, keys: keys.to_vec(), expiry: deadline, ahead });
        let answers = link.ask(request, deadline)?;
        // Behind the request: the store looks for the block meanwhile. Why it cannot begin, the read that comes in its
        // place says.
        let early = expected.and_then(|(_, ticket)| Early::begin(engine, ticket, pages, deadline).ok());
        let all = (answers, early, like.clone());
        Ok(Reading::new(engine.clone(), all, pages.clone(), shape.bytes(), gauge))
    }

    fn new(
        engine: Engine,
        (answers, early, like): (Answers, Option<Early>, Like),
        pages: PageSet,
        block_bytes: u64,
        gauge: Option<Gauge>,
    ) -> Reading {
        let (answers, windows, moving) = (Some(answers), Windows::new(block_bytes), VecDeque::new());
        let (part, more, verified, failed) = (None, true, 0, None);
        Reading { engine, answers, early, like, pages, windows, part, more, moving, verified, gauge, failed }
    }

    /// Waits for more blocks, with `None` as long as the deadline takes: how many are there now and verified, from the
    /// first key on; none when no more come.
    ///
    /// # Errors
    /// What the store says, `StoreUnavailable`, what a transfer can say; `WaitTimeout` when `timeout` passes first.
    /// `ChecksumMismatch` for a block that is not what was stored. Blocks that were verified before are good.
    pub fn next(&mut self, timeout: Option<Duration>) -> Result<Option<usize>> {
        let began = Instant::now();
        let there = self.wait_for_more(timeout);
        if let Some(gauge) = &mut self.gauge {
            gauge.waited += began.elapsed();
        }
        if let Ok(None) = there
            && let Some(gauge) = self.gauge.take()
        {
            gauge.ended(self.verified as u64 * self.windows.block_bytes());
        }
        there
    }

    /// It has not brought what it was waited for: a store that has not answered at all counts as one that does not.
    pub fn late(&self, name: &str) -> Error {
        match (&self.answers, &self.part) {
            (Some(answers), None) => answers.late(),
            _ => Error::new(
                Code::DeadlineExceeded,
                format!("blocks of the store's server {name} came too slowly"),
            ),
        }
    }

    /// Begins to read what was lent by now, and waits for nothing: a get of which this is a part waits for another one.
    pub fn pump(&mut self) {
        if self.failed.is_none()
            && let Err(error) = self.fill(Some(Instant::now()))
            && error.code != Code::WaitTimeout
        {
            self.failed = Some(error);
        }
    }

    fn fill(&mut self, by: Option<Instant>) -> Result<()> {
        for _ in 0..BEGUN {
            if !self.windows.has_room() {
                break;
            }
            // What is on its way already is not kept waiting for what the store says of the rest.
            let by = if self.moving.is_empty() { by } else { Some(Instant::now()) };
            match self.begin(by) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) if error.code == Code::WaitTimeout && !self.moving.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn wait_for_more(&mut self, timeout: Option<Duration>) -> Result<Option<usize>> {
        // One that no clock counts is none.
        let by = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        if self.failed.is_none() {
            self.fill(by)?;
        }
        let Some(moving) = self.moving.front_mut() else { return self.failed.take().map_or(Ok(None), Err) };
        if let Err(error) = moving.finish(by) {
            return Err(self.answers.as_ref().map_or(error.clone(), |answers| answers.not_moved(error)));
        }
        self.verified += moving.count;
        self.windows.ended(moving.count);
        self.moving.pop_front();
        Ok(Some(self.verified))
    }

    /// Ends it: when this returns, nothing lands in the caller's pages any more, and the store is told that nobody
    /// reads what it has lent. What it still lends is given back as it comes.
    pub fn cancel(&mut self) {
        self.answers = None;
        self.early = None;
        self.moving.clear();
        self.part = None;
        // It says nothing of how long gets take.
        self.gauge = None;
    }

    /// How many blocks are there and verified, from the first key on.
    pub fn verified(&self) -> usize {
        self.verified
    }

    /// Begins to read the next blocks; false when there are none.
    fn begin(&mut self, by: Option<Instant>) -> Result<bool> {
        let Some(answers) = &mut self.answers else { return Ok(false) };
        loop {
            if let Some(part) = &self.part
                && part.begun < part.blocks.len()
            {
                break;
            }
            if !self.more {
                self.early = None;
                return Ok(false);
            }
            let lending = match answers.next(by.map(left_until))? {
                Response::Lent(lending) => lending,
                other => return Err(unexpected(&other)),
            };
            self.more = lending.more;
            if self.part.is_none() {
                self.like.set(lending.tickets.first().cloned());
            }
            let first = self.part.as_ref().map_or(0, |part| part.first + part.blocks.len());
            self.part = Some(Part::new(&self.engine, lending, first, self.pages.len())?);
        }
        let Some(part) = &mut self.part else { return Ok(false) };
        let moving = match self.early.take().and_then(|early| part.take(early)) {
            Some(moving) => moving,
            None => part
                .begin(&self.engine, &self.pages, self.windows.blocks(), answers.left())
                .map_err(|error| answers.not_moved(error))?,
        };
        self.windows.begun(moving.count);
        self.moving.push_back(moving);
        Ok(true)
    }
}

fn left_until(by: Instant) -> Duration {
    by.saturating_duration_since(Instant::now())
}

impl Part {
    fn new(engine: &Engine, lending: Lending, first: usize, pages: usize) -> Result<Part> {
        let Lending { blocks, tickets, .. } = lending;
        let lent = |ticket| {
            let grant = Borrowed { engine: engine.clone(), ticket, confirmed: false };
            Lent { grant: Some(Arc::new(grant)), asked: 0, all: 0 }
        };
        let mut groups: Vec<Lent> = tickets.into_iter().map(lent).collect();
        blocks.iter().for_each(|(group, _)| groups[usize::from(*group)].all += 1);
        if first + blocks.len() > pages {
            return Err(Error::new(Code::ProtocolError, "the store lends more blocks than were asked for"));
        }
        Ok(Part { blocks, groups, first, begun: 0 })
    }

    /// The first block, where it is being read already.
    fn take(&mut self, early: Early) -> Option<Moving> {
        let ([(_, sum)], [lent], 0) = (&self.blocks[..], &mut self.groups[..], self.first) else {
            return None;
        };
        let (into, transfer) = early.take(&lent.grant.as_ref()?.ticket)?;
        (self.begun, lent.asked) = (1, 1);
        let (places, grant) = (vec![(0, *sum)], lent.next()?);
        Some(Moving {
            count: 1,
            groups: vec![Group { into, places, transfer, grant, alone: true, finished: false }],
        })
    }

    fn begin(&mut self, engine: &Engine, pages: &PageSet, count: usize, left: Duration) -> Result<Moving> {
        let blocks = &self.blocks[self.begun..];
        let blocks = &blocks[..count.min(blocks.len())];
        // By number, so that blocks of one grant come together, in the order of its positions.
        let mut by_group: BTreeMap<u16, Named> = BTreeMap::new();
        for (at, (group, sum)) in blocks.iter().enumerate() {
            let lent = &mut self.groups[usize::from(*group)];
            let named = by_group.entry(*group).or_default();
            named.positions.push(lent.asked);
            named.places.push((self.first + self.begun + at, *sum));
            lent.asked += 1;
        }
        let mut moving = Moving { count: blocks.len(), groups: Vec::new() };
        self.begun += blocks.len();
        for (group, Named { positions, places }) in by_group {
            let lent = &mut self.groups[usize::from(group)];
            let Some(grant) = lent.next() else { continue };
            let into = pages.select(places.iter().map(|(place, _)| *place))?;
            // A transfer that is the only one of its grant confirms it. Of several, the last may end first.
            let alone = positions.len() == lent.all as usize;
            let transfer =
                engine.read(&into, &grant.ticket, Some(positions.into()), reading(&into, left, alone)?)?;
            moving.groups.push(Group { into, places, transfer, grant, alone, finished: false });
        }
        Ok(moving)
    }
}

impl Lent {
    /// The grant, for the positions that were just asked for.
    fn next(&mut self) -> Option<Arc<Borrowed>> {
        if self.asked == self.all { self.grant.take() } else { self.grant.clone() }
    }
}

impl Group {
    /// Waits until the blocks are there, and compares them.
    fn finish(&self, timeout: Option<Duration>) -> Result<()> {
        let read = self.transfer.wait(timeout)?;
        for ((place, expected), found) in self.places.iter().zip(sums_after(&read, &self.into)?) {
            if found != *expected {
                let text = format!(
                    "block {place} of a get is not what was stored: its checksum is {found:016x}, not \
                     {expected:016x}; it is not to be used"
                );
                return Err(Error::new(Code::ChecksumMismatch, text));
            }
        }
        Ok(())
    }
}

impl Moving {
    fn finish(&mut self, by: Option<Instant>) -> Result<()> {
        for group in &mut self.groups {
            if !group.finished {
                group.finish(by.map(left_until))?;
                group.finished = true;
            }
        }
        Ok(())
    }
}

impl Drop for Moving {
    /// Nothing lands in the caller's pages once the get is over.
    fn drop(&mut self) {
        self.groups.iter().for_each(|group| group.transfer.cancel());
        for mut group in self.groups.drain(..) {
            let ended = group.transfer.wait(None);
            if group.alone
                && ended.is_ok()
                && let Some(grant) = Arc::get_mut(&mut group.grant)
            {
                grant.confirmed = true;
            }
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.cancel();
    }
}
