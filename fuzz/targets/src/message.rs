//! What clients and servers of a store say to each other: it comes from a peer that was admitted.

use crate::most_held;
use kvik_store::fuzzing;

/// It is a request, a response or nothing; takes no more memory than a message of its length may; and what it means comes
/// back from its encoding.
pub fn message(data: &[u8]) {
    for decode in [fuzzing::is_request, fuzzing::is_response] {
        let (_, held) = most_held(|| decode(data));
        assert!(held <= 16 * data.len() + (4 << 10), "{held} bytes for a message of {}", data.len());
    }
    fuzzing::comes_back(data);
}
