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
                "{text:?} is not a size in whole bytes: write bytes (4096) or a number with KiB, MiB, GiB, kB, MB or GB"
            ),
        )
    };
    let lower = text.trim().to_ascii_lowercase();
    let (digits, scale) = UNITS
        .iter()
        .find_map(|(unit, scale)| lower.strip_suffix(unit).map(|digits| (digits.trim_end(), *scale)))
        .unwrap_or((lower.as_str(), 1));
    let digits = digits.replace('_', "");
    let (whole, part) = digits.split_once('.').unwrap_or((&digits, ""));
    // In whole numbers: 2.01 of a billion is none as a float.
    let exact = || {
        let all = [whole, part].concat();
        let number = all.bytes().all(|byte| byte.is_ascii_digit()).then(|| all.parse::<u128>().ok())??;
        let bytes = number.checked_mul(scale.into())?;
        let unit = 10u128.checked_pow(u32::try_from(part.len()).ok()?)?;
        bytes.is_multiple_of(unit).then(|| u64::try_from(bytes / unit).ok())?
    };
    exact().ok_or_else(wrong)
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
