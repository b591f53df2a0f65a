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
use std::time::Duration;

use http::{Extensions, Uri};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower_service::Service;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

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

/// [`HttpConnector`], with the mark put on every connection, and with a bound on all of connecting: its own does not
/// count the time in which the system looks for the address of a name.
#[derive(Clone)]
pub(crate) struct MarkingConnector<C = HttpConnector>(pub(crate) C, pub(crate) Duration);

impl<C> Service<Uri> for MarkingConnector<C>
where
    C: Service<Uri, Response = TokioIo<TcpStream>, Error: Into<BoxError>, Future: Send + 'static>,
{
    type Response = Marked;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Marked, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (connecting, limit) = (self.0.call(uri), self.1);
        Box::pin(async move {
            let connected = tokio::time::timeout(limit, connecting).await;
            let io = connected.map_err(|_| format!("not connected within {} s", limit.as_secs_f64()))?;
            Ok(Marked { io: io.map_err(Into::<BoxError>::into)?, answered: Answered::default() })
        })
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Pending;

    /// Looks for the address for ever, as the system does in vain for long.
    struct Nameless;

    impl Service<Uri> for Nameless {
        type Response = TokioIo<TcpStream>;
        type Error = io::Error;
        type Future = Pending<io::Result<TokioIo<TcpStream>>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Uri) -> Self::Future {
            std::future::pending()
        }
    }

    #[tokio::test]
    async fn connecting_is_bounded_with_all_that_it_takes() {
        let asked =
            MarkingConnector(Nameless, Duration::from_millis(20)).call(Uri::from_static("http://p0:1"));
        let ended = tokio::time::timeout(Duration::from_secs(60), asked).await.expect("it waits for ever");
        assert_eq!(ended.err().unwrap().to_string(), "not connected within 0.02 s");
    }
}
