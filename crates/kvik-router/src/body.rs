//! The client's body, and the two bodies made from it.
//!
//! A body is read as a list of top-level keys with *raw* values: text that is checked to be JSON and otherwise
//! not understood. A key is replaced, removed or added; every other value leaves the router byte for byte as it
//! came, so a 20-digit seed, a `1.0`, a field invented next year and the order of keys all survive.

use std::fmt;

use http::StatusCode;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::metrics::Recompute;
use crate::reply::Reply;

/// Which of the two generation endpoints a body is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Completion,
    Chat,
}

/// Most keys of a body, and of what vLLM takes for keys: several times what any engine knows. Else an entry for each two
/// quotes and a number would take ten times the memory of the body.
const MOST_KEYS: usize = 256;

const PARAMS: &str = "kv_transfer_params";

/// What a prefill engine is told: compute the prompt's KV and keep it for a decode engine to pull. The object is
/// still open.
const PREFILL_PARAMS: &str = concat!(
    r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"#,
    r#""remote_block_ids":null,"remote_host":null,"remote_port":null"#
);

/// A JSON object whose values are raw. Keys that occur twice are kept twice; the last one counts, as it does
/// for the engines.
pub(crate) struct RequestBody<'a> {
    entries: Vec<(String, &'a RawValue)>,
}

impl<'a> RequestBody<'a> {
    /// Reads a body. Its values are checked to be JSON; nothing is copied.
    pub(crate) fn parse(bytes: &'a [u8], kind: Kind) -> Result<Self, Reply> {
        let not_json = |e: serde_json::Error| {
            let what = if e.is_data() { "cannot be read" } else { "is not valid JSON" };
            let message = format!("the request body {what}: {e}");
            Reply::refused(StatusCode::BAD_REQUEST, "invalid_json", message)
        };
        if bytes.iter().find(|b| !b.is_ascii_whitespace()).is_some_and(|b| *b != b'{') {
            serde_json::from_slice::<&RawValue>(bytes).map_err(not_json)?;
            let message = "the request body is JSON, but not an object";
            return Err(Reply::refused(StatusCode::BAD_REQUEST, "not_an_object", message));
        }
        let body: Self = serde_json::from_slice(bytes).map_err(not_json)?;
        let prompt = kind.prompt_key();
        if body.get(prompt).is_none() && !(kind == Kind::Completion && body.get("prompt_embeds").is_some()) {
            let message = format!("the request body has no `{prompt}`");
            return Err(Reply::refused(StatusCode::BAD_REQUEST, "missing_prompt", message));
        }
        // vLLM takes what is in there for parameters of its own, unless the request has those.
        let more = body.get("vllm_xargs").filter(|text| text.starts_with('{'));
        let more = more.map(serde_json::from_str::<Self>).transpose().map_err(not_json)?;
        if body.get(PARAMS).is_some() || more.is_some_and(|more| more.get(PARAMS).is_some()) {
            let message = format!(
                "`{PARAMS}` is set by this router; send the request without it, also in `vllm_xargs`"
            );
            return Err(Reply::refused(StatusCode::BAD_REQUEST, "reserved_field", message));
        }
        Ok(body)
    }

    /// Reads a body that was made here.
    pub(crate) fn again(made: &'a [u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(made)
    }

    /// The raw text of a key's value; a `null` counts as absent.
    fn get(&self, key: &str) -> Option<&'a str> {
        let found = self.entries.iter().rev().find(|(k, _)| k == key);
        found.map(|(_, v)| v.get()).filter(|text| *text != "null")
    }

    /// Whether the KV of this request can be handed over, or why decode must compute the prompt itself.
    ///
    /// `kv_transfer_params` stand for one prompt and one sequence. What is not provably that goes to decode
    /// whole; so does a request whose answer needs the prompt's own logits, which decode does not compute when
    /// it takes the KV from elsewhere.
    pub(crate) fn needs_whole_decode(&self, kind: Kind) -> Option<Recompute> {
        if kind == Kind::Completion && self.get("prompt").is_some_and(is_batch) {
            return Some(Recompute::BatchedPrompt);
        }
        // Beside a prompt they are another one.
        if kind == Kind::Completion && self.get("prompt_embeds").is_some() {
            return Some(Recompute::PromptEmbeds);
        }
        if !self.is_one("n") || !self.is_one("best_of") || self.is_set("use_beam_search") {
            return Some(Recompute::ManyChoices);
        }
        if self.is_set("echo") || self.get("prompt_logprobs").is_some() {
            return Some(Recompute::PromptLogits);
        }
        None
    }

    fn is_one(&self, key: &str) -> bool {
        self.get(key).is_none_or(|text| text == "1")
    }

    fn is_set(&self, key: &str) -> bool {
        self.get(key).is_some_and(|text| text != "false")
    }

    /// The body for prefill: one token, not streamed, and the order to keep the KV.
    ///
    /// `min_tokens` other than 0 becomes 1: it may not exceed `max_tokens`, and as in the client's request it keeps
    /// the engine from ending on the first token, after which there would be no KV to hand over.
    ///
    /// `stream`: what it is told of streams, where the router streams at all.
    pub(crate) fn for_prefill(&self, kind: Kind, stream: Option<&str>) -> Vec<u8> {
        let more = stream.map(|stream| format!(r#","kvik":{{"stream":{stream}}}"#)).unwrap_or_default();
        let params = format!("{PREFILL_PARAMS}{more}}}");
        let mut changes = vec![
            ("max_tokens", Some("1")),
            ("stream", Some("false")),
            ("stream_options", None),
            (PARAMS, Some(params.as_str())),
        ];
        if kind == Kind::Chat || self.get("max_completion_tokens").is_some() {
            changes.push(("max_completion_tokens", Some("1")));
        }
        if self.get("min_tokens").is_some_and(|least| least != "0") {
            changes.push(("min_tokens", Some("1")));
        }
        self.write(&changes)
    }

    /// The body for decode: the client's own, with the prefill engine's params where there are any.
    pub(crate) fn for_decode(&self, params: Option<&RawValue>) -> Vec<u8> {
        self.write(&[(PARAMS, params.map(RawValue::get))])
    }

    /// Of a body for decode, the one that makes a decode engine fetch the KV and so give it free on the prefill engine:
    /// cut to one token, streamed so that the first token is seen when it is there.
    pub(crate) fn for_release(&self, kind: Kind) -> Vec<u8> {
        let mut changes = vec![
            ("max_tokens", Some("1")),
            ("stream", Some("true")),
            ("stream_options", None),
            ("min_tokens", None),
        ];
        if kind == Kind::Chat || self.get("max_completion_tokens").is_some() {
            changes.push(("max_completion_tokens", Some("1")));
        }
        self.write(&changes)
    }

    /// Writes the object with some keys set (`Some`) or left out (`None`). A key that is set keeps its place.
    fn write(&self, changes: &[(&str, Option<&str>)]) -> Vec<u8> {
        let size: usize = self.entries.iter().map(|(k, v)| k.len() + v.get().len() + 4).sum();
        let mut out = Vec::with_capacity(size + 512);
        let mut placed = vec![false; changes.len()];
        out.push(b'{');
        for (key, value) in &self.entries {
            match changes.iter().position(|(k, _)| k == key) {
                None => entry(&mut out, key, value.get()),
                Some(i) => {
                    if let (Some(new), false) = (changes[i].1, placed[i]) {
                        entry(&mut out, key, new);
                    }
                    placed[i] = true;
                }
            }
        }
        for ((key, value), placed) in changes.iter().zip(placed) {
            if let (Some(value), false) = (value, placed) {
                entry(&mut out, key, value);
            }
        }
        out.push(b'}');
        out
    }
}

impl Kind {
    fn prompt_key(self) -> &'static str {
        match self {
            Self::Completion => "prompt",
            Self::Chat => "messages",
        }
    }
}

/// Appends `"key":value`, with a comma when it is not the first.
fn entry(out: &mut Vec<u8>, key: &str, value: &str) {
    if out.len() > 1 {
        out.push(b',');
    }
    // A `Value` of a string formats as JSON and cannot fail.
    out.extend_from_slice(serde_json::Value::from(key).to_string().as_bytes());
    out.push(b':');
    out.extend_from_slice(value.as_bytes());
}

/// Whether a prompt is several prompts: an array of strings or of arrays with more than one entry. An array of
/// numbers is one prompt in token ids, and an array of one string or one array is one prompt too.
fn is_batch(prompt: &str) -> bool {
    if !prompt.starts_with('[') {
        return false;
    }
    // The first character after the bracket tells an array of numbers from the others without reading on.
    let first = prompt[1..].trim_start().chars().next();
    if first.is_some_and(|c| c.is_ascii_digit()) {
        return false;
    }
    serde_json::from_str::<Vec<IgnoredAny>>(prompt).map_or(true, |entries| entries.len() != 1)
}

impl<'de: 'a, 'a> Deserialize<'de> for RequestBody<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Vec<(String, &'de RawValue)>;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a JSON object")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut entries: Self::Value = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    // Bodies that are made here have one more.
                    if entries.len() + usize::from(entry.0 != PARAMS) > MOST_KEYS {
                        return Err(M::Error::custom(format_args!(
                            "an object of more than {MOST_KEYS} keys"
                        )));
                    }
                    entries.push(entry);
                }
                Ok(entries)
            }
        }
        Ok(Self { entries: deserializer.deserialize_map(Entries)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, kind: Kind) -> RequestBody<'_> {
        RequestBody::parse(text.as_bytes(), kind).unwrap()
    }

    fn text(bytes: Vec<u8>) -> String {
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn everything_but_the_named_keys_stays_as_it_came() {
        let sent = r#"{ "prompt":"h\u00e9\n", "max_tokens" : 50,"seed":123456789012345678901234567890,"t":1.0,"x":{"b":1,"a":[1e5, 2]},"stream":true,"stream_options":{"include_usage":true}}"#;
        let body = parse(sent, Kind::Completion);
        let want = r#"{"prompt":"h\u00e9\n","max_tokens":1,"seed":123456789012345678901234567890,"t":1.0,"x":{"b":1,"a":[1e5, 2]},"stream":false,"kv_transfer_params":PARAMS}"#;
        let params = format!("{PREFILL_PARAMS}}}");
        assert_eq!(text(body.for_prefill(Kind::Completion, None)), want.replace("PARAMS", &params));
        let params = format!(r#"{PREFILL_PARAMS},"kvik":{{"stream":{{"a":[ 1]}}}}}}"#);
        let streamed = text(body.for_prefill(Kind::Completion, Some(r#"{"a":[ 1]}"#)));
        assert_eq!(streamed, want.replace("PARAMS", &params));
        let whole = r#"{"prompt":"h\u00e9\n","max_tokens":50,"seed":123456789012345678901234567890,"t":1.0,"x":{"b":1,"a":[1e5, 2]},"stream":true,"stream_options":{"include_usage":true}}"#;
        assert_eq!(text(body.for_decode(None)), whole);
        let params: Box<RawValue> = serde_json::from_str(r#"{"n": 1.50, "\u00fc":[ ]}"#).unwrap();
        let with = text(body.for_decode(Some(&params)));
        assert_eq!(with, whole.replace("}}", r#"},"kv_transfer_params":{"n": 1.50, "\u00fc":[ ]}}"#));
    }

    #[test]
    fn a_chat_body_is_cut_by_both_names_of_the_limit() {
        let body = parse(r#"{"messages":[],"min_tokens":7,"max_completion_tokens":9}"#, Kind::Chat);
        let cut = text(body.for_prefill(Kind::Chat, None));
        assert!(cut.contains(r#""max_completion_tokens":1"#) && cut.contains(r#""max_tokens":1"#), "{cut}");
        assert!(cut.contains(r#""min_tokens":1"#), "{cut}");
        let bare = parse(r#"{"messages":[]}"#, Kind::Chat);
        assert!(text(bare.for_prefill(Kind::Chat, None)).contains("max_completion_tokens"));
        // What engines take for a number.
        let odd = parse(r#"{"messages":[],"min_tokens":"7"}"#, Kind::Chat);
        assert!(text(odd.for_prefill(Kind::Chat, None)).contains(r#""min_tokens":1"#));
        let completion = parse(r#"{"prompt":"x","min_tokens":0}"#, Kind::Completion);
        let cut = text(completion.for_prefill(Kind::Completion, None));
        assert!(!cut.contains("max_completion_tokens") && cut.contains(r#""min_tokens":0"#), "{cut}");
    }

    #[test]
    fn only_one_prompt_and_one_choice_are_handed_over() {
        let completion = |text: &str| parse(text, Kind::Completion).needs_whole_decode(Kind::Completion);
        for single in [
            r#"{"prompt":"[a]"}"#,
            r#"{"prompt":[1,2,3]}"#,
            r#"{"prompt":["one"]}"#,
            r#"{"prompt":[[1,2]],"n":1,"best_of":null,"echo":false,"logprobs":3}"#,
        ] {
            assert_eq!(completion(single), None, "{single}");
        }
        for batch in [r#"{"prompt":["a","b"]}"#, r#"{"prompt":[ [1],[2] ]}"#, r#"{"prompt":[]}"#] {
            assert_eq!(completion(batch), Some(Recompute::BatchedPrompt), "{batch}");
        }
        for many in [r#"{"prompt":"a","n":2}"#, r#"{"prompt":"a","best_of":3}"#, r#"{"prompt":"a","n":"1"}"#]
        {
            assert_eq!(completion(many), Some(Recompute::ManyChoices), "{many}");
        }
        for logits in [r#"{"prompt":"a","echo":true}"#, r#"{"prompt":"a","prompt_logprobs":0}"#] {
            assert_eq!(completion(logits), Some(Recompute::PromptLogits), "{logits}");
        }
        for embeds in [r#"{"prompt_embeds":"AA=="}"#, r#"{"prompt":"a","prompt_embeds":["AA=="]}"#] {
            assert_eq!(completion(embeds), Some(Recompute::PromptEmbeds), "{embeds}");
        }
    }

    #[test]
    fn wrong_bodies_are_refused_with_the_reason() {
        let refused = |text: &[u8]| {
            let reply = RequestBody::parse(text, Kind::Completion).err().unwrap();
            (reply.code, reply.message)
        };
        for wrong in [&b""[..], b"{\"prompt\":", b"{\"prompt\":\"\xff\"}", b"prompt=x"] {
            assert_eq!(refused(wrong).0, "invalid_json");
        }
        assert_eq!(refused(b" [1]").0, "not_an_object");
        let (code, message) = refused(b"{\"prompt\":null}");
        assert!(code == "missing_prompt" && message.contains("`prompt`"), "{message}");
        for own in [
            &br#"{"prompt":"x","kv_transfer_params":{"remote_host":"elsewhere"}}"#[..],
            br#"{"prompt":"x","vllm_xargs":{"a":[1],"kv_transfer_\u0070arams":"x"}}"#,
        ] {
            assert_eq!(refused(own).0, "reserved_field");
        }
        for none in
            [r#"{"prompt":"x","vllm_xargs":{"a":"kv_transfer_params"}}"#, r#"{"prompt":"x","vllm_xargs":7}"#]
        {
            parse(none, Kind::Completion);
        }
    }

    #[test]
    fn no_body_makes_a_list_that_is_larger_than_itself() {
        let keys = |count| (0..count).map(|i| format!(r#","{i}":0"#)).collect::<String>();
        let most = format!(r#"{{"prompt":"x"{}}}"#, keys(MOST_KEYS - 1));
        let whole =
            parse(&most, Kind::Completion).for_decode(Some(&RawValue::from_string("{}".into()).unwrap()));
        RequestBody::again(&whole).unwrap().for_release(Kind::Completion);
        for many in [
            format!(r#"{{"prompt":"x"{}}}"#, keys(MOST_KEYS)),
            format!(r#"{{"prompt":"x","vllm_xargs":{{"kv_transfer_params":0{}}}}}"#, keys(MOST_KEYS + 1)),
            r#"{"prompt":"x","vllm_xargs":{"\ud800":0,"kv_transfer_params":0}}"#.into(),
        ] {
            let reply = RequestBody::parse(many.as_bytes(), Kind::Completion).err().unwrap();
            assert_eq!(reply.code, "invalid_json", "{}", reply.message);
        }
    }

    #[test]
    fn the_last_of_two_equal_keys_counts_and_a_null_is_absent() {
        let body = parse(
            r#"{"prompt":"a","n":2,"n":1,"kv_transfer_params":null,"stream":true,"stream":1}"#,
            Kind::Completion,
        );
        assert_eq!(body.needs_whole_decode(Kind::Completion), None);
        let cut = text(body.for_prefill(Kind::Completion, None));
        assert_eq!(cut.matches("stream").count(), 1, "{cut}");
        assert!(!text(body.for_decode(None)).contains("kv_transfer_params"));
    }
}
