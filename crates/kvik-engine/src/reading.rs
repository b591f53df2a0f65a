//! Several reads as one: one call, one deadline, one end.

use crate::begin::{entry, moving, set_out};
use crate::engine::Engine;
use crate::region::PageSet;
use crate::report::{JointReport, Report, TransferOptions};
use crate::transfers::Transfers;
use crate::transfers::joint::{Joint, of_read};
use crate::transfers::request::{Listener, TransferRequest};
use kvik_core::{Code, Error, Result, Ticket};
use kvik_host::clock::boottime;
use kvik_proto::Op;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

/// One of the reads of [`Engine::read_all`]: what [`Engine::read`] takes.
#[derive(Clone)]
pub struct Read {
    /// Where the pages go. No page is in two reads of a call: that is not looked for.
    pub local: PageSet,
    /// Whose pages.
    pub ticket: Ticket,
    /// Which of them; all without.
    pub positions: Option<Arc<[u32]>>,
    /// Without a deadline, which all reads of a call have together.
    pub options: TransferOptions,
}

impl Engine {
    /// Reads from several grants, of one owner or many, as one: it succeeds when all reads have, and the first that
    /// fails ends the others. None of them touches memory any more when it has ended, however that comes.
    ///
    /// All have one deadline; that of the engine, where none is given. A read that succeeds confirms its own grant, also
    /// where another one fails. Without any read it is done at once.
    ///
    /// # Errors
    /// As for [`Engine::read`], about the first read that is refused ([`Subject::read`](kvik_core::Subject)): then none
    /// has begun. `InvalidArgument` for a read with a deadline of its own. Everything else is the outcome.
    pub fn read_all(&self, reads: Vec<Read>, deadline: Option<Duration>) -> Result<JointRead> {
        let inner = self.inner();
        inner.base.setup.check()?;
        let began = boottime();
        let until = began + inner.base.setup.time(deadline)?;
        let count = reads.len();
        let joint = Joint::new(count, began);
        let (mut entries, mut starts) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (place, read) in reads.into_iter().enumerate() {
            let Read { local, ticket, positions, options } = read;
            let made = one_of_several(self, &ticket, &options, until)
                .and_then(|request| moving(inner, Op::Read, &local, request, positions, &options))
                .and_then(|request| entry(inner, request, began, Listener::Joint(joint.clone())));
            let (entry, start) = made.map_err(|error| of_read(error, place, count, None))?;
            entries.push(entry);
            starts.push(start);
        }
        let ids = inner.transfers.add(entries, |ids| joint.set_ids(ids));
        for (id, start) in ids.zip(starts) {
            // A read that cannot set out has ended with the error, and the others with it.
            drop(set_out(inner, id, start));
        }
        Ok(JointRead { transfers: inner.transfers.clone(), joint })
    }
}

fn one_of_several(
    engine: &Engine,
    ticket: &Ticket,
    options: &TransferOptions,
    deadline: Duration,
) -> Result<TransferRequest> {
    if options.deadline.is_some() {
        let text = "a read of several has no deadline of its own: give read_all the deadline of all";
        return Err(Error::new(Code::InvalidArgument, text));
    }
    Ok(TransferRequest { deadline, ..engine.request(ticket, options)? })
}

/// Several reads in flight as one. Dropping it does not end them: their deadline does.
#[derive(Clone)]
pub struct JointRead {
    transfers: Arc<Transfers>,
    joint: Arc<Joint>,
}

impl JointRead {
    /// Whether all reads have ended.
    pub fn is_done(&self) -> bool {
        self.joint.end.is_there()
    }

    /// The outcome, if all have ended.
    pub fn result(&self) -> Option<Result<JointReport>> {
        self.joint.end.outcome()
    }

    /// What became of each read, in the order of the call, if all have ended: of those that another one's failure has
    /// ended it is `Cancelled`.
    pub fn outcomes(&self) -> Option<Vec<Result<Report>>> {
        self.joint.outcomes()
    }

    /// Waits for the end of all; with `None` as long as their deadline takes.
    ///
    /// # Errors
    /// Why the first one failed, and which ([`Subject::read`](kvik_core::Subject)); `WaitTimeout` when `timeout` passes
    /// first, and they go on.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<JointReport> {
        self.transfers.check_fork()?;
        let late = "the reads had not ended when the wait did; they go on until their deadline: wait again, or cancel them";
        self.joint.end.wait(timeout, late)
    }

    /// Asks for the end of all. The outcome is `Cancelled`, unless another one was faster.
    pub fn cancel(&self) {
        if self.transfers.check_fork().is_ok() {
            let text = "the reads were cancelled here; start others if their pages are still wanted";
            let error = Error::new(Code::Cancelled, text);
            self.joint.stop(&error);
            self.transfers.cancel(self.joint.ids(), &error);
        }
    }

    /// A descriptor that becomes readable when all have ended, for event loops.
    ///
    /// # Errors
    /// `InvalidArgument` when the process has too many descriptors.
    pub fn done_fd(&self) -> Result<OwnedFd> {
        self.transfers.check_fork()?;
        self.joint.end.fd()
    }
}
