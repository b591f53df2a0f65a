//! What an address is, and which memory is taken.

use super::{alone, pattern, pinned, registered, until};
use crate::standin::App;
use kvik_host::HostError;
use kvik_host::cuda::{Cuda, Device, GpuMemory, Kind, Pinned};
use std::sync::Arc;

fn refusal(addr: usize, len: usize) -> String {
    // SAFETY: it is refused.
    unsafe { GpuMemory::new(addr, len, Box::new(())) }.unwrap_err().to_string()
}

alone!(addresses_are_told_apart, [], |_| {
    let (here, there) = (App::on(0), App::on(1));
    let (a, b, managed) = (here.alloc(10_000), there.alloc(5000), here.managed(4096));
    let place = Cuda::locate(a + 9999).unwrap().unwrap();
    assert_eq!((place.kind, place.device, place.base, place.len), (Kind::Device, 0, a, 10_000));
    assert!(place.exportable && place.context != 0);
    assert_eq!(Cuda::locate(a + 10_000).unwrap(), None);
    let place = Cuda::locate(b + 17).unwrap().unwrap();
    assert_eq!((place.kind, place.device, place.base, place.len), (Kind::Device, 1, b, 5000));
    let place = Cuda::locate(managed).unwrap().unwrap();
    assert_eq!((place.kind, place.exportable), (Kind::Managed, false));
    let locked = pinned(4096);
    assert_eq!(Cuda::locate(locked.memory().addr()).unwrap().unwrap().kind, Kind::Pinned);
    let (stack, heap) = (0u64, vec![0u8; 100]);
    for addr in [&raw const stack as usize, heap.as_ptr() as usize, 0, 1, usize::MAX] {
        assert_eq!(Cuda::locate(addr).unwrap(), None, "{addr:#x}");
    }
});

alone!(what_is_no_memory_of_a_device_is_refused_by_what_it_is, [], |control| {
    let app = App::on(0);
    let at = app.alloc(10_000);
    let heap = Box::new([0u8; 100]);
    let error = refusal(heap.as_ptr() as usize, 100);
    assert!(error.contains("ordinary memory of the host"), "{error}");
    let locked = pinned(4096);
    let error = refusal(locked.memory().addr(), 4096);
    assert!(error.contains("page-locked memory of the host"), "{error}");
    let error = refusal(at + 1000, 9001);
    assert!(error.contains("9001 bytes") && error.contains("first 9000 of them"), "{error}");
    assert!(refusal(at, 0).contains("at least one byte"));
    assert!(refusal(at, usize::MAX - 5).contains("no such addresses"));
    assert_eq!(app.free(at), 0);
    assert!(refusal(at, 10_000).contains("it was freed"));
    control.say("fail cuPointerGetAttributes nth=1 code=201");
    let error = refusal(at, 1);
    assert!(error.contains("CUDA_ERROR_INVALID_CONTEXT") && error.contains("context is gone"), "{error}");
});

alone!(mappings_side_by_side_are_one_memory, [], |control| {
    let app = App::on(0);
    let at = app.map(8192, 4);
    // SAFETY: mapped to the end of the process.
    let memory = unsafe { GpuMemory::new(at + 100, 4 * 8192 - 100, Box::new(())) }.unwrap();
    assert_eq!((memory.place().len, memory.place().context), (8192, 0));
    let bytes = pattern(3 * 8192, 1);
    memory.copy_in(8000, &bytes).unwrap();
    assert!(control.peek(at + 8100, bytes.len()) == bytes);
    let error = memory.export().unwrap_err().to_string();
    assert!(error.contains("expandable_segments") && error.contains("cudaMalloc"), "{error}");
    assert!(refusal(at, 4 * 8192 + 1).contains("first 32768 of them"));
    // The next one is another device's.
    let other = App::on(1);
    let next = other.map(8192, 1);
    assert_eq!(next, at + 4 * 8192);
    assert!(refusal(at, 5 * 8192).contains("first 32768 of them"));
});

alone!(no_cpu_touches_a_devices_bytes, [], |control| {
    let app = Arc::new(App::on(0));
    let memory = registered(&app, 4096);
    // What any read of it would come to, which a stand-in that gives memory of the host would hide.
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let holds = |line: &&str| {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let (from, to) = (usize::from_str_radix(from, 16).unwrap(), usize::from_str_radix(to, 16).unwrap());
        (from..to).contains(&memory.addr())
    };
    let line = maps.lines().find(holds).unwrap();
    assert!(line.contains(" ---p "), "{line}");
    assert_eq!(control.peek(memory.addr(), 4096), vec![0; 4096]);
});

alone!(blocking_copies_come_behind_the_default_stream_and_are_done, [super::SLOW], |control| {
    let app = Arc::new(App::on(0));
    let memory = registered(&app, 1 << 16);
    let bytes = pattern(60_000, 2);
    memory.copy_in(100, &bytes).unwrap();
    assert!(control.peek(memory.addr() + 100, 60_000) == bytes, "in place when it returns");
    app.fill(0, memory.addr(), 1000, 7, 100_000);
    let mut back = vec![0; 2000];
    memory.copy_out(0, &mut back).unwrap();
    assert!(back[..1000].iter().all(|byte| *byte == 7) && back[1000..] == bytes[900..1900]);
    let outside = memory.copy_out((1 << 16) - 10, &mut [0; 11]).unwrap_err();
    assert!(matches!(outside, HostError::OutOfBounds { offset: 65526, len: 11, size: 65536 }), "{outside}");
    assert!(memory.copy_in(usize::MAX, &[0]).is_err() && memory.check(1 << 16, 0).is_ok());
});

alone!(page_locked_memory_is_given_back_once, [], |control| {
    let device: Device = Cuda::get().unwrap().device(0).unwrap();
    // Allocated memory outlives what it came with, as long as somebody has it.
    let allocated = Pinned::new(&device, 5000).unwrap();
    let bytes = allocated.memory().clone();
    drop(allocated);
    drop(Pinned::new(&device, 5000).unwrap());
    until("the end of the other one", || control.count("pinned") == 1);
    bytes.copy_in(4990, b"0123456789").unwrap();
    drop(bytes);
    until("its end", || control.count("pinned") == 0);
    assert!(Pinned::new(&device, 0).is_err());
    control.say("fail cuMemHostAlloc nth=1 code=2");
    let error = Pinned::new(&device, 4096).unwrap_err().to_string();
    assert!(error.contains("OUT_OF_MEMORY") && error.contains("4096 bytes"), "{error}");
});
