//! The servers of a store: who they are, and what is asked of all of them.
//!
//! Invariants:
//! - Where a block lies is decided by this client alone, by the names of the members ([`crate::placement`]). Clients that
//!   know other members look in other places: that is a miss, never other bytes, since blocks are found by their keys.
//! - A member that does not answer costs its blocks; what is asked of several members at once ends by one deadline.
//! - Who the members are changes between calls, never within one.

use super::following::Following;
use super::text;
use crate::Counts;
use crate::link::{Answers, Link, unexpected};
use crate::opened::Opened;
use crate::placement::Lot;
use crate::remote::Remote;
use crate::sync::lock;
use crate::wire::{DEADLINE, Request, Response};
use kvik_core::{Code, EngineId, Error, Result};
use kvik_engine::{Engine, Estimate};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Members of a store, at most: each has a thread that meets it.
const MOST: usize = 1024;

/// The shortest time that can be asked for.
pub(super) const SHORTEST: Duration = Duration::from_millis(1);

/// See the module's text.
pub(crate) struct Cluster {
    pub engine: Engine,
    pub copies: usize,
    /// Replaced as a whole, so that a call goes on with those that it has begun with.
    members: Mutex<Arc<Members>>,
    /// What is said of namespaces to those that come.
    pub opened: Opened,
    following: Arc<Following>,
}

/// Members, and what stands for them among the weights.
#[derive(Default)]
pub(crate) struct Members {
    pub all: Vec<Arc<Member>>,
    pub lots: Vec<Lot>,
}

/// One server.
pub(crate) struct Member {
    pub remote: Arc<Remote>,
    pub link: Link,
    /// Parts of calls that it did not answer.
    unanswered: AtomicU64,
}

/// A server of a store, as its client sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberState {
    /// What it is called, which is its address.
    pub name: String,
    /// Whether it answers.
    pub up: bool,
    /// Parts of calls that it did not answer.
    pub unanswered: u64,
}

impl MemberState {
    pub(crate) fn of(remote: &Remote, unanswered: u64) -> MemberState {
        MemberState { name: remote.address().to_owned(), up: remote.is_up(), unanswered }
    }
}

impl Member {
    fn begin(engine: &Engine, name: &str, opened: &Opened) -> Result<Arc<Member>> {
        let remote = Remote::begin(engine, name, opened)?;
        let link = Link::Remote(remote.clone());
        Ok(Arc::new(Member { remote, link, unanswered: AtomicU64::new(0) }))
    }

    pub fn name(&self) -> &str {
        self.remote.address()
    }

    /// Asks it; one that is known to be down answers at once, with that.
    pub fn ask(&self, request: Request, left: Duration) -> Result<Answers> {
        self.link.ask(request, left)
    }

    /// A part of a call has failed at it. Where it did not answer, it is as if it had nothing.
    pub fn missed(&self, error: &Error) {
        if is_loss(error) {
            self.unanswered.fetch_add(1, Ordering::Relaxed);
        }
        log::debug!("the store's server {} has not done its part: {error}", self.name());
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.remote.close();
    }
}

/// Whether an error says that a member has gone or does not answer, in place of what it says.
pub(crate) fn is_loss(error: &Error) -> bool {
    matches!(
        error.code,
        Code::StoreUnavailable
            | Code::DeadlineExceeded
            | Code::PeerLost
            | Code::PeerRestarted
            | Code::PeerUnreachable
            | Code::TransportUnavailable
            | Code::NotificationsFull
    )
}

impl Cluster {
    pub fn new(engine: &Engine, copies: usize, following: Arc<Following>) -> Cluster {
        let (engine, members, opened) = (engine.clone(), Mutex::default(), Opened::default());
        Cluster { engine, copies, members, opened, following }
    }

    /// These are the members from now on. Who stays keeps its connection, and what is known of it.
    ///
    /// # Errors
    /// `InvalidArgument` for too many; the machine gives no threads.
    pub fn set(&self, names: &[String]) -> Result<()> {
        if names.len() > MOST {
            let text = format!("{} servers of one store: {MOST} are the most", names.len());
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let mut members = lock(&self.members);
        let mut all = Vec::with_capacity(names.len());
        for name in names {
            let known = members.all.iter().find(|member| member.name() == name);
            all.push(match known {
                Some(member) => member.clone(),
                None => Member::begin(&self.engine, name, &self.opened)?,
            });
        }
        let lots = names.iter().map(|name| Lot::of(name)).collect();
        let before = std::mem::replace(&mut *members, Arc::new(Members { all, lots }));
        drop(members);
        let names_before: Vec<&str> = before.all.iter().map(|member| member.name()).collect();
        if !names_before.is_empty() && names_before != names {
            log::info!("the store's servers are {names:?} from now on, and were {names_before:?}");
        }
        Ok(())
    }

    pub fn members(&self) -> Arc<Members> {
        lock(&self.members).clone()
    }

    /// Waits until each was met, or could not be.
    ///
    /// # Errors
    /// `StoreUnavailable` where none of them answers.
    pub fn met(&self, deadline: Duration) -> Result<()> {
        let until = Instant::now() + deadline;
        let members = self.members();
        members.all.iter().for_each(|member| member.remote.wait_until_tried(until));
        if self.is_up() { Ok(()) } else { Err(self.unavailable()) }
    }

    pub fn is_up(&self) -> bool {
        self.members().all.iter().any(|member| member.remote.is_up())
    }

    /// Nobody needs it any more.
    pub fn close(&self) {
        self.following.end();
    }

    /// None of the members answers.
    pub fn unavailable(&self) -> Error {
        let members = self.members();
        let first = members.all.iter().find_map(|member| member.remote.peer().err());
        let text = match first {
            Some(error) => {
                format!(
                    "none of the store's {} servers answers; of the first: {}",
                    members.all.len(),
                    error.text
                )
            }
            None => "the store has no servers at present; they are sought by themselves".into(),
        };
        Error::new(Code::StoreUnavailable, text)
    }

    pub fn states(&self) -> Vec<MemberState> {
        let state =
            |member: &Arc<Member>| MemberState::of(&member.remote, member.unanswered.load(Ordering::Relaxed));
        self.members().all.iter().map(state).collect()
    }

    /// Says what a namespace is to all that are there; those that come are told by [`Cluster::opened`].
    ///
    /// # Errors
    /// What one of them says against it; that none answers.
    pub fn open(&self, request: &Request) -> Result<()> {
        let members = self.members();
        let opened = self.each(&members, request, |answers| match answers.next(None)? {
            Response::Opened => Ok(()),
            other => Err(unexpected(&other)),
        });
        let refused =
            opened.iter().find_map(|(_, opened)| opened.as_ref().err().filter(|error| !is_loss(error)));
        match refused {
            Some(error) => Err(error.clone()),
            None if opened.iter().any(|(_, opened)| opened.is_ok()) => Ok(()),
            None => Err(self.unavailable()),
        }
    }

    /// Asks all of them at once, and takes their answers.
    fn each<T>(
        &self,
        members: &Members,
        request: &Request,
        take: impl Fn(&mut Answers) -> Result<T>,
    ) -> Vec<(Arc<Member>, Result<T>)> {
        let until = Instant::now() + DEADLINE;
        let asked: Vec<(Arc<Member>, Result<Answers>)> = members
            .all
            .iter()
            .map(|member| {
                // A server that takes no requests keeps this from going on: that is of the same deadline.
                let left = until.saturating_duration_since(Instant::now()).max(SHORTEST);
                (member.clone(), member.ask(request.clone(), left))
            })
            .collect();
        let answer = |(member, answers): (Arc<Member>, Result<Answers>)| {
            let answer = answers.and_then(|mut answers| take(&mut answers));
            if let Err(error) = &answer {
                member.missed(error);
            }
            (member, answer)
        };
        asked.into_iter().map(answer).collect()
    }

    /// Has all of them do something; how many blocks it was.
    ///
    /// # Errors
    /// Who has not done it, where somebody has not.
    pub fn count(&self, request: &Request) -> Result<u64> {
        let members = self.members();
        if members.all.is_empty() {
            return Err(self.unavailable());
        }
        let (mut count, mut failed) = (0, Vec::new());
        for (member, answer) in self.each(&members, request, Answers::count) {
            match answer {
                Ok(more) => count += more,
                Err(error) => failed.push((member, error)),
            }
        }
        let Some((member, error)) = failed.first() else { return Ok(count) };
        let text = format!(
            "{} of the store's {} servers have not done what all were asked to, {} among them: {}; {count} blocks \
             went at the others: ask again when they answer",
            failed.len(),
            members.all.len(),
            member.name(),
            error.text
        );
        Err(Error::new(error.code, text))
    }

    pub fn counts(&self) -> Result<Counts> {
        let counts = self.answered(&Request::Stat, |answers| match answers.next(None)? {
            Response::Counts(counts) => Ok(*counts),
            other => Err(unexpected(&other)),
        })?;
        let mut sum = Counts::default();
        counts.iter().for_each(|(_, counts)| sum.add(counts));
        Ok(sum)
    }

    pub fn metrics(&self) -> Result<String> {
        let texts = self.answered(&Request::Metrics, Answers::text)?;
        Ok(text::joined(texts.iter().map(|(member, text)| (member.name(), text.as_str()))))
    }

    /// What those say that answer.
    fn answered<T>(
        &self,
        request: &Request,
        take: impl Fn(&mut Answers) -> Result<T>,
    ) -> Result<Vec<(Arc<Member>, T)>> {
        let mut answered = Vec::new();
        for (member, answer) in self.each(&self.members(), request, take) {
            match answer {
                Ok(answer) => answered.push((member, answer)),
                Err(error) if is_loss(&error) => {}
                Err(error) => return Err(error),
            }
        }
        if answered.is_empty() { Err(self.unavailable()) } else { Ok(answered) }
    }

    /// What so many bytes of so many segments take of the slowest member, with an equal share; none within where nothing was
    /// measured, and none at all where no member answers.
    pub fn estimate(&self, bytes: u64, segments: u64) -> Result<Option<Option<Estimate>>> {
        let members = self.members();
        let up: Vec<EngineId> = members.all.iter().filter_map(|member| member.remote.peer().ok()).collect();
        if up.is_empty() {
            return Ok(None);
        }
        let share = bytes / segments.clamp(1, up.len() as u64);
        let mut slowest: Option<Estimate> = None;
        for peer in up {
            let estimate = self.engine.estimate(peer, share)?;
            slowest = slowest.into_iter().chain(estimate).max_by_key(|estimate| estimate.total);
        }
        Ok(Some(slowest))
    }
}
