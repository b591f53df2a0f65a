//! What a grant allows, and how it can end.

/// What the holder of a ticket may do with the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Right {
    /// Read the owner's pages.
    Read,
    /// Write the owner's pages.
    Write,
}

impl Right {
    /// `"read"` or `"write"`.
    pub fn name(self) -> &'static str {
        match self {
            Right::Read => "read",
            Right::Write => "write",
        }
    }
}

/// How often a grant may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Use {
    /// Consumed when this many different engines have confirmed. Until then each may retry or go in parts.
    Once(u32),
    /// Until it expires or is revoked.
    Many,
}

/// Where a grant stands. Only a live grant serves requests; every other state is final.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GrantState {
    /// Requests are served.
    Live,
    /// Every reader has confirmed.
    Consumed,
    /// Its time is over.
    Expired,
    /// The owner took it back.
    Revoked,
    /// Its region or engine was closed.
    Closed,
}

impl GrantState {
    /// The name in lower case.
    pub fn name(self) -> &'static str {
        match self {
            GrantState::Live => "live",
            GrantState::Consumed => "consumed",
            GrantState::Expired => "expired",
            GrantState::Revoked => "revoked",
            GrantState::Closed => "closed",
        }
    }
}
