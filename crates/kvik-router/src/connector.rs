//! A connector that knows whether a connection has answered before.
//!
//! An engine closes idle connections when it likes, sometimes just as the router takes one out of the pool. A
//! request that fails so is worth one more attempt, on a fresh connection. A request that fails on a connection
//! which never answered anything is the engine's own failure. hyper-util does not tell the two apart in its
//! errors, so each connection carries a mark that is set by its first response.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use http::{Extensions, Uri};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower_service::Service;

/// Set once a connection has delivered a response.
#[derive(Clone, Default)]
pub(crate) struct Answered(Arc<AtomicBool>);

impl Answered {
    /// Marks the connection that a response came over.
    pub(crate) fn mark(extensions: &Extensions) {
        if let Some(answered) = extensions.get::<Self>() {
            answered.0.store(true, Ordering::Relaxed);
        }
    }

    /// Whether this connection had answered an earlier request.
    pub(crate) fn is_marked(connection: &Connected) -> bool {
        let mut extensions = Extensions::new();
        connection.get_extras(&mut extensions);
        extensions.get::<Self>().is_some_and(|answered| answered.0.load(Ordering::Relaxed))
    }
}

/// [`HttpConnector`], with the mark put on every connection.
#[derive(Clone)]
pub(crate) struct MarkingConnector(pub(crate) HttpConnector);

impl Service<Uri> for MarkingConnector {
    type Response = Marked;
    type Error = <HttpConnector as Service<Uri>>::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Marked, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move { Ok(Marked { io: connecting.await?, answered: Answered::default() }) })
    }
}

/// A connection with its mark.
pub(crate) struct Marked {
    io: TokioIo<TcpStream>,
    answered: Answered,
}

impl Connection for Marked {
    fn connected(&self) -> Connected {
        self.io.connected().extra(self.answered.clone())
    }
}

impl Read for Marked {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl Write for Marked {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }
}
