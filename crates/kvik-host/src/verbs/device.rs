//! An open port: its completion queue, which all its queue pairs share.

use super::abi::{ibv_comp_channel, ibv_context, ibv_cq, ibv_pd, ibv_wc};
use super::gid::{self, Gid};
use super::port::{self, DeviceList, Port};
use super::ring::{Completion, Ring};
use super::{Object, Verbs, VerbsError, errno, number};
use crate::HostError;
use crate::event::{Epoll, Interest};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

/// Places of a new completion queue; it grows with what queue pairs are promised.
const PLACES: usize = 1024;
/// Completions that are taken in one call.
const BATCH: usize = 32;
/// Reads that one queue pair has in flight, or answers, at most: what current devices have, and four bits in some.
const READS: c_int = 16;

/// What a device can do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Requests of a queue pair.
    pub requests: usize,
    /// Pieces of a request.
    pub pieces: usize,
    /// Places of a completion queue.
    pub places: usize,
    /// Reads that a queue pair answers at a time.
    pub answers: u8,
    /// Own reads that a queue pair has in flight.
    pub reads: u8,
}

/// One port of a device, open. It and all that comes of it are one thread's, and the types see to that.
pub struct Device {
    // In the order in which they are ended.
    cq: Object<ibv_cq>,
    channel: Object<ibv_comp_channel>,
    pub(super) pd: Object<ibv_pd>,
    pub(super) context: Object<ibv_context>,
    pub(super) verbs: Arc<Verbs>,
    pub(super) port: Port,
    pub(super) gid: Gid,
    /// Where the GID is in the table now: links that come and go change that.
    pub(super) gid_index: Cell<u8>,
    /// The port's local identifier now: whoever manages the subnet may give it another one.
    pub(super) lid: Cell<u16>,
    pub(super) limits: Limits,
    /// Places of the completion queue, and how many of them queue pairs were promised.
    places: Cell<usize>,
    promised: Cell<usize>,
    next: Cell<u32>,
    /// The queue pairs that are there, by the upper half of their requests' numbers.
    pub(super) rings: RefCell<HashMap<u32, Rc<RefCell<Ring>>>>,
    /// Completions that were taken while nobody asked for them.
    pub(super) stash: RefCell<Vec<Completion>>,
}

impl Device {
    /// Opens a port, to be reached at the GID of this index of its table ([`Port::choose_gid`]).
    ///
    /// # Errors
    /// The step that failed, with the device and the port; also where the port is gone, or the table has changed.
    pub fn open(verbs: &Arc<Verbs>, port: &Port, gid_index: u8) -> Result<Rc<Device>, VerbsError> {
        let devices = DeviceList::read(verbs)?;
        let gone = |text: &str| VerbsError::own(format!("opening {port}"), text);
        let (device, name) = devices
            .iter()
            .find(|(_, name)| *name == port.device)
            .ok_or_else(|| gone("the device is not there any more"))?;
        // SAFETY: a device of this list; all that is made of the context is a field before it.
        let context = unsafe { devices.open(device, &name) }?;
        // As it is now: tables change with the addresses of the host.
        let ports = port::ports_of(verbs, &context, &name)?;
        let port = ports
            .into_iter()
            .find(|now| now.number == port.number)
            .ok_or_else(|| gone("the device has no such port any more"))?;
        let gid = gid::choose(&port.gids, port.link, Some(gid_index));
        let gid = gid.map_err(|why| gone(&why))?.clone();
        let attr = port::attributes(verbs, &context, &name)?;
        let limits = Limits {
            // One place more is kept for the request that tells of the end.
            requests: attr.max_qp_wr.max(2) as usize - 1,
            pieces: attr.max_sge.min(if attr.max_sge_rd > 0 { attr.max_sge_rd } else { c_int::MAX }).max(1)
                as usize,
            places: attr.max_cqe.max(1) as usize,
            answers: attr.max_qp_rd_atom.clamp(0, READS) as u8,
            reads: attr.max_qp_init_rd_atom.clamp(0, READS) as u8,
        };
        let parts = Parts::make(verbs, &context, &port, PLACES.min(limits.places))?;
        Ok(Rc::new(Device {
            places: Cell::new(parts.places),
            cq: parts.cq,
            channel: parts.channel,
            pd: parts.pd,
            context,
            verbs: verbs.clone(),
            lid: Cell::new(port.lid),
            port,
            gid_index: Cell::new(gid.index),
            gid,
            limits,
            promised: Cell::new(0),
            next: Cell::new(1),
            rings: RefCell::default(),
            stash: RefCell::default(),
        }))
    }

    /// The port, as it was when it was opened.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// The GID that peers reach it at.
    pub fn gid(&self) -> &Gid {
        &self.gid
    }

    /// Looks up anew where the GID is in the port's table, and the port's LID: after an event that says that the port has
    /// changed, before queue pairs are connected.
    ///
    /// # Errors
    /// The port has no such address any more, or none of that kind.
    pub fn find_gid(&self) -> Result<(), VerbsError> {
        let ports = port::ports_of(&self.verbs, &self.context, &self.port.device)?;
        let now = ports.into_iter().find(|now| now.number == self.port.number);
        now.iter().for_each(|now| self.lid.set(now.lid));
        let same = |entry: &&Gid| entry.raw == self.gid.raw && entry.kind == self.gid.kind;
        match now.iter().flat_map(|now| &now.gids).find(same) {
            Some(entry) => {
                self.gid_index.set(entry.index);
                Ok(())
            }
            None => Err(VerbsError::own(
                format!("looking for GID {} of {}", self.gid, self.port),
                "it is gone from the port's table: bring its network interface's address back",
            )),
        }
    }

    pub(super) fn cq(&self) -> *mut ibv_cq {
        self.cq.as_ptr()
    }

    /// A number for a queue pair, which no later one has.
    pub(super) fn next_id(&self) -> Result<u32, VerbsError> {
        let id = self.next.get();
        let next = id.checked_add(1).ok_or_else(|| {
            let text = "all numbers of queue pairs were given out; open the device again";
            VerbsError::own(format!("making a queue pair of {}", self.port), text)
        })?;
        self.next.set(next);
        Ok(id)
    }

    /// Keeps places in the completion queue for a queue pair, so that it can never overflow.
    pub(super) fn promise(&self, places: usize) -> Result<(), VerbsError> {
        let wanted = self.promised.get().saturating_add(places);
        let what = || format!("making a queue pair of {}", self.port);
        if wanted > self.limits.places {
            return Err(VerbsError::own(
                what(),
                format!(
                    "the completion queue would need {wanted} places, and the device has {} at most; open \
                     fewer queue pairs, or ones of less depth",
                    self.limits.places
                ),
            ));
        }
        if wanted > self.places.get() {
            let larger = wanted.next_power_of_two().min(self.limits.places);
            // SAFETY: an open completion queue, used by this thread alone.
            let code = unsafe { (self.verbs.table.resize_cq)(self.cq(), larger as c_int) };
            number(code).map_err(|code| {
                let text = format!("enlarging the completion queue to {larger} places for {}", what());
                VerbsError::os(text, code).hint("open fewer queue pairs, or ones of less depth")
            })?;
            self.places.set(larger);
        }
        self.promised.set(wanted);
        Ok(())
    }

    /// Gives back what a queue pair was promised, when nothing of it is in the queue any more.
    pub(super) fn give_back(&self, places: usize) {
        self.promised.set(self.promised.get() - places);
    }

    /// Takes the completions of all queue pairs, into `into`. Does not wait.
    ///
    /// # Errors
    /// The completion queue is broken: the device must be opened again.
    pub fn poll(&self, into: &mut Vec<Completion>) -> Result<(), VerbsError> {
        into.append(&mut self.stash.borrow_mut());
        let cq = self.cq();
        let mut taken = [ibv_wc::default(); BATCH];
        // No more than the queue holds, however fast peers send.
        for _ in 0..=self.places.get() / BATCH {
            // SAFETY: an open queue, and room for as many completions.
            let got = unsafe { ((*(*cq).context).ops.poll_cq)(cq, BATCH as c_int, taken.as_mut_ptr()) };
            let Ok(got) = usize::try_from(got) else {
                return Err(VerbsError::os(format!("taking the completions of {}", self.port), errno()));
            };
            let rings = self.rings.borrow();
            for wc in &taken[..got.min(BATCH)] {
                // One of a queue pair that is gone is nobody's.
                if let Some(ring) = rings.get(&Ring::id_of(wc.wr_id)) {
                    ring.borrow_mut().take(wc, into);
                }
            }
            if got < BATCH {
                break;
            }
        }
        Ok(())
    }

    /// Adds to `epoll` the descriptor that becomes readable when completions come after [`Device::may_wait`].
    ///
    /// # Errors
    /// The kernel's.
    pub fn watch(&self, epoll: &Epoll, token: u64) -> Result<(), HostError> {
        // SAFETY: the channel's own, open as long as it is. The kernel takes it out of the set when it is
        // closed, and it is not inherited by programs that this one starts.
        let fd = unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) };
        epoll.add(fd, token, Interest::READ)
    }

    /// Whether the thread may sleep until the descriptor of [`Device::watch`] is readable: it will tell of
    /// the next completion, and none has come meanwhile.
    ///
    /// # Errors
    /// As [`Device::poll`].
    pub fn may_wait(&self) -> Result<bool, VerbsError> {
        self.drain_channel()?;
        let cq = self.cq();
        // SAFETY: an open queue.
        let code = unsafe { ((*(*cq).context).ops.req_notify_cq)(cq, 0) };
        number(code).map_err(|code| {
            VerbsError::os(format!("asking to be told of completions of {}", self.port), code)
        })?;
        // What came before that told nobody.
        self.take_into_stash()?;
        Ok(self.stash.borrow().is_empty())
    }

    pub(super) fn take_into_stash(&self) -> Result<(), VerbsError> {
        let mut taken = Vec::new();
        let polled = self.poll(&mut taken);
        *self.stash.borrow_mut() = taken;
        polled
    }

    /// Takes what the channel has told already.
    fn drain_channel(&self) -> Result<(), VerbsError> {
        let table = &self.verbs.table;
        loop {
            let (mut cq, mut given) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: an open channel, whose descriptor does not block; the call writes both pointers if it
            // returns 0, and the event is acknowledged once.
            let code = unsafe {
                let code = (table.get_cq_event)(self.channel.as_ptr(), &mut cq, &mut given);
                if code == 0 {
                    (table.ack_cq_events)(cq, 1);
                }
                code
            };
            match number(code) {
                Ok(()) | Err(libc::EINTR) => {}
                Err(libc::EAGAIN) => return Ok(()),
                Err(failed) => {
                    return Err(VerbsError::os(format!("reading the channel of {}", self.port), failed));
                }
            }
        }
    }
}

/// What is made of a context.
struct Parts {
    cq: Object<ibv_cq>,
    channel: Object<ibv_comp_channel>,
    pd: Object<ibv_pd>,
    places: usize,
}

impl Parts {
    fn make(
        verbs: &Verbs,
        context: &Object<ibv_context>,
        port: &Port,
        places: usize,
    ) -> Result<Parts, VerbsError> {
        let (table, c) = (&verbs.table, context.as_ptr());
        let failed = |what: &str| {
            let what = format!("{what} of {port}");
            move |number| VerbsError::os(what, number)
        };
        // SAFETY: an open context. Each call makes an object or returns null; they are ended once, in the
        // order of the device's fields, and if a later one fails, in that of these.
        unsafe {
            set_flags((*c).async_fd).map_err(failed("reading the events"))?;
            let pd = Object::new((table.alloc_pd)(c), table.dealloc_pd)
                .map_err(failed("making a protection domain"))?;
            let channel = Object::new((table.create_comp_channel)(c), table.destroy_comp_channel)
                .map_err(failed("making a completion channel"))?;
            set_flags((*channel.as_ptr()).fd).map_err(failed("setting the completion channel"))?;
            let made = (table.create_cq)(c, places as c_int, ptr::null_mut(), channel.as_ptr(), 0);
            let cq = Object::new(made, table.destroy_cq).map_err(failed("making a completion queue"))?;
            let places = (*cq.as_ptr()).cqe.max(1) as usize;
            Ok(Parts { cq, channel, pd, places })
        }
    }
}

/// Makes reads of a library's descriptor return at once where there is nothing, and keeps it from programs
/// that this one starts.
fn set_flags(fd: i32) -> Result<(), i32> {
    // SAFETY: plain calls on a descriptor of the caller.
    let failed = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        flags < 0
            || libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) < 0
            || libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) < 0
    };
    if failed { Err(errno()) } else { Ok(()) }
}
