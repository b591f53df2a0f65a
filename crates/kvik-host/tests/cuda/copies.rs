//! Copies in streams: what is done when, and what they hold.

use super::{LIMIT, SLOW, alone, nothing_is_left, out, pattern, pinned, registered, until, watch};
use crate::standin::{App, Control};
use kvik_host::HostError;
use kvik_host::cuda::{Cuda, GpuMemory, Pinned, Stream};
use kvik_host::event::{Epoll, EventFd, Events, Interest};
use std::sync::Arc;
use std::time::{Duration, Instant};

const LEN: usize = 1 << 16;

alone!(bytes_count_when_their_mark_is_done_and_not_before, [SLOW], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, LEN), pinned(LEN));
    let bytes = pattern(LEN, 3);
    control.poke(memory.addr(), &bytes);
    let mut stream = Stream::new(memory.device()).unwrap();
    control.say("stall");
    stream.gather(&staging, 1000, &memory, &[(5000, 10_000)]).unwrap();
    let mut mark = stream.mark().unwrap();
    assert!(!mark.is_done().unwrap() && out(&staging, 1000, 10_000) == vec![0; 10_000]);
    control.say("release");
    mark.wait(&mut stream, LIMIT).unwrap();
    assert!(mark.is_done().unwrap() && out(&staging, 1000, 10_000) == bytes[5000..15_000]);
    // And the other way.
    control.say("stall");
    stream.scatter(&memory, &[(30_000, 10_000)], &staging, 1000).unwrap();
    assert!(control.peek(memory.addr() + 30_000, 10_000) == bytes[30_000..40_000]);
    control.say("release");
    stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
    assert!(control.peek(memory.addr() + 30_000, 10_000) == bytes[5000..15_000]);
    assert!(control.peek(memory.addr() + 40_000, 1000) == bytes[40_000..41_000]);
});

alone!(scattered_pages_are_packed_and_spread, [], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, LEN), pinned(LEN));
    let bytes = pattern(LEN, 4);
    control.poke(memory.addr(), &bytes);
    let mut stream = Stream::new(memory.device()).unwrap();
    // Equal distances, then none, then pieces of other lengths, and one that is empty.
    let pieces: Vec<(usize, usize)> = (0..8)
        .map(|row| (row * 4096 + 128, 512))
        .chain([(60_000, 512), (50_000, 512), (40_000, 100), (1, 0), (7, 3)])
        .collect();
    stream.gather(&staging, 64, &memory, &pieces).unwrap();
    stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
    let packed: Vec<u8> =
        pieces.iter().flat_map(|(offset, len)| bytes[*offset..offset + len].to_vec()).collect();
    assert!(out(&staging, 64, packed.len()) == packed);
    assert_eq!(out(&staging, 0, 64), vec![0; 64]);
    assert_eq!((control.count("cuMemcpy2DAsync_v2"), control.count("cuMemcpyBatchAsync")), (1, 1));
    // Spread again, elsewhere: all else stays as it is.
    let spread: Vec<(usize, usize)> = pieces.iter().map(|(offset, len)| (offset + 1024, *len)).collect();
    stream.scatter(&memory, &spread, &staging, 64).unwrap();
    stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
    let (mut expected, mut from) = (bytes.clone(), 0);
    for (offset, len) in spread {
        expected[offset..offset + len].copy_from_slice(&packed[from..from + len]);
        from += len;
    }
    assert!(control.peek(memory.addr(), LEN) == expected);
    assert_eq!((control.count("cuMemcpy2DAsync_v2"), control.count("cuMemcpyBatchAsync")), (2, 2));
    assert_eq!((control.count("cuMemcpyDtoHAsync_v2"), control.count("cuMemcpyHtoDAsync_v2")), (0, 0));
});

/// Moves 2500 pieces at no equal distances out and back, swapped end for end.
fn move_many(control: Control) {
    let app = Arc::new(App::on(0));
    let count = 2500;
    let (memory, staging) = (registered(&app, 64 * count), pinned(20 * count));
    let bytes = pattern(64 * count, 9);
    control.poke(memory.addr(), &bytes);
    // Every piece at another place of its 64 bytes than the ones beside it.
    let pieces: Vec<(usize, usize)> = (0..count).map(|at| (at * 64 + at * at % 41, 20)).collect();
    let mut stream = Stream::new(memory.device()).unwrap();
    stream.gather(&staging, 0, &memory, &pieces).unwrap();
    stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
    let packed: Vec<u8> =
        pieces.iter().flat_map(|(offset, len)| bytes[*offset..offset + len].to_vec()).collect();
    assert!(out(&staging, 0, packed.len()) == packed);
    let back: Vec<(usize, usize)> = pieces.iter().rev().copied().collect();
    stream.scatter(&memory, &back, &staging, 0).unwrap();
    stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
    let mut expected = bytes;
    for (at, (offset, len)) in back.iter().enumerate() {
        expected[*offset..offset + len].copy_from_slice(&packed[at * 20..at * 20 + 20]);
    }
    assert!(control.peek(memory.addr(), expected.len()) == expected);
}

const FAST: (&str, &str) = ("KVIK_STANDIN_CUDA_FAULTS", "delay micros=0");

alone!(many_pieces_go_in_few_calls, [FAST], |control| {
    move_many(control);
    let batches = control.count("cuMemcpyBatchAsync");
    assert!((4..=8).contains(&batches), "{batches}");
});

alone!(an_older_driver_gets_them_one_by_one, [FAST, ("KVIK_STANDIN_CUDA_VERSION", "12040")], |control| {
    move_many(control);
    assert_eq!(control.count("cuMemcpyBatchAsync"), 0);
    assert!(control.count("cuMemcpyDtoHAsync_v2") > 1000);
});

alone!(
    a_driver_that_cannot_after_all_is_asked_once,
    [("KVIK_STANDIN_CUDA_FAULTS", "delay micros=0;fail cuMemcpyBatchAsync nth=1 code=801")],
    |control| {
        let device = Cuda::get().unwrap().device(0).unwrap();
        assert!(device.has_batches());
        move_many(control);
        assert_eq!(control.count("cuMemcpyBatchAsync"), 1);
        assert!(!device.has_batches());
    }
);

alone!(a_batch_that_fails_is_named_and_forgotten, [FAST], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, LEN), pinned(LEN));
    let mut stream = Stream::new(memory.device()).unwrap();
    let pieces = [(0, 16), (100, 16), (900, 16), (300, 16), (600, 16)];
    let rows = [(2000, 8), (2100, 8), (2200, 8), (2300, 8)];
    for function in ["cuMemcpyBatchAsync", "cuMemcpy2DAsync_v2"] {
        control.say(&format!("fail {function} nth=1 code=719"));
        let error = stream.gather(&staging, 0, &memory, &[&pieces[..], &rows[..]].concat());
        let error = error.unwrap_err().to_string();
        assert!(error.contains("LAUNCH_FAILED") && error.contains("9 pieces"), "{error}");
    }
    // What one call left behind would come with the next.
    staging.memory().copy_in(0, &[0xEE; 1000]).unwrap();
    stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
    staging.memory().copy_in(0, &[0xEE; 1000]).unwrap();
    stream.gather(&staging, 500, &memory, &[(0, 4)]).unwrap();
    stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
    assert!(out(&staging, 0, 500) == [0xEE; 500] && out(&staging, 504, 496) == [0xEE; 496]);
});

alone!(what_lies_outside_is_refused_before_anything_moves, [], |control| {
    let (app, other) = (Arc::new(App::on(0)), Arc::new(App::on(1)));
    let (memory, staging) = (registered(&app, LEN), pinned(4096));
    let mut stream = Stream::new(memory.device()).unwrap();
    for (at, pieces) in
        [(0, vec![(0, 16), (LEN - 8, 9)]), (4000, vec![(0, 50), (100, 47)]), (0, vec![(usize::MAX, 2)])]
    {
        let error = stream.gather(&staging, at, &memory, &pieces).unwrap_err();
        assert!(matches!(error, HostError::OutOfBounds { .. }), "{pieces:?}: {error}");
        assert!(stream.scatter(&memory, &pieces, &staging, at).is_err());
    }
    assert!(stream.between(&memory, &memory, &[(LEN - 1, 0, 2)]).is_err());
    let theirs = registered(&other, LEN);
    let error = stream.gather(&staging, 0, &theirs, &[(0, 16)]).unwrap_err().to_string();
    assert!(error.contains("device 1") && error.contains("device 0"), "{error}");
    for function in
        ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemcpyBatchAsync"]
    {
        assert_eq!(control.count(function), 0, "{function}");
    }
});

alone!(devices_copy_to_each_other, [SLOW], |control| {
    let (app, other) = (Arc::new(App::on(0)), Arc::new(App::on(1)));
    let (here, there) = (registered(&app, LEN), registered(&other, LEN));
    let bytes = pattern(LEN, 5);
    control.poke(here.addr(), &bytes);
    let mut stream = Stream::new(here.device()).unwrap();
    control.say("stall");
    stream.between(&there, &here, &[(100, 200, 5000)]).unwrap();
    stream.between(&here, &here, &[(30_000, 200, 5000)]).unwrap();
    assert_eq!(control.peek(there.addr() + 100, 5000), vec![0; 5000]);
    control.say("release");
    stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
    assert!(control.peek(there.addr() + 100, 5000) == bytes[200..5200]);
    assert!(control.peek(here.addr() + 30_000, 5000) == bytes[200..5200]);
    assert_eq!((control.count("cuMemcpyPeerAsync"), control.count("cuMemcpyDtoDAsync_v2")), (1, 1));
});

alone!(pieces_go_between_memories_of_one_device_and_of_two, [FAST], |control| {
    let (app, other) = (Arc::new(App::on(0)), Arc::new(App::on(1)));
    let (here, near, there) = (registered(&app, LEN), registered(&app, LEN), registered(&other, LEN));
    let (bytes, before) = (pattern(LEN, 11), pattern(LEN, 12));
    control.poke(here.addr(), &bytes);
    let pieces: Vec<(usize, usize, usize)> =
        (0..1500).map(|at| (at * 40 + 3, (1499 - at) * 41 + 7, at % 33)).collect();
    let mut expected = before.clone();
    for (at, offset, len) in &pieces {
        expected[*at..at + len].copy_from_slice(&bytes[*offset..offset + len]);
    }
    let mut stream = Stream::new(here.device()).unwrap();
    for into in [&near, &there] {
        control.poke(into.addr(), &before);
        stream.between(into, &here, &pieces).unwrap();
        stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
        assert!(control.peek(into.addr(), LEN) == expected, "{into:?}");
    }
    assert_eq!((control.count("cuLaunchKernel"), control.count("cuMemcpyBatchAsync")), (1, 0));
    assert_eq!(control.count("cuMemcpyPeerAsync"), pieces.iter().filter(|(.., len)| *len > 0).count() as i64);
    assert!(stream.between(&near, &here, &[(0, 0, 8), (LEN - 8, 0, 9)]).is_err());
    assert!(stream.between(&near, &here, &[(0, 0, 8), (0, LEN - 8, 9)]).is_err());
    assert_eq!(control.count("cuMemcpyDtoDAsync_v2"), 0);
});

alone!(a_flag_wakes_who_waits_for_descriptors, [SLOW], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, LEN), pinned(LEN));
    let (epoll, flag, mut events) =
        (Epoll::new().unwrap(), Arc::new(EventFd::new().unwrap()), Events::new(2));
    epoll.add(&*flag, 9, Interest::READ).unwrap();
    let mut stream = Stream::new(memory.device()).unwrap();
    for _ in 0..3 {
        control.say("stall");
        stream.gather(&staging, 0, &memory, &[(0, 4096)]).unwrap();
        let mut mark = stream.mark().unwrap();
        stream.tell(&flag).unwrap();
        epoll.wait(&mut events, Duration::ZERO).unwrap();
        assert!(events.is_empty() && !mark.is_done().unwrap());
        control.say("release");
        epoll.wait(&mut events, LIMIT).unwrap();
        assert_eq!(events.iter().map(|event| event.token).collect::<Vec<_>>(), [9]);
        assert!(flag.drain().unwrap() && mark.is_done().unwrap(), "told of what is done");
    }
    // The driver has let go of it.
    until("the flag's end", || Arc::strong_count(&flag) == 1);
});

alone!(copies_come_behind_the_kernels_that_they_are_put_behind, [SLOW], |_| {
    assert!([1, 4, 16].into_iter().any(come_behind), "kernels have ended that no copy was put behind");
});

/// Kernels that take so many times as long as usual; false where one had ended before a copy that does not wait for it.
fn come_behind(times: u32) -> bool {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, LEN), pinned(LEN));
    let mut stream = Stream::new(memory.device()).unwrap();
    let read = |stream: &mut Stream| {
        stream.gather(&staging, 0, &memory, &[(0, 1)]).unwrap();
        stream.mark().unwrap().wait(stream, LIMIT).unwrap();
        out(&staging, 0, 1)[0]
    };
    // Nothing else orders them.
    app.fill(0, memory.addr(), 1, 1, times * 300_000);
    if read(&mut stream) != 0 {
        return false;
    }
    stream.after_default().unwrap();
    assert_eq!(read(&mut stream), 1);
    // A stream that blocks is behind the default one too, and one that does not is asked for itself.
    let (blocks, free) = (app.stream(true), app.stream(false));
    app.fill(blocks, memory.addr(), 1, 2, 200_000);
    stream.after_default().unwrap();
    assert_eq!(read(&mut stream), 2);
    app.fill(free, memory.addr(), 1, 3, times * 200_000);
    stream.after_default().unwrap();
    if read(&mut stream) != 2 {
        return false;
    }
    // SAFETY: a stream that is not destroyed.
    unsafe { stream.after_stream(free) }.unwrap();
    assert_eq!(read(&mut stream), 3);
    true
}

alone!(a_stream_that_never_gets_anywhere_bounds_the_wait, [], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, LEN), pinned(LEN));
    let mut stream = Stream::new(memory.device()).unwrap();
    control.say("stall");
    stream.gather(&staging, 0, &memory, &[(0, 4096)]).unwrap();
    let mut mark = stream.mark().unwrap();
    let (began, busy) = (Instant::now(), watch::start());
    let error = mark.wait(&mut stream, Duration::from_millis(200)).unwrap_err();
    assert!(matches!(error, HostError::TimedOut { .. }) && error.to_string().contains("device 0"), "{error}");
    assert!(began.elapsed() >= Duration::from_millis(200) && busy.elapsed() < Duration::from_secs(5));
    assert!(!mark.is_done().unwrap());
    control.say("release");
    mark.wait(&mut stream, LIMIT).unwrap();
});

alone!(what_is_dropped_in_flight_stays_until_it_has_ended, [], |control| {
    let app = Arc::new(App::on(0));
    let device = Cuda::get().unwrap().device(0).unwrap();
    // Marks, streams and memory, dropped in every order while nothing moves: the stand-in ends who frees too early.
    for order in 0..6 {
        control.say("stall");
        let (memory, staging) = (registered(&app, LEN), pinned(LEN));
        let mut stream = Stream::new(&device).unwrap();
        stream.gather(&staging, 0, &memory, &[(0, 4096)]).unwrap();
        let mark = stream.mark().unwrap();
        stream.scatter(&memory, &[(4096, 4096)], &staging, 0).unwrap();
        let (of_memory, of_staging) = (Arc::downgrade(&memory), Arc::downgrade(&staging));
        match order {
            0 => drop((memory, staging, mark, stream)),
            1 => drop((mark, stream, memory, staging)),
            2 => drop((stream, mark, staging, memory)),
            3 => drop((stream, memory, mark, staging)),
            4 => drop((mark, memory, stream, staging)),
            _ => drop((staging, stream, memory, mark)),
        }
        assert!(of_memory.strong_count() > 0 && of_staging.strong_count() > 0, "order {order}");
        assert_eq!((control.count("allocations"), device.settle()), (1, 2), "order {order}");
        control.say("release");
        until("the end of all copies", || device.settle() == 0);
        assert_eq!((of_memory.strong_count(), of_staging.strong_count()), (0, 0), "order {order}");
        assert_eq!(control.count("allocations"), 0, "order {order}");
    }
    drop((device, app));
    nothing_is_left(control);
});

alone!(nobody_waits_for_a_device_that_hangs_to_let_go_of_a_buffer, [], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging, unused) = (registered(&app, LEN), pinned(LEN), pinned(LEN));
    let mut stream = Stream::new(memory.device()).unwrap();
    control.say("stall");
    stream.gather(&staging, 0, &memory, &[(0, 64)]).unwrap();
    // Freeing it waits for every stream.
    drop(unused);
    until("an attempt to free it", || control.count("cuMemFreeHost") == 1);
    assert_eq!(control.count("pinned"), 2);
    control.say("release");
    until("the end of one", || control.count("pinned") == 1);
    stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
});

alone!(an_end_that_cannot_be_asked_for_lets_go_of_nothing, [], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, LEN), pinned(LEN));
    let device = memory.device().clone();
    let mut stream = Stream::new(&device).unwrap();
    control.say("stall");
    let fail = |function: &str, nth: u32| control.say(&format!("fail {function} nth={nth} code=999"));
    // Asked, and dropped, while the driver does not say; and dropped where its context cannot be made current.
    for function in ["cuEventQuery", "cuCtxPushCurrent_v2"] {
        stream.gather(&staging, 0, &memory, &[(0, 64)]).unwrap();
        let mut mark = stream.mark().unwrap();
        fail(function, 1);
        assert!(mark.is_done().unwrap_err().to_string().contains("CUDA_ERROR_UNKNOWN"));
        fail(function, 1);
        drop(mark);
    }
    fail("cuEventQuery", 1);
    assert_eq!(device.settle(), 2);
    fail("cuCtxPushCurrent_v2", 1);
    assert_eq!(device.settle(), 2);
    assert_eq!((Arc::strong_count(&memory), Arc::strong_count(&staging)), (3, 3));
    // A stream whose end cannot be marked: what it used stays for ever.
    stream.gather(&staging, 0, &memory, &[(0, 64)]).unwrap();
    fail("cuEventRecord", 1);
    drop(stream);
    control.say("release");
    until("the end of all that is known", || device.settle() == 0);
    assert_eq!((Arc::strong_count(&memory), Arc::strong_count(&staging)), (2, 2));
});

alone!(waiting_again_and_again_takes_no_room_in_the_stream, [], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, LEN), pinned(LEN));
    let mut stream = Stream::new(memory.device()).unwrap();
    control.say("stall");
    stream.gather(&staging, 0, &memory, &[(0, 64)]).unwrap();
    let mut mark = stream.mark().unwrap();
    for _ in 0..20 {
        assert!(mark.wait(&mut stream, Duration::from_millis(1)).is_err());
    }
    assert_eq!(control.count("cuStreamAddCallback"), 1);
    control.say("release");
    mark.wait(&mut stream, LIMIT).unwrap();
});

alone!(a_context_that_somebody_resets_is_made_again, [], |_| {
    let app = App::on(0);
    let first = Cuda::get().unwrap().device(0).unwrap();
    // As `cudaDeviceReset` does: whoever retained it is not asked.
    app.reset();
    assert!(first.settle() == 0 && Stream::new(&first).is_err() && Pinned::new(&first, 777).is_err());
    let again = Cuda::get().unwrap().device(0).unwrap();
    assert!(!again.is(&first));
    let memory = GpuMemory::alloc(&again, 100).unwrap();
    memory.copy_in(0, &[3; 100]).unwrap();
    std::mem::forget(app);
});

alone!(a_thousand_transfers_leave_nothing_behind, [], |control| {
    let app = Arc::new(App::on(0));
    {
        let (memory, staging) = (registered(&app, LEN), pinned(LEN));
        control.say("delay micros=0");
        let mut stream = Stream::new(memory.device()).unwrap();
        for round in 0..1000 {
            stream.gather(&staging, 0, &memory, &[(round * 16, 512)]).unwrap();
            let mut mark = stream.mark().unwrap();
            if round % 3 > 0 {
                mark.wait(&mut stream, LIMIT).unwrap();
                // What was dropped before it has ended too.
                assert_eq!(memory.device().settle(), 0);
                assert_eq!(Arc::strong_count(&memory), 1);
            }
        }
        stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
        assert_eq!(memory.device().settle(), 0);
        assert!(control.count("events") < 20, "events are used again: {}", control.count("events"));
    }
    drop(app);
    nothing_is_left(control);
});

alone!(memory_of_kviks_own_comes_and_goes, [], |control| {
    let device = Cuda::get().unwrap().device(1).unwrap();
    let memory = GpuMemory::alloc(&device, 5000).unwrap();
    memory.copy_in(4000, &[9; 1000]).unwrap();
    assert_eq!(control.peek(memory.addr() + 4000, 1000), vec![9; 1000]);
    let error = GpuMemory::alloc(&device, 2 << 30).unwrap_err().to_string();
    assert!(error.contains("OUT_OF_MEMORY") && error.contains("no room left"), "{error}");
    drop((memory, device));
    nothing_is_left(control);
});

alone!(calls_that_fail_are_named_and_leave_no_harm, [], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, LEN), pinned(LEN));
    let device = memory.device().clone();
    let fail = |function: &str| control.say(&format!("fail {function} nth=1 code=999"));
    let named = |error: HostError| {
        let error = error.to_string();
        assert!(error.contains("CUDA_ERROR_UNKNOWN") && error.contains("device 0"), "{error}");
    };
    fail("cuStreamCreate");
    named(Stream::new(&device).map(|_| ()).unwrap_err());
    let mut stream = Stream::new(&device).unwrap();
    fail("cuMemcpyDtoHAsync_v2");
    named(stream.gather(&staging, 0, &memory, &[(0, 16)]).unwrap_err());
    fail("cuEventCreate");
    named(stream.mark().map(|_| ()).unwrap_err());
    fail("cuEventRecord");
    named(stream.mark().map(|_| ()).unwrap_err());
    fail("cuStreamAddCallback");
    let flag = Arc::new(EventFd::new().unwrap());
    named(stream.tell(&flag).unwrap_err());
    assert_eq!(Arc::strong_count(&flag), 1);
    fail("cuCtxPushCurrent_v2");
    named(stream.after_default().unwrap_err());
    fail("cuStreamWaitEvent");
    named(stream.after_default().unwrap_err());
    fail("cuMemcpyHtoD_v2");
    named(memory.copy_in(0, &[1]).unwrap_err());
    fail("cuStreamSynchronize");
    named(memory.copy_in(0, &[1]).unwrap_err());
    fail("cuMemHostAlloc");
    named(Pinned::new(&device, 16).map(|_| ()).unwrap_err());
    // All of it works now.
    memory.copy_in(0, &[5]).unwrap();
    stream.gather(&staging, 0, &memory, &[(0, 16)]).unwrap();
    stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
    assert_eq!(out(&staging, 0, 1), [5]);
});

alone!(threads_keep_the_contexts_that_they_had, [], |control| {
    let (app, other) = (Arc::new(App::on(0)), App::on(1));
    let memory = registered(&app, LEN);
    control.poke(memory.addr(), &pattern(LEN, 8));
    let use_all = |memory: &Arc<GpuMemory>, part: usize| {
        let staging = Arc::new(Pinned::new(memory.device(), 4096).unwrap());
        let mut stream = Stream::new(memory.device()).unwrap();
        for round in 0..20 {
            let at = part * 16_000 + round * 100;
            stream.gather(&staging, 0, memory, &[(at, 4096)]).unwrap();
            stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
            assert!(out(&staging, 0, 4096) == pattern(LEN, 8)[at..at + 4096]);
        }
        memory.copy_out(0, &mut [0; 10]).unwrap();
        assert!(stream.gather(&staging, 4090, memory, &[(0, 10)]).is_err());
        (stream, staging)
    };
    std::thread::scope(|scope| {
        for part in 0..3 {
            let memory = memory.clone();
            scope.spawn(move || {
                assert_eq!(App::current(), 0);
                let (mut stream, staging) = use_all(&memory, part);
                assert_eq!(App::current(), 0);
                // A stream may go to another thread, and end there.
                let last = std::thread::spawn(move || {
                    stream.gather(&staging, 0, &memory, &[(0, 16)]).unwrap();
                    let mut mark = stream.mark().unwrap();
                    mark.wait(&mut stream, LIMIT).unwrap();
                    drop((mark, stream));
                    assert_eq!(App::current(), 0);
                });
                last.join().unwrap();
            });
        }
    });
    // And where an application works on another device meanwhile, it still does.
    let code = other.within(|| {
        let had = App::current();
        let used = use_all(&memory, 0);
        drop(used);
        i32::from(had == 0 || App::current() != had)
    });
    assert_eq!(code, 0);
});
