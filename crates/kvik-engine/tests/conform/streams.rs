//! Grants and transfers that come behind a stream of the program's: nothing of their pages is touched before the stream
//! has done what it was given.
//!
//! The GPU is the stand-in's, whose kernels take as long as they are told to, and whose streams can be stalled; each test
//! has a process of its own.

use crate::common::*;
use crate::cuda::{self, App, Control};
use crate::gpus::gpus;
use crate::pair::{Kind, Memories, Pair, whole};
use crate::{EFA, ROCE, VERBS};
use kvik_core::{Code, GrantState, Right, Use};
use kvik_engine::{CallerStream, Config, Engine, GrantOptions, Preference, Region, TransferOptions};
use std::time::Duration;

const GPU: &Kind = &Kind { memory: Memories::Gpu, ..Kind::NEW };
const HOST: &Kind = &Kind { memory: Memories::Shared, ..Kind::NEW };
const PAGES: u32 = 16;
const PAGE: u64 = 64 << 10;
const BYTES: u64 = PAGES as u64 * PAGE;
/// A kernel of this long is seen by whoever does not wait for it.
const KERNEL: Duration = Duration::from_millis(150);

fn engine(transport: Preference) -> Engine {
    Engine::start(Config { transport, ..Config::default() }).unwrap()
}

/// A stream of the program's that has just been given a kernel, which fills the region's memory after a while.
fn busy(app: &App, region: &Region, value: u8, time: Duration) -> CallerStream {
    stream(app, region.addr(), region.bytes() as usize, value, time)
}

/// Streams get nowhere while this lives; what frees memory waits for them.
struct Stuck(Control);

impl Drop for Stuck {
    fn drop(&mut self) {
        self.0.say("release");
    }
}

/// A stream that gets nowhere for now.
fn stuck(app: &App, control: Control) -> (CallerStream, Stuck) {
    let at = app.alloc(1);
    control.say("stall");
    (stream(app, at, 1, 0, Duration::ZERO), Stuck(control))
}

fn stream(app: &App, at: usize, len: usize, value: u8, time: Duration) -> CallerStream {
    let stream = app.stream(false);
    app.fill(stream, at, len, value, time.as_micros() as u32);
    // SAFETY: a stream that is never destroyed.
    unsafe { CallerStream::new(stream) }
}

fn all(bytes: &[u8], value: u8) -> bool {
    bytes.iter().all(|byte| *byte == value)
}

fn granted(after: CallerStream) -> GrantOptions {
    GrantOptions { uses: Use::Many, after: Some(after), ..GrantOptions::default() }
}

fn behind(after: CallerStream, deadline: Duration) -> TransferOptions {
    TransferOptions { after: Some(after), ..within(deadline) }
}

/// The four ways in which a kernel and a transfer can meet in the memory of one GPU, over one transport.
fn in_order(owner: &Engine, other: &Engine) {
    let app = App::on(0);
    for round in 0..4 {
        let (there, here) = (GPU.region(owner, BYTES, 1), GPU.region(other, BYTES, 2));
        // What the owner's kernel writes is what the reader gets.
        let after = busy(&app, &there, 10 + round, KERNEL);
        let grant = owner.grant(&whole(&there, PAGE), granted(after)).unwrap();
        let read = other.read(&whole(&here, PAGE), grant.ticket(), None, within(PATIENCE)).unwrap();
        read.wait(Some(PATIENCE)).unwrap();
        assert!(all(&bytes(&here), 10 + round), "a page was read before it was written");
        // What the reader's own kernel still does with its pages is over before bytes come.
        let after = busy(&app, &here, 99, KERNEL);
        let read = other.read(&whole(&here, PAGE), grant.ticket(), None, behind(after, PATIENCE)).unwrap();
        read.wait(Some(PATIENCE)).unwrap();
        assert!(all(&bytes(&here), 10 + round), "a page was loaded while it was in use");
        grant.revoke(PATIENCE).unwrap();
        // What a writer's kernel writes is what the owner gets, behind the owner's own kernel.
        let mine = busy(&app, &there, 77, KERNEL);
        let options = GrantOptions { right: Right::Write, ..granted(mine) };
        let grant = owner.grant(&whole(&there, PAGE), options).unwrap();
        let after = busy(&app, &here, 20 + round, KERNEL);
        let write = other.write(&whole(&here, PAGE), grant.ticket(), None, behind(after, PATIENCE)).unwrap();
        write.wait(Some(PATIENCE)).unwrap();
        assert!(all(&bytes(&there), 20 + round), "a page was written too early, or from too early");
        grant.revoke(PATIENCE).unwrap();
        here.close(PATIENCE).unwrap();
        there.close(PATIENCE).unwrap();
    }
}

gpus! {
    fn pages_wait_for_streams_over_tcp(_control) {
        in_order(&engine(Preference::Tcp), &engine(Preference::Tcp));
    }
    fn who_takes_the_grant_back_waits_for_no_stream(control) {
        let (app, owner, other) = (App::on(0), engine(Preference::Tcp), engine(Preference::Tcp));
        let (there, here) = (GPU.region(&owner, BYTES, 1), HOST.region(&other, BYTES, 2));
        let (after, _stuck) = stuck(&app, control);
        let grant = owner.grant(&whole(&there, PAGE), granted(after)).unwrap();
        let read = other.read(&whole(&here, PAGE), grant.ticket(), None, within(PATIENCE)).unwrap();
        assert_eq!(code(read.wait(Some(KERNEL))), Code::WaitTimeout);
        assert_eq!(grant.state(), GrantState::Live);
        let began = watch::start();
        grant.revoke(PATIENCE).unwrap();
        assert_eq!(code(read.wait(Some(PATIENCE))), Code::GrantRevoked);
        // So does an engine that closes.
        let grant = owner.grant(&whole(&there, PAGE), granted(after)).unwrap();
        owner.close(PATIENCE).unwrap();
        assert_eq!(grant.state(), GrantState::Closed);
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    }
    fn a_mark_is_reached_when_the_stream_has_done_what_was_before_it(control) {
        let (app, owner) = (App::on(0), engine(Preference::Tcp));
        let there = GPU.region(&owner, BYTES, 1);
        for value in 10..14 {
            let mark = there.mark(busy(&app, &there, value, KERNEL)).unwrap();
            mark.wait(Some(PATIENCE)).unwrap();
            assert!(all(&bytes(&there), value), "the mark was reached before the kernel had ended");
            mark.wait(Some(Duration::ZERO)).unwrap();
        }
        let (after, _stuck) = stuck(&app, control);
        let mark = there.mark(after).unwrap();
        assert_eq!(code(mark.wait(Some(KERNEL))), Code::WaitTimeout);
        assert_eq!(code(HOST.region(&owner, BYTES, 2).mark(after).map(drop)), Code::InvalidArgument);
        // Who waits hears of an engine that closes.
        let waiting = std::thread::spawn(move || code(mark.wait(Some(PATIENCE))));
        owner.close(PATIENCE).unwrap();
        assert_eq!(waiting.join().unwrap(), Code::EngineClosed);
        assert_eq!(code(there.mark(after).map(drop)), Code::EngineClosed);
    }
    fn a_transfer_waits_for_its_stream_until_its_deadline(control) {
        let (app, owner, other) = (App::on(0), engine(Preference::Tcp), engine(Preference::Tcp));
        let (there, here) = (HOST.region(&owner, BYTES, 1), GPU.region(&other, BYTES, 2));
        let grant = owner.grant(&whole(&there, PAGE), many()).unwrap();
        let (after, _stuck) = stuck(&app, control);
        let read = |deadline| other.read(&whole(&here, PAGE), grant.ticket(), None, behind(after, deadline)).unwrap();
        let error = read(KERNEL).wait(Some(PATIENCE)).unwrap_err();
        assert_eq!(error.code, Code::DeadlineExceeded, "{error}");
        assert!(error.text.contains("stream"), "{error}");
        let cancelled = read(PATIENCE);
        cancelled.cancel();
        assert_eq!(code(cancelled.wait(Some(PATIENCE))), Code::Cancelled);
        let open = read(PATIENCE);
        other.close(PATIENCE).unwrap();
        assert_eq!(code(open.wait(Some(PATIENCE))), Code::EngineClosed);
    }
    fn a_transfer_within_an_engine_waits_too(_control) {
        let (app, engine) = (App::on(0), engine(Preference::Auto));
        let (there, here) = (GPU.region(&engine, BYTES, 1), GPU.region(&engine, BYTES, 2));
        let grant = engine.grant(&whole(&there, PAGE), many()).unwrap();
        let after = busy(&app, &here, 99, KERNEL);
        let read = engine.read(&whole(&here, PAGE), grant.ticket(), None, behind(after, PATIENCE)).unwrap();
        read.wait(Some(PATIENCE)).unwrap();
        assert!(bytes(&here) == bytes(&there), "a page was loaded while it was in use");
        // So does one that has a grant which is not ready.
        let grant = engine.grant(&whole(&there, PAGE), granted(busy(&app, &there, 7, KERNEL))).unwrap();
        let reads = [(); 2].map(|()| engine.read(&whole(&here, PAGE), grant.ticket(), None, within(PATIENCE)).unwrap());
        reads.iter().for_each(|read| drop(read.wait(Some(PATIENCE)).unwrap()));
        assert!(all(&bytes(&here), 7), "a page was read before it was written");
        // And one that waits for both, of which the grant is the slower.
        let grant = engine.grant(&whole(&there, PAGE), granted(busy(&app, &there, 8, 2 * KERNEL))).unwrap();
        let after = busy(&app, &here, 99, KERNEL);
        let read = engine.read(&whole(&here, PAGE), grant.ticket(), None, behind(after, PATIENCE)).unwrap();
        read.wait(Some(PATIENCE)).unwrap();
        assert!(all(&bytes(&here), 8), "a page was read before it was written");
    }
    fn a_device_that_fails_takes_back_what_waits_for_it(control) {
        let (app, owner, other) = (App::on(0), engine(Preference::Tcp), engine(Preference::Tcp));
        let (there, here) = (GPU.region(&owner, BYTES, 1), GPU.region(&other, BYTES, 2));
        let (after, _stuck) = stuck(&app, control);
        let grant = owner.grant(&whole(&there, PAGE), granted(after)).unwrap();
        let free = owner.grant(&whole(&there, PAGE), many()).unwrap();
        let waits = behind(after, PATIENCE);
        let read = other.read(&whole(&here, PAGE), free.ticket(), None, waits).unwrap();
        control.say("poison device=0 code=719");
        assert_eq!(grant.wait(PATIENCE), Some(GrantState::Revoked));
        assert_eq!(code(read.wait(Some(PATIENCE))), Code::DeviceFailed);
    }
    fn what_no_stream_orders_is_refused(_control) {
        let (app, owner) = (App::on(0), engine(Preference::Tcp));
        let (gpu, host) = (GPU.region(&owner, BYTES, 1), HOST.region(&owner, BYTES, 2));
        let after = stream(&app, app.alloc(1), 1, 0, Duration::ZERO);
        let error = owner.grant(&whole(&host, PAGE), granted(after)).err().unwrap();
        assert_eq!(error.code, Code::InvalidArgument, "{error}");
        let grant = owner.grant(&whole(&gpu, PAGE), many()).unwrap();
        let error = owner.read(&whole(&host, PAGE), grant.ticket(), None, behind(after, PATIENCE)).err().unwrap();
        assert_eq!(error.code, Code::InvalidArgument, "{error}");
        // Nothing of either is left.
        host.close(PATIENCE).unwrap();
    }
}

/// The two of them that a ring of a NIC takes part in: pages on the GPU of who begins the transfer, and the host's.
fn in_order_through_a_ring(pair: &Pair) {
    let app = App::on(0);
    for round in 0..4 {
        let (there, here) = pair.regions(PAGES, PAGE);
        let grant = pair.owner.grant(&whole(&there, PAGE), many()).unwrap();
        let after = busy(&app, &here, 99, KERNEL);
        let read =
            pair.other.read(&whole(&here, PAGE), grant.ticket(), None, behind(after, PATIENCE)).unwrap();
        read.wait(Some(PATIENCE)).unwrap();
        assert!(bytes(&here) == bytes(&there), "a page was loaded while it was in use");
        grant.revoke(PATIENCE).unwrap();
        let grant = pair.owner.grant(&whole(&there, PAGE), to_write()).unwrap();
        let after = busy(&app, &here, 20 + round, KERNEL);
        let write =
            pair.other.write(&whole(&here, PAGE), grant.ticket(), None, behind(after, PATIENCE)).unwrap();
        write.wait(Some(PATIENCE)).unwrap();
        assert!(all(&bytes(&there), 20 + round), "a page was written before the kernel had written it");
    }
}

#[test]
fn pages_wait_for_streams_through_a_ring() {
    const KIND: &Kind = &crate::STAGED_VERBS;
    KIND.place(concat!(module_path!(), "::pages_wait_for_streams_through_a_ring"), |_| {
        let pair = Pair::new(KIND);
        pair.pass();
        in_order_through_a_ring(&pair);
    });
}

/// NICs that write and read the GPU themselves are no exception.
fn over_nics(kind: &'static Kind, name: &str) {
    kind.place(name, |_| {
        let pair = Pair::new(kind);
        pair.pass();
        in_order(&pair.owner, &pair.other);
    });
}

#[test]
fn pages_wait_for_streams_over_verbs() {
    const KIND: &Kind = &Kind { memory: Memories::Gpu, standin: Some(ROCE), ..VERBS };
    over_nics(KIND, concat!(module_path!(), "::pages_wait_for_streams_over_verbs"));
}

#[test]
fn pages_wait_for_streams_over_libfabric() {
    const KIND: &Kind = &Kind { memory: Memories::Gpu, standin: Some(crate::pair::Standin::NEW), ..EFA };
    over_nics(KIND, concat!(module_path!(), "::pages_wait_for_streams_over_libfabric"));
}
