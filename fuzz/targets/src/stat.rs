//! What programs of the same user may ask an engine about itself, over its own UNIX socket.

use kvik_engine::{Config, Engine};
use kvik_host::unix::UnixConn;
use std::sync::OnceLock;
use std::time::Duration;

/// An engine that is silent for longer hangs.
const PATIENCE: Duration = Duration::from_secs(10);
/// No request is longer.
const REQUEST: usize = 64;

static ENGINE: OnceLock<Engine> = OnceLock::new();

/// Whatever is asked, there is one answer, and the connection ends: a recording with its last line.
pub fn stat(data: &[u8]) {
    let engine = ENGINE.get_or_init(|| {
        let engine = Engine::start(Config::default()).expect("an engine");
        kvik_observe::observe(&engine).expect("an engine that can be asked");
        engine
    });
    let name = format!("kvik-stat-{}", engine.id());
    let conn = UnixConn::connect(&name, PATIENCE).expect("an engine answers");
    // What is asked often begins as it should.
    let (request, further) = match data.split_first() {
        Some((0, rest)) => (b"kvik-stat/1 snapshot".to_vec(), rest),
        Some((1, rest)) => (b"kvik-stat/1 trace".to_vec(), rest),
        Some((2, rest)) => ([b"kvik-stat/1 ", rest].concat(), rest),
        _ => (data.to_vec(), data),
    };
    if request.is_empty() || conn.send_within(&request, &[], PATIENCE).is_err() {
        return;
    }
    // A second message ends a recording; the answer to anything else is over by then, or is cut.
    let second = if further.is_empty() { b"x" } else { &further[..further.len().min(REQUEST)] };
    let _ = conn.send_within(second, &[], PATIENCE);
    let (mut answer, mut buffer, mut whole) = (Vec::new(), vec![0; 64 << 10], false);
    loop {
        match conn.recv_within(&mut buffer, 0, PATIENCE) {
            Ok(Some(received)) => answer.extend_from_slice(&buffer[..received.len]),
            Ok(None) => break whole = true,
            Err(error) => {
                assert!(!error.to_string().contains("did not"), "the engine is silent: {error}");
                break;
            }
        }
    }
    if whole && request.len() <= REQUEST && further.is_empty() {
        assert!(answer.starts_with(b"{\""), "the first line is not of JSON");
    }
}
