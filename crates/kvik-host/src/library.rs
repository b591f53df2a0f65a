//! Libraries of the host, loaded when they are first asked for.
//!
//! kvik bundles no network library: a host's own fits its driver, and a second copy in one process leaves one of the
//! two without its device. So a copy that the process has already (NCCL's, say) is taken first, whatever it was loaded
//! under; then the one that an option names; then the vendor's; then the distribution's. What was taken is known by
//! its path, and nothing is ever unloaded: libraries of this kind leave threads and handlers behind.
//!
//! A plug-in is nobody's but kvik's, and is looked for nowhere: [`Library::open_file`] takes the one file.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};

/// A library, and where to look for it.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// The name that its users are linked against, such as `libfabric.so.1`.
    pub soname: &'static str,
    /// Folders of vendors, which come before the distribution's.
    pub folders: &'static [&'static str],
    /// The option that names a file, for the errors.
    pub option: &'static str,
    /// Packages that have it, for the errors.
    pub packages: &'static str,
    /// What a container needs from its host besides the library, for the errors.
    pub container: &'static str,
}

pub use crate::error::LibraryError;

/// A loaded library. It stays loaded.
#[derive(Clone)]
pub struct Library {
    handle: NonNull<c_void>,
    path: PathBuf,
    wanted: Wanted,
}

// SAFETY: a handle of the dynamic linker is valid in every thread, and its functions lock what they share.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Library({})", self.path.display())
    }
}

impl Library {
    /// Loads it, or takes the copy that the process has.
    ///
    /// `file` is what the user asked for; where the process has another copy already, that one is taken, since two
    /// cannot live together: [`Library::path`] tells.
    ///
    /// # Errors
    /// Each place that was looked at, with the dynamic linker's own words, and what to install.
    pub fn open(wanted: Wanted, file: Option<&Path>) -> Result<Library, LibraryError> {
        if let Some(there) = loaded(wanted.soname) {
            return Library::load(wanted, there.as_os_str(), libc::RTLD_NOLOAD).map_err(|why| {
                LibraryError(format!(
                    "this process has {} but it cannot be used: {why}; kvik loads no second copy beside it",
                    there.display()
                ))
            });
        }
        let mut tried = Vec::new();
        for place in wanted.places(file) {
            match Library::load(wanted, &place, 0) {
                Ok(library) => return Ok(library),
                Err(why) => tried.push(why),
            }
        }
        Err(LibraryError(format!(
            "{} cannot be loaded: {}. Install it ({}), or name its file with {}; in a container: {}",
            wanted.soname,
            tried.join("; "),
            wanted.packages,
            wanted.option,
            wanted.container
        )))
    }

    /// Loads this file, which is looked for nowhere else.
    ///
    /// # Errors
    /// It is not there, or no library for this machine: in the kernel's and the dynamic linker's own words.
    pub fn open_file(wanted: Wanted, file: &Path) -> Result<Library, LibraryError> {
        let refused = |why: String| {
            let (file, what) = (file.display(), wanted.soname);
            LibraryError(format!(
                "{file} cannot be loaded as {what}: {why}; name its file with {}",
                wanted.option
            ))
        };
        // A whole path: the dynamic linker would search for a bare name.
        let whole = file.canonicalize().map_err(|why| refused(why.to_string()))?;
        Library::load(wanted, whole.as_os_str(), 0).map_err(refused)
    }

    /// The file that it came from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn load(wanted: Wanted, place: &OsStr, flags: c_int) -> Result<Library, String> {
        let name = CString::new(place.as_bytes()).map_err(|_| "a file name with a zero byte".to_string())?;
        let flags = flags | libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: a C string that lives. Loading runs the library's constructors: it is the file that the user or
        // the host names for this purpose.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        let Some(handle) = NonNull::new(handle) else { return Err(last_error()) };
        let path = path_of(handle).unwrap_or_else(|| PathBuf::from(place));
        Ok(Library { handle, path, wanted })
    }

    /// A function of the library, at the version that the caller's declarations were made for; libraries without
    /// versions have only one.
    ///
    /// # Errors
    /// The library has none of this name and version: it is older than what kvik was made for.
    ///
    /// # Safety
    /// `F` is the type of a function, and the one that the library's header gives for this version.
    pub(crate) unsafe fn function<F: Copy>(&self, name: &CStr, version: &CStr) -> Result<F, LibraryError> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) }
        // SAFETY: a handle of `dlopen`, which is never closed, and two C strings that live.
        let symbol = unsafe { libc::dlvsym(self.handle.as_ptr(), name.as_ptr(), version.as_ptr()) };
        if symbol.is_null() {
            return Err(LibraryError(format!(
                "{} has no {} of version {}: it is too old; install a newer one ({}), or name its file with {}",
                self.path.display(),
                name.to_string_lossy(),
                version.to_string_lossy(),
                self.wanted.packages,
                self.wanted.option
            )));
        }
        // SAFETY: of the same size, and by the caller's promise a function of this type, which stays loaded.
        Ok(unsafe { std::mem::transmute_copy(&symbol) })
    }
}

impl Library {
    /// A function of a library without versions of symbols; None where there is none of this name.
    ///
    /// # Safety
    /// `F` is the type of a function, and the one of whatever has this name.
    pub(crate) unsafe fn plain_function<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) }
        // SAFETY: a handle of `dlopen`, which is never closed, and a C string that lives.
        let symbol = unsafe { libc::dlsym(self.handle.as_ptr(), name.as_ptr()) };
        // SAFETY: of the same size, and by the caller's promise a function of this type, which stays loaded.
        (!symbol.is_null()).then(|| unsafe { std::mem::transmute_copy(&symbol) })
    }
}

impl Wanted {
    /// Where to look, in this order: all of it is in vain where a copy is loaded already.
    fn places(&self, file: Option<&Path>) -> Vec<std::ffi::OsString> {
        // Who names a file means that file.
        if let Some(file) = file {
            return vec![file.into()];
        }
        let vendors = self.folders.iter().map(|folder| Path::new(folder).join(self.soname).into());
        vendors.chain([self.soname.into()]).collect()
    }
}

/// A text of a library's; empty for none.
///
/// # Safety
/// Null, or a C string that lives.
pub(crate) unsafe fn text(at: *const c_char) -> String {
    match at.is_null() {
        true => String::new(),
        // SAFETY: the caller's promise.
        false => unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned(),
    }
}

/// The dynamic linker's words for what failed last in this thread.
fn last_error() -> String {
    // SAFETY: the text, if there is one, is valid until the next call of this thread.
    match unsafe { text(libc::dlerror()) } {
        words if words.is_empty() => "the dynamic linker gives no reason".into(),
        words => words,
    }
}

/// The head of the dynamic linker's own record of a library (`struct link_map` of `link.h`).
#[repr(C)]
struct LinkMap {
    addr: usize,
    name: *const c_char,
}

/// The file of a library.
fn path_of(handle: NonNull<c_void>) -> Option<PathBuf> {
    let mut map: *const LinkMap = ptr::null();
    // SAFETY: a handle of `dlopen`; with this request a pointer is written.
    let failed = unsafe { libc::dlinfo(handle.as_ptr(), libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) };
    if failed != 0 || map.is_null() {
        return None;
    }
    // SAFETY: the record lives as long as the library, which is never unloaded.
    let name = unsafe { (*map).name };
    // SAFETY: a C string of that record.
    let name = (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) })?;
    (!name.is_empty()).then(|| PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Whether the process has a copy of a library.
pub(crate) fn has(soname: &str) -> bool {
    loaded(soname).is_some()
}

/// The file of a copy that the process has, also under the name that a wheel's bundler gave it
/// (`libfabric-1a2b3c4d.so.1` for `libfabric.so.1`).
fn loaded(soname: &str) -> Option<PathBuf> {
    struct Search<'a> {
        stem: &'a str,
        found: Option<PathBuf>,
    }

    unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
        // SAFETY: the linker gives a record that is valid during the call, and `data` as it was passed.
        let (info, search) = unsafe { (&*info, &mut *data.cast::<Search<'_>>()) };
        if info.dlpi_name.is_null() {
            return 0;
        }
        // SAFETY: a C string of that record.
        let name = unsafe { CStr::from_ptr(info.dlpi_name) };
        let path = Path::new(OsStr::from_bytes(name.to_bytes()));
        if path.file_name().is_some_and(|file| is_copy(file.as_bytes(), search.stem)) {
            search.found = Some(path.to_path_buf());
            return 1;
        }
        0
    }

    let mut search = Search { stem: soname.split(".so").next().unwrap_or(soname), found: None };
    // SAFETY: the callback is given a pointer to `search`, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

/// Whether a file's name is `STEM.so...` or `STEM-HASH.so...`.
fn is_copy(file: &[u8], stem: &str) -> bool {
    let Some(rest) = file.strip_prefix(stem.as_bytes()) else { return false };
    let rest = match rest.strip_prefix(b"-") {
        Some(hash) => &hash[hash.iter().position(|byte| !byte.is_ascii_hexdigit()).unwrap_or(hash.len())..],
        None => rest,
    };
    rest.starts_with(b".so")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIBC: Wanted =
        Wanted { soname: "libc.so.6", folders: &[], option: "--library", packages: "", container: "" };

    #[test]
    fn symbols_come_at_the_version_that_was_asked_for() {
        let library = Library::open(LIBC, None).unwrap();
        // SAFETY: `pid_t getpid(void)`.
        let getpid: extern "C" fn() -> c_int =
            unsafe { library.function(c"getpid", c"GLIBC_2.2.5") }.unwrap();
        assert_eq!(getpid() as u32, std::process::id());
        // SAFETY: as above; it is not called.
        let error = unsafe { library.function::<extern "C" fn() -> c_int>(c"getpid", c"GLIBC_9.99") };
        let error = error.unwrap_err().0;
        assert!(
            error.contains("getpid") && error.contains("GLIBC_9.99") && error.contains("--library"),
            "{error}"
        );
    }

    #[test]
    fn copies_are_known_under_the_names_that_bundlers_give() {
        for (file, same) in [
            ("libfabric.so.1", true),
            ("libfabric.so", true),
            ("libfabric.so.1.20.0", true),
            ("libfabric-1a2b3c4d.so.1", true),
            ("libfabric-extras.so.1", false),
            ("libfabricated.so.1", false),
            ("fabric.so", false),
        ] {
            assert_eq!(is_copy(file.as_bytes(), "libfabric"), same, "{file}");
        }
    }
}
