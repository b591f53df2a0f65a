//! Pages of GPUs: which transport they take, and what a GPU does that nobody can stop.
//!
//! The GPU is the stand-in's, whose streams can be stalled; each test has a process of its own.

use crate::common::*;
use crate::cuda::{self, Control};
use crate::faulty::Faults;
use crate::pair::{Kind, Memories, NO_DMABUF, OPS, Op, Pair, Standin, metric, options, whole};
use crate::wire::Harm;
use crate::{EFA, ROCE, VERBS};
use kvik_core::{Code, Error};
use kvik_engine::{Config, Engine, Grant, Preference, Region, Report, TransferOptions, Verify};
use std::time::{Duration, Instant};

const TCP: &Kind = &Kind { transport: "tcp", mechanism: "channel", memory: Memories::Gpu, ..Kind::NEW };
const OWN: &Kind = &Kind { transport: "self", mechanism: "copy", memory: Memories::Gpu, ..Kind::NEW };
/// Only one side's pages lie on a GPU.
const OTHER: &Kind = &Kind { granted: Some(Memories::Shared), ..*TCP };
const OWNER: &Kind = &Kind { granted: Some(Memories::Gpu), memory: Memories::Shared, ..*TCP };
/// The same, from a GPU to memory of the host, and from there to a GPU.
const DOWN: &Kind = &Kind { granted: Some(Memories::Gpu), memory: Memories::Shared, ..*OWN };
const UP: &Kind = &Kind { granted: Some(Memories::Shared), ..*OWN };
const PAGES: u32 = 64;
const PAGE: u64 = 64 << 10;
const SHORT: Duration = Duration::from_millis(80);

macro_rules! gpus {
    ($(fn $name:ident($control:ident) $check:block)*) => {
        $(#[test]
        fn $name() {
            let name = concat!(module_path!(), "::", stringify!($name));
            let name = name.split_once("::").map_or(name, |(_, name)| name);
            cuda::alone(name, &[], |$control: Control| $check);
        })*
    };
}

pub(crate) use gpus;

/// Every combination of memory on the two sides of which one is a GPU's.
const MIXED: [Kind; 3] = [
    Kind { memory: Memories::Gpu, ..Kind::NEW },
    Kind { memory: Memories::Gpu, granted: Some(Memories::Foreign), ..Kind::NEW },
    Kind { granted: Some(Memories::Gpu), ..Kind::NEW },
];

/// Whether pages that an operation copies come from a GPU. CUDA opens no memory of a process in that process again, so
/// the transport within a host is closed to those of two engines of one; [`ipc`](crate::ipc) is about those of two.
fn from_gpu(kind: &Kind, op: Op) -> bool {
    let source = if op == Op::Read { kind.granted.unwrap_or(kind.memory) } else { kind.memory };
    source == Memories::Gpu
}

fn engine(transport: Preference) -> Engine {
    Engine::start(Config { transport, ..Config::default() }).unwrap()
}

fn regions(kind: &Kind, owner: &Engine, other: &Engine) -> (Region, Region) {
    let bytes = u64::from(PAGES) * PAGE;
    (kind.granted_region(owner, bytes, 1), kind.region(other, bytes, 0x5A))
}

/// A transfer over a GPU that stands still: how it ended, by its deadline, where a copy was begun before that.
pub(crate) struct Stalled {
    pub there: Region,
    pub here: Region,
    pub grant: Grant,
    pub error: Error,
}

impl Stalled {
    pub fn new(pair: &Pair, gpu: Control, op: Op) -> Stalled {
        in_time(Duration::from_millis(600), |deadline| Stalled::within(pair, gpu, op, deadline))
    }

    fn within(pair: &Pair, gpu: Control, op: Op, deadline: Duration) -> Option<Stalled> {
        let (there, here) = pair.regions(PAGES, PAGE);
        let grant = pair.grant(op, &whole(&there, PAGE));
        let names = ["DtoH", "HtoD", "DtoD"].map(|way| format!("cuMemcpy{way}Async_v2"));
        let copies = || names.iter().map(|name| gpu.count(name)).sum::<i64>();
        let before = copies();
        gpu.say("stall");
        let (began, busy) = (Instant::now(), watch::start());
        let ended = pair.begin(op, &whole(&here, PAGE), &grant, deadline).wait(Some(PATIENCE));
        let (took, most) = (began.elapsed(), busy.elapsed());
        assert!(
            took >= deadline && most < deadline + Duration::from_secs(3),
            "{op:?}: {took:?}, busy {most:?}"
        );
        if copies() == before {
            gpu.say("release");
            return None;
        }
        Some(Stalled { there, here, grant, error: ended.map(drop).unwrap_err() })
    }
}

/// A stream that stands still ends its transfer by the deadline, says whose pages are held, and lets go of them when
/// it goes on: nothing is written afterwards.
pub(crate) fn stalls(pair: &Pair, control: Control) {
    pair.pass();
    for op in OPS {
        let Stalled { there, here, grant, error } = Stalled::new(pair, control, op);
        // Each side speaks for its own pages.
        if here.device().is_some() {
            assert_eq!(error.code, Code::PagesQuarantined, "{op:?}: {error}");
            assert!(error.text.contains("GPU 0") && error.text.contains("deadline"), "{error}");
            assert_eq!(code(here.close(SHORT)), Code::RegionBusy);
        } else {
            assert_eq!(error.code, Code::DeadlineExceeded, "{op:?}: {error}");
        }
        if there.device().is_some() {
            assert_eq!(code(grant.revoke(SHORT)), Code::PagesQuarantined);
        }
        control.say("release");
        grant.revoke(PATIENCE).unwrap();
        here.close(PATIENCE).unwrap();
        blank(&there, 0xEE);
        pair.pass();
        assert!(bytes(&there).iter().all(|byte| *byte == 0xEE), "{op:?}: a copy came late");
        there.close(PATIENCE).unwrap();
    }
    assert_eq!(metric(&pair.owner, "kvik_quarantined_pages"), 0.0);
}

gpus! {
    fn a_stalled_gpu_of_who_began_ends_its_transfers_by_the_deadline_and_its_pages_are_said_to_be_held(control) {
        stalls(&Pair::new(OTHER), control);
    }
    fn a_stalled_gpu_of_the_owner_ends_transfers_by_the_deadline_and_keeps_its_grant(control) {
        stalls(&Pair::new(OWNER), control);
    }
    fn a_stalled_gpu_ends_copies_of_an_engine_by_the_deadline_and_their_pages_are_said_to_be_held(control) {
        stalls(&Pair::new(OWN), control);
    }
    fn a_stalled_gpu_keeps_no_engine_from_closing(control) {
        let pair = Pair::new(TCP);
        pair.pass();
        let (there, here) = pair.regions(PAGES, PAGE);
        let grant = pair.grant(Op::Read, &whole(&there, PAGE));
        control.say("stall");
        let before = control.count("cuMemcpyDtoHAsync_v2");
        let transfer = pair.begin(Op::Read, &whole(&here, PAGE), &grant, PATIENCE);
        wait_until("a copy to be begun", || control.count("cuMemcpyDtoHAsync_v2") > before);
        let began = watch::start();
        let error = pair.owner.close(Duration::from_millis(700)).unwrap_err();
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        assert_eq!(error.code, Code::PagesQuarantined, "{error}");
        control.say("release");
        assert_eq!(code(transfer.wait(Some(PATIENCE))), Code::PeerLost);
        here.close(PATIENCE).unwrap();
        there.close(PATIENCE).unwrap();
    }
    fn a_read_is_done_only_when_the_gpu_has_its_bytes(control) {
        let kind = Kind { granted: Some(Memories::Shared), ..*TCP };
        let (owner, other) = (engine(Preference::Tcp), engine(Preference::Tcp));
        // Each copy takes so long that whoever does not wait for it is seen to.
        control.say("delay micros=20000");
        for _ in 0..8 {
            let (there, here) = regions(&kind, &owner, &other);
            let grant = owner.grant(&whole(&there, PAGE), many()).unwrap();
            let options = TransferOptions { verify: Some(Verify::Full), ..within(PATIENCE) };
            let transfer = other.read(&whole(&here, PAGE), grant.ticket(), None, options).unwrap();
            transfer.wait(Some(PATIENCE)).unwrap();
            assert!(control.peek(here.addr(), here.bytes() as usize) == bytes(&there), "done, and not there");
        }
    }
    fn a_copy_that_goes_wrong_is_found_wherever_it_goes(control) {
        // There, and down from either side; down, and down again; up, and down again.
        for (kind, least) in [(OWN, 3), (DOWN, 2), (UP, 2)] {
            let pair = Pair::new(kind);
            let (there, here) = pair.regions(PAGES, PAGE);
            let read = |nth: usize, verify| {
                let grant = pair.grant(Op::Read, &whole(&there, PAGE));
                control.say(&format!("flip nth={nth}"));
                let read = pair.run(Op::Read, &whole(&here, PAGE), &grant, verify);
                control.say("clear");
                read.map(drop).map_err(|error| error.code)
            };
            // Of all copies that a transfer takes one is damaged, each in turn; then none is.
            let found = (1..1000).take_while(|nth| match read(*nth, Verify::Full) {
                Ok(()) => false,
                Err(code) => code == Code::ChecksumMismatch || panic!("{code:?}"),
            });
            assert!(found.count() >= least);
            assert!(bytes(&here) == bytes(&there));
            assert_eq!(read(1, Verify::Off), Ok(()), "what is not to be checked is checked");
            assert!(bytes(&here) != bytes(&there));
        }
    }
    fn a_gpu_that_fails_fails_its_transfers_and_keeps_nothing(control) {
        for kind in [TCP, OWN] {
            let pair = Pair::new(kind);
            let (there, here) = pair.regions(PAGES, PAGE);
            let grant = pair.grant(Op::Read, &whole(&there, PAGE));
            if kind == TCP {
                pair.run(Op::Read, &whole(&here, PAGE), &grant, Verify::Full).unwrap();
                continue;
            }
            control.say("poison device=0 code=700");
            let failed = pair.begin(Op::Read, &whole(&here, PAGE), &grant, PATIENCE);
            let error = failed.wait(Some(PATIENCE)).unwrap_err();
            assert_eq!(error.code, Code::DeviceFailed, "{error}");
            assert!(error.text.contains("context is lost"), "{error}");
            here.close(PATIENCE).unwrap();
        }
    }
    fn a_gpu_that_fails_under_a_transfer_over_tcp_fails_it(control) {
        let pair = Pair::new(TCP);
        for (op, held) in [(Op::Write, true), (Op::Read, false)] {
            let (there, here) = pair.regions(PAGES, PAGE);
            let grant = pair.grant(op, &whole(&there, PAGE));
            if held {
                pair.run(op, &whole(&here, PAGE), &grant, Verify::Full).unwrap();
                continue;
            }
            control.say("stall");
            let before = control.count("cuMemcpyDtoHAsync_v2");
            let failed = pair.begin(op, &whole(&here, PAGE), &grant, PATIENCE);
            wait_until("a copy to be begun", || control.count("cuMemcpyDtoHAsync_v2") > before);
            control.say("poison device=0 code=719");
            let error = failed.wait(Some(PATIENCE)).unwrap_err();
            assert_eq!(error.code, Code::DeviceFailed, "{error}");
            here.close(PATIENCE).unwrap();
        }
    }
    fn a_gpu_that_fails_under_a_transfer_over_tcp_keeps_nothing_of_the_owner(control) {
        let pair = Pair::new(OWNER);
        pair.pass();
        let (there, here) = pair.regions(PAGES, PAGE);
        let grant = pair.grant(Op::Read, &whole(&there, PAGE));
        let copies = control.count("cuMemcpyDtoHAsync_v2");
        control.say("stall");
        let failed = pair.begin(Op::Read, &whole(&here, PAGE), &grant, PATIENCE);
        wait_until("copies into both halves of each channel's buffer", || {
            control.count("cuMemcpyDtoHAsync_v2") >= copies + 8
        });
        control.say("poison device=0 code=719");
        assert_eq!(code(failed.wait(Some(PATIENCE))), Code::DeviceFailed);
        grant.revoke(PATIENCE).unwrap();
        there.close(PATIENCE).unwrap();
        pair.owner.close(PATIENCE).unwrap();
    }
    fn a_chunk_that_a_gpu_does_not_take_leaves_the_end_of_the_one_before(control) {
        // All chunks go by one buffer.
        let one = || OWNER.engine_with(&Faults::new(1), Config { channels: 1, ..Config::default() });
        let (owner, other) = (one(), one());
        let (there, here) = (OWNER.granted_region(&owner, PAGE, 1), OWNER.region(&other, PAGE, 0x5A));
        let [first, second] = [(); 2].map(|()| owner.grant(&whole(&there, PAGE), options(Op::Read)).unwrap());
        let read = |grant: &Grant| {
            other.read(&whole(&here, PAGE), grant.ticket(), None, within(PATIENCE)).unwrap()
        };
        read(&first).wait(Some(PATIENCE)).unwrap();
        let copies = control.count("cuMemcpyDtoHAsync_v2");
        control.say("stall");
        let left = read(&first);
        wait_until("a copy to be begun", || control.count("cuMemcpyDtoHAsync_v2") > copies);
        left.cancel();
        assert_eq!(code(left.wait(Some(PATIENCE))), Code::Cancelled);
        control.say("fail cuEventRecord nth=1 code=719");
        assert_eq!(code(read(&second).wait(Some(PATIENCE))), Code::DeviceFailed);
        // Where all is lost nothing is in flight.
        control.say("poison device=0 code=719");
        first.revoke(PATIENCE).unwrap();
    }
    fn a_gpu_that_fails_before_a_chunk_has_come_whole_has_failed_it(control) {
        const WIRE: &Kind = &Kind { wire: true, ..*OTHER };
        const SMALL: u64 = 4 << 10;
        let pair = Pair::new(WIRE);
        let (there, here) = pair.regions(16, SMALL);
        let grant = pair.grant(Op::Read, &whole(&there, SMALL));
        let wire = pair.wire.as_ref().unwrap();
        // Among the checksums behind the chunk's pages.
        wire.harm(Harm::Hold, 16 * SMALL + 100);
        let copies = control.count("cuMemcpyHtoDAsync_v2");
        control.say("stall");
        let options = TransferOptions { verify: Some(Verify::Full), ..within(PATIENCE) };
        let failed = pair.begin_with(Op::Read, &whole(&here, SMALL), &grant, options);
        wait_until("a copy to be begun", || control.count("cuMemcpyHtoDAsync_v2") > copies);
        control.say("poison device=0 code=719");
        wire.release();
        assert_eq!(code(failed.wait(Some(PATIENCE))), Code::DeviceFailed);
        assert_eq!(wire.harmed(), 1);
    }
    fn auto_finds_a_transport_wherever_the_pages_lie_and_says_what_it_rejected(_control) {
        let (owner, other) = (engine(Preference::Auto), engine(Preference::Auto));
        for kind in MIXED {
            for op in OPS {
                let (there, here) = regions(&kind, &owner, &other);
                let grant = owner.grant(&whole(&there, PAGE), options(op)).unwrap();
                let begun = match op {
                    Op::Read => other.read(&whole(&here, PAGE), grant.ticket(), None, within(PATIENCE)),
                    Op::Write => other.write(&whole(&here, PAGE), grant.ticket(), None, within(PATIENCE)),
                };
                let report = begun.unwrap().wait(Some(PATIENCE)).unwrap();
                let why = rejected(&report.rejected_transports);
                if from_gpu(&kind, op) {
                    assert_eq!(report.transport.name(), "tcp");
                    assert!(why.contains("local: ") && why.contains("exported itself"), "{why}");
                } else {
                    assert_eq!(report.transport.name(), "local");
                    assert_eq!(why, "tcp: local reaches the peer too, and is preferred");
                }
                assert!(bytes(&there) == bytes(&here), "{op:?}");
            }
        }
    }
    fn local_by_name_refuses_pages_of_its_own_processs_gpu_by_name(_control) {
        let (owner, other) = (engine(Preference::Local), engine(Preference::Local));
        for kind in MIXED {
            for op in OPS {
                let (there, here) = regions(&kind, &owner, &other);
                let grant = owner.grant(&whole(&there, PAGE), options(op)).unwrap();
                let before = (bytes(&there), bytes(&here));
                let begun = match op {
                    Op::Read => other.read(&whole(&here, PAGE), grant.ticket(), None, within(PATIENCE)),
                    Op::Write => other.write(&whole(&here, PAGE), grant.ticket(), None, within(PATIENCE)),
                };
                let ended = begun.unwrap().wait(Some(PATIENCE));
                if !from_gpu(&kind, op) {
                    assert_eq!(ended.unwrap().transport.name(), "local");
                    assert!(bytes(&there) == bytes(&here), "{op:?}");
                    continue;
                }
                let error = ended.unwrap_err();
                assert_eq!(error.code, Code::TransportUnavailable, "{error}");
                assert!(error.text.contains("lies on a GPU") && error.text.contains("exported itself"), "{error}");
                assert!((bytes(&there), bytes(&here)) == before, "{op:?}: something moved");
            }
        }
    }
    fn what_channels_have_of_a_gpu_ends_with_them(control) {
        {
            let pair = Pair::new(TCP);
            pair.pass();
            assert!(control.count("pinned") > 0 && control.count("streams") > 0);
        }
        wait_until("the buffers to be freed", || control.count("pinned") == 0 && control.count("streams") == 0);
    }
}

/// NICs of RoCE devices and of EFA, by their stand-ins, and those of a plug-in.
const ROCE_NICS: Kind = Kind { standin: Some(ROCE), ..VERBS };
const EFA_NICS: Kind = Kind { standin: Some(Standin::NEW), ..EFA };
const PLUGIN_NICS: Kind =
    Kind { nics: "plugin", sample: true, transport: "plugin", mechanism: "sample", ..Kind::NEW };

/// Two engines over a stand-in for NICs with these settings, with what the GPUs are told before anything is registered.
/// `name` is that of the test.
fn beside_nics(
    nics: &Kind,
    name: &str,
    settings: &[(&str, &str)],
    told: &str,
    check: impl FnOnce(&Engine, &Engine),
) {
    let nics = Kind { memory: Memories::Gpu, ..*nics };
    cuda::alone(&format!("gpus::{name}"), settings, |_| {
        nics.place(&format!("{}::{name}", module_path!()), |_| {
            Control.say(told);
            let [owner, other] =
                [(); 2].map(|()| Engine::start(Config { nics: nics.nics(), ..Config::default() }).unwrap());
            check(&owner, &other);
        });
    });
}

/// Reads from each combination of memories under each preference: what the report, or the error, says.
fn reads(owner: &Engine, other: &Engine, mut seen: impl FnMut(&Kind, Preference, Result<Report, Error>)) {
    for kind in MIXED {
        let (there, here) = regions(&kind, owner, other);
        let grant = owner.grant(&whole(&there, PAGE), many()).unwrap();
        for want in [Preference::Nics, Preference::Auto, Preference::Tcp] {
            blank(&here, 0);
            let options =
                TransferOptions { transport: Some(want), verify: Some(Verify::Full), ..within(PATIENCE) };
            let read = other.read(&whole(&here, PAGE), grant.ticket(), None, options).unwrap();
            let ended = read.wait(Some(PATIENCE));
            assert!(ended.is_err() || bytes(&there) == bytes(&here));
            seen(&kind, want, ended);
        }
    }
}

/// Reads and a write under each preference: `auto` takes NICs that know the GPUs' memory wherever it lies, unless the
/// way within the host is open.
fn takes_nics(nics: &Kind, name: &str) {
    beside_nics(nics, name, &[], "clear", |owner, other| {
        let auto = |kind: &Kind, op| if from_gpu(kind, op) { nics.transport } else { "local" };
        reads(owner, other, |kind, want, ended| {
            let report = ended.unwrap();
            let expected = match want {
                Preference::Tcp => "tcp",
                Preference::Auto => auto(kind, Op::Read),
                _ => nics.transport,
            };
            assert_eq!(report.transport.name(), expected);
            let why = rejected(&report.rejected_transports);
            let passed = want == Preference::Auto && expected != "local";
            assert!(!passed || why.contains("lies on a GPU"), "{why}");
        });
        for kind in MIXED {
            let (there, here) = regions(&kind, owner, other);
            let grant = owner.grant(&whole(&there, PAGE), to_write()).unwrap();
            let write = other.write(&whole(&here, PAGE), grant.ticket(), None, within(PATIENCE)).unwrap();
            assert_eq!(write.wait(Some(PATIENCE)).unwrap().transport.name(), auto(&kind, Op::Write));
            assert!(bytes(&there) == bytes(&here));
        }
    });
}

#[test]
fn auto_takes_verbs_that_know_the_gpus_memory_wherever_it_lies() {
    takes_nics(&ROCE_NICS, "auto_takes_verbs_that_know_the_gpus_memory_wherever_it_lies");
}

#[test]
fn auto_takes_libfabric_that_knows_the_gpus_memory_wherever_it_lies() {
    takes_nics(&EFA_NICS, "auto_takes_libfabric_that_knows_the_gpus_memory_wherever_it_lies");
}

#[test]
fn auto_takes_a_plug_in_that_knows_the_gpus_memory_wherever_it_lies() {
    takes_nics(&PLUGIN_NICS, "auto_takes_a_plug_in_that_knows_the_gpus_memory_wherever_it_lies");
}

/// Pages of a GPU that NICs cannot know go through page-locked memory, of the NICs of each side that has such pages; and other
/// regions over the NICs as before.
fn goes_through_rings(nics: &Kind, name: &str, settings: &[(&str, &str)], told: &str, reason: &str) {
    beside_nics(nics, name, settings, told, |owner, other| {
        reads(owner, other, |kind, want, ended| {
            let owners = from_gpu(kind, Op::Read);
            let report = ended.unwrap();
            let expected = match want {
                Preference::Tcp => "tcp",
                Preference::Auto if !owners => "local",
                _ => nics.transport,
            };
            assert_eq!(report.transport.name(), expected, "{want:?}");
            if expected != nics.transport {
                return;
            }
            let how = report.mechanism;
            assert_eq!(how.contains("through a ring of the owner's"), owners, "{how}");
            assert_eq!(how.contains("staged for GPU 0"), kind.memory == Memories::Gpu, "{how}");
            assert!(kind.memory != Memories::Gpu || how.contains(reason), "{how}");
        });
        let (there, here) = regions(&Kind::NEW, owner, other);
        let grant = owner.grant(&whole(&there, PAGE), many()).unwrap();
        let options = TransferOptions { transport: Some(Preference::Nics), ..within(PATIENCE) };
        let report =
            other.read(&whole(&here, PAGE), grant.ticket(), None, options).unwrap().wait(None).unwrap();
        assert_eq!(report.transport.name(), nics.transport);
    });
}

macro_rules! goes_through_rings {
    ($($name:ident: $nics:expr, $settings:expr, $told:expr, $reason:literal;)*) => {
        $(#[test]
        fn $name() {
            goes_through_rings(&$nics, stringify!($name), &$settings, $told, $reason);
        })*
    };
}

goes_through_rings! {
    a_gpu_without_dma_bufs_goes_through_rings_of_verbs:
        ROCE_NICS, [], NO_DMABUF, "open kernel modules";
    a_gpu_without_dma_bufs_goes_through_rings_of_libfabric:
        EFA_NICS, [], NO_DMABUF, "open kernel modules";
    a_libfabric_older_than_dma_bufs_has_gpus_go_through_rings:
        EFA_NICS, [("KVIK_STANDIN_OLD", "1"), ("FI_EFA_ENABLE_SHM_TRANSFER", "0")], "clear", "install 1.20";
    a_provider_without_memory_of_gpus_has_them_go_through_rings:
        EFA_NICS, [("KVIK_STANDIN_HMEM", "none")], "clear", "FI_HMEM";
    a_provider_that_copies_by_cuda_has_gpus_go_through_rings:
        EFA_NICS, [("KVIK_STANDIN_HMEM", "copies")], "clear", "GPUDirect RDMA";
    a_provider_without_dma_bufs_has_gpus_go_through_rings:
        EFA_NICS, [("KVIK_STANDIN_HMEM", "mapped")], "clear", "rdma-core 34";
    a_gpu_without_dma_bufs_goes_through_rings_of_a_plug_in_that_needs_them:
        PLUGIN_NICS, [], NO_DMABUF, "open kernel modules";
    a_plug_in_that_reaches_no_gpus_has_them_go_through_rings:
        PLUGIN_NICS, [("KVIK_SAMPLE_MEMORY", "host")], "clear", "it reaches no memory of GPU 0";
}

/// A read is flushed by who reads, and a write by the owner before it hears of the end of its grant.
fn flushes(nics: &Kind, name: &str) {
    beside_nics(nics, name, &[], "attribute id=118 value=0", |owner, other| {
        Control.say("attribute id=117 value=1");
        let flushes = || Control.count("cuFlushGPUDirectRDMAWrites");
        let options = || TransferOptions {
            transport: Some(Preference::Nics),
            verify: Some(Verify::Off),
            ..within(PATIENCE)
        };
        let (there, here) = regions(OTHER, owner, other);
        let grant = owner.grant(&whole(&there, PAGE), many()).unwrap();
        other.read(&whole(&here, PAGE), grant.ticket(), None, options()).unwrap().wait(None).unwrap();
        let read = flushes();
        assert!(read > 0, "what was read was not flushed");
        let (there, here) = regions(OWNER, owner, other);
        let once = kvik_engine::GrantOptions { uses: kvik_core::Use::Once(1), ..to_write() };
        let grant = owner.grant(&whole(&there, PAGE), once).unwrap();
        other.write(&whole(&here, PAGE), grant.ticket(), None, options()).unwrap().wait(None).unwrap();
        assert_eq!(grant.wait(PATIENCE), Some(kvik_core::GrantState::Consumed));
        assert!(flushes() > read, "what was written was not flushed");
        assert!(bytes(&there) == bytes(&here));
    });
}

#[test]
fn what_verbs_have_written_is_flushed_where_the_gpu_does_not_order_it() {
    flushes(&ROCE_NICS, "what_verbs_have_written_is_flushed_where_the_gpu_does_not_order_it");
}

#[test]
fn what_libfabric_has_written_is_flushed_where_the_gpu_does_not_order_it() {
    flushes(&EFA_NICS, "what_libfabric_has_written_is_flushed_where_the_gpu_does_not_order_it");
}

#[test]
fn what_a_plug_in_has_written_is_flushed_where_the_gpu_does_not_order_it() {
    flushes(&PLUGIN_NICS, "what_a_plug_in_has_written_is_flushed_where_the_gpu_does_not_order_it");
}
