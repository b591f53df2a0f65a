//! A second process, which reads the memory of the first.

use crate::by_kernel::drawn;
use crate::parts::{Checked, LIMIT, finish, memory, pinned, text};
use crate::pattern::{bytes, compare};
use kvik_host::HostError;
use kvik_host::cuda::{GpuMemory, IpcHandle, Stream, Way};
use kvik_host::event::{Interest, wait_ready};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

/// The argument that makes this program the second process.
pub const WORD: &str = "--as-a-peer";
/// Of the bytes that the first one has put there.
pub const SEED: u64 = 30;

/// Starts the second process, and waits for its word.
pub fn start(handle: &IpcHandle) -> Checked {
    let own = std::env::current_exe().map_err(|e| e.to_string())?;
    let hex: String = handle.encode().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut child = Command::new(own)
        .args([WORD, &hex])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| e.to_string())?;
    let pid = Pid::from_raw(child.id() as i32).ok_or("the process has no number")?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|e| e.to_string())?;
    if !wait_ready(&pidfd, Interest::READ, LIMIT).map_err(text)? {
        let _ = child.kill();
        let _ = child.wait();
        return Err(format!("the other process takes longer than {LIMIT:?}"));
    }
    let output = child.wait_with_output().map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout);
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("the other process: {}, {said}", output.status))
    }
}

/// The second process.
pub fn run(handle: &str) -> ExitCode {
    match decode(handle).and_then(|handle| read(&handle)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            print!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn decode(hex: &str) -> Checked<IpcHandle> {
    let digits = hex.as_bytes();
    let mut bytes = [0; IpcHandle::LEN];
    if digits.len() != 2 * bytes.len() {
        return Err("no handle".into());
    }
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        let text = std::str::from_utf8(pair).map_err(|e| e.to_string())?;
        *byte = u8::from_str_radix(text, 16).map_err(|e| e.to_string())?;
    }
    Ok(IpcHandle::decode(&bytes))
}

fn read(handle: &IpcHandle) -> Checked {
    let theirs = &Arc::new(GpuMemory::open(handle, Box::new(())).map_err(text)?);
    let (device, len) = (theirs.device(), theirs.len());
    let (own, staging) = (memory(device, len)?, pinned(device, len)?);
    let mut stream = Stream::new(device).map_err(text)?;
    stream.between(&own, theirs, &[(0, 0, len)]).map_err(text)?;
    stream.gather(&staging, 0, &own, &[(0, len)]).map_err(text)?;
    finish(&mut stream)?;
    let mut have = vec![0; len];
    staging.memory().copy_out(0, &mut have).map_err(text)?;
    compare(&have, &bytes(SEED, 0, len))?;
    // And in pieces, by the kernel where there is one.
    let pieces = drawn(SEED, len, 3);
    own.copy_in(0, &vec![0; len]).map_err(text)?;
    stream.copy_by(Way::Kernel);
    let moved: Vec<_> = pieces.iter().map(|(offset, len)| (*offset, *offset, *len)).collect();
    stream.between(&own, theirs, &moved).map_err(text)?;
    finish(&mut stream)?;
    own.copy_out(0, &mut have).map_err(text)?;
    let mut want = vec![0; len];
    for (offset, len) in pieces {
        want[offset..offset + len].copy_from_slice(&bytes(SEED, offset, len));
    }
    compare(&have, &want)?;
    match stream.scatter(theirs, &[(0, len)], &staging, 0) {
        Err(HostError::ReadOnlyMemory) => Ok(()),
        _ => Err("a peer's memory can be written".into()),
    }
}
