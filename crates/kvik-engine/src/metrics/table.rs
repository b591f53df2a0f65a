//! Every metric of an engine: its name, kind, labels and meaning. The documentation's table is made from this one.

/// How a metric behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It only rises, from 0 at the engine's start.
    Counter,
    /// It is what it is now.
    Gauge,
    /// Counts of observations below bounds, with their sum.
    Histogram,
}

impl Kind {
    /// The word of the exposition format.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        }
    }
}

/// One metric.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Its name, with the unit.
    pub name: &'static str,
    /// How it behaves.
    pub kind: Kind,
    /// The labels of its series.
    pub labels: &'static [&'static str],
    /// What it counts, in one or two sentences.
    pub help: &'static str,
}

/// A table of metrics: a constant for each, and the list of all of them in the order of the exposition.
#[macro_export]
macro_rules! metrics_table {
    (
        $vis:vis consts;
        $(#[$meta:meta])* $all:ident;
        $($constant:ident $kind:ident $name:literal [$($label:literal),*] $help:literal;)*
    ) => {
        $(
            $vis const $constant: $crate::Metric = $crate::Metric {
                name: $name, kind: $crate::Kind::$kind, labels: &[$($label),*], help: $help,
            };
        )*
        $(#[$meta])*
        pub const $all: &[$crate::Metric] = &[$($constant),*];
    };
}

metrics_table! {
    pub(super) consts;
    /// Every metric of an engine, in the order of the exposition.
    METRICS;
    INFO Gauge "kvik_engine_info" ["engine", "engine_name", "version", "transport"]
        "1; its labels say which engine this is and which transport it was told to use.";
    START Gauge "kvik_engine_start_time_seconds" []
        "When the engine started, in seconds since 1970.";
    TRANSFERS Counter "kvik_transfers_total" ["role", "op", "class", "peer", "peer_name", "transport", "outcome"]
        "Transfers that have ended: those that this engine began (role initiator) and those that peers asked it for (role owner). Class is handover or bulk. Outcome is ok or the code of the error.";
    BYTES Counter "kvik_transfer_bytes_total"
        ["role", "direction", "class", "peer", "peer_name", "transport", "outcome"]
        "Bytes that ended transfers moved: in to this engine's memory, or out of it. A transfer that failed counts what this side knows to have moved until then.";
    OPEN Gauge "kvik_transfers_open" []
        "Transfers that this engine has begun and that have not ended.";
    SECONDS Histogram "kvik_transfer_seconds" ["op", "class", "transport"]
        "Seconds from the call to the end, of transfers that this engine began and that succeeded.";
    PHASES Counter "kvik_transfer_phase_seconds_total" ["op", "class", "transport", "phase"]
        "The same transfers' seconds by phase: plan (in what order), post (until the first byte could move: connecting, asking the owner), wire (from there to the end), verify (checksums on this side, summed over threads; part of wire).";
    EXTENTS Counter "kvik_transfer_extents_total" ["op", "class", "transport"]
        "Contiguous runs of this side's memory that the same transfers took.";
    PAGES Counter "kvik_transfer_pages_total" ["op", "class", "transport"]
        "Pages of this side that the same transfers moved.";
    REFUSALS Counter "kvik_refusals_total" ["peer", "peer_name", "code"]
        "Requests of peers that this engine, as the owner, answered with an error, before or while it served them.";
    HANDSHAKES Counter "kvik_handshakes_refused_total" ["code"]
        "Connections that came to this engine and did not become a session or part of one.";
    GRANTS_GIVEN Counter "kvik_grants_given_total" []
        "Grants that this engine gave.";
    GRANTS_LIVE Gauge "kvik_grants_live" []
        "Grants whose pages are not the owner's again yet.";
    GRANTS_ENDED Counter "kvik_grants_ended_total" ["state"]
        "Grants whose pages are the owner's again, by how they ended.";
    QUARANTINED Gauge "kvik_quarantined_pages" []
        "Pages of grants that are over while a transfer may still touch them.";
    RECLAIMS Counter "kvik_reclaims_total" ["of", "method"]
        "Ends under which something still used the memory, by the method that gave it back: released (threads and NICs of this side let go), acknowledged (the peer, whose NIC may have used it, said that it has stopped), disconnected (the path to the peer was cut). Of is grant, for grants that ended while a transfer used their pages, or transfer, for transfers that this engine began and that failed.";
    NIC_BYTES Counter "kvik_nic_bytes_total" ["nic", "direction"]
        "Bytes that each NIC of this engine moved for transfers that this engine began: in to its memory, or out of it. What peers' NICs move here is counted there.";
    NIC_FAILED Counter "kvik_nic_failed_operations_total" ["nic"]
        "Operations of a NIC that failed. What they were to move is posted again, by this NIC or another one.";
    NIC_CONNECTIONS Counter "kvik_nic_connections_opened_total" ["nic"]
        "Connections to peers' NICs that each NIC has opened: by warm_up, or by the first transfer, and again where one was mended.";
    NIC_CONNECTIONS_OPEN Gauge "kvik_nic_connections_open" ["nic"]
        "Connections to peers' NICs that are open: one for each peer that the NIC has moved something for, or was warmed up for.";
    NIC_UP Gauge "kvik_nic_up" ["nic"]
        "1 while the NIC can be used, 0 while its port is down.";
    IN_FLIGHT Gauge "kvik_in_flight_bytes" ["peer", "peer_name"]
        "Bytes that the data channels of a peer that has a session have in flight to send: at most the engine's window.";
    SESSIONS Gauge "kvik_sessions_open" []
        "Sessions with peers that are up.";
    SESSIONS_OPENED Counter "kvik_sessions_opened_total" []
        "Sessions that began.";
    SESSIONS_ENDED Counter "kvik_sessions_ended_total" ["code"]
        "Sessions that ended, by the code of the reason. A peer that closes in order is peer_lost too; the log has the words.";
    PEERS Gauge "kvik_peers" ["state"]
        "Peers by state: connecting (being reached for the first time), up, suspect (silent for more than half of the time until it is taken for dead), draining (closing in order), dead (the last 256 that were lost).";
    RECONNECTS Counter "kvik_reconnects_total" []
        "Sessions that began with a peer that had one before.";
    NOTES_DROPPED Counter "kvik_notifications_dropped_total" []
        "Notifications of a topic that nobody in this process consumes: acknowledged to their senders, and dropped. Topics are for libraries on top of the engine; those that a program sends and hears with its events are never dropped for that.";
    LATE_BEATS Counter "kvik_heartbeats_late_total" []
        "Heartbeats that this engine sent more than half an interval after they were due: its machine was too busy.";
    MEMORY_HELD Gauge "kvik_memory_held_bytes" []
        "What kvik itself holds and counts against memory_cap.";
    MEMORY_CAP Gauge "kvik_memory_cap_bytes" []
        "The engine's memory_cap.";
    REGISTERED Gauge "kvik_registered_bytes" []
        "Bytes of the regions that are registered.";
    REGIONS Gauge "kvik_regions" []
        "Regions that are registered.";
    CPU Counter "kvik_thread_cpu_seconds_total" ["thread"]
        "CPU seconds of this engine's own threads: kvik-ctl (connections, heartbeats, deadlines), kvik-tls (TLS handshakes), kvik-io (tcp), kvik-copy (local), kvik-map (page tables for local), kvik-nic (nics), kvik-order (marks in streams of GPUs), kvik-stat (this).";
    TRACE_DROPPED Counter "kvik_trace_dropped_total" []
        "Transfers that a recording (kvik trace record) lost because they came faster than it was read.";
}
