//! Many small pieces by kvik's kernel: what goes that way, in which order, and what it holds.

use super::{LIMIT, SLOW, alone, nothing_is_left, out, pattern, pinned, registered, standin, until};
use crate::standin::{App, Control};
use kvik_host::cuda::{Cuda, GpuMemory, Stream, Way};
use std::sync::Arc;

const FAST: (&str, &str) = ("KVIK_STANDIN_CUDA_FAULTS", "delay micros=0");
const PAGE: usize = 4096;

/// How often the kernel was launched, and how often the copy engine was given a batch or a copy.
fn ways(control: Control) -> (i64, i64) {
    let single = ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2"];
    let engine: i64 = single.iter().map(|function| control.count(function)).sum();
    (control.count("cuLaunchKernel"), engine + control.count("cuMemcpyBatchAsync"))
}

/// Pieces of a memory at no equal distances, as many as wanted, each this long.
fn pieces(count: usize, len: usize) -> Vec<(usize, usize)> {
    (0..count).map(|at| (at * (len + 256) + at * at % 13 * 16, len)).collect()
}

/// Bytes that such pieces lie in.
fn room(count: usize, len: usize) -> usize {
    count * (len + 256) + 256
}

fn finish(stream: &mut Stream) {
    stream.mark().unwrap().wait(stream, LIMIT).unwrap();
}

fn packed(bytes: &[u8], pieces: &[(usize, usize)]) -> Vec<u8> {
    pieces.iter().flat_map(|(offset, len)| bytes[*offset..offset + len].to_vec()).collect()
}

/// What `bytes` are once the packed ones have been spread over the pieces.
fn spread(bytes: &[u8], pieces: &[(usize, usize)], packed: &[u8]) -> Vec<u8> {
    let (mut all, mut at) = (bytes.to_vec(), 0);
    for (offset, len) in pieces {
        all[*offset..offset + len].copy_from_slice(&packed[at..at + len]);
        at += len;
    }
    all
}

/// Gathers pieces and scatters them again in the opposite order, and looks at every byte.
fn there_and_back(control: Control, stream: &mut Stream, memory: &Arc<GpuMemory>, pieces: &[(usize, usize)]) {
    let bytes = pattern(memory.len(), 3);
    control.poke(memory.addr(), &bytes);
    let want = packed(&bytes, pieces);
    let staging = pinned(want.len() + 16);
    stream.gather(&staging, 16, memory, pieces).unwrap();
    finish(stream);
    assert!(out(&staging, 16, want.len()) == want && out(&staging, 0, 16) == [0; 16]);
    let back: Vec<(usize, usize)> = pieces.iter().rev().copied().collect();
    stream.scatter(memory, &back, &staging, 16).unwrap();
    finish(stream);
    assert!(control.peek(memory.addr(), bytes.len()) == spread(&bytes, &back, &want));
}

alone!(many_small_pages_are_one_launch_each_way, [FAST], |control| {
    let app = Arc::new(App::on(0));
    let memory = registered(&app, room(1000, PAGE));
    let mut stream = Stream::new(memory.device()).unwrap();
    assert_eq!((memory.device().kernel(), control.count("cuModuleLoadData")), (Ok(()), 1));
    there_and_back(control, &mut stream, &memory, &pieces(1000, PAGE));
    assert_eq!(ways(control), (2, 0));
    assert_eq!(control.count("cuModuleLoadData"), 1);
});

alone!(few_pages_and_long_ones_go_by_the_copy_engine, [FAST], |control| {
    let app = Arc::new(App::on(0));
    let memory = registered(&app, room(80, 64 << 10));
    let mut stream = Stream::new(memory.device()).unwrap();
    let mut gone = |pieces: &[(usize, usize)]| {
        let before = ways(control);
        there_and_back(control, &mut stream, &memory, pieces);
        let after = ways(control);
        (after.0 - before.0, after.1 > before.1)
    };
    // To the host and to the device it takes so many.
    assert_eq!(gone(&pieces(15, PAGE)), (0, true));
    assert_eq!(gone(&pieces(16, PAGE)), (1, true));
    assert_eq!(gone(&pieces(63, PAGE)), (1, true));
    assert_eq!(gone(&pieces(64, PAGE)), (2, false));
    // And no longer ones than these.
    assert_eq!(gone(&pieces(80, (64 << 10) - 4)), (2, false));
    assert_eq!(gone(&pieces(80, 64 << 10)), (0, true));
    // Rows stay rows, and pieces without gaps are one: on the way there, where they come in order.
    assert_eq!(gone(&(0..100).map(|row| (row * 8192, PAGE)).collect::<Vec<_>>()), (1, false));
    assert_eq!(gone(&(0..100).map(|row| (row * PAGE, PAGE)).collect::<Vec<_>>()), (1, true));
    // A mixture: each piece as it suits it.
    let mixed = [&pieces(70, PAGE)[..], &[(1 << 20, 64 << 10), (2 << 20, 100 << 10)]].concat();
    assert_eq!(gone(&mixed), (2, true));
    // Two sides that lie unlike at words: slow for a kernel.
    let odd: Vec<(usize, usize)> = pieces(80, PAGE).into_iter().map(|(at, len)| (at + 1, len)).collect();
    assert_eq!(gone(&odd), (0, true));
});

alone!(pieces_of_any_length_at_any_place_come_whole, [FAST], |control| {
    let app = Arc::new(App::on(0));
    let memory = registered(&app, 1 << 20);
    let mut stream = Stream::new(memory.device()).unwrap();
    stream.copy_by(Way::Kernel);
    // Of less than a word, of some shares, of an odd number of bytes, and of none.
    let pieces = [(1, 1), (7, 15), (40, 17), (100, 0), (4097, 4095), (10_001, 4096), (20_002, 4097)];
    let more = [(30_003, 8191), (50_005, 12_289), (100_007, 100_001), (300_000, 3), (400_004, 65_536)];
    there_and_back(control, &mut stream, &memory, &[&pieces[..], &more[..]].concat());
    assert_eq!(ways(control), (2, 0));
    stream.copy_by(Way::Engine);
    there_and_back(control, &mut stream, &memory, &pieces);
    assert_eq!((ways(control).0, control.count("cuMemcpyBatchAsync")), (2, 2));
});

alone!(pieces_within_a_device_and_from_a_second_one, [FAST], |control| {
    let (app, other) = (Arc::new(App::on(0)), Arc::new(App::on(1)));
    let len = room(500, 100);
    let (from, near, there) = (registered(&app, len), registered(&app, len), registered(&other, len));
    let (bytes, before) = (pattern(len, 1), pattern(len, 2));
    let pieces: Vec<(usize, usize, usize)> =
        (0..500).map(|at| (at * 320 + at % 7, (499 - at) * 330 + at * at % 5, 1 + at % 300)).collect();
    let mut want = before.clone();
    for (at, offset, len) in &pieces {
        want[*at..at + len].copy_from_slice(&bytes[*offset..offset + len]);
    }
    control.poke(from.addr(), &bytes);
    let mut stream = Stream::new(from.device()).unwrap();
    for (into, launches) in [(&near, 1), (&there, 1)] {
        control.poke(into.addr(), &before);
        stream.between(into, &from, &pieces).unwrap();
        finish(&mut stream);
        assert!(control.peek(into.addr(), len) == want, "{into:?}");
        assert_eq!(control.count("cuLaunchKernel"), launches);
    }
    // Nor by a stream of a third device, which reaches neither.
    let mut others = Stream::new(there.device()).unwrap();
    others.between(&near, &from, &pieces).unwrap();
    finish(&mut others);
    assert_eq!(control.count("cuLaunchKernel"), 1);
    // A few are enough.
    let before = ways(control);
    stream.between(&near, &from, &pieces[..3]).unwrap();
    stream.between(&near, &from, &pieces[10..14]).unwrap();
    finish(&mut stream);
    assert_eq!((ways(control).0 - before.0, ways(control).1 - before.1), (1, 3));
});

alone!(memory_that_moves_stays_with_the_copy_engine, [FAST], |control| {
    let app = Arc::new(App::on(0));
    let len = room(100, PAGE);
    // SAFETY: allocated to the end of the process.
    let managed = Arc::new(unsafe { GpuMemory::new(app.managed(len), len, Box::new(())) }.unwrap());
    let mapped = app.map(256 << 10, 3);
    // SAFETY: as above.
    let mapped = Arc::new(unsafe { GpuMemory::new(mapped, len, Box::new(())) }.unwrap());
    let mut stream = Stream::new(managed.device()).unwrap();
    there_and_back(control, &mut stream, &managed, &pieces(100, PAGE));
    assert_eq!(ways(control).0, 0);
    there_and_back(control, &mut stream, &mapped, &pieces(100, PAGE));
    assert_eq!(ways(control).0, 2);
});

alone!(a_kernel_comes_behind_what_its_stream_was_given_and_marks_behind_it, [SLOW], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, room(200, PAGE)), pinned(200 * PAGE));
    let mut stream = Stream::new(memory.device()).unwrap();
    let program = app.stream(false);
    // Behind a kernel of the program's.
    control.say("stall");
    app.fill(program, memory.addr(), memory.len(), 7, 200_000);
    // SAFETY: a stream that is not destroyed.
    unsafe { stream.after_stream(program) }.unwrap();
    stream.gather(&staging, 0, &memory, &pieces(200, PAGE)).unwrap();
    let mut mark = stream.mark().unwrap();
    assert!(!mark.is_done().unwrap() && out(&staging, 0, 200 * PAGE) == vec![0; 200 * PAGE]);
    control.say("release");
    mark.wait(&mut stream, LIMIT).unwrap();
    assert!(out(&staging, 0, 200 * PAGE) == vec![7; 200 * PAGE]);
    // Behind a copy of the stream's own, and a copy behind it.
    staging.memory().copy_in(0, &vec![9; 200 * PAGE]).unwrap();
    stream.scatter(&memory, &[(0, 100 * PAGE)], &staging, 0).unwrap();
    stream.scatter(&memory, &pieces(200, PAGE), &staging, 0).unwrap();
    let second = pinned(memory.len());
    stream.gather(&second, 0, &memory, &[(0, memory.len())]).unwrap();
    finish(&mut stream);
    let mut want = vec![7; memory.len()];
    want[..100 * PAGE].fill(9);
    assert!(out(&second, 0, memory.len()) == spread(&want, &pieces(200, PAGE), &vec![9; 200 * PAGE]));
    assert_eq!(ways(control), (2, 2));
});

alone!(lists_are_used_again_and_never_while_they_are_read, [FAST], |control| {
    let app = Arc::new(App::on(0));
    let (count, len) = (4000, 16);
    let (memory, staging) = (registered(&app, room(count, len)), pinned(count * len));
    let bytes = pattern(memory.len(), 4);
    control.poke(memory.addr(), &bytes);
    let pieces = pieces(count, len);
    let mut stream = Stream::new(memory.device()).unwrap();
    // The stand-in ends the process if a list changes before the kernel has run.
    for _ in 0..30 {
        stream.gather(&staging, 0, &memory, &pieces).unwrap();
        finish(&mut stream);
    }
    // The buffer, and one list, or two where the stream was not seen to be past the first.
    assert!(control.count("pinned") <= 3, "{}", control.count("pinned"));
    // While nothing moves each launch needs one of its own, up to the bound; then the copy engine takes the pieces.
    control.say("stall");
    let before = ways(control);
    let backward: Vec<(usize, usize)> = pieces.iter().rev().copied().collect();
    for round in 0..80 {
        stream.gather(&staging, 0, &memory, if round % 2 == 0 { &backward } else { &pieces }).unwrap();
    }
    let (by_kernel, by_engine) = (ways(control).0 - before.0, ways(control).1 - before.1);
    let pinned = control.count("pinned");
    control.say("release");
    finish(&mut stream);
    assert!(out(&staging, 0, count * len) == packed(&bytes, &pieces));
    assert!((62..=66).contains(&by_kernel) && by_engine == 4 * (80 - by_kernel), "{by_kernel}, {by_engine}");
    assert!((64..=67).contains(&pinned), "{pinned}");
    stream.gather(&staging, 0, &memory, &pieces).unwrap();
    finish(&mut stream);
    assert_eq!((ways(control).0 - before.0, control.count("pinned")), (by_kernel + 1, pinned));
    drop((stream, staging, memory));
    until("the end of the lists", || control.count("pinned") == 0);
});

alone!(small_calls_share_a_list, [FAST], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, room(64, PAGE)), pinned(64 * PAGE));
    let mut stream = Stream::new(memory.device()).unwrap();
    control.say("stall");
    for _ in 0..64 {
        stream.gather(&staging, 0, &memory, &pieces(64, PAGE)).unwrap();
    }
    assert_eq!((ways(control), control.count("pinned")), ((64, 0), 2));
    stream.gather(&staging, 0, &memory, &pieces(64, PAGE)).unwrap();
    assert_eq!((ways(control), control.count("pinned")), ((65, 0), 3));
    control.say("release");
    finish(&mut stream);
});

alone!(what_a_kernel_uses_stays_until_it_has_ended, [], |control| {
    let app = Arc::new(App::on(0));
    let device = Cuda::get().unwrap().device(0).unwrap();
    // Marks, streams and memory, dropped in every order while nothing moves: the stand-in ends who frees too early.
    for order in 0..4 {
        control.say("stall");
        let (memory, staging) = (registered(&app, room(100, PAGE)), pinned(100 * PAGE));
        let mut stream = Stream::new(&device).unwrap();
        stream.gather(&staging, 0, &memory, &pieces(100, PAGE)).unwrap();
        let mark = stream.mark().unwrap();
        stream.scatter(&memory, &pieces(100, PAGE), &staging, 0).unwrap();
        match order {
            0 => drop((memory, staging, mark, stream)),
            1 => drop((mark, stream, memory, staging)),
            2 => drop((stream, memory, mark, staging)),
            _ => drop((staging, stream, memory, mark)),
        }
        assert_eq!((control.count("pinned"), device.settle()), (2, 2), "order {order}");
        control.say("release");
        until("the end of all copies", || device.settle() == 0);
        until("the end of the lists", || control.count("pinned") == 0);
    }
    drop((device, app));
    nothing_is_left(control);
});

/// A kernel that is not to be had: everything goes as without, and somebody says why.
fn refused(control: Control, words: &str) {
    let app = Arc::new(App::on(0));
    let memory = registered(&app, room(100, PAGE));
    let mut stream = Stream::new(memory.device()).unwrap();
    there_and_back(control, &mut stream, &memory, &pieces(100, PAGE));
    let why = memory.device().kernel().unwrap_err();
    assert!(why.contains(words), "{why}");
    stream.copy_by(Way::Kernel);
    there_and_back(control, &mut stream, &memory, &pieces(100, PAGE));
    assert_eq!((control.count("cuModuleLoadData") <= 1, control.count("cuMemcpyBatchAsync")), (true, 4));
}

const NO_COMPILER: (&str, &str) =
    ("KVIK_STANDIN_CUDA_FAULTS", "delay micros=0;fail cuModuleLoadData nth=1 code=221");
alone!(a_driver_without_a_compiler_copies_by_the_engine, [NO_COMPILER], |control| {
    refused(control, "JIT_COMPILER_NOT_FOUND");
    assert_eq!(control.count("cuLaunchKernel"), 0);
});

const OLD_LANGUAGE: (&str, &str) =
    ("KVIK_STANDIN_CUDA_FAULTS", "delay micros=0;fail cuModuleLoadData nth=1 code=222");
alone!(a_driver_that_does_not_take_the_text_copies_by_the_engine, [OLD_LANGUAGE], |control| {
    refused(control, "UNSUPPORTED_PTX_VERSION");
});

const NO_FUNCTION: (&str, &str) =
    ("KVIK_STANDIN_CUDA_FAULTS", "delay micros=0;fail cuModuleGetFunction nth=1 code=500");
alone!(a_module_without_the_kernel_copies_by_the_engine, [NO_FUNCTION], |control| {
    refused(control, "NOT_FOUND");
});

const OTHER_ADDRESSES: (&str, &str) = ("KVIK_STANDIN_CUDA_FAULTS", "delay micros=0;attribute id=91 value=0");
alone!(where_locked_memory_has_other_addresses_the_engine_copies, [OTHER_ADDRESSES], |control| {
    refused(control, "other addresses");
    assert_eq!(control.count("cuModuleLoadData"), 0);
});

const NO_LAUNCH: (&str, &str) =
    ("KVIK_STANDIN_CUDA_FAULTS", "delay micros=0;fail cuLaunchKernel nth=1 code=701");
alone!(a_launch_that_is_refused_is_the_last_one, [NO_LAUNCH], |control| {
    refused(control, "LAUNCH_OUT_OF_RESOURCES");
    assert_eq!(control.count("cuLaunchKernel"), 1);
});

alone!(a_list_that_cannot_be_had_costs_nothing_but_speed, [FAST], |control| {
    let app = Arc::new(App::on(0));
    let memory = registered(&app, room(100, PAGE));
    let (mut stream, staging) = (Stream::new(memory.device()).unwrap(), pinned(100 * PAGE));
    let bytes = pattern(memory.len(), 6);
    control.poke(memory.addr(), &bytes);
    control.say("fail cuMemHostAlloc nth=1 code=2");
    stream.gather(&staging, 0, &memory, &pieces(100, PAGE)).unwrap();
    finish(&mut stream);
    assert!(out(&staging, 0, 100 * PAGE) == packed(&bytes, &pieces(100, PAGE)));
    assert_eq!((ways(control), memory.device().kernel()), ((0, 1), Ok(())));
    stream.gather(&staging, 0, &memory, &pieces(100, PAGE)).unwrap();
    finish(&mut stream);
    assert_eq!(ways(control), (1, 1));
});

alone!(a_fault_of_the_kernel_is_a_lost_device, [FAST], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, room(100, PAGE)), pinned(100 * PAGE));
    let mut stream = Stream::new(memory.device()).unwrap();
    stream.gather(&staging, 0, &memory, &pieces(100, PAGE)).unwrap();
    control.say("poison device=0 code=700");
    let error = stream.gather(&staging, 0, &memory, &pieces(100, PAGE)).unwrap_err();
    assert!(error.is_device_lost(), "{error}");
    // Nothing is tried by another way.
    assert!(memory.device().kernel().is_ok());
    drop((stream, staging));
    std::mem::forget(memory);
});

/// The variable by which the second process gets the first one's handle.
const HANDLE: &str = "KVIK_TEST_CUDA_KERNEL_HANDLE";

/// What the second process does: pages of the first one's memory, into its own.
fn peer(control: Control, handle: &str) {
    let byte = |at: usize| u8::from_str_radix(&handle[2 * at..2 * at + 2], 16).unwrap();
    let handle = kvik_host::cuda::IpcHandle::decode(&std::array::from_fn(byte));
    let theirs = Arc::new(GpuMemory::open(&handle, Box::new(())).unwrap());
    let len = theirs.len();
    let own = Arc::new(GpuMemory::alloc(theirs.device(), len).unwrap());
    let pieces: Vec<(usize, usize, usize)> =
        pieces(100, PAGE).into_iter().map(|(at, len)| (at, at, len)).collect();
    let mut stream = Stream::new(own.device()).unwrap();
    stream.between(&own, &theirs, &pieces).unwrap();
    finish(&mut stream);
    let bytes = pattern(len, 7);
    for (at, _, len) in pieces {
        assert!(control.peek(own.addr() + at, len) == bytes[at..at + len]);
    }
    assert_eq!(ways(control), (1, 0));
}

alone!(a_peers_pages_come_by_the_kernel, [FAST], |control| {
    if let Ok(handle) = std::env::var(HANDLE) {
        return peer(control, &handle);
    }
    let app = Arc::new(App::on(0));
    let memory = registered(&app, room(100, PAGE));
    control.poke(memory.addr(), &pattern(memory.len(), 7));
    let handle = memory.export().unwrap();
    let text: String = handle.encode().iter().map(|byte| format!("{byte:02x}")).collect();
    let ran = standin::again("kernel::a_peers_pages_come_by_the_kernel", &[(HANDLE, &text), FAST]);
    assert!(ran.status.success(), "{}", standin::text(&ran));
});

alone!(a_kernel_is_loaded_before_anything_is_in_flight, [], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, room(100, PAGE)), pinned(100 * PAGE));
    let mut stream = Stream::new(memory.device()).unwrap();
    // The driver waits for all that runs when it loads one: from here on nobody may ask for that.
    assert_eq!(control.count("cuModuleLoadData"), 1);
    control.say("stall");
    stream.gather(&staging, 0, &memory, &pieces(100, PAGE)).unwrap();
    let again = Cuda::get().unwrap().device(0).unwrap();
    let mut second = Stream::new(&again).unwrap();
    second.gather(&staging, 0, &memory, &pieces(100, PAGE)).unwrap();
    assert_eq!((ways(control), control.count("cuModuleLoadData")), ((2, 0), 1));
    control.say("release");
    finish(&mut stream);
    finish(&mut second);
});
