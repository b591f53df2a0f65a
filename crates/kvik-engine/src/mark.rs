//! Points in a stream of the program's that a caller can wait for.

use crate::end::End;
use crate::region::Region;
use kvik_core::Result;
use kvik_host::device::CallerStream;
use std::sync::Arc;
use std::time::Duration;

/// A point in a stream, from [`Region::mark`]: behind what the stream was given by then.
pub struct StreamMark {
    end: Arc<End<()>>,
    deadline: Duration,
}

impl StreamMark {
    /// How long a wait without a timeout is: the engine's deadline.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Waits until the stream has done all that was before it; without a timeout as long as the engine's deadline.
    ///
    /// # Errors
    /// `DeviceFailed`: it never will; `EngineClosed`; `WaitTimeout` when the time passes first.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        let late = "the stream has not done yet what it was given before the mark: wait again";
        self.end.wait(Some(timeout.unwrap_or(self.deadline)), late)
    }
}

impl Region {
    /// Puts a mark behind what a stream of the region's device was given so far: for whoever hands its pages to a call
    /// that takes no stream.
    ///
    /// # Errors
    /// `InvalidArgument`: the region is the host's memory, or no thread can be started; `DeviceFailed`: the driver
    /// refuses it; `RegionClosed`, `EngineClosed`, `EngineForked`.
    pub fn mark(&self, stream: CallerStream) -> Result<StreamMark> {
        let engine = &self.inner.engine;
        engine.base.setup.check()?;
        let end = engine.streams.mark(stream, &self.memory()?)?;
        Ok(StreamMark { end, deadline: engine.base.setup.config.deadline })
    }
}
