//! A put of blocks that lie on several servers, in one copy or more.

use super::members::{Cluster, Member, SHORTEST, is_loss};
use super::spread::{Placed, Spread};
use crate::Stored;
use crate::chain::Chain;
use crate::put::{Given, Writing};
use crate::wire::Ack;
use kvik_core::{Code, Error, Result};
use kvik_engine::PageSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A put that was begun.
pub(crate) struct Scattering {
    cluster: Arc<Cluster>,
    pieces: Vec<Piece>,
}

/// Blocks that lie on the same servers, and their copies.
struct Piece {
    blocks: usize,
    copies: Vec<Replica>,
}

/// One copy.
struct Replica {
    member: Arc<Member>,
    writing: Option<Writing>,
    /// None until it has ended.
    ended: Option<Result<Stored>>,
}

impl Scattering {
    /// Asks all servers to take their blocks.
    ///
    /// # Errors
    /// No server answers; the pages cannot be granted.
    pub fn begin(
        spread: &Spread,
        chain: Chain<'_>,
        pages: &PageSet,
        ack: Ack,
        deadline: Duration,
    ) -> Result<Scattering> {
        let (mut pieces, until) = (Vec::new(), Instant::now() + deadline);
        for Placed { piece, members } in spread.placed(chain)? {
            let (keys, pages) = (&chain.keys()[piece.range.clone()], pages.select(piece.range.clone())?);
            // What begins a segment hangs on nothing: the block before it may be on another server.
            let parent = match piece.range.start.checked_sub(1) {
                _ if piece.root => None,
                Some(before) => Some(chain.keys()[before]),
                None => chain.parent(),
            };
            let given = Given { namespace: spread.namespace, parent, keys, pages: &pages, ack };
            let copy = |member: Arc<Member>| {
                // A server that takes no requests keeps this from going on: that is of the same deadline.
                let left = until.saturating_duration_since(Instant::now()).max(SHORTEST);
                match Writing::begin_at((spread.engine(), &member.link), given, left) {
                    Ok(writing) => Replica { member, writing: Some(writing), ended: None },
                    Err(error) => Replica::failed(member, error),
                }
            };
            pieces.push(Piece { blocks: keys.len(), copies: members.into_iter().map(copy).collect() });
        }
        Ok(Scattering { cluster: spread.cluster().clone(), pieces })
    }

    pub fn acknowledged(&mut self, timeout: Option<Duration>) -> Result<Option<Stored>> {
        let step = timeout.map(|timeout| Instant::now() + timeout);
        let mut taken_up = false;
        for copy in self.pieces.iter_mut().flat_map(|piece| &mut piece.copies) {
            taken_up |= copy.acknowledged(step)?;
        }
        if taken_up { Ok(None) } else { self.sum().map(Some) }
    }

    /// Waits until all copies have ended, and nobody reads the pages any more.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Stored> {
        let step = timeout.map(|timeout| Instant::now() + timeout);
        let mut quarantined = None;
        for copy in self.pieces.iter_mut().flat_map(|piece| &mut piece.copies) {
            match copy.wait(step) {
                Err(error) if error.code == Code::PagesQuarantined => quarantined = Some(error),
                other => other?,
            }
        }
        quarantined.map_or_else(|| self.sum(), Err)
    }

    /// What became of all blocks: of each piece what its first copy says that was made. Where none was, since its servers
    /// have gone, its blocks were refused.
    fn sum(&self) -> Result<Stored> {
        let (mut sum, mut made) = (Stored::default(), false);
        for piece in &self.pieces {
            let ended = || piece.copies.iter().filter_map(|copy| copy.ended.as_ref());
            if let Some(stored) = ended().find_map(|ended| ended.as_ref().ok()) {
                sum.stored += stored.stored;
                sum.known += stored.known;
                sum.refused += stored.refused;
                made = true;
                continue;
            }
            sum.refused += piece.blocks as u64;
            let said = ended().filter_map(|ended| ended.as_ref().err()).find(|error| !is_loss(error));
            if let Some(error) = said {
                return Err(error.clone());
            }
        }
        if made || self.cluster.is_up() { Ok(sum) } else { Err(self.cluster.unavailable()) }
    }

    pub fn cancel(&mut self) {
        let copies = self.pieces.iter_mut().flat_map(|piece| &mut piece.copies);
        copies.filter_map(|copy| copy.writing.as_mut()).for_each(Writing::cancel);
    }
}

impl Replica {
    fn failed(member: Arc<Member>, error: Error) -> Replica {
        member.missed(&error);
        Replica { member, writing: None, ended: Some(Err(error)) }
    }

    /// Waits for its acknowledgement; whether it is only taken up so far.
    ///
    /// # Errors
    /// `WaitTimeout`.
    fn acknowledged(&mut self, step: Option<Instant>) -> Result<bool> {
        let (None, Some(writing)) = (&self.ended, &mut self.writing) else { return Ok(false) };
        match writing.acknowledged(left(step)) {
            Ok(None) => Ok(true),
            Err(error) if error.code == Code::WaitTimeout => Err(error),
            // What it was, `wait` hears again with the end of it.
            Ok(Some(stored)) => {
                self.ended = Some(Ok(stored));
                Ok(false)
            }
            Err(error) => {
                self.member.missed(&error);
                self.ended = Some(Err(error));
                Ok(false)
            }
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// `WaitTimeout`, `PagesQuarantined`: it has not ended.
    fn wait(&mut self, step: Option<Instant>) -> Result<()> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        let ended = writing.wait(left(step));
        if let Err(error) = &ended {
            if matches!(error.code, Code::WaitTimeout | Code::PagesQuarantined) {
                return ended.map(|_| ());
            }
            if self.ended.is_none() {
                self.member.missed(error);
            }
        }
        self.writing = None;
        self.ended = Some(ended);
        Ok(())
    }
}

fn left(step: Option<Instant>) -> Option<Duration> {
    step.map(|step| step.saturating_duration_since(Instant::now()))
}
