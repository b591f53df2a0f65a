//! Queue pairs: one reliable connection to one queue pair of a peer.

use super::abi::{self, ibv_ah_attr, ibv_global_route, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr};
use super::address::{AddressError, QueueAddress};
use super::device::Device;
use super::gid::ip_of;
use super::port::Link;
use super::ring::{Completion, QueueId, Ring, Rma, Stage};
use super::{Object, Posted, VerbsError, number};
use crate::HostError;
use std::cell::RefCell;
use std::ffi::c_int;
use std::rc::Rc;

/// Pieces of a request that are asked for: each makes the places of the send queue larger.
const PIECES: usize = 16;
/// The local acknowledgement's timeout: 4.096 us * 2^14 = 67 ms, far beyond what a loaded network delays a packet.
const TIMEOUT: u8 = 14;
/// How often a packet is sent again. Seven tries of 67 ms are 0.47 s; devices may wait up to four times as
/// long for each (InfiniBand's specification, 9.7.6.1.3), which makes about 2 s until a peer that is gone is
/// an error. 7, the most there is, would be for ever on soft-RoCE: the kernel's driver takes it for that.
const RETRIES: u8 = 6;
/// Nothing is received here, and no kvik sends: a peer that does asks again after 163.84 ms (the code 28) ...
const NOT_READY_TIMER: u8 = 28;
/// ... as many times, about 1 s. 7 would be for ever.
const NOT_READY_RETRIES: u8 = 6;
/// Routers that a packet may pass; those of one data centre are fewer.
const HOPS: u8 = 64;
const BITS_24: u32 = (1 << 24) - 1;

/// One queue pair. When it is closed, or dropped, nothing of it touches memory any more, and requests that had not
/// come back do so with the next [`Device::poll`], as flushed.
pub struct Queue {
    ring: Rc<RefCell<Ring>>,
    /// None from when it was ended.
    qp: Option<Object<ibv_qp>>,
    device: Rc<Device>,
    depth: usize,
    first_packet: u32,
}

impl Queue {
    /// Makes a queue pair that is not connected. `depth` bounds its requests in flight, beside the device's own bound.
    ///
    /// # Errors
    /// The device's, by the step that failed.
    pub fn open(device: &Rc<Device>, depth: usize) -> Result<Queue, VerbsError> {
        let depth = depth.min(device.limits.requests).clamp(1, 1 << 15);
        device.promise(places(depth))?;
        Queue::make(device, depth).inspect_err(|_| device.give_back(places(depth)))
    }

    fn make(device: &Rc<Device>, depth: usize) -> Result<Queue, VerbsError> {
        let what = || format!("making a queue pair of {}", device.port);
        let mut random = [0u8; 4];
        getrandom::fill(&mut random).map_err(|error| VerbsError::own(what(), error.to_string()))?;
        let pieces = device.limits.pieces.min(PIECES);
        let mut init = ibv_qp_init_attr {
            send_cq: device.cq(),
            recv_cq: device.cq(),
            cap: ibv_qp_cap {
                max_send_wr: places(depth) as u32,
                max_send_sge: pieces as u32,
                ..ibv_qp_cap::default()
            },
            qp_type: abi::IBV_QPT_RC,
            ..ibv_qp_init_attr::default()
        };
        let table = &device.verbs.table;
        // SAFETY: an open domain and its device's completion queue, which both outlive the queue pair: the
        // device is kept.
        let qp = unsafe { Object::new((table.create_qp)(device.pd.as_ptr(), &mut init), table.destroy_qp) };
        let qp = qp.map_err(|number| {
            VerbsError::os(what(), number).hint(&format!(
                "it was asked for {depth} requests of {pieces} pieces; a smaller depth needs less of the \
                 device's memory"
            ))
        })?;
        initialise(device, &qp)?;
        let id = device.next_id()?;
        let place = device.port.to_string();
        let longest = u64::from(device.port.longest);
        let ring = Ring::new(id, qp.at, (&device.verbs, place), (depth, pieces), longest);
        let ring = Rc::new(RefCell::new(ring));
        device.rings.borrow_mut().insert(id, ring.clone());
        let first_packet = u32::from_le_bytes(random) & BITS_24;
        Ok(Queue { ring, qp: Some(qp), device: device.clone(), depth, first_packet })
    }

    /// Which of the device's it is.
    pub fn id(&self) -> QueueId {
        self.ring.borrow().id
    }

    /// What a peer needs to know of it: [`QueueAddress::encode`] makes the bytes.
    pub fn address(&self) -> QueueAddress {
        let (port, gid) = (&self.device.port, &self.device.gid);
        QueueAddress {
            link: port.link,
            mtu_code: mtu_code(port.mtu),
            reads: self.device.limits.answers,
            number: self.number(),
            first_packet: self.first_packet,
            lid: self.device.lid.get(),
            kind: gid.kind,
            gid: gid.raw,
        }
    }

    /// The device's number of the queue pair.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is open while this value is there.
        unsafe { (*self.ring.borrow().qp.as_ptr()).qp_num }
    }

    /// Connects it to the peer's. Both sides do so, each with the other's [`Queue::address`]; bytes move when
    /// both have.
    ///
    /// # Errors
    /// [`HostError::QueueAddress`]: there is no way between the two, and it stays as it was. Otherwise the
    /// device refused, and the queue pair has failed.
    pub fn connect(&mut self, peer: &QueueAddress) -> Result<(), HostError> {
        if self.ring.borrow().stage != Stage::Open {
            return Err(HostError::InvalidArgument("a queue pair is connected once; open a new one".into()));
        }
        self.fits(peer)?;
        let made = self.make_ready(peer);
        let mut ring = self.ring.borrow_mut();
        match &made {
            Ok(()) => ring.stage = Stage::Connected,
            Err(_) => ring.fail_and_remember(),
        }
        Ok(made?)
    }

    fn make_ready(&self, peer: &QueueAddress) -> Result<(), VerbsError> {
        let own = self.address();
        let mut attr = ibv_qp_attr {
            qp_state: abi::IBV_QPS_RTR,
            path_mtu: own.mtu_code.min(peer.mtu_code).into(),
            dest_qp_num: peer.number,
            rq_psn: peer.first_packet,
            max_dest_rd_atomic: own.reads,
            min_rnr_timer: NOT_READY_TIMER,
            ah_attr: self.path(peer),
            ..ibv_qp_attr::default()
        };
        let mask = abi::IBV_QP_STATE
            | abi::IBV_QP_AV
            | abi::IBV_QP_PATH_MTU
            | abi::IBV_QP_DEST_QPN
            | abi::IBV_QP_RQ_PSN
            | abi::IBV_QP_MAX_DEST_RD_ATOMIC
            | abi::IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attr, mask, "receive")?;
        attr.qp_state = abi::IBV_QPS_RTS;
        (attr.timeout, attr.retry_cnt, attr.rnr_retry) = (TIMEOUT, RETRIES, NOT_READY_RETRIES);
        attr.sq_psn = self.first_packet;
        // No more reads at a time than the peer answers.
        attr.max_rd_atomic = self.device.limits.reads.min(peer.reads);
        let mask = abi::IBV_QP_STATE
            | abi::IBV_QP_TIMEOUT
            | abi::IBV_QP_RETRY_CNT
            | abi::IBV_QP_RNR_RETRY
            | abi::IBV_QP_SQ_PSN
            | abi::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, mask, "send")
    }

    /// Whether packets can go from here to there at all.
    fn fits(&self, peer: &QueueAddress) -> Result<(), AddressError> {
        let own = self.address();
        let port = &self.device.port;
        if own.link != peer.link {
            let text = format!("it is on {}, and {port} on {}", peer.link, own.link);
            return Err(AddressError(text));
        }
        if own.link == Link::InfiniBand {
            return Ok(());
        }
        let (here, there) = (ip_of(own.gid), ip_of(peer.gid));
        if own.kind != peer.kind || here.is_ipv4() != there.is_ipv4() {
            return Err(AddressError(format!(
                "its GID is {there} ({}), and that of {port} is {here} ({}); name GID indexes of one kind on \
                 both sides",
                peer.kind, own.kind
            )));
        }
        Ok(())
    }

    /// The way of packets to the peer. Within one InfiniBand subnet the LID is enough.
    fn path(&self, peer: &QueueAddress) -> ibv_ah_attr {
        let own = &self.device.gid;
        let routed = peer.link == Link::Ethernet || own.raw[..8] != peer.gid[..8];
        let route = ibv_global_route {
            dgid: abi::ibv_gid(peer.gid),
            flow_label: 0,
            sgid_index: self.device.gid_index.get(),
            hop_limit: HOPS,
            traffic_class: 0,
        };
        ibv_ah_attr {
            grh: if routed { route } else { ibv_global_route::default() },
            dlid: peer.lid,
            is_global: u8::from(routed),
            port_num: self.device.port.number,
            ..ibv_ah_attr::default()
        }
    }

    fn modify(&self, attr: &mut ibv_qp_attr, mask: u32, state: &str) -> Result<(), VerbsError> {
        let qp = self.ring.borrow().qp.as_ptr();
        // SAFETY: an open queue pair, and attributes that say what the mask promises.
        let code = unsafe { (self.device.verbs.table.modify_qp)(qp, attr, mask as c_int) };
        number(code).map_err(|code| {
            let what = format!("making a queue pair of {} ready to {state}", self.device.port);
            let error = VerbsError::os(what, code);
            match code {
                libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH => error.hint(
                    "the kernel finds no way to the peer's GID from the interface of the own one: check \
                     routes, VLANs and the GID index on both sides",
                ),
                libc::EINVAL => error.hint("the GID or the MTU does not fit the port"),
                _ => error,
            }
        })
    }

    /// Requests that may still be posted.
    pub fn room(&self) -> usize {
        self.ring.borrow().room()
    }

    /// Requests that have not come back, also those that wait for [`Queue::flush`].
    pub fn in_flight(&self) -> usize {
        self.ring.borrow().in_flight()
    }

    /// Requests that wait for [`Queue::flush`].
    pub fn waiting(&self) -> usize {
        self.ring.borrow().waiting()
    }

    /// Pieces that a request may have.
    pub fn max_pieces(&self) -> usize {
        self.ring.borrow().max_pieces
    }

    /// Gathers a request: [`Queue::flush`] posts what was gathered. [`Posted::Full`] where as many are under
    /// way as may be: take completions first.
    ///
    /// # Errors
    /// A range is not in its memory, the request is none that the device takes, or the queue pair is not
    /// connected or has failed. Nothing was gathered then.
    pub fn post(&mut self, rma: &Rma<'_>) -> Result<Posted, HostError> {
        let no = |text: String| Err(HostError::InvalidArgument(text));
        let (count, most) = (rma.pieces.len(), self.max_pieces());
        if count == 0 || count > most {
            return no(format!("a request of {count} pieces where 1 to {most} are possible"));
        }
        // To some devices a length of zero means 2^31 bytes.
        if rma.pieces.iter().any(|piece| piece.len == 0) {
            return no("a request with an empty piece".into());
        }
        // Keys of another device would be refused there, or name other memory here.
        if rma.pieces.iter().any(|piece| !piece.memory.is_of(&self.device)) {
            return no(format!("a request to {} with memory that another device knows", self.device.port));
        }
        self.ring.borrow_mut().gather(rma)
    }

    /// Posts what was gathered, with one call to the device.
    ///
    /// # Errors
    /// The device refused, and the queue pair has failed: all its requests come back.
    pub fn flush(&mut self) -> Result<(), VerbsError> {
        self.ring.borrow_mut().flush()
    }

    /// Takes it to its error state. When this returns, the peer reaches no memory through it any more; its
    /// own requests come back, done or flushed, and after them [`Completion::Drained`].
    ///
    /// # Errors
    /// The device refused: only dropping the queue pair stops it.
    pub fn fail(&mut self) -> Result<(), VerbsError> {
        let mut ring = self.ring.borrow_mut();
        let was = ring.stage;
        let failed = ring.fail();
        if was == Stage::Open && ring.stage == Stage::Drained {
            self.device.stash.borrow_mut().push(Completion::Drained { queue: ring.id });
        }
        failed
    }

    /// Ends it: when this returns, the peer reaches no memory through it, and its own requests touch none.
    ///
    /// # Errors
    /// The device refuses to. The queue pair stays until the process ends, and so does all that it may still use; its
    /// own requests do not come back.
    pub fn close(mut self) -> Result<(), VerbsError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), VerbsError> {
        let Some(qp) = self.qp.take() else { return Ok(()) };
        // What had come already keeps its own result. If the queue is broken, the requests come back as flushed.
        let _ = self.device.take_into_stash();
        // From here on nobody may use the queue pair itself, whatever comes back.
        self.ring.borrow_mut().stage = Stage::Drained;
        let ended = qp.close();
        // Completions of a queue pair that is gone would take places that others were promised.
        let polled = self.device.take_into_stash();
        let id = self.id();
        self.device.rings.borrow_mut().remove(&id.0);
        if let Err(code) = ended {
            self.ring.borrow_mut().abandon();
            // What the queue pair needs stays open with it.
            std::mem::forget(self.device.clone());
            return Err(VerbsError::os(format!("ending a queue pair of {}", self.device.port), code));
        }
        self.ring.borrow_mut().return_rest(&mut self.device.stash.borrow_mut());
        if polled.is_ok() {
            self.device.give_back(places(self.depth));
        }
        Ok(())
    }

    /// Whether it is in its error state, by [`Queue::fail`], by a request's failure or by an event.
    pub fn has_failed(&self) -> bool {
        self.ring.borrow().stage >= Stage::Failing
    }

    /// Whether it is in its error state and all its requests have come back: nothing of it touches memory any more.
    pub fn is_drained(&self) -> bool {
        self.ring.borrow().stage == Stage::Drained
    }
}

/// Places in the queues: one is for the request that tells of the end.
fn places(depth: usize) -> usize {
    depth + 1
}

/// To the state in which peers reach nothing yet.
fn initialise(device: &Device, qp: &Object<ibv_qp>) -> Result<(), VerbsError> {
    let access = abi::IBV_ACCESS_REMOTE_READ | abi::IBV_ACCESS_REMOTE_WRITE;
    let mut attr = ibv_qp_attr {
        qp_state: abi::IBV_QPS_INIT,
        qp_access_flags: access,
        port_num: device.port.number,
        ..ibv_qp_attr::default()
    };
    let mask = abi::IBV_QP_STATE | abi::IBV_QP_ACCESS_FLAGS | abi::IBV_QP_PKEY_INDEX | abi::IBV_QP_PORT;
    // SAFETY: an open queue pair, and attributes that say what the mask promises.
    let code = unsafe { (device.verbs.table.modify_qp)(qp.as_ptr(), &mut attr, mask as c_int) };
    number(code).map_err(|code| VerbsError::os(format!("initialising a queue pair of {}", device.port), code))
}

/// The library's code of an MTU.
fn mtu_code(bytes: usize) -> u8 {
    (bytes.clamp(256, 4096).ilog2() - 7) as u8
}

impl Drop for Queue {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            log::error!("{error}; the memory of what it has in flight stays lost");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::port::mtu_bytes;

    #[test]
    fn codes_of_mtus_go_both_ways() {
        for code in 1..=5u8 {
            assert_eq!(mtu_code(mtu_bytes(code.into())), code);
        }
        assert_eq!((mtu_code(0), mtu_code(9000)), (1, 5));
    }

    #[test]
    fn a_peer_that_is_gone_is_an_error_within_about_two_seconds() {
        let tries = f64::from(RETRIES) + 1.0;
        let shortest = 4.096e-6 * f64::from(1u32 << TIMEOUT) * tries;
        assert!(shortest > 0.3 && shortest * 4.0 < 2.2, "{shortest} s");
    }
}
