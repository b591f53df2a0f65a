//! What is said where the process has no descriptor to spare. One test only, so that nothing else in this program needs
//! any meanwhile.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};

use kvik_host::unix::UnixConn;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn a_message_whose_descriptors_have_no_room_says_so() {
    let (a, b) = UnixConn::pair().unwrap();
    let (mut reader, writer) = std::io::pipe().unwrap();
    a.send_with_fds(b"region", &[writer.as_fd()]).unwrap();
    drop(writer);
    let before = getrlimit(Resource::Nofile);
    // The lowest that is free: all below it are taken.
    let free = rustix::io::dup(&b).unwrap();
    let current = Some(free.as_raw_fd() as u64);
    drop(free);
    setrlimit(Resource::Nofile, Rlimit { current, maximum: before.maximum }).unwrap();
    let refused = b.recv_with_fds(&mut [0; 8], 1);
    setrlimit(Resource::Nofile, before).unwrap();
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("ulimit -n") && !error.contains("did not fit"), "{error}");
    assert_eq!(reader.read(&mut [0]).unwrap(), 0, "the kernel has closed it");
}
