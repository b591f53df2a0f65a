//! Traces of requests in the format that Mooncake published.

use kvik_core::{Code, Error, Result};
use serde::Deserialize;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// A line has at most so many bytes: more than a million hash ids.
const MAX_LINE: u64 = 16 << 20;
/// No block.
pub(super) const NONE: u32 = u32::MAX;

/// Requests, each with the blocks of its prompt. Blocks are numbered from 0 in the order in which they first come.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    requests: Vec<Request>,
    references: Vec<u32>,
    /// The hash id of each block.
    names: Vec<u64>,
    /// The block before each block, where it came first.
    parents: Vec<u32>,
    numbers: HashMap<u64, u32>,
    broken_chains: u64,
}

/// One request, besides its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// When it came, in milliseconds since the start of the trace.
    pub timestamp_ms: u64,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// Where its blocks end among those of all requests.
    end: usize,
}

/// A line. Keys that are not named here are passed over.
#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Reads a file of JSON lines `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids":
    /// [...]}`, where a hash id stands for one block and all blocks before it. Empty lines are passed over.
    ///
    /// # Errors
    /// `InvalidArgument`, with file and line, for a file that cannot be read, a line that is not of this form, or one
    /// of more than 16 MiB.
    pub fn read(path: &Path) -> Result<Trace> {
        let file = File::open(path)
            .map_err(|error| wrong(format!("the trace {} cannot be opened: {error}", path.display())))?;
        Trace::parse(BufReader::new(file)).map_err(|error| wrong(format!("{}: {error}", path.display())))
    }

    /// Reads JSON lines as [`Trace::read`] does.
    ///
    /// # Errors
    /// As for [`Trace::read`], with the number of the line.
    pub fn parse(mut lines: impl BufRead) -> Result<Trace> {
        let (mut trace, mut line) = (Trace::default(), Vec::new());
        for number in 1.. {
            line.clear();
            let read = lines.by_ref().take(MAX_LINE + 1).read_until(b'\n', &mut line);
            let read = read.map_err(|error| wrong(format!("line {number} cannot be read: {error}")))?;
            if read == 0 {
                break;
            }
            if read as u64 > MAX_LINE {
                return Err(wrong(format!(
                    "line {number} has more than {MAX_LINE} bytes: is this a trace of JSON lines?"
                )));
            }
            if line.trim_ascii().is_empty() {
                continue;
            }
            let parsed: Line = serde_json::from_slice(&line).map_err(|error| {
                wrong(format!(
                    "line {number} is no request ({error}): a line is {{\"timestamp\": ms, \"input_length\": tokens, \
                     \"output_length\": tokens, \"hash_ids\": [...]}}"
                ))
            })?;
            if parsed.timestamp < 0.0 {
                return Err(wrong(format!(
                    "line {number} has the timestamp {}: it is at least 0",
                    parsed.timestamp
                )));
            }
            trace.push(
                parsed.timestamp as u64,
                parsed.input_length,
                parsed.output_length,
                &parsed.hash_ids,
            )?;
        }
        Ok(trace)
    }

    /// Adds a request.
    ///
    /// # Errors
    /// `InvalidArgument` where the trace would have more than 2^32 - 1 blocks.
    pub fn push(
        &mut self,
        timestamp_ms: u64,
        input_tokens: u64,
        output_tokens: u64,
        hash_ids: &[u64],
    ) -> Result<()> {
        let mut before = NONE;
        for id in hash_ids {
            let fresh = self.names.len() as u32;
            if fresh == NONE {
                return Err(wrong("a trace has at most 2^32 - 1 blocks: cut it into parts".into()));
            }
            let block = *self.numbers.entry(*id).or_insert(fresh);
            if block == fresh {
                self.names.push(*id);
                self.parents.push(before);
            } else if self.parents[block as usize] != before {
                self.broken_chains += 1;
            }
            self.references.push(block);
            before = block;
        }
        let end = self.references.len();
        self.requests.push(Request { timestamp_ms, input_tokens, output_tokens, end });
        Ok(())
    }

    /// Every request with its blocks, first block first.
    pub fn requests(&self) -> impl DoubleEndedIterator<Item = (&Request, &[u32])> + ExactSizeIterator {
        (0..self.requests.len()).map(|at| {
            let start = if at == 0 { 0 } else { self.requests[at - 1].end };
            (&self.requests[at], &self.references[start..self.requests[at].end])
        })
    }

    /// Blocks of all requests together.
    pub fn references(&self) -> usize {
        self.references.len()
    }

    /// Different blocks.
    pub fn blocks(&self) -> usize {
        self.names.len()
    }

    /// The hash id of a block.
    pub fn name(&self, block: u32) -> Option<u64> {
        self.names.get(block as usize).copied()
    }

    /// References whose block came after another one before: where there are none, a block stands for its whole
    /// prefix, as in a store.
    pub fn broken_chains(&self) -> u64 {
        self.broken_chains
    }

    /// The block before a block.
    pub(super) fn parent(&self, block: u32) -> Option<usize> {
        self.parents.get(block as usize).filter(|parent| **parent != NONE).map(|parent| *parent as usize)
    }
}

fn wrong(text: String) -> Error {
    Error::new(Code::InvalidArgument, text)
}
