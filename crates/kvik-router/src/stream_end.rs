//! What became of a stream, and what that means for the template that it was sent with.
//!
//! A template is of one run of a prefill engine. When that engine starts again, decode cannot load what the stream was
//! to bring, computes the prompt itself, and may answer before prefill has offered its KV. Three signs tell it:
//!
//! * decode's own [note](crate::note), where the serving engine shows it;
//! * prefill's answer, for which the router waits a while beyond decode's beginning: an offer means that nothing was
//!   streamed, and brings the new template;
//! * that nobody has said anything a second after decode has begun to answer. Then the template is not trusted until
//!   prefill's answer has brought it again. Sooner it stays: both have the KV at the same time, and either may be the
//!   first to answer.
//!
//! Where the router has no template it trusts, it pulls, and asks for one. So of requests one after the other to an
//! engine that has started again, the first may be recomputed, the second is pulled, and the third is streamed.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::metrics::{Recompute, Streamed};
use crate::note::{Note, NoteReader, Used};
use crate::pool::Engine;
use crate::shared::Shared;

/// The least and the most that prefill's answer is waited for once decode has begun to give its own; in between, as
/// long again as decode took to begin. Prefill computes what decode has computed, so it is about to answer.
const LEAST_WAIT: Duration = Duration::from_secs(1);
const MOST_WAIT: Duration = Duration::from_secs(30);

/// How long a template is trusted without a sign after decode has begun to answer.
pub(crate) const GRACE: Duration = Duration::from_secs(1);

/// How long to wait for prefill's answer, beyond [`GRACE`], after decode took so long to begin.
pub(crate) fn patience(decode_took: Duration) -> Duration {
    decode_took.clamp(LEAST_WAIT, MOST_WAIT)
}

/// A stream that decode has begun to answer. Its end is counted when the last who may hear of it has gone, and until
/// then it is open: who sees that none is finds all of them counted.
pub(crate) struct StreamEnd {
    shared: Arc<Shared>,
    id: String,
    engine: Arc<Engine>,
    template: Arc<str>,
    handed_over: OnceLock<bool>,
    note: OnceLock<Note>,
}

impl StreamEnd {
    pub(crate) fn new(shared: Arc<Shared>, id: String, engine: Arc<Engine>, template: Arc<str>) -> Self {
        shared.metrics.streams_open.inc();
        Self { shared, id, engine, template, handed_over: OnceLock::new(), note: OnceLock::new() }
    }

    /// Prefill has answered: that it has handed the KV over, or with an offer of it.
    pub(crate) fn prefill_says(&self, handed_over: bool) {
        let _ = self.handed_over.set(handed_over);
    }

    /// Decode has said what it did.
    pub(crate) fn decode_says(&self, note: &Note) {
        if note.outcome.is_some() {
            let _ = self.note.set(note.clone());
        }
    }

    /// Whether either of them has said anything.
    pub(crate) fn is_known(&self) -> bool {
        self.handed_over.get().is_some() || self.note.get().is_some()
    }

    /// Uses the template no more. Where this engine has said another one since, that one stays.
    pub(crate) fn forget(&self) {
        self.engine.forget_template(&self.template);
    }

    fn outcome(&self) -> Streamed {
        match (self.note.get().and_then(|note| note.outcome), self.handed_over.get()) {
            (Some(Used::Recomputed), _) | (None | Some(Used::Other), Some(false)) => Streamed::Recomputed,
            (Some(Used::NotNeeded), _) => Streamed::NotNeeded,
            (Some(Used::Loaded), _) | (_, Some(true)) => Streamed::Loaded,
            (None | Some(Used::Other), None) => Streamed::Unconfirmed,
        }
    }
}

impl Drop for StreamEnd {
    fn drop(&mut self) {
        let (id, url, outcome) = (&self.id, &self.engine.url, self.outcome());
        self.shared.metrics.streamed(outcome);
        self.shared.metrics.streams_open.dec();
        match outcome {
            Streamed::Recomputed => {
                self.shared.metrics.recomputed(Recompute::StreamFailed);
                self.forget();
                let why = self.note.get().map_or("prefill had not streamed it", Note::reason);
                log::warn!(
                    request:% = id;
                    "request {id}: decode computed the prompt that prefill engine {url} was to stream ({why}); \
                     unless that engine has said anew how it streams, the next request to it is pulled"
                );
            }
            Streamed::Unconfirmed => {
                log::info!(
                    request:% = id;
                    "request {id}: decode has answered, and nobody says whether prefill engine {url} has streamed"
                );
            }
            Streamed::Loaded | Streamed::NotNeeded | Streamed::Offered => {}
        }
    }
}

/// A stream's answer on its way to the client, which may have decode's note in it.
pub(crate) struct Answering {
    end: Arc<StreamEnd>,
    reader: NoteReader,
}

impl Answering {
    pub(crate) fn new(end: Arc<StreamEnd>) -> Self {
        Self { end, reader: NoteReader::default() }
    }

    /// Another piece of the answer.
    pub(crate) fn read(&mut self, piece: &[u8]) {
        self.reader.read(piece);
        if let Some(note) = self.reader.note() {
            self.end.decode_says(note);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefill_is_waited_for_as_long_again_within_bounds() {
        for (took, wait) in [(0, 1000), (1500, 1500), (90_000, 30_000)] {
            assert_eq!(patience(Duration::from_millis(took)), Duration::from_millis(wait));
        }
    }
}
