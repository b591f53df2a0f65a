//! Every policy on one trace, at several capacities.

use super::{Outcome, Trace, optimum, replay};
use crate::policy::PolicyKind;
use kvik_core::{Code, Error, Result};

/// What the policies did on a trace with room for `capacity` blocks.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Blocks of room.
    pub capacity: usize,
    /// What came of each policy, in the order of [`PolicyKind::ALL`].
    pub outcomes: Vec<(PolicyKind, Outcome)>,
    /// Hits of the offline [`optimum()`].
    pub optimum: u64,
}

impl Comparison {
    /// What came of a policy.
    pub fn outcome(&self, kind: PolicyKind) -> Outcome {
        let found = self.outcomes.iter().find(|(of, _)| *of == kind);
        found.map(|(_, outcome)| *outcome).unwrap_or_default()
    }

    /// The fixed policy with the most hits, the first of several.
    pub fn best_fixed(&self) -> PolicyKind {
        let hits = |kind: &PolicyKind| self.outcome(*kind).hits;
        PolicyKind::FIXED.into_iter().rev().max_by_key(hits).unwrap_or_default()
    }

    /// How many hits the selector has more than the best fixed policy, relative to it; below 0 where it has less.
    pub fn gap(&self) -> f64 {
        let best = self.outcome(self.best_fixed()).hits.max(1);
        self.outcome(PolicyKind::Selector).hits as f64 / best as f64 - 1.0
    }

    /// Hits a reference of the optimum, 0 to 1.
    pub fn optimal_rate(&self) -> f64 {
        let references = self.outcome(PolicyKind::Selector).references;
        self.optimum as f64 / references.max(1) as f64
    }
}

/// Replays a trace against every policy at each capacity, in blocks.
///
/// # Errors
/// As for [`replay`].
pub fn compare(trace: &Trace, capacities: &[usize]) -> Result<Vec<Comparison>> {
    let one = |capacity: &usize| {
        let outcome = |kind: PolicyKind| Ok((kind, replay(trace, kind, *capacity)?));
        let outcomes = PolicyKind::ALL.into_iter().map(outcome).collect::<Result<Vec<_>>>()?;
        Ok(Comparison { capacity: *capacity, outcomes, optimum: optimum(trace, *capacity) })
    };
    capacities.iter().map(one).collect()
}

/// Reads capacities in blocks such as `1k,3k,500`.
///
/// # Errors
/// `InvalidArgument` for what is no list of whole numbers, each with `k` or `m` or nothing behind it.
pub fn parse_capacities(text: &str) -> Result<Vec<usize>> {
    let one = |part: &str| {
        let part = part.trim();
        let (digits, factor) = match part.strip_suffix(['k', 'm']) {
            Some(digits) if part.ends_with('k') => (digits, 1_000),
            Some(digits) => (digits, 1_000_000),
            None => (part, 1),
        };
        digits
            .parse::<usize>()
            .ok()
            .and_then(|number| number.checked_mul(factor))
            .filter(|blocks| *blocks > 0)
    };
    text.split(',').map(one).collect::<Option<Vec<_>>>().ok_or_else(|| {
        let text = format!("{text:?} is no list of capacities in blocks: write it like 1k,3k,500");
        Error::new(Code::InvalidArgument, text)
    })
}
