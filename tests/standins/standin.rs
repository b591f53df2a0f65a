//! The stand-ins for libraries, as tests use them: built once, and in a process of its own for each test, since a
//! process takes one file of a library only and a stand-in reads its environment.
//!
//! [`Standin::alone`] is the way in. The README.md of each has the environment and the commands.

use crate::make::{self, text};
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

/// Names the devices' folder: set in the processes that use the stand-in.
pub const FOLDER: &str = "KVIK_STANDIN_DIR";
/// The daemon's answer to a command, and its end, take no longer.
const LIMIT: Duration = Duration::from_secs(60);

/// The library that a stand-in takes the place of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standin {
    /// libfabric, with the provider `efa`.
    Fabric,
    /// libibverbs, with RoCE devices.
    Verbs,
}

impl Standin {
    fn name(self) -> &'static str {
        match self {
            Standin::Fabric => "fabric",
            Standin::Verbs => "verbs",
        }
    }

    /// The folder with the library and its daemon.
    fn build(self) -> PathBuf {
        make::build(self.name())
    }

    /// Breaks a rule of the library, which the stand-in must notice: the signal that ends the program, and what it
    /// says.
    pub fn broken(self, rule: &str) -> (Option<i32>, String) {
        let mut folder = Folder::new();
        let mut command = Command::new(self.build().join("standin-breaks"));
        let output = command.arg(rule).env(FOLDER, &folder.path).output().unwrap();
        folder.ended();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() || output.status.signal().is_some(), "{rule}: {said}");
        (output.status.signal(), said)
    }

    /// A broken rule ends the process, and these words say why.
    pub fn ends(self, rule: &str, words: &[&str]) {
        let (signal, text) = self.broken(rule);
        assert_eq!(signal, Some(rustix::process::Signal::ABORT.as_raw()), "{rule}: {text}");
        assert!(text.contains("rule broken: "), "{text}");
        words.iter().for_each(|word| assert!(text.contains(word), "{rule}: {text}"));
    }

    /// The library's file.
    pub fn library(self) -> PathBuf {
        self.build().join(match self {
            Standin::Fabric => "libfabric.so.1",
            Standin::Verbs => "libibverbs.so.1",
        })
    }

    /// Runs `body` in a process of its own, over devices of its own with these settings (of the environment).
    /// `test` is the whole name of the test that calls.
    pub fn alone(self, test: &str, settings: &[(&str, &str)], body: impl FnOnce(Control)) {
        if let Some(folder) = std::env::var_os(FOLDER) {
            return body(Control::open(Path::new(&folder)));
        }
        let mut folder = Folder::start(self, settings);
        let output = again(test, &folder, settings);
        assert!(output.status.success(), "{test} in a process of its own: {}", text(&output));
        println!("{}", text(&output));
        folder.ended();
    }
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

/// A folder of devices, which goes with the value, as its daemon does.
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
        let path = std::env::temp_dir().join(format!("kvik-standin-{}-{number}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Folder { path, daemon: None }
    }

    /// With a daemon, which goes on while the value lives.
    fn start(standin: Standin, settings: &[(&str, &str)]) -> Folder {
        let mut folder = Folder::new();
        let mut command = Command::new(standin.build().join("standin-nic"));
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

/// Runs a test of this program again, in a process that has the devices of the folder.
pub fn again(test: &str, folder: &Folder, settings: &[(&str, &str)]) -> Output {
    let mut variables = vec![(FOLDER, OsString::from(&folder.path))];
    variables.extend(settings.iter().map(|(name, value)| (*name, OsString::from(value))));
    make::again(test, &variables)
}
