//! What became of the requests of peers, for those who count them.

use crate::connection::Context;
use crate::event::Event;
use crate::flow::Flow;
use crate::frame::{Op, Path};
use kvik_core::{Class, Code, EngineId, Result};

/// The end of a peer's request, as the owner of the grant sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Served {
    /// Whose request it was.
    pub peer: EngineId,
    /// What it asked for.
    pub op: Op,
    /// What it is for.
    pub class: Class,
    /// How its bytes went, or would have gone.
    pub path: Path,
    /// Success, or the kind of the error.
    pub outcome: Result<(), Code>,
    /// The error was this side's answer, not the peer's own doing or the end of the session.
    pub refused: bool,
    /// Bytes that this side knows to have been moved.
    pub bytes: u64,
}

/// What a request asked for, how, and what for.
pub(super) type Asked = (Op, Path, Class);

/// A request was answered with an error before it was served.
pub(super) fn note_refused<R: Clone>(asked: Asked, code: Code, cx: &mut Context<'_, R>) {
    let (Some(peer), (op, path, class)) = (cx.reader(), asked) else { return };
    cx.tell(Event::Served(Served { peer, op, class, path, outcome: Err(code), refused: true, bytes: 0 }));
}

/// A request that waited for its grant has ended without it. One whose session is gone was never answered.
pub(super) fn note_unserved<R: Clone>(flow: &Flow<R>, outcome: &Result<()>, cx: &mut Context<'_, R>) {
    if let Some(peer) = cx.reader() {
        note_served(flow, peer, outcome, cx);
    }
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
