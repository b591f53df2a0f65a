//! What the router is told, and what it refuses to start with.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use http::Uri;
use http::uri::{Authority, PathAndQuery, Scheme};

use crate::memory::COPIES;

/// Everything a router is started with. [`RouterConfig::new`] gives the defaults; every field may be changed.
#[derive(Debug, Clone)]
pub struct RouterConfig {
    /// Host name or address to listen on. Loopback unless the operator says otherwise.
    pub host: String,
    /// TCP port to listen on; 0 takes a free one, which [`RunningRouter::addr`](crate::RunningRouter::addr) tells.
    pub port: u16,
    /// Engines that compute the KV-cache of prompts.
    pub prefill: Vec<EngineUrl>,
    /// Engines that generate answers.
    pub decode: Vec<EngineUrl>,
    /// Bound on opening a TCP connection to an engine.
    pub connect_timeout: Duration,
    /// Longest silence of a prefill engine: before its first byte, and between two reads of its answer.
    pub prefill_timeout: Duration,
    /// Longest silence of a decode engine: before its first byte, and between two chunks. A whole answer that
    /// is not streamed is one silence, so this also bounds the generation of such an answer.
    pub decode_timeout: Duration,
    /// Longest silence of a client that owes us bytes or that owes us an acknowledgement of ours. A whole body may
    /// take longer by a second for each 16 KiB that has come.
    pub client_timeout: Duration,
    /// Bound on the attempt to give back KV that no decode engine takes.
    pub release_timeout: Duration,
    /// Bound on finishing open requests after a stop.
    pub drain_timeout: Duration,
    /// Largest request body, in bytes.
    pub max_body: usize,
    /// Most memory of the bodies of all requests, in bytes: three times their length, since engines get their own. One
    /// that has no room is answered 503 with `Retry-After`.
    pub max_body_memory: usize,
    /// Most requests in progress; one more is answered 503 with `Retry-After`.
    pub max_inflight: usize,
    /// Whether KV is handed over while prefill still computes, from engines that can.
    pub stream: bool,
}

impl RouterConfig {
    /// The defaults, between these engines, on `127.0.0.1` and port 8000.
    pub fn new(prefill: Vec<EngineUrl>, decode: Vec<EngineUrl>) -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8000,
            prefill,
            decode,
            connect_timeout: Duration::from_secs(5),
            prefill_timeout: Duration::from_secs(300),
            decode_timeout: Duration::from_secs(600),
            client_timeout: Duration::from_secs(60),
            release_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(30),
            max_body: 32 << 20,
            max_body_memory: 512 << 20,
            max_inflight: 1024,
            stream: false,
        }
    }

    /// Refuses what could only fail later, in words that say what to change.
    pub(crate) fn check(&self) -> Result<(), RouterError> {
        let refuse = |what: &str| Err(RouterError::Config(what.into()));
        if self.prefill.is_empty() {
            return refuse("no prefill engine: name at least one URL for the role prefill");
        }
        if self.decode.is_empty() {
            return refuse("no decode engine: name at least one URL for the role decode");
        }
        if self.max_inflight == 0 {
            return refuse("max_inflight is 0: at least one request must be let in");
        }
        if self.max_inflight > MOST_INFLIGHT {
            return refuse("max_inflight is above 1000000: no machine serves that many requests at once");
        }
        if self.max_body == 0 {
            return refuse("max_body is 0: every request has a body");
        }
        if self.max_body_memory / COPIES < self.max_body {
            let text = format!(
                "max_body_memory is {}: it must be at least {COPIES} times max_body, which is {}",
                self.max_body_memory, self.max_body
            );
            return refuse(&text);
        }
        let times = [
            ("connect_timeout", self.connect_timeout),
            ("prefill_timeout", self.prefill_timeout),
            ("decode_timeout", self.decode_timeout),
            ("client_timeout", self.client_timeout),
            ("release_timeout", self.release_timeout),
            ("drain_timeout", self.drain_timeout),
        ];
        for (name, value) in times {
            if value.is_zero() || value > LONGEST {
                return Err(RouterError::Config(format!("{name} must be above 0 and at most one day")));
            }
        }
        Ok(())
    }
}

/// A timeout longer than this is a mistake of units.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
const MOST_INFLIGHT: usize = 1_000_000;

/// Where an engine listens: `http://HOST:PORT`, optionally with a path that is put before every path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineUrl {
    authority: Authority,
    prefix: String,
}

impl EngineUrl {
    /// The address of `path` (which starts with `/`) on this engine.
    pub(crate) fn join(&self, path: &str) -> Result<Uri, http::Error> {
        let path: PathAndQuery = format!("{}{path}", self.prefix).parse()?;
        Uri::builder().scheme(Scheme::HTTP).authority(self.authority.clone()).path_and_query(path).build()
    }
}

impl FromStr for EngineUrl {
    type Err = RouterError;

    fn from_str(text: &str) -> Result<Self, RouterError> {
        let refuse = |why: &str| RouterError::Config(format!("engine URL {text:?} cannot be used: {why}"));
        let uri: Uri = text.parse().map_err(|_| refuse("it is not a URL; write http://HOST:PORT"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => return Err(refuse("TLS to engines is not supported; write http://HOST:PORT")),
            _ => return Err(refuse("it does not start with http://; write http://HOST:PORT")),
        }
        let authority = uri.authority().filter(|a| !a.host().is_empty()).cloned();
        let authority = authority.ok_or_else(|| refuse("it names no host; write http://HOST:PORT"))?;
        if authority.as_str().contains('@') {
            return Err(refuse(
                "it carries a user name; clients' own Authorization headers are passed on instead",
            ));
        }
        if uri.query().is_some() {
            return Err(refuse("it has a query; write http://HOST:PORT"));
        }
        Ok(Self { authority, prefix: uri.path().trim_end_matches('/').into() })
    }
}

impl fmt::Display for EngineUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}{}", self.authority, self.prefix)
    }
}

/// Why a router did not start, or stopped by itself.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RouterError {
    /// A setting or an engine's address that cannot work.
    #[error("{0}")]
    Config(String),
    /// The socket could not be opened, the system refused threads, or the router ended although nobody stopped it.
    #[error("{0}")]
    Failed(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_keep_their_prefix() {
        let url: EngineUrl = "http://[::1]:8100/engine/".parse().unwrap();
        assert_eq!(url.to_string(), "http://[::1]:8100/engine");
        assert_eq!(url.join("/v1/models?x=1").unwrap().to_string(), "http://[::1]:8100/engine/v1/models?x=1");
        let bare: EngineUrl = "http://p0:8100".parse().unwrap();
        assert_eq!(bare.join("/health").unwrap().to_string(), "http://p0:8100/health");
    }
}
