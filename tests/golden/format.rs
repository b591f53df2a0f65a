//! Golden files: what a release sent and wrote, kept so that every later release can show that it still reads it.
//!
//! A file is text. Its first line says which formats it is of. Then come entries: a line `[NAME]`, lines
//! `field = value` with everything that the bytes say, and the bytes in hexadecimal digits, 32 to an indented line.
//! The folder is the release's major and minor number.

use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Set to `write`, it makes the files of this release that are not there yet.
const VARIABLE: &str = "KVIK_TEST_GOLDEN";

/// The folder of this release.
const RELEASE: &str = concat!(env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));

/// Everything that the bytes say, by name.
pub type Fields = Vec<(&'static str, String)>;

/// One message of a golden file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    pub fields: Vec<(String, String)>,
    pub bytes: Vec<u8>,
}

impl Entry {
    pub fn new(name: &str, fields: Fields, bytes: Vec<u8>) -> Entry {
        let fields = fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Entry { name: name.to_owned(), fields, bytes }
    }
}

/// A golden file of some release.
pub struct Golden {
    /// For what a failure says.
    pub path: PathBuf,
    /// Whether the file is of the formats that this release writes, so that its bytes come out again as they are.
    pub is_written_today: bool,
    pub entries: Vec<Entry>,
}

/// The golden files of a family, of all releases. That of this release holds exactly `today`.
///
/// # Panics
/// When it does not, or is not there.
pub fn all(family: &str, formats: &str, today: &[Entry]) -> Vec<Golden> {
    let golden = grown(family, formats, today);
    let ours = golden.iter().find(|golden| golden.path.parent().unwrap().ends_with(RELEASE)).unwrap();
    assert_eq!(
        ours.entries.len(),
        today.len(),
        "{:?} has another number of entries than this release",
        ours.path
    );
    golden
}

/// The same, where what this release has beyond its file is newer than that.
pub fn grown(family: &str, formats: &str, today: &[Entry]) -> Vec<Golden> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let own = root.join(RELEASE).join(family).with_extension("txt");
    // What a release sent is written once and never again: a file that is there stays as it is.
    if std::env::var(VARIABLE).is_ok_and(|what| what == "write") && !own.exists() {
        std::fs::create_dir_all(own.parent().unwrap()).unwrap();
        std::fs::write(&own, to_text(formats, today)).unwrap();
    }
    assert!(own.exists(), "{own:?} is missing: docs/compatibility.md says how it is made");
    let releases = std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().path());
    let files =
        releases.map(|release| release.join(family).with_extension("txt")).filter(|file| file.exists());
    let golden: Vec<Golden> = files.map(|path| from_text(path, formats)).collect();
    let ours = golden.iter().find(|golden| golden.path == own).unwrap();
    for (kept, made) in ours.entries.iter().zip(today) {
        assert_eq!(kept, made, "{own:?} is not what this release sends");
    }
    golden
}

fn to_text(formats: &str, entries: &[Entry]) -> String {
    let mut text = format!("{formats}\n");
    for Entry { name, fields, bytes } in entries {
        write!(text, "\n[{name}]\n").unwrap();
        fields.iter().for_each(|(name, value)| writeln!(text, "{name} = {value}").unwrap());
        for line in bytes.chunks(32) {
            let digits: String = line.iter().map(|byte| format!("{byte:02x}")).collect();
            writeln!(text, "    {digits}").unwrap();
        }
    }
    text
}

fn from_text(path: PathBuf, formats: &str) -> Golden {
    let text = std::fs::read_to_string(&path).unwrap();
    let (first, rest) = text.split_once('\n').unwrap();
    let mut entries: Vec<Entry> = Vec::new();
    for line in rest.lines().filter(|line| !line.is_empty()) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            entries.push(Entry::new(name, Vec::new(), Vec::new()));
            continue;
        }
        let entry = entries.last_mut().unwrap();
        match (line.strip_prefix("    "), line.split_once(" = ")) {
            (Some(digits), _) => entry.bytes.extend(unhex(digits)),
            (None, Some((name, value))) => entry.fields.push((name.to_owned(), value.to_owned())),
            (None, None) => panic!("{path:?} has a line that is neither a field nor bytes: {line:?}"),
        }
    }
    Golden { is_written_today: first == formats, path, entries }
}

/// Bytes of hexadecimal digits.
pub fn unhex(digits: &str) -> Vec<u8> {
    assert!(digits.len().is_multiple_of(2), "{digits:?}");
    (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
}
