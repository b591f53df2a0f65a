//! Room for this process's descriptors in the kernel's table of them.

use crate::error::HostError;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit};

/// So many descriptors have room: 128 KiB of the kernel's memory, once a process, and some hundreds of peers.
pub const ROOM: u64 = 16_384;

/// Makes room for [`ROOM`] descriptors, or for as many as `ulimit -n` allows.
///
/// The table begins with 64 places, grows by doubling and never shrinks. In a process with several threads, the one
/// whose new descriptor does not fit waits until each CPU has passed through the scheduler (`synchronize_rcu` in
/// `expand_fdtable`, fs/file.c of Linux). On a machine with two cores, both of which ran serving engines that poll, a
/// thread that received its 128th descriptor stood still for 0.7 s, and another time for 2.9 s: longer than a peer may
/// be silent. So a thread that must not be late makes the room before anybody relies on it.
///
/// # Errors
/// The kernel has no memory for the table, or no place in it is free.
pub fn make_room() -> Result<(), HostError> {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(ROOM).min(ROOM);
    let failed = |error: std::io::Error| HostError::os(format!("making room for {most} descriptors"), error);
    let any = eventfd(0, EventfdFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
    let last = i32::try_from(most.saturating_sub(1)).unwrap_or(0);
    fcntl_dupfd_cloexec(&any, last).map(drop).map_err(|error| failed(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_room_afterwards() {
        make_room().unwrap();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
        let allowed = getrlimit(Resource::Nofile).current.unwrap_or(ROOM).min(ROOM);
        assert!(size.trim().parse::<u64>().unwrap() >= allowed, "{size} of {allowed}");
    }
}
