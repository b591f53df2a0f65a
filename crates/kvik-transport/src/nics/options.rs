//! Which NICs an engine uses, as one text: `efa`, `verbs:mlx5_0,mlx5_1`, `libfabric:tcp`, `plugin`, ...
//!
//! The connector of a serving engine knows two words more in the place of devices: `near`, for which it puts those near
//! a rank's GPU before an engine hears of it, and `all`, which means the same here as nothing.

use crate::TransportId;
use kvik_core::{Code, Error, Result};
use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// Operations in flight on a NIC: more than one link needs, and less than the completion queues of any provider hold.
pub const DEPTH: usize = 256;

const ALL: &str = "all";
const NEAR: &str = "near";

/// Which NICs an engine uses. Made from its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NicOptions {
    /// What speaks to them.
    pub kind: NicKind,
    /// Names of devices; all of them where none is named.
    pub devices: Vec<String>,
    /// Of RoCE devices: the index in the GID table, where the choice is not to be kvik's.
    pub gids: HashMap<String, u8>,
    /// The library's file, where the usual places are not meant; a plug-in's, which has no usual place.
    pub library: Option<PathBuf>,
    /// The address of the interface, for providers that have addresses of the internet.
    pub source: Option<IpAddr>,
    /// Operations in flight on a NIC, beside the NIC's own bound; one peer has half of them at most. Default 256.
    pub depth: usize,
}

/// What speaks to the NICs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NicKind {
    /// libfabric, with this provider.
    Libfabric(String),
    /// libibverbs: reliable connections.
    Verbs,
    /// A library that speaks kvik's own interface (`include/kvik/nic.h`).
    Plugin,
}

impl NicKind {
    /// Which transport it is.
    pub fn transport(&self) -> TransportId {
        match self {
            NicKind::Libfabric(_) => TransportId::Libfabric,
            NicKind::Verbs => TransportId::Verbs,
            NicKind::Plugin => TransportId::Plugin,
        }
    }

    /// What reports call the mechanism; None for a plug-in, which has a name of its own when it is loaded.
    pub fn mechanism(&self) -> Option<String> {
        match self {
            NicKind::Libfabric(provider) => Some(provider.clone()),
            NicKind::Verbs => Some("rc".into()),
            NicKind::Plugin => None,
        }
    }
}

impl NicOptions {
    /// All NICs of a kind, with the library that is found.
    pub fn of(kind: NicKind) -> NicOptions {
        NicOptions {
            kind,
            devices: Vec::new(),
            gids: HashMap::new(),
            library: None,
            source: None,
            depth: DEPTH,
        }
    }
}

impl fmt::Display for NicOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            NicKind::Libfabric(provider) if provider == "efa" => f.write_str("efa")?,
            NicKind::Libfabric(provider) => write!(f, "libfabric:{provider}")?,
            NicKind::Verbs => f.write_str("verbs")?,
            NicKind::Plugin => f.write_str("plugin")?,
        }
        for (number, device) in self.devices.iter().enumerate() {
            write!(f, "{}{device}", if number == 0 { ":" } else { "," })?;
            if let Some(gid) = self.gids.get(device) {
                write!(f, "@{gid}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for NicOptions {
    type Err = Error;

    fn from_str(text: &str) -> Result<NicOptions> {
        let wrong = |why: &str| {
            let text = format!(
                "nics={text:?} names no NICs: {why}; say \"efa\", \"verbs\", \"libfabric:PROVIDER\" or \
                 \"plugin\", and \":DEVICE,...\" behind it for some of them"
            );
            Err(Error::new(Code::InvalidArgument, text))
        };
        let (kind, rest) = text.split_once(':').map_or((text, None), |(kind, rest)| (kind, Some(rest)));
        let (kind, devices) = match (kind, rest) {
            ("efa", devices) => (NicKind::Libfabric("efa".into()), devices),
            ("verbs", devices) => (NicKind::Verbs, devices),
            ("plugin", devices) => (NicKind::Plugin, devices),
            ("libfabric", None | Some("")) => return wrong("libfabric needs a provider"),
            ("libfabric", Some(rest)) => {
                let (provider, devices) =
                    rest.split_once(':').map_or((rest, None), |(provider, rest)| (provider, Some(rest)));
                (NicKind::Libfabric(provider.into()), devices)
            }
            _ => return wrong("its kind is unknown"),
        };
        let mut options = NicOptions::of(kind);
        if devices == Some(NEAR) {
            let text = format!(
                "nics={text:?}: \"near\" is for the ranks of a serving engine, to which its connector gives the NICs near \
                 their GPUs; this engine has no rank: name devices (`kvik doctor` shows what is near what), or say \"all\""
            );
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let devices = devices.filter(|devices| *devices != ALL);
        for device in devices.into_iter().flat_map(|names| names.split(',')) {
            let (name, gid) = match device.split_once('@') {
                Some((name, gid)) if options.kind == NicKind::Verbs => (name, Some(gid)),
                _ => (device, None),
            };
            if name.is_empty() {
                return wrong("the name of a device is empty");
            }
            if let Some(gid) = gid {
                let Ok(index) = gid.parse() else {
                    return wrong("what is behind \"@\" is no index of a GID");
                };
                options.gids.insert(name.to_owned(), index);
            }
            options.devices.push(name.to_owned());
        }
        Ok(options)
    }
}
