//! From the blocks of each server to what all of them hold together.

use super::{Amount, Looked, NamespaceSurvey, Segments, ServerSurvey, Survey};
use crate::figures::Where;
use crate::scan::bit;
use crate::wire::scan::{Described, MAX_ORDER, PAGE, Page, Segment, ShortKey};
use kvik_core::{Code, Error, Result};
use std::collections::HashMap;

/// In no segment that is known.
const NO_SEGMENT: u32 = u32::MAX;
/// No server.
const NOBODY: u16 = u16::MAX;
/// What one copy of a block takes while servers are looked at; a segment takes some 40 bytes besides.
pub(super) const ROW_BYTES: usize = 24;
const _: () = assert!(size_of::<Row>() == ROW_BYTES);

/// A copy of a block. In their order, the copies of one block lie together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    key: ShortKey,
    namespace: u32,
    server: u16,
    tiers: u8,
    segment: u32,
}

impl Row {
    fn is_of_the_block(&self, other: &Row) -> bool {
        (self.key, self.namespace) == (other.key, other.namespace)
    }
}

/// Copies of blocks of all servers, as they come.
#[derive(Default)]
pub(crate) struct Rows {
    /// Of 2, how many blocks stand for one that is looked at.
    power: u32,
    most: usize,
    servers: usize,
    /// Servers of a segment.
    width: usize,
    all: Vec<Row>,
    namespaces: Vec<NamespaceSurvey>,
    by_id: HashMap<ShortKey, u32>,
    by_head: HashMap<ShortKey, u32>,
    /// Of each segment its servers, one segment behind the other.
    orders: Vec<u16>,
}

impl Rows {
    pub fn new(power: u32, most: usize, (servers, width): (usize, usize)) -> Rows {
        Rows { power, most, servers, width, ..Rows::default() }
    }

    /// Takes a page of a server in.
    ///
    /// # Errors
    /// There is much more than the servers have said.
    pub fn add(&mut self, server: usize, page: &Page, namespaces: &[Described]) -> Result<()> {
        if self.all.len() + page.blocks.len() > self.most.saturating_mul(2).saturating_add(PAGE) {
            let text = "the servers list many more blocks than they said they have: ask again";
            return Err(Error::new(Code::MemoryCapReached, text));
        }
        let segments: Vec<u32> = page.segments.iter().map(|segment| self.segment(segment)).collect();
        for block in &page.blocks {
            let Some(known) = namespaces.get(usize::from(block.namespace)) else { continue };
            let namespace = self.namespace(known);
            let segment = block.segment.and_then(|at| segments.get(usize::from(at)).copied());
            let (segment, server) = (segment.unwrap_or(NO_SEGMENT), server as u16);
            self.all.push(Row { key: block.key, namespace, server, tiers: block.tiers, segment });
        }
        Ok(())
    }

    fn segment(&mut self, segment: &Segment) -> u32 {
        let next = self.by_head.len() as u32;
        let number = *self.by_head.entry(segment.head).or_insert(next);
        if number == next {
            let order = segment.order.iter().copied().chain(std::iter::repeat(NOBODY));
            self.orders.extend(order.take(self.width));
        }
        number
    }

    fn namespace(&mut self, known: &Described) -> u32 {
        let next = self.namespaces.len() as u32;
        let number = *self.by_id.entry(known.id).or_insert(next);
        if number == next {
            let Described { id, tenant, model, block_bytes } = known.clone();
            let (id, held, copies) = (id.0, Amount::default(), Amount::default());
            self.namespaces.push(NamespaceSurvey { id, tenant, model, block_bytes, held, copies });
        }
        number
    }

    /// The servers of a block's segment; none where that is not known.
    fn order(&self, copies: &[Row]) -> Option<&[u16]> {
        if self.servers <= 1 {
            return Some(&[0]);
        }
        let segment = copies.iter().map(|row| row.segment).find(|segment| *segment != NO_SEGMENT)?;
        let from = segment as usize * self.width;
        self.orders.get(from..from + self.width)
    }

    /// What all of it comes to.
    pub fn join(mut self, servers: Vec<ServerSurvey>, copies: Option<usize>) -> Survey {
        // A block that went and came again while its server was looked at is there twice.
        self.all.sort_unstable();
        self.all.dedup_by(|a, b| a.is_of_the_block(b) && a.server == b.server);
        let whole: Vec<bool> = servers.iter().map(|server| server.looked == Looked::Whole).collect();
        let copies = copies.unwrap_or_else(|| self.guess(&whole)).clamp(1, self.servers.max(1));
        let mut tally = Tally::new(&self, servers, whole, copies);
        for block in self.all.chunk_by(Row::is_of_the_block) {
            tally.add(block);
        }
        tally.survey()
    }

    /// How many copies clients seem to keep: so many as half of the blocks have, without a gap among the servers that were
    /// looked at.
    fn guess(&self, whole: &[bool]) -> usize {
        let mut runs = [0u64; MAX_ORDER + 1];
        for block in self.all.chunk_by(Row::is_of_the_block) {
            let Some(order) = self.order(block) else { continue };
            let mut run = 0;
            for (at, server) in order.iter().enumerate() {
                if block.iter().any(|row| row.server == *server) {
                    run = at + 1;
                } else if whole.get(usize::from(*server)).copied().unwrap_or(true) {
                    break;
                }
            }
            runs[run.min(MAX_ORDER)] += 1;
        }
        let all: u64 = runs.iter().sum();
        let so_many = |copies: &usize| 2 * runs[*copies..].iter().sum::<u64>() >= all.max(1);
        (1..=MAX_ORDER).rev().find(so_many).unwrap_or(1)
    }
}

/// What was counted so far.
struct Tally<'a> {
    rows: &'a Rows,
    /// Of each server, whether all of its blocks were looked at.
    whole: Vec<bool>,
    /// How many blocks each stands for.
    times: u64,
    /// Of each segment its different blocks.
    sizes: Vec<u32>,
    survey: Survey,
}

impl Amount {
    fn add(&mut self, bytes: u64, times: u64) {
        self.blocks = self.blocks.saturating_add(times);
        self.bytes = self.bytes.saturating_add(bytes.saturating_mul(times));
    }
}

impl<'a> Tally<'a> {
    fn new(rows: &'a Rows, servers: Vec<ServerSurvey>, whole: Vec<bool>, copies: usize) -> Tally<'a> {
        let times = 1 << rows.power;
        let survey = Survey {
            servers,
            sample: times,
            rows: rows.all.len() as u64,
            copies,
            by_copies: vec![Amount::default(); copies + 1],
            namespaces: rows.namespaces.clone(),
            ..Survey::default()
        };
        Tally { rows, whole, times, sizes: vec![0; rows.by_head.len()], survey }
    }

    /// Takes one block in: all of its copies.
    fn add(&mut self, block: &[Row]) {
        let (rows, times) = (self.rows, self.times);
        let namespace = &mut self.survey.namespaces[block[0].namespace as usize];
        let bytes = namespace.block_bytes;
        namespace.held.add(bytes, times);
        namespace.copies.add(bytes, times * block.len() as u64);
        let order = rows.order(block);
        let wanted = order.map(|order| &order[..self.survey.copies.min(order.len())]);
        let mut found: Vec<&Row> = Vec::with_capacity(block.len());
        for row in block {
            let server = &mut self.survey.servers[usize::from(row.server)];
            server.held.add(bytes, times);
            for tier in Where::ALL {
                if row.tiers & bit(tier) != 0 {
                    server.tiers[tier as usize].add(bytes, times);
                }
            }
            match wanted {
                None => server.unplaced.add(bytes, times),
                Some(wanted) if !wanted.contains(&row.server) => server.stray.add(bytes, times),
                Some(_) => {}
            }
            if wanted.is_none_or(|wanted| wanted.contains(&row.server)) {
                found.push(row);
            }
        }
        self.add_copies(wanted.unwrap_or(&[]), &found, bytes);
        if let Some(row) = block.iter().find(|row| row.segment != NO_SEGMENT) {
            self.sizes[row.segment as usize] += 1;
        }
    }

    /// A block's copies that clients find, and those that they do not.
    fn add_copies(&mut self, wanted: &[u16], found: &[&Row], bytes: u64) {
        let (times, survey) = (self.times, &mut self.survey);
        let mut unseen = 0;
        for at in wanted.iter().map(|at| usize::from(*at)) {
            let Some(server) = survey.servers.get_mut(at) else { continue };
            let here = found.iter().any(|row| usize::from(row.server) == at);
            server.owed.add(bytes, times);
            match self.whole[at] {
                true if !here => server.lacking.add(bytes, times),
                false if !here => unseen += 1,
                _ => {}
            }
        }
        if let [only] = found {
            let server = &mut survey.servers[usize::from(only.server)];
            let below = bit(Where::Log) | bit(Where::Object);
            let amount = if only.tiers & below == 0 { &mut server.lost } else { &mut server.away };
            amount.add(bytes, times);
        }
        let copies = found.len().min(survey.copies);
        survey.by_copies[copies].add(bytes, times);
        if copies < survey.copies {
            survey.short.add(bytes, times);
            if copies + unseen >= survey.copies {
                survey.short_unseen.add(bytes, times);
            }
        }
    }

    fn survey(mut self) -> Survey {
        let times = self.times as f64;
        let mut segments = Segments::default();
        for size in self.sizes.iter().filter(|size| **size > 0) {
            let seen = f64::from(*size);
            segments.count += 1;
            segments.blocks += u64::from(*size) * self.times;
            // Of a sample: what the square of the whole is by chance, and not that of the part times a number.
            segments.squares += times * times * seen * (seen - 1.0) + times * seen;
            segments.largest = segments.largest.max(u64::from(*size) * self.times);
        }
        self.survey.segments = segments;
        self.survey
    }
}
