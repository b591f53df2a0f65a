//! The thread that waits for streams of devices, and an engine that closes as it starts.

use crate::config::Config;
use crate::inner::Inner;
use crate::setup::Setup;
use crate::sync::lock;
use std::time::{Duration, Instant};

#[test]
fn a_thread_that_comes_after_the_end_ends() {
    let inner = Inner::start(Setup::new(Config::default(), Vec::new()).unwrap()).unwrap();
    let streams = &inner.streams;
    streams.stop();
    streams.flag().unwrap();
    let thread = lock(&streams.thread).take().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while !thread.is_finished() {
        assert!(Instant::now() < until, "it waits for whoever closes the engine, who waits for it");
        std::thread::yield_now();
    }
    inner.base.transports.all().iter().for_each(|one| one.stop());
}
