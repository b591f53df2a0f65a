//! Calls about blocks that lie on several servers, copy after copy.

use super::members::{Cluster, Member, Members, SHORTEST, is_loss};
use crate::chain::Chain;
use crate::early::Like;
use crate::link::{Answers, unexpected};
use crate::placement::{Piece, pieces};
use crate::service::answered_within;
use crate::store::check_keys;
use crate::wire::{DEADLINE, Request, Response};
use crate::{BlockKey, NamespaceId, Shape};
use kvik_core::{Error, Result};
use kvik_engine::Engine;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Blocks of one namespace, of several servers.
pub(crate) struct Spread {
    cluster: Arc<Cluster>,
    pub namespace: NamespaceId,
    pub shape: Shape,
    likes: Likes,
}

/// What each server's next ticket will be like. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Likes(Arc<Mutex<HashMap<String, Like>>>);

impl Likes {
    /// That of a server. With the first of a new one go those of servers that are there no longer.
    fn of(&self, name: &str, is_there: impl Fn(&str) -> bool) -> Like {
        let mut likes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(like) = likes.get(name) {
            return like.clone();
        }
        likes.retain(|name, _| is_there(name));
        likes.entry(name.to_owned()).or_default().clone()
    }
}

/// Blocks of a call, and the servers that may have them.
pub(crate) struct Placed {
    pub piece: Piece,
    pub members: Vec<Arc<Member>>,
}

impl Spread {
    pub fn new(cluster: &Arc<Cluster>, namespace: NamespaceId, shape: Shape, likes: &Likes) -> Spread {
        Spread { cluster: cluster.clone(), namespace, shape, likes: likes.clone() }
    }

    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    pub fn engine(&self) -> &Engine {
        &self.cluster.engine
    }

    pub fn like(&self, member: &Member) -> Like {
        let members = self.cluster.members();
        self.likes.of(member.name(), |name| members.all.iter().any(|member| member.name() == name))
    }

    /// Where the blocks of a call lie.
    ///
    /// # Errors
    /// There is no member that answers.
    pub fn placed(&self, chain: Chain<'_>) -> Result<Vec<Placed>> {
        let members = self.cluster.members();
        if !members.all.iter().any(|member| member.remote.is_up()) {
            return Err(self.cluster.unavailable());
        }
        let Members { all, lots } = &*members;
        let placed = |piece: Piece| {
            let members = piece.order.iter().map(|at| all[*at].clone()).collect();
            Placed { piece, members }
        };
        Ok(pieces(chain, lots, self.cluster.copies).into_iter().map(placed).collect())
    }

    /// Of each key whether a server that answers has its block.
    ///
    /// # Errors
    /// No server has answered; what one of them says.
    pub fn contains(&self, chain: Chain<'_>) -> Result<Vec<bool>> {
        check_keys(chain.keys())?;
        let mut here = vec![false; chain.keys().len()];
        let open = |here: &Vec<bool>, placed: &Placed| {
            let range = placed.piece.range.clone();
            here[range.clone()].contains(&false).then_some(range.start)
        };
        let request =
            |keys: &[BlockKey]| Request::Contains { namespace: self.namespace, keys: keys.to_vec() };
        let turns = Turns::new(DEADLINE, true);
        self.copy_by_copy(
            (chain, turns),
            &mut here,
            open,
            request,
            |here, placed, _, response| match response {
                Response::Here(found) if found.len() == placed.piece.range.len() => {
                    let places = here[placed.piece.range.clone()].iter_mut();
                    places.zip(found).for_each(|(here, found)| *here |= found);
                    Ok(())
                }
                other => Err(unexpected(&other)),
            },
        )?;
        Ok(here)
    }

    /// Has blocks brought into the memory of the first server that has them.
    ///
    /// # Errors
    /// As for [`Spread::contains`].
    pub fn prefetch(&self, chain: Chain<'_>) -> Result<u64> {
        check_keys(chain.keys())?;
        let mut there: HashMap<usize, u64> = HashMap::new();
        let open = |there: &HashMap<usize, u64>, placed: &Placed| {
            let range = &placed.piece.range;
            let next = range.start + there.get(&range.start).map_or(0, |count| *count as usize);
            (next < range.end).then_some(next)
        };
        let request =
            |keys: &[BlockKey]| Request::Prefetch { namespace: self.namespace, keys: keys.to_vec() };
        // What has to come from a disk takes its time: the next copy is not asked before this one has answered.
        let turns = Turns::new(DEADLINE, false);
        let placed =
            self.copy_by_copy((chain, turns), &mut there, open, request, |there, placed, from, response| {
                match response {
                    Response::Done(count) if count <= (placed.piece.range.end - from) as u64 => {
                        *there.entry(placed.piece.range.start).or_default() += count;
                        Ok(())
                    }
                    other => Err(unexpected(&other)),
                }
            })?;
        Ok(run(&placed, |at| there.get(&placed[at].piece.range.start).copied().unwrap_or(0)))
    }

    /// Asks each piece's servers, the first copies at once, then the second ones of what is still open, and so on: all of
    /// it within one deadline. `open` says from which key on a piece is asked for.
    fn copy_by_copy<S>(
        &self,
        (chain, mut turns): (Chain<'_>, Turns),
        state: &mut S,
        open: impl Fn(&S, &Placed) -> Option<usize>,
        request: impl Fn(&[BlockKey]) -> Request,
        mut take: impl FnMut(&mut S, &Placed, usize, Response) -> Result<()>,
    ) -> Result<Vec<Placed>> {
        let placed = self.placed(chain)?;
        turns.copies = placed.iter().map(|one| one.members.len()).max().unwrap_or(0);
        while let Some((copy, left)) = turns.next() {
            let mut asked: Vec<(&Placed, &Arc<Member>, usize, Result<Answers>)> = Vec::new();
            for one in &placed {
                if let (Some(from), Some(member)) = (open(state, one), one.members.get(copy)) {
                    let keys = request(&chain.keys()[from..one.piece.range.end]);
                    asked.push((one, member, from, member.ask(keys, turns.left())));
                }
            }
            if asked.is_empty() {
                break;
            }
            let until = Instant::now() + left;
            for (one, member, from, answers) in asked {
                let answer = answers.and_then(|mut answers| answers.next_until(until));
                match answer.and_then(|response| take(state, one, from, response)) {
                    Ok(()) => turns.answered = true,
                    Err(error) => turns.failed(member, error)?,
                }
            }
        }
        if turns.answered { Ok(placed) } else { Err(self.cluster.unavailable()) }
    }

    /// Keeps blocks at all servers that have a copy.
    ///
    /// # Errors
    /// As for [`Spread::contains`].
    pub fn pin(&self, chain: Chain<'_>, time: Duration) -> Result<u64> {
        check_keys(chain.keys())?;
        let (placed, mut turns) = (self.placed(chain)?, Turns::new(DEADLINE, true));
        let mut asked = Vec::new();
        for (at, one) in placed.iter().enumerate() {
            for member in &one.members {
                let keys = chain.keys()[one.piece.range.clone()].to_vec();
                let request = Request::Pin { namespace: self.namespace, keys, time };
                asked.push((at, member, member.ask(request, turns.left())));
            }
        }
        let mut kept = vec![0; placed.len()];
        for (at, member, answers) in asked {
            match answers.and_then(|mut answers| answers.count()) {
                Ok(count) => {
                    kept[at] = count.max(kept[at]);
                    turns.answered = true;
                }
                Err(error) => turns.failed(member, error)?,
            }
        }
        if turns.answered { Ok(run(&placed, |at| kept[at])) } else { Err(self.cluster.unavailable()) }
    }
}

/// How many blocks there are from the first one on, where each piece has so many of its own.
fn run(placed: &[Placed], there: impl Fn(usize) -> u64) -> u64 {
    let mut sum = 0;
    for (at, one) in placed.iter().enumerate() {
        sum += there(at);
        if there(at) < one.piece.range.len() as u64 {
            break;
        }
    }
    sum
}

/// Divides the time of a call between the copies that are asked one after the other.
struct Turns {
    until: Instant,
    copy: usize,
    copies: usize,
    /// Whether a copy is waited for as long as its share, and not as long as there is.
    shared: bool,
    answered: bool,
}

impl Turns {
    fn new(time: Duration, shared: bool) -> Turns {
        Turns { until: Instant::now() + time, copy: 0, copies: 0, shared, answered: false }
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now()).max(SHORTEST)
    }

    /// The next copy, and how long it is waited for: what comes after it is to have its share of the time. One that
    /// takes as long as a store may is not asked with less time than that: it would count as down.
    fn next(&mut self) -> Option<(usize, Duration)> {
        let copy = self.copy;
        if !self.shared && copy > 0 && self.left() < answered_within(DEADLINE) {
            return None;
        }
        if copy >= self.copies || self.until <= Instant::now() {
            return None;
        }
        self.copy += 1;
        let shares = if self.shared { self.copies - copy } else { 1 };
        Some((copy, self.left() / shares as u32))
    }

    /// A server has not done its part.
    ///
    /// # Errors
    /// It did answer, and said this.
    fn failed(&self, member: &Member, error: Error) -> Result<()> {
        member.missed(&error);
        if is_loss(&error) { Ok(()) } else { Err(error) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_that_come_and_go_leave_nothing_behind() {
        let likes = Likes::default();
        for number in 0..100 {
            let names = [number, number + 1].map(|number| number.to_string());
            names.iter().for_each(|name| drop(likes.of(name, |there| names.iter().any(|one| one == there))));
            assert!(likes.0.lock().unwrap().len() <= 2);
        }
    }

    #[test]
    fn a_copy_that_takes_its_time_is_not_asked_with_less() {
        for (slow, asked) in [(Duration::ZERO, true), (DEADLINE / 2, false)] {
            let mut turns = Turns { copies: 2, ..Turns::new(DEADLINE, false) };
            assert!(turns.next().is_some());
            turns.until -= slow;
            assert_eq!(turns.next().is_some(), asked);
        }
    }
}
