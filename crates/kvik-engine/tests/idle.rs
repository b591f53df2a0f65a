//! Idle is free, also while a forked child holds every descriptor of its parent.
//!
//! One test in a program of its own: the CPU time is that of the whole process, and nothing else may fork it.

use kvik_core::{Code, Layout, Use};
use kvik_engine::{Config, Engine, Grant, GrantOptions, PageSet, Preference, TransferOptions};
use kvik_host::clock::process_cpu;
use rustix::process::{Signal, set_parent_process_death_signal};
use std::io::{Error, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Of CPU time, in a second.
const MOST: Duration = Duration::from_millis(20);

fn start(transport: Preference) -> Engine {
    Engine::start(Config { transport, ..Config::default() }).unwrap()
}

fn pages(engine: &Engine) -> PageSet {
    let region = engine.allocate(1 << 20).unwrap();
    PageSet::new(&region, Arc::new(Layout::contiguous(16, 64 << 10).unwrap()), [1, 3].into(), None, None)
        .unwrap()
}

fn granted(engine: &Engine) -> Grant {
    engine.grant(&pages(engine), GrantOptions { uses: Use::Many, ..GrantOptions::default() }).unwrap()
}

fn read(reader: &Engine, grant: &Grant) {
    let read = reader.read(&pages(reader), grant.ticket(), None, TransferOptions::default());
    read.unwrap().wait(Some(Duration::from_secs(60))).unwrap();
}

/// CPU time that all threads together use in a second, or a little more, in which nothing is asked of them.
fn check_idle(when: &str) {
    let (before, began) = (process_cpu(), Instant::now());
    std::thread::sleep(Duration::from_secs(1));
    let (used, slept) = (process_cpu() - before, began.elapsed());
    println!("{when}: {used:?}");
    assert!(used < MOST.mul_f64(slept.as_secs_f64()), "{used:?} of CPU time in {slept:?}, {when}");
}

/// What a forked child does with an engine of its parent.
fn use_in_child(engine: Engine, set: PageSet, grant: Grant) -> Result<(), Error> {
    let refused = engine.read(&set, grant.ticket(), None, TransferOptions::default());
    let cold = engine.warm_up(grant.ticket(), None).map(drop);
    let forked =
        [refused.map(drop), cold].map(|result| result.is_err_and(|error| error.code == Code::EngineForked));
    let right = forked == [true; 2] && engine.stats().is_empty();
    drop((engine, set, grant));
    if right { Ok(()) } else { Err(Error::other("the engine can be used in a child")) }
}

#[test]
fn idle_engines_use_no_cpu_time() {
    for transport in [Preference::Tcp, Preference::Local] {
        let (owner, reader, other) = (start(transport), start(transport), start(transport));
        let (grant, second) = (granted(&owner), granted(&other));
        read(&reader, &grant);
        read(&reader, &second);
        check_idle("two sessions");

        let (mut ready, child_ready) = std::io::pipe().unwrap();
        let (child_waits, mut release) = std::io::pipe().unwrap();
        let address = other.addresses()[0];
        let mine = (reader.clone(), pages(&reader), granted(&reader));
        let forked = std::thread::spawn(move || {
            let mut mine = Some(mine);
            let mut command = Command::new("true");
            // SAFETY: the C library makes its allocator usable in a forked child, and the engine touches no lock there.
            unsafe {
                command.pre_exec(move || {
                    set_parent_process_death_signal(Some(Signal::KILL))?;
                    mine.take().map_or(Ok(()), |(engine, set, grant)| use_in_child(engine, set, grant))?;
                    (&child_ready).write_all(&[1])?;
                    // Until the parent says so, this process holds all that it inherited.
                    let mut byte = [0];
                    (&child_waits).read_exact(&mut byte)
                });
            }
            command.status().unwrap()
        });
        ready.read_exact(&mut [0]).unwrap();
        read(&reader, &grant);
        other.close(Duration::from_secs(60)).unwrap();
        check_idle("a session was lost, and a child holds its sockets");
        let refused = std::net::TcpStream::connect_timeout(&address, Duration::from_secs(1));
        assert!(refused.is_err(), "a closed engine still listens");
        release.write_all(&[1]).unwrap();
        let began = Instant::now();
        assert!(forked.join().unwrap().success());
        assert!(began.elapsed() < Duration::from_secs(60));
        read(&reader, &grant);
    }
}
