//! Sizes as people write them: `16KiB`, `1.5GiB`, `4096`.

use crate::{Code, Error, Result};

const UNITS: [(&str, u64); 9] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("b", 1),
];

/// Bytes of a size such as `16KiB` (1,024-based), `16kB` (1,000-based) or `4096`.
///
/// # Errors
/// `InvalidArgument` for anything else, with the forms that are understood.
pub fn parse_size(text: &str) -> Result<u64> {
    let wrong = || {
        Error::new(
            Code::InvalidArgument,
            format!(
                "{text:?} is not a size: write bytes (4096) or a number with KiB, MiB, GiB, kB, MB or GB"
            ),
        )
    };
    let lower = text.trim().to_ascii_lowercase();
    let (digits, scale) = UNITS
        .iter()
        .find_map(|(unit, scale)| lower.strip_suffix(unit).map(|digits| (digits.trim_end(), *scale)))
        .unwrap_or((lower.as_str(), 1));
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.' || byte == b'_')
    {
        return Err(wrong());
    }
    let digits = digits.replace('_', "");
    if let Ok(whole) = digits.parse::<u64>() {
        return whole.checked_mul(scale).ok_or_else(wrong);
    }
    let bytes = digits.parse::<f64>().map_err(|_| wrong())? * scale as f64;
    if bytes.fract() != 0.0 || bytes >= 2f64.powi(63) {
        return Err(wrong());
    }
    Ok(bytes as u64)
}

/// The size in the largest binary unit that shows it exactly, else with one decimal.
pub fn format_size(bytes: u64) -> String {
    let (mut unit, mut scale) = ("B", 1u64);
    for (name, size) in [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1u64 << 40)] {
        if bytes >= size {
            (unit, scale) = (name, size);
        }
    }
    if bytes.is_multiple_of(scale) {
        format!("{} {unit}", bytes / scale)
    } else {
        format!("{:.1} {unit}", bytes as f64 / scale as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_written() {
        for (text, bytes) in [
            ("4096", 4096),
            ("16KiB", 16 << 10),
            ("16 kib", 16 << 10),
            ("1.5GiB", 3 << 29),
            ("2MB", 2_000_000),
            ("7B", 7),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
        for text in ["", "KiB", "-1", "1.0001KiB", "12 parsecs", "99999999999TiB", "1e9", "inf"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_short() {
        assert_eq!(format_size(16 << 10), "16 KiB");
        assert_eq!(format_size(1536), "1.5 KiB");
        assert_eq!(format_size(100), "100 B");
    }
}
