//! Asking servers what they are, and for their blocks: a thread for each, so that nobody waits for another one.

use super::Looked;
use super::join::Rows;
use crate::link::{Link, unexpected};
use crate::placement::Lot;
use crate::wire::scan::{Described as Namespace, Description, Page, Scan};
use crate::wire::{Request, Response};
use kvik_core::{Code, Error, Result};
use kvik_host::thread::{ThreadOptions, spawn_named};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a server says of itself.
#[derive(Clone, Default)]
pub(super) struct Described {
    pub version: String,
    pub blocks: u64,
    pub namespaces: Vec<Namespace>,
    pub metrics: Option<String>,
    /// Why its blocks are not looked at.
    pub error: Option<Error>,
}

/// How blocks are looked at.
#[derive(Clone)]
pub(super) struct Look {
    pub until: Instant,
    pub power: u32,
    pub order: u8,
    pub lots: Vec<Lot>,
    pub rows: Arc<Mutex<Rows>>,
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Does something at each server at once; what comes of it, in their order.
///
/// # Errors
/// The machine gives no thread.
fn each<T: Send + 'static>(
    servers: &[(String, Link)],
    work: impl Fn(usize, &Link) -> T + Send + Sync + 'static,
) -> Result<Vec<Option<T>>> {
    let ((to, from), work) = (channel(), Arc::new(work));
    for (at, (_, link)) in servers.iter().enumerate() {
        let (to, work, link) = (to.clone(), work.clone(), link.clone());
        // Whoever does not hear it any more has no need of it.
        let asking = move || drop(to.send((at, work(at, &link))));
        let options = ThreadOptions::default();
        drop(spawn_named(&format!("kvik-scan-{at}"), &options, asking).map_err(crate::no_thread)?);
    }
    drop(to);
    let mut all: Vec<Option<T>> = servers.iter().map(|_| None).collect();
    // It ends with the last thread, each of which has a deadline.
    for (at, done) in from {
        all[at] = Some(done);
    }
    Ok(all)
}

/// What the servers say of themselves by then.
///
/// # Errors
/// The machine gives no thread.
pub(super) fn describe(servers: &[(String, Link)], until: Instant) -> Result<Vec<Described>> {
    let all = each(servers, move |_, link| {
        let mut described = Described::default();
        if let Err(error) = described.ask(link, until) {
            described.error = Some(error);
        }
        described
    })?;
    Ok(all.into_iter().map(Option::unwrap_or_default).collect())
}

/// Looks at the blocks of those who have said what they are; what came of it.
///
/// # Errors
/// The machine gives no thread.
pub(super) fn scan(servers: &[(String, Link)], described: &[Described], look: &Look) -> Result<Vec<Looked>> {
    let (look, all) = (look.clone(), described.to_vec());
    let found = each(servers, move |at, link| match &all[at].error {
        Some(error) if error.code == Code::ProtocolError => Looked::Older(error.clone()),
        Some(error) => Looked::Down(error.clone()),
        None => match look.pages(at, link, all[at].namespaces.clone()) {
            Ok(()) => Looked::Whole,
            Err(error) => Looked::Part(error),
        },
    })?;
    let lost = || Looked::Part(Error::new(Code::StoreUnavailable, "it was not looked at to the end"));
    Ok(found.into_iter().map(|found| found.unwrap_or_else(lost)).collect())
}

/// A part of the namespaces of a server, and what it is.
fn part(link: &Link, from: usize, until: Instant) -> Result<Description> {
    let from = u16::try_from(from).unwrap_or(u16::MAX);
    match link.ask(Request::Describe { from }, left(until))?.next_until(until)? {
        Response::Described(description) => Ok(description),
        other => Err(unexpected(&other)),
    }
}

/// Adds the namespaces that are not known yet.
fn add_namespaces(known: &mut Vec<Namespace>, link: &Link, until: Instant) -> Result<Description> {
    loop {
        let mut description = part(link, known.len(), until)?;
        let more = description.more && !description.namespaces.is_empty();
        known.append(&mut description.namespaces);
        if known.len() > usize::from(u16::MAX) {
            let text = "it has more namespaces than a store can have";
            return Err(Error::new(Code::ProtocolError, text));
        }
        if !more {
            return Ok(description);
        }
    }
}

impl Described {
    fn ask(&mut self, link: &Link, until: Instant) -> Result<()> {
        // Its figures first: older servers have them too.
        self.metrics = Some(link.ask(Request::Metrics, left(until))?.text()?);
        let description = add_namespaces(&mut self.namespaces, link, until)?;
        (self.version, self.blocks) = (description.version, description.blocks);
        Ok(())
    }
}

impl Look {
    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a server's blocks in, page by page.
    fn pages(&self, server: usize, link: &Link, mut namespaces: Vec<Namespace>) -> Result<()> {
        let mut scan = Scan { from: 0, sample: self.power as u8, order: self.order, lots: self.lots.clone() };
        loop {
            let page = self.page(link, &scan)?;
            let highest = page.blocks.iter().map(|block| usize::from(block.namespace)).max();
            if highest.is_some_and(|highest| highest >= namespaces.len()) {
                // It was opened since.
                add_namespaces(&mut namespaces, link, self.until)?;
            }
            self.rows().add(server, &page, &namespaces)?;
            match page.next {
                None => return Ok(()),
                Some(next) if next <= scan.from => {
                    let text =
                        "the store's pages of blocks do not go on: the next one begins before this one";
                    return Err(Error::new(Code::ProtocolError, text));
                }
                Some(next) => scan.from = next,
            }
        }
    }

    fn page(&self, link: &Link, scan: &Scan) -> Result<Page> {
        if Instant::now() >= self.until {
            let text = "time was up before all of its blocks were looked at";
            return Err(Error::new(Code::DeadlineExceeded, text));
        }
        match link.ask(Request::Scan(scan.clone()), left(self.until))?.next_until(self.until)? {
            Response::Scanned(page) => Ok(page),
            other => Err(unexpected(&other)),
        }
    }
}
