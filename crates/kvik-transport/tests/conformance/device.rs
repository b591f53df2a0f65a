//! A device that is none: its memory lies where nobody else reaches it, and its streams are threads. It stands still, and
//! has the thread panic that uses it, when it is told to. What transports do with it they do with any device.

use kvik_core::{Class, Code};
use kvik_host::device::{
    CallerStream, Device, DeviceKind, DeviceMark, DeviceMemory, DeviceStream, DmaBuf, Handle,
};
use kvik_host::event::EventFd;
use kvik_host::{HostError, HugePages, Memory};
use kvik_proto::Op;
use kvik_transport::RegionMemory;
use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::host::{Kind, PATIENCE, Pair, bytes, memory, pattern, view};
use crate::{OPS, PAGE, PAGES, SIZE, cancelled, expected, ids};

/// A device.
#[derive(Clone)]
struct Abacus(Arc<(Mutex<Copies>, Condvar)>);

#[derive(Default)]
struct Copies {
    given: u64,
    /// How many of them it is through with.
    done: u64,
    stand_still: bool,
    panics: bool,
}

impl Abacus {
    fn new() -> Abacus {
        Abacus(Arc::default())
    }

    fn memory(&self, len: usize, seed: u8) -> RegionMemory {
        let memory: Arc<dyn DeviceMemory> =
            Arc::new(Beads { device: self.clone(), bytes: Mutex::new(pattern(len, seed)) });
        memory.into()
    }

    fn stand_still(&self, still: bool) {
        self.0.0.lock().unwrap().stand_still = still;
        self.0.1.notify_all();
    }

    /// The thread panics that asks next how far a stream is.
    fn panic_next(&self) {
        self.0.0.lock().unwrap().panics = true;
    }

    fn has_panicked(&self) -> bool {
        !self.0.0.lock().unwrap().panics
    }

    fn has_work(&self) -> bool {
        self.0.0.lock().unwrap().given > 0
    }

    fn is_through(&self) -> bool {
        let state = self.0.0.lock().unwrap();
        state.given == state.done
    }
}

impl fmt::Display for Abacus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device 5")
    }
}

impl Device for Abacus {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Other
    }
    fn number(&self) -> u32 {
        5
    }
    fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }
    fn ipc(&self) -> &'static str {
        "none"
    }
    fn stream(&self, room: usize) -> Result<Box<dyn DeviceStream>, HostError> {
        let (give, given) = channel::<Box<dyn FnOnce() + Send>>();
        let device = self.clone();
        std::thread::spawn(move || {
            for work in given {
                let still = device.0.0.lock().unwrap();
                drop(device.0.1.wait_while(still, |state| state.stand_still).unwrap());
                work();
                device.0.0.lock().unwrap().done += 1;
            }
        });
        let buffer = Arc::new(Memory::shared(room, HugePages::Never)?);
        Ok(Box::new(Wire { device: self.clone(), buffer, give, given: 0, reached: Arc::default() }))
    }
}

/// Its memory.
struct Beads {
    device: Abacus,
    bytes: Mutex<Vec<u8>>,
}

impl fmt::Debug for Beads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Beads({} bytes)", self.len())
    }
}

fn refused(text: &str) -> HostError {
    HostError::InvalidArgument(text.into())
}

impl DeviceMemory for Beads {
    fn device(&self) -> &dyn Device {
        &self.device
    }
    /// No address at which anybody could find a byte.
    fn addr(&self) -> usize {
        0x10
    }
    fn len(&self) -> usize {
        self.bytes.lock().unwrap().len()
    }
    fn writable(&self) -> bool {
        true
    }
    fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), HostError> {
        self.bytes.lock().unwrap()[offset..offset + from.len()].copy_from_slice(from);
        Ok(())
    }
    fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), HostError> {
        into.copy_from_slice(&self.bytes.lock().unwrap()[offset..offset + into.len()]);
        Ok(())
    }
    fn flush_writes(&self) -> Result<(), HostError> {
        Ok(())
    }
    fn export(&self) -> Result<Handle, HostError> {
        Err(refused("it is one process's alone"))
    }
    fn dmabuf(&self) -> Result<DmaBuf, HostError> {
        Err(refused("it has no dma-bufs"))
    }
}

/// One of its streams.
struct Wire {
    device: Abacus,
    buffer: Arc<Memory>,
    give: Sender<Box<dyn FnOnce() + Send>>,
    given: u64,
    reached: Arc<AtomicU64>,
}

fn beads(memory: &Arc<dyn DeviceMemory>) -> Arc<Beads> {
    let any: Arc<dyn Any + Send + Sync> = memory.clone();
    any.downcast().unwrap()
}

impl Wire {
    fn begin(&self, work: impl FnOnce() + Send + 'static) {
        self.device.0.0.lock().unwrap().given += 1;
        self.give.send(Box::new(work)).unwrap();
    }
}

impl DeviceStream for Wire {
    fn device(&self) -> &dyn Device {
        &self.device
    }
    fn buffer(&self) -> &Arc<Memory> {
        &self.buffer
    }
    fn gather(
        &mut self,
        at: usize,
        from: &Arc<dyn DeviceMemory>,
        pieces: &[(usize, usize)],
    ) -> Result<(), HostError> {
        let (from, buffer, pieces) = (beads(from), self.buffer.clone(), pieces.to_vec());
        self.begin(move || {
            let mut place = at;
            for (offset, len) in pieces {
                buffer.copy_in(place, &from.bytes.lock().unwrap()[offset..offset + len]).unwrap();
                place += len;
            }
        });
        Ok(())
    }
    fn scatter(
        &mut self,
        to: &Arc<dyn DeviceMemory>,
        pieces: &[(usize, usize)],
        at: usize,
    ) -> Result<(), HostError> {
        let (to, buffer, pieces) = (beads(to), self.buffer.clone(), pieces.to_vec());
        self.begin(move || {
            let mut place = at;
            for (offset, len) in pieces {
                buffer.copy_out(place, &mut to.bytes.lock().unwrap()[offset..offset + len]).unwrap();
                place += len;
            }
        });
        Ok(())
    }
    fn between(
        &mut self,
        to: &Arc<dyn DeviceMemory>,
        from: &Arc<dyn DeviceMemory>,
        pieces: &[(usize, usize, usize)],
    ) -> Result<(), HostError> {
        let (to, from, pieces) = (beads(to), beads(from), pieces.to_vec());
        self.begin(move || {
            for (at, offset, len) in pieces {
                let piece = from.bytes.lock().unwrap()[offset..offset + len].to_vec();
                to.bytes.lock().unwrap()[at..at + len].copy_from_slice(&piece);
            }
        });
        Ok(())
    }
    fn mark(&mut self) -> Result<u64, HostError> {
        self.given += 1;
        let (given, reached) = (self.given, self.reached.clone());
        self.begin(move || reached.store(given, Ordering::Release));
        Ok(given)
    }
    fn reached(&mut self) -> Result<u64, HostError> {
        let panics = std::mem::take(&mut self.device.0.0.lock().unwrap().panics);
        assert!(!panics, "a thread panics: a fault that was injected");
        Ok(self.reached.load(Ordering::Acquire))
    }
    fn wait(&mut self, mark: u64, limit: Duration) -> Result<(), HostError> {
        let (told, end) = (channel::<()>(), Instant::now() + limit);
        if self.reached()? >= mark {
            return Ok(());
        }
        self.begin(move || {
            let _ = told.0.send(());
        });
        let left = end.saturating_duration_since(Instant::now());
        told.1
            .recv_timeout(left)
            .map_err(|_| HostError::TimedOut { what: "copies of device 5".into(), after: limit })
    }
    fn tell(&mut self, flag: &Arc<EventFd>) -> Result<(), HostError> {
        let flag = flag.clone();
        self.begin(move || flag.signal().unwrap());
        Ok(())
    }

    /// Programs launch nothing on it.
    fn mark_of(&mut self, _: CallerStream, _: &Arc<EventFd>) -> Result<Box<dyn DeviceMark>, HostError> {
        Err(HostError::InvalidArgument("this device has no streams of programs".into()))
    }
}

/// NICs, which the device's memory is not for: it has no dma-bufs. So its pages go through their rings.
const NICS: Kind = Kind::Rma("libfabric:tcp");

/// Pages go from device to device over tcp, from the host to a device by a copying thread, between a device on either side or
/// both through rings of NICs, and none but those.
#[test]
fn every_byte_lands_on_a_device_and_no_other_is_touched() {
    let sides = [(Kind::Tcp, [true; 2]), (Kind::Local, [false, true])];
    let rings = [[false, true], [true, false], [true; 2]].map(|on_device| (NICS, on_device));
    for (kind, on_device) in sides.into_iter().chain(rings) {
        for (op, right) in OPS {
            let (pair, device) = (Pair::new(kind), Abacus::new());
            let [mut there, mut here] = [(on_device[0], 1), (on_device[1], 2)].map(|(on_device, seed)| {
                if on_device { device.memory(SIZE, seed) } else { memory(SIZE, seed) }
            });
            if kind == Kind::Local && op == Op::Write {
                std::mem::swap(&mut there, &mut here);
            }
            let (theirs, ours) = (pair.owner.register(1, &there), pair.other.register(1, &here));
            let (from, to) = ids();
            let (view_there, view_here) = (view(&there, PAGE, &from), view(&here, PAGE, &to));
            let before = (bytes(&there), bytes(&here));
            let (grant, _slot) = pair.owner.grant(right, (theirs, &there), &view_there);
            let (key, _fence) = pair.other.begin(op, grant, (ours, &here), &view_here);
            let end = pair.other.finished(key);
            end.outcome.unwrap();
            assert_eq!(end.bytes, from.len() as u64 * PAGE);
            let after = match op {
                Op::Read => (before.0.clone(), expected((&before.0, &from), (&before.1, &to))),
                _ => (expected((&before.1, &to), (&before.0, &from)), before.1.clone()),
            };
            assert!((bytes(&there), bytes(&here)) == after, "{kind:?} {op:?}");
        }
    }
}

/// More chunks than all channels have room for while a device takes none.
const MANY: usize = 16 << 20;

/// At its end the device does not stand still any more.
struct GoesOn(Abacus);

impl Drop for GoesOn {
    fn drop(&mut self) {
        self.0.stand_still(false);
    }
}

/// A transfer whose device stands still ends by name when it must, and its memory stays held until the device goes on.
#[test]
fn a_device_that_stands_still_holds_its_memory_and_nobody_else() {
    let [read, write] = OPS;
    // Which channels wait for the device is chance.
    let over_tcp = [(Kind::Tcp, read); 3];
    let others = [(Kind::Tcp, write), (Kind::Local, read), (NICS, read), (NICS, write)];
    for (kind, (op, right)) in over_tcp.into_iter().chain(others) {
        let (pair, device) = (Pair::new(kind), Abacus::new());
        let (there, here) = (memory(MANY, 1), device.memory(MANY, 2));
        let (theirs, ours) = (pair.owner.register(1, &there), pair.other.register(1, &here));
        let all: Vec<u32> = (0..(MANY as u64 / PAGE) as u32).collect();
        let (grant, _slot) = pair.owner.grant(right, (theirs, &there), &view(&there, PAGE, &all));
        // Before the pair ends, whose threads wait for the device.
        let device = GoesOn(device);
        device.0.stand_still(true);
        if (kind, op) == (Kind::Tcp, Op::Read) {
            pair.theirs.hold_from(56);
        }
        let (key, _fence) = pair.other.begin(op, grant, (ours, &here), &view(&here, PAGE, &all));
        pair.other.wait("work for the device", |_| device.0.has_work().then_some(()));
        if (kind, op) == (Kind::Tcp, Op::Read) {
            // So much is on its way that channels wait for the device to take what came before.
            assert!(pair.theirs.wait_held(1, PATIENCE), "too little was sent");
        }
        pair.other.with(|node, _| node.cancel(key, cancelled()));
        pair.theirs.release();
        let error = pair.other.finished(key).outcome.unwrap_err();
        assert_eq!(error.code, Code::PagesQuarantined, "{kind:?} {op:?}: {error}");
        assert!(error.text.contains("device 5"), "{error}");
        let weak = here.downgrade();
        drop(here);
        pair.other.withdraw(ours);
        assert!(weak.upgrade().is_some(), "{kind:?} {op:?}: memory was let go of under a copy");
        // Another transfer of the same engine goes on meanwhile.
        let host = memory(MANY, 4);
        let region = pair.other.register(2, &host);
        let (key, _fence) = pair.other.begin(op, grant, (region, &host), &view(&host, PAGE, &all));
        pair.other.finished(key).outcome.unwrap();
        drop(device);
        pair.other.wait("the end of the memory", |_| weak.upgrade().is_none().then_some(()));
    }
}

/// Of the owner it holds the grant, which ends when the device goes on; who began the transfer waits for nothing of that.
#[test]
fn a_device_of_the_owner_that_stands_still_holds_its_grant_and_nobody_else() {
    for (op, right) in OPS {
        let (pair, device) = (Pair::new(NICS), Abacus::new());
        let (there, here) = (device.memory(MANY, 1), memory(MANY, 2));
        let (theirs, ours) = (pair.owner.register(1, &there), pair.other.register(1, &here));
        let all: Vec<u32> = (0..(MANY as u64 / PAGE) as u32).collect();
        let (grant, _slot) = pair.owner.grant(right, (theirs, &there), &view(&there, PAGE, &all));
        let device = GoesOn(device);
        device.0.stand_still(true);
        let (key, _fence) = pair.other.begin(op, grant, (ours, &here), &view(&here, PAGE, &all));
        pair.other.wait("work for the device", |_| device.0.has_work().then_some(()));
        pair.other.with(|node, _| node.cancel(key, cancelled()));
        assert_eq!(pair.other.finished(key).outcome.unwrap_err().code, Code::Cancelled, "{op:?}");
        pair.owner.has_heard(&pair.other);
        pair.owner.with(|node, _| node.grants().end(grant, kvik_core::GrantState::Revoked));
        assert!(!pair.owner.has_ended(grant), "{op:?}: pages are free under a copy");
        // Other memory of the owner goes over the NICs meanwhile.
        let host = memory(MANY, 4);
        let region = pair.owner.register(2, &host);
        let (other, _slot) = pair.owner.grant(right, (region, &host), &view(&host, PAGE, &all));
        let (key, _fence) = pair.other.begin(op, other, (ours, &here), &view(&here, PAGE, &all));
        pair.other.finished(key).outcome.unwrap();
        drop(device);
        pair.owner.wait("the end of the grant", |owner| owner.has_ended(grant).then_some(()));
    }
}

/// What was put aside for a device is taken up again when that is through with it, however much others have to copy.
#[test]
fn what_a_device_is_through_with_waits_for_no_end_of_other_work() {
    let (pair, [slow, other]) = (Pair::new(NICS), [Abacus::new(), Abacus::new()]);
    let [(put_aside, _end), (beside, _beside_end)] =
        [(&slow, 1, 16), (&other, 2, 1024)].map(|(device, id, pages)| {
            let (there, here) = (device.memory(MANY, 1), memory(MANY, 2));
            let (theirs, ours) = (pair.owner.register(id, &there), pair.other.register(id, &here));
            let all: Vec<u32> = (0..pages).collect();
            let (grant, slot) =
                pair.owner.grant(kvik_core::Right::Read, (theirs, &there), &view(&there, PAGE, &all));
            let view = view(&here, PAGE, &all);
            let begin =
                move |pair: &Pair, class| pair.other.begin_as(class, Op::Read, grant, (ours, &here), &view).0;
            (begin, slot)
        });
    let slow = GoesOn(slow);
    slow.0.stand_still(true);
    let first = put_aside(&pair, Class::Bulk);
    pair.owner.wait("work for the device", |_| slow.0.has_work().then_some(()));
    // Both threads have something else in hand then, so one has put aside what the device has.
    pair.theirs.hold_from(1);
    let second = beside(&pair, Class::Handover);
    assert!(pair.theirs.wait_held(2, PATIENCE));
    slow.0.stand_still(false);
    pair.owner.wait("the end of its copies", |_| slow.0.is_through().then_some(()));
    // They are through with that, and find more, which takes as long as it likes.
    pair.theirs.hold_from(3);
    let claimed = || pair.ours.order().iter().any(|(_, class)| *class == Class::Bulk);
    pair.other.wait("what was put aside", |_| claimed().then_some(()));
    pair.theirs.release();
    [first, second].into_iter().for_each(|key| pair.other.finished(key).outcome.unwrap());
}

/// A thread that panics ends the work in its hands by name, at once, and goes on with what comes.
#[test]
fn a_thread_that_panics_ends_what_it_had_and_goes_on() {
    let [read, write] = OPS;
    for (kind, (op, right)) in [(Kind::Tcp, read), (Kind::Tcp, write), (Kind::Local, read)] {
        let (pair, device) = (Pair::new(kind), Abacus::new());
        let (there, here) = (memory(SIZE, 1), device.memory(SIZE, 2));
        let (theirs, ours) = (pair.owner.register(1, &there), pair.other.register(1, &here));
        let all: Vec<u32> = (0..PAGES as u32).collect();
        let views = [view(&there, PAGE, &all), view(&here, PAGE, &all)];
        let (grant, _slot) = pair.owner.grant(right, (theirs, &there), &views[0]);
        // As often as no thread would be left; the session of a channel ends with it.
        for _ in 0..if kind == Kind::Tcp { 1 } else { 3 } {
            device.panic_next();
            let (key, _fence) = pair.other.begin(op, grant, (ours, &here), &views[1]);
            let error = pair.other.finished(key).outcome.unwrap_err();
            assert!(error.text.contains("panicked"), "{kind:?} {op:?}: {error}");
        }
        if kind == Kind::Local {
            let (key, _fence) = pair.other.begin(op, grant, (ours, &here), &views[1]);
            pair.other.finished(key).outcome.unwrap();
        }
        pair.owner.end_grant(grant);
        let weak = here.downgrade();
        drop(here);
        pair.other.withdraw(ours);
        pair.other.wait("the end of the memory", |_| weak.upgrade().is_none().then_some(()));
    }
}

/// What a device has in flight for a thread that panics is no less in flight.
#[test]
fn a_thread_that_panics_lets_go_of_no_memory_under_a_copy() {
    let (op, right) = OPS[0];
    for kind in [Kind::Tcp, Kind::Local] {
        let (pair, device) = (Pair::new(kind), Abacus::new());
        let (there, here) = (memory(SIZE, 1), device.memory(SIZE, 2));
        let (theirs, ours) = (pair.owner.register(1, &there), pair.other.register(1, &here));
        let view = [&there, &here].map(|memory| view(memory, PAGE, &[0]));
        let (grant, _slot) = pair.owner.grant(right, (theirs, &there), &view[0]);
        let device = GoesOn(device);
        device.0.stand_still(true);
        let (key, _fence) = pair.other.begin(op, grant, (ours, &here), &view[1]);
        pair.other.wait("work for the device", |_| device.0.has_work().then_some(()));
        device.0.panic_next();
        pair.other.with(|node, _| node.cancel(key, cancelled()));
        let error = pair.other.finished(key).outcome.unwrap_err();
        assert!(device.0.has_panicked(), "{kind:?}: {error}");
        assert_eq!(error.code, Code::PagesQuarantined, "{kind:?}: {error}");
        drop(device);
    }
}
