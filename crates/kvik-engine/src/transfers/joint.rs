//! Several transfers that end as one: the first that fails ends the others.
//!
//! All of them are in the table before the first one sets out, under numbers that follow each other. The end of the
//! whole comes with that of the last one, whatever the first failure was: so nothing touches memory afterwards.

use crate::end::End;
use crate::report::{JointReport, Report};
use crate::sync::lock;
use kvik_core::{Code, EngineId, Error, Result};
use kvik_host::clock::boottime;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

/// What such transfers have in common.
pub(crate) struct Joint {
    /// Their numbers in the table.
    ids: OnceLock<Range<u64>>,
    began: Duration,
    state: Mutex<State>,
    pub end: Arc<End<JointReport>>,
}

struct State {
    outcomes: Vec<Option<Result<Report>>>,
    open: usize,
    /// Why it ends: the first failure, or that it was cancelled.
    cause: Option<Error>,
}

impl Joint {
    pub fn new(count: usize, began: Duration) -> Arc<Joint> {
        let state = State { outcomes: vec![None; count], open: count, cause: None };
        let joint = Joint { ids: OnceLock::new(), began, state: Mutex::new(state), end: Arc::default() };
        if count == 0 {
            joint.end.set(Ok(joint.report(Vec::new())));
        }
        Arc::new(joint)
    }

    /// Their numbers, which are known before the first of them can end.
    pub fn set_ids(&self, ids: Range<u64>) {
        drop(self.ids.set(ids));
    }

    pub fn ids(&self) -> Range<u64> {
        self.ids.get().cloned().unwrap_or_default()
    }

    /// It is to end because of this, unless it ends already. The transfers are the caller's to cancel.
    pub fn stop(&self, cause: &Error) {
        lock(&self.state).cause.get_or_insert_with(|| cause.clone());
    }

    /// One of them has ended. What the others are to be cancelled with, where it is the first failure.
    pub fn ended(&self, id: u64, owner: EngineId, outcome: Result<Report>) -> Option<Error> {
        let place = (id - self.ids().start) as usize;
        let mut state = lock(&self.state);
        let count = state.outcomes.len();
        let mut first = None;
        if let (Err(error), None) = (&outcome, &state.cause) {
            state.cause = Some(of_read(error.clone(), place, count, Some(owner)));
            let why = format!("another read of the same call failed ({}, reads[{place}])", error.code);
            first = Some(Error::new(Code::Cancelled, why));
        }
        state.outcomes[place] = Some(outcome);
        state.open -= 1;
        if state.open == 0 {
            let reports = state.outcomes.iter().flatten().cloned().collect::<Result<Vec<Report>>>();
            let all = reports.map_err(|error| state.cause.clone().unwrap_or(error));
            drop(state);
            self.end.set(all.map(|reports| self.report(reports)));
        }
        first
    }

    /// What became of each, in the order of the call; none before all have ended.
    pub fn outcomes(&self) -> Option<Vec<Result<Report>>> {
        lock(&self.state).outcomes.iter().cloned().collect()
    }

    fn report(&self, reads: Vec<Report>) -> JointReport {
        let bytes = reads.iter().map(|report| report.bytes).sum();
        JointReport { bytes, total: boottime().saturating_sub(self.began), reads: reads.into() }
    }
}

/// The error, said to be of one of so many reads.
pub(crate) fn of_read(mut error: Error, place: usize, count: usize, owner: Option<EngineId>) -> Error {
    let from = owner.map_or_else(String::new, |owner| format!(" (from engine {owner})"));
    error.text = format!("reads[{place}] of {count}{from}: {}", error.text);
    error.about_read(place as u32)
}
