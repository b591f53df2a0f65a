//! The figures of a store as text: every metric, and where its values come from.

use crate::figures::{Cause, OfTenant, Where};
use crate::histogram::Histogram;
use crate::object::Traffic;
use crate::share::Share;
use crate::state::State;
use crate::store::Store;
use crate::tier::{Tier, Usage};
use kvik_engine::{Metric, MetricsText, metrics_table};

metrics_table! {
    consts;
    /// Every metric of a store, in the order of the exposition.
    METRICS;
    LOOKUPS Counter "kvik_store_lookups_total" ["tenant", "tier"]
        "Blocks that gets asked a tier for: memory for all of a request, the log (tier log) for those that memory did not have, the object store (tier object) for those that neither had.";
    HITS Counter "kvik_store_hits_total" ["tenant", "tier"]
        "Blocks that gets found, by the tier that had them when they were asked for.";
    MISSES Counter "kvik_store_misses_total" ["tenant", "tier"]
        "Blocks that gets did not find in a tier, or found behind one that was missing. What the last tier misses is a miss of the store.";
    BYTES_IN Counter "kvik_store_in_bytes_total" ["tenant", "tier"]
        "Bytes that came into a tier: into memory from puts and from the tiers below, into those from memory (or from the log, into the object store).";
    BYTES_OUT Counter "kvik_store_out_bytes_total" ["tenant", "tier"]
        "Bytes that went out of a tier: from memory to those who read, from the tiers below into memory.";
    SECONDS Histogram "kvik_store_operation_seconds" ["op", "tier"]
        "Seconds since the request came. Op is get_first (until the client may read the first block), get (until it has read the last one), put (until all blocks are in the tier) or load (one block from the log into memory, since it was begun; of the object store the blocks of one request to it). Tier log: some block came from the log, or was to be durable in it; tier object: some block came from the object store. Requests that failed, and gets that found nothing, are not among them.";
    REUSE Histogram "kvik_store_reuse_gap_seconds" []
        "Seconds from when a block was stored or last read until it was read again, for each block that was read. To the second.";
    IDLE Histogram "kvik_store_evicted_idle_seconds" []
        "Seconds from when a block was stored or last read until it made room in memory. To the second.";
    REFUSED_BLOCKS Counter "kvik_store_refused_blocks_total" ["cause"]
        "Blocks of puts that were not taken: parent_missing (the one before them is not here), quota (all that the tenant may have is in use), not_admitted (not worth another block's place so far), or because nothing could go: held_by_readers or pinned, where these have a quarter of the memory, or else in_use (on its way, being removed, or with others behind it). lost: their bytes did not come.";
    REFUSED Counter "kvik_store_refused_requests_total" ["code"]
        "Requests that were answered with an error, by its code: protocol_error for one that is malformed, namespace_unknown for a namespace that was not opened, memory_cap_reached for too many at once.";
    CORRUPT Counter "kvik_store_corrupt_blocks_total" []
        "Blocks whose bytes in memory, in the log or in the object store were not those that were stored: each was taken out, and not served.";
    WAITS Counter "kvik_store_shared_waits_total" []
        "Blocks that were on their way for somebody else when they were asked for or put: they were brought once.";
    EVICTED Counter "kvik_store_evicted_blocks_total" ["policy"]
        "Copies in memory that made room for other blocks, by the policy that named them.";
    POLICY Gauge "kvik_store_policy" ["tenant", "policy"]
        "1 for the policy that decides now what goes. Tenant is empty for the room that all tenants without a quota share.";
    BLOCKS Gauge "kvik_store_blocks" []
        "Blocks that are known, in whatever tier.";
    MEMORY Gauge "kvik_store_memory_bytes" ["tenant"]
        "Bytes of the blocks in memory. Tenant is empty for all tenants without a quota together.";
    PINNED Gauge "kvik_store_pinned_bytes" ["tenant"]
        "Bytes of the blocks in memory that were asked to stay, in the same way.";
    QUOTA Gauge "kvik_store_quota_bytes" ["tenant"]
        "Bytes that the blocks of a tenant may take, of tenants that have a quota.";
    TAKEN Gauge "kvik_store_memory_taken_bytes" []
        "Bytes of memory that were taken for blocks: more than their own where places are free.";
    CAPACITY Gauge "kvik_store_memory_capacity_bytes" []
        "Bytes of memory that may be taken.";
    READ Gauge "kvik_store_lent_bytes" []
        "Bytes of the blocks in memory that somebody reads now.";
    REMOVED Counter "kvik_store_removed_blocks_total" []
        "Blocks that were taken out by somebody's wish.";
    LOG_CAPACITY Gauge "kvik_store_log_capacity_bytes" []
        "Bytes that the log may take.";
    LOG_BYTES Gauge "kvik_store_log_bytes" []
        "Bytes that the log takes, with blocks that nobody wants any more and whose room was not needed yet.";
    LOG_SEGMENTS Gauge "kvik_store_log_segments" []
        "Segments (files) of the log.";
    LOG_UNSYNCED Gauge "kvik_store_log_unsynced_bytes" []
        "Bytes that were written to the log and are not durable yet.";
    LOG_COPIED Counter "kvik_store_log_copied_bytes_total" []
        "Bytes of blocks that were copied within the log to make room.";
    LOG_DROPPED Counter "kvik_store_log_dropped_blocks_total" []
        "Blocks that the log dropped to make room.";
    LOG_UNWRITTEN Counter "kvik_store_log_unwritten_blocks_total" []
        "Blocks that stay in memory only, since the log was too slow for them or refused them.";
    LOG_SYNCS Counter "kvik_store_log_syncs_total" []
        "Times that the log was made durable.";
    LOG_QUARANTINED Counter "kvik_store_log_quarantined_records_total" []
        "Records of the log that were not what they should be: they are never served again.";
    LOG_FAILURES Counter "kvik_store_log_failures_total" []
        "Reads, writes and syncs of the log that failed.";
    OBJECT_CAPACITY Gauge "kvik_store_object_capacity_bytes" []
        "Bytes that the objects in the object store may take.";
    OBJECT_BYTES Gauge "kvik_store_object_bytes" []
        "Bytes that they take, with blocks that nobody wants any more in objects that others want.";
    OBJECTS Gauge "kvik_store_objects" []
        "Objects in the object store.";
    OBJECT_UNSENT Gauge "kvik_store_object_unsent_bytes" []
        "Bytes that were gathered for the object store and are not there yet.";
    OBJECT_DROPPED Counter "kvik_store_object_dropped_blocks_total" []
        "Blocks that went with the oldest object, to make room.";
    OBJECT_UNWRITTEN Counter "kvik_store_object_unwritten_blocks_total" []
        "Blocks that do not come to the object store: it was too slow for them, refused them, or they were gone before their turn.";
    OBJECT_REQUESTS Counter "kvik_store_object_requests_total" ["request"]
        "Requests to the object store: put (an object, or who has the prefix), get (a range of one), list (1000 names), delete.";
    OBJECT_SENT Counter "kvik_store_object_sent_bytes_total" []
        "Bytes of the objects that were written.";
    OBJECT_RECEIVED Counter "kvik_store_object_received_bytes_total" []
        "Bytes that reads of objects gave, with what lies between blocks and around them.";
    OBJECT_QUARANTINED Counter "kvik_store_object_quarantined_records_total" []
        "Blocks and objects that were not what they should be: each is a miss, and is not asked for again.";
    OBJECT_FAILURES Counter "kvik_store_object_failures_total" []
        "Requests to the object store that failed or took too long.";
    OBJECT_SHUT Gauge "kvik_store_object_shut" []
        "1 while the object store is not asked, since it did not answer lately.";
    OBJECT_OPEN Gauge "kvik_store_object_open" []
        "1 once all is known that the object store holds; until then it is looked through.";
}

impl Store {
    /// All figures, in the Prometheus text format (0.0.4).
    pub fn metrics(&self) -> String {
        let log = self.below().map(|below| below.log.usage());
        let far = self.far().map(|far| (far.objects.usage(), far.objects.traffic()));
        let has = [true, log.is_some(), far.is_some()];
        let mut text = MetricsText::default();
        // Of many tenants it is a long text, which nobody is to wait for.
        let (names, tenants) = {
            let state = self.state();
            (state.tenants.series_names().to_vec(), state.figures.tenants().to_vec())
        };
        tenants_text(&names, &tenants, has, &mut text);
        text.family(&SECONDS);
        for (op, tier, histogram) in self.latencies().all() {
            if has[tier as usize] {
                let labels = [op.to_owned(), tier.name().to_owned()];
                text.histogram(&SECONDS, &labels, histogram.counts(), histogram.sum());
            }
        }
        let state = self.state();
        ages_text(&REUSE, &state.figures.reuse_gap, &mut text);
        ages_text(&IDLE, &state.figures.idle, &mut text);
        causes_text(&state, &mut text);
        memory_text(&state, &mut text);
        let (capacity, taken) = (state.slabs.capacity(), state.slabs.taken());
        text.single(&TAKEN, taken);
        text.single(&CAPACITY, capacity);
        text.single(&READ, state.lent);
        text.single(&REMOVED, state.counts.removed);
        let (unwritten, object_unwritten) = (state.counts.unwritten, state.counts.object_unwritten);
        drop(state);
        log_text(log, unwritten, &mut text);
        object_text(far, object_unwritten, &mut text);
        text.into_string()
    }
}

/// What was asked for and what moved, by tenant and tier.
fn tenants_text(
    names: &[String],
    tenants: &[OfTenant],
    has: [bool; Where::ALL.len()],
    text: &mut MetricsText,
) {
    let tiers = Where::ALL.into_iter().filter(|tier| has[*tier as usize]);
    let lookups = |of: &OfTenant, tier: Where| match tier {
        Where::Memory => of.asked,
        Where::Log => of.asked - of.hits[Where::Memory as usize],
        Where::Object => of.asked - of.hits[Where::Memory as usize] - of.hits[Where::Log as usize],
    };
    let mut rows = |metric: &Metric, value: &dyn Fn(&OfTenant, Where) -> u64| {
        let all = names.iter().zip(tenants).flat_map(|(name, of)| {
            tiers.clone().map(move |tier| ([name.clone(), tier.name().to_owned()], value(of, tier)))
        });
        text.rows(metric, all);
    };
    rows(&LOOKUPS, &lookups);
    rows(&HITS, &|of, tier| of.hits[tier as usize]);
    rows(&MISSES, &|of, tier| lookups(of, tier) - of.hits[tier as usize]);
    rows(&BYTES_IN, &|of, tier| of.bytes_in[tier as usize]);
    rows(&BYTES_OUT, &|of, tier| of.bytes_out[tier as usize]);
}

fn ages_text(metric: &Metric, ages: &Histogram, text: &mut MetricsText) {
    text.family(metric);
    text.histogram(metric, &[], ages.counts(), ages.sum());
}

/// What was refused or wrong, and what went.
fn causes_text(state: &State, text: &mut MetricsText) {
    let figures = &state.figures;
    text.rows(&REFUSED_BLOCKS, Cause::ALL.map(|cause| ([cause.name().to_owned()], figures.refused(cause))));
    text.rows(&REFUSED, figures.failed().iter().map(|(code, count)| ([(*code).to_owned()], count)));
    text.single(&CORRUPT, state.counts.corrupt);
    text.single(&WAITS, figures.waits);
    text.rows(&EVICTED, figures.evicted().map(|(policy, count)| ([policy.name().to_owned()], count)));
}

/// What is in memory, and what decides about it.
fn memory_text(state: &State, text: &mut MetricsText) {
    let name = |share: &Share| share.tenant.clone().unwrap_or_default();
    let shares = || state.shares.iter();
    let deciding = |share| ([name(share), Share::deciding(share).to_owned()], 1);
    text.rows(&POLICY, shares().map(deciding));
    text.single(&BLOCKS, state.index.len());
    text.rows(&MEMORY, shares().map(|share| ([name(share)], share.used)));
    text.rows(&PINNED, shares().map(|share| ([name(share)], share.kept)));
    text.rows(&QUOTA, shares().filter_map(|share| Some(([name(share)], share.quota?))));
}

/// What the log does; nothing where there is none.
fn log_text(log: Option<Usage>, unwritten: u64, text: &mut MetricsText) {
    let mut one = |metric: &Metric, value: &dyn Fn(&Usage) -> u64| {
        text.rows(metric, log.iter().map(|usage| ([], value(usage))));
    };
    one(&LOG_CAPACITY, &|usage| usage.capacity);
    one(&LOG_BYTES, &|usage| usage.bytes);
    one(&LOG_SEGMENTS, &|usage| usage.segments);
    one(&LOG_UNSYNCED, &|usage| usage.unsynced);
    one(&LOG_COPIED, &|usage| usage.copied);
    one(&LOG_DROPPED, &|usage| usage.dropped);
    one(&LOG_UNWRITTEN, &|_| unwritten);
    one(&LOG_SYNCS, &|usage| usage.syncs);
    one(&LOG_QUARANTINED, &|usage| usage.quarantined);
    one(&LOG_FAILURES, &|usage| usage.failures);
}

/// What the object store does; nothing where there is none.
fn object_text(far: Option<(Usage, Traffic)>, unwritten: u64, text: &mut MetricsText) {
    let mut one = |metric: &Metric, value: &dyn Fn(&Usage, &Traffic) -> u64| {
        text.rows(metric, far.iter().map(|(usage, traffic)| ([], value(usage, traffic))));
    };
    one(&OBJECT_CAPACITY, &|usage, _| usage.capacity);
    one(&OBJECT_BYTES, &|usage, _| usage.bytes);
    one(&OBJECTS, &|usage, _| usage.segments);
    one(&OBJECT_UNSENT, &|usage, _| usage.unsynced);
    one(&OBJECT_DROPPED, &|usage, _| usage.dropped);
    one(&OBJECT_UNWRITTEN, &|_, _| unwritten);
    let requests = far.iter().flat_map(|(_, traffic)| {
        let Traffic { puts, gets, lists, deletes, .. } = *traffic;
        [("put", puts), ("get", gets), ("list", lists), ("delete", deletes)]
    });
    text.rows(&OBJECT_REQUESTS, requests.map(|(name, count)| ([name.to_owned()], count)));
    let mut one = |metric: &Metric, value: &dyn Fn(&Usage, &Traffic) -> u64| {
        text.rows(metric, far.iter().map(|(usage, traffic)| ([], value(usage, traffic))));
    };
    one(&OBJECT_SENT, &|_, traffic| traffic.sent);
    one(&OBJECT_RECEIVED, &|_, traffic| traffic.received);
    one(&OBJECT_QUARANTINED, &|usage, _| usage.quarantined);
    one(&OBJECT_FAILURES, &|usage, _| usage.failures);
    one(&OBJECT_SHUT, &|_, traffic| traffic.shut.into());
    one(&OBJECT_OPEN, &|_, traffic| traffic.open.into());
}
