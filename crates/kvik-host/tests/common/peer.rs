//! Another process of a test's program, which does what it is told, line by line.

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

const ROLE: &str = "KVIK_TEST_STANDIN_PEER";

/// Whether this process is one.
pub fn is_peer() -> bool {
    std::env::var_os(ROLE).is_some()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

pub struct Peer {
    process: Child,
    lines: Box<dyn Iterator<Item = String>>,
    /// Address, base and key.
    pub told: Vec<String>,
}

impl Peer {
    /// Runs the test of this name, which reads lines, and answers each by one that begins with `peer: `.
    pub fn start(test: &str) -> Peer {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture"]).env(ROLE, "1");
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut lines = lines.filter_map(|line| line.strip_prefix("peer: ").map(str::to_owned));
        let told = lines.next().expect("what the peer is").split(' ').map(str::to_owned).collect();
        Peer { process, lines: Box::new(lines), told }
    }

    pub fn ask(&mut self, line: &str) -> String {
        self.process.stdin.as_mut().unwrap().write_all(format!("{line}\n").as_bytes()).unwrap();
        self.lines.next().expect("the peer's answer")
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Returns when it has stopped.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let id = WaitId::Pid(Pid::from_child(&self.process));
        waitid(id, WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT).unwrap().unwrap();
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.kill();
    }
}
