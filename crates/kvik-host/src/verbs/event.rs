//! What a device tells of itself, of its ports, and of queue pairs, beside completions.

use super::abi::{self, ibv_async_event};
use super::device::Device;
use super::ring::QueueId;
use super::{VerbsError, number};
use crate::HostError;
use crate::event::{Epoll, Interest};
use std::os::fd::BorrowedFd;

/// Something happened to the device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A port has lost its link; queue pairs fail when they find out.
    PortDown {
        /// Its number.
        port: u8,
    },
    /// A port has a link again.
    PortUp {
        /// Its number.
        port: u8,
    },
    /// A port has other addresses, or other settings of its subnet: queue pairs made before may not be reached.
    PortChanged {
        /// Its number.
        port: u8,
        /// The library's words.
        what: String,
    },
    /// The device is of no use any more.
    DeviceFatal {
        /// The library's words.
        what: String,
    },
    /// A queue pair is in its error state: by its own fault, or by what a peer asked of it.
    QueueFailed {
        /// Which.
        queue: QueueId,
        /// The library's words.
        what: String,
    },
    /// Anything else.
    Other {
        /// The library's words.
        what: String,
    },
}

impl Device {
    /// Adds to `epoll` the descriptor that becomes readable when there are events.
    ///
    /// # Errors
    /// The kernel's.
    pub fn watch_events(&self, epoll: &Epoll, token: u64) -> Result<(), HostError> {
        // SAFETY: the context's own, open as long as it is. The kernel takes it out of the set when it is
        // closed, and it is not inherited by programs that this one starts.
        let fd = unsafe { BorrowedFd::borrow_raw((*self.context.as_ptr()).async_fd) };
        epoll.add(fd, token, Interest::READ)
    }

    /// Takes the events that have come, into `into`. Does not wait.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn events(&self, into: &mut Vec<Event>) -> Result<(), VerbsError> {
        let (table, context) = (&self.verbs.table, self.context.as_ptr());
        loop {
            let mut event = ibv_async_event::default();
            // SAFETY: an open context, whose descriptor does not block; the call fills the event.
            if let Err(failed) = number(unsafe { (table.get_async_event)(context, &mut event) }) {
                return match failed {
                    libc::EAGAIN => Ok(()),
                    libc::EINTR => continue,
                    other => Err(VerbsError::os(format!("reading the events of {}", self.port), other)),
                };
            }
            // Before it is acknowledged, what it names cannot be ended: the pointer is good.
            let told = self.told(&event);
            // SAFETY: an event that was read, once.
            unsafe { (table.ack_async_event)(&mut event) };
            into.push(told);
        }
    }

    fn told(&self, event: &ibv_async_event) -> Event {
        let what = self.verbs.event_text(event.event_type);
        // SAFETY: numbers and pointers, of which all are there: the event was zeros before.
        let (element, port) = unsafe { (event.element.qp as usize, event.element.port_num as u8) };
        match event.event_type {
            abi::IBV_EVENT_PORT_ERR => Event::PortDown { port },
            abi::IBV_EVENT_PORT_ACTIVE => Event::PortUp { port },
            abi::IBV_EVENT_LID_CHANGE
            | abi::IBV_EVENT_PKEY_CHANGE
            | abi::IBV_EVENT_SM_CHANGE
            | abi::IBV_EVENT_CLIENT_REREGISTER
            | abi::IBV_EVENT_GID_CHANGE => Event::PortChanged { port, what },
            // Of the completion queue: it has lost some, and all queue pairs share it.
            abi::IBV_EVENT_DEVICE_FATAL | abi::IBV_EVENT_CQ_ERR => Event::DeviceFatal { what },
            abi::IBV_EVENT_QP_FATAL | abi::IBV_EVENT_QP_REQ_ERR | abi::IBV_EVENT_QP_ACCESS_ERR => {
                match self.queue_at(element) {
                    Some(queue) => Event::QueueFailed { queue, what },
                    None => Event::Other { what },
                }
            }
            _ => Event::Other { what },
        }
    }

    /// The queue pair at this address, which has failed by itself: its end is set about as [`super::Queue::fail`] does.
    fn queue_at(&self, element: usize) -> Option<QueueId> {
        let rings = self.rings.borrow();
        let ring = rings.values().find(|ring| ring.borrow().qp.as_ptr() as usize == element)?;
        let mut ring = ring.borrow_mut();
        ring.fail_and_remember();
        Some(ring.id)
    }
}
