//! What is said to a plug-in that breaks a rule, and that nothing worse comes of it.

use crate::plugins::{broken, other};
use kvik_host::event::Epoll;
use kvik_host::plugin::{Plugin, PluginDevice, Rma, RmaOp};
use kvik_host::rma::Run;
use kvik_host::{HugePages, Memory};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn says<T>(result: Result<T, impl Display>, words: &[&str]) {
    let text = result.map(|_| ()).map_err(|error| error.to_string()).unwrap_err();
    words.iter().for_each(|word| assert!(text.contains(word), "{word:?} is not in: {text}"));
}

fn device(rule: &str) -> Result<PluginDevice, kvik_host::plugin::PluginError> {
    PluginDevice::open(&Plugin::load(&broken(rule)).unwrap(), 0, 16)
}

/// A device with one operation in flight, or what its post said.
fn busy(rule: &str) -> Result<(PluginDevice, kvik_host::plugin::Conn), kvik_host::HostError> {
    let mut device = device(rule)?;
    let conn = device.open_conn(b"somewhere")?;
    let memory = Arc::new(Memory::shared(4096, HugePages::Never)?);
    let known = device.register(memory)?;
    let pieces = &[Run { offset: 0, len: 8 }];
    device.post(&Rma { op: RmaOp::Read, memory: &known, pieces, conn, remote: 0, key: 0, token: 1 })?;
    Ok((device, conn))
}

#[test]
fn a_file_that_is_none_or_no_plug_in() {
    says(
        Plugin::load(Path::new("/no/such/plugin.so")),
        &["/no/such/plugin.so", "No such file", "KVIK_NIC_LIBRARY"],
    );
    let text = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    says(Plugin::load(&text), &["Cargo.toml cannot be loaded", "ELF"]);
    says(Plugin::load(&other()), &["other.so is no plug-in", "kvik_nic_plugin"]);
    // The name of a library is no file: nothing is searched for.
    says(Plugin::load(Path::new("libc.so.6")), &["libc.so.6", "No such file"]);
}

#[test]
fn a_table_that_is_not_what_it_should_be() {
    says(Plugin::load(&broken("version")), &["versions 7 to 9", "kvik 1 to 1"]);
    says(Plugin::load(&broken("table")), &["its table has 184 bytes", "at least 208"]);
    says(Plugin::load(&broken("name")), &["its name is no UTF-8"]);
    says(Plugin::load(&broken("colon")), &["its name has a character"]);
    says(Plugin::load(&broken("function")), &["no function cancel"]);
    says(Plugin::load(&broken("null")), &["no table"]);
}

#[test]
fn a_list_of_devices_that_makes_no_sense() {
    let devices = |rule: &str| Plugin::load(&broken(rule)).unwrap().devices();
    says(devices("device"), &["the plug-in broken", "device 1 is no UTF-8"]);
    says(devices("endless"), &["device 0 has no zero"]);
    says(devices("twice"), &["two have the name \"n0\""]);
    says(devices("count"), &["it says 4096", "at most 1024"]);
    says(devices("list"), &[&"x".repeat(256)]);
    assert!(devices("none").unwrap().is_empty());
    assert_eq!(devices("nothing").unwrap(), ["n0", "n1"]);
}

#[test]
fn a_device_that_makes_no_sense() {
    says(device("open"), &["opening a device", "it gives none"]);
    says(device("limits"), &["4096 bytes, 0 pieces, 16 in flight"]);
    says(device("long"), &["an address of 513 bytes", "512 is the most"]);
    says(device("short"), &["an address of no bytes"]);
    let mut fd = device("descriptor").unwrap();
    says(fd.watch(&Epoll::new().unwrap(), 1), &["Bad file descriptor"]);
    assert!(device("nothing").unwrap().is_up(), "who does not say is taken to be up");
}

#[test]
fn words_that_are_broken_in_the_middle() {
    says(busy("post"), &["posting an operation", "it answers 7"]);
    let poll = |rule: &str| busy(rule).unwrap().0.poll(&mut Vec::new());
    says(poll("token"), &["which is not in flight"]);
    says(poll("room"), &["it says 65", "room for 64"]);
    let (mut device, mut done) = (busy("status").unwrap().0, Vec::new());
    device.poll(&mut done).unwrap();
    says(done.remove(0).result, &["it gives status 5"]);
    says(busy("fence").unwrap().0.fence(), &["keeps the address"]);
    let (mut device, conn) = busy("nothing").unwrap();
    says(device.close_conn(conn), &["in flight"]);
    device.cancel(conn).unwrap();
    assert_eq!(device.in_flight(), 0);
}

#[test]
fn memory_that_may_still_be_touched_is_never_given_back() {
    for (rule, kept) in [("nothing", false), ("remove", true), ("cancel", true)] {
        let memory = Arc::new(Memory::shared(4096, HugePages::Never).unwrap());
        let mut device = device(rule).unwrap();
        let conn = device.open_conn(b"somewhere").unwrap();
        let known = device.register(memory.clone()).unwrap();
        let pieces = &[Run { offset: 0, len: 8 }];
        let rma = Rma { op: RmaOp::Read, memory: &known, pieces, conn, remote: 0, key: 0, token: 1 };
        device.post(&rma).unwrap();
        drop(known);
        assert_eq!(Arc::strong_count(&memory), 2, "an operation is in flight");
        if rule == "cancel" {
            says(device.cancel(conn), &["cutting what was posted"]);
            assert_eq!(device.in_flight(), 1, "what cannot be cancelled is in flight");
        }
        drop(device);
        assert_eq!(Arc::strong_count(&memory) > 1, kept, "{rule}");
    }
}

/// The plug-in ends the process where a connection is closed on which something is in flight.
#[test]
fn of_several_connections_that_cannot_be_cut_none_is_closed() {
    let (mut device, first) = busy("cancel").unwrap();
    let second = device.open_conn(b"elsewhere").unwrap();
    assert_ne!(first, second);
    let memory = Arc::new(Memory::shared(4096, HugePages::Never).unwrap());
    let known = device.register(memory.clone()).unwrap();
    let pieces = &[Run { offset: 0, len: 8 }];
    let rma = Rma { op: RmaOp::Read, memory: &known, pieces, conn: second, remote: 0, key: 0, token: 2 };
    device.post(&rma).unwrap();
    drop((known, device));
    assert!(Arc::strong_count(&memory) > 1, "it may still be touched");
}
