//! The lines of a recording: JSON, one object a line.
//!
//! The first names the format. A layout has a line of its own before the first transfer that uses it; a transfer has
//! one when it has ended. The last says how many there were and how many were dropped; a file without it was cut
//! off.

use kvik_core::{EngineId, Layers, Layout};
use kvik_engine::{Ended, TransportId};
use kvik_proto::{PageList, Select};
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::ops::Range;
use std::time::Duration;

/// The format's name and version. A reader refuses any other.
pub(crate) const FORMAT: &str = "kvik-trace/2";

/// What the lines of one recording have in common.
pub(crate) struct Writer {
    began: Duration,
    peers: HashMap<EngineId, usize>,
    layouts: HashSet<[u8; 8]>,
    transfers: u64,
    dropped: u64,
}

impl Writer {
    /// A recording that began at this time, and its first line.
    pub fn new(began: Duration, out: &mut Vec<u8>) -> Writer {
        put(out, json!({ "format": FORMAT, "kvik": env!("CARGO_PKG_VERSION") }));
        Writer { began, peers: HashMap::new(), layouts: HashSet::new(), transfers: 0, dropped: 0 }
    }

    /// A transfer, and its layout if it is the first to use it.
    pub fn transfer(&mut self, entry: &Ended, out: &mut Vec<u8>) {
        self.transfers += 1;
        let view = &entry.view;
        let digest = view.layout().digest();
        if self.layouts.insert(digest) {
            put(out, layout(&digest, view.layout()));
        }
        let next = self.peers.len() + 1;
        let peer = *self.peers.entry(entry.owner).or_insert(next);
        let mut line = json!({
            "t": seconds(entry.began.saturating_sub(self.began)),
            "op": entry.op,
            "class": entry.class.name(),
            "peer": peer,
            "layout": hex(&digest),
            "memory": if entry.shared_memory { "shared" } else { "host" },
            "layers": pair(&view.layers()),
            "slices": pair(&view.slices()),
            "parts": view.parts(),
            "transport": entry.transport.map_or("", TransportId::name),
            "checksums": entry.sums,
            "bytes": entry.bytes,
            "outcome": entry.outcome.as_ref().map_or_else(|error| error.code.name(), |_| "ok"),
        });
        if let (Ok(report), Some(line)) = (&entry.outcome, line.as_object_mut()) {
            line.insert("extents".into(), report.extents.into());
            for (name, time) in [
                ("plan_s", report.plan),
                ("post_s", report.post),
                ("wire_s", report.wire),
                ("verify_s", report.verify),
                ("total_s", report.total),
            ] {
                line.insert(name.into(), seconds(time).into());
            }
        }
        // Ids are most of a line: they are written without a value for each.
        let mut text = line.to_string();
        text.pop();
        put_ids(&mut text, "pages", view.pages().iter().copied());
        text.push_str(",\"remote\":");
        put_remote(&mut text, &entry.layout_there, &entry.select);
        text.push_str("}\n");
        out.extend_from_slice(text.as_bytes());
    }

    /// So many transfers are missing here.
    pub fn dropped(&mut self, count: u64, out: &mut Vec<u8>) {
        self.dropped += count;
        put(out, json!({ "dropped": count }));
    }

    /// The last line.
    pub fn end(&self, now: Duration, out: &mut Vec<u8>) {
        let seconds = seconds(now.saturating_sub(self.began));
        put(
            out,
            json!({ "end": { "seconds": seconds, "transfers": self.transfers, "dropped": self.dropped } }),
        );
    }
}

fn put(out: &mut Vec<u8>, line: Value) {
    out.extend_from_slice(line.to_string().as_bytes());
    out.push(b'\n');
}

fn layout(digest: &[u8; 8], layout: &Layout) -> Value {
    let (stride, offsets) = match layout.layer_starts() {
        Layers::Strided { stride, .. } => (Some(*stride), None),
        Layers::At(offsets) => (None, Some(offsets)),
    };
    json!({ "layout": hex(digest), "dims": {
        "pages": layout.pages(),
        "run_bytes": layout.run_bytes(),
        "page_stride": layout.page_stride(),
        "layers": layout.layers(),
        "layer_stride": stride,
        "layer_offsets": offsets,
        "slices": layout.slices(),
        "slice_stride": layout.slice_stride(),
        "offset": layout.offset(),
    } })
}

/// What was asked of the owner: its layout, and positions of the grant, layers, slices and parts where they were named.
fn put_remote(text: &mut String, layout: &[u8; 8], select: &Select) {
    let named = json!({
        "layout": hex(layout),
        "layers": select.layers.as_ref().map(pair),
        "slices": select.slices.as_ref().map(pair),
        "parts": select.parts,
    });
    text.push_str(&named.to_string());
    text.pop();
    match &select.positions {
        Some(PageList::Ids(ids)) => put_ids(text, "positions", ids.iter().copied()),
        Some(PageList::Runs(runs)) => {
            let ids = runs.iter().flat_map(|(first, count)| *first..first.saturating_add(*count));
            put_ids(text, "positions", ids);
        }
        None => text.push_str(",\"positions\":null"),
    }
    text.push('}');
}

/// Puts a list into an object that has keys already: page ids or positions in their order, a number for a page and
/// `[first, count]` for several that follow each other.
fn put_ids(text: &mut String, name: &str, ids: impl Iterator<Item = u32>) {
    let _ = write!(text, ",\"{name}\":[");
    let mut put = |first: u32, count: u32| {
        // Writing to a string does not fail.
        let _ = match count {
            1 => write!(text, "{first},"),
            _ => write!(text, "[{first},{count}],"),
        };
    };
    let mut run: Option<(u32, u32)> = None;
    for id in ids {
        run = Some(match run {
            Some((first, count)) if first.checked_add(count) == Some(id) => (first, count + 1),
            Some((first, count)) => {
                put(first, count);
                (id, 1)
            }
            None => (id, 1),
        });
    }
    if let Some((first, count)) = run {
        put(first, count);
        text.pop();
    }
    text.push(']');
}

fn pair(range: &Range<u32>) -> Value {
    json!([range.start, range.end])
}

/// In microseconds: below that is the noise of reading the clock.
fn seconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e6
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_become_runs_in_their_order() {
        let ids = |ids: &[u32]| {
            let mut text = String::new();
            put_ids(&mut text, "pages", ids.iter().copied());
            text
        };
        assert_eq!(ids(&[7, 8, 9, 3, 40, 41, 5]), ",\"pages\":[[7,3],3,[40,2],5]");
        assert_eq!(ids(&[u32::MAX - 1, u32::MAX, 0]), format!(",\"pages\":[[{},2],0]", u32::MAX - 1));
        assert_eq!(ids(&[]), ",\"pages\":[]");
    }

    #[test]
    fn a_recording_says_what_it_lacks() {
        let mut out = Vec::new();
        let mut writer = Writer::new(Duration::from_secs(5), &mut out);
        writer.dropped(3, &mut out);
        writer.dropped(4, &mut out);
        writer.end(Duration::from_millis(7500), &mut out);
        let text = String::from_utf8(out).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0]["format"], FORMAT);
        assert_eq!(lines[1], json!({ "dropped": 3 }));
        assert_eq!(lines[3], json!({ "end": { "seconds": 2.5, "transfers": 0, "dropped": 7 } }));
    }
}
