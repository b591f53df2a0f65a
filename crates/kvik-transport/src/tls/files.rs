//! An engine's certificate, key and authority: three PEM files, read once and checked before anybody connects.

use super::reason;
use kvik_core::{Code, Error, Result};
use rustls::CipherSuite::TLS13_AES_128_GCM_SHA256;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::pem::{Error as PemError, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// No file of certificates is larger.
const MOST: u64 = 1 << 20;

/// Where an engine's certificate, its key and the authority are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// Its certificate in PEM, with any between it and the authority.
    pub cert: PathBuf,
    /// The certificate's private key in PEM.
    pub key: PathBuf,
    /// The certificates in PEM, one or several, that those of all engines must chain to.
    pub ca: PathBuf,
}

impl TlsFiles {
    /// `tls.crt`, `tls.key` and `ca.crt` in a directory: the names that a Kubernetes secret gives them.
    pub fn within(directory: impl AsRef<Path>) -> TlsFiles {
        let directory = directory.as_ref();
        TlsFiles {
            cert: directory.join("tls.crt"),
            key: directory.join("tls.key"),
            ca: directory.join("ca.crt"),
        }
    }
}

/// What an engine needs to speak TLS on either side of a connection.
#[derive(Clone)]
pub struct Tls {
    pub(super) client: Arc<ClientConfig>,
    pub(super) server: Arc<ServerConfig>,
}

impl Tls {
    /// Reads the files, and checks that the key fits the certificate and that a peer with the same authority would
    /// admit it now, on both sides of a connection.
    ///
    /// # Errors
    /// `InvalidArgument`: which file, what is wrong with it, and what to do.
    pub fn load(files: &TlsFiles) -> Result<Tls> {
        let mut provider = rustls::crypto::ring::default_provider();
        // Of the suites that are all strong enough, the one that costs least goes first.
        provider.cipher_suites.sort_by_key(|suite| suite.suite() != TLS13_AES_128_GCM_SHA256);
        Tls::load_with(files, provider)
    }

    pub(super) fn load_with(files: &TlsFiles, provider: CryptoProvider) -> Result<Tls> {
        let chain = certificates(&files.cert)?;
        let key = PrivateKeyDer::from_pem_slice(&read(&files.key)?)
            .map_err(|error| wrong(&files.key, &no_pem("private key", error)))?;
        let mut roots = RootCertStore::empty();
        for root in certificates(&files.ca)? {
            roots.add(root).map_err(|error| wrong(&files.ca, &reason(&error)))?;
        }
        let (roots, provider) = (Arc::new(roots), Arc::new(provider));
        let admits = Admits { roots: roots.clone(), provider: provider.clone() };
        let clients = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .build()
            .map_err(|error| wrong(&files.ca, &error.to_string()))?;
        let (own, between) =
            chain.split_first().ok_or_else(|| wrong(&files.cert, "it has no certificate"))?;
        let now = UnixTime::now();
        admits
            .chains(own, between, now)
            .and_then(|()| clients.verify_client_cert(own, between, now).map(drop))
            .map_err(|error| wrong(&files.cert, &format!("no peer would admit it: {}", reason(&error))))?;

        let fits = |error: rustls::Error| {
            let text = format!("it is not the key of {}, or cannot be used: {error}", files.cert.display());
            wrong(&files.key, &text)
        };
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])
            .map_err(fits)?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(fits)?;
        // A session is its own resumption: it lives long, and nothing is gained by tickets for another one.
        server.send_tls13_tickets = 0;
        server.session_storage = Arc::new(NoServerSessionStorage {});
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])
            .map_err(fits)?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(admits))
            .with_client_auth_cert(chain, key)
            .map_err(fits)?;
        client.resumption = Resumption::disabled();
        client.enable_sni = false;
        Ok(Tls { client: Arc::new(client), server: Arc::new(server) })
    }
}

impl std::fmt::Debug for Tls {
    /// Nothing of what it holds.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

/// Admits whoever has a certificate of the authority, whatever its name: the check of a server's certificate that
/// the standard one makes, but for the name.
#[derive(Debug)]
struct Admits {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl Admits {
    fn chains(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        let algorithms = self.provider.signature_verification_algorithms.all;
        let own = ParsedCertificate::try_from(own)?;
        verify_server_cert_signed_by_trust_anchor(&own, &self.roots, between, now, algorithms)
    }
}

impl ServerCertVerifier for Admits {
    fn verify_server_cert(
        &self,
        own: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.chains(own, between, now).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls12NotOfferedOrEnabled.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let pem = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match found {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(wrong(path, &no_pem("certificate", PemError::NoItemsFound))),
        Err(error) => Err(wrong(path, &no_pem("certificate", error))),
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let fail = |error: std::io::Error| wrong(path, &format!("it cannot be read: {error}"));
    let mut bytes = Vec::new();
    File::open(path).map_err(fail)?.take(MOST + 1).read_to_end(&mut bytes).map_err(fail)?;
    match bytes.len() as u64 > MOST {
        true => Err(wrong(path, "it is larger than 1 MiB: no file of certificates is")),
        false => Ok(bytes),
    }
}

fn no_pem(what: &str, error: PemError) -> String {
    match error {
        PemError::NoItemsFound => format!("it has no {what} in PEM (-----BEGIN ...-----)"),
        error => format!("its PEM is damaged: {error}"),
    }
}

fn wrong(path: &Path, what: &str) -> Error {
    Error::new(Code::InvalidArgument, format!("tls: {}: {what}", path.display()))
}
