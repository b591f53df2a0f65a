//! How far a warm-up is, and its report.

use crate::report::Report;
use crate::select::{Reason, Rejected};
use crate::sync::lock;
use kvik_core::{Code, Error, Result};
use kvik_transport::TransportId;
use std::sync::Mutex;
use std::time::Duration;

/// What became of the connection from a NIC here to one of the peer.
#[derive(Debug, Clone)]
pub enum PairState {
    /// It was opened by this call, or by one at the same time.
    Opened,
    /// It was open, and something had gone over it.
    AlreadyOpen,
    /// It is not open, and why. Transfers leave its work to other NICs.
    Failed(Error),
}

impl PairState {
    /// The word for it.
    pub fn name(&self) -> &'static str {
        match self {
            PairState::Opened => "opened",
            PairState::AlreadyOpen => "already_open",
            PairState::Failed(_) => "failed",
        }
    }
}

/// A NIC here, and the one of the peer that it reads from and writes to.
#[derive(Debug, Clone)]
pub struct NicPair {
    /// The device here.
    pub nic: String,
    /// The number of the peer's NIC.
    pub peer_nic: usize,
    /// What became of it.
    pub state: PairState,
}

/// What a warm-up found and made.
#[derive(Debug, Clone)]
pub struct WarmUpReport {
    /// Whether there was no session with the peer before.
    pub connected: bool,
    /// What transfers can go over at once.
    pub transports: Vec<TransportId>,
    /// Those of them for which something was opened now.
    pub made: Vec<TransportId>,
    /// Data channels that have joined.
    pub channels: u16,
    /// One for each NIC here, where the peer has NICs of the same provider.
    pub pairs: Vec<NicPair>,
    /// Transports that do not serve transfers with this peer, each with its reason.
    pub rejected_transports: Vec<Rejected>,
    /// How long it took.
    pub took: Duration,
}

impl WarmUpReport {
    /// Whether everything was there already.
    pub fn did_nothing(&self) -> bool {
        !self.connected && self.made.is_empty() && self.failed().next().is_none()
    }

    /// The pairs that could not be opened.
    pub fn failed(&self) -> impl Iterator<Item = &NicPair> {
        self.pairs.iter().filter(|pair| matches!(pair.state, PairState::Failed(_)))
    }
}

/// How far a warm-up is.
pub(crate) struct WarmUpState {
    connected: bool,
    state: Mutex<State>,
}

/// What there is to do on a session, and what has come of it.
#[derive(Default)]
pub(crate) struct State {
    /// The session for which everything below is.
    pub session: Option<u64>,
    pub local: bool,
    /// How many data channels are waited for; none where they are not wanted.
    pub wanted: Option<u16>,
    pub channels: u16,
    pub channels_made: bool,
    /// By number, until each is known.
    pub pairs: Vec<Option<(usize, PairState)>>,
    /// How many NICs the peer has.
    pub there: usize,
    pub names: Vec<String>,
    pub nics: Option<TransportId>,
}

impl WarmUpState {
    pub fn new(connected: bool) -> WarmUpState {
        WarmUpState { connected, state: Mutex::default() }
    }

    pub fn told(&self, report: Report) -> WarmUpReport {
        let state = lock(&self.state);
        let known = state.names.iter().zip(&state.pairs).filter_map(|(name, pair)| {
            let (peer_nic, state) = pair.clone()?;
            Some(NicPair { nic: name.clone(), peer_nic, state })
        });
        let pairs: Vec<NicPair> = known.collect();
        let made = pairs.iter().any(|pair| matches!(pair.state, PairState::Opened));
        let open = pairs.iter().any(|pair| !matches!(pair.state, PairState::Failed(_)));
        let own = report.transport == TransportId::Own;
        let all = [
            (Some(TransportId::Own), own, false),
            (Some(TransportId::Local), state.local, self.connected),
            (state.nics, open, made),
            (Some(TransportId::Tcp), state.wanted.is_some(), state.channels_made),
        ];
        let there = all.into_iter().filter(|(_, there, _)| *there);
        let there = there.filter_map(|(id, _, made)| Some((id?, made)));
        let mut rejected_transports = report.rejected_transports;
        rejected_transports.retain(|one| matches!(one.reason, Reason::Unavailable(_)));
        WarmUpReport {
            connected: self.connected,
            transports: there.clone().map(|(id, _)| id).collect(),
            made: there.filter(|(_, made)| *made).map(|(id, _)| id).collect(),
            channels: state.channels,
            pairs,
            rejected_transports,
            took: report.total,
        }
    }

    /// The session on which it goes on.
    pub fn session(&self) -> Option<u64> {
        lock(&self.state).session
    }

    /// Goes on on another session; false when it does so already.
    pub fn begin(&self, begun: State) -> bool {
        let mut state = lock(&self.state);
        let new = state.session != begun.session;
        if new {
            *state = begun;
        }
        new
    }

    /// So many data channels have joined: whether all has come.
    pub fn joined(&self, channels: u16) -> bool {
        let mut state = lock(&self.state);
        state.channels = channels;
        state.channels_are_there() && state.pairs.iter().all(Option::is_some)
    }

    /// A NIC here has opened its connection to one of the peer, or cannot.
    pub fn note_pair(&self, session: u64, nic: usize, number: usize, outcome: &Result<bool>) {
        let mut state = lock(&self.state);
        if state.session == Some(session)
            && let Some(pair @ None) = state.pairs.get_mut(nic)
        {
            let state = match outcome {
                Ok(true) => PairState::Opened,
                Ok(false) => PairState::AlreadyOpen,
                Err(error) => PairState::Failed(error.clone()),
            };
            *pair = Some((number, state));
        }
    }

    /// Its time is over: it ends with what is open, or with what is not.
    pub fn end_late(&self) -> Result<()> {
        let mut state = lock(&self.state);
        if state.channels_are_there() {
            state.fail_what_is_left();
            return Ok(());
        }
        let (joined, wanted) = (state.channels, state.wanted.unwrap_or(0));
        let text = format!("{joined} of {wanted} data channels had joined in the time for it");
        Err(Error::new(Code::DeadlineExceeded, text))
    }
}

impl State {
    fn channels_are_there(&self) -> bool {
        self.wanted.is_none_or(|wanted| self.channels >= wanted)
    }

    /// Pairs of which nothing was heard in time.
    fn fail_what_is_left(&mut self) {
        for (number, pair) in self.pairs.iter_mut().enumerate().filter(|(_, pair)| pair.is_none()) {
            let (name, there) = (&self.names[number], number % self.there.max(1));
            let text = format!("NIC {name} had no answer from NIC {there} of the peer in the time for it");
            *pair = Some((there, PairState::Failed(Error::new(Code::DeadlineExceeded, text))));
        }
    }
}
