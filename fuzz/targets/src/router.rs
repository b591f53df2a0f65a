//! What the router reads: bodies of clients, answers of engines.

use kvik_router::fuzzing;

/// A body is refused, or goes on as a JSON object with the client's own values.
pub fn router(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    match mode % 4 {
        0 | 1 => fuzzing::body(data, mode % 4 == 1),
        2 => fuzzing::prefill_answer(data),
        _ => fuzzing::decode_answer(data),
    }
}
