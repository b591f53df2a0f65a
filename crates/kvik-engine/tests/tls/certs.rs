//! Authorities and the certificates that they give.

use kvik_engine::{Config, Engine, Preference, TlsFiles};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A directory that is removed with this value.
pub struct Directory(PathBuf);

impl Directory {
    pub fn new() -> Directory {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("kvik-tls-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.0.join(name), text).unwrap();
    }

    pub fn files(&self) -> TlsFiles {
        TlsFiles::within(&self.0)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Whoever has a certificate of it is an engine.
pub struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub fn new() -> Authority {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Authority::named(&format!("authority {}", NEXT.fetch_add(1, Ordering::Relaxed)))
    }

    pub fn named(name: &str) -> Authority {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { pem, issuer: Issuer::new(params, key) }
    }

    /// The three files of an engine.
    pub fn admit(&self) -> Directory {
        self.admit_as(|_| {})
    }

    /// The same, with a certificate that is changed before it is signed.
    pub fn admit_as(&self, change: impl FnOnce(&mut CertificateParams)) -> Directory {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["an engine".to_owned()]).unwrap();
        change(&mut params);
        let directory = Directory::new();
        directory.write("tls.crt", &params.signed_by(&key, &self.issuer).unwrap().pem());
        directory.write("tls.key", &key.serialize_pem());
        directory.write("ca.crt", &self.pem);
        directory
    }

    pub fn pem(&self) -> &str {
        &self.pem
    }
}

pub fn expired(params: &mut CertificateParams) {
    (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1));
}

pub fn not_yet(params: &mut CertificateParams) {
    (params.not_before, params.not_after) = (date_time_ymd(2120, 1, 1), date_time_ymd(2121, 1, 1));
}

pub fn for_servers_only(params: &mut CertificateParams) {
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
}

pub fn config(directory: &Directory) -> Config {
    Config { transport: Preference::Tcp, tls: Some(directory.files()), ..Config::default() }
}

pub fn engine(directory: &Directory) -> Engine {
    Engine::start(config(directory)).unwrap()
}
