//! Entries for the fuzz targets: the private decoders of what clients and servers say to each other.

use crate::wire::{Request, Response};

/// Whether bytes are a request.
pub fn is_request(bytes: &[u8]) -> bool {
    Request::decode(bytes).is_ok()
}

/// Whether bytes are a response.
pub fn is_response(bytes: &[u8]) -> bool {
    Response::decode(bytes).is_ok()
}

/// Whatever bytes mean, encoded it means the same.
///
/// # Panics
/// Where it does not.
pub fn comes_back(bytes: &[u8]) {
    if let Ok((number, request)) = Request::decode(bytes) {
        let again = Request::decode(&request.encode(number));
        assert_eq!(again.ok(), Some((number, request)));
    }
    if let Ok((number, response)) = Response::decode(bytes) {
        let again = Response::decode(&response.encode(number));
        assert_eq!(again.ok(), Some((number, response)));
    }
}
