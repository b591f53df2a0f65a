//! The tables: rows of counts, under one lock that is held for as long as a row takes.

use super::peers::{GONE, Peers};
use crate::report::Report;
use crate::sync::lock;
use crate::transfers::request::TransferEntry;
use kvik_core::{Class, Code, EngineId, GrantState, Result};
use kvik_host::cpu::ThreadTimes;
use kvik_proto::{Op, Served};
use kvik_transport::TransportId;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bounds of the histogram, in seconds: from less than the smallest handover within a host takes to the default
/// deadline of a transfer, three a decade, so that a quantile that is read from it is wrong by a factor of 2.5 at
/// most.
pub(super) const BOUNDS: [f64; 18] = [
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0, 30.0,
];

/// Which side of a transfer this engine was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Role {
    Initiator,
    Owner,
}

/// A row of transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Row {
    pub role: Role,
    pub op: Op,
    pub class: Class,
    pub peer: EngineId,
    /// None: it ended before it was known.
    pub transport: Option<TransportId>,
    pub outcome: Option<Code>,
}

/// What is in a row of transfers.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Moved {
    pub transfers: u64,
    pub bytes: u64,
}

/// The times and sizes of the transfers of one kind that succeeded.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Times {
    /// One more than there are bounds: the last is for all above.
    pub buckets: [u64; BOUNDS.len() + 1],
    pub total: Duration,
    pub plan: Duration,
    pub post: Duration,
    pub wire: Duration,
    pub verify: Duration,
    pub extents: u64,
    pub pages: u64,
}

#[derive(Default)]
pub(super) struct Tables {
    pub peers: Peers,
    pub transfers: HashMap<Row, Moved>,
    pub times: BTreeMap<(&'static str, Class, TransportId), Times>,
    pub refusals: HashMap<(EngineId, Code), u64>,
    pub handshakes: HashMap<Code, u64>,
    pub sessions_ended: HashMap<Code, u64>,
    pub grants_ended: HashMap<GrantState, u64>,
    pub reconnects: u64,
}

/// What an engine has counted since its start.
pub(crate) struct Metrics {
    /// When it started, since 1970.
    pub(super) start: Duration,
    /// The clocks of its threads.
    pub threads: ThreadTimes,
    tables: Mutex<Tables>,
}

impl Metrics {
    pub fn new() -> Metrics {
        let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Metrics { start, threads: ThreadTimes::default(), tables: Mutex::default() }
    }

    pub(super) fn tables<T>(&self, f: impl FnOnce(&mut Tables) -> T) -> T {
        f(&mut lock(&self.tables))
    }

    /// A transfer that this engine began has ended.
    pub fn transfer_ended(&self, entry: &TransferEntry, bytes: u64, outcome: &Result<Report>) {
        // Without an operation, only the route was asked for.
        let Some(op) = entry.request.op else { return };
        let row = Row {
            role: Role::Initiator,
            op,
            class: entry.request.class,
            peer: entry.request.ticket.engine,
            transport: entry.taken.as_ref().map(|taken| taken.id),
            outcome: outcome.as_ref().err().map(|error| error.code),
        };
        self.tables(|tables| {
            tables.add(row, bytes);
            if let Ok(report) = outcome {
                tables
                    .times
                    .entry((op_name(op), entry.request.class, report.transport))
                    .or_default()
                    .add(report);
            }
        });
    }

    /// A peer's request has ended, which this transport has moved.
    pub fn served(&self, served: &Served, transport: Option<TransportId>) {
        let outcome = served.outcome.err();
        let Served { op, class, peer, .. } = *served;
        let row = Row { role: Role::Owner, op, class, peer, transport, outcome };
        self.tables(|tables| {
            tables.add(row, served.bytes);
            if let Some(code) = outcome.filter(|_| served.refused) {
                *tables.refusals.entry((served.peer, code)).or_default() += 1;
            }
        });
    }

    pub fn session_begun(&self, peer: EngineId, name: &str) {
        self.tables(|tables| tables.reconnects += u64::from(tables.peers.begun(peer, name)));
    }

    pub fn session_ended(&self, peer: EngineId, code: Code) {
        self.tables(|tables| {
            *tables.sessions_ended.entry(code).or_default() += 1;
            let gone = tables.peers.ended(peer);
            tables.forget(gone);
        });
    }

    pub fn handshake_refused(&self, code: Code) {
        self.tables(|tables| *tables.handshakes.entry(code).or_default() += 1);
    }

    pub fn grant_ended(&self, state: GrantState) {
        self.tables(|tables| *tables.grants_ended.entry(state).or_default() += 1);
    }
}

impl Tables {
    fn add(&mut self, row: Row, bytes: u64) {
        let gone = self.peers.hear(row.peer);
        self.forget(gone);
        let moved = self.transfers.entry(row).or_default();
        moved.transfers += 1;
        moved.bytes += bytes;
    }

    /// What was counted for a peer goes on without its name.
    fn forget(&mut self, peer: Option<EngineId>) {
        let Some(peer) = peer else { return };
        let rows = take(&mut self.transfers, |row| row.peer == peer);
        for (row, moved) in rows {
            let all = self.transfers.entry(Row { peer: GONE, ..row }).or_default();
            all.transfers += moved.transfers;
            all.bytes += moved.bytes;
        }
        for ((_, code), count) in take(&mut self.refusals, |(of, _)| *of == peer) {
            *self.refusals.entry((GONE, code)).or_default() += count;
        }
    }
}

fn take<K: Copy + Eq + Hash, V>(map: &mut HashMap<K, V>, which: impl Fn(&K) -> bool) -> Vec<(K, V)> {
    let keys: Vec<K> = map.keys().copied().filter(which).collect();
    keys.into_iter().filter_map(|key| Some((key, map.remove(&key)?))).collect()
}

impl Times {
    fn add(&mut self, report: &Report) {
        let seconds = report.total.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        if let Some(count) = self.buckets.get_mut(bucket) {
            *count += 1;
        }
        self.total += report.total;
        self.plan += report.plan;
        self.post += report.post;
        self.wire += report.wire;
        self.verify += report.verify;
        self.extents += report.extents;
        self.pages += report.pages;
    }
}

/// The word for an operation: what the caller called.
pub(crate) fn op_name(op: Op) -> &'static str {
    match op {
        Op::Read => "read",
        Op::Write => "write",
        Op::Confirm => "release",
        Op::Extend => "extend",
    }
}

#[cfg(test)]
mod tests {
    use super::super::peers::MOST_IDLE;
    use super::*;
    use kvik_proto::Path;

    fn served(peer: usize, outcome: Result<(), Code>) -> Served {
        let peer = EngineId((peer as u128 + 1).to_le_bytes());
        let (op, class, path) = (Op::Read, Class::Handover, Path::Channels);
        Served { peer, op, class, path, outcome, refused: outcome.is_err(), bytes: 10 }
    }

    #[test]
    fn what_was_counted_for_forgotten_peers_is_kept_in_one_row() {
        let metrics = Metrics::new();
        let peers = MOST_IDLE + 40;
        for peer in 0..peers {
            metrics.served(&served(peer, Ok(())), Some(TransportId::Tcp));
            metrics.served(&served(peer, Err(Code::GrantExpired)), Some(TransportId::Tcp));
        }
        metrics.tables(|tables| {
            assert_eq!(tables.transfers.len(), 2 * (MOST_IDLE + 1));
            assert_eq!(tables.refusals.len(), MOST_IDLE + 1);
            let all: u64 = tables.transfers.values().map(|moved| moved.transfers).sum();
            assert_eq!(all, 2 * peers as u64);
            assert_eq!(tables.refusals.get(&(GONE, Code::GrantExpired)), Some(&40));
        });
    }
}
