//! Everything that an engine counts and holds, as text.

use super::peers::GONE;
use super::table::*;
use super::tables::{BOUNDS, Metrics, Moved, Role, Row, Tables, Times, op_name};
use super::text::Text;
use crate::base::Base;
use crate::engine::Engine;
use crate::inner::Inner;
use crate::observers::Observers;
use crate::peers::{PeerState, Peers};
use crate::transports::Transports;
use kvik_core::EngineId;
use kvik_proto::{Op, Reclaim, ReclaimCounts};
use kvik_transport::TransportId;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
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
    text.family(&INFO);
    let version = env!("CARGO_PKG_VERSION");
    text.sample(&INFO, &[engine, &config.name, &version, &config.transport.name()], 1);
    text.single(&START, seconds(metrics.start));
    metrics.tables(|tables| tables.transfers_text(&mut text, engine, &config.name));
    text.single(&OPEN, inner.transfers.count());
    metrics.tables(|tables| tables.times_text(&mut text));
    metrics.tables(|tables| tables.refusals_text(&mut text));
    grants_text(observers, &mut text, &held);
    nics_text(transports, &mut text);
    sessions_text(&inner.peers, observers, &mut text, &held);
    text.single(&LATE_BEATS, held.late_beats);
    text.single(&MEMORY_HELD, budget.used());
    text.single(&MEMORY_CAP, config.memory_cap);
    text.single(&REGISTERED, registered);
    text.single(&REGIONS, regions);
    metrics.threads_text(&mut text);
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
            let (grants, quarantined) = (node.grants(), node.quarantined());
            Held { grants, quarantined, reclaims: node.reclaims(), late_beats: node.late_beats(), in_flight }
        })
    }
}

fn grants_text(observers: &Observers, text: &mut Text, held: &Held) {
    text.single(&GRANTS_GIVEN, observers.counters.grants_given.load(Ordering::Relaxed));
    text.single(&GRANTS_LIVE, held.grants);
    let ended = observers.metrics.tables(|tables| tables.grants_ended.clone());
    counts(text, &GRANTS_ENDED, ended.iter().map(|(state, count)| (state.name(), *count)));
    text.single(&QUARANTINED, held.quarantined);
    text.family(&RECLAIMS);
    for (of, counts) in [("grant", held.reclaims.grants), ("transfer", held.reclaims.transfers)] {
        for (reclaim, count) in Reclaim::ALL.iter().zip(counts) {
            text.sample(&RECLAIMS, &[&of, &reclaim.name()], count);
        }
    }
}

fn nics_text(transports: &Transports, text: &mut Text) {
    let nics: Vec<_> = transports.all().iter().flat_map(|one| one.devices()).collect();
    text.family(&NIC_BYTES);
    for nic in &nics {
        text.sample(&NIC_BYTES, &[&nic.name(), &"in"], nic.read());
        text.sample(&NIC_BYTES, &[&nic.name(), &"out"], nic.written());
    }
    text.family(&NIC_FAILED);
    nics.iter().for_each(|nic| text.sample(&NIC_FAILED, &[&nic.name()], nic.failed()));
    text.family(&NIC_CONNECTIONS);
    nics.iter().for_each(|nic| text.sample(&NIC_CONNECTIONS, &[&nic.name()], nic.connections()));
    text.family(&NIC_CONNECTIONS_OPEN);
    nics.iter().for_each(|nic| text.sample(&NIC_CONNECTIONS_OPEN, &[&nic.name()], nic.open_connections()));
    text.family(&NIC_UP);
    nics.iter().for_each(|nic| text.sample(&NIC_UP, &[&nic.name()], u8::from(nic.is_up())));
}

fn sessions_text(peers: &Peers, observers: &Observers, text: &mut Text, held: &Held) {
    text.family(&IN_FLIGHT);
    for (peer, bytes) in &held.in_flight {
        let (id, name) = observers.metrics.tables(|tables| tables.peer(peer));
        text.sample(&IN_FLIGHT, &[&id, &name], bytes);
    }
    text.single(&SESSIONS, peers.sessions());
    text.single(&SESSIONS_OPENED, observers.counters.sessions_opened.load(Ordering::Relaxed));
    let (ended, again) =
        observers.metrics.tables(|tables| (tables.sessions_ended.clone(), tables.reconnects));
    counts(text, &SESSIONS_ENDED, ended.iter().map(|(code, count)| (code.name(), *count)));
    let peers = peers.list();
    text.family(&PEERS);
    for state in PeerState::ALL {
        text.sample(&PEERS, &[&state.name()], peers.iter().filter(|peer| peer.state == state).count());
    }
    text.single(&RECONNECTS, again);
}

impl Metrics {
    fn threads_text(&self, text: &mut Text) {
        text.family(&CPU);
        for (thread, time) in self.threads.read() {
            text.sample(&CPU, &[&thread], seconds(time));
        }
    }
}

impl Tables {
    fn transfers_text(&self, text: &mut Text, own: &EngineId, own_name: &str) {
        let mut rows: Vec<(&Row, &Moved)> = self.transfers.iter().collect();
        rows.sort_by_key(|(row, _)| {
            (
                row.role,
                op_name(row.op),
                row.class,
                row.peer,
                transport(row),
                row.outcome.map(|code| code as u16),
            )
        });
        let peer = |row: &Row| match row.peer == *own {
            true => (row.peer.to_string(), own_name.to_owned()),
            false => self.peer(&row.peer),
        };
        text.family(&TRANSFERS);
        for (row, moved) in &rows {
            let (id, name) = peer(row);
            let labels: [&dyn Display; 7] =
                [&row.role(), &op_name(row.op), &row.class, &id, &name, &transport(row), &row.outcome()];
            text.sample(&TRANSFERS, &labels, moved.transfers);
        }
        text.family(&BYTES);
        for (row, moved) in rows {
            let Some(direction) = row.direction() else { continue };
            let (id, name) = peer(row);
            let labels: [&dyn Display; 7] =
                [&row.role(), &direction, &row.class, &id, &name, &transport(row), &row.outcome()];
            text.sample(&BYTES, &labels, moved.bytes);
        }
    }

    fn times_text(&self, text: &mut Text) {
        text.family(&SECONDS);
        for ((op, class, transport), times) in &self.times {
            let bounds = BOUNDS.iter().copied().chain([f64::INFINITY]);
            let counts = bounds.zip(times.buckets.iter().copied());
            text.histogram(&SECONDS, &[op, class, transport], counts, seconds(times.total));
        }
        text.family(&PHASES);
        for ((op, class, transport), times) in &self.times {
            let Times { plan, post, wire, verify, .. } = times;
            for (phase, time) in [("plan", plan), ("post", post), ("wire", wire), ("verify", verify)] {
                text.sample(&PHASES, &[op, class, transport, &phase], seconds(*time));
            }
        }
        text.family(&EXTENTS);
        for ((op, class, transport), times) in &self.times {
            text.sample(&EXTENTS, &[op, class, transport], times.extents);
        }
        text.family(&PAGES);
        for ((op, class, transport), times) in &self.times {
            text.sample(&PAGES, &[op, class, transport], times.pages);
        }
    }

    fn refusals_text(&self, text: &mut Text) {
        text.family(&REFUSALS);
        let mut refusals: Vec<_> = self.refusals.iter().collect();
        refusals.sort_by_key(|((peer, code), _)| (*peer, *code as u16));
        for ((peer, code), count) in refusals {
            let (id, name) = self.peer(peer);
            text.sample(&REFUSALS, &[&id, &name, code], count);
        }
        let handshakes: HashMap<_, _> = self.handshakes.clone();
        counts(text, &HANDSHAKES, handshakes.iter().map(|(code, count)| (code.name(), *count)));
    }

    /// The values of the labels `peer` and `peer_name`.
    fn peer(&self, peer: &EngineId) -> (String, String) {
        match *peer == GONE {
            true => ("gone".to_owned(), String::new()),
            false => (peer.to_string(), self.peers.name(peer).to_owned()),
        }
    }
}

impl Row {
    fn role(&self) -> &'static str {
        match self.role {
            Role::Initiator => "initiator",
            Role::Owner => "owner",
        }
    }

    fn outcome(&self) -> &'static str {
        self.outcome.map_or("ok", kvik_core::Code::name)
    }

    /// Where the bytes went, as seen from this engine; none for what moves nothing.
    fn direction(&self) -> Option<&'static str> {
        match (self.role, self.op) {
            (Role::Initiator, Op::Read) | (Role::Owner, Op::Write) => Some("in"),
            (Role::Initiator, Op::Write) | (Role::Owner, Op::Read) => Some("out"),
            (_, Op::Confirm | Op::Extend) => None,
        }
    }
}

/// A transfer that ended before it had one has none.
fn transport(row: &Row) -> &'static str {
    row.transport.map_or("none", TransportId::name)
}

/// A family with one label, in the order of its values.
fn counts(text: &mut Text, metric: &Metric, counts: impl Iterator<Item = (&'static str, u64)>) {
    text.family(metric);
    let mut counts: Vec<_> = counts.collect();
    counts.sort_unstable();
    for (value, count) in counts {
        text.sample(metric, &[&value], count);
    }
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}
