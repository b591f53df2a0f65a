//! Traces from a seed, of several kinds of load, so that no policy is judged by one trace.

use super::trace::Trace;
use kvik_core::Result;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Tokens of a block, as in the traces of Mooncake.
const BLOCK_TOKENS: u64 = 512;

/// A kind of load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// Conversations that grow turn by turn, with pauses of a minute or so; groups of them share a system prompt.
    Conversations,
    /// Agents: long prefixes that many runs have in common, and runs of many short steps without pauses.
    Agents,
    /// Prompts that come once, between documents that come again and again, some much more often than others.
    OneOff,
    /// Conversations, and from the middle on agents and prompts that come once.
    Shift,
    /// Conversations, and every so often a job that goes through the same long list of documents.
    Scan,
}

impl Workload {
    /// Every kind.
    pub const ALL: [Workload; 5] =
        [Workload::Conversations, Workload::Agents, Workload::OneOff, Workload::Shift, Workload::Scan];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Workload::Conversations => "conversations",
            Workload::Agents => "agents",
            Workload::OneOff => "one-off",
            Workload::Shift => "shift",
            Workload::Scan => "scan",
        }
    }
}

/// A trace of so many requests; the same seed gives the same trace.
///
/// # Errors
/// `InvalidArgument` where the trace would have more blocks than a [`Trace`] can.
pub fn generate(workload: Workload, requests: usize, seed: u64) -> Result<Trace> {
    let mut generator =
        Generator { random: Random(seed), fresh: 0, waiting: BinaryHeap::new(), started: 0, scanned: 0 };
    let shared = Shared::new(&mut generator);
    let mut trace = Trace::default();
    let (mut now, mut number) = (0, 0);
    while number < requests {
        now += generator.random.pause(ARRIVAL_MS);
        generator.started += 1;
        let session = generator.start(&shared, workload, number * 2 >= requests, now);
        generator.waiting.push(Reverse(session));
        while generator.waiting.peek().is_some_and(|Reverse(next)| next.at <= now) && number < requests {
            let Some(Reverse(mut session)) = generator.waiting.pop() else { break };
            let tokens = session.blocks.len() as u64 * BLOCK_TOKENS;
            trace.push(session.at, tokens, BLOCK_TOKENS / 2, &session.blocks)?;
            number += 1;
            if session.steps > 0 {
                session.steps -= 1;
                session.at += generator.random.pause(session.pause_ms);
                let more = generator.random.about(session.growth);
                generator.extend(&mut session.blocks, more);
                generator.waiting.push(Reverse(session));
            }
        }
    }
    Ok(trace)
}

/// Milliseconds between two sessions that start, on average.
const ARRIVAL_MS: u64 = 1000;

/// What sessions have in common: prefixes, the first one used most.
struct Shared {
    system_prompts: Vec<Vec<u64>>,
    agents: Vec<Vec<u64>>,
    documents: Vec<Vec<u64>>,
    scanned: Vec<Vec<u64>>,
}

impl Shared {
    fn new(generator: &mut Generator) -> Shared {
        let mut several = |count: usize, blocks: u64| -> Vec<Vec<u64>> {
            (0..count).map(|_| generator.fresh_blocks(blocks)).collect()
        };
        Shared {
            system_prompts: several(20, 3),
            agents: several(60, 40),
            documents: several(2000, 12),
            scanned: several(600, 20),
        }
    }
}

/// A series of requests, each one longer than the one before. Ordered by time; `number` makes the order full.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Session {
    at: u64,
    number: u64,
    blocks: Vec<u64>,
    steps: u64,
    growth: u64,
    pause_ms: u64,
}

struct Generator {
    random: Random,
    /// The next hash id that nobody has.
    fresh: u64,
    /// Sessions with their next request.
    waiting: BinaryHeap<Reverse<Session>>,
    /// Sessions that have started.
    started: u64,
    /// Documents that the job has been through.
    scanned: usize,
}

impl Generator {
    fn start(&mut self, shared: &Shared, workload: Workload, second_half: bool, at: u64) -> Session {
        let chance = self.random.below(100);
        match workload {
            Workload::Shift if second_half && chance < 30 => self.agent(shared, at),
            Workload::Agents if chance < 60 => self.agent(shared, at),
            Workload::OneOff if chance < 30 => self.document(shared, at),
            Workload::Scan if chance < 30 => self.scan(shared, at),
            Workload::Conversations | Workload::Scan => self.conversation(shared, at),
            Workload::Shift if !second_half => self.conversation(shared, at),
            _ => self.session(Vec::new(), 20, 0, 0, 0, at),
        }
    }

    fn conversation(&mut self, shared: &Shared, at: u64) -> Session {
        let prompt = self.random.pick(&shared.system_prompts).clone();
        let turns = self.random.about(4) - 1;
        self.session(prompt, 8, turns, 3, 60_000, at)
    }

    fn agent(&mut self, shared: &Shared, at: u64) -> Session {
        let prefix = self.random.pick(&shared.agents).clone();
        let steps = self.random.about(12);
        self.session(prefix, 4, steps, 2, 5_000, at)
    }

    /// A question about a document.
    fn document(&mut self, shared: &Shared, at: u64) -> Session {
        let document = self.random.pick(&shared.documents).clone();
        self.session(document, 1, 0, 0, 0, at)
    }

    /// The next document of the list.
    fn scan(&mut self, shared: &Shared, at: u64) -> Session {
        let document = shared.scanned[self.scanned % shared.scanned.len()].clone();
        self.scanned += 1;
        self.session(document, 1, 0, 0, 0, at)
    }

    /// A session that starts with `prefix` and about `own` blocks of its own.
    fn session(
        &mut self,
        prefix: Vec<u64>,
        own: u64,
        steps: u64,
        growth: u64,
        pause_ms: u64,
        at: u64,
    ) -> Session {
        let mut blocks = prefix;
        let own = self.random.about(own);
        self.extend(&mut blocks, own);
        Session { at, number: self.started, blocks, steps, growth, pause_ms }
    }

    fn fresh_blocks(&mut self, about: u64) -> Vec<u64> {
        let (count, mut blocks) = (self.random.about(about), Vec::new());
        self.extend(&mut blocks, count);
        blocks
    }

    fn extend(&mut self, blocks: &mut Vec<u64>, count: u64) {
        blocks.extend(self.fresh..self.fresh + count);
        self.fresh += count;
    }
}

/// splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Evenly from 0 to `bound`, without it.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Above 0, at most 1.
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// At least 1, `mean` on average, many small and a few large ones (exponential).
    fn about(&mut self, mean: u64) -> u64 {
        1 + (-self.unit().ln() * (mean.max(1) - 1) as f64) as u64
    }

    /// Milliseconds to the next event of a Poisson process.
    fn pause(&mut self, mean_ms: u64) -> u64 {
        (-self.unit().ln() * mean_ms as f64) as u64
    }

    /// One of several, the n-th with a weight of about 1/n (Zipf).
    fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        let at = ((all.len() + 1) as f64).powf(self.unit()) as usize;
        &all[at.clamp(1, all.len()) - 1]
    }
}

/// Spreads a number over 64 bits (the last step of splitmix64).
pub(crate) fn mix(number: u64) -> u64 {
    let mut spread = number;
    spread = (spread ^ (spread >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    spread = (spread ^ (spread >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    spread ^ (spread >> 31)
}
