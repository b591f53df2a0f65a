//! Grants, transfers, and callers that come behind what a stream of the program's has been given.
//!
//! Pages of a device may still be written, or read, by kernels that were launched and have not run. So a grant or a
//! transfer can name the stream of those kernels: a mark is put there at the call, and nothing of the pages is read or
//! written before it is reached. A caller can wait for a mark, too. The thread `kvik-order`, started with the first of them, hears of that from the device;
//! it asks the device, and so neither a caller nor the control thread waits for its driver.

use crate::base::Base;
use crate::end::End;
use crate::sync::{lock, signal};
use crate::transfers::Transfers;
use kvik_core::{Code, Error, GrantId, GrantState, Result};
use kvik_host::HostError;
use kvik_host::device::{CallerStream, Device, DeviceMark, DeviceStream};
use kvik_host::event::{EventFd, Interest, wait_ready};
use kvik_host::thread::spawn_named;
use kvik_transport::{RegionMemory, from_host};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often the thread looks by itself whether a mark is reached: nothing but a guard, the driver tells.
const LOOK: Duration = Duration::from_millis(50);
/// While nothing waits.
const LONG: Duration = Duration::from_secs(3600);
/// Bytes of the buffer that each stream has: these copy nothing.
const ROOM: usize = 8;

/// What goes on once its mark is reached.
#[derive(Clone)]
pub(crate) enum Then {
    /// The grant is ready.
    Ready(GrantId),
    /// The transfer begins; within this engine once its grant is ready, too.
    Begin(u64, Option<GrantId>),
    /// Who waits for the mark hears of it.
    Tell(Arc<End<()>>),
}

/// See the module's text.
pub(crate) struct StreamOrder {
    base: Arc<Base>,
    transfers: Arc<Transfers>,
    state: Mutex<State>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct State {
    /// What tells the thread.
    flag: Option<Arc<EventFd>>,
    /// One of each device, which the driver's callbacks come from.
    streams: Vec<Box<dyn DeviceStream>>,
    waiting: Vec<Waiting>,
    over: bool,
}

struct Waiting {
    mark: Box<dyn DeviceMark>,
    then: Then,
    /// Transfers of this engine that are to have the grant.
    behind: Vec<u64>,
}

impl Waiting {
    fn readies(&self, grant: GrantId) -> bool {
        matches!(self.then, Then::Ready(id) if id == grant)
    }
}

impl StreamOrder {
    pub fn new(base: Arc<Base>, transfers: Arc<Transfers>) -> Arc<StreamOrder> {
        Arc::new(StreamOrder { base, transfers, state: Mutex::default(), thread: Mutex::default() })
    }

    /// Goes on with a grant or a transfer over this memory when the stream has done what it was given so far. If that
    /// fails, the grant is taken back, and the transfer fails.
    ///
    /// # Errors
    /// `InvalidArgument`: the memory is the host's, or no thread can be started; `DeviceFailed`: the driver refuses it;
    /// `EngineClosed`.
    pub fn go_on_after(
        self: &Arc<Self>,
        stream: CallerStream,
        memory: &RegionMemory,
        then: Then,
    ) -> Result<()> {
        let device = memory.device().ok_or_else(|| {
            let text = "the pages lie in the host's memory, which no stream orders: leave `after` out, and wait for \
                        what writes them";
            Error::new(Code::InvalidArgument, text)
        })?;
        let flag = self.flag()?;
        let state = &mut *lock(&self.state);
        if state.over {
            return Err(Error::new(Code::EngineClosed, "the engine was closed"));
        }
        let failed = |error| from_host(Code::DeviceFailed, error);
        let own = own_stream(&mut state.streams, device).map_err(failed)?;
        let mark = own.mark_of(stream, &flag).map_err(failed)?;
        state.waiting.push(Waiting { mark, then, behind: Vec::new() });
        if state.waiting.len() == 1 {
            flag.signal().map_err(failed)?;
        }
        Ok(())
    }

    /// Tells when the stream has done what it was given so far.
    ///
    /// # Errors
    /// As for [`StreamOrder::go_on_after`].
    pub fn mark(self: &Arc<Self>, stream: CallerStream, memory: &RegionMemory) -> Result<Arc<End<()>>> {
        let end = Arc::new(End::default());
        self.go_on_after(stream, memory, Then::Tell(end.clone()))?;
        Ok(end)
    }

    /// Whether a grant of this engine waits for its stream.
    pub fn is_waiting(&self, grant: GrantId) -> bool {
        lock(&self.state).waiting.iter().any(|one| one.readies(grant))
    }

    /// A transfer within this engine, whose request cannot wait at the owner, begins once the stream of its grant is
    /// there. False where that waits for none any more.
    pub fn waits_for(&self, grant: GrantId, transfer: u64) -> bool {
        let mut state = lock(&self.state);
        let one = state.waiting.iter_mut().find(|one| one.readies(grant));
        one.map(|one| one.behind.push(transfer)).is_some()
    }

    /// The flag; with the first one the thread is started.
    fn flag(self: &Arc<Self>) -> Result<Arc<EventFd>> {
        let mut thread = lock(&self.thread);
        if let Some(flag) = &lock(&self.state).flag {
            return Ok(flag.clone());
        }
        let failed = |error| from_host(Code::InvalidArgument, error);
        let flag = Arc::new(EventFd::new().map_err(failed)?);
        let (this, told) = (self.clone(), flag.clone());
        let run = move || this.run(&told);
        *thread = Some(spawn_named("kvik-order", &self.base.thread_options(), run).map_err(failed)?);
        let mut state = lock(&self.state);
        state.flag = Some(flag.clone());
        if state.over {
            // Who has ended it meanwhile found no flag.
            signal(&flag, "the thread that waits for streams of devices");
        }
        Ok(flag)
    }

    fn run(&self, flag: &EventFd) {
        let mut limit = LONG;
        loop {
            if let Err(error) = wait_ready(flag, Interest::READ, limit).and_then(|_| flag.drain()) {
                log::error!("what waits for streams of devices goes on by a look every {LOOK:?}: {error}");
                std::thread::sleep(LOOK);
            }
            let mut state = lock(&self.state);
            if state.over {
                return;
            }
            let mut waiting = state.waiting.iter_mut().enumerate();
            let reached = waiting.find_map(|(place, one)| match one.mark.is_reached() {
                Ok(false) => None,
                outcome => Some((place, one.then.clone(), outcome.map(|_| ()))),
            });
            let Some((place, then, outcome)) = reached else {
                limit = if state.waiting.is_empty() { LONG } else { LOOK };
                continue;
            };
            drop(state);
            self.go_on(then, outcome);
            self.forget(place);
            limit = Duration::ZERO;
        }
    }

    /// What waited there has gone on, and so does what waited for that. Nobody else takes one out, but who ends them all.
    fn forget(&self, place: usize) {
        let behind = {
            let waiting = &mut lock(&self.state).waiting;
            (place < waiting.len()).then(|| waiting.remove(place).behind)
        };
        behind.into_iter().flatten().for_each(|transfer| self.transfers.set_out(transfer));
    }

    fn go_on(&self, then: Then, outcome: Result<(), HostError>) {
        match (then, outcome) {
            (Then::Ready(id), Ok(())) => self.base.node(|node, now| node.grants().ready(id, now)),
            (Then::Ready(id), Err(error)) => {
                log::error!(
                    grant:% = id;
                    "grant {id} is taken back: what writes its pages on the device has failed: {error}"
                );
                self.base.node(|node, _| node.grants().end(id, GrantState::Revoked));
            }
            (Then::Begin(id, Some(grant)), Ok(())) if self.waits_for(grant, id) => {}
            (Then::Begin(id, _), Ok(())) => self.transfers.set_out(id),
            (Then::Begin(id, _), Err(error)) => {
                self.transfers.give_up(id, from_host(Code::DeviceFailed, error));
            }
            (Then::Tell(end), outcome) => {
                end.set(outcome.map_err(|error| from_host(Code::DeviceFailed, error)));
            }
        }
    }

    /// Ends the thread. Grants and transfers that wait are the affair of who closes the engine.
    pub fn stop(&self) {
        let (flag, waiting) = {
            let mut state = lock(&self.state);
            state.over = true;
            (state.flag.clone(), std::mem::take(&mut state.waiting))
        };
        for one in waiting {
            if let Then::Tell(end) = one.then {
                let text = "the engine was closed before the stream came to the mark";
                end.set(Err(Error::new(Code::EngineClosed, text)));
            }
        }
        if let Some(Err(error)) = flag.map(|flag| flag.signal()) {
            log::error!("the thread that waits for streams of devices cannot be told to end: {error}");
            return;
        }
        if lock(&self.thread).take().is_some_and(|thread| thread.join().is_err()) {
            log::error!("the thread that waits for streams of devices panicked");
        }
    }
}

/// The stream of a device, made at its first use.
fn own_stream<'a>(
    streams: &'a mut Vec<Box<dyn DeviceStream>>,
    device: &dyn Device,
) -> Result<&'a mut Box<dyn DeviceStream>, HostError> {
    let at = match streams.iter().position(|one| one.device().id() == device.id()) {
        Some(at) => at,
        None => {
            streams.push(device.stream(ROOM)?);
            streams.len() - 1
        }
    };
    Ok(&mut streams[at])
}

#[cfg(test)]
#[path = "../tests/unit/stream_order.rs"]
mod tests;
