//! NICs that a plug-in brings: a library that speaks the C interface of `include/kvik/nic.h`.
//!
//! * [`Plugin`]: the library, loaded from the file that is named and from no other, and the devices it
//!   offers;
//! * [`PluginDevice`]: one that is open: knows memory ([`Region`]) and connections to peers, posts reads and writes
//!   ([`Rma`]), tells which have ended, and cuts.
//!
//! A device and all that comes of it are one thread's: the types are neither `Send` nor `Sync`.
//!
//! A plug-in is code of this process, and could do anything. What it *says* is checked: names, lengths,
//! counts, which operations have ended. What it says wrong is an error that names it.

mod abi;
mod device;
mod region;

pub use crate::error::PluginError;
pub use crate::rma::{Posted, RmaOp};
pub use device::{CancelScope, Conn, PluginDevice, Rma};
pub use region::Region;

use crate::library::{Library, LibraryError, Wanted};
use std::collections::HashSet;
use std::ffi::c_char;
use std::fmt;
use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr;
use std::sync::Arc;

/// How a plug-in is named.
const WANTED: Wanted = Wanted {
    soname: "a plug-in for NICs",
    folders: &[],
    option: "`nic_library` (KVIK_NIC_LIBRARY)",
    packages: "from the NIC's vendor",
    container: "mount its file",
};

/// The versions of the interface that kvik knows.
const OLDEST: u32 = 1;
const NEWEST: u32 = abi::KVIK_NIC_VERSION;

/// The head of `struct kvik_nic_plugin`, the same in all versions.
#[repr(C)]
#[derive(Clone, Copy)]
struct Head {
    size: u32,
    version: u32,
    oldest: u32,
    newest: u32,
    name: [u8; abi::KVIK_NIC_NAME],
}

/// Bytes of the shortest table of version 1: what was added to it since comes behind.
const FIRST: usize = std::mem::offset_of!(abi::kvik_nic_plugin, memories);

const _: () = assert!(size_of::<Head>() == std::mem::offset_of!(abi::kvik_nic_plugin, device_count));

/// `kvik_nic_plugin()`
type Entry = unsafe extern "C" fn(u32, u32) -> *const Head;

/// A loaded plug-in.
pub struct Plugin {
    library: Library,
    functions: abi::Functions,
    version: u32,
    name: String,
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Plugin({}, {})", self.name, self.library.path().display())
    }
}

impl Plugin {
    /// Loads the plug-in of this file.
    ///
    /// # Errors
    /// There is no such file, it is no plug-in, it knows no version that kvik knows, or its table is not
    /// whole.
    pub fn load(file: &Path) -> Result<Arc<Plugin>, LibraryError> {
        let library = Library::open_file(WANTED, file)?;
        let path = library.path().display();
        // SAFETY: the type is the one that the header gives for this name, which is the name of no other
        // function.
        let entry = unsafe { library.plain_function::<Entry>(c"kvik_nic_plugin") };
        let entry = entry.ok_or_else(|| {
            LibraryError(format!(
                "{path} is no plug-in for kvik: it has no function kvik_nic_plugin; \
                 name another file with {}",
                WANTED.option
            ))
        })?;
        // SAFETY: the header's function: for any range of versions it returns a table that is there for ever.
        let head = unsafe { entry(OLDEST, NEWEST) };
        let (version, functions, name) =
            read(head).map_err(|why| LibraryError(format!("{path} cannot be used as a plug-in: {why}")))?;
        Ok(Arc::new(Plugin { functions, version, name, library }))
    }

    /// The file that it came from.
    pub fn path(&self) -> &Path {
        self.library.path()
    }

    /// What it is called; plug-ins of one name reach each other.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The version of the interface that it is used by.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The names of its devices, by their numbers.
    ///
    /// # Errors
    /// It cannot list them, or its list makes no sense.
    pub fn devices(&self) -> Result<Vec<String>, PluginError> {
        let what = "listing its devices";
        // SAFETY: of the table, by the header's rules: any thread may call it.
        let count = unsafe { (self.functions.device_count)() };
        self.check(what, ptr::null_mut(), count)?;
        let count = count as usize;
        if count > abi::KVIK_NIC_DEVICES {
            return Err(
                self.wrong(what, format!("it says {count}, and may have at most {}", abi::KVIK_NIC_DEVICES))
            );
        }
        let mut names = Vec::with_capacity(count);
        let mut seen = HashSet::new();
        for number in 0..count {
            let name = self.device_name(number as u32)?;
            if !seen.insert(name.clone()) {
                return Err(self.wrong(what, format!("two have the name {name:?}")));
            }
            names.push(name);
        }
        Ok(names)
    }

    fn device_name(&self, number: u32) -> Result<String, PluginError> {
        let what = "asking for a device's name";
        let mut room = [0u8; abi::KVIK_NIC_DEVICE_NAME];
        let (at, len) = (room.as_mut_ptr().cast::<c_char>(), room.len() as u32);
        // SAFETY: as above, with room for `len` bytes.
        let code = unsafe { (self.functions.device_name)(number, at, len) };
        self.check(what, ptr::null_mut(), code)?;
        text(&room, ',').map_err(|why| self.wrong(what, format!("the name of device {number} {why}")))
    }

    /// Takes a negative number for an error, and asks what it means.
    fn check(
        &self,
        what: &'static str,
        device: *mut abi::kvik_nic_device,
        code: i32,
    ) -> Result<(), PluginError> {
        if code >= 0 {
            return Ok(());
        }
        let mut room = [0u8; 256];
        let (at, len) = (room.as_mut_ptr().cast::<c_char>(), room.len() as u32);
        // SAFETY: by the header's rules; `device` is null or open, and there is room for `len` bytes.
        unsafe { (self.functions.error_text)(device, code, at, len) };
        let end = room.iter().position(|byte| *byte == 0).unwrap_or(room.len());
        let words = String::from_utf8_lossy(&room[..end]);
        let words: String = words.chars().filter(|letter| !letter.is_control()).collect();
        Err(self.wrong(what, if words.is_empty() { format!("error {code}") } else { words }))
    }

    fn wrong(&self, what: &'static str, text: impl Into<String>) -> PluginError {
        PluginError { plugin: self.name.clone(), what, text: text.into() }
    }
}

/// Reads the table that a plug-in gives: the version that is spoken, its functions, its name.
fn read(head: *const Head) -> Result<(u32, abi::Functions, String), String> {
    if head.is_null() || !head.is_aligned() {
        return Err("it gives no table".into());
    }
    // SAFETY: not null, and by the header's rules the head of a table that stays as it is.
    let known = unsafe { head.read() };
    let (oldest, newest) = (OLDEST, NEWEST);
    if !(oldest..=newest).contains(&known.version) {
        return Err(format!(
            "it knows versions {} to {} of the interface (and answers with {}), and kvik {oldest} to {newest}; \
             take a plug-in that was built for this kvik",
            known.oldest, known.newest, known.version
        ));
    }
    let (size, whole) = (known.size as usize, FIRST);
    if size < whole {
        let version = known.version;
        return Err(format!(
            "its table has {size} bytes, and one of version {version} has at least {whole}: \
             it was built with a broken header"
        ));
    }
    let name = text(&known.name, ':').map_err(|why| format!("its name {why}"))?;
    let mut table = MaybeUninit::<abi::kvik_nic_plugin>::zeroed();
    let there = size.min(size_of::<abi::kvik_nic_plugin>());
    // SAFETY: the table is as long as this, by its own word, which is all there is to know of it. What it has not is
    // zero: functions that are missing.
    let table = unsafe {
        ptr::copy_nonoverlapping(head.cast::<u8>(), table.as_mut_ptr().cast::<u8>(), there);
        table.assume_init()
    };
    let functions = table.functions().map_err(|missing| format!("its table has no function {missing}"))?;
    Ok((known.version, functions, name))
}

/// A name that ends with a zero, and can be shown to people.
fn text(bytes: &[u8], without: char) -> Result<String, &'static str> {
    let end = bytes.iter().position(|byte| *byte == 0).ok_or("has no zero at its end, or is too long")?;
    let name = std::str::from_utf8(&bytes[..end]).map_err(|_| "is no UTF-8")?;
    match name {
        "" => Err("is empty"),
        _ if name.contains(char::is_control) => Err("cannot be printed"),
        _ if name.contains(without) => Err("has a character that separates names"),
        _ => Ok(name.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_whole_or_not_at_all() {
        assert_eq!(text(b"npu0\0rest", ','), Ok("npu0".into()));
        for (bytes, why) in [
            (&b"npu0"[..], "no zero"),
            (b"\0", "empty"),
            (b"a\xFFb\0", "UTF-8"),
            (b"a\nb\0", "printed"),
            (b"a,b\0", "separates"),
        ] {
            let error = text(bytes, ',').unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_plug_in_that_gives_nothing_is_refused() {
        assert!(read(ptr::null()).map(|_| ()).unwrap_err().contains("no table"));
    }
}
