//! What a decode engine's answer says of the KV that it was offered.
//!
//! The decode side of kvik has one field for that, `kv_transfer_params.kvik`. vLLM shows it in whole answers, and
//! from 0.33 on in the last event of a streamed one, where other engines may say it in the first.

use serde::Deserialize;

/// The longest event of a stream that is read; one with a note has a few hundred bytes.
const MOST_EVENT: usize = 64 << 10;

/// The longest reason that goes into a log.
const MOST_REASON: usize = 64;

/// What must be in an event with a note. Within a text of the answer its quotes are escaped.
const FIELD: &[u8] = b"\"kv_transfer_params\":";

/// What decode did with the KV that it was offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Used {
    Loaded,
    /// It had all of it itself.
    NotNeeded,
    /// It computed the prompt, since the offer was refused or its load has failed.
    Recomputed,
    /// What a later kvik may say.
    #[serde(other)]
    Other,
}

/// The note of one answer.
#[derive(Debug, Default, Clone, PartialEq, Deserialize)]
pub(crate) struct Note {
    pub(crate) kv_wait_ms: Option<f64>,
    pub(crate) outcome: Option<Used>,
    reason: Option<String>,
}

impl Note {
    /// The note in a whole JSON answer, or in the first event of a stream.
    pub(crate) fn of(answer: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Answer {
            kv_transfer_params: Option<Params>,
        }
        #[derive(Deserialize)]
        struct Params {
            kvik: Option<Note>,
        }
        let json = match answer.strip_prefix(b"data:") {
            Some(event) => event.split(|b| *b == b'\n').next().unwrap_or(event),
            None => answer,
        };
        serde_json::from_slice::<Answer>(json).ok()?.kv_transfer_params?.kvik
    }

    /// Why decode computed the prompt, in a form that fits into a line of a log.
    pub(crate) fn reason(&self) -> &str {
        let plain = |text: &&str| {
            text.len() <= MOST_REASON && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        };
        self.reason.as_deref().filter(plain).unwrap_or("it does not say why")
    }
}

/// Finds the note in an answer that is passed on piece by piece. What does not end in a piece is kept until it
/// does, within a bound.
#[derive(Debug, Default)]
pub(crate) struct NoteReader {
    begun: Vec<u8>,
    /// The event that is being read is longer than any with a note.
    too_long: bool,
    note: Option<Note>,
}

impl NoteReader {
    /// Reads a piece of the answer.
    pub(crate) fn read(&mut self, piece: &[u8]) {
        let mut rest = piece;
        while let Some(end) = rest.iter().position(|b| *b == b'\n') {
            self.line(&rest[..end]);
            rest = &rest[end + 1..];
        }
        if self.begun.len() + rest.len() > MOST_EVENT {
            self.too_long = true;
            self.begun.clear();
        } else if !self.too_long {
            self.begun.extend_from_slice(rest);
        }
    }

    /// The last note that has come.
    pub(crate) fn note(&self) -> Option<&Note> {
        self.note.as_ref()
    }

    fn line(&mut self, end: &[u8]) {
        let fits = !self.too_long && self.begun.len() + end.len() <= MOST_EVENT;
        if fits && self.begun.is_empty() {
            self.event(end);
        } else if fits {
            self.begun.extend_from_slice(end);
            let whole = std::mem::take(&mut self.begun);
            self.event(&whole);
        }
        self.begun.clear();
        self.too_long = false;
    }

    fn event(&mut self, line: &[u8]) {
        if line.starts_with(b"data:") && line.windows(FIELD.len()).any(|bytes| bytes == FIELD) {
            self.note = Note::of(line).or(self.note.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAST: &str = concat!(
        r#"data: {"choices":[{"text":"x"}],"kv_transfer_params":{"kvik":"#,
        r#"{"kv_wait_ms":2.5,"outcome":"recomputed","reason":"peer_restarted"}}}"#
    );

    fn read(pieces: &[&[u8]]) -> Option<Note> {
        let mut reader = NoteReader::default();
        for piece in pieces {
            reader.read(piece);
        }
        reader.note().cloned()
    }

    #[test]
    fn the_note_is_read_from_whole_answers_and_first_events() {
        let json = br#"{"id":"x","kv_transfer_params":{"a":1,"kvik":{"kv_wait_ms":2.25}}}"#;
        let expected = Note { kv_wait_ms: Some(2.25), ..Note::default() };
        assert_eq!(Note::of(json), Some(expected.clone()));
        let event = [b"data: ".as_slice(), json, b"\n\ndata: {}\n\n"].concat();
        assert_eq!(Note::of(&event), Some(expected));
        for nothing in ["", "data: [DONE]", r#"{"kv_transfer_params":null}"#, r#"{"kv_transfer_params":[1]}"#]
        {
            assert_eq!(Note::of(nothing.as_bytes()), None, "{nothing}");
        }
    }

    #[test]
    fn the_note_of_a_stream_is_found_however_its_bytes_come() {
        let text = format!("data: {{\"choices\":[]}}\n\n{LAST}\n\ndata: [DONE]\n\n");
        for cut in 0..text.len() {
            let (one, two) = text.as_bytes().split_at(cut);
            let note = read(&[one, two]).unwrap_or_else(|| panic!("cut at {cut}"));
            assert_eq!((note.outcome, note.reason()), (Some(Used::Recomputed), "peer_restarted"));
        }
        let single: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
        assert!(read(&single).is_some());
    }

    #[test]
    fn what_a_model_writes_is_no_note() {
        let text = serde_json::json!({"choices": [{"text": LAST}]});
        assert_eq!(read(&[format!("data: {text}\n\n").as_bytes()]), None);
    }

    #[test]
    fn an_event_that_is_too_long_is_passed_over_and_not_kept() {
        let mut reader = NoteReader::default();
        for _ in 0..8 {
            reader.read(&[b'x'; MOST_EVENT / 2]);
            assert!(reader.begun.len() <= MOST_EVENT);
        }
        reader.read(format!("{LAST}\n").as_bytes());
        assert_eq!(reader.note(), None, "it is the end of the long one");
        reader.read(format!("{LAST}\n").as_bytes());
        assert!(reader.note().is_some());
    }

    #[test]
    fn an_outcome_of_a_later_version_is_none_of_those_known() {
        let note =
            Note::of(br#"{"kv_transfer_params":{"kvik":{"outcome":"moved","reason":"a\nb"}}}"#).unwrap();
        assert_eq!((note.outcome, note.reason()), (Some(Used::Other), "it does not say why"));
    }
}
