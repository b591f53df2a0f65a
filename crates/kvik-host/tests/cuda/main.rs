//! Memory of GPUs, over the stand-in for the CUDA driver (`tests/standins/cuda`): each test in a process of its own.

mod copies;
mod failing;
mod kernel;
mod loading;
#[path = "../../../../tests/standins/make.rs"]
#[allow(dead_code)]
mod make;
mod places;
mod sharing;
#[path = "../../../../tests/standins/cuda/standin.rs"]
#[allow(dead_code)]
mod standin;

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../../tests/common/watch.rs"]
mod watch;

use kvik_host::cuda::{Cuda, GpuMemory, Pinned};
use standin::{App, Control};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs a test of this module's file in a process of its own.
macro_rules! alone {
    ($name:ident, $settings:expr, $body:expr) => {
        #[test]
        fn $name() {
            let module =
                module_path!().split_once("::").map_or(String::new(), |(_, path)| format!("{path}::"));
            crate::standin::alone(&format!("{module}{}", stringify!($name)), &$settings, $body);
        }
    };
}
pub(crate) use alone;

const LIMIT: Duration = Duration::from_secs(60);
/// Copies that take so long that nobody sees their bytes by chance.
const SLOW: (&str, &str) = ("KVIK_STANDIN_CUDA_FAULTS", "delay micros=20000");

/// Memory of the application, registered: it is freed when nobody uses it any more.
fn registered(app: &Arc<App>, len: usize) -> Arc<GpuMemory> {
    struct Tensor(Arc<App>, usize);
    impl Drop for Tensor {
        fn drop(&mut self) {
            assert_eq!(self.0.free(self.1), 0);
        }
    }
    let at = app.alloc(len);
    // SAFETY: allocated until the tensor is dropped.
    Arc::new(unsafe { GpuMemory::new(at, len, Box::new(Tensor(app.clone(), at))) }.unwrap())
}

fn pinned(len: usize) -> Arc<Pinned> {
    Arc::new(Pinned::new(&Cuda::get().unwrap().device(0).unwrap(), len).unwrap())
}

/// Bytes that say where they are.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at ^ (at >> 8).wrapping_mul(31) ^ seed.wrapping_mul(77)) as u8).collect()
}

fn out(pinned: &Pinned, at: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    pinned.memory().copy_out(at, &mut bytes).unwrap();
    bytes
}

/// Waits for something that another thread brings about.
fn until(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < LIMIT, "{what} does not come");
        std::thread::yield_now();
    }
}

/// Nothing of kvik's is left at the devices but what it uses again.
fn nothing_is_left(control: Control) {
    for what in ["allocations", "streams"] {
        assert_eq!(control.count(what), 0, "{what}");
    }
    // Given back in threads of their own.
    for what in ["opened", "pinned"] {
        until(&format!("the end of what is {what}"), || control.count(what) == 0);
    }
    assert!(control.count("events") < 20, "{}", control.count("events"));
}
