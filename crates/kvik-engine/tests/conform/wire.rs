//! A proxy between two engines' TCP connections: what a network does to bytes.
//!
//! It knows the connection that comes first (the control connection) from those that follow (data channels), and
//! nothing else about what it passes on.

use crate::common::{PATIENCE, Random};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

/// What happens to a data channel at a byte of what the dialled engine sends.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Harm {
    /// A bit is another one.
    Flip,
    /// Nothing follows, and the connection ends in order.
    Truncate,
    /// Nothing follows, and nobody is told.
    Stall,
    /// Some bytes come twice.
    Repeat,
    /// Some bytes are left out.
    Skip,
    /// What follows comes once it is released.
    Hold,
}

#[derive(Default)]
struct Plan {
    target: OnceLock<SocketAddr>,
    harm: Mutex<Option<(Harm, u64)>>,
    /// How often something was harmed.
    harmed: AtomicU64,
    dawdles: AtomicBool,
    stopped: AtomicBool,
    conns: Mutex<Vec<TcpStream>>,
    released: (Mutex<bool>, Condvar),
}

/// The proxy.
pub struct Wire {
    address: SocketAddr,
    plan: Arc<Plan>,
}

impl Wire {
    pub fn start(seed: u64) -> Wire {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, plan) = (listener.local_addr().unwrap(), Arc::new(Plan::default()));
        let mut random = Random::of(seed);
        let shared = plan.clone();
        std::thread::spawn(move || {
            for (number, front) in listener.incoming().enumerate() {
                let (Ok(front), Some(target)) = (front, shared.target.get()) else { continue };
                if shared.stopped.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(back) = TcpStream::connect_timeout(target, PATIENCE) else { continue };
                join(&shared, front, back, number > 0, &mut random);
            }
        });
        Wire { address, plan }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where connections go.
    pub fn lead_to(&self, target: SocketAddr) {
        self.plan.target.set(target).unwrap();
    }

    /// Bytes come in pieces of any size, and late.
    pub fn dawdle(&self) {
        self.plan.dawdles.store(true, Ordering::Relaxed);
    }

    /// Harms the first data channel on which so many bytes come from the dialled engine, once.
    pub fn harm(&self, harm: Harm, at: u64) {
        *self.plan.harm.lock().unwrap() = Some((harm, at));
    }

    /// Nothing is held from now on.
    pub fn release(&self) {
        *self.plan.released.0.lock().unwrap() = true;
        self.plan.released.1.notify_all();
    }

    pub fn harmed(&self) -> u64 {
        self.plan.harmed.load(Ordering::Relaxed)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.release();
        self.plan.stopped.store(true, Ordering::Relaxed);
        for conn in self.plan.conns.lock().unwrap().drain(..) {
            drop(conn.shutdown(Shutdown::Both));
        }
        drop(TcpStream::connect_timeout(&self.address, Duration::from_secs(1)));
    }
}

fn join(plan: &Arc<Plan>, front: TcpStream, back: TcpStream, data: bool, random: &mut Random) {
    for conn in [&front, &back] {
        conn.set_nodelay(true).unwrap();
        plan.conns.lock().unwrap().push(conn.try_clone().unwrap());
    }
    let connections = [(front.try_clone().unwrap(), back.try_clone().unwrap(), false), (back, front, data)];
    for (from, to, harmful) in connections {
        let (plan, random) = (plan.clone(), random.fork());
        std::thread::spawn(move || pass_on(&plan, from, to, harmful, random));
    }
}

/// Until either side ends.
fn pass_on(plan: &Plan, mut from: TcpStream, mut to: TcpStream, harmful: bool, mut random: Random) {
    let (mut buffer, mut passed) = (vec![0; 64 << 10], 0);
    let dawdles = plan.dawdles.load(Ordering::Relaxed);
    loop {
        let most = if dawdles { 1 + random.below(64 << 10) as usize } else { buffer.len() };
        let Ok(got @ 1..) = from.read(&mut buffer[..most]) else { break };
        if dawdles && random.below(20) == 0 {
            std::thread::sleep(Duration::from_micros(random.below(1000).into()));
        }
        let mut bytes = buffer[..got].to_vec();
        if harmful && let Some((harm, at)) = due(plan, passed, got as u64) {
            plan.harmed.fetch_add(1, Ordering::Relaxed);
            match harm {
                Harm::Flip => bytes[at] ^= 1 << (at % 8),
                Harm::Truncate => bytes.truncate(at),
                Harm::Stall => {
                    drop(to.write_all(&bytes[..at]));
                    // Until somebody ends the connection: what comes meanwhile is lost.
                    while matches!(from.read(&mut buffer), Ok(1..)) {}
                    break;
                }
                Harm::Repeat => {
                    let again = bytes[..at].to_vec();
                    bytes.splice(at..at, again);
                }
                Harm::Skip => drop(bytes.drain(at / 2..at)),
                Harm::Hold => {
                    drop(to.write_all(&bytes[..at]));
                    let (released, told) = &plan.released;
                    drop(told.wait_while(released.lock().unwrap(), |released| !*released).unwrap());
                    bytes.drain(..at);
                }
            }
            if to.write_all(&bytes).is_err() || harm == Harm::Truncate {
                break;
            }
        } else if to.write_all(&bytes).is_err() {
            break;
        }
        passed += got as u64;
    }
    drop(to.shutdown(Shutdown::Both));
    drop(from.shutdown(Shutdown::Both));
}

/// What happens in these bytes, and at which of them.
fn due(plan: &Plan, passed: u64, got: u64) -> Option<(Harm, usize)> {
    let mut harm = plan.harm.lock().unwrap();
    let (what, at) = (*harm)?;
    if at < passed || at >= passed + got {
        return None;
    }
    *harm = None;
    Some((what, (at - passed) as usize))
}
