//! The files of a log: the one place where it meets a disk.
//!
//! Everything that a log does to a disk is an operation of [`Files`] or [`LogFile`], so that tests can fail, interrupt
//! or lose each of them, and so that the rules of durability can be read off two traits.

use kvik_host::file::{DataFile, Folder, FolderLock, Locked};
use kvik_host::{HostError, Memory, RecvRun, RunBuffer, SendRun};
use std::io;
use std::path::Path;
use std::sync::Arc;

/// A range of memory: memory, offset and bytes.
pub type Range<'a> = (&'a Memory, usize, usize);

/// A directory of files.
pub trait Files: Send + Sync {
    /// Where it is, for texts.
    fn name(&self) -> String;

    /// Whether it may only be read.
    fn read_only(&self) -> bool;

    /// The names of all files with their bytes.
    ///
    /// # Errors
    /// What the kernel says, as everywhere here.
    fn list(&self) -> io::Result<Vec<(String, u64)>>;

    /// Makes a file of no bytes, which must not be there yet. It is there after a loss of power once [`Files::sync`]
    /// was called.
    ///
    /// # Errors
    /// `AlreadyExists`, and what the kernel says.
    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>>;

    /// Opens a file, for reading and, where the directory is not read-only, for writing.
    ///
    /// # Errors
    /// `NotFound`, and what the kernel says.
    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>>;

    /// Removes a file. It stays away after a loss of power once [`Files::sync`] was called.
    ///
    /// # Errors
    /// What the kernel says.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes durable which files are there.
    ///
    /// # Errors
    /// What the kernel says.
    fn sync(&self) -> io::Result<()>;
}

/// A file of a log.
pub trait LogFile: Send + Sync {
    /// Bytes.
    ///
    /// # Errors
    /// What the kernel says, as everywhere here.
    fn size(&self) -> io::Result<u64>;

    /// Makes an empty file so long, and takes the room for it.
    ///
    /// # Errors
    /// What the kernel says.
    fn allocate(&self, bytes: u64) -> io::Result<()>;

    /// Cuts it off.
    ///
    /// # Errors
    /// What the kernel says.
    fn truncate(&self, bytes: u64) -> io::Result<()>;

    /// Writes `head` at `offset`, and `body` after it.
    ///
    /// # Errors
    /// What the kernel says; some of it may have been written. `InvalidInput` for a body outside of its memory.
    fn write(&self, offset: u64, head: &[u8], body: Option<Range<'_>>) -> io::Result<()>;

    /// Reads from `offset` on to `head`, and then to `body`, and says how many bytes there were.
    ///
    /// # Errors
    /// As for [`LogFile::write`].
    fn read(&self, offset: u64, head: &mut [u8], body: Option<Range<'_>>) -> io::Result<usize>;

    /// Makes durable what was written before this call, and the file's length.
    ///
    /// # Errors
    /// What the kernel says. Nothing that was written since the last sync counts as durable then, whatever a later sync
    /// says.
    fn sync(&self) -> io::Result<()>;
}

/// The name of the file that is locked.
const LOCK: &str = "LOCK";

/// A directory of this machine, locked.
#[derive(Debug)]
pub struct Directory {
    folder: Folder,
    /// `None` where there is nothing to lock: a directory that may only be read, and that nobody ever wrote to.
    _lock: Option<FolderLock>,
    read_only: bool,
}

impl Directory {
    /// Opens a directory, which is made where it is not there yet, and locks it.
    ///
    /// # Errors
    /// What the kernel says; `ResourceBusy` where another process has it.
    pub fn open(path: &Path) -> io::Result<Directory> {
        let folder = Folder::open(path, true)?;
        let mut read_only = !folder.writable();
        let mut locked = folder.lock(LOCK, !read_only);
        // NFS remembers what it was told of a directory before its server made that read-only.
        if locked.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ReadOnlyFilesystem) && !read_only
        {
            read_only = true;
            locked = folder.lock(LOCK, false);
        }
        let lock = match locked {
            Ok(Locked::Yes(lock)) => Some(lock),
            Ok(Locked::Other(pid)) => {
                let who = if pid.is_empty() { "another process".into() } else { format!("process {pid}") };
                let text = format!("{who} has the log open: end it first, or give each process a directory");
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
            }
            Err(error) if read_only && error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok(Directory { folder, _lock: lock, read_only })
    }
}

impl Files for Directory {
    fn name(&self) -> String {
        self.folder.path().display().to_string()
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    fn list(&self) -> io::Result<Vec<(String, u64)>> {
        self.folder.files(|name| name != LOCK)
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(Arc::new(OnDisk(self.folder.create(name)?)))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn LogFile>> {
        Ok(Arc::new(OnDisk(self.folder.open_file(name, !self.read_only)?)))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.folder.remove(name)
    }

    fn sync(&self) -> io::Result<()> {
        self.folder.sync()
    }
}

struct OnDisk(DataFile);

fn outside(error: HostError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error.to_string())
}

impl LogFile for OnDisk {
    fn size(&self) -> io::Result<u64> {
        self.0.size()
    }

    fn allocate(&self, bytes: u64) -> io::Result<()> {
        self.0.allocate(bytes)
    }

    fn truncate(&self, bytes: u64) -> io::Result<()> {
        self.0.resize(bytes)
    }

    fn write(&self, offset: u64, head: &[u8], body: Option<Range<'_>>) -> io::Result<()> {
        let mut buffer = RunBuffer::new(2);
        let mut batch = buffer.begin_send();
        let mut taken = batch.push(SendRun::from(head));
        if let Some((memory, at, len)) = body {
            taken &= batch.push(memory.send_run(at, len).map_err(outside)?);
        }
        if !taken {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.0.write_at(offset, &mut batch)
    }

    fn read(&self, offset: u64, head: &mut [u8], body: Option<Range<'_>>) -> io::Result<usize> {
        let mut buffer = RunBuffer::new(2);
        let mut batch = buffer.begin_recv();
        let mut taken = batch.push(RecvRun::from(head));
        if let Some((memory, at, len)) = body {
            taken &= batch.push(memory.recv_run(at, len).map_err(outside)?);
        }
        if !taken {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.0.read_at(offset, &mut batch)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
}
