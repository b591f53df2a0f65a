//! What an engine can be told, and what it makes of it.

use kvik_core::{Code, Error, MAX_TICKET_ADDRESSES, Result};
use kvik_host::addr::{interface_addresses, is_routable_off_host};
use kvik_proto::Check;
use kvik_transport::Services;
use kvik_transport::TransportId;
use kvik_transport::nics::NicOptions;
use kvik_transport::tls::TlsFiles;
use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

/// Which transport transfers use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Preference {
    /// The other process's memory where both share a host, TCP elsewhere.
    #[default]
    Auto,
    /// TCP only.
    Tcp,
    /// The other process's memory only.
    Local,
    /// One-sided operations of NICs only.
    Nics,
}

impl Preference {
    const ALL: [Preference; 4] = [Preference::Auto, Preference::Tcp, Preference::Local, Preference::Nics];

    /// Whether it lets a transfer take this transport.
    pub(crate) fn allows(self, transport: TransportId) -> bool {
        match self {
            Preference::Auto => true,
            Preference::Tcp => transport == TransportId::Tcp,
            Preference::Local => transport == TransportId::Local,
            Preference::Nics => transport.is_rma(),
        }
    }

    /// What is wrong where an engine has nothing of the kind.
    pub(crate) fn missing(self) -> &'static str {
        match self {
            Preference::Nics => "this engine has no NICs for it: set `nics` (KVIK_NICS)",
            Preference::Auto | Preference::Tcp | Preference::Local => "this engine has no such transport",
        }
    }

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Preference::Auto => "auto",
            Preference::Tcp => "tcp",
            Preference::Local => "local",
            Preference::Nics => "nics",
        }
    }
}

impl std::str::FromStr for Preference {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Preference::ALL.into_iter().find(|one| one.name() == text).ok_or_else(|| {
            let choices = "\"auto\", \"tcp\", \"local\" or \"nics\"";
            let text = format!("there is no transport {text:?}: choose {choices}");
            Error::new(Code::UnknownTransport, text)
        })
    }
}

/// Which bytes are checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verify {
    /// Page checksums on TCP, a sample of them over NICs, none for copies within a host.
    #[default]
    Auto,
    /// No checksums.
    Off,
    /// A sample of the pages over NICs, where checksums take a pass of their own over memory; else as `Auto`.
    Sample,
    /// Checksums of every page on every path.
    Full,
}

impl Verify {
    const ALL: [Verify; 4] = [Verify::Auto, Verify::Off, Verify::Sample, Verify::Full];

    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Verify::Auto => "auto",
            Verify::Off => "off",
            Verify::Sample => "sample",
            Verify::Full => "full",
        }
    }

    /// Whether checksums are wanted on a network (or else within the host), where a processor handles the bytes.
    pub(crate) fn sums(self, network: bool) -> bool {
        match self {
            Verify::Auto | Verify::Sample => network,
            Verify::Off => false,
            Verify::Full => true,
        }
    }

    /// How much of what NICs have moved is compared.
    pub(crate) fn of_nics(self) -> Check {
        match self {
            Verify::Auto | Verify::Sample => Check::Sample,
            Verify::Off => Check::No,
            Verify::Full => Check::All,
        }
    }
}

impl std::str::FromStr for Verify {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        Verify::ALL.into_iter().find(|one| one.name() == text).ok_or_else(|| {
            let choices = "\"auto\", \"off\", \"sample\" or \"full\"";
            Error::new(Code::InvalidArgument, format!("verify={text:?} is unknown: choose {choices}"))
        })
    }
}

/// What an engine can be told.
#[derive(Clone)]
pub struct Config {
    /// Where it listens, for control and data. Default: a free port on loopback.
    pub listen: Vec<SocketAddr>,
    /// What its tickets say instead: `HOST` or `HOST:PORT`. Default: the addresses that it listens on.
    pub advertise: Vec<String>,
    /// Shared by all engines that may connect. This or TLS is demanded when it listens beyond loopback.
    pub secret: Option<Vec<u8>>,
    /// Puts every TCP connection under TLS, with a certificate on both sides. Read when the engine starts.
    pub tls: Option<TlsFiles>,
    /// Which transport. Default: auto.
    pub transport: Preference,
    /// Which checks. Default: auto.
    pub verify: Verify,
    /// TCP connections to a peer that carry data. Default 4: one is bound by one core's copying.
    pub channels: u16,
    /// Threads that move data over TCP, and as many that copy. Default 2.
    pub io_threads: u16,
    /// How long a transfer may take if it is not told. Default 30 s.
    pub deadline: Duration,
    /// Most bytes that kvik holds for itself. Default 256 MiB.
    ///
    /// Counted are grants, transfers, sessions (128 KiB each; 272 KiB under TLS) and data channels (32 KiB each; 224
    /// KiB under TLS), and beyond that
    /// whatever peers have sent, asked for and left unread: a session whose peer takes it past the cap is cut, and
    /// `MemoryCapReached` is the error. A session's part is looked at after every 64 KiB of its peer's
    /// frames, and at least twice a second; what they can make it grow by until then is bounded by the protocol: 32 MiB
    /// of page lists and 32 MiB of answers. Not counted are what is fixed (under 8 MiB: tables
    /// of fences and ended grants, scratch memory of the threads, connections that have not said who they are; under
    /// TLS up to 36 MiB for those) and
    /// what is not kvik's own: registered memory, regions of peers on this host that are mapped here, and the
    /// kernel's socket buffers.
    pub memory_cap: u64,
    /// Bytes that the data channels of one peer have in flight to send at most. Default 32 MiB; one chunk, up to 4 MiB,
    /// is always allowed.
    ///
    /// A peer that takes nothing off its channels holds so much of what this side began to send, and whatever the
    /// kernel buffers for it, and no more: what is not in flight yet is neither read nor locked.
    pub window: u64,
    /// The NICs for one-sided transfers. Default: none.
    pub nics: Option<NicOptions>,
    /// Threads that drive the NICs, which are divided evenly among them; no more than there are NICs. Default 4.
    pub nic_threads: u16,
    /// CPUs for kvik's threads.
    pub cpus: Option<Vec<usize>>,
    /// NUMA node for kvik's threads.
    pub numa_node: Option<u32>,
    /// What it is called in logs.
    pub name: String,
    /// What stands between the engine and its transports: for tests.
    #[doc(hidden)]
    pub between: Option<Arc<dyn Fn(Services) -> Services + Send + Sync>>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            listen: vec![SocketAddr::from(([127, 0, 0, 1], 0))],
            advertise: Vec::new(),
            secret: None,
            tls: None,
            transport: Preference::Auto,
            verify: Verify::Auto,
            channels: 4,
            io_threads: 2,
            deadline: Duration::from_secs(30),
            memory_cap: 256 << 20,
            window: kvik_proto::WINDOW,
            nics: None,
            nic_threads: 4,
            cpus: None,
            numa_node: None,
            name: String::new(),
            between: None,
        }
    }
}

impl std::fmt::Debug for Config {
    /// Never shows the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("listen", &self.listen)
            .field("advertise", &self.advertise)
            .field("secret", &self.secret.as_ref().map(|_| "set"))
            .field("tls", &self.tls)
            .field("transport", &self.transport)
            .field("verify", &self.verify)
            .field("channels", &self.channels)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Config {
    pub(crate) fn check(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::new(Code::InvalidArgument, text));
        if self.listen.is_empty() {
            return wrong("listen names no address; the default is 127.0.0.1:0".into());
        }
        if let Some(open) = self.listen.iter().find(|address| !address.ip().is_loopback())
            && self.secret.is_none()
            && self.tls.is_none()
        {
            return Err(Error::new(
                Code::SecretRequired,
                format!(
                    "listening on {open}, beyond loopback, takes a `secret` (KVIK_SECRET) or `tls` (KVIK_TLS): \
                     without one anybody could read the pages"
                ),
            ));
        }
        if self.secret.as_ref().is_some_and(|secret| secret.len() < 8) {
            return wrong("the secret is shorter than 8 bytes; take a long random one".into());
        }
        for (what, value, most) in [
            ("channels", self.channels, kvik_proto::MAX_CHANNELS),
            ("io_threads", self.io_threads, 64),
            ("nic_threads", self.nic_threads, kvik_proto::MAX_NICS as u16),
        ] {
            if value == 0 || value > most {
                return wrong(format!("{what} is {value}; it takes 1 to {most}"));
            }
        }
        if self.deadline.is_zero() || self.deadline > MAX_DEADLINE {
            return wrong(format!(
                "deadline is {:?}; it takes more than 0 s and at most {MAX_DEADLINE:?}",
                self.deadline
            ));
        }
        if self.memory_cap < 1 << 20 {
            return wrong(
                "memory_cap is below 1 MiB; kvik needs some memory for page lists and buffers".into(),
            );
        }
        if self.window < 64 << 10 {
            return wrong(format!(
                "window is {} bytes; it takes at least 64 KiB, a small chunk",
                self.window
            ));
        }
        if self.transport == Preference::Nics && self.nics.is_none() {
            return wrong(
                "transport \"nics\" needs to know which: set `nics` (KVIK_NICS) to \"efa\", for instance"
                    .into(),
            );
        }
        if self.name.len() > 100 {
            return wrong("the name is longer than 100 bytes".into());
        }
        Ok(())
    }

    /// The addresses for tickets, given those that the engine listens on.
    pub(crate) fn advertised(&self, listening: &[SocketAddr]) -> Result<Vec<SocketAddr>> {
        let mut found = Vec::new();
        if self.advertise.is_empty() {
            for address in listening {
                match address.ip().is_unspecified() {
                    false => found.push(*address),
                    true => found.extend(wildcard(*address)?),
                }
            }
        } else {
            for text in &self.advertise {
                found.extend(resolve(text, listening)?);
            }
        }
        // A ticket for other hosts has no use for a loopback address; one for this host has nothing else.
        if found.iter().any(|address| !address.ip().is_loopback()) {
            found.retain(|address| !address.ip().is_loopback());
        }
        let mut seen = HashSet::new();
        found.retain(|address| seen.insert(*address));
        found.truncate(MAX_TICKET_ADDRESSES);
        match found.is_empty() {
            true => Err(Error::new(
                Code::InvalidArgument,
                "there is no address to put into tickets: set `advertise` to one that the peers reach",
            )),
            false => Ok(found),
        }
    }
}

/// No deadline is longer.
pub(crate) const MAX_DEADLINE: Duration = Duration::from_secs(24 * 3600);

fn wildcard(address: SocketAddr) -> Result<Vec<SocketAddr>> {
    let interfaces =
        interface_addresses().map_err(|e| kvik_transport::from_host(Code::InvalidArgument, e))?;
    // A link-local IPv6 address is of no use to the reader of a ticket: it needs an interface number of its own.
    let usable =
        |ip: &IpAddr| ip.is_ipv4() == address.is_ipv4() && (ip.is_loopback() || is_routable_off_host(*ip));
    let ips = interfaces.into_iter().filter(|interface| interface.up).map(|interface| interface.ip);
    Ok(ips.filter(usable).map(|ip| SocketAddr::new(ip, address.port())).collect())
}

/// The addresses of `HOST` or `HOST:PORT`; without a port that of the first listener of the address's family, or of
/// any.
fn resolve(text: &str, listening: &[SocketAddr]) -> Result<Vec<SocketAddr>> {
    let port = listening.first().map_or(0, SocketAddr::port);
    let bare: Option<IpAddr> = text.trim_matches(['[', ']']).parse().ok();
    let found: Vec<SocketAddr> = match (bare, text.parse::<SocketAddr>()) {
        (Some(ip), _) => {
            let same = listening.iter().find(|address| address.is_ipv4() == ip.is_ipv4());
            vec![SocketAddr::new(ip, same.map_or(port, SocketAddr::port))]
        }
        (None, Ok(address)) => vec![address],
        (None, Err(_)) => {
            let named =
                if text.contains(':') { text.to_socket_addrs() } else { (text, port).to_socket_addrs() };
            let named = named.map_err(|error| {
                Error::new(
                    Code::InvalidArgument,
                    format!("advertise: {text:?} is no address and no known host ({error})"),
                )
            })?;
            named.collect()
        }
    };
    match found.iter().any(|address| address.ip().is_unspecified() || address.port() == 0) {
        true => Err(Error::new(
            Code::InvalidArgument,
            format!(
                "advertise: {text:?} is a wildcard or has port 0; name the address that peers are to connect to"
            ),
        )),
        false => Ok(found),
    }
}

/// An address to listen on: `HOST:PORT`, `[IPV6]:PORT`, or a name that resolves to one.
///
/// # Errors
/// `InvalidArgument` with the forms that are understood.
pub fn parse_listen(text: &str) -> Result<SocketAddr> {
    let wrong = || {
        Error::new(
            Code::InvalidArgument,
            format!(
                "listen: {text:?} is no address: write HOST:PORT or [IPV6]:PORT, with port 0 for a free one"
            ),
        )
    };
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    text.to_socket_addrs().map_err(|_| wrong())?.next().ok_or_else(wrong)
}
