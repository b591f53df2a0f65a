//! TLS for an engine's TCP connections, control and data alike.
//!
//! TLS 1.3 only, and mutual: each side presents a certificate and demands one of the other, and both must chain to
//! one certificate authority. **The authority admits engines.** Names in certificates are not looked at: tickets
//! carry addresses, and an engine may be reached by any of several. So whoever holds a certificate of that authority
//! and its key is an engine like any other; an authority for kvik signs nothing else.
//!
//! - [`files`]: the three files of an engine, read and checked when it starts;
//! - [`link`]: one connection's records, between a socket and whoever reads and writes its plain bytes.
//!
//! kvik's own handshake (identities, incarnations, the proof of the secret) runs inside, tied to the TLS connection
//! by a [`Binding`](kvik_proto::Binding). There is no resumption, no early data, and no way back to plain TCP: which
//! of the two a connection is shows in its first byte, and the wrong one is refused with words.

mod files;
mod link;
#[cfg(test)]
pub(crate) mod tests;

pub use files::{Tls, TlsFiles};
pub use link::{TLS_CONTROL_BYTES, TLS_DATA_BYTES, TlsLink, began_with_tls};

use kvik_core::{Code, Error};
use rustls::CertificateError::{
    BadSignature, Expired, ExpiredContext, InvalidPurpose, InvalidPurposeContext, NotValidYet,
    NotValidYetContext, UnknownIssuer,
};
use std::net::SocketAddr;

/// What rustls says, with what to do about it where that is known.
pub(crate) fn reason(error: &rustls::Error) -> String {
    use rustls::{AlertDescription as Alert, Error as Of};
    let hint = match error {
        Of::InvalidCertificate(UnknownIssuer | BadSignature) => {
            ": it is not of the authority in ca.crt; both sides need one authority"
        }
        Of::InvalidCertificate(Expired | ExpiredContext { .. }) => ": it has expired; make a new one",
        Of::InvalidCertificate(NotValidYet | NotValidYetContext { .. }) => {
            ": its time has not come; compare the clocks of the two machines"
        }
        Of::InvalidCertificate(InvalidPurpose | InvalidPurposeContext { .. }) => {
            ": an engine's certificate is for servers and for clients, or names no purpose"
        }
        Of::NoCertificatesPresented => ": engines prove who they are to each other; give it a certificate",
        Of::AlertReceived(Alert::UnknownCA | Alert::DecryptError) => {
            ": this side's certificate is not of its authority"
        }
        Of::AlertReceived(Alert::CertificateExpired) => ": this side's certificate has expired",
        Of::AlertReceived(Alert::CertificateRequired) => ": it demands a certificate",
        Of::AlertReceived(Alert::ProtocolVersion) => ": it does not speak TLS 1.3",
        Of::DecryptError => ": a record was altered on the way",
        _ => "",
    };
    format!("{error}{hint}")
}

/// The error of a TLS connection with `peer`.
pub(crate) fn failed(peer: SocketAddr, error: &rustls::Error) -> Error {
    let who = match error {
        rustls::Error::AlertReceived(_) => format!("the other side at {peer} broke off TLS"),
        _ => format!("TLS with {peer} failed"),
    };
    Error::new(Code::TlsFailed, format!("{who}: {}", reason(error)))
}
