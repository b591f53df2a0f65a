//! A server that enters itself in etcd, and stays entered.

use super::{Etcd, Gateway, number};
use crate::address::host_and_port;
use crate::cluster::Following;
use crate::no_thread;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kvik_core::{Code, Error, Result};
use kvik_host::thread::{ThreadOptions, spawn_named};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// How long a server stays entered that says nothing more.
const LEASE: Duration = Duration::from_secs(10);
/// How often it says that it is there, and tries again where etcd is away.
const EVERY: Duration = Duration::from_secs(2);
/// How long the end of a registration waits for etcd.
const LAST: Duration = Duration::from_secs(5);

/// A server's entry, kept until it is dropped: then its clients hear that it goes.
pub struct Registration {
    end: Arc<Following>,
    ended: Receiver<()>,
}

impl Registration {
    /// Enters the server that clients reach at `address`, and keeps it entered on a thread: etcd may come later, and go
    /// and come back.
    ///
    /// # Errors
    /// `InvalidArgument` for an address that is none, and for certificates or a user that cannot be used; the machine
    /// gives no thread.
    pub fn start(etcd: &Etcd, address: &str) -> Result<Registration> {
        host_and_port(address)?;
        let mut gateway = Gateway::open(etcd)?;
        let (end, (tell, ended)) = (Arc::new(Following::default()), channel());
        let (address, until) = (address.to_owned(), end.clone());
        let keeping = move || {
            keep(&mut gateway, &address, &until);
            // Nobody waits any more who has given up.
            drop(tell);
        };
        drop(spawn_named("kvik-store-reg", &ThreadOptions::default(), keeping).map_err(no_thread)?);
        Ok(Registration { end, ended })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.end.end();
        // The thread says nothing, and ends.
        if self.ended.recv_timeout(LAST) == Err(RecvTimeoutError::Timeout) {
            log::warn!("a server's entry in etcd could not be taken out in time, and goes with its lease");
        }
    }
}

/// What a server's key hangs on.
#[derive(Default)]
struct Leases {
    now: Option<u64>,
    /// The one that has ended, or may have.
    before: Option<u64>,
    /// The key was put by one of them.
    entered: bool,
}

fn keep(gateway: &mut Gateway, address: &str, end: &Following) {
    let (etcd, mut leases, mut told) = (gateway.etcd().clone(), Leases::default(), false);
    loop {
        match kept(gateway, address, &mut leases) {
            Ok(true) => {
                log::info!("{address} is entered in {etcd}");
                told = false;
            }
            Ok(false) => {}
            Err(error) => {
                if !told {
                    log::warn!("{address} is not entered, and is tried again: {error}");
                }
                told = true;
            }
        }
        if end.wait(EVERY) {
            break;
        }
    }
    let gone = leases.now.map(|lease| gateway.ask("lease/revoke", &json!({ "ID": lease.to_string() })));
    if let Some(Err(error)) = gone {
        log::debug!("{address} stays entered until its lease ends: {error}");
    }
}

/// Keeps the lease, or takes a new one where it has ended, and has the key hang on it; whether the key was put.
fn kept(gateway: &mut Gateway, address: &str, leases: &mut Leases) -> Result<bool> {
    let lives = |answer: Value| number(&answer["result"]["TTL"]).is_some_and(|seconds| seconds > 0);
    if let Some(id) = leases.now
        && !gateway.ask("lease/keepalive", &json!({ "ID": id.to_string() })).is_ok_and(lives)
    {
        // It has ended, or cannot be asked for: the key goes with the next one from now on.
        (leases.now, leases.before) = (None, Some(id));
    }
    let id = leases.now.map_or_else(|| granted(gateway), Ok)?;
    // Whatever becomes of what is asked next: it may have put the key, and that only its answer does not come.
    leases.now = Some(id);
    let nobodys = json!([{ "target": "VERSION", "result": "EQUAL", "version": "0" }]);
    let own = |lease: u64| json!([{ "target": "LEASE", "result": "EQUAL", "lease": lease.to_string() }]);
    let conditions: Vec<Value> = match leases.entered {
        // Somebody has deleted it, or it went with a server that had taken the name. What another server with this name has
        // got meanwhile stays its own: it would go with this one's end.
        true => [nobodys].into_iter().chain(leases.before.map(own)).collect(),
        // One that starts comes after one that was killed, whose key is there for some seconds.
        false => vec![json!([])],
    };
    let put = entered(gateway, address, id, &conditions)?;
    // Nothing hangs on the one before any more.
    leases.before = None;
    leases.entered |= put;
    Ok(put)
}

/// A new lease.
fn granted(gateway: &mut Gateway) -> Result<u64> {
    let answer = gateway.ask("lease/grant", &json!({ "TTL": LEASE.as_secs().to_string() }))?;
    number(&answer["ID"]).ok_or_else(|| {
        let said: String = answer.to_string().chars().take(200).collect();
        Error::new(Code::ProtocolError, format!("{} gives no lease: {said}", gateway.etcd()))
    })
}

/// Puts the key by a lease where one of these conditions holds; whether it did.
fn entered(gateway: &mut Gateway, address: &str, lease: u64, conditions: &[Value]) -> Result<bool> {
    let key = Value::from(STANDARD.encode(format!("{}{address}", gateway.etcd().prefix)));
    let entry = json!({ "key": key, "value": STANDARD.encode(address), "lease": lease.to_string() });
    for condition in conditions {
        let mut compare = condition.clone();
        compare.as_array_mut().into_iter().flatten().for_each(|one| one["key"] = key.clone());
        let put = json!({ "compare": compare, "success": [{ "request_put": entry }] });
        if gateway.ask("kv/txn", &put)?["succeeded"] == Value::Bool(true) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    /// An etcd that gives these answers, one a connection, and none to those that are empty; what it was asked.
    fn answering(answers: &'static [&'static str]) -> (Gateway, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let etcd = Etcd::parse(&format!("http://{}/kvik", listener.local_addr().unwrap())).unwrap();
        let one = move |said: &&str| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = String::new();
            // Its body is an object.
            while !request.ends_with('}') {
                let mut piece = [0; 4096];
                let count = stream.read(&mut piece).unwrap();
                assert!(count > 0, "{request}");
                request += std::str::from_utf8(&piece[..count]).unwrap();
            }
            let length = said.len();
            let head = format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
            if length > 0 {
                stream.write_all((head + said).as_bytes()).unwrap();
            }
            request
        };
        let asked = std::thread::spawn(move || answers.iter().map(one).collect());
        (Gateway::open(&etcd).unwrap(), asked)
    }

    #[test]
    fn a_lease_that_may_have_the_key_is_kept() {
        let (mut gateway, asked) = answering(&[
            r#"{"ID":"7"}"#,
            r#"{"succeeded":true}"#,
            // The first lease has ended. The key is put by the next one, and nobody hears of it.
            r#"{"result":{}}"#,
            r#"{"ID":"8"}"#,
            "",
            r#"{"result":{"TTL":"10"}}"#,
            "{}",
            "{}",
        ]);
        let mut leases = Leases::default();
        let mut next = || kept(&mut gateway, "a:1", &mut leases);
        assert!(next().unwrap() && next().is_err() && !next().unwrap());
        let asked = asked.join().unwrap();
        assert!(asked[5].contains("/v3/lease/keepalive") && asked[5].ends_with(r#"{"ID":"8"}"#), "{asked:?}");
        assert_eq!(leases.now, Some(8));
        // It is not there by its first lease, as it would be where nothing was put.
        assert!(asked[7].contains(r#""lease":"7","result":"EQUAL""#), "{asked:?}");
    }
}
