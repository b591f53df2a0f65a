//! What became of the requests of peers, for those who count them.

use crate::connection::Context;
use crate::event::{Event, Served};
use crate::flow::Flow;
use crate::frame::{Op, Path};
use kvik_core::{Class, Code, EngineId, Result};

/// What a request asked for, how, and what for.
pub(super) type Asked = (Op, Path, Class);

/// A request was answered with an error before it was served.
pub(super) fn note_refused<R: Clone>(asked: Asked, code: Code, cx: &mut Context<'_, R>) {
    let (Some(peer), (op, path, class)) = (cx.reader(), asked) else { return };
    cx.tell(Event::Served(Served { peer, op, class, path, outcome: Err(code), refused: true, bytes: 0 }));
}

/// A request that was served has ended.
pub(super) fn note_served<R: Clone>(
    flow: &Flow<R>,
    peer: EngineId,
    outcome: &Result<()>,
    cx: &mut Context<'_, R>,
) {
    let outcome = outcome.as_ref().map_err(|error| error.code).copied();
    cx.tell(Event::Served(Served {
        peer,
        op: flow.op,
        class: flow.class,
        path: flow.path,
        outcome,
        refused: outcome.is_err() && !flow.peer_ended,
        bytes: if outcome.is_ok() { flow.chunking.bytes } else { flow.bytes_done() },
    }));
}
