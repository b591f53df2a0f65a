//! The stand-in for libfabric, as tests use it: built once, and in a process of its own for each test, since a process
//! takes one libfabric only and the stand-in reads its environment.
//!
//! [`alone`] is the way in. README.md beside this file has the environment and the commands.

#[path = "../make.rs"]
mod make;

use make::text;
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

/// Names the fabric's folder: set in the processes that use the stand-in.
pub const FOLDER: &str = "KVIK_STANDIN_DIR";
/// The daemon's answer to a command, and its end, take no longer.
const LIMIT: Duration = Duration::from_secs(20);

/// The folder with the library and its daemon.
fn build() -> PathBuf {
    make::build("fabric")
}

/// The program that breaks a rule of libfabric, which the stand-in must notice.
pub fn breaks() -> PathBuf {
    build().join("standin-breaks")
}

/// The library's file.
pub fn library() -> PathBuf {
    build().join("libfabric.so.1")
}

/// What a test says to the devices.
pub struct Control(BufReader<UnixStream>);

impl Control {
    fn open(folder: &Path) -> Control {
        let stream = UnixStream::connect(folder.join("control")).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        Control(BufReader::new(stream))
    }

    /// Gives a command, which must be one, and returns what is said to it.
    pub fn say(&mut self, command: &str) -> String {
        self.0.get_mut().write_all(format!("{command}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        self.0.read_line(&mut answer).unwrap();
        assert!(answer.starts_with("ok"), "{command:?}: {answer}");
        answer
    }

    /// What the daemon and its clients count.
    pub fn counts(&mut self) -> HashMap<String, u64> {
        let answer = self.say("counts");
        let pairs = answer.split_whitespace().filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
    }
}

/// A folder of a fabric, which goes with the value, as its daemon does.
pub struct Folder {
    pub path: PathBuf,
    daemon: Option<(Child, Control)>,
}

impl Folder {
    /// Without a daemon: the library starts one.
    pub fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        // Not in the build's folder: the paths of sockets are short.
        let path = std::env::temp_dir().join(format!("kvik-fabric-{}-{number}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Folder { path, daemon: None }
    }

    /// With a daemon, which goes on while the value lives.
    fn start(settings: &[(&str, &str)]) -> Folder {
        let mut folder = Folder::new();
        let mut command = Command::new(build().join("standin-nic"));
        command.arg(&folder.path).arg("stay").envs(settings.iter().copied()).stdout(Stdio::piped());
        let mut daemon = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "{}", folder.log());
        let control = Control::open(&folder.path);
        folder.daemon = Some((daemon, control));
        folder
    }

    /// What its daemons have said.
    pub fn log(&self) -> String {
        fs::read_to_string(self.path.join("log")).unwrap_or_default()
    }

    /// Waits until its daemon has ended, which holds a lock as long as it lives.
    pub fn ended(&mut self) {
        let daemon = self.daemon.take().map(|(daemon, _)| daemon);
        let lock = File::open(self.path.join("lock")).unwrap();
        let (tell, told) = channel();
        std::thread::spawn(move || tell.send(lock.lock()));
        told.recv_timeout(LIMIT).expect("the daemon outlives its last user").unwrap();
        if let Some(mut daemon) = daemon {
            assert!(daemon.wait().unwrap().success(), "{}", self.log());
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Some((mut daemon, _)) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Runs `body` in a process of its own, over a fabric of its own with these settings (of the environment). `test` is
/// the whole name of the test that calls.
pub fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce(Control)) {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return body(Control::open(Path::new(&folder)));
    }
    let mut folder = Folder::start(settings);
    let output = again(test, &folder, settings);
    assert!(output.status.success(), "{test} in a process of its own: {}", text(&output));
    println!("{}", text(&output));
    folder.ended();
}

/// Runs a test of this program again, in a process that has the fabric of the folder.
pub fn again(test: &str, folder: &Folder, settings: &[(&str, &str)]) -> Output {
    let mut variables = vec![(FOLDER, OsString::from(&folder.path))];
    variables.extend(settings.iter().map(|(name, value)| (*name, OsString::from(value))));
    make::again(test, &variables)
}
