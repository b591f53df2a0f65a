//! Memory of GPUs that a NIC knows by its dma-buf, beside the stand-in for CUDA's driver.

use crate::DEVICE;
use crate::cuda::{self, App};
use crate::side::{LEN, nics, rma, wait};
use crate::standin::{Control, Standin};
use kvik_host::cuda::GpuMemory;
use kvik_host::fabric::{Device, Endpoint, FabricError, Posted, Registration, Rma, RmaOp, Slot};
use kvik_host::rma::Completion;
use kvik_host::{HostError, HugePages, Memory};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A test of this file in a process that has both stand-ins.
macro_rules! beside_cuda {
    ($name:ident, $settings:expr, $body:expr) => {
        #[test]
        fn $name() {
            both(concat!("gpus::", stringify!($name)), &$settings, $body);
        }
    };
}

fn both(test: &str, settings: &[(&str, &str)], body: impl FnOnce(Control, cuda::Control)) {
    cuda::alone(test, settings, |gpus| {
        Standin::Fabric.alone(test, settings, |control| body(control, gpus));
    });
}

/// Memory that begins and ends in the midst of an allocation and of a page. It is freed when it is let go of, which
/// `freed` is told before.
fn gpu(app: &Arc<App>, freed: impl Fn() + Send + Sync + 'static) -> Arc<GpuMemory> {
    struct Tensor<F: Fn()>(Arc<App>, usize, F);
    impl<F: Fn()> Drop for Tensor<F> {
        fn drop(&mut self) {
            self.2();
            assert_eq!(self.0.free(self.1), 0);
        }
    }
    let at = app.alloc(LEN + 3 * 4096);
    let keep = Tensor(app.clone(), at, freed);
    // SAFETY: allocated until the tensor is dropped.
    Arc::new(unsafe { GpuMemory::new(at + 4096 + 12, LEN, Box::new(keep)) }.unwrap())
}

fn app() -> Arc<App> {
    Arc::new(App::on(0))
}

fn pattern(seed: usize) -> Vec<u8> {
    (0..LEN).map(|at| (at ^ (at >> 8).wrapping_mul(31) ^ seed.wrapping_mul(77)) as u8).collect()
}

/// An endpoint, with memory of both kinds that its device knows.
struct Node {
    endpoint: Endpoint,
    gpu: (Arc<GpuMemory>, Rc<Registration>),
    host: (Arc<Memory>, Rc<Registration>),
    done: Vec<Completion<FabricError>>,
}

impl Node {
    fn new(app: &Arc<App>) -> Node {
        let device = Device::open(&nics()[0]).unwrap();
        assert_eq!(device.gpus(), Ok(()));
        let endpoint = Endpoint::open(&device, 64).unwrap();
        let (gpu, host) = (gpu(app, || ()), Arc::new(Memory::shared(LEN, HugePages::Never).unwrap()));
        let known = device.register_gpu(gpu.clone(), true).unwrap();
        assert_eq!((known.base(), known.holders()), (gpu.addr() as u64, 2));
        let plain = device.register(host.clone(), true).unwrap();
        assert_eq!(plain.holders(), 2);
        Node { endpoint, gpu: (gpu, known), host: (host, plain), done: Vec::new() }
    }

    fn known(&self, gpu: bool) -> Rc<Registration> {
        if gpu { self.gpu.1.clone() } else { self.host.1.clone() }
    }

    fn fill(&self, gpu: bool, bytes: &[u8]) {
        if gpu { self.gpu.0.copy_in(0, bytes).unwrap() } else { self.host.0.copy_in(0, bytes).unwrap() }
    }

    fn bytes(&self, gpu: bool) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        match gpu {
            true => self.gpu.0.copy_out(0, &mut bytes).unwrap(),
            false => self.host.0.copy_out(0, &mut bytes).unwrap(),
        }
        bytes
    }

    fn post(&mut self, known: &Rc<Registration>, to: &Registration, slot: Slot, op: RmaOp) {
        for part in parts() {
            assert_eq!(self.endpoint.post(&rma(op, (known, to), slot, part)).unwrap(), Posted::Yes);
        }
    }

    fn finish(&mut self) {
        wait("the completions", || {
            self.endpoint.poll(&mut self.done).unwrap();
            self.done.len() == parts().len()
        });
        assert!(self.done.drain(..).all(|done| done.result.is_ok()));
    }
}

/// Pieces of odd lengths at odd offsets, with bytes between that stay.
fn parts() -> Vec<(usize, usize, u64)> {
    let piece = 50_001;
    (0..LEN / piece).map(|number| (number * piece + 7, piece - 9, number as u64)).collect()
}

/// `before`, with the pieces of `moved`.
fn merged(before: &[u8], moved: &[u8]) -> Vec<u8> {
    let mut bytes = before.to_vec();
    for (from, len, _) in parts() {
        bytes[from..from + len].copy_from_slice(&moved[from..from + len]);
    }
    bytes
}

/// Both ways between every two memories of which one is a GPU's.
fn moves_bytes(gpus: cuda::Control) {
    let app = app();
    let (mut a, mut b) = (Node::new(&app), Node::new(&app));
    let slot = a.endpoint.add_peer(&b.endpoint.address().unwrap()).unwrap();
    let copies = || gpus.count("cuMemcpyDtoHAsync_v2") + gpus.count("cuMemcpyHtoDAsync_v2");
    for (near, far) in [(true, true), (true, false), (false, true)] {
        for op in [RmaOp::Write, RmaOp::Read] {
            let (ours, theirs) = (pattern(1), pattern(2));
            a.fill(near, &ours);
            b.fill(far, &theirs);
            let before = copies();
            let (here, there) = (a.known(near), b.known(far));
            a.post(&here, &there, slot, op);
            a.finish();
            assert_eq!(copies(), before, "the NIC moves them, and no copy of CUDA's");
            let (ends_here, ends_there) = match op {
                RmaOp::Write => (ours.clone(), merged(&theirs, &ours)),
                RmaOp::Read => (merged(&ours, &theirs), theirs.clone()),
            };
            assert!(a.bytes(near) == ends_here && b.bytes(far) == ends_there, "{op:?} {near} {far}");
        }
    }
}

beside_cuda!(the_device_moves_bytes_of_gpus_both_ways, [DEVICE], |mut control, gpus| {
    moves_bytes(gpus);
    let counts = control.counts();
    assert_eq!((counts["software"], counts["orphans"], counts["failed"]), (0, 0, 0), "{counts:?}");
});

beside_cuda!(within_a_process_and_device_the_software_moves_bytes_of_gpus, [], |mut control, gpus| {
    moves_bytes(gpus);
    assert_eq!(control.counts()["begun"], 0);
});

beside_cuda!(a_registration_ends_before_its_memory_is_freed, [DEVICE], |control, _| {
    let (app, control) = (app(), Arc::new(Mutex::new(control)));
    let device = Device::open(&nics()[0]).unwrap();
    let regions = |control: &Mutex<Control>| control.lock().unwrap().counts()["regions"];
    // What the device knew when the memory was freed, and 1 for each time that it was.
    let (seen, times) = (Arc::new(AtomicU64::new(u64::MAX)), Arc::new(AtomicU64::new(0)));
    let (tell, count, asks) = (seen.clone(), times.clone(), control.clone());
    let memory = gpu(&app, move || {
        tell.store(regions(&asks), Ordering::SeqCst);
        count.fetch_add(1, Ordering::SeqCst);
    });
    let first = device.register_gpu(memory.clone(), true).unwrap();
    let second = device.register_gpu(memory, true).unwrap();
    assert_ne!(first.key(), second.key());
    drop(first);
    assert_eq!((regions(&control), times.load(Ordering::SeqCst)), (1, 0));
    drop(second);
    assert_eq!((seen.load(Ordering::SeqCst), times.load(Ordering::SeqCst)), (0, 1));
});

beside_cuda!(operations_keep_memory_of_gpus_until_they_have_ended, [DEVICE], |mut control, _| {
    let app = app();
    let (mut a, mut b) = (Node::new(&app), Node::new(&app));
    let slot = a.endpoint.add_peer(&b.endpoint.address().unwrap()).unwrap();
    let freed = Arc::new(AtomicU64::new(0));
    let count = freed.clone();
    let memory = gpu(&app, move || {
        count.fetch_add(1, Ordering::SeqCst);
    });
    let known = a.gpu.1.device().register_gpu(memory, false).unwrap();
    control.say("stick count=1000");
    a.post(&known, &b.gpu.1, slot, RmaOp::Read);
    drop(known);
    wait("the operations", || control.counts()["stuck"] == parts().len() as u64);
    assert_eq!(freed.load(Ordering::SeqCst), 0);
    // Closing the endpoint stops them.
    drop(a);
    assert_eq!(freed.load(Ordering::SeqCst), 1);
});

beside_cuda!(a_range_beyond_the_memory_of_a_gpu_is_refused, [DEVICE], |_, _| {
    let app = app();
    let (mut a, mut b) = (Node::new(&app), Node::new(&app));
    let slot = a.endpoint.add_peer(&b.endpoint.address().unwrap()).unwrap();
    let (here, there) = (a.known(true), b.known(true));
    for part in [(LEN - 7, 8, 0), (LEN + 1, 0, 0), (usize::MAX, 2, 0)] {
        let order = Rma { offset: part.0, ..rma(RmaOp::Read, (&here, &there), slot, (0, part.1, 0)) };
        let refused = a.endpoint.post(&order).unwrap_err();
        assert!(matches!(refused, HostError::OutOfBounds { size: LEN, .. }), "{refused}");
    }
    // Peers are held to it by the device, to the byte on both sides.
    let (first, end) = (there.base(), there.base() + LEN as u64);
    for (remote, inside) in [(first - 1, false), (first, true), (end - 8, true), (end - 7, false)] {
        let order = Rma { remote, ..rma(RmaOp::Write, (&here, &there), slot, (LEN - 8, 8, 0)) };
        assert_eq!(a.endpoint.post(&order).unwrap(), Posted::Yes);
        wait("the completion", || {
            a.endpoint.poll(&mut a.done).unwrap();
            !a.done.is_empty()
        });
        match a.done.remove(0).result {
            Ok(()) => assert!(inside, "{remote:#x}"),
            Err(error) => assert!(!inside && error.text.contains("range or right is wrong"), "{error}"),
        }
    }
});

/// Memory of a GPU is refused in these words, and the host's is known as ever.
fn refuses(words: &[&str], opened: bool) {
    let device = Device::open(&nics()[0]).unwrap();
    assert_eq!(device.gpus().is_ok(), opened);
    let memory = gpu(&app(), || ());
    let refused = device.register_gpu(memory.clone(), true).err().unwrap().to_string();
    for word in ["registering memory of a GPU", "GPU 0"].iter().chain(words) {
        assert!(refused.contains(word), "{word} in: {refused}");
    }
    // Nothing of the attempt holds it.
    assert_eq!(Arc::strong_count(&memory), 1);
    let mut side = crate::side::Side::new(&nics()[0], 1, 64);
    let address = side.endpoint.address().unwrap();
    let slot = side.endpoint.add_peer(&address).unwrap();
    let known = side.known.clone();
    crate::side::post_all(&mut side, &known, slot, RmaOp::Read, [(0, 64, 0)]);
    crate::side::until(&mut side, 1);
    assert!(side.done[0].result.is_ok(), "{:?}", side.done);
}

const OLD: [(&str, &str); 2] = [("KVIK_STANDIN_OLD", "1"), ("FI_EFA_ENABLE_SHM_TRANSFER", "0")];

beside_cuda!(a_library_older_than_dma_bufs_refuses_gpus, OLD, |_, _| {
    refuses(&["libfabric 1.17", "1.20"], false);
});

beside_cuda!(a_provider_without_memory_of_gpus_refuses_them, [("KVIK_STANDIN_HMEM", "none")], |_, _| {
    refuses(&["\"efa\"", "FI_HMEM", "EFA installer", "libcudart.so"], false);
});

beside_cuda!(a_provider_that_would_copy_by_cuda_refuses_gpus, [("KVIK_STANDIN_HMEM", "copies")], |_, _| {
    refuses(&["copy memory of GPUs by CUDA", "GPUDirect RDMA"], false);
});

beside_cuda!(a_provider_without_dma_bufs_refuses_gpus, [("KVIK_STANDIN_HMEM", "mapped")], |_, _| {
    refuses(&["dma-buf of 1048576 bytes", "rdma-core 34"], true);
});

beside_cuda!(a_gpu_without_dma_bufs_is_refused, [], |_, gpus| {
    gpus.say("attribute id=124 value=0");
    refuses(&["as a dma-buf", "open kernel modules"], true);
});
