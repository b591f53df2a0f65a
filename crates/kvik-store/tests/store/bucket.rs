//! An object store in memory that fails, hangs, and gives other bytes than were written.

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{BoxStream, once};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// What becomes of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meddling {
    None,
    /// Every request fails, as with a status of 500.
    Fails,
    /// No request ends.
    Hangs,
    /// Writes of blocks are told that the name is taken, whatever they may do to it.
    Conflicts,
    /// Nothing can be written, as where a quota is used up.
    Full,
    /// Nothing can be removed, as where the right to is missing.
    Keeps,
    /// Reads of blocks give the first half.
    Truncates,
    /// Reads of blocks give bytes of another object.
    Swaps,
    /// Reads of blocks have a bit flipped in each 512 bytes.
    Flips,
}

/// See the module's text.
#[derive(Debug)]
pub struct Bucket {
    pub inner: InMemory,
    meddling: Mutex<Meddling>,
    /// What of it is refused to read, as with a status of 403: the ends of names.
    pub refused: Mutex<Vec<String>>,
    /// Reads that have begun.
    pub reads: AtomicU64,
}

impl fmt::Display for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bucket")
    }
}

impl Bucket {
    pub fn new() -> Arc<Bucket> {
        let (inner, meddling) = (InMemory::new(), Mutex::new(Meddling::None));
        let refused = Mutex::default();
        Arc::new(Bucket { inner, meddling, refused, reads: AtomicU64::new(0) })
    }

    pub fn set(&self, meddling: Meddling) {
        *self.meddling.lock().unwrap() = meddling;
    }

    /// The names of all objects that hold blocks or removals.
    pub fn objects(&self) -> Vec<Path> {
        let all = futures_util::FutureExt::now_or_never(self.inner.list(None).collect::<Vec<_>>());
        let names = all.unwrap().into_iter().map(|meta| meta.unwrap().location);
        names.filter(|name| name.as_ref().ends_with(".kvik")).collect()
    }

    async fn answer(&self) -> Result<Meddling> {
        let meddling = *self.meddling.lock().unwrap();
        match meddling {
            Meddling::Fails => {
                Err(Error::Generic { store: "bucket", source: "500 Internal Server Error".into() })
            }
            Meddling::Hangs => std::future::pending().await,
            other => Ok(other),
        }
    }

    async fn meddle(
        &self,
        meddling: Meddling,
        location: &Path,
        range: Option<GetRange>,
        bytes: Bytes,
    ) -> Bytes {
        match meddling {
            Meddling::Truncates => bytes.slice(..bytes.len() / 2),
            Meddling::Flips => {
                let mut bytes = bytes.to_vec();
                // The head of the first record stays whole.
                bytes.iter_mut().skip(400).step_by(512).for_each(|byte| *byte ^= 16);
                bytes.into()
            }
            Meddling::Swaps => {
                let Some(other) = self.objects().into_iter().find(|other| other != location) else {
                    return bytes;
                };
                let other = self.inner.get(&other).await.unwrap().bytes().await.unwrap();
                let first = if let Some(GetRange::Bounded(range)) = range { range.start as usize } else { 0 };
                let of = |at| other[(first + at) % other.len()];
                (0..bytes.len()).map(of).collect::<Vec<u8>>().into()
            }
            _ => bytes,
        }
    }
}

#[async_trait]
impl ObjectStore for Bucket {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        if self.answer().await? == Meddling::Conflicts && location.as_ref().ends_with(".kvik") {
            return Err(Error::AlreadyExists { path: location.to_string(), source: "409 Conflict".into() });
        }
        if *self.meddling.lock().unwrap() == Meddling::Full && location.as_ref().ends_with(".kvik") {
            return Err(Error::Generic { store: "bucket", source: "507 Insufficient Storage".into() });
        }
        self.inner.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.answer().await?;
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        let meddling = self.answer().await?;
        let path = location.to_string();
        if self.refused.lock().unwrap().iter().any(|end| path.ends_with(end)) {
            return Err(Error::PermissionDenied { path, source: "403 Forbidden".into() });
        }
        let range = options.range.clone();
        let got = self.inner.get_opts(location, options).await?;
        if !location.as_ref().ends_with(".kvik") || meddling == Meddling::None {
            return Ok(got);
        }
        let (meta, whole, attributes, extensions) =
            (got.meta.clone(), got.range.clone(), got.attributes.clone(), got.extensions.clone());
        let bytes = self.meddle(meddling, location, range, got.bytes().await?).await;
        let payload = GetResultPayload::Stream(once(async { Ok(bytes) }).boxed());
        Ok(GetResult { payload, meta, range: whole, attributes, extensions })
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        if *self.meddling.lock().unwrap() == Meddling::Keeps {
            let denied = |_| Err(Error::Generic { store: "bucket", source: "AccessDenied".into() });
            return locations.map(denied).boxed();
        }
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.answer().await?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.answer().await?;
        self.inner.copy_opts(from, to, options).await
    }
}
