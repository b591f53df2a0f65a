//! Threads: deaf to signals, named, and where they were asked to be.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use kvik_host::HostError;
use kvik_host::thread::{ThreadOptions, numa_nodes, spawn_named};

const BOUND: Duration = Duration::from_secs(60);

/// Runs `f` in a kvik thread and gives its result.
fn in_thread<T: Send + 'static>(options: &ThreadOptions, f: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, recv) = mpsc::channel();
    let thread = spawn_named("kvik-test", options, move || send.send(f()).unwrap()).unwrap();
    let result = recv.recv_timeout(BOUND).unwrap();
    thread.join().unwrap();
    result
}

fn status_line(field: &str) -> String {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    status.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_string()
}

fn blocked() -> u64 {
    u64::from_str_radix(&status_line("SigBlk:"), 16).unwrap()
}

#[test]
fn all_signals_are_blocked_in_the_thread_and_none_more_in_the_caller() {
    let before = blocked();
    let inside = in_thread(&ThreadOptions::default(), blocked);
    assert_eq!(blocked(), before);
    for signal in 1..=64 {
        // The kernel never blocks KILL and STOP; 32 and 33 are the C library's own.
        let cannot = matches!(signal, libc::SIGKILL | libc::SIGSTOP | 32 | 33);
        assert_eq!(inside >> (signal - 1) & 1 == 0, cannot, "signal {signal} in {inside:016x}");
    }
}

#[test]
fn the_kernel_knows_the_name() {
    assert_eq!(in_thread(&ThreadOptions::default(), || status_line("Name:")), "kvik-test");
    let longest = "kvik-0123456789";
    let thread = spawn_named(longest, &ThreadOptions::default(), || {
        assert_eq!(status_line("Name:"), "kvik-0123456789");
    });
    thread.unwrap().join().unwrap();
}

#[test]
fn bad_names_are_refused() {
    for name in ["", "worker", "Kvik-io", "kvik-0123456789a", "kvik-a\0b"] {
        let refused = spawn_named(name, &ThreadOptions::default(), || ());
        assert!(matches!(refused, Err(HostError::InvalidArgument(_))), "{name:?}");
    }
}

#[test]
fn the_thread_runs_on_the_cpus_it_was_given() {
    let allowed = in_thread(&ThreadOptions::default(), || rustix::thread::sched_getaffinity(None).unwrap());
    let cpus: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect();
    for &cpu in &cpus {
        let options = ThreadOptions { cpus: Some(vec![cpu]), numa_node: None, ..ThreadOptions::default() };
        assert_eq!(in_thread(&options, || status_line("Cpus_allowed_list:")), cpu.to_string());
    }
    let options = ThreadOptions { cpus: Some(cpus.clone()), numa_node: None, ..ThreadOptions::default() };
    let inside = in_thread(&options, || rustix::thread::sched_getaffinity(None).unwrap());
    assert_eq!(inside.count() as usize, cpus.len());
}

#[test]
fn a_cpu_that_is_not_there_is_named_and_the_work_not_begun() {
    let begun = Arc::new(AtomicBool::new(false));
    for (cpus, bad) in [(vec![0, 1023], 1023), (vec![1 << 40], 1 << 40)] {
        let options = ThreadOptions { cpus: Some(cpus), numa_node: None, ..ThreadOptions::default() };
        let flag = Arc::clone(&begun);
        match spawn_named("kvik-test", &options, move || flag.store(true, Ordering::Release)) {
            Err(HostError::CpuNotAllowed { cpu, allowed }) => {
                assert_eq!(cpu, bad);
                assert!(!allowed.is_empty());
            }
            other => panic!("{other:?}"),
        }
    }
    let none = ThreadOptions { cpus: Some(vec![]), numa_node: None, ..ThreadOptions::default() };
    assert!(matches!(spawn_named("kvik-test", &none, || ()), Err(HostError::InvalidArgument(_))));
    assert!(!begun.load(Ordering::Acquire));
}

#[test]
fn a_numa_node_gives_its_cpus_and_a_missing_one_is_named() {
    for node in numa_nodes() {
        let options = ThreadOptions { numa_node: Some(node), ..ThreadOptions::default() };
        let policy = in_thread(&options, || {
            let mut mode = -1i32;
            // SAFETY: the kernel writes the mode; no mask is asked for.
            let status = unsafe {
                libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, 0usize, 0usize, 0usize, 0usize)
            };
            (status, mode)
        });
        assert_eq!(policy, (0, libc::MPOL_PREFERRED));
    }
    let options = ThreadOptions { numa_node: Some(999), ..ThreadOptions::default() };
    let refused = spawn_named("kvik-test", &options, || ());
    assert!(matches!(refused, Err(HostError::NodeUnknown { node: 999, .. })), "{refused:?}");
}

#[test]
fn a_prompt_thread_is_scheduled_before_ordinary_ones_where_that_is_allowed() {
    let (tell, told) = std::sync::mpsc::channel();
    let thread = spawn_named("kvik-prompt", &ThreadOptions::default(), move || {
        let asked = kvik_host::thread::be_prompt();
        // SAFETY: 0 is the calling thread.
        let policy = unsafe { libc::sched_getscheduler(0) };
        tell.send((asked.map_err(|error| error.to_string()), policy)).unwrap();
    });
    thread.unwrap().join().unwrap();
    match told.recv().unwrap() {
        (Ok(()), policy) => assert_eq!(policy, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK),
        (Err(why), policy) => {
            assert_eq!(policy, libc::SCHED_OTHER);
            assert!(why.contains("ulimit -r"), "{why}");
        }
    }
}

#[test]
fn cpu_time_of_a_thread_is_read_from_outside_and_kept_after_its_end() {
    let options = ThreadOptions::default();
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let (worked, did) = std::sync::mpsc::channel();
    let busy = move || {
        let mut sum = 0u64;
        while kvik_host::clock::thread_cpu() < std::time::Duration::from_millis(20) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        worked.send(()).unwrap();
        let _ = wait.recv();
    };
    let thread = spawn_named("kvik-busy", &options, busy).unwrap();
    let names = |times: &[(String, std::time::Duration)]| {
        times.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names(&options.times.read()), ["kvik-busy"]);
    did.recv().unwrap();
    let running = options.times.read();
    assert!(running[0].1 >= std::time::Duration::from_millis(20), "{running:?}");
    drop(go);
    thread.join().unwrap();
    let ended = options.times.read();
    assert!(ended[0].1 >= running[0].1, "{ended:?} after {running:?}");
    assert_eq!(options.times.read(), ended);
}

#[test]
fn a_real_time_thread_sleeps_until_the_one_that_it_starts_is_in_place() {
    // Both on one CPU, where the new thread runs only while the other one sleeps.
    let first = status_line("Cpus_allowed_list:").split(['-', ',']).next().unwrap().parse().unwrap();
    let options = ThreadOptions { cpus: Some(vec![first]), ..ThreadOptions::default() };
    let same = options.clone();
    let spent = in_thread(&options, move || {
        if let Err(refused) = kvik_host::thread::be_prompt() {
            eprintln!("not asked of an ordinary thread: {refused}");
            return None;
        }
        let before = kvik_host::clock::thread_cpu();
        for _ in 0..10 {
            spawn_named("kvik-new", &same, || ()).unwrap().join().unwrap();
        }
        Some(kvik_host::clock::thread_cpu() - before)
    });
    // One that waits by looking keeps the CPU until the kernel takes it away, after most of a second.
    assert!(spent.is_none_or(|spent| spent < Duration::from_millis(500)), "{spent:?}");
}
