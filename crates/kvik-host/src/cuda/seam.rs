//! GPUs as [`device`](crate::device)s.

use super::{CudaError, Device, GpuMemory, Mark, Pinned, Stream};
use crate::device::{self, CallerStream, DeviceKind, DeviceMark, DeviceMemory, DeviceStream, DmaBuf, Handle};
use crate::error::HostError;
use crate::event::EventFd;
use crate::memory::Memory;
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

impl device::Device for Device {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn number(&self) -> u32 {
        self.ordinal()
    }

    fn id(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }

    fn ipc(&self) -> &'static str {
        "cuda_ipc"
    }

    fn stream(&self, room: usize) -> Result<Box<dyn DeviceStream>, HostError> {
        let (stream, buffer) = (Stream::new(self)?, Arc::new(Pinned::new(self, room)?));
        Ok(Box::new(Marked { stream, buffer, marks: VecDeque::new(), given: 0, reached: 0, lost: None }))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {}", self.ordinal())
    }
}

impl DeviceMemory for GpuMemory {
    fn device(&self) -> &dyn device::Device {
        self.device()
    }

    fn addr(&self) -> usize {
        self.addr()
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn writable(&self) -> bool {
        self.writable()
    }

    fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), HostError> {
        self.copy_in(offset, from)
    }

    fn copy_out(&self, offset: usize, into: &mut [u8]) -> Result<(), HostError> {
        self.copy_out(offset, into)
    }

    fn flush_writes(&self) -> Result<(), HostError> {
        self.flush_writes()
    }

    fn export(&self) -> Result<Handle, HostError> {
        Ok(self.export()?.encode())
    }

    fn dmabuf(&self) -> Result<DmaBuf, HostError> {
        self.dmabuf()
    }
}

/// A stream, its buffer, and the marks that it has not been seen to reach, by their numbers.
struct Marked {
    stream: Stream,
    buffer: Arc<Pinned>,
    marks: VecDeque<(u64, Mark)>,
    given: u64,
    reached: u64,
    /// Why no copy counts any more.
    lost: Option<CudaError>,
}

impl DeviceStream for Marked {
    fn device(&self) -> &dyn device::Device {
        self.stream.device()
    }

    fn buffer(&self) -> &Arc<Memory> {
        self.buffer.memory()
    }

    fn gather(
        &mut self,
        at: usize,
        from: &Arc<dyn DeviceMemory>,
        pieces: &[(usize, usize)],
    ) -> Result<(), HostError> {
        self.stream.gather(&self.buffer, at, &of_gpu(from)?, pieces)
    }

    fn scatter(
        &mut self,
        to: &Arc<dyn DeviceMemory>,
        pieces: &[(usize, usize)],
        at: usize,
    ) -> Result<(), HostError> {
        self.stream.scatter(&of_gpu(to)?, pieces, &self.buffer, at)
    }

    fn between(
        &mut self,
        to: &Arc<dyn DeviceMemory>,
        from: &Arc<dyn DeviceMemory>,
        pieces: &[(usize, usize, usize)],
    ) -> Result<(), HostError> {
        self.stream.between(&of_gpu(to)?, &of_gpu(from)?, pieces)
    }

    fn mark(&mut self) -> Result<u64, HostError> {
        let mark = self.stream.mark()?;
        self.given += 1;
        self.marks.push_back((self.given, mark));
        Ok(self.given)
    }

    fn reached(&mut self) -> Result<u64, HostError> {
        while let Some((number, mark)) = self.marks.front_mut() {
            match mark.is_done() {
                Ok(true) => self.reached = *number,
                Ok(false) => break,
                Err(HostError::Cuda(error)) if error.is_lost() => {
                    // Then none of them has anything in flight, nor holds what it was of.
                    self.marks.clear();
                    self.lost = Some(error);
                    break;
                }
                Err(error) => return Err(error),
            }
            self.marks.pop_front();
        }
        // Each time: whoever asks about a later mark must hear of it too.
        self.lost.clone().map_or(Ok(self.reached), |lost| Err(lost.into()))
    }

    fn wait(&mut self, mark: u64, limit: Duration) -> Result<(), HostError> {
        let there = self.marks.iter_mut().find(|(number, _)| *number == mark);
        let waited = there.map_or(Ok(()), |(_, there)| there.wait(&mut self.stream, limit));
        // Also where that failed: a mark of a device that is lost, by whatever call that was told, is to hold nothing.
        self.reached()?;
        waited
    }

    fn tell(&mut self, flag: &Arc<EventFd>) -> Result<(), HostError> {
        self.stream.tell(flag)
    }

    fn mark_of(
        &mut self,
        stream: CallerStream,
        flag: &Arc<EventFd>,
    ) -> Result<Box<dyn DeviceMark>, HostError> {
        let mark = self.stream.mark_of(stream)?;
        self.stream.tell(flag)?;
        Ok(Box::new(mark))
    }
}

impl DeviceMark for Mark {
    fn is_reached(&mut self) -> Result<bool, HostError> {
        self.is_done()
    }
}

/// The memory as CUDA's own.
fn of_gpu(memory: &Arc<dyn DeviceMemory>) -> Result<Arc<GpuMemory>, HostError> {
    let any: Arc<dyn Any + Send + Sync> = memory.clone();
    any.downcast()
        .map_err(|_| CudaError::own("enqueueing a copy", format!("{memory:?} is no memory of a GPU")).into())
}
