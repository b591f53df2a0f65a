//! Ports: what the library, and where it is silent the kernel's files, say of them.

use super::abi::{self, ibv_context, ibv_port_attr};
use super::gid::{self, Gid, GidKind};
use super::{Object, Verbs, VerbsError, number};
use crate::library::text;
use std::ffi::{c_char, c_int};
use std::fmt;
use std::ptr::NonNull;

/// What carries the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Link {
    /// An InfiniBand subnet, whose manager gives each port a LID.
    InfiniBand,
    /// Ethernet: RDMA over it is RoCE.
    Ethernet,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Link::InfiniBand => "InfiniBand",
            Link::Ethernet => "Ethernet",
        })
    }
}

/// Whether a port can carry anything now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortState {
    /// No link.
    Down,
    /// A link, which the subnet's manager has not set up yet.
    Waiting,
    /// In use.
    Active,
}

/// One port of one device, as it was when it was listed. Plain data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The device's name, such as `mlx5_0`.
    pub device: String,
    /// The port's number in the device, from 1.
    pub number: u8,
    /// Whether it can carry anything now.
    pub state: PortState,
    /// What carries the packets.
    pub link: Link,
    /// Bytes of payload in a packet, at most: 256 to 4096.
    pub mtu: usize,
    /// Bytes of one read or write, at most.
    pub longest: u32,
    /// The local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Bits in a second, in thousands of millions, as the kernel names them; 0 where nobody says.
    pub gigabits: u32,
    /// The entries of the GID table that are in use.
    pub gids: Vec<Gid>,
}

/// What this host has.
#[derive(Debug, Default)]
pub struct Found {
    /// Ports that are of use, whatever their state.
    pub ports: Vec<Port>,
    /// Devices that cannot be used, and why.
    pub refused: Vec<VerbsError>,
}

impl Port {
    /// Chooses a GID: the one at `index`, if the user names one; otherwise on InfiniBand the first, on
    /// Ethernet RoCE v2 before v1 and IPv4 before IPv6, and a link-local one only where there is nothing else.
    ///
    /// # Errors
    /// There is none; the text has the table.
    pub fn choose_gid(&self, index: Option<u8>) -> Result<&Gid, VerbsError> {
        gid::choose(&self.gids, self.link, index)
            .map_err(|why| VerbsError::own(format!("choosing a GID of {self}"), why))
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} port {}", self.device, self.number)
    }
}

/// Puts ports in the order of preference: those in use first, then the faster; else as they were listed.
pub fn rank(ports: &mut [Port]) {
    ports.sort_by_key(|port| (port.state != PortState::Active, std::cmp::Reverse(port.gigabits)));
}

/// The library's list of devices, which must live while one of it is opened.
pub(super) struct DeviceList<'v> {
    verbs: &'v Verbs,
    at: Option<NonNull<*mut abi::ibv_device>>,
    len: usize,
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        if let Some(at) = self.at {
            // SAFETY: made by `ibv_get_device_list`, and freed once. Devices that are open keep their own entry.
            unsafe { (self.verbs.table.free_device_list)(at.as_ptr()) };
        }
    }
}

impl<'v> DeviceList<'v> {
    pub fn read(verbs: &'v Verbs) -> Result<DeviceList<'v>, VerbsError> {
        let mut len: c_int = 0;
        // SAFETY: the call writes the length.
        let at = NonNull::new(unsafe { (verbs.table.get_device_list)(&mut len) });
        let failed = super::errno();
        // A kernel without the subsystem has no devices.
        if at.is_none() && failed != libc::ENOSYS {
            return Err(VerbsError::os("listing RDMA devices", failed));
        }
        Ok(DeviceList { verbs, at, len: len.max(0) as usize })
    }

    /// The devices, with their names.
    pub fn iter(&self) -> impl Iterator<Item = (*mut abi::ibv_device, String)> + '_ {
        (0..self.at.map_or(0, |_| self.len)).filter_map(|index| {
            // SAFETY: the list has `len` pointers to devices, which live as long as it.
            let device = unsafe { *self.at?.as_ptr().add(index) };
            // SAFETY: a device of the list.
            let name = unsafe { text((self.verbs.table.get_device_name)(device)) };
            Some((device, name))
        })
    }

    /// Opens a device of this list.
    ///
    /// # Safety
    /// `device` is of this list, and what is made of the context is ended before it.
    pub unsafe fn open(
        &self,
        device: *mut abi::ibv_device,
        name: &str,
    ) -> Result<Object<ibv_context>, VerbsError> {
        let table = &self.verbs.table;
        let what = || format!("opening device {name}");
        // SAFETY: the caller's promise.
        let transport = unsafe { (*device).transport_type };
        if transport != abi::IBV_TRANSPORT_IB {
            let text = "it is neither InfiniBand nor RoCE, and has no reliable connections of their kind";
            return Err(VerbsError::own(what(), text));
        }
        // SAFETY: the caller's promise; it makes a context that is closed once.
        unsafe { Object::new((table.open_device)(device), table.close_device) }.map_err(|number| {
            VerbsError::os(what(), number).hint(
                "this process needs /dev/infiniband/uverbs* and the right to read and write it \
                 (in a container: --device=/dev/infiniband)",
            )
        })
    }
}

pub(super) fn list(verbs: &Verbs) -> Result<Found, VerbsError> {
    let mut found = Found::default();
    let devices = DeviceList::read(verbs)?;
    for (device, name) in devices.iter() {
        // SAFETY: a device of the list; nothing is made of the context.
        match unsafe { devices.open(device, &name) }.and_then(|context| ports_of(verbs, &context, &name)) {
            Ok(ports) => found.ports.extend(ports),
            Err(why) => found.refused.push(why),
        }
    }
    Ok(found)
}

/// What an open device says of itself.
pub(super) fn attributes(
    verbs: &Verbs,
    context: &Object<ibv_context>,
    name: &str,
) -> Result<abi::ibv_device_attr, VerbsError> {
    let mut attr = abi::ibv_device_attr::default();
    // SAFETY: an open context, and a structure that the call fills.
    let code = unsafe { (verbs.table.query_device)(context.as_ptr(), &mut attr) };
    number(code).map_err(|code| VerbsError::os(format!("asking device {name} for its limits"), code))?;
    Ok(attr)
}

pub(super) fn ports_of(
    verbs: &Verbs,
    context: &Object<ibv_context>,
    name: &str,
) -> Result<Vec<Port>, VerbsError> {
    let count = attributes(verbs, context, name)?.phys_port_cnt;
    let mut asked = Vec::new();
    for port in 1..=count {
        asked.push((port, port_attributes(verbs, context, name, port)?));
    }
    let entries = asked.iter().map(|(_, attr)| attr.gid_tbl_len.max(0) as usize).sum();
    let table = gid_table(verbs, context, name, entries)?;
    let mut ports = Vec::new();
    for (port, attr) in asked {
        // Devices of the first years name no link layer: they are InfiniBand's.
        let link = match attr.link_layer {
            abi::IBV_LINK_LAYER_ETHERNET => Link::Ethernet,
            _ => Link::InfiniBand,
        };
        let gids = match &table {
            Some(table) => of_table(table, port),
            None => one_by_one(verbs, context, name, port, (link, attr.gid_tbl_len)),
        };
        ports.push(Port {
            device: name.into(),
            number: port,
            state: match attr.state {
                4 | 5 => PortState::Active,
                2 | 3 => PortState::Waiting,
                _ => PortState::Down,
            },
            link,
            mtu: mtu_bytes(attr.active_mtu),
            longest: attr.max_msg_sz,
            lid: attr.lid,
            gigabits: rate(name, port).unwrap_or_else(|| speed(attr.active_width, attr.active_speed)),
            gids,
        });
    }
    Ok(ports)
}

fn port_attributes(
    verbs: &Verbs,
    context: &Object<ibv_context>,
    name: &str,
    port: u8,
) -> Result<ibv_port_attr, VerbsError> {
    let mut attr = ibv_port_attr::default();
    // SAFETY: an open context; the call fills a structure that is no longer than this, with the same fields up to its
    // end.
    let code = unsafe { (verbs.table.query_port)(context.as_ptr(), port, (&raw mut attr).cast()) };
    number(code).map_err(|code| VerbsError::os(format!("asking device {name} for port {port}"), code))?;
    Ok(attr)
}

/// The tables of all ports in one call, where the library has it.
fn gid_table(
    verbs: &Verbs,
    context: &Object<ibv_context>,
    name: &str,
    entries: usize,
) -> Result<Option<Vec<abi::ibv_gid_entry>>, VerbsError> {
    let Some(query) = verbs.table.query_gid_table else { return Ok(None) };
    let mut table: Vec<_> = (0..entries).map(|_| abi::ibv_gid_entry::default()).collect();
    // SAFETY: an open context, and room for `entries` entries of this size.
    let got =
        unsafe { query(context.as_ptr(), table.as_mut_ptr(), entries, 0, size_of::<abi::ibv_gid_entry>()) };
    let got = usize::try_from(got).map_err(|_| {
        let what = format!("reading the GID table of device {name}");
        VerbsError::os(what, got.unsigned_abs() as c_int)
    })?;
    table.truncate(got);
    Ok(Some(table))
}

/// A port's entries. Those beyond 255 cannot be named in an address of a packet's path, and are left out.
fn of_table(table: &[abi::ibv_gid_entry], port: u8) -> Vec<Gid> {
    let of_port = table.iter().filter(|entry| entry.port_num == u32::from(port));
    of_port
        .filter_map(|entry| {
            Some(Gid {
                index: u8::try_from(entry.gid_index).ok()?,
                raw: entry.gid.0,
                kind: GidKind::from_number(entry.gid_type)?,
                interface: interface_name(entry.ndev_ifindex),
            })
        })
        .collect()
}

/// The name of a network interface; empty for none, and for one of another network namespace.
fn interface_name(index: u32) -> String {
    let mut name: [c_char; libc::IF_NAMESIZE] = [0; libc::IF_NAMESIZE];
    // SAFETY: room for the longest name, which the call ends with a zero byte if it returns a pointer to it.
    match unsafe { libc::if_indextoname(index, name.as_mut_ptr()) }.is_null() {
        true => String::new(),
        // SAFETY: as above.
        false => unsafe { text(name.as_ptr()) },
    }
}

/// The table entry by entry, with the rest from the kernel's files: for libraries that cannot read it at once.
fn one_by_one(
    verbs: &Verbs,
    context: &Object<ibv_context>,
    name: &str,
    port: u8,
    (link, len): (Link, c_int),
) -> Vec<Gid> {
    let file = |of: &str, index: u8| sysfs(name, port, &format!("gid_attrs/{of}/{index}"));
    (0..=u8::MAX)
        .take(len.max(0) as usize)
        .filter_map(|index| {
            let mut raw = abi::ibv_gid::default();
            // SAFETY: an open context; the call fills the GID.
            let code = unsafe { (verbs.table.query_gid)(context.as_ptr(), port, index.into(), &mut raw) };
            if code != 0 || raw.0 == [0; 16] {
                return None;
            }
            let kind = match file("types", index) {
                Some(words) => GidKind::from_words(&words, link)?,
                // Kernels without these files have version 1 only.
                None if link == Link::Ethernet => GidKind::RoceV1,
                None => GidKind::InfiniBand,
            };
            let interface = file("ndevs", index).map_or(String::new(), |name| name.trim().into());
            Some(Gid { index, raw: raw.0, kind, interface })
        })
        .collect()
}

fn sysfs(device: &str, port: u8, file: &str) -> Option<String> {
    std::fs::read_to_string(format!("/sys/class/infiniband/{device}/ports/{port}/{file}")).ok()
}

/// Thousands of millions of bits in a second, as the kernel's file has it: `100 Gb/sec (4X EDR)`.
fn rate(device: &str, port: u8) -> Option<u32> {
    parse_rate(&sysfs(device, port, "rate")?)
}

fn parse_rate(text: &str) -> Option<u32> {
    let number = text.split_whitespace().next()?;
    number.split('.').next()?.parse().ok()
}

/// The same from the codes of the port's attributes: lanes, and the speed of one (InfiniBand's specification,
/// `PortInfo`).
fn speed(width: u8, lane: u8) -> u32 {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    // In tenths.
    let lane = match lane {
        1 => 25,
        2 => 50,
        4 | 8 => 100,
        16 => 140,
        32 => 250,
        64 => 500,
        128 => 1000,
        _ => 0,
    };
    lanes * lane / 10
}

/// Bytes of an MTU's code; the smallest there is for a code that nobody knows.
pub(super) fn mtu_bytes(code: u32) -> usize {
    128 << code.clamp(1, 5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speeds_are_read_from_either_source() {
        assert_eq!(parse_rate("100 Gb/sec (4X EDR)\n"), Some(100));
        assert_eq!(parse_rate("2.5 Gb/sec (1X SDR)\n"), Some(2));
        assert_eq!((parse_rate(""), parse_rate("fast")), (None, None));
        assert_eq!((speed(2, 32), speed(1, 1), speed(2, 128)), (100, 2, 400));
        assert_eq!((speed(3, 32), speed(2, 0)), (0, 0));
        assert_eq!([1, 2, 3, 4, 5, 9, 0].map(mtu_bytes), [256, 512, 1024, 2048, 4096, 4096, 256]);
    }

    #[test]
    fn entries_of_a_table_go_to_their_ports() {
        let entry = |gid_index, port_num, gid_type| abi::ibv_gid_entry {
            gid: abi::ibv_gid([7; 16]),
            gid_index,
            port_num,
            gid_type,
            ndev_ifindex: 1,
        };
        let table = [entry(0, 1, 1), entry(3, 1, 2), entry(0, 2, 0), entry(300, 1, 2), entry(4, 1, 77)];
        let gids = of_table(&table, 1);
        let kinds: Vec<_> = gids.iter().map(|gid| (gid.index, gid.kind)).collect();
        assert_eq!(kinds, [(0, GidKind::RoceV1), (3, GidKind::RoceV2)]);
        assert_eq!(gids[0].interface, "lo");
        assert_eq!(of_table(&table, 2).len(), 1);
    }

    #[test]
    #[ignore = "needs an RDMA device: KVIK_TEST_VERBS=rxe0"]
    fn the_table_entry_by_entry_is_the_same() {
        let verbs = Verbs::load(None).unwrap();
        let table = super::super::Table { query_gid_table: None, ..verbs.table };
        let old = Verbs { library: verbs.library.clone(), table };
        assert!(verbs.table.query_gid_table.is_some());
        let ports = verbs.ports().unwrap().ports;
        assert!(!ports.is_empty());
        assert_eq!(old.ports().unwrap().ports, ports);
    }
}
