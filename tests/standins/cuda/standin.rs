//! The stand-in for CUDA's driver, as tests use it: built once, and in a process of its own for each test, which
//! finds it as it would find the real one.
//!
//! [`alone`] is the way in. README.md beside this file has the environment and the commands.

use crate::make;
pub use crate::make::text;
use std::ffi::{CStr, CString, OsString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::Output;

/// Set in the processes that have the stand-in.
pub const ALONE: &str = "KVIK_STANDIN_CUDA_ALONE";

/// The folder with the library.
pub fn folder() -> PathBuf {
    make::build("cuda")
}

/// The library's file.
pub fn library() -> PathBuf {
    folder().join("libcuda.so.1")
}

/// The variable by which a process finds the stand-in as it would find the real library, with its value.
pub fn path() -> (&'static str, OsString) {
    let name = "LD_LIBRARY_PATH";
    let mut value = OsString::from(folder());
    if let Some(before) = std::env::var_os(name) {
        value.push(":");
        value.push(before);
    }
    (name, value)
}

/// Runs `body` in a process of its own, over devices with these settings (of the environment). `test` is the whole
/// name of the test that calls.
pub fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce(Control)) {
    if std::env::var_os(ALONE).is_some() {
        return body(Control);
    }
    let output = again(test, settings);
    assert!(output.status.success(), "{test} in a process of its own: {}", text(&output));
    println!("{}", text(&output));
}

/// Runs a test of this program again, in a process that finds the stand-in.
pub fn again(test: &str, settings: &[(&str, &str)]) -> Output {
    let mut variables = vec![(ALONE, OsString::from("1")), path()];
    variables.extend(settings.iter().map(|(name, value)| (*name, OsString::from(value))));
    make::again(test, &variables)
}

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// A function of the library in this process, which is loaded if nobody has.
///
/// # Safety
/// `F` is the type of the function of this name.
pub unsafe fn function<F: Copy>(name: &CStr) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) }
    let file = CString::new(library().as_os_str().as_bytes()).unwrap();
    let now = 2;
    // SAFETY: two C strings that live; the library is the one that was just built, and stays.
    let symbol = unsafe { dlsym(dlopen(file.as_ptr(), now), name.as_ptr()) };
    assert!(!symbol.is_null(), "the stand-in has no {}", name.to_string_lossy());
    // SAFETY: of the same size, and by the caller's promise of this type.
    unsafe { std::mem::transmute_copy(&symbol) }
}

/// What a test says to the devices of its own process, and does to them from outside.
#[derive(Clone, Copy)]
pub struct Control;

impl Control {
    /// Gives a command, which must be one.
    pub fn say(&self, command: &str) {
        let text = CString::new(command).unwrap();
        // SAFETY: the function's type; a C string that lives.
        let answer = unsafe {
            function::<unsafe extern "C" fn(*const c_char) -> c_int>(c"standin_control")(text.as_ptr())
        };
        assert_eq!(answer, 0, "{command:?} is no command");
    }

    /// How many objects there are, or how often a function was called.
    pub fn count(&self, what: &str) -> i64 {
        let text = CString::new(what).unwrap();
        // SAFETY: as above.
        let count = unsafe {
            function::<unsafe extern "C" fn(*const c_char) -> i64>(c"standin_count")(text.as_ptr())
        };
        assert!(count >= 0, "nothing is counted as {what:?}");
        count
    }

    /// A device's bytes as they are at this moment, in no order with anything.
    pub fn peek(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0u8; len];
        // SAFETY: the function's type, and room for the bytes.
        let code = unsafe {
            let peek = function::<unsafe extern "C" fn(u64, *mut u8, usize) -> c_int>(c"standin_peek");
            peek(at as u64, bytes.as_mut_ptr(), len)
        };
        assert_eq!(code, 0, "{len} bytes at {at:#x} are no memory of a device");
        bytes
    }

    /// Sets a device's bytes at this moment.
    pub fn poke(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the function's type, and bytes that live.
        let code = unsafe {
            let poke = function::<unsafe extern "C" fn(u64, *const u8, usize) -> c_int>(c"standin_poke");
            poke(at as u64, bytes.as_ptr(), bytes.len())
        };
        assert_eq!(code, 0, "{} bytes at {at:#x} are no memory of a device", bytes.len());
    }
}

/// An application of CUDA's in this process, as PyTorch would be: it has the primary context of a device.
pub struct App {
    pub device: i32,
    context: usize,
}

impl App {
    /// Initialises CUDA, and takes the context.
    pub fn on(device: i32) -> App {
        let mut context = 0;
        // SAFETY: the functions' types, and room for a handle.
        unsafe {
            assert_eq!(function::<unsafe extern "C" fn(c_uint) -> c_int>(c"cuInit")(0), 0);
            let retain =
                function::<unsafe extern "C" fn(*mut usize, c_int) -> c_int>(c"cuDevicePrimaryCtxRetain");
            assert_eq!(retain(&mut context, device), 0);
        }
        App { device, context }
    }

    /// The context that is current to this thread, 0 for none.
    pub fn current() -> usize {
        let mut context = 0;
        // SAFETY: the function's type, and room for a handle.
        let code = unsafe {
            function::<unsafe extern "C" fn(*mut usize) -> c_int>(c"cuCtxGetCurrent")(&mut context)
        };
        assert_eq!(code, 0);
        context
    }

    /// Calls a function of the driver's in the context, and gives what it returns.
    pub fn within(&self, call: impl FnOnce() -> c_int) -> c_int {
        let mut was = 0;
        // SAFETY: the functions' types, and a context that is retained.
        unsafe {
            let push = function::<unsafe extern "C" fn(usize) -> c_int>(c"cuCtxPushCurrent_v2");
            let pop = function::<unsafe extern "C" fn(*mut usize) -> c_int>(c"cuCtxPopCurrent_v2");
            assert_eq!(push(self.context), 0);
            let code = call();
            assert_eq!(pop(&mut was), 0);
            code
        }
    }

    fn make(&self, call: impl FnOnce(*mut u64) -> c_int) -> usize {
        let mut at = 0;
        assert_eq!(self.within(|| call(&mut at)), 0);
        at as usize
    }

    /// Allocates memory.
    pub fn alloc(&self, len: usize) -> usize {
        // SAFETY: the function's type, and room for an address.
        self.make(|at| unsafe {
            function::<unsafe extern "C" fn(*mut u64, usize) -> c_int>(c"cuMemAlloc_v2")(at, len)
        })
    }

    /// Allocates managed memory.
    pub fn managed(&self, len: usize) -> usize {
        // SAFETY: as above.
        self.make(|at| unsafe {
            let alloc =
                function::<unsafe extern "C" fn(*mut u64, usize, c_uint) -> c_int>(c"cuMemAllocManaged");
            alloc(at, len, 1)
        })
    }

    /// Maps memory side by side, as one range.
    pub fn map(&self, each: usize, count: i32) -> usize {
        // SAFETY: as above.
        self.make(|at| unsafe {
            function::<unsafe extern "C" fn(*mut u64, usize, c_int) -> c_int>(c"standin_map")(at, each, count)
        })
    }

    /// Frees what was allocated.
    pub fn free(&self, at: usize) -> c_int {
        // SAFETY: the function's type; it checks the address.
        self.within(|| unsafe { function::<unsafe extern "C" fn(u64) -> c_int>(c"cuMemFree_v2")(at as u64) })
    }

    /// Destroys the context, whoever has it.
    pub fn reset(&self) {
        // SAFETY: the function's type.
        let code = unsafe {
            function::<unsafe extern "C" fn(c_int) -> c_int>(c"cuDevicePrimaryCtxReset_v2")(self.device)
        };
        assert_eq!(code, 0);
    }

    /// A stream, which the default one waits for if it `blocks`.
    pub fn stream(&self, blocks: bool) -> usize {
        // SAFETY: the function's type, and room for a handle.
        self.make(|at| unsafe {
            function::<unsafe extern "C" fn(*mut u64, c_uint) -> c_int>(c"cuStreamCreate")(
                at,
                u32::from(!blocks),
            )
        })
    }

    /// Launches a kernel that fills memory with a value after so many microseconds; stream 0 is the default one.
    pub fn fill(&self, stream: usize, at: usize, len: usize, value: u8, micros: u32) {
        // SAFETY: the function's type; it checks what it is given.
        let code = self.within(|| unsafe {
            let fill =
                function::<unsafe extern "C" fn(usize, u64, usize, c_int, c_uint) -> c_int>(c"standin_fill");
            fill(stream, at as u64, len, value.into(), micros)
        });
        assert_eq!(code, 0);
    }
}

impl Drop for App {
    fn drop(&mut self) {
        // SAFETY: the function's type; retained once.
        unsafe {
            function::<unsafe extern "C" fn(c_int) -> c_int>(c"cuDevicePrimaryCtxRelease_v2")(self.device)
        };
    }
}
