//! The first block of a get, which a client reads before it has heard that the store has it.
//!
//! A ticket that the store gave before, with a new id, is one for a grant that is asked for together with the block. The
//! read goes to the store right behind the request, and waits there until the grant is given: so nobody waits until a
//! ticket has come here and a request gone back. Where there is no such block, or it lies in memory of another layout, the
//! read waits in vain, and is ended when the store's answer says so.
//!
//! Invariants:
//! - What is read is compared like any other block, with what the store says of it: nothing counts before that has come.
//! - When it has ended, nothing lands in the caller's page any more.

use crate::sums::summed_layers;
use crate::wire::Ahead;
use kvik_core::{Class, EngineId, GrantId, Result, Ticket};
use kvik_engine::{Engine, PageSet, Transfer, TransferOptions, Verify};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What the next ticket of a store will be like: what the latest get has been lent first. None where it found nothing: then
/// the next one is taken to find nothing either. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Like(Arc<Mutex<Option<Ticket>>>);

impl Like {
    /// A grant of this peer to ask for, and the ticket for it.
    pub fn next(&self, peer: EngineId, expiry: Duration) -> Option<(Ahead, Ticket)> {
        let like = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let like = like.as_ref().filter(|ticket| ticket.engine == peer)?;
        let ticket = like.with_grant(GrantId::random().ok()?, expiry);
        Some((Ahead { grant: ticket.grant, layout: ticket.layout }, ticket))
    }

    /// What a get has been lent first.
    pub fn set(&self, ticket: Option<Ticket>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = ticket;
    }
}

/// A read that waits for its grant. Dropped, it ends.
pub(crate) struct Early {
    grant: GrantId,
    into: PageSet,
    /// None when it was taken.
    transfer: Option<Transfer>,
}

impl Early {
    /// Begins to read the first page.
    ///
    /// # Errors
    /// As for [`Engine::read`].
    pub fn begin(engine: &Engine, ticket: Ticket, pages: &PageSet, deadline: Duration) -> Result<Early> {
        let into = pages.select([0])?;
        let options = reading(&into, deadline, true)?;
        let transfer = engine.read(&into, &ticket, Some(Arc::new([0])), options)?;
        Ok(Early { grant: ticket.grant, into, transfer: Some(transfer) })
    }

    /// The read, where it is by this ticket, and has not failed.
    pub fn take(mut self, ticket: &Ticket) -> Option<(PageSet, Transfer)> {
        let failed = |transfer: &Transfer| transfer.result().is_some_and(|outcome| outcome.is_err());
        let reads = ticket.grant == self.grant && !self.transfer.as_ref().is_none_or(failed);
        let transfer = if reads { self.transfer.take() } else { None };
        transfer.map(|transfer| (self.into.clone(), transfer))
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        if let Some(transfer) = &self.transfer {
            transfer.cancel();
            // Its outcome is of no interest any more.
            drop(transfer.wait(None));
        }
    }
}

/// How blocks are read, which are `alone` where it is the only read of its grant.
pub(crate) fn reading(into: &PageSet, left: Duration, alone: bool) -> Result<TransferOptions> {
    Ok(TransferOptions {
        class: Class::Bulk,
        deadline: Some(left.max(Duration::from_millis(1))),
        confirm: Some(alone),
        // Every block is compared with what the store has of it: that finds what the transport would.
        verify: Some(Verify::Off),
        sums: Some(summed_layers(into)?),
        ..TransferOptions::default()
    })
}
