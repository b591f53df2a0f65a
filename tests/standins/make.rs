//! What tests do with every stand-in: build it once, and run a test that uses it in a process of its own, since a
//! process takes one copy of a library only and stand-ins read their environment.

use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

/// The folder with what is built of `tests/standins/NAME`, built if the sources have changed.
pub fn build(name: &str) -> PathBuf {
    let standins = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/standins");
    let mut hasher = DefaultHasher::new();
    for sources in [standins.join("common"), standins.join(name)] {
        let mut files: Vec<PathBuf> =
            fs::read_dir(sources).unwrap().map(|file| file.unwrap().path()).collect();
        files.retain(|file| file.extension().is_none_or(|kind| kind != "md" && kind != "rs"));
        files.sort();
        files.iter().for_each(|file| (file.file_name(), fs::read(file).unwrap()).hash(&mut hasher));
    }
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let folder = temporary.join(format!("standin-{name}-{:016x}", hasher.finish()));
    fs::create_dir_all(temporary).unwrap();
    let lock = File::create(temporary.join(format!("standin-{name}.lock"))).unwrap();
    lock.lock().unwrap();
    if !folder.exists() {
        let unfinished = temporary.join(format!("standin-{name}-unfinished"));
        let _ = fs::remove_dir_all(&unfinished);
        fs::create_dir(&unfinished).unwrap();
        let mut make = Command::new("make");
        make.arg("-C").arg(standins.join(name)).arg(format!("OUT={}", unfinished.display()));
        let built = make.env_remove("MAKEFLAGS").output().expect("make, to build a stand-in");
        assert!(built.status.success(), "the stand-in {name}: {}", text(&built));
        fs::rename(&unfinished, &folder).unwrap();
    }
    folder
}

/// What a process has said.
pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.as_slice(), &output.stderr].concat()).into_owned()
}

/// Runs a test of this program again, in a process with these variables. `test` is its whole name.
pub fn again(test: &str, variables: &[(&str, OsString)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--include-ignored", "--test-threads=1"]);
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    let output = within_patience(command, test);
    let words = text(&output);
    assert!(words.contains("running 1 test"), "{test} is no test of this program: {words}");
    output
}

/// Runs a program to its end; one that takes too long is killed, and the test has failed.
pub fn within_patience(mut command: Command, what: &str) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (id, (tell, told)) = (child.id(), channel());
    std::thread::spawn(move || tell.send(child.wait_with_output()));
    match told.recv_timeout(patience()) {
        Ok(output) => output.unwrap(),
        Err(_) => {
            let process = rustix::process::Pid::from_raw(id as i32).unwrap();
            let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
            panic!("{what} in a process of its own takes longer than {:?}", patience());
        }
    }
}

/// How long a test may take in its own process, in seconds, where the environment says so.
fn patience() -> Duration {
    let given = std::env::var("KVIK_STANDIN_PATIENCE").ok().map(|text| text.parse().unwrap());
    Duration::from_secs(given.unwrap_or(120))
}
