//! Frames of the control connection: what comes is a frame of this version or refused, and costs what it brought.

use crate::feed;
use crate::most_held;
use arbitrary::Unstructured;
use kvik_proto::{FRAME_HEADER, Frame, MAX_FRAME, frame_header};

/// Raw bytes, a body behind an honest header, or a frame that is built and must come back.
pub fn frame(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    match mode % 3 {
        0 => check(data),
        1 => {
            let Some((kind, body)) = data.split_first() else { return };
            let mut bytes = frame_header((*kind).into(), body).to_vec();
            bytes.extend(body);
            check(&bytes);
        }
        _ => {
            let Ok(frame) = feed::frame(&mut Unstructured::new(data), &[]) else { return };
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            let (back, taken) = Frame::decode(&bytes).expect("what was encoded").expect("all of it");
            assert_eq!(taken, bytes.len());
            assert_eq!(format!("{back:?}"), format!("{frame:?}"), "a frame came back as another");
            assert!(Frame::decode(&bytes[..bytes.len() - 1]).expect("a part").is_none());
        }
    }
}

fn check(bytes: &[u8]) {
    let (decoded, held) = most_held(|| Frame::decode(bytes));
    assert!(held <= 16 * bytes.len() + 4096, "{held} bytes for a frame of {}", bytes.len());
    let Ok(Some((frame, taken))) = decoded else { return };
    assert!((FRAME_HEADER..=FRAME_HEADER + MAX_FRAME).contains(&taken) && taken <= bytes.len());
    let mut again = Vec::new();
    frame.encode(&mut again);
    let (back, _) = Frame::decode(&again).expect("what was decoded can be sent").expect("all of it");
    assert_eq!(format!("{back:?}"), format!("{frame:?}"), "a frame that was passed on is another");
}
