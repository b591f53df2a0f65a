//! Entries for the fuzz targets: private decoders of what clients and engines send.

use crate::body::{Kind, RequestBody};
use crate::handover;
use crate::note::{Note, NoteReader};
use serde_json::Value;
use serde_json::value::RawValue;

/// A client's body, and the bodies that are made from it.
///
/// # Panics
/// When one of them is not JSON, or has lost a value of the client's.
pub fn body(bytes: &[u8], chat: bool) {
    let kind = if chat { Kind::Chat } else { Kind::Completion };
    let Ok(body) = RequestBody::parse(bytes, kind) else { return };
    let _ = body.needs_whole_decode(kind);
    let params = RawValue::from_string(r#"{"kvik":{"n":1.0}}"#.to_owned()).expect("JSON");
    let whole = body.for_decode(Some(&params));
    let (pull, stream) = (body.for_prefill(kind, None), body.for_prefill(kind, Some("{}")));
    let release = RequestBody::again(&whole).expect("JSON").for_release(kind);
    for made in [&whole, &body.for_decode(None), &pull, &stream, &release] {
        let raw: &RawValue = serde_json::from_slice(made).expect("what is sent on is JSON");
        assert!(raw.get().starts_with('{'));
    }
    // Values that a `Value` cannot hold, such as very large numbers, pass as text: those cannot be compared.
    let (Ok(Value::Object(mut theirs)), Ok(Value::Object(ours))) =
        (serde_json::from_slice(bytes), serde_json::from_slice(&whole))
    else {
        return;
    };
    theirs.insert("kv_transfer_params".into(), serde_json::json!({"kvik": {"n": 1.0}}));
    assert_eq!(theirs, ours, "decode gets another request than the client's");
}

/// A prefill engine's answer.
pub fn prefill_answer(bytes: &[u8]) {
    if let Ok(Some(params)) = handover::params_of(bytes) {
        assert!(!params.get().is_empty());
        if let Some(template) = crate::stream::template_of(&params) {
            RawValue::from_string(template.to_string()).expect("what is kept is JSON");
        }
    }
}

/// A decode engine's answer, whole or as a stream that comes in two pieces.
///
/// # Panics
/// When the note of a stream depends on where its bytes were cut.
pub fn decode_answer(bytes: &[u8]) {
    let _ = Note::of(bytes).map(|note| note.reason().len());
    let (mut whole, mut cut) = (NoteReader::default(), NoteReader::default());
    whole.read(bytes);
    let (one, two) = bytes.split_at(bytes.len() / 2);
    cut.read(one);
    cut.read(two);
    assert_eq!(whole.note(), cut.note());
}
