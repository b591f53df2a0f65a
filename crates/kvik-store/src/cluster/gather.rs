//! A get of blocks that lie on several servers.
//!
//! Invariants:
//! - All pieces are asked for at once, and read at once; their blocks are told of in the prompt's order, each compared with
//!   what was stored. What comes behind a piece that is not all there is given up.
//! - A piece is asked of its servers one after the other, from the block on that is missing: where one of them fails, does not
//!   answer in its share of the time, or has not all of it. All of it ends by the get's deadline, and nobody is asked
//!   behind that.

use super::members::{Member, is_loss};
use super::spread::{Placed, Spread};
use crate::BlockKey;
use crate::chain::Chain;
use crate::get::{Reading, Wanted};
use kvik_core::{Code, Error, Result};
use kvik_engine::PageSet;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A get that was begun.
pub(crate) struct Gathering {
    from: Source,
    /// In the prompt's order; the first one is told of.
    pieces: VecDeque<Piece>,
    verified: usize,
}

/// Where blocks come from, and where they go.
struct Source {
    spread: Spread,
    keys: Vec<BlockKey>,
    pages: PageSet,
    until: Instant,
}

/// Blocks of a get that lie on the same servers.
struct Piece {
    range: Range<usize>,
    /// Blocks of it that are there.
    there: usize,
    /// Servers that were not asked yet.
    others: VecDeque<Arc<Member>>,
    /// The one that is asked now.
    now: Option<Asked>,
    /// Why the latest one that was asked gave nothing more; none where it has nothing more.
    failure: Option<Error>,
}

/// A server that is asked for a piece.
struct Asked {
    member: Arc<Member>,
    reading: Reading,
    /// Blocks of the piece that were there before.
    before: usize,
    /// Then it has had its share of the time without a sign, and the next one is asked. None until it is waited for:
    /// while the caller is at an earlier piece, or elsewhere, it owes nothing.
    until: Option<Instant>,
}

/// What became of a piece.
enum Step {
    More,
    All,
    /// No server has more of it.
    Short,
}

impl Gathering {
    /// Asks for all pieces.
    ///
    /// # Errors
    /// No server answers.
    pub fn begin(spread: Spread, chain: Chain<'_>, pages: &PageSet, deadline: Duration) -> Result<Gathering> {
        let until = Instant::now() + deadline;
        let placed = spread.placed(chain)?;
        let from = Source { spread, keys: chain.keys().to_vec(), pages: pages.clone(), until };
        let mut pieces: VecDeque<Piece> = placed.into_iter().map(Piece::new).collect();
        for piece in &mut pieces {
            piece.ask_next(&from)?;
        }
        Ok(Gathering { from, pieces, verified: 0 })
    }

    pub fn next(&mut self, timeout: Option<Duration>) -> Result<Option<usize>> {
        let step = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            self.pieces.iter_mut().skip(1).for_each(Piece::pump);
            let Some(piece) = self.pieces.front_mut() else { return Ok(None) };
            match piece.next(&self.from, step)? {
                Step::More => {
                    self.verified = piece.range.start + piece.there;
                    return Ok(Some(self.verified));
                }
                Step::All => drop(self.pieces.pop_front()),
                Step::Short => {
                    let failure = piece.failure.take();
                    self.cancel();
                    return self.ended_by(failure);
                }
            }
        }
    }

    /// What its caller hears where a piece is missing: that it has come to its end. A server that has gone is as if it had
    /// nothing, unless none is left; what a server says, and blocks that are others, are told.
    fn ended_by(&self, failure: Option<Error>) -> Result<Option<usize>> {
        match failure {
            Some(error) if !is_loss(&error) => Err(error),
            Some(_) if !self.from.spread.cluster().is_up() => Err(self.from.spread.cluster().unavailable()),
            _ => Ok(None),
        }
    }

    /// When this returns, nothing lands in the caller's pages any more.
    pub fn cancel(&mut self) {
        self.pieces.clear();
    }

    pub fn verified(&self) -> usize {
        self.verified
    }
}

impl Source {
    /// Until when a server is waited for that so many others could stand in for.
    fn share(&self, others: usize) -> Instant {
        let left = self.until.saturating_duration_since(Instant::now());
        Instant::now() + left / (1 + others) as u32
    }
}

impl Piece {
    fn new(placed: Placed) -> Piece {
        let Placed { piece, members } = placed;
        Piece { range: piece.range, there: 0, others: members.into(), now: None, failure: None }
    }

    /// Asks the next server that answers; false when there is none, or no time.
    ///
    /// # Errors
    /// The pages cannot be read into, whoever is asked.
    fn ask_next(&mut self, from: &Source) -> Result<bool> {
        while let Some(member) = self.others.pop_front() {
            let left = from.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let text = "the get's deadline has passed before all servers of a block were asked";
                self.failure = Some(Error::new(Code::DeadlineExceeded, text));
                return Ok(false);
            }
            let places = self.range.start + self.there..self.range.end;
            let (keys, pages) = (&from.keys[places.clone()], from.pages.select(places)?);
            let Spread { namespace, shape, .. } = from.spread;
            let wanted = Wanted { namespace, shape, keys, pages: &pages };
            let like = from.spread.like(&member);
            let to = (from.spread.engine(), &member.link, &like);
            match Reading::begin_at(to, &wanted, left, None) {
                Ok(reading) => {
                    self.now = Some(Asked { member, reading, before: self.there, until: None });
                    return Ok(true);
                }
                Err(error) => self.fail(&member, error),
            }
        }
        Ok(false)
    }

    fn fail(&mut self, member: &Member, error: Error) {
        member.missed(&error);
        self.failure = Some(error);
    }

    fn pump(&mut self) {
        if let Some(asked) = &mut self.now {
            asked.reading.pump();
        }
    }

    /// Waits for more of it, until `step`.
    ///
    /// # Errors
    /// `WaitTimeout`.
    fn next(&mut self, from: &Source, step: Option<Instant>) -> Result<Step> {
        loop {
            if self.there == self.range.len() {
                return Ok(Step::All);
            }
            let Some(mut asked) = self.now.take() else {
                if self.ask_next(from)? {
                    continue;
                }
                return Ok(Step::Short);
            };
            let until = *asked.until.get_or_insert_with(|| from.share(self.others.len()));
            let wait = step.map_or(until, |step| step.min(until));
            let answer = asked.reading.next(Some(wait.saturating_duration_since(Instant::now())));
            self.there = asked.before + asked.reading.verified();
            match answer {
                Ok(Some(_)) => {
                    asked.until = None;
                    self.now = Some(asked);
                    return Ok(Step::More);
                }
                Ok(None) => self.failure = None,
                Err(error) if error.code == Code::WaitTimeout && Instant::now() < until => {
                    self.now = Some(asked);
                    if step.is_some_and(|step| step <= Instant::now()) {
                        return Err(error);
                    }
                }
                Err(error) if error.code == Code::WaitTimeout => {
                    let error = asked.reading.late(asked.member.name());
                    self.fail(&asked.member, error);
                }
                Err(error) => self.fail(&asked.member, error),
            }
        }
    }
}
