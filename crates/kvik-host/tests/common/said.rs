//! What the library logs in this process, which has no other logger.

use std::sync::Mutex;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Keeps;

impl log::Log for Keeps {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        LINES.lock().unwrap().push(format!("{} {}", record.level(), record.args()));
    }

    fn flush(&self) {}
}

/// The lines that are logged while `f` runs.
pub fn said_by(f: impl FnOnce()) -> Vec<String> {
    log::set_logger(&Keeps).map(|()| log::set_max_level(log::LevelFilter::Info)).unwrap();
    f();
    std::mem::take(&mut LINES.lock().unwrap())
}
