//! Giving back KV that prefill has granted and that no decode engine takes: the client left before any was asked, none
//! could be reached, or the one that was asked refused the request.
//!
//! A prefill engine keeps the KV of a finished request until a decode engine has fetched it or until the grant
//! expires; it listens to nobody else. So the router lets a decode engine fetch it: the same request, cut to
//! one token. That leaves out what only decode can have refused, since prefill was not asked it either: how many tokens,
//! how few, and how they are streamed. The first bytes of the answer prove that the KV was taken over, and then the
//! request is dropped.
//!
//! Dropping it earlier would be cheaper and wrong: engines send the head of a streamed answer before they have
//! queued the request, and one that is aborted before it is queued tells the prefill engine nothing.
//!
//! A decode engine that failed over a request may have taken its KV, and may have failed because of the request. Nothing
//! is sent to another one then: what that engine has not taken is left to expire.

use std::sync::Arc;

use crate::body::{Kind, RequestBody};
use crate::collect::next_piece;
use crate::headers::put_id;
use crate::metrics::{ReleaseOutcome, Role};
use crate::shared::{MOST_RELEASES, Shared};
use crate::upstream::{Attached, Call};

/// KV that waits on a prefill engine, and the request that would fetch it.
pub(crate) struct GrantedKv {
    /// The client's request for decode, with the params. It is cut to one token where the KV is given back, which is
    /// rare: else each request would hold one copy more of its body.
    pub(crate) call: Call,
    pub(crate) kind: Kind,
    /// Whether the client's own decode request has reached a connection.
    pub(crate) attached: Arc<Attached>,
}

/// Starts giving back, in the background and within bounds.
pub(crate) fn start(shared: &Arc<Shared>, granted: GrantedKv, id: &str) {
    let Ok(place) = shared.releases.clone().try_acquire_owned() else {
        log::warn!(request:% = id; "request {id}: its KV is left to expire, {MOST_RELEASES} releases are at work");
        shared.metrics.release(ReleaseOutcome::Skipped);
        return;
    };
    let shared = shared.clone();
    let id = format!("{id}-release");
    let (tasks, handle) = (shared.tasks.clone(), shared.handle.clone());
    tasks.spawn_on(
        async move {
            let limit = shared.config.release_timeout;
            let released = tokio::time::timeout(limit, give_back(&shared, granted, &id)).await;
            let outcome = match released {
                Ok(Ok(())) => ReleaseOutcome::Released,
                Ok(Err(why)) => {
                    log::warn!(request:% = id; "request {id}: its KV is left to expire: {why}");
                    ReleaseOutcome::Failed
                }
                Err(_) => {
                    log::warn!(
                        request:% = id;
                        "request {id}: its KV is left to expire: no decode engine took it in {limit:?}"
                    );
                    ReleaseOutcome::Failed
                }
            };
            shared.metrics.release(outcome);
            drop(place);
        },
        &handle,
    );
}

async fn give_back(shared: &Shared, granted: GrantedKv, id: &str) -> Result<(), String> {
    let mut call = granted.call;
    let cut = RequestBody::again(&call.body).map(|body| body.for_release(granted.kind));
    call.body = cut.map_err(|e| e.to_string())?.into();
    put_id(&mut call.headers, id);
    let (nothing, engines) = (Attached::default(), shared.decode.pick());
    let asked = shared.ask(id, engines, &call, &nothing, &mut None).await;
    let (engine, response) = asked.map_err(|reply| reply.message)?;
    if !response.status().is_success() {
        return Err(format!("{} answered {}", engine.url, response.status()));
    }
    match next_piece(&mut response.into_body(), shared.upstream.silence(Role::Decode)).await {
        Ok(Some(_)) => Ok(()),
        Ok(None) => Err(format!("the answer of {} was empty", engine.url)),
        Err(_) => Err(format!("{} broke off its answer", engine.url)),
    }
}
