//! `include/kvik/nic.h` in Rust: the structures, and the table with every function that must be there.

use std::ffi::{c_char, c_void};

/// The versions that kvik knows.
pub const OLDEST: u32 = 1;
pub const NEWEST: u32 = 1;

pub const NAME: usize = 48;
pub const DEVICE_NAME: usize = 64;
pub const ADDRESS: usize = 512;
pub const DEVICES: usize = 1024;
pub const PIECES: usize = 8;

pub const OK: i32 = 0;
pub const FULL: i32 = 1;
pub const ALL: i32 = 1;

pub const READ: u32 = 1;
pub const WRITE: u32 = 2;

/// `struct kvik_nic_device`
pub enum Device {}
/// `struct kvik_nic_region`
pub enum Region {}
/// `struct kvik_nic_conn`
pub enum Conn {}

/// `struct kvik_nic_limits`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Limits {
    pub longest: u64,
    pub pieces: u32,
    pub depth: u32,
}

/// `struct kvik_nic_piece`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Piece {
    pub start: *mut c_void,
    pub length: u64,
}

/// `struct kvik_nic_post`
#[repr(C)]
pub struct Post {
    pub conn: *mut Conn,
    pub region: *mut Region,
    pub pieces: *const Piece,
    pub count: u32,
    pub op: u32,
    pub remote: u64,
    pub key: u64,
    pub token: u64,
}

/// `struct kvik_nic_completion`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Completion {
    pub token: u64,
    pub status: i32,
    pub zero: u32,
}

/// The head of `struct kvik_nic_plugin`, the same in all versions.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Head {
    pub size: u32,
    pub version: u32,
    pub oldest: u32,
    pub newest: u32,
    pub name: [u8; NAME],
}

/// `kvik_nic_plugin()`
pub type Entry = unsafe extern "C" fn(u32, u32) -> *const Head;

/// The functions of version 1, as the plug-in gives them and as they are called: in front those that must be
/// there.
macro_rules! functions {
    ($($name:ident: $kind:ty,)* ; $may:ident: $may_kind:ty; $last:ident: $last_kind:ty) => {
        /// `struct kvik_nic_plugin`
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub struct Table {
            pub head: Head,
            $(pub $name: Option<$kind>,)*
            pub $may: Option<$may_kind>,
            pub $last: Option<$last_kind>,
        }

        /// A table's functions; those without `Option` are all there.
        #[derive(Clone, Copy)]
        pub struct Functions {
            $(pub $name: $kind,)*
            pub $may: Option<$may_kind>,
            pub $last: $last_kind,
        }

        impl Table {
            /// # Errors
            /// The name of a function that is not there.
            pub fn functions(&self) -> Result<Functions, &'static str> {
                Ok(Functions {
                    $($name: self.$name.ok_or(stringify!($name))?,)*
                    $may: self.$may,
                    $last: self.$last.ok_or(stringify!($last))?,
                })
            }
        }
    };
}

functions! {
    device_count: unsafe extern "C" fn() -> i32,
    device_name: unsafe extern "C" fn(u32, *mut c_char, u32) -> i32,
    open: unsafe extern "C" fn(u32, *mut *mut Device) -> i32,
    close: unsafe extern "C" fn(*mut Device),
    limits: unsafe extern "C" fn(*mut Device, *mut Limits) -> i32,
    address: unsafe extern "C" fn(*mut Device, *mut u8, *mut u32) -> i32,
    region_add:
        unsafe extern "C" fn(*mut Device, *mut c_void, u64, *mut *mut Region, *mut u64, *mut u64) -> i32,
    region_remove: unsafe extern "C" fn(*mut Device, *mut Region) -> i32,
    conn_open: unsafe extern "C" fn(*mut Device, *const u8, u32, *mut *mut Conn) -> i32,
    conn_close: unsafe extern "C" fn(*mut Device, *mut Conn),
    post: unsafe extern "C" fn(*mut Device, *const Post) -> i32,
    poll: unsafe extern "C" fn(*mut Device, *mut Completion, u32) -> i32,
    descriptor: unsafe extern "C" fn(*mut Device) -> i32,
    may_sleep: unsafe extern "C" fn(*mut Device) -> i32,
    cancel: unsafe extern "C" fn(*mut Device, *mut Conn) -> i32,
    fence: unsafe extern "C" fn(*mut Device, *mut u8, *mut u32) -> i32,
    ;
    is_up: unsafe extern "C" fn(*mut Device) -> i32;
    error_text: unsafe extern "C" fn(*mut Device, i32, *mut c_char, u32)
}

// The test's C program (tests/plugin/broken.c) holds the header against the same numbers.
const _: () = {
    assert!(size_of::<Head>() == 64 && size_of::<Table>() == 208);
    assert!(size_of::<Limits>() == 16 && size_of::<Piece>() == 16);
    assert!(size_of::<Post>() == 56 && size_of::<Completion>() == 16);
};
