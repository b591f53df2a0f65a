//! Reading another process. The other process is this test program again, in the role named by `KVIK_ROLE`.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::ptr;

use kvik_host::runs::MAX_RUNS;
use kvik_host::{HostError, HugePages, Memory, ProcessMemory, RunBuffer};
use rustix::mm::{MapFlags, ProtFlags};

const PAGE: usize = 4096;
const PAGES: usize = 256;
const LEN: usize = PAGE * PAGES;

/// Byte `i` of the memory that the other process holds; the first 32 are the nonce.
fn byte(i: usize) -> u8 {
    (i * 7 + i / PAGE) as u8
}

/// The test function that a child runs; in the parent it does nothing.
#[test]
fn role() {
    match std::env::var("KVIK_ROLE").as_deref() {
        Ok("hold") => hold(false),
        Ok("churn") => hold(true),
        _ => {}
    }
}

/// Holds memory, tells where, unmaps its second half when told to, and ends when its input ends. In the role
/// `churn` it unmaps and maps the second half again and again until then.
fn hold(churn: bool) {
    let anonymous = |at: *mut libc::c_void, len, fixed| {
        // SAFETY: either the kernel picks the address, or the range is part of our own mapping.
        unsafe {
            rustix::mm::mmap_anonymous(at, len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | fixed)
        }
        .unwrap()
    };
    let base = anonymous(ptr::null_mut(), LEN, MapFlags::empty());
    for i in 0..LEN {
        // SAFETY: inside the mapping just made.
        unsafe { base.cast::<u8>().add(i).write(byte(i)) };
    }
    let upper = base.wrapping_byte_add(LEN / 2);
    eprintln!("HERE {}", base as u64);
    let ended = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let churner = churn.then(|| {
        let (ended, upper) = (ended.clone(), upper as usize);
        std::thread::spawn(move || {
            let upper = ptr::with_exposed_provenance_mut(upper);
            while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                // SAFETY: the upper half of our own mapping, which nobody here refers to.
                unsafe { rustix::mm::munmap(upper, LEN / 2) }.unwrap();
                anonymous(upper, LEN / 2, MapFlags::FIXED_NOREPLACE);
            }
        })
    });
    for line in std::io::stdin().lines() {
        if line.unwrap() == "unmap" {
            // SAFETY: as above.
            unsafe { rustix::mm::munmap(upper, LEN / 2) }.unwrap();
            eprintln!("UNMAPPED");
        }
    }
    ended.store(true, std::sync::atomic::Ordering::Relaxed);
    churner.into_iter().for_each(|thread| thread.join().unwrap());
}

/// A process in a role. It ends when this is dropped.
struct Other {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStderr>,
    base: u64,
}

impl Other {
    fn start(role: &str) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["role", "--exact", "--nocapture", "--test-threads=1"])
            .env("KVIK_ROLE", role)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stderr.take().unwrap());
        let mut other = Other { child, input, output, base: 0 };
        other.base = other.line("HERE ").parse().unwrap();
        other
    }

    /// Reads until a line with this beginning, and gives the rest of it.
    fn line(&mut self, beginning: &str) -> String {
        let mut text = String::new();
        while self.output.by_ref().take(1 << 16).read_line(&mut text).unwrap() > 0 {
            if let Some(rest) = text.strip_prefix(beginning) {
                return rest.trim().to_string();
            }
            text.clear();
        }
        panic!("the other process ended without saying {beginning:?}");
    }

    fn unmap_upper_half(&mut self) {
        self.input.as_mut().unwrap().write_all(b"unmap\n").unwrap();
        self.line("UNMAPPED");
    }

    fn open(&self) -> ProcessMemory {
        ProcessMemory::open(self.child.id()).unwrap()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // Its input ends, and so does it.
        self.input.take();
        let _ = self.child.wait();
    }
}

/// Reads `len` bytes at `addr` of the other process to the start of `memory`.
fn read(process: &ProcessMemory, addr: u64, memory: &Memory, len: usize) -> Result<(), HostError> {
    let (mut remote, mut local) = (RunBuffer::new(1), RunBuffer::new(1));
    let (mut remote, mut local) = (remote.begin_remote(), local.begin_recv());
    assert!(remote.push(addr, len) && local.push(memory.recv_run(0, len).unwrap()));
    process.read(&mut remote, &mut local)
}

#[test]
fn a_nonce_tells_the_right_process_from_others() {
    let other = Other::start("hold");
    let process = other.open();
    let nonce: Vec<u8> = (0..32).map(byte).collect();
    assert!(matches!(process.prove_again(), Err(HostError::NonceMismatch { .. })));
    process.probe(other.base, &nonce).unwrap();
    let wrong = process.probe(other.base + 1, &nonce);
    process.prove_again().unwrap();
    assert!(matches!(wrong, Err(HostError::NonceMismatch { .. })), "{wrong:?}");
    for len in [0, kvik_host::process_vm::MAX_NONCE + 1] {
        assert!(matches!(process.probe(other.base, &vec![0; len]), Err(HostError::InvalidArgument(_))));
    }
    for nowhere in [0, 8, u64::MAX - 4, 1 << 63] {
        let refused = process.probe(nowhere, &nonce);
        assert!(matches!(refused, Err(HostError::RemoteUnmapped { .. })), "{nowhere:#x}: {refused:?}");
    }
}

#[test]
fn a_batch_of_scattered_runs_lands_where_it_should() {
    let other = Other::start("hold");
    let process = other.open();
    let memory = Memory::shared(LEN, HugePages::Never).unwrap();
    let (mut remote, mut local) = (RunBuffer::new(MAX_RUNS), RunBuffer::new(MAX_RUNS));
    for round in 0..3 {
        // Remote runs in a scrambled order, local ones cut at other places.
        let (run, piece) = (LEN / MAX_RUNS, LEN / 1000 + round);
        let place = |i: usize| (i * 517) % MAX_RUNS * run;
        let mut from = remote.begin_remote();
        (0..MAX_RUNS).for_each(|i| assert!(from.push(other.base + place(i) as u64, run)));
        assert!(!from.push(other.base, 1), "a full batch takes no more");
        let mut to = local.begin_recv();
        for at in (0..LEN).step_by(piece) {
            assert!(to.push(memory.recv_run(at, piece.min(LEN - at)).unwrap()));
        }
        process.read(&mut from, &mut to).unwrap();
        assert!(to.is_empty() && from.bytes() == 0);
        let mut bytes = vec![0; LEN];
        memory.copy_out(0, &mut bytes).unwrap();
        for (i, chunk) in bytes.chunks_exact(run).enumerate() {
            let want: Vec<u8> = (place(i)..place(i) + run).map(byte).collect();
            assert_eq!(chunk, want, "run {i}");
        }
        memory.copy_in(0, &vec![0; LEN]).unwrap();
    }
}

#[test]
fn unequal_lengths_are_refused_before_anything_is_read() {
    let process = ProcessMemory::open(std::process::id()).unwrap();
    let (mut remote, mut local) = (RunBuffer::new(1), RunBuffer::new(1));
    let (mut from, mut to) = (remote.begin_remote(), local.begin_recv());
    let mut bytes = [1u8; 8];
    assert!(from.push(bytes.as_ptr() as u64, 7) && to.push((&mut bytes[..]).into()));
    assert!(matches!(process.read(&mut from, &mut to), Err(HostError::InvalidArgument(_))));
}

#[test]
fn memory_that_goes_away_gives_its_address() {
    let mut other = Other::start("hold");
    let process = other.open();
    let memory = Memory::shared(LEN, HugePages::Never).unwrap();
    read(&process, other.base, &memory, LEN).unwrap();
    other.unmap_upper_half();
    let first_gone = other.base + (LEN / 2) as u64;
    match read(&process, other.base, &memory, LEN) {
        Err(HostError::RemoteUnmapped { pid, addr }) => assert_eq!((pid, addr), (process.pid(), first_gone)),
        result => panic!("{result:?}"),
    }
    read(&process, other.base, &memory, LEN / 2).unwrap();
    process.alive().unwrap();
}

#[test]
fn memory_that_comes_and_goes_under_a_copy_is_an_error_and_no_crash() {
    let other = Other::start("churn");
    let process = other.open();
    let memory = Memory::shared(LEN, HugePages::Never).unwrap();
    let (mut whole, mut cut) = (0, 0);
    for _ in 0..500 {
        match read(&process, other.base, &memory, LEN) {
            Ok(()) => whole += 1,
            Err(HostError::RemoteUnmapped { addr, .. }) => {
                assert!(addr >= other.base + (LEN / 2) as u64 && addr < other.base + LEN as u64);
                cut += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    println!("{whole} copies whole, {cut} cut");
}

#[test]
fn a_process_that_has_ended_is_gone_and_stays_gone() {
    let mut other = Other::start("hold");
    let process = other.open();
    let memory = Memory::shared(PAGE, HugePages::Never).unwrap();
    other.child.kill().unwrap();
    other.child.wait().unwrap();
    for _ in 0..2 {
        assert!(matches!(read(&process, other.base, &memory, PAGE), Err(HostError::ProcessGone { .. })));
        assert!(matches!(process.alive(), Err(HostError::ProcessGone { .. })));
    }
    assert!(matches!(ProcessMemory::open(other.child.id()), Err(HostError::ProcessGone { .. })));
}

#[test]
fn processes_of_another_user_and_impossible_numbers_are_refused() {
    assert!(matches!(ProcessMemory::open(0), Err(HostError::ProcessRefused { .. })));
    assert!(matches!(ProcessMemory::open(u32::MAX), Err(HostError::ProcessRefused { .. })));
    assert!(matches!(ProcessMemory::open(i32::MAX as u32), Err(HostError::ProcessGone { .. })));

    let refused = if rustix::process::geteuid().is_root() {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new("cat");
        let mut child = command.uid(65534).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let refused = ProcessMemory::open(child.id());
        child.stdin.take();
        child.wait().unwrap();
        refused
    } else {
        ProcessMemory::open(1)
    };
    match refused {
        Err(HostError::ProcessRefused { why, .. }) => assert!(why.contains("one user"), "{why}"),
        other => panic!("{other:?}"),
    }
}
