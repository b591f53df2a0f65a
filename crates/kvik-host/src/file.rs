//! Files in a directory, read and written between registered memory and the disk.
//!
//! A [`Folder`] is a directory that is open: every name is looked up in it and never along a path, so nobody can put
//! another directory in its place while it is used. Files are its owner's alone (0600, directories 0700), symbolic
//! links are not followed, and [`Folder::lock`] keeps other processes out.
//!
//! A [`DataFile`] moves runs of memory in place, as a socket does. Where offset, addresses and lengths allow it the page
//! cache is left out (`O_DIRECT`): what is kept in memory needs no second copy there, and filling the cache costs more
//! than the disk on many machines. Both kinds of access may be mixed as long as no page of the file is written in both
//! ways; the callers see to that.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use crate::fork::ForkGuard;
use crate::runs::{Queue, RecvBatch, SendBatch};

/// Offsets and lengths of a file that are multiples of this can go past the page cache.
pub const DIRECT_ALIGN: u64 = 4096;
/// Addresses that are multiples of this can: the sector of a disk, which is as much as its DMA asks for.
const MEMORY_ALIGN: usize = 512;

const FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// An open directory.
#[derive(Debug)]
pub struct Folder {
    fd: OwnedFd,
    path: PathBuf,
}

/// What keeps other processes out of a directory, until it is dropped or this process ends. Where the process ends
/// without dropping it, a forked child that lives on holds it too.
#[derive(Debug)]
pub struct FolderLock {
    fd: OwnedFd,
    fork: ForkGuard,
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // Closing would leave it to children that are between their fork and their own program. A child must not.
        if !self.fork.is_child() {
            let _ = rustix::fs::flock(&self.fd, FlockOperation::Unlock);
        }
    }
}

/// How an attempt to lock a directory ended.
#[derive(Debug)]
pub enum Locked {
    /// It is this process's.
    Yes(FolderLock),
    /// Another process has it: what that one wrote into the lock file, at most 32 bytes.
    Other(String),
}

impl Folder {
    /// Opens a directory. With `create` it is made where it is not there yet, and its parent is synced then, so that it
    /// stays there.
    ///
    /// # Errors
    /// What the kernel says; a parent is not made.
    pub fn open(path: &Path, create: bool) -> io::Result<Folder> {
        if create {
            match rustix::fs::mkdir(path, Mode::RWXU) {
                Ok(()) => sync_parent(path)?,
                Err(Errno::EXIST) => {}
                // Where the directory is there but its parent may only be read, opening it tells.
                Err(Errno::ROFS | Errno::ACCESS) if path.is_dir() => {}
                Err(error) => return Err(error.into()),
            }
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Folder { fd: retry_on_intr(|| rustix::fs::open(path, flags, Mode::empty()))?, path: path.into() })
    }

    /// Where it was when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether this process may make files in it.
    pub fn writable(&self) -> bool {
        let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
        rustix::fs::accessat(&self.fd, ".", access, AtFlags::EACCESS).is_ok()
    }

    /// Takes the lock of a directory, which is a lock on the file of this name, and writes this process's id into it.
    /// Without `write` the file must be there, and others may read at the same time.
    ///
    /// # Errors
    /// What the kernel says of the file, or of the lock where a filesystem has none.
    pub fn lock(&self, name: &str, write: bool) -> io::Result<Locked> {
        let flags = OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let (flags, how) = match write {
            true => (flags | OFlags::RDWR | OFlags::CREATE, FlockOperation::NonBlockingLockExclusive),
            false => (flags | OFlags::RDONLY, FlockOperation::NonBlockingLockShared),
        };
        let fd = retry_on_intr(|| rustix::fs::openat(&self.fd, name, flags, FILE_MODE))?;
        match retry_on_intr(|| rustix::fs::flock(&fd, how)) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut text = [0; 32];
                let read = retry_on_intr(|| rustix::io::pread(&fd, &mut text, 0)).unwrap_or(0);
                return Ok(Locked::Other(String::from_utf8_lossy(&text[..read]).trim().into()));
            }
            Err(error) => return Err(error.into()),
        }
        if write {
            rustix::fs::ftruncate(&fd, 0)?;
            let text = format!("{}\n", std::process::id());
            retry_on_intr(|| rustix::io::pwrite(&fd, text.as_bytes(), 0))?;
        }
        Ok(Locked::Yes(FolderLock { fd, fork: ForkGuard::new().map_err(io::Error::other)? }))
    }

    /// The names of its files that `wanted` takes, with their bytes. Directories and the like are no files.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn files(&self, wanted: impl Fn(&str) -> bool) -> io::Result<Vec<(String, u64)>> {
        let mut files = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if wanted(name) {
                let stat = rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
                if rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() {
                    files.push((name.to_owned(), u64::try_from(stat.st_size).unwrap_or(0)));
                }
            }
        }
        Ok(files)
    }

    /// Makes a file that is not there yet, to read and write.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn create(&self, name: &str) -> io::Result<DataFile> {
        self.data_file(name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)
    }

    /// Opens a file, to read and with `write` to write.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn open_file(&self, name: &str, write: bool) -> io::Result<DataFile> {
        self.data_file(name, if write { OFlags::RDWR } else { OFlags::RDONLY })
    }

    fn data_file(&self, name: &str, flags: OFlags) -> io::Result<DataFile> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = retry_on_intr(|| rustix::fs::openat(&self.fd, name, flags, FILE_MODE))?;
        let again = flags.difference(OFlags::CREATE | OFlags::EXCL) | OFlags::DIRECT;
        // Some filesystems have no such access; theirs is through the page cache then.
        let direct = retry_on_intr(|| rustix::fs::openat(&self.fd, name, again, Mode::empty())).ok();
        Ok(DataFile { fd, direct })
    }

    /// Removes a file.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.fd, name, AtFlags::empty())?)
    }

    /// Makes durable which files are there.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn sync(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| rustix::fs::fsync(&self.fd))?)
    }
}

fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    Folder::open(parent, false)?.sync()
}

/// A file that is open.
#[derive(Debug)]
pub struct DataFile {
    fd: OwnedFd,
    /// The same past the page cache, where the filesystem has that.
    direct: Option<OwnedFd>,
}

impl DataFile {
    /// Bytes.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn size(&self) -> io::Result<u64> {
        Ok(u64::try_from(rustix::fs::fstat(&self.fd)?.st_size).unwrap_or(0))
    }

    /// Makes it so long, and takes the room on the disk where the filesystem can do that ahead.
    ///
    /// # Errors
    /// What the kernel says: `ENOSPC` where there is no room.
    pub fn allocate(&self, size: u64) -> io::Result<()> {
        match retry_on_intr(|| rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), 0, size)) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.resize(size),
            other => Ok(other?),
        }
    }

    /// Cuts it off, or lengthens it with zeros.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn resize(&self, size: u64) -> io::Result<()> {
        Ok(retry_on_intr(|| rustix::fs::ftruncate(&self.fd, size))?)
    }

    /// Makes durable what was written before, with as much of the file's length as it takes to read it.
    ///
    /// # Errors
    /// What the kernel says; it says so once, and nothing that was written since the last sync counts as durable then.
    pub fn sync(&self) -> io::Result<()> {
        Ok(retry_on_intr(|| rustix::fs::fdatasync(&self.fd))?)
    }

    /// Writes all of a batch from `offset` on.
    ///
    /// # Errors
    /// What the kernel says; some of it may have been written.
    pub fn write_at(&self, mut offset: u64, batch: &mut SendBatch<'_, '_>) -> io::Result<()> {
        while !batch.is_empty() {
            let moved = self.transfer(offset, &batch.queue, libc::pwritev)?;
            if moved == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            batch.queue.advance(moved);
            offset += moved as u64;
        }
        Ok(())
    }

    /// Reads a batch from `offset` on, and says how many bytes there were: less than the batch takes where the file ends.
    ///
    /// # Errors
    /// What the kernel says; some of it may have been read.
    pub fn read_at(&self, offset: u64, batch: &mut RecvBatch<'_, '_>) -> io::Result<usize> {
        let mut done = 0;
        while !batch.is_empty() {
            let moved = self.transfer(offset + done as u64, &batch.queue, libc::preadv)?;
            if moved == 0 {
                break;
            }
            batch.queue.advance(moved);
            done += moved;
        }
        Ok(done)
    }

    /// One call over the pending runs, past the page cache where that can be.
    fn transfer(
        &self,
        offset: u64,
        queue: &Queue<'_>,
        call: unsafe extern "C" fn(i32, *const libc::iovec, i32, libc::off_t) -> isize,
    ) -> io::Result<usize> {
        let at = libc::off_t::try_from(offset).map_err(|_| Errno::OVERFLOW)?;
        let runs = queue.pending();
        let once = |fd: &OwnedFd| {
            retry_on_intr(|| {
                // SAFETY: the runs' memory is borrowed by the batch for longer than the call, for reading or for
                // writing as the type of the batch says, and there are at most MAX_RUNS of them.
                let moved = unsafe { call(fd.as_fd().as_raw_fd(), runs.as_ptr(), runs.len() as i32, at) };
                usize::try_from(moved)
                    .map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
            })
        };
        if let Some(direct) = self.direct.as_ref().filter(|_| aligned(offset, runs)) {
            match once(direct) {
                // Of memory that the disk's DMA cannot reach, or of a filesystem that asks for more.
                Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::FAULT) => {}
                other => return Ok(other?),
            }
        }
        Ok(once(&self.fd)?)
    }
}

fn aligned(offset: u64, runs: &[libc::iovec]) -> bool {
    offset.is_multiple_of(DIRECT_ALIGN)
        && runs.iter().all(|run| {
            (run.iov_base as usize).is_multiple_of(MEMORY_ALIGN)
                && (run.iov_len as u64).is_multiple_of(DIRECT_ALIGN)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HugePages, Memory, RecvRun, RunBuffer, SendRun};
    use std::os::unix::fs::PermissionsExt;

    fn folder(name: &str) -> (Folder, PathBuf) {
        let path = std::env::temp_dir().join(format!("kvik-file-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        (Folder::open(&path, true).unwrap(), path)
    }

    #[test]
    fn memory_goes_to_a_file_and_comes_back_aligned_or_not() {
        let (folder, path) = folder("move");
        let file = folder.create("data").unwrap();
        file.allocate(1 << 20).unwrap();
        assert_eq!(file.size().unwrap(), 1 << 20);
        let memory = Memory::shared(1 << 18, HugePages::Never).unwrap();
        let bytes: Vec<u8> = (0..1u32 << 16).map(|i| (i * 7 + i / 251) as u8).collect();
        memory.copy_in(4096, &bytes).unwrap();
        let mut buffer = RunBuffer::new(2);
        // Whole pages, odd offsets in the file and in memory, and a length that is no multiple of anything.
        for (at, from, len) in
            [(4096u64, 4096usize, 65536usize), (200_001, 4097, 60_000), (300_032, 8192, 4096)]
        {
            let mut batch = buffer.begin_send();
            assert!(
                batch.push(SendRun::from(&b"head"[..])) && batch.push(memory.send_run(from, len).unwrap())
            );
            file.write_at(at - 4, &mut batch).unwrap();
            let (mut head, back) = ([0; 4], 1 << 17);
            let mut batch = buffer.begin_recv();
            assert!(
                batch.push(RecvRun::from(&mut head[..])) && batch.push(memory.recv_run(back, len).unwrap())
            );
            assert_eq!(file.read_at(at - 4, &mut batch).unwrap(), len + 4);
            let mut there = vec![0; len];
            memory.copy_out(back, &mut there).unwrap();
            assert!(head == *b"head" && there == bytes[from - 4096..from - 4096 + len]);
            // The same bytes, past the page cache where that can be.
            let mut batch = buffer.begin_send();
            assert!(batch.push(memory.send_run(from, len).unwrap()));
            file.write_at(at, &mut batch).unwrap();
            let mut batch = buffer.begin_recv();
            assert!(batch.push(memory.recv_run(back, len).unwrap()));
            assert_eq!(file.read_at(at, &mut batch).unwrap(), len);
            memory.copy_out(back, &mut there).unwrap();
            assert!(there == bytes[from - 4096..from - 4096 + len]);
        }
        file.sync().unwrap();
        let mut batch = buffer.begin_recv();
        assert!(batch.push(memory.recv_run(0, 8192).unwrap()));
        assert_eq!(file.read_at((1 << 20) - 4096, &mut batch).unwrap(), 4096, "the end of the file");
        std::fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn files_are_their_owners_alone_and_one_process_has_the_lock() {
        let (folder, path) = folder("lock");
        assert!(folder.writable());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        drop(folder.create("a").unwrap());
        assert_eq!((mode(&path), mode(&path.join("a"))), (0o700, 0o600));
        assert_eq!(folder.create("a").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        std::os::unix::fs::symlink("a", path.join("link")).unwrap();
        assert!(folder.open_file("link", false).is_err(), "a symbolic link is not followed");
        assert_eq!(folder.files(|_| true).unwrap(), [("a".to_owned(), 0)]);

        let Locked::Yes(lock) = folder.lock("LOCK", true).unwrap() else { panic!("nobody has it") };
        let other = Folder::open(&path, false).unwrap();
        let own = std::process::id().to_string();
        for write in [true, false] {
            assert!(matches!(other.lock("LOCK", write).unwrap(), Locked::Other(pid) if pid == own));
        }
        drop(lock);
        let Locked::Yes(_reads) = other.lock("LOCK", false).unwrap() else { panic!("nobody has it") };
        assert!(matches!(folder.lock("LOCK", false).unwrap(), Locked::Yes(_)), "two may read");
        assert!(matches!(folder.lock("LOCK", true).unwrap(), Locked::Other(_)));
        folder.remove("a").unwrap();
        folder.sync().unwrap();
        std::fs::remove_dir_all(path).unwrap();
    }
}
