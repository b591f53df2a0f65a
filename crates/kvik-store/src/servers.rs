//! Which servers a store has: said once, or by something that is asked again.
//!
//! Invariants:
//! - This is asked on a thread of its own. Only the start waits for it, until its deadline: a disk, a name server or an
//!   etcd may take longer. No other call does.
//! - Where it does not answer, or names nobody, the servers that are known stay.

use crate::address::host_and_port;
use crate::cluster::{Cluster, Following};
use crate::etcd::{Etcd, Gateway, Listed};
use crate::no_thread;
use kvik_core::{Code, Error, Result};
use kvik_engine::Engine;
use kvik_host::thread::{ThreadOptions, spawn_named};
use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often a file is read: what tells of changes does not do so on every file system, nor of every kind of replacement.
const FILE_EVERY: Duration = Duration::from_secs(1);
/// How often a name is resolved: what resolves it does not say how long that holds.
const NAME_EVERY: Duration = Duration::from_secs(5);

/// How long changes in etcd are gathered: several servers may come at once.
const ETCD_SETTLES: Duration = Duration::from_millis(100);
/// How soon etcd is asked again that does not answer.
const ETCD_AGAIN: Duration = Duration::from_secs(1);

/// The servers of a store, or where they are listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Servers {
    /// These, as `host:port`. A server is called by its address, so all clients are to write it alike.
    Addresses(Vec<String>),
    /// Those in a file, one a line, which is read again when it has changed. What begins with `#` is a comment.
    File(PathBuf),
    /// All addresses of a name, with this port.
    Name(String, u16),
    /// Those that are entered in etcd.
    Etcd(Etcd),
}

/// The same, as it is asked again and again.
enum Source {
    Addresses(Vec<String>),
    File(PathBuf),
    Name(String, u16),
    Etcd(Gateway),
}

impl Servers {
    /// From text: `host:port`, several of them as several texts or with commas between them, `file:PATH`,
    /// `dns:NAME:PORT`, or `etcd:http://HOST:PORT/PREFIX` (or `https`).
    ///
    /// # Errors
    /// `InvalidArgument` for what is none of these, and for a server that is named twice.
    pub fn parse<T: AsRef<str>>(texts: &[T]) -> Result<Servers> {
        if let [text] = texts {
            let text = text.as_ref();
            if let Some(path) = text.strip_prefix("file:") {
                return Ok(Servers::File(path.into()));
            }
            if let Some(name) = text.strip_prefix("dns:") {
                let (host, port) = host_and_port(name)?;
                return Ok(Servers::Name(host.to_owned(), port));
            }
            if let Some(url) = text.strip_prefix("etcd:") {
                return Etcd::parse(url).map(Servers::Etcd);
            }
            if !text.contains(',') {
                // Whether there is such an address, meeting it says.
                return Ok(Servers::Addresses(vec![text.to_owned()]));
            }
        }
        let one_by_one = texts.iter().flat_map(|text| text.as_ref().split(','));
        addresses(one_by_one.map(str::trim)).map(Servers::Addresses)
    }

    /// The address, where it is one.
    pub(crate) fn single(&self) -> Option<&str> {
        match self {
            Servers::Addresses(addresses) => match &addresses[..] {
                [address] => Some(address),
                _ => None,
            },
            _ => None,
        }
    }

    /// Meets them, and follows what says who they are.
    ///
    /// # Errors
    /// Nothing says who they are, or none of them answers, by the deadline.
    pub(crate) fn follow(&self, engine: &Engine, copies: usize, deadline: Duration) -> Result<Arc<Cluster>> {
        let until = Instant::now() + deadline;
        let following = Arc::new(Following::default());
        let cluster = Arc::new(Cluster::new(engine, copies, following.clone()));
        let (tell, told) = channel();
        let (servers, weak, end) = (self.clone(), Arc::downgrade(&cluster), following.clone());
        let seeking = move || match first(&servers, &weak) {
            Ok((source, found)) => {
                // Whoever has given up has no need of what follows.
                if tell.send(Ok(())).is_ok() {
                    ask_again(source, found, &weak, &end);
                }
            }
            Err(error) => drop(tell.send(Err(error))),
        };
        drop(spawn_named("kvik-store-seek", &ThreadOptions::default(), seeking).map_err(no_thread)?);
        let late = || {
            let text = "what says who the store's servers are did not do so by the deadline: look whether the file is on a disk \
                        that answers, or the name server or the etcd does";
            Err(unavailable(text.into()))
        };
        let listed = told.recv_timeout(deadline).unwrap_or_else(|_| late());
        let met = listed.and_then(|()| cluster.met(until.saturating_duration_since(Instant::now())));
        met.inspect_err(|_| following.end())?;
        Ok(cluster)
    }
}

/// Asks for the first time who they are, and has a cluster begin with them.
fn first(servers: &Servers, cluster: &Weak<Cluster>) -> Result<(Source, Listed)> {
    let mut source = Source::open(servers)?;
    let found = source.read()?;
    source.check(&found)?;
    cluster.upgrade().map_or(Ok(()), |cluster| cluster.set(&found.names))?;
    Ok((source, found))
}

impl Source {
    fn open(servers: &Servers) -> Result<Source> {
        Ok(match servers.clone() {
            Servers::Addresses(addresses) => Source::Addresses(addresses),
            Servers::File(path) => Source::File(path),
            Servers::Name(name, port) => Source::Name(name, port),
            Servers::Etcd(etcd) => Source::Etcd(Gateway::open(&etcd)?),
        })
    }

    /// Who they are now.
    fn read(&mut self) -> Result<Listed> {
        match self {
            Source::Addresses(addresses) => Ok(addresses.clone().into()),
            Source::File(path) => read_file(path).map(Listed::from),
            Source::Name(name, port) => resolve(name, *port).map(Listed::from),
            Source::Etcd(gateway) => gateway.list(),
        }
    }

    /// # Errors
    /// Nobody is named.
    fn check(&self, listed: &Listed) -> Result<()> {
        match self {
            Source::Etcd(gateway) if listed.names.is_empty() => Err(gateway.nobody()),
            _ => Ok(()),
        }
    }

    /// What was read cannot be used, or nothing was; false when nobody needs it any more.
    fn pause(&self, following: &Following) -> bool {
        match self {
            Source::Etcd(_) => !following.wait(ETCD_AGAIN),
            // Those are waited for anyway.
            _ => true,
        }
    }

    /// Waits until they may be others; false when nobody needs them any more.
    fn changed(&mut self, found: &Listed, following: &Following) -> bool {
        match self {
            Source::Addresses(_) => false,
            Source::File(_) => !following.wait(FILE_EVERY),
            Source::Name(..) => !following.wait(NAME_EVERY),
            Source::Etcd(gateway) => {
                // Where it does not answer, reading says so.
                let watched = gateway.wait_for_change(found, following);
                !following.wait(if watched.is_ok() { ETCD_SETTLES } else { ETCD_AGAIN })
            }
        }
    }
}

fn wrong(text: String) -> Error {
    Error::new(Code::InvalidArgument, text)
}

/// Checks addresses, and puts them in order.
fn addresses<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for text in texts {
        host_and_port(text)?;
        all.push(text.to_owned());
    }
    all.sort();
    if let Some(twice) = all.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(wrong(format!("the store's server {} is named twice", twice[0])));
    }
    if all.is_empty() { Err(wrong("a store has at least one server".into())) } else { Ok(all) }
}

fn unavailable(text: String) -> Error {
    Error::new(Code::StoreUnavailable, text)
}

fn read_file(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        unavailable(format!("the store's servers are in {}, which is not read: {error}", path.display()))
    })?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    addresses(lines).map_err(|error| wrong(format!("{}: {}", path.display(), error.text)))
}

fn resolve(name: &str, port: u16) -> Result<Vec<String>> {
    let found = (name.trim_matches(['[', ']']), port).to_socket_addrs().map_err(|error| {
        unavailable(format!(
            "the store's servers are the addresses of {name}, which is not resolved: {error}"
        ))
    })?;
    let mut all: Vec<String> = found.map(|address| address.to_string()).collect();
    all.sort();
    all.dedup();
    if all.is_empty() { Err(unavailable(format!("{name} has no addresses"))) } else { Ok(all) }
}

fn ask_again(mut source: Source, mut found: Listed, cluster: &Weak<Cluster>, following: &Following) {
    let mut told = false;
    while source.changed(&found, following) {
        let Some(cluster) = cluster.upgrade() else { return };
        let now = source.read().and_then(|now| {
            // What has happened by then is not waited for again, also where it is of no use.
            found.revision = now.revision;
            source.check(&now)?;
            if now.names != found.names {
                cluster.set(&now.names)?;
            }
            Ok(now)
        });
        drop(cluster);
        match now {
            Ok(now) => (found, told) = (now, false),
            Err(error) => {
                if !told {
                    log::warn!("the store's servers stay as they are: {error}");
                }
                told = true;
                if !source.pause(following) {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Client, Server, StoreOptions};
    use kvik_engine::Config;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// Something that answers as an etcd in which a server is entered, until it `is_empty`: with another revision.
    fn answer(mut stream: TcpStream, key: &str, is_empty: &AtomicBool) -> std::io::Result<()> {
        let mut request = [0; 4096];
        let count = stream.read(&mut request)?;
        let request = String::from_utf8_lossy(&request[..count]).into_owned();
        let empty = is_empty.load(Ordering::SeqCst);
        let (kvs, revision) = if empty { (String::new(), 2) } else { (format!(r#"{{"key":"{key}"}}"#), 1) };
        let said = format!(r#"{{"header":{{"revision":"{revision}"}},"kvs":[{kvs}]}}"#);
        if !request.contains("/v3/watch") {
            let head =
                format!("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", said.len());
            return stream.write_all((head + &said).as_bytes());
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{\"result\":{\"created\":true}}\n")?;
        // It was taken out with revision 2.
        while !(is_empty.load(Ordering::SeqCst) && request.contains(r#""start_revision":"2""#)) {
            std::thread::sleep(Duration::from_millis(10));
            if stream.write_all(b"").is_err() {
                return Ok(());
            }
        }
        stream.write_all(b"{\"result\":{\"events\":[{}]}}\n")
    }

    #[test]
    fn an_etcd_in_which_nobody_is_entered_is_not_asked_again_and_again() {
        use base64::{Engine as _, engine::general_purpose::STANDARD};
        let engine = Engine::start(Config::default()).unwrap();
        let server = Server::start(&engine, &StoreOptions::default()).unwrap();
        let key = STANDARD.encode(format!("kvik/{}", engine.addresses()[0]));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let etcd = format!("etcd:http://{}/kvik", listener.local_addr().unwrap());
        let (asked, is_empty) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, empty) = (asked.clone(), is_empty.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::SeqCst);
                let (key, empty) = (key.clone(), empty.clone());
                std::thread::spawn(move || answer(stream, &key, &empty));
            }
        });
        let asking = Engine::start(Config::default()).unwrap();
        let client = Client::connect_to(&asking, &Servers::parse(&[&etcd]).unwrap(), 1, None).unwrap();
        is_empty.store(true, Ordering::SeqCst);
        let began = std::time::Instant::now();
        while began.elapsed() < Duration::from_secs(3) || asked.load(Ordering::SeqCst) < 3 {
            assert!(began.elapsed() < Duration::from_secs(60), "nobody asks");
            std::thread::sleep(Duration::from_millis(10));
        }
        let (asked, seconds) = (asked.load(Ordering::SeqCst), began.elapsed().as_secs_f64());
        assert!((asked as f64) < 10.0 * seconds / 3.0, "{asked} requests in {seconds} s");
        assert_eq!(client.members().len(), 1, "who is known stays");
        drop(server);
    }

    #[test]
    fn a_list_that_does_not_come_is_waited_for_until_the_deadline() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let path = std::env::temp_dir().join(format!("kvik-servers-{}", std::process::id()));
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let file = Servers::File(path.clone());
        let asking = std::thread::spawn(move || {
            let engine = Engine::start(Config::default()).unwrap();
            let met = Client::connect_to(&engine, &file, 1, Some(Duration::from_millis(50)));
            tell.send(met.err().map(|error| error.text)).unwrap();
        });
        // Whoever reads it waits for somebody who writes.
        let said = told.recv_timeout(Duration::from_secs(20));
        drop(std::fs::OpenOptions::new().write(true).open(&path));
        std::fs::remove_file(&path).unwrap();
        asking.join().unwrap();
        let said = said.expect("it was waited for beyond the deadline").unwrap_or_default();
        assert!(said.contains("by the deadline"), "{said}");
    }

    #[test]
    fn servers_are_named_in_four_ways() {
        let parsed = |texts: &[&str]| Servers::parse(texts);
        let many = Servers::Addresses(vec!["a:1".into(), "b:2".into()]);
        assert_eq!(parsed(&["b:2", "a:1"]).as_ref(), Ok(&many));
        assert_eq!(parsed(&["b:2, a:1"]).as_ref(), Ok(&many));
        assert_eq!(parsed(&["[::1]:7500"]).unwrap().single(), Some("[::1]:7500"));
        assert_eq!(parsed(&["file:/etc/kvik/servers"]), Ok(Servers::File("/etc/kvik/servers".into())));
        assert_eq!(parsed(&["dns:store.example:7500"]), Ok(Servers::Name("store.example".into(), 7500)));
        for wrong in [
            &["a,b:1"][..],
            &["a:0", "b:1"],
            &["a:1", "a:1"],
            &[],
            &["a:1", "dns:b:2"],
            &["dns:b"],
            &["a:1,"],
            &["a:1", "\u{1b}[2Jb:1"],
        ] {
            assert!(parsed(wrong).is_err_and(|error| error.code == Code::InvalidArgument), "{wrong:?}");
        }
    }
}
