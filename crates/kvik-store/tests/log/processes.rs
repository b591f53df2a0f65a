//! Two processes on a directory, and a directory that may only be read.

use crate::basics::{Dir, options};
use crate::blocks::*;
use crate::owner::Index;
use kvik_core::Code;
use kvik_store::{Log, Tier};
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// What a child does; it is run by the tests below.
#[test]
#[ignore = "a part of other tests"]
fn child() {
    let Some(dir) = std::env::var_os("KVIK_LOG_DIR").map(PathBuf::from) else { return };
    let index = Index::all();
    let log = Log::open(&dir, options(), index.clone()).unwrap();
    if std::env::var_os("KVIK_LOG_READS").is_some() {
        read_only(&log, &index);
        println!("\nread");
        return;
    }
    let place = Block::new(1, 0, shape(3)).store(&log).unwrap();
    log.sync(&[place], LONG).unwrap();
    println!("\nopen");
    // Until the parent ends it, or is gone.
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn read_only(log: &Log, index: &Index) {
    assert!(log.read_only());
    assert_eq!(log.never_again().map(|error| error.code), Some(Code::StorageFailed));
    let block = Block::new(1, 0, shape(3));
    let (identity, place) = index.find(&Block::key(1)).expect("a block");
    assert!(load(log, place, &identity).unwrap().unwrap() == block.bytes());
    let refused = [
        block.store(log).map(drop),
        log.remove(&Block::key(1), LONG).map(drop),
        log.remove_namespace(&namespace(0), LONG).map(drop),
        log.sync(&[place], LONG),
    ];
    for error in refused.map(Result::unwrap_err) {
        assert!(error.code == Code::StorageFailed && error.text.contains("for reading only"), "{error:?}");
    }
}

fn start(dir: &Dir) -> Command {
    start_from(&std::env::current_exe().unwrap(), dir)
}

fn start_from(program: &Path, dir: &Dir) -> Command {
    let mut command = Command::new(program);
    command.args(["processes::child", "--exact", "--ignored", "--nocapture"]);
    command.env("KVIK_LOG_DIR", &dir.0).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// Starts a program that was just written. A process that another test starts meanwhile has it open for writing, and
/// nobody may run it, until that one runs a program of its own.
fn spawn_copied(command: &mut Command) -> Child {
    let until = Instant::now() + LONG;
    loop {
        match command.spawn() {
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy && Instant::now() < until => {
                std::thread::yield_now();
            }
            started => return started.unwrap(),
        }
    }
}

/// Waits until a child has said something. What this gives keeps it from writing to nobody.
fn wait_for(child: &mut Child, word: &str) -> impl Sized + use<> {
    let mut out = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(out.any(|line| line == word), "the child did not say {word:?}");
    out
}

#[test]
fn a_second_process_is_refused_by_the_number_of_the_first() {
    let dir = Dir::new("second");
    let mut child = start(&dir).spawn().unwrap();
    let _out = wait_for(&mut child, "open");
    let error = Log::open(&dir.0, options(), Index::all()).map(drop).unwrap_err();
    assert_eq!(error.code, Code::StorageFailed);
    assert!(error.text.contains(&format!("process {} has the log open", child.id())), "{error:?}");
    // The lock dies with its holder.
    child.kill().unwrap();
    child.wait().unwrap();
    let index = Index::all();
    let log = Log::open(&dir.0, options(), index.clone()).unwrap();
    let (identity, place) = index.find(&Block::key(1)).expect("what was durable");
    assert!(load(&log, place, &identity).unwrap().is_some());
}

#[test]
fn a_directory_that_may_only_be_read_is_read() {
    let dir = Dir::reachable("read-only");
    let log = Log::open(&dir.0, options(), Index::all()).unwrap();
    Block::new(1, 0, shape(3)).store(&log).unwrap();
    drop(log);
    let allow = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    for file in dir.files().iter().chain([&dir.0.join("LOCK")]) {
        allow(file, 0o444);
    }
    allow(&dir.0, 0o555);
    let before: Vec<_> = dir.files().iter().map(|file| std::fs::read(file).unwrap()).collect();
    // Where the tests are built may be closed to other users.
    let place = Dir::reachable("reader");
    std::fs::create_dir(&place.0).unwrap();
    allow(&place.0, 0o755);
    let program = place.0.join("log");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut command = start_from(&program, &dir);
    command.env("KVIK_LOG_READS", "1");
    if rustix::process::geteuid().is_root() {
        // No mode keeps root out.
        command.uid(65534).gid(65534);
    }
    let mut child = spawn_copied(&mut command);
    let _out = wait_for(&mut child, "read");
    assert!(child.wait().unwrap().success());
    let after: Vec<_> = dir.files().iter().map(|file| std::fs::read(file).unwrap()).collect();
    assert!(before == after, "something was written");
    allow(&dir.0, 0o755);
}
