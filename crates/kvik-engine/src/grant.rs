//! The owner's handle of a grant.

use crate::grants::GrantCell;
use crate::inner::Inner;
use crate::region::Region;
use kvik_core::{
    CONTENT_DIGEST_BYTES, Code, Content, Error, GrantId, GrantState, Result, Right, Ticket, Use, View,
};
use kvik_host::device::CallerStream;
use kvik_proto::Holding;
use std::sync::Arc;
use std::time::Duration;

/// What a grant allows.
#[derive(Debug, Clone)]
pub struct GrantOptions {
    /// Read or write. Default: read.
    pub right: Right,
    /// How often. Default: once, by one reader, or by as many as the readers themselves declare.
    pub uses: Use,
    /// How long it lives if it is not extended. Default 120 s.
    pub expiry: Duration,
    /// How long it lives at most, with all extensions. Default 600 s.
    pub max_expiry: Duration,
    /// What its pages hold, a link for each of them in their order: then who uses the grant states the same. None: it
    /// is not said, and nothing of it is compared.
    pub content: Option<Content>,
    /// Its id, where somebody else has already made the ticket. Default: a new one.
    pub id: Option<GrantId>,
    /// A stream of the pages' device: nobody gets to the pages before it has done what it was given up to this call,
    /// and who asks waits. Default: none, the pages are free.
    pub after: Option<CallerStream>,
    /// A request id for this side's log lines; it is never sent.
    pub tag: String,
}

impl Default for GrantOptions {
    fn default() -> Self {
        GrantOptions {
            right: Right::Read,
            uses: Use::Once(1),
            expiry: Duration::from_secs(120),
            max_expiry: Duration::from_secs(600),
            content: None,
            id: None,
            after: None,
            tag: String::new(),
        }
    }
}

impl GrantOptions {
    pub(crate) fn check(&self) -> Result<()> {
        let most = Duration::from_secs(7 * 24 * 3600);
        if self.expiry.is_zero() || self.expiry > self.max_expiry || self.max_expiry > most {
            return Err(Error::new(
                Code::InvalidArgument,
                format!(
                    "a grant's expiry ({:?}) is more than 0 and at most its max_expiry ({:?}), which is at most {most:?}",
                    self.expiry, self.max_expiry
                ),
            ));
        }
        if self.uses == Use::Once(0) {
            return Err(Error::new(
                Code::InvalidArgument,
                "a grant for no reader is none: use is at least 1, or many",
            ));
        }
        Ok(())
    }
}

/// A grant that this engine has given.
#[derive(Clone)]
pub struct Grant {
    pub(crate) inner: Arc<Inner>,
    pub(crate) ticket: Arc<Ticket>,
    pub(crate) cell: Arc<GrantCell>,
    /// The region stays registered while its grant is held.
    pub(crate) region: Region,
}

impl Grant {
    /// Its id.
    pub fn id(&self) -> GrantId {
        self.ticket.grant
    }
    /// What those who may use it need.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }
    /// Where it stands. Anything but live means that the pages are the owner's again.
    pub fn state(&self) -> GrantState {
        self.cell.end.outcome().and_then(Result::ok).unwrap_or(GrantState::Live)
    }

    /// Keeps its region registered until it has ended, also when nobody refers to either of them any more. Without this
    /// it ends when the last of those who refer to its region lets go of that.
    pub fn keep_region(&self) {
        self.inner.grants.keep(self.id(), &self.cell, self.region.inner.clone());
    }

    /// Takes it back. When this returns, the pages are the owner's again.
    ///
    /// # Errors
    /// `PagesQuarantined` when that could not be brought about by the timeout: the text names the pages and who may
    /// still touch them, and [`Grant::wait`] returns when nobody does any more.
    pub fn revoke(&self, timeout: Duration) -> Result<()> {
        self.inner.base.setup.check_fork()?;
        self.inner.base.node(|node, _| node.grants().end(self.id(), GrantState::Revoked));
        if self.wait(timeout).is_some() {
            return Ok(());
        }
        self.inner.grants.tell_quarantine_of(self.id());
        match self.inner.base.node(|node, _| node.holding(self.id())) {
            None => Ok(()),
            Some(holding) => Err(Error::new(
                Code::PagesQuarantined,
                format!(
                    "{}; do not use them before `wait` on the grant returns, when the last transfer has let go",
                    describe(&holding)
                ),
            )
            .about_grant(self.id())),
        }
    }

    /// Gives it more time, up to its `max_expiry`: how much it now has.
    ///
    /// # Errors
    /// The way it ended.
    pub fn extend(&self, by: Duration) -> Result<Duration> {
        self.inner.base.setup.check()?;
        let extended = self.inner.base.node(|node, now| node.grants().extend(self.id(), by, now));
        extended.map_err(|error| error.about_grant(self.id()))
    }

    /// The final state, once the pages are the owner's again; `None` at the timeout.
    pub fn wait(&self, timeout: Duration) -> Option<GrantState> {
        self.cell.end.wait(Some(timeout), "the grant lives").ok()
    }
}

/// What a grant takes: its page list, and what the pages hold.
pub(crate) fn grant_bytes(view: &View, content: Option<&Content>) -> u64 {
    let content = content.map_or(0, |content| content.links() * CONTENT_DIGEST_BYTES + content.part().len());
    1024 + 4 * view.pages().len() as u64 + content as u64
}

/// What keeps a grant's pages from their owner, in words.
pub(crate) fn describe(holding: &Holding) -> String {
    let what = if holding.parts > 1 { "parts of pages" } else { "pages" };
    let by: Vec<&str> = holding.by.iter().map(String::as_str).collect();
    let by = if by.is_empty() { "nobody any more".to_owned() } else { by.join(", ") };
    format!("{what} {} of grant {} may still be touched by {by}", ranges(&holding.pages), holding.grant)
}

/// Ids in few words: runs, and no more of them than a person reads.
fn ranges(ids: &[u32]) -> String {
    const MOST: usize = 8;
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let runs: Vec<&[u32]> = sorted.chunk_by(|a, b| b - a == 1).collect();
    let shown = runs.iter().take(MOST).map(|run| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    let shown: Vec<String> = shown.collect();
    let more = if runs.len() > MOST { format!(", ... ({} in all)", sorted.len()) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_named_in_few_words() {
        assert_eq!(ranges(&[7]), "7");
        assert_eq!(ranges(&[9, 3, 4, 5, 5, 11, 10]), "3-5, 9-11");
        let many: Vec<u32> = (0..100).map(|i| i * 2).collect();
        assert_eq!(ranges(&many), "0, 2, 4, 6, 8, 10, 12, 14, ... (100 in all)");
        assert_eq!(ranges(&[u32::MAX, u32::MAX - 1]), "4294967294-4294967295");
    }
}
