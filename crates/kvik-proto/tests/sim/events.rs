//! What nodes say: outcomes that are checked as they come, and memory that goes back to its owner.

use crate::coverage::Fault;
use crate::engine::ms;
use crate::memory::content;
use crate::world::World;
use kvik_core::{Code, GrantId, GrantState, Right, Use};
use kvik_proto::{Event, Finished, Op};

/// After these faults a session may hear what its peer has never said.
const FORGED: u32 = 1 << Fault::Duplicate as u32 | 1 << Fault::Corrupt as u32;

impl World {
    /// Takes what a node has to say.
    pub fn pump(&mut self, at: usize) {
        while let Some(event) = self.engines[at].node.next_event() {
            self.on_event(at, event);
        }
        for session in std::mem::take(&mut self.engines[at].decided) {
            self.check_line(at, session);
        }
        let (mut sessions, mut output) = (Vec::new(), Vec::new());
        self.engines[at].node.take_unsent(&mut sessions);
        for session in sessions {
            self.engines[at].node.session(session).take_output(&mut output);
            let link = self.by_session[&session];
            let side = self.links[link].side(at);
            if !self.links[link].closed[side] {
                self.links[link].control[side].extend(output.drain(..));
                self.busy.insert(link);
            }
            output.clear();
        }
        self.release_kept();
        self.check_engine(at);
    }

    fn on_event(&mut self, at: usize, event: Event) {
        match event {
            Event::Finished(finished) => self.on_finished(at, finished),
            Event::GrantEnded(id, state) => self.on_grant_ended(at, id, state),
            Event::Raise(slot) => self.engines[at].process.raise(slot),
            Event::SessionDown(session, error) => {
                let link = self.by_session[&session];
                assert!(
                    error.code != Code::ProtocolError || self.links[link].faults & FORGED != 0,
                    "engine {at} ended session {session} for what its peer said, and nobody had forged it: {error}"
                );
                let side = self.links[link].side(at);
                self.links[link].closed[side] = true;
                self.links[link].channels.cut(side);
                self.engines[at].heard.remove(&session);
                self.engines[at].decided.push(session);
                self.busy.insert(link);
            }
            Event::Fence(session) => {
                assert!(
                    self.engines[at].node.established(session).is_none(),
                    "a fence was asked for a live session"
                );
                self.fences.push((at, session));
            }
            Event::Copy => self.engines[at].copies = true,
            Event::Send(session) => {
                self.ensure_channels(at, session);
                self.busy.insert(self.by_session[&session]);
            }
            Event::OpenChannels(session) => self.on_open_channels(at, session),
            Event::Post(session) => _ = self.busy.insert(self.by_session[&session]),
            Event::Reach(session, call) => self.on_reach(at, session, &call),
            Event::Reached(session, answer) => self.on_reached(at, session, answer.from),
            Event::Served(_) | Event::Stop(_) | Event::Ending(..) | Event::NicsMoved(_) => {}
            Event::Silent(_) | Event::Heard(_) | Event::Goodbye(_) | Event::Left(_) | Event::Exposed => {}
            Event::Notified(note) => self.on_notified(at, note),
            Event::NoteEnded { session, topic, number, outcome } => {
                self.on_note_ended(at, session, (topic, number), outcome);
            }
            Event::NoteRoom(session) => self.on_note_room(at, session),
        }
    }

    fn on_finished(&mut self, at: usize, finished: Finished) {
        let index = self.engines[at].open.remove(&finished.key).expect("P2: a transfer ended twice");
        let code = finished.outcome.as_ref().err().map(|error| error.code);
        let begun = &mut self.begun[index];
        begun.outcome = Some(finished.outcome.as_ref().map_err(|error| error.code).copied());
        let begun = &self.begun[index];
        self.coverage.count(code.map_or("ok", Code::name));
        match code {
            None => self.check_success(index, finished.bytes),
            Some(code) => self.check_failure(index, code),
        }
        if let Some(arena) = begun.arena.clone() {
            match code {
                Some(Code::PagesQuarantined) => self.kept.push((at, arena, begun.lease)),
                _ => self.release(at, &arena, begun.lease),
            }
        }
    }

    fn on_grant_ended(&mut self, at: usize, id: GrantId, state: GrantState) {
        let index = self.by_grant[&id];
        let ticket = &mut self.tickets[index];
        assert!(ticket.state.is_none(), "grant {id} ended twice");
        ticket.state = Some(state);
        if !ticket.ready {
            ticket.make_ready();
        }
        self.engines[at].given.retain(|other| *other != index);
        let last = ticket.arena.snapshot();
        if ticket.right == Right::Read {
            let now = ticket.arena.peek(&ticket.view, 0..ticket.view.bytes());
            assert!(
                now == content(ticket.seed, &ticket.view),
                "P2: bytes came into pages that were only read"
            );
        }
        ticket.last = Some(last);
        let (arena, lease, again) = (ticket.arena.clone(), ticket.lease, ticket.again);
        if state == GrantState::Consumed
            && let Use::Once(n) = ticket.uses
        {
            let users = self.begun.iter().filter(|begun| begun.ticket == index && begun.confirm);
            let users: std::collections::BTreeSet<usize> = users.map(|begun| begun.engine).collect();
            assert!(users.len() >= n as usize, "P4: grant {id} was used up by {} of {n}", users.len());
        }
        self.release(at, &arena, lease);
        if again {
            let ticket = self.regrant(index);
            self.issue(ticket, ms(60_000));
            self.regrants += 1;
        }
    }

    /// A read's bytes are here, a write's there, in place.
    fn check_success(&self, index: usize, bytes: u64) {
        let begun = &self.begun[index];
        let ticket = &self.tickets[begun.ticket];
        assert!(
            begun.fits,
            "P5: a transfer that stated other content than the grant holds is a success: {index}"
        );
        if let Some(why) = begun.hopeless {
            panic!("P4: a transfer on a grant that was {why:?} before it began is a success: {index}");
        }
        let (Some(mine), Some(theirs), Some(arena)) = (&begun.view, &begun.theirs, &begun.arena) else {
            return;
        };
        assert_eq!(bytes, theirs.bytes());
        match begun.op {
            Op::Read => {
                let got = arena.peek(mine, 0..mine.bytes());
                assert!(got == content(ticket.seed, theirs), "P1, P5: a read's success with other bytes");
            }
            _ => {
                let got = match &ticket.last {
                    Some(last) => crate::memory::pick(last, theirs),
                    None => ticket.arena.peek(theirs, 0..theirs.bytes()),
                };
                assert!(got == content(ticket.seed ^ 1, theirs), "P1: a write's success with other bytes");
            }
        }
    }

    /// A request on an ended grant is told how it ended, or nothing that would say otherwise: its session may have
    /// ended before, also for what the adversary did to another transfer's chunks.
    fn check_failure(&self, index: usize, code: Code) {
        let begun = &self.begun[index];
        let other = matches!(code, Code::ContentMismatch | Code::ContentRequired | Code::InvalidArgument);
        assert!(!(other && begun.fits), "P5: {code} for who stated what the grant holds");
        let expected = match begun.hopeless {
            Some(GrantState::Consumed) => Code::GrantConsumed,
            Some(GrantState::Expired) => Code::GrantExpired,
            Some(GrantState::Revoked) => Code::GrantRevoked,
            Some(GrantState::Closed) => Code::RegionClosed,
            Some(GrantState::Live) | None => return,
        };
        let own = [
            Code::PeerLost,
            Code::ProtocolError,
            Code::DeadlineExceeded,
            Code::Cancelled,
            Code::TransportUnavailable,
        ];
        assert!(code == expected || own.contains(&code), "P4: {code:?} for a grant that was {expected:?}");
    }
}
