//! A device whose context is lost: everything is named, nothing hangs, nothing goes on.

use super::{LIMIT, alone, pinned, registered};
use crate::standin::{App, Control};
use kvik_host::HostError;
use kvik_host::cuda::{Cuda, Mark, Stream};
use kvik_host::event::{EventFd, Interest, wait_ready};
use std::sync::Arc;
use std::time::Instant;

/// Whether it is the loss, by its name.
fn is_lost(error: &HostError) -> bool {
    let HostError::Cuda(cuda) = error else { return false };
    cuda.is_lost() && cuda.code == 700 && error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS")
}

alone!(a_lost_context_fails_everything_by_name, [], |control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, 1 << 16), pinned(1 << 16));
    let mut stream = Stream::new(memory.device()).unwrap();
    control.say("stall");
    stream.gather(&staging, 0, &memory, &[(0, 4096)]).unwrap();
    let mut mark = stream.mark().unwrap();
    let flag = Arc::new(EventFd::new().unwrap());
    stream.tell(&flag).unwrap();
    control.say("poison device=0 code=700");
    // Who waits for the flag is woken, and the mark says why.
    assert!(wait_ready(&*flag, Interest::READ, LIMIT).unwrap());
    let error = mark.is_done().unwrap_err();
    assert!(is_lost(&error) && error.to_string().contains("only a new process"), "{error}");
    let began = Instant::now();
    let errors = [
        mark.wait(&mut stream, LIMIT).unwrap_err(),
        stream.gather(&staging, 0, &memory, &[(0, 16)]).unwrap_err(),
        stream.scatter(&memory, &[(0, 16)], &staging, 0).unwrap_err(),
        stream.between(&memory, &memory, &[(0, 16, 16)]).unwrap_err(),
        stream.mark().map(|_: Mark| ()).unwrap_err(),
        stream.tell(&flag).unwrap_err(),
        stream.after_default().unwrap_err(),
        memory.copy_in(0, &[1]).unwrap_err(),
        memory.copy_out(0, &mut [1]).unwrap_err(),
        memory.export().map(|_| ()).unwrap_err(),
        memory.dmabuf().map(|_| ()).unwrap_err(),
        memory.flush_writes().unwrap_err(),
        Stream::new(memory.device()).map(|_| ()).unwrap_err(),
    ];
    for error in &errors {
        assert!(is_lost(error), "{error}");
    }
    assert!(began.elapsed() < LIMIT);
    assert_eq!(memory.device().settle(), 0);
    // No byte of what was in flight has come, and what another device has is not touched by any of it.
    assert_eq!(super::out(&staging, 0, 16), vec![0; 16]);
    let other = App::on(1);
    let at = other.alloc(4096);
    assert!(Cuda::locate(at).unwrap().is_some());
    // Nothing can be freed, and dropping says nothing.
    drop((mark, stream, staging));
    std::mem::forget(memory);
});

alone!(a_wait_is_woken_by_the_loss, [], |control: Control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, 1 << 16), pinned(1 << 16));
    let mut stream = Stream::new(memory.device()).unwrap();
    control.say("stall");
    stream.gather(&staging, 0, &memory, &[(0, 4096)]).unwrap();
    let mut mark = stream.mark().unwrap();
    let loss = std::thread::spawn(move || {
        super::until("the wait", || control.count("cuStreamAddCallback") > 0);
        control.say("poison device=0 code=700");
    });
    let error = mark.wait(&mut stream, LIMIT).unwrap_err();
    assert!(is_lost(&error), "{error}");
    loss.join().unwrap();
    drop((mark, stream, staging));
    std::mem::forget(memory);
});

alone!(streams_with_copies_of_a_lost_context_are_dropped_at_once, [], |control: Control| {
    let app = Arc::new(App::on(0));
    let (memory, staging) = (registered(&app, 1 << 16), pinned(1 << 16));
    let device = memory.device().clone();
    let mut stream = Stream::new(&device).unwrap();
    control.say("stall");
    stream.gather(&staging, 0, &memory, &[(0, 4096)]).unwrap();
    let left = stream.mark().unwrap();
    stream.gather(&staging, 0, &memory, &[(4096, 4096)]).unwrap();
    drop(left);
    assert_eq!(device.settle(), 1);
    control.say("poison device=0 code=719");
    drop(stream);
    assert_eq!(device.settle(), 0);
    assert_eq!((Arc::strong_count(&staging), Arc::strong_count(&memory)), (1, 1));
    std::mem::forget(memory);
});
