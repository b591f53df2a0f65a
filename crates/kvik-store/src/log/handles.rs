//! The segments that are open for reading: a few of many.

use super::files::{Files, LogFile};
use super::state::file_name;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// So many at most: each takes two descriptors.
const OPEN: usize = 64;

/// Files by the number of their segment; the one that was opened first is closed first.
#[derive(Default)]
pub(super) struct Handles(Mutex<Open>);

#[derive(Default)]
struct Open {
    files: HashMap<u32, Arc<dyn LogFile>>,
    order: VecDeque<u32>,
}

impl Handles {
    fn lock(&self) -> MutexGuard<'_, Open> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file of a segment, which is opened if need be.
    pub fn get(&self, files: &dyn Files, number: u32) -> io::Result<Arc<dyn LogFile>> {
        if let Some(file) = self.lock().files.get(&number) {
            return Ok(file.clone());
        }
        let file = files.open(&file_name(number))?;
        self.put(number, file.clone());
        Ok(file)
    }

    /// Takes a file that is open anyway.
    pub fn put(&self, number: u32, file: Arc<dyn LogFile>) {
        let mut open = self.lock();
        if open.files.insert(number, file).is_none() {
            open.order.push_back(number);
        }
        if open.order.len() > OPEN
            && let Some(first) = open.order.pop_front()
        {
            open.files.remove(&first);
        }
    }

    /// Closes the file of a segment.
    pub fn close(&self, number: u32) {
        let mut open = self.lock();
        if open.files.remove(&number).is_some() {
            open.order.retain(|other| *other != number);
        }
    }
}
