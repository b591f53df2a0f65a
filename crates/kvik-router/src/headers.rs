//! Which headers cross the router, and the request id that crosses it everywhere.

use http::header::{
    ACCEPT_ENCODING, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderMap,
    HeaderName, HeaderValue, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};

/// The header that ties one request's log lines together in the router and in both engines.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A longer id from a client is replaced: engines put the id into the names of their own requests.
const LONGEST_ID: usize = 128;

/// Headers that belong to one connection and never cross a proxy (RFC 9110, section 7.6.1).
const HOP_BY_HOP: [HeaderName; 8] = [
    CONNECTION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("proxy-authorization"),
];

/// The client's request id if engines and log readers can take it, else a new one.
pub(crate) fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    match given.filter(|id| is_sane(id)) {
        Some(id) => id.to_owned(),
        None => new_id(),
    }
}

fn is_sane(id: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':');
    (1..=LONGEST_ID).contains(&id.len()) && id.bytes().all(plain)
}

fn new_id() -> String {
    let mut random = [0u8; 16];
    if getrandom::fill(&mut random).is_err() {
        // An id only has to differ from others in the logs; a randomly keyed hash does that as well.
        use std::hash::{BuildHasher, RandomState};
        let state = RandomState::new();
        random[..8].copy_from_slice(&state.hash_one(0u8).to_ne_bytes());
        random[8..].copy_from_slice(&state.hash_one(1u8).to_ne_bytes());
    }
    format!("{:032x}", u128::from_ne_bytes(random))
}

/// The headers of a request to an engine: the client's, without those of the client's connection and those that
/// describe the body the client sent, with this request id.
///
/// `Accept-Encoding` stays behind, so that engines answer in plain JSON, which the router reads.
pub(crate) fn for_engine(client: &HeaderMap, id: &str) -> HeaderMap {
    let mut headers = without_hop_by_hop(client);
    for name in [HOST, CONTENT_LENGTH, CONTENT_ENCODING, EXPECT, ACCEPT_ENCODING] {
        headers.remove(name);
    }
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    put_id(&mut headers, id);
    headers
}

/// The headers of an engine's answer as they go to the client.
pub(crate) fn for_client(engine: &HeaderMap, id: &str) -> HeaderMap {
    let mut headers = without_hop_by_hop(engine);
    put_id(&mut headers, id);
    headers
}

/// Puts the request id in. An id is visible ASCII by construction, so this leaves no header out.
pub(crate) fn put_id(headers: &mut HeaderMap, id: &str) {
    if let Ok(value) = HeaderValue::from_str(id) {
        headers.insert(REQUEST_ID, value);
    }
}

fn without_hop_by_hop(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    let named = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    for name in named.flat_map(|list| list.split(',')) {
        kept.remove(name.trim());
    }
    for name in HOP_BY_HOP {
        kept.remove(name);
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id_for(given: &str) -> String {
        let mut headers = HeaderMap::new();
        headers.insert(REQUEST_ID, HeaderValue::from_str(given).unwrap());
        request_id(&headers)
    }

    #[test]
    fn a_sane_id_is_kept_and_any_other_replaced() {
        assert_eq!(id_for("abc-1_2.3:4"), "abc-1_2.3:4");
        for insane in ["", "a b", "a/b", &"x".repeat(129), "a\"b"] {
            let id = id_for(insane);
            assert!(id.len() == 32 && is_sane(&id), "{insane:?} gave {id:?}");
        }
        assert_ne!(request_id(&HeaderMap::new()), request_id(&HeaderMap::new()));
    }

    #[test]
    fn headers_of_the_connection_stay_behind() {
        let mut client = HeaderMap::new();
        for (name, value) in [
            ("connection", "keep-alive, X-Mine"),
            ("x-mine", "1"),
            ("host", "router"),
            ("te", "trailers"),
            ("content-length", "3"),
            ("authorization", "Bearer k"),
            ("traceparent", "00-1"),
        ] {
            client.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let sent = for_engine(&client, "id");
        let mut names: Vec<_> = sent.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "content-type", "traceparent", "x-request-id"]);
    }
}
