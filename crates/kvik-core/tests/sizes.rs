//! Sizes as people write them, and as they are shown to people.

use kvik_core::{format_size, parse_size};

#[test]
fn sizes_are_read_as_written() {
    for (text, bytes) in [
        ("4096", 4096),
        ("16KiB", 16 << 10),
        ("16 kib", 16 << 10),
        ("1.5GiB", 3 << 29),
        (".5 KiB", 512),
        ("2.01GB", 2_010_000_000),
        ("2_000.0kB", 2_000_000),
        ("7B", 7),
    ] {
        assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
    }
    let wrong =
        ["", "KiB", ".", "_", "1.2.3", "-1", "+1", "0.1GiB", "12 parsecs", "99999999999TiB", "1e9", "inf"];
    for text in wrong {
        assert!(parse_size(text).is_err(), "{text}");
    }
}

#[test]
fn sizes_are_shown_short() {
    assert_eq!(format_size(16 << 10), "16 KiB");
    assert_eq!(format_size(1536), "1.5 KiB");
    assert_eq!(format_size(100), "100 B");
}
