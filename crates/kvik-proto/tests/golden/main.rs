//! What every release sent is read by this one. `docs/compatibility.md` says what is promised, and how a new release
//! keeps what it sends.

#[path = "../../../../tests/golden/format.rs"]
mod format;
mod frames;
mod greetings;

use format::{Entry, all};
use kvik_proto::{ChunkHeader, STATUS_VOID, STATUS_WHOLE, VERSIONS};

/// What this release speaks.
fn formats() -> String {
    format!("protocol {} to {}", VERSIONS.0, VERSIONS.1)
}

fn describe(header: &ChunkHeader) -> format::Fields {
    let ChunkHeader { session, transfer, position, len, sums } = header;
    vec![
        ("session", session.to_string()),
        ("transfer", transfer.to_string()),
        ("position", position.to_string()),
        ("len", len.to_string()),
        ("sums", sums.to_string()),
    ]
}

#[test]
fn chunk_headers_of_every_release_are_read() {
    let large =
        ChunkHeader { session: u64::MAX, transfer: 1 << 40, position: 3 << 50, len: 4 << 20, sums: 1024 };
    let small = ChunkHeader { session: 2, transfer: 2, position: 0, len: 1, sums: 0 };
    let today = [("small", small), ("large", large)];
    let today = today.map(|(name, header)| Entry::new(name, describe(&header), header.encode().to_vec()));
    for golden in all("chunks", &formats(), &today) {
        for Entry { name, fields, bytes } in golden.entries {
            let header = ChunkHeader::decode(bytes.as_slice().try_into().unwrap()).unwrap();
            assert_eq!(
                Entry::new(&name, describe(&header), bytes.clone()).fields,
                fields,
                "{:?} {name}",
                golden.path
            );
            if golden.is_written_today {
                assert_eq!(header.encode().as_slice(), bytes, "{:?} {name}", golden.path);
            }
        }
    }
}

/// The trailer behind a chunk: a status, and a checksum for each unit.
#[test]
fn trailers_mean_what_they_meant_in_every_release() {
    let today = [("whole", STATUS_WHOLE), ("void", STATUS_VOID)];
    let today = today.map(|(name, status)| Entry::new(name, vec![], status.to_le_bytes().to_vec()));
    for golden in all("trailers", &formats(), &today) {
        assert_eq!(golden.entries, today, "{:?}", golden.path);
    }
}
