//! Everything that the first transfer with a peer would wait for, made before it.
//!
//! A warm-up waits for a session as a transfer does, and goes on on it: it asks for what is missing, and looks again
//! whenever something of it has come. Nothing is asked of the grant, and no memory is touched.

use crate::engine::Engine;
use crate::inner::{Inner, lock};
use crate::launch::waiting_for;
use crate::select::{Reason, Rejected};
use crate::transfer::{Report, Transfer, TransferOptions};
use kvik_core::{Code, Error, Result, Ticket};
use kvik_host::clock::boottime;
use kvik_proto::Identity;
use kvik_transport::{Transport, TransportId};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

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

/// A warm-up in progress. Dropping it does not end it: its timeout does.
#[derive(Clone)]
pub struct WarmUp {
    transfer: Transfer,
    warm: Arc<WarmUpState>,
}

impl WarmUp {
    /// Whether it has ended.
    pub fn is_done(&self) -> bool {
        self.transfer.is_done()
    }

    /// What came of it, if it has ended.
    pub fn result(&self) -> Option<Result<WarmUpReport>> {
        Some(self.transfer.result()?.map(|report| self.warm.told(report)))
    }

    /// Waits for its end; with `None` as long as its own timeout takes.
    ///
    /// # Errors
    /// Why the peer could not be reached; `WaitTimeout` when `timeout` passes first.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<WarmUpReport> {
        match self.transfer.wait(timeout) {
            Err(error) if error.code == Code::WaitTimeout => {
                let text =
                    "the warm-up had not ended when the wait did; it goes on until its timeout: wait again";
                Err(Error::new(Code::WaitTimeout, text))
            }
            ended => ended.map(|report| self.warm.told(report)),
        }
    }

    /// Ends it. What is open by then stays open.
    pub fn cancel(&self) {
        self.transfer.cancel();
    }

    /// A descriptor that becomes readable at its end, for event loops.
    ///
    /// # Errors
    /// `InvalidArgument` when the process has too many descriptors.
    pub fn done_fd(&self) -> Result<OwnedFd> {
        self.transfer.done_fd()
    }
}

impl Engine {
    /// Opens everything that the first transfer with the ticket's owner would wait for: the session, and of what this
    /// engine's `transport` allows the data channels, the local link and the connection of each NIC here to its NIC
    /// there, with an operation over it. `auto` allows all of them. No page is touched, and of the ticket only the
    /// owner counts: a [`ticket_template`](Engine::ticket_template) does, and so does a ticket whose grant has ended.
    ///
    /// One that finds all of it there does nothing and says so. Several at a time share the work. It does not disturb
    /// transfers. The connections serve this engine's reads and writes alike; for transfers that the peer begins, the
    /// peer warms its own.
    ///
    /// A NIC that reaches none of the peer's is among the report's pairs with the reason, and so is one that has not
    /// when `timeout` (the engine's deadline, if none is given) is over; the others are warm all the same.
    ///
    /// # Errors
    /// Here and from [`WarmUp::wait`]: `InvalidArgument` for a bad timeout; why the owner cannot be reached, or not
    /// over this engine's `transport` (`PeerUnreachable`, `PeerRestarted`, `TransportUnavailable` and others);
    /// `DeadlineExceeded` when its data channels have not joined by then.
    pub fn warm_up(&self, ticket: &Ticket, timeout: Option<Duration>) -> Result<WarmUp> {
        let inner = self.inner();
        inner.check()?;
        let options = TransferOptions { deadline: timeout, ..TransferOptions::default() };
        let owner = Identity { engine: ticket.engine, incarnation: ticket.incarnation };
        let met = owner.engine == self.id() || inner.node(|node, _| node.session_with(&owner)).is_some();
        let warm = Arc::new(WarmUpState { connected: !met, state: Mutex::default() });
        let request =
            crate::launch::TransferRequest { warm: Some(warm.clone()), ..self.request(ticket, &options)? };
        Ok(WarmUp { transfer: self.begin(request, boottime())?, warm })
    }
}

/// How far a warm-up is.
pub(crate) struct WarmUpState {
    connected: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The session for which everything below is.
    session: Option<u64>,
    local: bool,
    /// How many data channels are waited for; none where they are not wanted.
    wanted: Option<u16>,
    channels: u16,
    channels_made: bool,
    /// By number, until each is known.
    pairs: Vec<Option<(usize, PairState)>>,
    /// How many NICs the peer has.
    there: usize,
    names: Vec<String>,
    nics: Option<TransportId>,
}

impl WarmUpState {
    fn told(&self, report: Report) -> WarmUpReport {
        let state = lock(&self.state);
        let known = state.names.iter().zip(&state.pairs).filter_map(|(name, pair)| {
            let (peer_nic, state) = pair.clone()?;
            Some(NicPair { nic: name.clone(), peer_nic, state })
        });
        let pairs: Vec<NicPair> = known.collect();
        let any = |wanted: fn(&PairState) -> bool| pairs.iter().any(|pair| wanted(&pair.state));
        let (made, failed) = (any(|state| matches!(state, PairState::Opened)), |pair: &NicPair| {
            matches!(pair.state, PairState::Failed(_))
        });
        let open = pairs.iter().any(|pair| !failed(pair));
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

    fn is_of(&self, session: u64) -> bool {
        lock(&self.state).session == Some(session)
    }
}

impl State {
    fn channels_are_there(&self) -> bool {
        self.wanted.is_none_or(|wanted| self.channels >= wanted)
    }

    fn is_done(&self) -> bool {
        self.channels_are_there() && self.pairs.iter().all(Option::is_some)
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

impl Inner {
    /// Goes on with a warm-up: asks for what was not asked for, and ends it when all has come.
    pub(crate) fn continue_warm_up(&self, id: u64, session: u64, warm: &WarmUpState, deadline: Duration) {
        // Where both sides connect at once there are two sessions for a while. Transfers take one of them.
        let Some(owner) = lock(&self.tables).links.get(&session).map(|link| link.peer) else { return };
        let session = self.node(|node, _| node.session_with(&owner)).unwrap_or(session);
        if !warm.is_of(session) && self.begin_warm_up(session, warm, self.nics_of(session)) {
            self.open_all(session, Instant::now() + deadline.saturating_sub(boottime()));
        }
        let done = {
            let tables = lock(&self.tables);
            let mut state = lock(&warm.state);
            self.with_transports(|all| state.channels = all.tcp.joined(session));
            // This side's own connection may still come, and be the one that is taken.
            state.is_done() && !tables.dials.contains_key(&owner)
        };
        if done {
            self.finish_unbegun(id, Ok(()));
        }
    }

    /// Asks for all that this engine's transport allows on a session.
    fn open_all(&self, session: u64, until: Instant) {
        match lock(&self.tables).links.get_mut(&session) {
            Some(link) => link.warm = true,
            None => return,
        }
        let allowed = self.transports().iter().filter(|one| self.config.transport.allows(one.id()));
        allowed.for_each(|one| one.warm(session, until));
    }

    /// A new session that takes the place of a warm one, which its peer has opened at the same time, is warmed too.
    pub(crate) fn warm_up_again(&self, session: u64) {
        let warm = {
            let tables = lock(&self.tables);
            let peer = tables.links.get(&session).map(|link| link.peer);
            tables.links.values().any(|link| link.warm && Some(link.peer) == peer)
        };
        if warm {
            self.open_all(session, Instant::now() + self.config.deadline);
        }
    }

    /// How many NICs a session's peer has.
    fn nics_of(&self, session: u64) -> usize {
        self.node(|node, _| node.established(session).map_or(0, |session| session.facts.nics.addresses.len()))
    }

    /// Notes what there is to do on a session; false when somebody else has, or it is gone.
    fn begin_warm_up(&self, session: u64, warm: &WarmUpState, there: usize) -> bool {
        let want = self.config.transport;
        let Some(all) = self.transports.get() else { return false };
        let tables = lock(&self.tables);
        let Some(link) = tables.links.get(&session) else { return false };
        let mut state = lock(&warm.state);
        if state.session == Some(session) {
            return false;
        }
        // Who opened the session opens its channels. How many the other one opens is not known here.
        let wanted = if link.address.is_some() { self.config.channels } else { 1 };
        let reaching: Vec<TransportId> = all.reaching(session).filter(|id| want.allows(*id)).collect();
        let rma = all.rma.as_ref().filter(|rma| reaching.contains(&rma.id()));
        let names = rma.iter().flat_map(|rma| rma.devices()).map(|nic| nic.name().to_owned());
        let names: Vec<String> = names.collect();
        *state = State {
            session: Some(session),
            local: reaching.contains(&TransportId::Local),
            wanted: reaching.contains(&TransportId::Tcp).then_some(wanted),
            channels: all.tcp.joined(session),
            channels_made: !all.tcp.is_asked(session),
            pairs: vec![None; names.len()],
            there,
            names,
            nics: rma.map(|rma| rma.id()),
        };
        true
    }

    /// A NIC here has opened its connection, or cannot.
    pub(crate) fn on_warm_up(&self, session: u64, nic: usize, number: usize, outcome: &Result<bool>) {
        for warm in self.warm_ups(session) {
            let mut state = lock(&warm.state);
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
        self.advance_warm_ups(session);
    }

    /// Something has come that warm-ups of the session may wait for.
    pub(crate) fn advance_warm_ups(&self, session: u64) {
        if !self.warm_ups(session).is_empty() {
            self.launch_waiting(session);
        }
    }

    /// The warm-ups that wait for something of a session.
    fn warm_ups(&self, session: u64) -> Vec<Arc<WarmUpState>> {
        let tables = lock(&self.tables);
        let Some(link) = tables.links.get(&session) else { return Vec::new() };
        let ids = waiting_for(&tables, &link.peer);
        ids.into_iter().filter_map(|id| tables.transfers.get(&id)?.request.warm.clone()).collect()
    }

    /// Ends a warm-up whose time is over, if this is one that has got as far as a session: with what is open, or with
    /// what is not.
    pub(crate) fn warm_up_is_late(&self, id: u64) -> bool {
        let tables = lock(&self.tables);
        let warm = tables.transfers.get(&id).and_then(|entry| entry.request.warm.clone());
        let Some(warm) = warm else { return false };
        let mut state = lock(&warm.state);
        if state.session.is_none_or(|session| !tables.links.contains_key(&session)) {
            return false;
        }
        drop(tables);
        let ended = match state.channels_are_there() {
            true => {
                state.fail_what_is_left();
                Ok(())
            }
            false => {
                let (joined, wanted) = (state.channels, state.wanted.unwrap_or(0));
                let text = format!("{joined} of {wanted} data channels had joined in the time for it");
                Err(Error::new(Code::DeadlineExceeded, text))
            }
        };
        drop(state);
        self.finish_unbegun(id, ended);
        true
    }
}
