//! The addresses of this machine, and which of them mean anything to another.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use crate::error::HostError;

/// One address of one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// Name of the interface, e.g. `eth0`.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// Whether the interface is up.
    pub up: bool,
    /// Whether it is the loopback interface.
    pub loopback: bool,
}

/// All IPv4 and IPv6 addresses of this machine, as this network namespace sees it.
pub fn interface_addresses() -> Result<Vec<InterfaceAddress>, HostError> {
    let mut head: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: `head` is ours to be filled.
    if unsafe { libc::getifaddrs(&mut head) } != 0 {
        return Err(HostError::last_os("listing network interfaces"));
    }
    let mut found = Vec::new();
    let mut at = head;
    while !at.is_null() {
        // SAFETY: a node of the list that getifaddrs made and that is freed only below.
        let entry = unsafe { &*at };
        // SAFETY: null, or an address of the family that it names, alive as the list is.
        if let Some(ip) = unsafe { ip_of(entry.ifa_addr) } {
            // SAFETY: the list holds a C string for every interface.
            let interface = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
            let has = |flag: i32| entry.ifa_flags & flag as u32 != 0;
            found.push(InterfaceAddress {
                interface,
                ip,
                up: has(libc::IFF_UP),
                loopback: has(libc::IFF_LOOPBACK),
            });
        }
        at = entry.ifa_next;
    }
    // SAFETY: the list of getifaddrs, freed once, with no reference into it left.
    unsafe { libc::freeifaddrs(head) };
    Ok(found)
}

/// # Safety
/// `address` is null or points at a socket address of the family that it names.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: every socket address begins with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: the family says that this is an IPv4 address; it may be unaligned.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that this is an IPv6 address; it may be unaligned.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr)))
        }
        _ => None,
    }
}

/// Whether a peer on another host could connect to `ip` when told just this address. Loopback, wildcard, multicast
/// and broadcast addresses are not for that; an IPv6 link-local one needs an interface number that means nothing
/// elsewhere.
pub fn is_routable_off_host(ip: IpAddr) -> bool {
    match ip.to_canonical() {
        IpAddr::V4(v4) => {
            let this_network = v4.octets()[0] == 0;
            !(this_network || v4.is_loopback() || v4.is_multicast() || v4.is_broadcast())
        }
        IpAddr::V6(v6) => {
            !(v6.is_unspecified() || v6.is_loopback() || v6.is_multicast() || v6.is_unicast_link_local())
        }
    }
}
