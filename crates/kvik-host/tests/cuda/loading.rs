//! The library: found, missing, too old, broken; and what is asked of it without loading it.

use super::{alone, registered, standin};
use crate::common::in_forked_child;
use kvik_host::cuda::{Cuda, GpuMemory, Pinned, Stream};
use kvik_host::{HostError, Probes};
use standin::App;
use std::path::Path;
use std::sync::Arc;

alone!(it_is_found_where_the_linker_finds_it, [("KVIK_STANDIN_CUDA_DEVICES", "3")], |_| {
    assert!(Cuda::loaded().is_none());
    let cuda = Cuda::get().unwrap();
    assert_eq!(cuda.path(), standin::library());
    assert_eq!((cuda.version(), cuda.devices()), ((12, 8), 3));
    assert!(Cuda::loaded().is_some());
    let device = cuda.device(2).unwrap();
    assert_eq!((device.ordinal(), device.name(), device.bus()), (2, "Stand-in 2", "0000:1c:00.0"));
    assert_eq!((device.memory(), device.has_dmabuf()), (1 << 30, true));
    assert!(device.is(&cuda.device(2).unwrap()) && !device.is(&cuda.device(1).unwrap()));
    let error = cuda.device(3).unwrap_err().to_string();
    assert!(error.contains("device 3") && error.contains("CUDA_VISIBLE_DEVICES"), "{error}");
});

alone!(nobody_who_only_asks_initialises_it, [], |control| {
    assert_eq!(Cuda::locate(0x1000).unwrap(), None);
    // In the process, but used by nobody: a fork would still be free to use it.
    assert_eq!(control.count("cuInit"), 0);
    assert!(Cuda::loaded().is_none());
    assert_eq!(Cuda::locate(0x1000).unwrap(), None);
    assert_eq!(control.count("cuInit"), 0);
    // SAFETY: it is refused.
    let error = unsafe { GpuMemory::new(0x1000, 4096, Box::new(())) }.unwrap_err().to_string();
    assert!(error.contains("nobody in this process uses CUDA"), "{error}");
    let app = App::on(0);
    let at = app.alloc(4096);
    assert!(Cuda::locate(at).unwrap().is_some());
});

alone!(a_library_that_is_nowhere_is_an_error_with_what_to_do, [], |_| {
    let error = Cuda::load(Some(Path::new("/no/such/libcuda.so.1"))).unwrap_err();
    assert!(matches!(error, HostError::Library(_)), "{error:?}");
    let error = error.to_string();
    for word in
        ["libcuda.so.1", "/no/such/", "NVIDIA's driver", "nvidia-container-toolkit", "compute,utility"]
    {
        assert!(error.contains(word), "{word} in: {error}");
    }
    // That is no end: the one that is there can still be had.
    Cuda::get().unwrap();
});

alone!(a_file_that_is_no_driver_is_told_apart, [], |_| {
    // A library of the host that is none, and is in no process already.
    let other = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libkvik-no-driver.so");
    let mut build = std::process::Command::new("gcc");
    build.args(["-shared", "-o"]).arg(&other).args(["-xc", "/dev/null"]);
    assert!(build.status().unwrap().success());
    let error = Cuda::load(Some(&other)).unwrap_err().to_string();
    assert!(error.contains("libkvik-no-driver.so has no cuInit") && error.contains("470"), "{error}");
});

alone!(a_driver_that_is_too_old_says_so, [("KVIK_STANDIN_CUDA_VERSION", "11020")], |control| {
    let error = Cuda::get().unwrap_err();
    assert!(matches!(error, HostError::Library(_)), "{error:?}");
    let error = error.to_string();
    assert!(error.contains("CUDA 11.2") && error.contains("11.4") && error.contains("470"), "{error}");
    assert_eq!(control.count("cuInit"), 0);
});

alone!(a_host_without_gpus_says_so, [("KVIK_STANDIN_CUDA_DEVICES", "0")], |_| {
    let error = Cuda::get().unwrap_err().to_string();
    for word in ["libcuda.so.1", "CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES", "--gpus all"] {
        assert!(error.contains(word), "{word} in: {error}");
    }
});

alone!(
    a_library_that_does_not_fit_the_kernel_says_so,
    [("KVIK_STANDIN_CUDA_FAULTS", "fail cuInit nth=1 code=803")],
    |_| {
        let error = Cuda::get().unwrap_err().to_string();
        assert!(error.contains("SYSTEM_DRIVER_MISMATCH") && error.contains("restart the machine"), "{error}");
        // It was for one call.
        Cuda::get().unwrap();
    }
);

alone!(a_forked_child_is_refused_and_touches_nothing, [], |control| {
    let app = Arc::new(App::on(0));
    let memory = registered(&app, 1 << 16);
    let cuda = Cuda::get().unwrap();
    let staging = Arc::new(Pinned::new(memory.device(), 4096).unwrap());
    let mut stream = Stream::new(memory.device()).unwrap();
    control.say("stall");
    stream.gather(&staging, 0, &memory, &[(0, 4096)]).unwrap();
    let mut mark = Some(stream.mark().unwrap());
    let mut stream = Some(stream);
    // The stand-in ends a child that calls it.
    let fine = in_forked_child(|| {
        let forked = |error: HostError| matches!(error, HostError::Forked { what: "CUDA" });
        let (mut own, mut mine) = (stream.take().unwrap(), mark.take().unwrap());
        let refused = [
            forked(Cuda::get().unwrap_err()),
            forked(cuda.device(0).unwrap_err()),
            forked(cuda.place_of(memory.addr()).unwrap_err()),
            forked(memory.copy_in(0, &[1]).unwrap_err()),
            forked(memory.copy_out(0, &mut [1]).unwrap_err()),
            forked(own.gather(&staging, 0, &memory, &[(0, 16)]).unwrap_err()),
            forked(own.mark().unwrap_err()),
            forked(mine.is_done().unwrap_err()),
            forked(memory.export().unwrap_err()),
            forked(memory.dmabuf().unwrap_err()),
            forked(memory.flush_writes().unwrap_err()),
            forked(Stream::new(memory.device()).unwrap_err()),
            forked(Pinned::new(memory.device(), 1).unwrap_err()),
            Cuda::loaded().is_none(),
            !memory.device().has_dmabuf(),
        ];
        drop((own, mine));
        refused.iter().all(|refused| *refused)
    });
    assert!(fine);
    // And the parent goes on.
    control.say("release");
    mark.unwrap().wait(&mut stream.unwrap(), super::LIMIT).unwrap();
});

alone!(a_probe_tells_of_devices_and_initialises_nothing, [], |control| {
    let told = || Probes::run().get("cuda").cloned().unwrap();
    assert!(!told().value.contains("device(s)"), "{:?}", told());
    assert_eq!(control.count("cuInit"), 0);
    assert!(!told().value.contains("device(s)"), "{:?}", told());
    let _app = App::on(0);
    assert_eq!((told().value.as_str(), told().ok), ("2 device(s), CUDA 12.8", true));
});
