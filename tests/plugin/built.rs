//! Plug-ins as tests use them, built once: the sample (`examples/plugin`), and those that break a rule
//! (`broken.c`).

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The file of this name, made by the Makefile of `sources` if anything there or the header has changed.
fn build(sources: &str, file: &str) -> PathBuf {
    let folder = root().join(sources);
    let mut files: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.retain(|file| file.extension().is_none_or(|kind| kind == "c" || kind == "h") && file.is_file());
    files.push(root().join("include/kvik/nic.h"));
    files.sort();
    let mut hasher = DefaultHasher::new();
    files.iter().for_each(|file| (file.file_name(), fs::read(file).unwrap()).hash(&mut hasher));
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("plugins-{:016x}", hasher.finish()));
    fs::create_dir_all(&out).unwrap();
    // Tests are processes and threads: one builds, and others wait.
    let lock = File::create(out.join("lock")).unwrap();
    lock.lock().unwrap();
    let built = out.join(file);
    if !built.exists() {
        let unfinished = out.join("unfinished");
        fs::create_dir_all(&unfinished).unwrap();
        let target = unfinished.join(file);
        let mut make = Command::new("make");
        make.arg("-C").arg(&folder).arg(format!("OUT={}", unfinished.display())).arg(&target);
        let output = make.env_remove("MAKEFLAGS").output().expect("make, to build a plug-in");
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{file}: {}", String::from_utf8_lossy(&said));
        fs::rename(target, &built).unwrap();
    }
    built
}

/// The sample.
pub fn sample() -> PathBuf {
    build("examples/plugin", "kvik-sample.so")
}

/// The plug-in that breaks this rule of `broken.c`.
pub fn broken(rule: &str) -> PathBuf {
    build("tests/plugin", &format!("broken-{rule}.so"))
}

/// A library that is no plug-in.
pub fn other() -> PathBuf {
    build("tests/plugin", "other.so")
}
