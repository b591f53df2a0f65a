//! The tables: rows of counts, under one lock that is held for as long as a row takes.

use super::peers::{GONE, Peers};
use crate::report::Report;
use crate::sync::lock;
use crate::transfers::request::TransferEntry;
use kvik_core::{Class, Code, EngineId, GrantState, Result};
use kvik_host::cpu::ThreadTimes;
use kvik_proto::{Op, Served};
use kvik_transport::TransportId;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bounds of the histogram, in seconds: from less than the smallest handover within a host takes to the default
/// deadline of a transfer, three a decade, so that a quantile that is read from it is wrong by a factor of 2.5 at
/// most.
pub(super) const BOUNDS: [f64; 18] = [
    0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0, 30.0,
];

/// A row of transfers, by the values of its labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Row {
    /// Which side of the transfer this engine was.
    pub role: &'static str,
    pub op: &'static str,
    pub class: Class,
    pub peer: EngineId,
    /// `none` for one that ended before it was known.
    pub transport: &'static str,
    pub outcome: &'static str,
    /// Where the bytes went, as seen from this engine; none for what moves nothing.
    pub direction: Option<&'static str>,
}

impl Row {
    /// Of a transfer that this engine began, or else served.
    fn of(
        began: bool,
        op: Op,
        class: Class,
        peer: EngineId,
        transport: Option<TransportId>,
        error: Option<Code>,
    ) -> Row {
        let (transport, outcome) =
            (transport.map_or("none", TransportId::name), error.map_or("ok", Code::name));
        let direction = match op {
            Op::Read | Op::Write => Some(if (op == Op::Read) == began { "in" } else { "out" }),
            Op::Confirm | Op::Extend => None,
        };
        let role = if began { "initiator" } else { "owner" };
        Row { role, op: op_name(op), class, peer, transport, outcome, direction }
    }
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

/// Counts by the value of one label.
pub(super) type Counts = BTreeMap<&'static str, u64>;

#[derive(Default)]
pub(super) struct Tables {
    pub peers: Peers,
    pub transfers: BTreeMap<Row, Moved>,
    pub times: BTreeMap<(&'static str, Class, TransportId), Times>,
    pub refusals: BTreeMap<(EngineId, &'static str), u64>,
    pub handshakes: Counts,
    pub sessions_ended: Counts,
    pub grants_ended: Counts,
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
        let (class, owner) = (entry.request.class, entry.request.ticket.engine);
        let (transport, error) =
            (entry.taken.as_ref().map(|taken| taken.id), outcome.as_ref().err().map(|error| error.code));
        let row = Row::of(true, op, class, owner, transport, error);
        self.tables(|tables| {
            tables.add(row, bytes);
            if let Ok(report) = outcome {
                tables.times.entry((row.op, class, report.transport)).or_default().add(report);
            }
        });
    }

    /// A peer's request has ended, which this transport has moved.
    pub fn served(&self, served: &Served, transport: Option<TransportId>) {
        let Served { op, class, peer, outcome, .. } = *served;
        let row = Row::of(false, op, class, peer, transport, outcome.err());
        self.tables(|tables| {
            tables.add(row, served.bytes);
            if served.refused && outcome.is_err() {
                *tables.refusals.entry((peer, row.outcome)).or_default() += 1;
            }
        });
    }

    pub fn session_begun(&self, peer: EngineId, name: &str) {
        self.tables(|tables| tables.reconnects += u64::from(tables.peers.begun(peer, name)));
    }

    pub fn session_ended(&self, peer: EngineId, code: Code) {
        self.tables(|tables| {
            *tables.sessions_ended.entry(code.name()).or_default() += 1;
            let gone = tables.peers.ended(peer);
            tables.forget(gone);
        });
    }

    pub fn handshake_refused(&self, code: Code) {
        self.tables(|tables| *tables.handshakes.entry(code.name()).or_default() += 1);
    }

    pub fn grant_ended(&self, state: GrantState) {
        self.tables(|tables| *tables.grants_ended.entry(state.name()).or_default() += 1);
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

fn take<K: Copy + Ord, V>(map: &mut BTreeMap<K, V>, which: impl Fn(&K) -> bool) -> Vec<(K, V)> {
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
            assert_eq!(tables.refusals.get(&(GONE, Code::GrantExpired.name())), Some(&40));
        });
    }
}
