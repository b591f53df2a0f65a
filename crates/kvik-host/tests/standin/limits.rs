//! How much a queue takes: many extents over queues of several depths.

use crate::DEVICE;
use crate::side::{Side, nics, rma};
use crate::standin::{Folder, again};
use kvik_host::fabric::{Posted, RmaOp};
use kvik_host::{HugePages, Memory};
use std::sync::Arc;
use std::time::Instant;

const EXTENT: usize = 16 << 10;
const BUFFER: usize = 64 << 20;
const DEPTHS: [&str; 3] = ["64", "256", "4096"];
const COUNTS: [usize; 4] = [20, 200, 2_000, 20_000];

/// Run in a process of its own, for each depth, by the next test.
#[test]
#[ignore = "the next test runs it"]
fn extents_of_one_depth() {
    let nic = &nics()[0];
    let (mut a, mut b) = (Side::new(nic, 0, nic.depth()), Side::new(nic, 0, nic.depth()));
    let slot = a.endpoint.add_peer(&b.endpoint.address().unwrap()).unwrap();
    let [(here, _), (there, target)] = [(&a, 1u8), (&b, 2)].map(|(side, fill)| {
        let memory = Arc::new(Memory::shared(BUFFER, HugePages::Never).unwrap());
        memory.copy_in(0, &vec![fill; BUFFER]).unwrap();
        (side.device.register(memory.clone(), true).unwrap(), memory)
    });
    for count in COUNTS {
        let (began, mut posted, mut ended, mut full) = (Instant::now(), 0, 0, 0);
        while ended < count {
            while posted < count {
                let part = (posted * EXTENT % BUFFER, EXTENT, posted as u64);
                match a.endpoint.post(&rma(RmaOp::Write, (&here, &there), slot, part)).unwrap() {
                    Posted::Yes => posted += 1,
                    Posted::Full => break,
                }
            }
            full += usize::from(posted < count);
            a.endpoint.poll(&mut a.done).unwrap();
            ended += a.done.len();
            assert!(a.done.drain(..).all(|done| done.result.is_ok()));
        }
        let rate = count as f64 / began.elapsed().as_secs_f64();
        let mut bytes = vec![0; (count * EXTENT).min(BUFFER)];
        target.copy_out(0, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 1));
        assert_eq!(full > 0, count > nic.depth(), "{count} extents, depth {}", nic.depth());
        println!("row: | {:>5} | {count:>7} | {rate:>11.0} |", nic.depth());
    }
    b.endpoint.poll(&mut b.done).unwrap();
}

#[test]
#[ignore = "prints a table for a person: cargo test --test standin -- --ignored a_table --nocapture"]
fn a_table_of_extents_a_second() {
    println!("| depth | extents | extents / s |\n|------:|--------:|------------:|");
    for depth in DEPTHS {
        let mut folder = Folder::new();
        let settings = [DEVICE, ("KVIK_STANDIN_DEPTH", depth)];
        let output = again("limits::extents_of_one_depth", &folder, &settings);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        let rows: Vec<&str> =
            text.lines().filter_map(|line| line.split_once("row: ")).map(|row| row.1).collect();
        assert_eq!(rows.len(), COUNTS.len(), "{text}");
        rows.iter().for_each(|row| println!("{row}"));
        folder.ended();
    }
}
