//! Little-endian fields in byte strings; reading never trusts a length.

use kvik_core::{Code, Error, Result};

pub(crate) const MAX_TEXT: usize = 1024;

/// Writes fields one after the other.
#[derive(Debug, Default)]
pub(crate) struct Writer(pub Vec<u8>);

impl Writer {
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.bytes(&value.to_le_bytes())
    }
    pub fn bytes(&mut self, value: &[u8]) -> &mut Self {
        self.0.extend_from_slice(value);
        self
    }
    /// Whether it is there, and then it.
    pub fn option<T>(&mut self, value: Option<&T>, write: impl FnOnce(&T, &mut Self)) -> &mut Self {
        self.u8(value.is_some().into());
        if let Some(value) = value {
            write(value, self);
        }
        self
    }
    /// A text, cut at a character boundary to at most `most` bytes, behind its length.
    pub fn text(&mut self, value: &str, most: usize) -> &mut Self {
        let mut end = value.len().min(most);
        while !value.is_char_boundary(end) {
            end -= 1;
        }
        self.u16(end as u16).bytes(&value.as_bytes()[..end])
    }
}

/// Reads fields one after the other; anything missing or beyond its bounds is a `ProtocolError`.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Reader { bytes, what }
    }

    pub fn wrong(&self, why: &str) -> Error {
        Error::new(
            Code::ProtocolError,
            format!("the peer sent a {} frame that makes no sense: {why}", self.what),
        )
    }

    pub fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (head, rest) = self.bytes.split_at_checked(len).ok_or_else(|| self.wrong("it is too short"))?;
        self.bytes = rest;
        Ok(head)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) =
            self.bytes.split_first_chunk::<N>().ok_or_else(|| self.wrong("it is too short"))?;
        self.bytes = rest;
        Ok(*head)
    }

    pub fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }
    pub fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }
    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }
    pub fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    pub fn bool(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(self.wrong("a flag is neither 0 nor 1")),
        }
    }

    /// What may be there or not.
    pub fn option<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T>) -> Result<Option<T>> {
        if self.bool()? { read(self).map(Some) } else { Ok(None) }
    }

    /// One of these, by its place among them.
    pub fn one_of<T: Copy>(&mut self, all: &[T], unknown: &str) -> Result<T> {
        all.get(usize::from(self.u8()?)).copied().ok_or_else(|| self.wrong(unknown))
    }

    pub fn text(&mut self, most: usize) -> Result<String> {
        let len = usize::from(self.u16()?);
        if len > most {
            return Err(self.wrong("a text is too long"));
        }
        let bytes = self.take(len)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| self.wrong("a text is not UTF-8"))
    }

    /// A count of items of `each` bytes that really follow, so that nothing is allocated for items that do not.
    pub fn count(&mut self, each: usize) -> Result<usize> {
        let count = self.u32()? as usize;
        if count.checked_mul(each).is_none_or(|bytes| bytes > self.bytes.len()) {
            return Err(self.wrong("it announces more items than it holds"));
        }
        Ok(count)
    }

    pub fn end(&self) -> Result<()> {
        match self.bytes.is_empty() {
            true => Ok(()),
            false => Err(self.wrong("something follows its last field")),
        }
    }
}
