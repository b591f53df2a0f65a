//! Servers of a store that enter themselves in etcd, and clients that follow the list there.
//!
//! A server has a lease, and a key `PREFIX/HOST:PORT` that goes with it. It is no part of a put or a get: where etcd is away,
//! clients go on with the servers that they know, and servers enter themselves again when it is back.

mod access;
mod gateway;
mod register;

pub(crate) use gateway::Gateway;
pub use register::Registration;

use crate::address::host_and_port;
use crate::cluster::Following;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use gateway::Next;
use kvik_core::{Code, Error, Result};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How long a watch goes on, at most: a connection that has silently gone tells of nothing.
const WATCH: Duration = Duration::from_secs(30);
/// How soon who watches looks whether it is to end.
const STEP: Duration = Duration::from_millis(500);

/// Where servers are entered: an etcd, and the beginning of their keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Etcd {
    /// Its scheme, host and port.
    url: String,
    /// With a slash at its end.
    prefix: String,
}

/// The servers at one revision of etcd.
pub(crate) struct Listed {
    pub names: Vec<String>,
    pub revision: u64,
}

impl From<Vec<String>> for Listed {
    fn from(names: Vec<String>) -> Listed {
        Listed { names, revision: 0 }
    }
}

impl Etcd {
    /// From `http://HOST:PORT/PREFIX`, or with `https`. Certificates and user come from the environment, as for
    /// `etcdctl`: `ETCDCTL_CACERT`, `ETCDCTL_CERT`, `ETCDCTL_KEY`, `ETCDCTL_USER`, `ETCDCTL_PASSWORD`.
    ///
    /// # Errors
    /// `InvalidArgument` for what is none.
    pub fn parse(url: &str) -> Result<Etcd> {
        let parts = url.split_once("://").filter(|(scheme, _)| ["http", "https"].contains(scheme));
        let parts = parts.and_then(|(scheme, rest)| Some((scheme, rest.split_once('/')?)));
        let parts = parts.filter(|(_, (_, prefix))| !prefix.trim_matches('/').is_empty());
        let Some((scheme, (at, prefix))) = parts.filter(|(_, (at, _))| !at.contains('@')) else {
            // It may have a password in it, so it is not repeated.
            let text = "a place in etcd is written http://HOST:PORT/PREFIX, or with https; who asks is said by ETCDCTL_USER and \
                        ETCDCTL_CERT, as for etcdctl";
            return Err(Error::new(Code::InvalidArgument, text));
        };
        host_and_port(at)?;
        Ok(Etcd { url: format!("{scheme}://{at}"), prefix: format!("{}/", prefix.trim_matches('/')) })
    }

    fn url(&self) -> &str {
        &self.url
    }

    fn is_encrypted(&self) -> bool {
        self.url.starts_with("https:")
    }

    fn range(&self) -> Value {
        // All keys with the prefix: up to the one that its last byte, a slash, is followed by.
        let end = format!("{}0", self.prefix.trim_end_matches('/'));
        json!({ "key": STANDARD.encode(&self.prefix), "range_end": STANDARD.encode(end) })
    }
}

impl Gateway {
    /// The servers that are entered now, which may be none.
    ///
    /// # Errors
    /// `StoreUnavailable` where etcd does not answer.
    pub fn list(&mut self) -> Result<Listed> {
        let answer = self.ask("kv/range", &self.etcd().range())?;
        let etcd = self.etcd();
        let revision = number(&answer["header"]["revision"]).unwrap_or(0);
        let mut names = Vec::new();
        for one in answer["kvs"].as_array().into_iter().flatten() {
            let key = one["key"].as_str().and_then(|text| STANDARD.decode(text).ok()).unwrap_or_default();
            let name = String::from_utf8_lossy(&key);
            let name = name.strip_prefix(&etcd.prefix).unwrap_or(&name);
            match host_and_port(name) {
                Ok(_) => names.push(name.to_owned()),
                Err(error) => log::warn!("{etcd} has a server that is none: {error}"),
            }
        }
        names.sort();
        Ok(Listed { names, revision })
    }

    /// That no server is entered.
    pub fn nobody(&self) -> Error {
        let text =
            format!("no server is entered in {}: start one with `kvik store serve --etcd`", self.etcd());
        Error::new(Code::StoreUnavailable, text)
    }

    /// Waits until the servers may be others than those that were listed, or the watch has lasted its time.
    ///
    /// # Errors
    /// `StoreUnavailable` where etcd does not answer.
    pub fn wait_for_change(&mut self, listed: &Listed, following: &Following) -> Result<()> {
        let mut create = self.etcd().range();
        create["start_revision"] = Value::from((listed.revision + 1).to_string());
        let mut watch = self.stream("watch", &json!({ "create_request": create }))?;
        let until = Instant::now() + WATCH;
        while Instant::now() < until && !following.wait(Duration::ZERO) {
            match self.next(&mut watch, STEP)? {
                Next::Line(line) => {
                    let said: Value = serde_json::from_slice(&line).unwrap_or_default();
                    // The first line says that the watch is there; an error, that it has ended.
                    if said["result"]["events"].is_array() || said["result"]["created"] != Value::Bool(true) {
                        return Ok(());
                    }
                }
                Next::Nothing => {}
                Next::End => return Ok(()),
            }
        }
        Ok(())
    }
}

/// A number that the gateway gives as text.
fn number(value: &Value) -> Option<u64> {
    value.as_str()?.parse().ok()
}

impl std::fmt::Display for Etcd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "etcd at {}/{}", self.url, self.prefix.trim_end_matches('/'))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_has_a_host_a_port_and_a_prefix() {
        let etcd = Etcd::parse("http://127.0.0.1:2379/kvik/store").unwrap();
        assert_eq!(etcd.to_string(), "etcd at http://127.0.0.1:2379/kvik/store");
        let range = etcd.range();
        assert_eq!(range["range_end"], STANDARD.encode("kvik/store0"));
        assert!(Etcd::parse("https://[::1]:2379/kvik").unwrap().is_encrypted());
        for wrong in
            ["ftp://a:1/b", "http://a:1", "http://a:1/", "http://a/b", "a:1/b", "http://me:secret@a:1/b"]
        {
            let error = Etcd::parse(wrong).unwrap_err();
            assert!(
                error.code == Code::InvalidArgument && !error.text.contains("secret"),
                "{wrong}: {error}"
            );
        }
    }
}
