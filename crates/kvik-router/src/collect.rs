//! Reading a body, whole or its next bytes, with a bound on its size and on every silence within it.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Body;

/// Why a body could not be had whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CollectError {
    /// Longer than the limit; the rest was not read.
    TooLarge,
    /// Nothing came for as long as was allowed, or all of it came too slowly.
    Silent,
    /// The connection ended within the body.
    Broken,
    /// There is no memory for what has come.
    NoMemory,
}

/// Memory taken before any byte has arrived, whatever length the sender announces.
const FIRST_RESERVE: u64 = 64 << 10;

/// Bytes a second that a sender may not stay below for longer than a silence. Who sends one byte in each silence would
/// else hold its place for years.
pub(crate) const LEAST_RATE: usize = 16 << 10;

/// All bytes of `body`, at most `limit` of them. `room` is asked for each length before it is held.
pub(crate) async fn collect<B>(
    mut body: B,
    limit: usize,
    silence: Duration,
    mut room: impl FnMut(usize) -> bool,
) -> Result<Bytes, CollectError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let announced = body.size_hint().lower();
    if announced > limit as u64 {
        return Err(CollectError::TooLarge);
    }
    let mut all = Vec::with_capacity(announced.min(FIRST_RESERVE) as usize);
    let began = Instant::now();
    loop {
        let until = silence + Duration::from_secs((all.len() / LEAST_RATE) as u64);
        let patience = until.saturating_sub(began.elapsed()).min(silence);
        let Some(data) = next_piece(&mut body, patience).await? else {
            return Ok(all.into_boxed_slice().into());
        };
        if all.len() + data.len() > limit {
            return Err(CollectError::TooLarge);
        }
        if !room(all.len() + data.len()) {
            return Err(CollectError::NoMemory);
        }
        all.extend_from_slice(&data);
    }
}

/// The next bytes of `body`, at least one; none at its end.
pub(crate) async fn next_piece<B>(body: &mut B, silence: Duration) -> Result<Option<Bytes>, CollectError>
where
    B: Body<Data = Bytes> + Unpin,
{
    loop {
        let frame = tokio::time::timeout(silence, body.frame()).await.map_err(|_| CollectError::Silent)?;
        let Some(frame) = frame else { return Ok(None) };
        match frame.map_err(|_| CollectError::Broken)?.into_data() {
            Ok(data) if !data.is_empty() => return Ok(Some(data)),
            _ => {}
        }
    }
}
