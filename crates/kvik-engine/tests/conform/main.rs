//! What every transport keeps, written once.
//!
//! The table at the end of this file has a line for each transport; whoever adds a transport adds a line, and every
//! check runs over it. The checks use the engine's public face, since what they ask about (deadlines, revocation,
//! death) is decided there; what goes wrong is injected between the engine and the transport's threads
//! ([`faulty`]), so that "in the middle" is a state that a test holds, not a race that it may lose.
//! What happens to bytes on a wire is injected by a proxy ([`wire`]).
//!
//! Seeds are printed; `KVIK_SEED` repeats one.

/// Tests of the names of functions in the module's `checks`, each run by its `with`.
macro_rules! tests {
    ($of:expr; $($name:ident)*) => {
        $(#[test]
        fn $name() {
            with($of, concat!(module_path!(), "::", stringify!($name)), checks::$name);
        })*
    };
}

mod classes;
#[path = "../engine/common.rs"]
#[allow(dead_code)]
mod common;
mod crowds;
#[path = "../../../../tests/standins/cuda/standin.rs"]
#[allow(dead_code)]
mod cuda;
mod death;
mod ends;
mod ends_missing;
#[path = "../../../../tests/standins/faulty.rs"]
#[allow(dead_code)]
mod faulty;
mod gpus;
mod ipc;
mod late;
mod layouts;
mod lent;
mod loose;
#[path = "../../../../tests/standins/make.rs"]
#[allow(dead_code)]
mod make;
mod nics;
mod others;
mod pair;
mod panics;
#[path = "../../../../tests/plugin/built.rs"]
#[allow(dead_code)]
mod plugins;
mod restarts;
mod staged;
#[path = "../../../../tests/standins/standin.rs"]
#[allow(dead_code)]
mod standin;
mod streams;
mod warm_up;
mod windows;
mod wire;
mod wires;

use pair::{Kind, Memories, Standin};

/// Over the stand-in for a NIC of EFA, each check in a process of its own.
const EFA: Kind = Kind { transport: "libfabric", mechanism: "efa", nics: "efa", ..Kind::NEW };

/// The same for RoCE devices.
const VERBS: Kind = Kind { transport: "verbs", mechanism: "rc", nics: "verbs", ..Kind::NEW };

/// What the stand-in for RoCE devices stands for.
const ROCE: Standin = Standin { library: standin::Standin::Verbs, ..Standin::NEW };

/// Pages on a GPU that the NICs of who begins a transfer do not reach.
const STAGED: Kind = Kind {
    mechanism: "staged for GPU 0: region ",
    memory: Memories::Gpu,
    granted: Some(Memories::Shared),
    staged: true,
    ..Kind::NEW
};
const STAGED_VERBS: Kind = Kind { transport: "verbs", nics: "verbs", standin: Some(ROCE), ..STAGED };
const STAGED_EFA: Kind = Kind { transport: "libfabric", nics: "efa", standin: Some(Standin::NEW), ..STAGED };

/// Pages of the owner on such a GPU, and of both.
const STAGED_OWNER: Kind = Kind {
    mechanism: "through a ring of the owner's",
    memory: Memories::Shared,
    granted: Some(Memories::Gpu),
    ..STAGED
};
const STAGED_BOTH: Kind = Kind {
    mechanism: "through a ring of the owner's, staged for GPU 0: region ",
    memory: Memories::Gpu,
    ..STAGED_OWNER
};

/// The checks, for every line of the table, and for the NICs that are named from outside.
macro_rules! conform {
    ($($name:ident: $kind:expr;)*) => {
        /// Every transport, by the name that its tests have.
        fn table() -> Vec<(&'static str, Kind)> {
            let told = named::kind().map(|kind| ("named", kind.clone()));
            told.into_iter().chain([$((stringify!($name), $kind)),*]).collect()
        }
        $(mod $name {
            use super::*;
            fn kind() -> Option<&'static Kind> {
                static KIND: Kind = $kind;
                Some(&KIND)
            }
            checks!();
        })*
    };
}

macro_rules! checks {
    () => {
        checks!(@each layouts::every_byte_lands_where_it_belongs
            layouts::unequal_streams_are_refused_and_nothing_is_written
            layouts::what_was_changed_on_the_way_is_found
            ends::a_cancelled_transfer_waits_for_the_work_in_flight
            ends::a_deadline_ends_what_makes_no_progress
            ends::revoking_waits_for_whoever_writes_or_says_who_it_is
            ends::expiry_in_the_middle_ends_the_transfer
            ends::closing_a_region_in_the_middle_says_who_holds_it
            ends::closing_an_engine_is_bounded_and_says_what_it_left
            ends::a_grant_that_ended_before_serves_nothing
            ends::a_failed_work_request_fails_its_transfer_alone
            ends::a_lost_channel_ends_its_transfers_and_the_next_one_works
            ends::memory_is_let_go_of_before_the_end_is_told
            ends::a_region_that_nobody_uses_closes_at_once
            crowds::many_transfers_both_ways_at_once
            crowds::nothing_runs_when_nothing_moves
            death::a_killed_peer_ends_the_transfer_and_another_one_serves
            warm_up::what_is_warmed_up_is_opened_once_and_by_no_transfer
            warm_up::several_at_a_time_beside_transfers_share_the_work);
    };
    (@each $($file:ident::$check:ident)*) => {
        $(#[test]
        fn $check() {
            let name = concat!(module_path!(), "::", stringify!($check));
            match kind() {
                Some(kind) => kind.place(name, |_| crate::$file::$check(kind)),
                None => println!("not run: {NICS} names no NICs"),
            }
        })*
    };
}

/// Names the NICs of this machine to run over, as the option `nics` does.
const NICS: &str = "KVIK_TEST_NICS";
/// The file of the library that speaks to them, as the option `nic_library` does.
const LIBRARY: &str = "KVIK_NIC_LIBRARY";

/// Over NICs that this machine has, and others have not.
mod named {
    use super::*;
    use std::sync::LazyLock;

    static KIND: LazyLock<Option<Kind>> = LazyLock::new(|| {
        let nics = std::env::var(NICS).ok().filter(|nics| !nics.is_empty())?;
        let options: kvik_engine::NicOptions = nics.parse().unwrap();
        // A plug-in says itself what it is called.
        let mechanism = String::leak(options.kind.mechanism().unwrap_or_default());
        let library = std::env::var(LIBRARY).ok().filter(|file| !file.is_empty());
        let library = library.map(|file| &*String::leak(file));
        Some(Kind {
            transport: options.kind.transport().name(),
            mechanism,
            nics: String::leak(nics),
            library,
            ..Kind::NEW
        })
    });

    pub fn kind() -> Option<&'static Kind> {
        KIND.as_ref()
    }
    checks!();
}

conform! {
    tcp: Kind { transport: "tcp", mechanism: "channel", ..Kind::NEW };
    memfd: Kind { transport: "local", mechanism: "memfd", ..Kind::NEW };
    process_vm: Kind { transport: "local", mechanism: "process_vm_readv", memory: Memories::Foreign, ..Kind::NEW };
    own: Kind { transport: "self", mechanism: "copy", ..Kind::NEW };
    libfabric_tcp: Kind { transport: "libfabric", mechanism: "tcp", nics: "libfabric:tcp", ..Kind::NEW };
    libfabric_standin: Kind { standin: Some(Standin::NEW), ..EFA };
    libfabric_standin_four: Kind { standin: Some(Standin { devices: 4, ..Standin::NEW }), ..EFA };
    libfabric_standin_threads: Kind { standin: Some(Standin { threads: 2, ..Standin::NEW }), ..EFA };
    libfabric_standin_shallow: Kind { standin: Some(Standin { devices: 1, depth: 64, ..Standin::NEW }), ..EFA };
    libfabric_standin_software: Kind { standin: Some(Standin { software: true, ..Standin::NEW }), ..EFA };
    verbs_standin: Kind { standin: Some(ROCE), ..VERBS };
    verbs_standin_four: Kind { standin: Some(Standin { devices: 4, ..ROCE }), ..VERBS };
    verbs_standin_threads: Kind { standin: Some(Standin { threads: 2, ..ROCE }), ..VERBS };
    verbs_standin_shallow: Kind { standin: Some(Standin { devices: 1, depth: 16, pieces: 2, ..ROCE }), ..VERBS };
    plugin: Kind { transport: "plugin", mechanism: "sample", nics: "plugin", sample: true, ..Kind::NEW };
    faulty_tcp: Kind { transport: "tcp", mechanism: "channel", late: true, wire: true, ..Kind::NEW };
    faulty_memfd: Kind { transport: "local", mechanism: "memfd", late: true, ..Kind::NEW };
    faulty_process_vm: Kind {
        transport: "local", mechanism: "process_vm_readv", memory: Memories::Foreign, late: true, ..Kind::NEW
    };
    gpu_verbs: Kind { memory: Memories::Gpu, standin: Some(ROCE), ..VERBS };
    gpu_verbs_owner: Kind { granted: Some(Memories::Gpu), standin: Some(ROCE), ..VERBS };
    gpu_libfabric_standin: Kind { memory: Memories::Gpu, standin: Some(Standin::NEW), ..EFA };
    gpu_libfabric_standin_owner: Kind { granted: Some(Memories::Gpu), standin: Some(Standin::NEW), ..EFA };
    gpu_plugin: Kind {
        transport: "plugin", mechanism: "sample", nics: "plugin", sample: true, memory: Memories::Gpu, ..Kind::NEW
    };
    gpu_plugin_owner: Kind {
        transport: "plugin", mechanism: "sample", nics: "plugin", sample: true, granted: Some(Memories::Gpu), ..Kind::NEW
    };
    staged_verbs: STAGED_VERBS;
    staged_libfabric_standin: STAGED_EFA;
    staged_plugin: Kind { transport: "plugin", nics: "plugin", sample: true, ..STAGED };
    staged_verbs_owner: Kind { transport: "verbs", nics: "verbs", standin: Some(ROCE), ..STAGED_OWNER };
    staged_verbs_both: Kind { transport: "verbs", nics: "verbs", standin: Some(ROCE), ..STAGED_BOTH };
    staged_verbs_both_shallow: Kind {
        transport: "verbs", nics: "verbs", standin: Some(Standin { devices: 1, depth: 16, pieces: 2, ..ROCE }), ..STAGED_BOTH
    };
    staged_libfabric_standin_owner: Kind {
        transport: "libfabric", nics: "efa", standin: Some(Standin::NEW), ..STAGED_OWNER
    };
    staged_libfabric_standin_both: Kind {
        transport: "libfabric", nics: "efa", standin: Some(Standin::NEW), ..STAGED_BOTH
    };
    staged_plugin_owner: Kind { transport: "plugin", nics: "plugin", sample: true, ..STAGED_OWNER };
    staged_plugin_both: Kind { transport: "plugin", nics: "plugin", sample: true, ..STAGED_BOTH };
    gpu_tcp: Kind { transport: "tcp", mechanism: "staged for GPU 0", memory: Memories::Gpu, ..Kind::NEW };
    gpu_tcp_owner: Kind { transport: "tcp", mechanism: "channel", granted: Some(Memories::Gpu), ..Kind::NEW };
    gpu_tcp_other: Kind {
        transport: "tcp", mechanism: "staged", memory: Memories::Gpu, granted: Some(Memories::Foreign), ..Kind::NEW
    };
    gpu_own: Kind { transport: "self", mechanism: "copy", memory: Memories::Gpu, ..Kind::NEW };
    gpu_own_mixed: Kind { transport: "self", mechanism: "copy", granted: Some(Memories::Gpu), ..Kind::NEW };
    faulty_gpu_tcp: Kind {
        transport: "tcp", mechanism: "staged", memory: Memories::Gpu, late: true, wire: true, ..Kind::NEW
    };
    faulty_gpu_own: Kind { transport: "self", mechanism: "copy", memory: Memories::Gpu, late: true, ..Kind::NEW };
    faulty_own: Kind { transport: "self", mechanism: "copy", late: true, ..Kind::NEW };
}
