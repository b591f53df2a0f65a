//! The request that a transfer or grant belongs to, as log lines name it.

use std::fmt;

/// Bytes that are kept of a request id.
const LONGEST: usize = 256;

/// A request id from outside, which may be anything, made fit for a log line: short, and in one line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Tag(Box<str>);

impl Tag {
    /// The id without control characters, cut where it is longer than any id has reason to be.
    pub fn new(id: &str) -> Tag {
        let printable = id.chars().filter(|letter| !letter.is_control());
        let mut room = LONGEST;
        let fits = |letter: &char| match room.checked_sub(letter.len_utf8()) {
            Some(left) => {
                room = left;
                true
            }
            None => false,
        };
        Tag(printable.take_while(fits).collect())
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_a_request_is_called_fits_into_a_line() {
        assert_eq!(Tag::new("cmpl-17").to_string(), "cmpl-17");
        assert_eq!(
            Tag::new("a\nkvik.engine: all is well\u{1b}[0m").to_string(),
            "akvik.engine: all is well[0m"
        );
        for letter in ["x", "ü", "語", "🦀"] {
            let tag = Tag::new(&letter.repeat(1000)).to_string();
            assert!(tag.len() <= LONGEST && tag.len() + letter.len() > LONGEST, "{}", tag.len());
        }
    }
}
