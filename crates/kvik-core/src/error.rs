//! One error type for the whole engine: a stable code and a text for a person.
//!
//! Codes travel between peers (as numbers) and into Python (as exception classes), so a number is never given to
//! another meaning. The text says what happened, to whom, and what to do next.

use crate::{EngineId, GrantId, RegionId};
use std::fmt;

/// `Result` with kvik's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Error {
    /// The stable kind of the error.
    pub code: Code,
    /// What happened, to which peer, region or page, and what to do next.
    pub text: String,
    subject: Option<Box<Subject>>,
}

/// What an error is about, as far as that is known, for programs that act on it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subject {
    /// The other engine.
    pub peer: Option<EngineId>,
    /// The grant.
    pub grant: Option<GrantId>,
    /// This engine's region.
    pub region: Option<RegionId>,
    /// This engine's page: its id in the layout that the transfer named.
    pub page: Option<u32>,
    /// Which of the reads of one call, by its place in the list.
    pub read: Option<u32>,
}

impl Error {
    /// An error of this kind with this text.
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Error { code, text: text.into(), subject: None }
    }

    /// What it is about. It stays within the process: between peers only the code and the text travel.
    pub fn subject(&self) -> Subject {
        self.subject.as_deref().cloned().unwrap_or_default()
    }

    /// The error, told to be about whatever is named here and was not named before.
    #[must_use]
    pub fn about(mut self, more: Subject) -> Error {
        let known = self.subject.get_or_insert_default();
        known.peer = known.peer.or(more.peer);
        known.grant = known.grant.or(more.grant);
        known.region = known.region.or(more.region);
        known.page = known.page.or(more.page);
        known.read = known.read.or(more.read);
        self
    }

    /// [`Error::about`] an engine.
    #[must_use]
    pub fn about_peer(self, peer: EngineId) -> Error {
        self.about(Subject { peer: Some(peer), ..Subject::default() })
    }

    /// [`Error::about`] a grant.
    #[must_use]
    pub fn about_grant(self, grant: GrantId) -> Error {
        self.about(Subject { grant: Some(grant), ..Subject::default() })
    }

    /// [`Error::about`] a region of this engine.
    #[must_use]
    pub fn about_region(self, region: RegionId) -> Error {
        self.about(Subject { region: Some(region), ..Subject::default() })
    }

    /// [`Error::about`] a page of this engine.
    #[must_use]
    pub fn about_page(self, page: u32) -> Error {
        self.about(Subject { page: Some(page), ..Subject::default() })
    }

    /// [`Error::about`] one of the reads of a call.
    #[must_use]
    pub fn about_read(self, place: u32) -> Error {
        self.about(Subject { read: Some(place), ..Subject::default() })
    }
}

macro_rules! codes {
    ($($number:literal $variant:ident $name:literal $doc:literal;)*) => {
        /// The stable kinds of errors. Numbers are part of the peer protocol.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Code {
            $(#[doc = $doc] $variant = $number,)*
        }

        impl Code {
            /// Every code, in the order of their numbers.
            pub const ALL: &'static [Code] = &[$(Code::$variant,)*];

            /// The name in snake case, as Python's `KvikError.code` shows it.
            pub fn name(self) -> &'static str {
                match self { $(Code::$variant => $name,)* }
            }

            /// The name of the Python exception class and of this variant.
            pub fn class(self) -> &'static str {
                match self { $(Code::$variant => stringify!($variant),)* }
            }

            /// One sentence about the kind, the same that the documentation shows.
            pub fn about(self) -> &'static str {
                match self { $(Code::$variant => $doc,)* }
            }

            /// The code of a number from the wire; a number that this version does not know is `ProtocolError`.
            pub fn from_wire(number: u16) -> Code {
                match number { $($number => Code::$variant,)* _ => Code::ProtocolError }
            }
        }
    };
}

codes! {
    1 InvalidArgument "invalid_argument" "An option or argument has a value that cannot be used.";
    2 UnknownTransport "unknown_transport" "The transport that was asked for does not exist.";
    3 PageOutOfRange "page_out_of_range" "A page id, layer or slice lies outside the layout, or the layout outside its region.";
    4 DuplicatePage "duplicate_page" "The destination names a page twice, or its pages overlap.";
    5 LayoutMismatch "layout_mismatch" "A layout contradicts itself: its elements overlap or overflow.";
    6 ShapeMismatch "shape_mismatch" "The two sides of a transfer do not have the same shape.";
    7 BufferInvalid "buffer_invalid" "A buffer has no length, is not contiguous, or was resized or released while registered.";
    8 TicketInvalid "ticket_invalid" "A ticket is truncated or altered.";
    9 TicketVersion "ticket_version" "A ticket was made by a version of kvik that this one does not read.";
    10 TicketForeign "ticket_foreign" "A ticket names another engine or another region than the one that was reached.";
    11 GrantUnknown "grant_unknown" "The owner does not know the grant.";
    12 GrantExpired "grant_expired" "The grant's time is over; its pages belong to the owner again.";
    13 GrantConsumed "grant_consumed" "Every reader that the grant was for has confirmed; its pages belong to the owner again.";
    14 GrantRevoked "grant_revoked" "The owner took the grant back.";
    15 GrantWrongRight "grant_wrong_right" "A read of a write grant, or a write to a read grant.";
    16 PageNotGranted "page_not_granted" "A position, layer or slice was asked for that the grant does not cover.";
    17 StaleGeneration "stale_generation" "The owner's pages changed hands during the copy; what was copied is thrown away.";
    18 PeerUnreachable "peer_unreachable" "No address of the peer can be reached from here.";
    19 PeerNotKvik "peer_not_kvik" "What listens at the address does not speak kvik's protocol.";
    20 VersionMismatch "version_mismatch" "The two engines have no protocol version in common.";
    21 SecretRequired "secret_required" "One side has a secret and the other has none.";
    22 SecretMismatch "secret_mismatch" "The two sides have different secrets.";
    23 PeerRestarted "peer_restarted" "The engine that gave the ticket has been restarted; its earlier tickets are void.";
    24 PeerLost "peer_lost" "The connection to the peer broke, or nothing was heard from it for too long.";
    25 ProtocolError "protocol_error" "The peer sent something that the protocol does not allow.";
    26 DeadlineExceeded "deadline_exceeded" "The operation did not end by its deadline, and was ended.";
    27 Cancelled "cancelled" "The operation was cancelled.";
    28 WaitTimeout "wait_timeout" "The wait ended before the transfer; the transfer goes on.";
    29 ChecksumMismatch "checksum_mismatch" "What was placed is not what was sent.";
    30 RegionClosed "region_closed" "The region was closed.";
    31 RegionBusy "region_busy" "The region is still used by a transfer.";
    32 EngineClosed "engine_closed" "The engine was closed.";
    33 EngineForked "engine_forked" "The engine belongs to the parent of this process.";
    34 TransportUnavailable "transport_unavailable" "The transport that was asked for cannot reach this peer.";
    35 MemoryCapReached "memory_cap_reached" "kvik would hold more memory for itself than its cap allows.";
    36 SealMissing "seal_missing" "Shared memory of a peer lacks the seals or the size that make it safe to map.";
    37 PagesQuarantined "pages_quarantined" "A peer may still touch the pages; they are not free yet.";
    38 TlsRequired "tls_required" "One side has TLS and the other has none.";
    39 TlsFailed "tls_failed" "A TLS handshake failed, or a record was altered on the way.";
    40 NotificationsFull "notifications_full" "The peer has not taken the notifications that were sent to it before.";
    41 DeviceFailed "device_failed" "A GPU or its driver refused something, or failed.";
    42 ContentMismatch "content_mismatch" "The grant holds other content than the request states.";
    43 ContentRequired "content_required" "The grant says what it holds, and the request does not say what it expects.";
    44 StorageFailed "storage_failed" "The store's disk refused something, or failed.";
    45 StorageFull "storage_full" "The store's disk, or its part of it, has no room left.";
    46 NamespaceUnknown "namespace_unknown" "The store does not know the namespace: it was not opened there since the store began.";
    47 StoreUnavailable "store_unavailable" "The store did not answer lately; it is not asked again before it does.";
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_and_names_are_unique() {
        let mut names = std::collections::BTreeSet::new();
        for &code in Code::ALL {
            assert_eq!(Code::from_wire(code as u16), code);
            assert!(names.insert(code.name()));
        }
        assert_eq!(Code::from_wire(65_535), Code::ProtocolError);
    }

    #[test]
    fn what_was_named_first_stays() {
        let error = Error::new(Code::PeerLost, "gone");
        assert_eq!(error.subject(), Subject::default());
        let error = error.about_page(3).about_page(4).about_region(RegionId(7));
        assert_eq!((error.subject().page, error.subject().region), (Some(3), Some(RegionId(7))));
        assert_eq!(error.subject().peer, None);
    }
}
