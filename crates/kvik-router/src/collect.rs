//! Reading a body, whole or its next bytes, with a bound on its size and on every silence within it.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body;

/// Why a body could not be had whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CollectError {
    /// Longer than the limit; the rest was not read.
    TooLarge,
    /// Nothing came for as long as was allowed.
    Silent,
    /// The connection ended within the body.
    Broken,
}

/// Memory taken before any byte has arrived, whatever length the sender announces.
const FIRST_RESERVE: u64 = 64 << 10;

/// All bytes of `body`, at most `limit` of them.
pub(crate) async fn collect<B>(mut body: B, limit: usize, silence: Duration) -> Result<Bytes, CollectError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let announced = body.size_hint().lower();
    if announced > limit as u64 {
        return Err(CollectError::TooLarge);
    }
    let mut all = BytesMut::with_capacity(announced.min(FIRST_RESERVE) as usize);
    while let Some(data) = next_piece(&mut body, silence).await? {
        if all.len() + data.len() > limit {
            return Err(CollectError::TooLarge);
        }
        all.extend_from_slice(&data);
    }
    Ok(all.freeze())
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
