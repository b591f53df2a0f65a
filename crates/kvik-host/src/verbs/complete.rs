//! What comes back: requests in the order in which they were posted, and the end of a queue pair.

use super::RmaOp;
use super::abi::{self, ibv_wc, ibv_wc_status};
use super::ring::{Completion, Kind, Request, RequestError, Ring, Stage};

/// What a status means to a person; the numbers are those of `enum ibv_wc_status`.
fn meaning(status: ibv_wc_status) -> Option<&'static str> {
    Some(match status {
        1 | 2 => "the device refuses the request as it is: a piece, its length, or the depth of reads",
        4 | 8 => "the device does not know the own memory under this key, or for this use",
        9 => "the peer refuses the request as it is: the queue pair does not allow it, or it is too long",
        10 => {
            "the peer's device does not know this memory under this key, or not for this: its owner has \
             closed it, or the address is outside"
        }
        11 => "the peer's device failed",
        12 => "the peer's device did not answer: the host or the path is gone, or its queue pair was ended",
        13 => "the peer did not take immediates in time",
        5 => "the queue pair failed before it was this request's turn",
        _ => return None,
    })
}

impl Ring {
    /// Takes a completion of this queue pair.
    pub fn take(&mut self, wc: &ibv_wc, into: &mut Vec<Completion>) {
        match Ring::kind_of(wc.wr_id) {
            Kind::Request(count) => self.take_request(count, wc, into),
            Kind::Last => {
                self.return_rest(into);
                self.stage = Stage::Drained;
                into.push(Completion::Drained { queue: self.id });
            }
        }
    }

    fn take_request(&mut self, count: u32, wc: &ibv_wc, into: &mut Vec<Completion>) {
        let Some(before) = self.position(count) else { return };
        // The peer answers in order, so what did not ask was done before one that was done, or that failed.
        // Of one that was only flushed this does not follow.
        let flushed = wc.status == abi::IBV_WC_WR_FLUSH_ERR;
        for _ in 0..before {
            self.end_first(if flushed { Some((wc.status, 0)) } else { None }, into);
        }
        if wc.status == abi::IBV_WC_SUCCESS {
            return self.end_first(None, into);
        }
        self.end_first(Some((wc.status, wc.vendor_err)), into);
        self.fail_and_remember();
    }

    /// Returns the first request, with the status and the vendor's number if it failed.
    fn end_first(&mut self, failed: Option<(ibv_wc_status, u32)>, into: &mut Vec<Completion>) {
        let Some(request) = self.pop() else { return };
        let result = match failed {
            None => Ok(()),
            Some((status, vendor)) => Err(self.error(&request, status, vendor)),
        };
        into.push(Completion::Request { queue: self.id, token: request.token, result });
    }

    /// Returns all that is left: the device has none of it any more.
    pub fn return_rest(&mut self, into: &mut Vec<Completion>) {
        while self.in_flight() > 0 {
            self.end_first(Some((abi::IBV_WC_WR_FLUSH_ERR, 0)), into);
        }
    }

    fn error(&self, request: &Request, status: ibv_wc_status, vendor: u32) -> RequestError {
        let mut text = format!("{} (status {status}, vendor {vendor:#x})", self.verbs.status_text(status));
        if let Some(meaning) = meaning(status) {
            text = format!("{text}: {meaning}");
        }
        RequestError {
            op: match request.op {
                RmaOp::Read => "read",
                RmaOp::Write => "write",
            },
            len: request.len,
            remote: request.remote,
            place: self.place.clone(),
            status: status as i32,
            vendor,
            text,
        }
    }
}
