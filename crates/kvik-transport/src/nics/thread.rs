//! A thread of NICs: when it sleeps, and which of them has its turn.
//!
//! A NIC has a turn when it was told something, when its descriptor tells of something, and when its own time for the
//! next one has come; a NIC with none of these is not looked at. All that are ready have one turn each before any of
//! them has another, and what one does in a turn is bounded by its queue: so a busy one holds nobody up for longer. Who
//! claims work goes behind the others, and claims one batch a turn: so they share a transfer, as NICs with threads of
//! their own do by chance.
//!
//! A thread that cannot wait any more puts its NICs out of use, and looks now and then at what they are told: they end their
//! work by name, and cut off peers as ever.

use super::device::RmaDevice;
use super::inbox::{Command, TOLD, Waker};
use super::worker::Worker;
use kvik_core::{Code, Error};
use kvik_host::event::Events;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// See the module's text.
pub(super) struct NicThread<C: RmaDevice> {
    waker: Arc<Waker>,
    /// By their places; None where one has ended.
    nics: Vec<Option<Worker<C>>>,
    /// The place whose turn comes first.
    first: usize,
    /// Why it cannot wait for anything.
    blind: Option<Error>,
}

/// How often one that cannot wait looks.
const LOOK: Duration = Duration::from_millis(10);

impl<C: RmaDevice> NicThread<C> {
    pub fn new(waker: Arc<Waker>, nics: impl Iterator<Item = Worker<C>>) -> NicThread<C> {
        NicThread { waker, nics: nics.map(Some).collect(), first: 0, blind: None }
    }

    /// Serves the NICs until the last one was told to end.
    pub fn run(&mut self) {
        let (mut events, mut commands) = (Events::new(1 + self.nics.len()), Vec::new());
        while let Some(due) = self.nics.iter().flatten().map(|nic| nic.due).min() {
            let wait = due.saturating_duration_since(Instant::now());
            let (mut told, mut ready) = (0, 0);
            if let Err(error) = self.waker.epoll.wait(&mut events, wait) {
                let text = format!(
                    "its thread cannot wait any more ({error}): something in this process has closed a descriptor of \
                     kvik's; restart the process"
                );
                self.blind = Some(Error::new(Code::PeerLost, text));
                std::thread::sleep(wait.min(LOOK));
                told = u32::MAX;
            }
            for event in events.iter() {
                match event.token {
                    TOLD => told = self.waker.take(),
                    at => ready |= 1 << at,
                }
            }
            let (now, first, all) = (Instant::now(), self.first, self.nics.len());
            for at in (first..all).chain(0..first) {
                let is_in = |which: u32| which >> at & 1 == 1;
                if is_in(told | ready) || self.nics[at].as_ref().is_some_and(|nic| nic.due <= now) {
                    self.turn(at, is_in(told), &mut commands);
                }
            }
        }
    }

    /// One NIC's. A panic in it puts this one out of use, and no other; a second one ends it.
    fn turn(&mut self, at: usize, told: bool, commands: &mut Vec<Command>) {
        let slot = &mut self.nics[at];
        let Some(nic) = slot else { return };
        let was_broken = nic.broken.is_some();
        let mut goes_on = catch_unwind(AssertUnwindSafe(|| {
            if let Some(why) = self.blind.as_ref().filter(|_| !was_broken) {
                nic.device_failed(why.clone());
            }
            nic.turn(told, commands)
        }));
        if goes_on.is_err() && !was_broken {
            goes_on = catch_unwind(AssertUnwindSafe(|| {
                let text = "its thread panicked, which is a fault of kvik; restart the process";
                nic.device_failed(Error::new(Code::PeerLost, text));
                nic.turn(false, commands)
            }));
        }
        // It is not polled any more, and what it has would wake the thread again and again.
        if nic.broken.is_some()
            && !was_broken
            && self.blind.is_none()
            && let Err(error) = self.waker.epoll.delete(&*nic.epoll)
        {
            log::error!("NIC {} ({}) goes on to wake its thread: {error}", nic.number, nic.stats.name());
        }
        if matches!(goes_on, Ok(true)) {
            if nic.took {
                self.first = (at + 1) % self.nics.len();
            }
            return;
        }
        commands.clear();
        let (number, stats) = (nic.number, nic.stats.clone());
        let closed = catch_unwind(AssertUnwindSafe(|| drop(slot.take())));
        if goes_on.is_err() || closed.is_err() {
            stats.set_up(false);
            log::error!(
                "NIC {number} ({}) panicked, and what it had in flight stays held; restart the process",
                stats.name()
            );
        }
    }
}
