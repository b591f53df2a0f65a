//! Everything that an engine counts and holds, as text.

use super::peers::GONE;
use super::table::*;
use super::tables::{BOUNDS, Counts, Row, Tables, Times};
use super::text::{Text, labels};
use crate::base::Base;
use crate::engine::Engine;
use crate::inner::Inner;
use crate::observers::Observers;
use crate::peers::{PeerState, Peers};
use crate::transports::Transports;
use kvik_core::EngineId;
use kvik_proto::{Reclaim, ReclaimCounts};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Engine {
    /// What the engine has counted and what it holds, in the Prometheus text format (0.0.4). In a forked child there
    /// is nothing.
    pub fn metrics(&self) -> String {
        match self.inner().base.setup.check_fork() {
            Ok(()) => metrics_text(self.inner()),
            Err(_) => String::new(),
        }
    }
}

/// See [`Engine::metrics`].
pub(crate) fn metrics_text(inner: &Inner) -> String {
    let mut text = Text::default();
    let Base { setup, budget, observers, transports, .. } = &*inner.base;
    let (engine, metrics, config) = (&setup.id(), &observers.metrics, &setup.config);
    let ((regions, registered), held) = (inner.regions.held(), Held::of(&inner.base));
    let version = env!("CARGO_PKG_VERSION");
    text.rows(&INFO, [(labels([engine, &config.name, &version, &config.transport.name()]), 1)]);
    text.single(&START, seconds(metrics.start));
    metrics.tables(|tables| tables.transfers_text(&mut text, engine, &config.name));
    text.single(&OPEN, inner.transfers.count());
    metrics.tables(|tables| tables.times_text(&mut text));
    metrics.tables(|tables| tables.refusals_text(&mut text));
    grants_text(observers, &mut text, &held);
    nics_text(transports, &mut text);
    sessions_text(&inner.peers, observers, &mut text, &held);
    text.single(&NOTES_DROPPED, observers.inboxes.dropped());
    text.single(&LATE_BEATS, held.late_beats);
    text.single(&MEMORY_HELD, budget.used());
    text.single(&MEMORY_CAP, config.memory_cap);
    text.single(&REGISTERED, registered);
    text.single(&REGIONS, regions);
    text.rows(
        &CPU,
        metrics.threads.read().into_iter().map(|(thread, time)| (labels([&thread]), seconds(time))),
    );
    text.single(&TRACE_DROPPED, observers.program().map_or(0, |program| program.transfers_dropped()));
    text.into_string()
}

/// What the protocol holds, which is looked at only when somebody asks.
struct Held {
    grants: usize,
    quarantined: u64,
    reclaims: ReclaimCounts,
    late_beats: u64,
    in_flight: BTreeMap<EngineId, u64>,
}

impl Held {
    fn of(base: &Base) -> Held {
        base.node(|node, _| {
            let mut in_flight = BTreeMap::new();
            for session in node.sessions() {
                if let Some(peer) = node.established(session).map(|session| session.peer.engine) {
                    *in_flight.entry(peer).or_default() += node.in_flight(session);
                }
            }
            let (grants, quarantined) = (node.open_grants(), node.quarantined());
            Held { grants, quarantined, reclaims: node.reclaims(), late_beats: node.late_beats(), in_flight }
        })
    }
}

fn grants_text(observers: &Observers, text: &mut Text, held: &Held) {
    text.single(&GRANTS_GIVEN, observers.counters.grants_given.load(Ordering::Relaxed));
    text.single(&GRANTS_LIVE, held.grants);
    observers.metrics.tables(|tables| counts(text, &GRANTS_ENDED, &tables.grants_ended));
    text.single(&QUARANTINED, held.quarantined);
    let reclaims = [("grant", held.reclaims.grants), ("transfer", held.reclaims.transfers)];
    let reclaims = reclaims.into_iter().flat_map(|(of, counts)| {
        let methods = Reclaim::ALL.iter().zip(counts);
        methods.map(move |(reclaim, count)| (labels([&of, &reclaim.name()]), count))
    });
    text.rows(&RECLAIMS, reclaims);
}

fn nics_text(transports: &Transports, text: &mut Text) {
    let nics: Vec<_> = transports.all().iter().flat_map(|one| one.devices()).collect();
    let moved = nics.iter().flat_map(|nic| {
        [(labels([&nic.name(), &"in"]), nic.read()), (labels([&nic.name(), &"out"]), nic.written())]
    });
    text.rows(&NIC_BYTES, moved);
    text.rows(&NIC_FAILED, nics.iter().map(|nic| (labels([&nic.name()]), nic.failed())));
    text.rows(&NIC_CONNECTIONS, nics.iter().map(|nic| (labels([&nic.name()]), nic.connections())));
    text.rows(&NIC_CONNECTIONS_OPEN, nics.iter().map(|nic| (labels([&nic.name()]), nic.open_connections())));
    text.rows(&NIC_UP, nics.iter().map(|nic| (labels([&nic.name()]), u8::from(nic.is_up()))));
}

fn sessions_text(peers: &Peers, observers: &Observers, text: &mut Text, held: &Held) {
    let metrics = &observers.metrics;
    let in_flight = held.in_flight.iter().map(|(peer, bytes)| (metrics.tables(|all| all.peer(peer)), bytes));
    text.rows(&IN_FLIGHT, in_flight);
    text.single(&SESSIONS, peers.sessions());
    text.single(&SESSIONS_OPENED, observers.counters.sessions_opened.load(Ordering::Relaxed));
    metrics.tables(|tables| counts(text, &SESSIONS_ENDED, &tables.sessions_ended));
    let peers = peers.list();
    let how_many = |state| peers.iter().filter(|peer| peer.state == state).count();
    text.rows(&PEERS, PeerState::ALL.map(|state| (labels([&state.name()]), how_many(state))));
    text.single(&RECONNECTS, metrics.tables(|tables| tables.reconnects));
}

impl Tables {
    fn transfers_text(&self, text: &mut Text, own: &EngineId, own_name: &str) {
        let all = |row: &Row, what: &'static str| {
            let [id, name] = match row.peer == *own {
                true => labels([own, &own_name]),
                false => self.peer(&row.peer),
            };
            labels([&row.role, &what, &row.class, &id, &name, &row.transport, &row.outcome])
        };
        let ended = self.transfers.iter().map(|(row, moved)| (all(row, row.op), moved.transfers));
        text.rows(&TRANSFERS, ended);
        let moved = self.transfers.iter();
        text.rows(&BYTES, moved.filter_map(|(row, moved)| Some((all(row, row.direction?), moved.bytes))));
    }

    fn times_text(&self, text: &mut Text) {
        let kinds = || {
            let all = self.times.iter();
            all.map(|((op, class, transport), times)| (labels([op, class, transport]), times))
        };
        text.family(&SECONDS);
        for (kind, times) in kinds() {
            let bounds = BOUNDS.iter().copied().chain([f64::INFINITY]);
            let counts = bounds.zip(times.buckets.iter().copied());
            text.histogram(&SECONDS, &kind, counts, seconds(times.total));
        }
        let phases = kinds().flat_map(|([op, class, transport], times)| {
            let Times { plan, post, wire, verify, .. } = *times;
            let phases = [("plan", plan), ("post", post), ("wire", wire), ("verify", verify)];
            phases.map(|(phase, time)| (labels([&op, &class, &transport, &phase]), seconds(time)))
        });
        text.rows(&PHASES, phases);
        text.rows(&EXTENTS, kinds().map(|(kind, times)| (kind, times.extents)));
        text.rows(&PAGES, kinds().map(|(kind, times)| (kind, times.pages)));
    }

    fn refusals_text(&self, text: &mut Text) {
        let refusals = self.refusals.iter().map(|((peer, code), count)| {
            let [id, name] = self.peer(peer);
            (labels([&id, &name, code]), count)
        });
        text.rows(&REFUSALS, refusals);
        counts(text, &HANDSHAKES, &self.handshakes);
    }

    /// The values of the labels `peer` and `peer_name`.
    fn peer(&self, peer: &EngineId) -> [String; 2] {
        match *peer == GONE {
            true => labels([&"gone", &""]),
            false => labels([peer, &self.peers.name(peer)]),
        }
    }
}

/// A family with one label.
fn counts(text: &mut Text, metric: &Metric, counts: &Counts) {
    text.rows(metric, counts.iter().map(|(value, count)| (labels([value]), count)));
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}
