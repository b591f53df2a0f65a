//! The kernel that copies many pieces, with pieces of every kind.

use crate::parts::{Checked, Outcome, finish, memory, outcome, pinned, text};
use crate::pattern::{bytes, compare, number};
use kvik_host::cuda::{Device, Stream, Way};

/// Room for more pieces than one launch takes.
const LEN: usize = 8 << 20;

/// Pieces that do not overlap, at odd places and of odd lengths, in an order that is not that of their places: of less
/// than a word up to many of the kernel's shares. About one in `dense` lies to the boundaries of words.
pub fn drawn(seed: u64, len: usize, dense: u64) -> Vec<(usize, usize)> {
    let (mut pieces, mut at, mut count) = (Vec::new(), 0, 0);
    loop {
        count += 1;
        let draw = |salt: u64, below: u64| (number(seed << 32 ^ count << 8 ^ salt) % below) as usize;
        let mut size = match draw(0, 400) {
            0 => 200_000 + draw(1, 300_000),
            1..9 => draw(1, 20_000),
            9..200 => draw(1, 33),
            _ => draw(1, 1500),
        };
        at += draw(2, 40);
        if draw(3, dense) == 0 {
            (at, size) = (at.next_multiple_of(16), size.next_multiple_of(16));
        }
        if at + size > len {
            break;
        }
        pieces.push((at, size));
        at += size;
    }
    pieces.reverse();
    pieces
}

/// Pieces to the host, and back into the places of a second memory.
pub fn host(device: &Device) -> Outcome {
    if let Err(why) = device.kernel() {
        return Outcome::Not(why);
    }
    let checked = || -> Checked {
        for (seed, dense) in [(40, 1), (41, 2), (42, 1000)] {
            to_host_and_back(device, seed, dense).map_err(|why| format!("seed {seed}: {why}"))?;
        }
        Ok(())
    };
    outcome(checked())
}

fn to_host_and_back(device: &Device, seed: u64, dense: u64) -> Checked {
    let (memory, staging) = (memory(device, LEN)?, pinned(device, LEN)?);
    let (from, before) = (bytes(seed, 0, LEN), bytes(seed + 100, 0, LEN));
    let pieces = drawn(seed, LEN, dense);
    memory.copy_in(0, &from).map_err(text)?;
    let mut stream = Stream::new(device).map_err(text)?;
    stream.copy_by(Way::Kernel);
    // Both sides alike, and not.
    let at = seed as usize % 2;
    let total: usize = pieces.iter().map(|(_, len)| len).sum();
    staging.memory().copy_in(0, &before).map_err(text)?;
    stream.gather(&staging, at, &memory, &pieces).map_err(text)?;
    finish(&mut stream)?;
    let mut want = before.clone();
    let packed: Vec<u8> =
        pieces.iter().flat_map(|(offset, len)| &from[*offset..offset + len]).copied().collect();
    want[at..at + total].copy_from_slice(&packed);
    let mut have = vec![0; LEN];
    staging.memory().copy_out(0, &mut have).map_err(text)?;
    compare(&have, &want)?;
    memory.copy_in(0, &before).map_err(text)?;
    stream.scatter(&memory, &pieces, &staging, at).map_err(text)?;
    finish(&mut stream)?;
    let mut want = before;
    for (offset, len) in &pieces {
        want[*offset..offset + len].copy_from_slice(&from[*offset..offset + len]);
    }
    memory.copy_out(0, &mut have).map_err(text)?;
    compare(&have, &want)
}

/// Pieces to other places of the device: those of one drawing, each where one of another lies.
pub fn within(device: &Device) -> Outcome {
    if let Err(why) = device.kernel() {
        return Outcome::Not(why);
    }
    let checked = || -> Checked {
        let (from, into) = (memory(device, LEN)?, memory(device, LEN)?);
        let (bytes, before) = (bytes(50, 0, LEN), bytes(51, 0, LEN));
        from.copy_in(0, &bytes).map_err(text)?;
        into.copy_in(0, &before).map_err(text)?;
        let pairs = drawn(52, LEN, 2).into_iter().zip(drawn(53, LEN, 3));
        let pieces: Vec<_> = pairs.map(|((at, one), (offset, other))| (at, offset, one.min(other))).collect();
        let mut stream = Stream::new(device).map_err(text)?;
        stream.copy_by(Way::Kernel);
        stream.between(&into, &from, &pieces).map_err(text)?;
        finish(&mut stream)?;
        let (mut want, mut have) = (before, vec![0; LEN]);
        for (at, offset, len) in pieces {
            want[at..at + len].copy_from_slice(&bytes[offset..offset + len]);
        }
        into.copy_out(0, &mut have).map_err(text)?;
        compare(&have, &want)
    };
    outcome(checked())
}
