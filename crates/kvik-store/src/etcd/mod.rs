//! Servers of a store that enter themselves in etcd, and clients that follow the list there.
//!
//! A server has a lease, and a key `PREFIX/HOST:PORT` that goes with it. It is no part of a put or a get: where etcd is away,
//! clients go on with the servers that they know, and servers enter themselves again when it is back.

mod http;
mod register;

pub use register::Registration;

use crate::address::host_and_port;
use crate::cluster::Following;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{Answer, is_silence};
use kvik_core::{Code, Error, Result};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// How long etcd may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a watch goes on, at most: a connection that has silently gone tells of nothing.
const WATCH: Duration = Duration::from_secs(30);
/// How soon who watches looks whether it is to end.
const STEP: Duration = Duration::from_millis(500);

/// Where servers are entered: an etcd, and the beginning of their keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Etcd {
    host: String,
    port: u16,
    /// With a slash at its end.
    prefix: String,
}

/// The servers at one revision of etcd.
pub(crate) struct Listed {
    pub names: Vec<String>,
    revision: u64,
}

impl From<Vec<String>> for Listed {
    fn from(names: Vec<String>) -> Listed {
        Listed { names, revision: 0 }
    }
}

impl Etcd {
    /// From `http://HOST:PORT/PREFIX`.
    ///
    /// # Errors
    /// `InvalidArgument` for what is none.
    pub fn parse(url: &str) -> Result<Etcd> {
        let parts = url.strip_prefix("http://").and_then(|rest| rest.split_once('/'));
        let (at, prefix) = parts.filter(|(_, prefix)| !prefix.trim_matches('/').is_empty()).ok_or_else(|| {
            let text = format!(
                "{url:?} says no place in etcd: write http://HOST:PORT/PREFIX. It is spoken to without TLS, so let it \
                 listen where only those come that may name servers"
            );
            Error::new(Code::InvalidArgument, text)
        })?;
        let (host, port) = host_and_port(at)?;
        Ok(Etcd { host: host.to_owned(), port, prefix: format!("{}/", prefix.trim_matches('/')) })
    }

    /// The servers that are entered now.
    ///
    /// # Errors
    /// `StoreUnavailable` where etcd does not answer, or no server is entered.
    pub(crate) fn list(&self) -> Result<Listed> {
        let answer = self.ask("kv/range", &self.range())?;
        let revision = number(&answer["header"]["revision"]).unwrap_or(0);
        let mut names = Vec::new();
        for one in answer["kvs"].as_array().into_iter().flatten() {
            let key = one["key"].as_str().and_then(|text| STANDARD.decode(text).ok()).unwrap_or_default();
            let name = String::from_utf8_lossy(&key);
            let name = name.strip_prefix(&self.prefix).unwrap_or(&name);
            match host_and_port(name) {
                Ok(_) => names.push(name.to_owned()),
                Err(error) => log::warn!("{self} has a server that is none: {error}"),
            }
        }
        names.sort();
        if names.is_empty() {
            let text = format!("no server is entered in {self}: start one with `kvik store serve --etcd`");
            return Err(Error::new(Code::StoreUnavailable, text));
        }
        Ok(Listed { names, revision })
    }

    /// Waits until the servers may be others than those that were listed, or the watch has lasted its time.
    ///
    /// # Errors
    /// `StoreUnavailable` where etcd does not answer.
    pub(crate) fn wait_for_change(&self, listed: &Listed, following: &Following) -> Result<()> {
        let mut create = self.range();
        create["start_revision"] = Value::from((listed.revision + 1).to_string());
        let request = json!({ "create_request": create }).to_string();
        let mut watch = self.send("watch", &request)?;
        let until = Instant::now() + WATCH;
        while Instant::now() < until && !following.wait(Duration::ZERO) {
            match watch.line(Instant::now() + STEP) {
                Ok(Some(line)) => {
                    let said: Value = serde_json::from_slice(&line).unwrap_or_default();
                    // The first line says that the watch is there; an error, that it has ended.
                    if said["result"]["events"].is_array() || said["result"]["created"] != Value::Bool(true) {
                        return Ok(());
                    }
                }
                Ok(None) => return Ok(()),
                Err(error) if is_silence(&error) => {}
                Err(error) => return Err(self.unavailable(&error)),
            }
        }
        Ok(())
    }

    fn range(&self) -> Value {
        // All keys with the prefix: up to the one that its last byte, a slash, is followed by.
        let end = format!("{}0", self.prefix.trim_end_matches('/'));
        json!({ "key": STANDARD.encode(&self.prefix), "range_end": STANDARD.encode(end) })
    }

    fn send(&self, path: &str, request: &str) -> Result<Answer> {
        let until = Instant::now() + PATIENCE;
        Answer::to((&self.host, self.port), &format!("/v3/{path}"), request, until)
            .map_err(|error| self.unavailable(&error))
    }

    /// Asks for one answer.
    fn ask(&self, path: &str, request: &Value) -> Result<Value> {
        let until = Instant::now() + PATIENCE;
        let body =
            self.send(path, &request.to_string())?.whole(until).map_err(|error| self.unavailable(&error))?;
        serde_json::from_slice(&body).map_err(|error| {
            Error::new(Code::ProtocolError, format!("{self} answers with what is no JSON: {error}"))
        })
    }

    fn unavailable(&self, error: &std::io::Error) -> Error {
        Error::new(Code::StoreUnavailable, format!("{self} does not answer as it should: {error}"))
    }
}

/// A number that the gateway gives as text.
fn number(value: &Value) -> Option<u64> {
    value.as_str()?.parse().ok()
}

impl std::fmt::Display for Etcd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "etcd at http://{}:{}/{}", self.host, self.port, self.prefix.trim_end_matches('/'))
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
        for wrong in ["https://a:1/b", "http://a:1", "http://a:1/", "http://a/b", "a:1/b"] {
            assert_eq!(Etcd::parse(wrong).unwrap_err().code, Code::InvalidArgument, "{wrong}");
        }
    }
}
