//! Two processes, one transfer: the owner grants pages, the reader reads and checks them.
//!
//! `cargo run -p kvik-engine --example transfer`

use kvik_core::{Error, GrantState, Layout, Ticket};
use kvik_engine::{Config, Engine, GrantOptions, PageSet, Region, TransferOptions};
use std::{process::Command, sync::Arc, time::Duration};

const PAGE: usize = 16 << 10;

/// Some of the 64 pages of 16 KiB that a region holds.
fn pages(region: &Region, ids: &[u32]) -> Result<PageSet, Error> {
    let layout = Layout::contiguous(64, PAGE as u64)?;
    PageSet::new(region, Arc::new(layout), ids.into(), None, None)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = Engine::start(Config::default())?;
    let region = engine.allocate(64 * PAGE as u64)?;
    if let Some(ticket) = std::env::args().nth(1) {
        // The reader: this program again, with the ticket as its argument.
        let ticket: Ticket = ticket.parse()?;
        let target = pages(&region, &[0, 1, 2])?;
        let report = engine.read(&target, &ticket, None, TransferOptions::default())?.wait(None)?;
        let mut bytes = vec![0; 3 * PAGE];
        region.read_at(0, &mut bytes)?;
        assert!(bytes.chunks(PAGE).zip([7, 8, 40]).all(|(page, id)| page.iter().all(|byte| *byte == id)));
        println!(
            "reader: {} bytes by {}, checked: {}",
            report.bytes,
            report.mechanism,
            report.checks.join(", ")
        );
        return Ok(());
    }
    for id in 0..64 {
        region.write_at(id * PAGE, &[id as u8; PAGE])?;
    }
    let grant = engine.grant(&pages(&region, &[7, 8, 40])?, GrantOptions::default())?;
    let reader = Command::new(std::env::current_exe()?).arg(grant.ticket().to_string()).status()?;
    assert!(reader.success(), "the reader failed");
    // The one use that it was for has been confirmed: the pages are the owner's again.
    assert_eq!(grant.wait(Duration::from_secs(30)), Some(GrantState::Consumed));
    println!("owner: the pages are back");
    Ok(())
}
