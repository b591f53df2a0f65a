//! The same memory for a NIC, and for another process.

use super::{LIMIT, SLOW, alone, nothing_is_left, out, pattern, pinned, registered, until};
use crate::standin::{self, App};
use kvik_host::HostError;
use kvik_host::cuda::{Cuda, GpuMemory, IpcHandle, Stream};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::sync::Arc;

alone!(a_dma_buf_has_the_bytes_at_its_offset, [], |control| {
    let app = Arc::new(App::on(0));
    let at = app.alloc(5 * 4096 + 100);
    // SAFETY: allocated to the end of the process.
    let memory = unsafe { GpuMemory::new(at + 4096 + 10, 3 * 4096, Box::new(())) }.unwrap();
    let bytes = pattern(3 * 4096, 6);
    memory.copy_in(0, &bytes).unwrap();
    let dmabuf = memory.dmabuf().unwrap();
    assert_eq!((dmabuf.offset, dmabuf.ordered), (10, true));
    let flags = rustix::io::fcntl_getfd(dmabuf.fd.as_fd()).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    // The stand-in's descriptor stands at the first page of the range.
    let mut file = std::fs::File::from(dmabuf.fd);
    assert_eq!(file.stream_position().unwrap(), 4096);
    file.seek(SeekFrom::Current(dmabuf.offset as i64)).unwrap();
    let mut there = vec![0; bytes.len()];
    file.read_exact(&mut there).unwrap();
    assert!(there == bytes);
    // From here on a blocking copy is in place when it returns, for NICs as well.
    control.say("delay micros=20000");
    memory.copy_in(0, &[1; 100]).unwrap();
    assert_eq!(control.peek(memory.addr(), 100), [1; 100]);
    // To the last byte of an allocation that ends within a page.
    // SAFETY: as above.
    let end = unsafe { GpuMemory::new(at + 5 * 4096, 100, Box::new(())) }.unwrap();
    assert_eq!(end.dmabuf().unwrap().offset, 0);
});

alone!(a_device_that_has_no_dma_bufs_says_what_it_takes, [], |control| {
    let app = Arc::new(App::on(0));
    let memory = registered(&app, 4096);
    control.say("attribute id=124 value=0");
    let error = memory.dmabuf().unwrap_err().to_string();
    assert!(error.contains("open kernel modules") && !memory.device().has_dmabuf(), "{error}");
    control.say("attribute id=124 value=1");
    control.say("fail cuMemGetHandleForAddressRange nth=1 code=801");
    let error = memory.dmabuf().unwrap_err().to_string();
    assert!(error.contains("NOT_SUPPORTED") && error.contains("4096 bytes"), "{error}");
    let managed = app.managed(4096);
    // SAFETY: allocated to the end of the process.
    let managed = unsafe { GpuMemory::new(managed, 4096, Box::new(())) }.unwrap();
    assert!(managed.dmabuf().unwrap_err().to_string().contains("moves about"));
    assert!(managed.export().is_err());
});

alone!(writes_of_nics_are_flushed_where_it_takes_that, [], |control| {
    let app = Arc::new(App::on(0));
    let memory = registered(&app, 4096);
    memory.flush_writes().unwrap();
    assert_eq!(control.count("cuFlushGPUDirectRDMAWrites"), 1);
    control.say("attribute id=118 value=100");
    memory.flush_writes().unwrap();
    assert_eq!(control.count("cuFlushGPUDirectRDMAWrites"), 1, "the device orders them itself");
    control.say("attribute id=118 value=0");
    control.say("attribute id=117 value=0");
    let error = memory.flush_writes().unwrap_err().to_string();
    assert!(error.contains("neither orders"), "{error}");
});

/// The variable by which the second process gets the first one's handle.
const HANDLE: &str = "KVIK_TEST_CUDA_HANDLE";

fn hex(handle: &IpcHandle) -> String {
    handle.encode().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn given() -> Option<IpcHandle> {
    let text = std::env::var(HANDLE).ok()?;
    let byte = |at: usize| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    Some(IpcHandle::decode(&std::array::from_fn(byte)))
}

fn opened(handle: &IpcHandle) -> Result<GpuMemory, HostError> {
    GpuMemory::open(handle, Box::new(()))
}

/// What the second process does with the memory of the first: 5000 bytes of a pattern, which start at 3 in it.
fn peer(handle: &IpcHandle) {
    let open = Arc::new(());
    let peer = Arc::new(GpuMemory::open(handle, Box::new(open.clone())).unwrap());
    assert_eq!((peer.len(), peer.device().ordinal()), (20_000, 1));
    let device = peer.device().clone();
    let own = Arc::new(GpuMemory::alloc(&device, 5000).unwrap());
    let mut stream = Stream::new(&device).unwrap();
    let staging = pinned(5000);
    stream.between(&own, &peer, &[(0, 3, 5000)]).unwrap();
    stream.gather(&staging, 0, &own, &[(0, 5000)]).unwrap();
    stream.mark().unwrap().wait(&mut stream, LIMIT).unwrap();
    assert!(out(&staging, 0, 5000) == pattern(5000, 7));
    // It is not ours to write.
    let memory = peer.clone();
    let read_only = |error: HostError| assert!(matches!(error, HostError::ReadOnlyMemory), "{error}");
    read_only(memory.copy_in(0, &[1]).unwrap_err());
    read_only(stream.scatter(&memory, &[(0, 16)], &staging, 0).unwrap_err());
    read_only(stream.between(&memory, &own, &[(0, 0, 16)]).unwrap_err());
    assert!(memory.export().is_err());
    // It stays open as long as somebody has it, and more than that says is not taken.
    let control = standin::Control;
    drop(peer);
    assert_eq!(control.count("opened"), 1);
    assert_eq!(Arc::strong_count(&open), 2);
    drop(memory);
    // What it keeps is let go of once it is closed, and no sooner.
    until("the end of what is open", || Arc::strong_count(&open) == 1);
    assert_eq!(control.count("opened"), 0);
    for wrong in [
        IpcHandle { len: handle.len + 30_000, ..*handle },
        IpcHandle { offset: u64::MAX, ..*handle },
        IpcHandle { len: 0, ..*handle },
    ] {
        let error = opened(&wrong).unwrap_err().to_string();
        assert!(error.contains("of an allocation that has"), "{error}");
    }
    let error = opened(&IpcHandle { device: [7; 16], ..*handle }).unwrap_err().to_string();
    assert!(error.contains("0707") && error.contains("does not see"), "{error}");
    assert!(opened(&IpcHandle { handle: [1; 64], ..*handle }).is_err());
    drop((own, stream, staging, device));
    nothing_is_left(control);
}

/// Of the second process, after the first has freed it.
fn peer_too_late(handle: &IpcHandle) {
    let error = opened(handle).unwrap_err().to_string();
    assert!(error.contains("peer's memory") && error.contains("INVALID_VALUE"), "{error}");
    nothing_is_left(standin::Control);
}

alone!(another_process_reads_it_and_cannot_write_it, [SLOW], |control| {
    let test = "sharing::another_process_reads_it_and_cannot_write_it";
    if let Some(handle) = given() {
        return if std::env::var_os("KVIK_TEST_CUDA_LATE").is_some() {
            peer_too_late(&handle)
        } else {
            peer(&handle)
        };
    }
    let app = Arc::new(App::on(1));
    let at = app.alloc(50_000);
    // SAFETY: allocated until it is freed below, after the last use.
    let memory = unsafe { GpuMemory::new(at + 1000, 20_000, Box::new(())) }.unwrap();
    control.poke(at + 1003, &pattern(5000, 7));
    let handle = memory.export().unwrap();
    assert_eq!((handle.offset, handle.len), (1000, 20_000));
    let text = hex(&handle);
    let ran = standin::again(test, &[(HANDLE, &text)]);
    assert!(ran.status.success(), "{}", standin::text(&ran));
    assert!(control.peek(at + 1003, 5000) == pattern(5000, 7));
    let error = opened(&handle).unwrap_err().to_string();
    assert!(error.contains("exported itself"), "{error}");
    drop(memory);
    assert_eq!(app.free(at), 0);
    let ran = standin::again(test, &[(HANDLE, &text), ("KVIK_TEST_CUDA_LATE", "1")]);
    assert!(ran.status.success(), "{}", standin::text(&ran));
    assert_eq!(Cuda::get().unwrap().devices(), 2);
});
