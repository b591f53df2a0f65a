//! What all servers of a store hold, by asking each of them for a list of its blocks.
//!
//! Invariants:
//! - All of it ends by one deadline. A server that does not answer costs what it would have told, and no other one's.
//! - At most twice as many copies of blocks are held as were asked for, each in [`ROW_BYTES`](join::ROW_BYTES). Where there are more, a part of the
//!   blocks is looked at, the same ones at every server, and figures are multiplied.
//! - Nothing is read, touched or changed at the servers.

pub(crate) mod join;
mod look;

use crate::client::{Client, Stores};
use crate::link::Link;
use crate::placement::Lot;
use crate::wire::scan::{MAX_ORDER, MAX_SERVERS};
use join::Rows;
use kvik_core::{Code, Error, Result};
use look::{Described, Look};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Copies of a block that are looked for where nobody has said how many there should be.
const MOST_GUESSED: usize = 4;

/// How a store is looked at.
#[derive(Debug, Clone)]
pub struct SurveyOptions {
    /// How many servers keep each block, as its clients have it. None: it is concluded from what is there.
    pub copies: Option<usize>,
    /// Copies of blocks to hold of all servers together; where there are more, a sample is looked at.
    pub most: usize,
    /// For all of it.
    pub deadline: Duration,
}

impl Default for SurveyOptions {
    fn default() -> SurveyOptions {
        SurveyOptions { copies: None, most: 4 << 20, deadline: Duration::from_secs(10) }
    }
}

/// A number of blocks, and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// Blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// What a store holds.
#[derive(Debug, Clone, Default)]
pub struct Survey {
    /// Its servers, in the order of the client's list.
    pub servers: Vec<ServerSurvey>,
    /// One block in so many was looked at, and figures of blocks were multiplied by it.
    pub sample: u64,
    /// Copies of blocks that were looked at.
    pub rows: u64,
    /// How many servers are to keep each block: what was asked for, or what was concluded.
    pub copies: usize,
    /// Different blocks, by how many copies are where clients look for them: none, one, and so on.
    pub by_copies: Vec<Amount>,
    /// Different blocks that have fewer copies than `copies` where clients look for them.
    pub short: Amount,
    /// Those of them whose missing copies may be on servers that were not looked at.
    pub short_unseen: Amount,
    /// What blocks are of.
    pub namespaces: Vec<NamespaceSurvey>,
    /// The segments in which blocks are placed.
    pub segments: Segments,
}

/// What came of looking at a server.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Looked {
    /// All of its blocks were looked at.
    #[default]
    Whole,
    /// It stopped to answer, or time was up: some were.
    Part(Error),
    /// It is of a kvik that cannot list its blocks.
    Older(Error),
    /// It does not answer.
    Down(Error),
}

/// One server.
#[derive(Debug, Clone, Default)]
pub struct ServerSurvey {
    /// What clients call it.
    pub name: String,
    /// What came of looking at it.
    pub looked: Looked,
    /// The version of kvik that it is of; empty where it was not said.
    pub version: String,
    /// Its figures, in the Prometheus text format; none where they did not come.
    pub metrics: Option<String>,
    /// Blocks that it has.
    pub held: Amount,
    /// Those in memory, in the log and in the object store; one may be in several.
    pub tiers: [Amount; 3],
    /// Those that lie where no client looks for them.
    pub stray: Amount,
    /// Those of which it is not known where clients look: they are so deep in a prompt that this was not found out.
    pub unplaced: Amount,
    /// Different blocks, wherever they are, that clients look for here.
    pub owed: Amount,
    /// Those of them that are not here.
    pub lacking: Amount,
    /// Blocks in memory that would be gone with it: no other copy is where clients look.
    pub lost: Amount,
    /// Blocks that would be away until it is started again: the same of those in its log or its part of the object store.
    pub away: Amount,
}

/// What blocks are of.
#[derive(Debug, Clone, Default)]
pub struct NamespaceSurvey {
    /// The first bytes of its id.
    pub id: u64,
    /// Whose it is.
    pub tenant: String,
    /// The model's name and revision, cut off where they are long.
    pub model: String,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Different blocks.
    pub held: Amount,
    /// All copies of them.
    pub copies: Amount,
}

/// Segments, by which blocks are placed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Segments {
    /// How many were seen.
    pub count: u64,
    /// Different blocks in them.
    pub blocks: u64,
    /// The sum of the squares of the blocks of each: by it, how much hashing alone scatters.
    pub squares: f64,
    /// Blocks of the largest one.
    pub largest: u64,
}

impl Client {
    /// Looks at what all servers hold. Who has answered by the deadline is in it, also where others have not.
    ///
    /// # Errors
    /// `InvalidArgument` for a number of copies that there cannot be; the machine gives no threads.
    pub fn survey(&self, options: &SurveyOptions) -> Result<Survey> {
        let until = Instant::now() + options.deadline;
        let servers = self.links();
        let order = check(options, servers.len())?;
        // Who has not answered in half of the time leaves the other half for the blocks of those who have.
        let described = look::describe(&servers, Instant::now() + options.deadline / 2)?;
        let power = sample(&described, options.most);
        let rows = Arc::new(Mutex::new(Rows::new(power, options.most, (servers.len(), order))));
        let lots = match servers.len() {
            2.. => servers.iter().map(|(name, _)| Lot::of(name)).collect(),
            _ => Vec::new(),
        };
        let look = Look { until, power, order: order as u8, lots, rows: rows.clone() };
        let looked = look::scan(&servers, &described, &look)?;
        let rows = std::mem::take(&mut *rows.lock().unwrap_or_else(PoisonError::into_inner));
        let servers = servers.into_iter().zip(described).zip(looked);
        let server = |(((name, _), described), looked): ((_, Described), _)| ServerSurvey {
            name,
            looked,
            version: described.version,
            metrics: described.metrics,
            ..ServerSurvey::default()
        };
        Ok(rows.join(servers.map(server).collect(), options.copies))
    }

    /// The servers, by what clients call them, and the way to each.
    fn links(&self) -> Vec<(String, Link)> {
        match &self.inner.stores {
            Stores::One(link) => {
                let name = match link {
                    Link::Embedded(..) => "embedded".to_owned(),
                    Link::Remote(remote) => remote.address().to_owned(),
                };
                vec![(name, link.clone())]
            }
            Stores::Many(cluster) => {
                let members = cluster.members();
                members.all.iter().map(|member| (member.name().to_owned(), member.link.clone())).collect()
            }
        }
    }
}

/// How many servers are named of each segment.
fn check(options: &SurveyOptions, servers: usize) -> Result<usize> {
    let wrong = |text| Err(Error::new(Code::InvalidArgument, text));
    match options.copies {
        _ if servers > MAX_SERVERS => wrong(format!("{servers} servers: {MAX_SERVERS} are the most")),
        Some(copies) if copies == 0 || copies > MAX_ORDER => {
            wrong(format!("{copies} copies of a block: a store keeps from 1 to {MAX_ORDER}"))
        }
        Some(copies) => Ok(copies.min(servers)),
        None => Ok(MOST_GUESSED.min(servers)),
    }
}

/// The power of 2 that says which blocks are looked at, so that no more than so many are.
fn sample(described: &[Described], most: usize) -> u32 {
    let blocks = described.iter().map(|one| one.blocks).fold(0, u64::saturating_add);
    (0..40).find(|power| blocks >> power <= most as u64).unwrap_or(40)
}
