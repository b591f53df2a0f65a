//! The engines of one role, and what is known of each.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::config::EngineUrl;
use crate::metrics::{FailureKind, Role};

/// Engines of one role. All choosing between engines happens in [`Pool::pick`].
pub(crate) struct Pool {
    pub(crate) role: Role,
    engines: Vec<Arc<Engine>>,
    next: AtomicUsize,
}

/// One engine.
pub(crate) struct Engine {
    pub(crate) url: EngineUrl,
    pub(crate) role: Role,
    last: Mutex<Option<(Seen, Instant)>>,
    template: Mutex<Option<Arc<str>>>,
}

/// What came of a request to an engine, as far as it tells whether the engine is there: an answer, with success or a
/// refusal; or none, or that it cannot serve.
pub(crate) type Seen = Result<(), FailureKind>;

impl Pool {
    pub(crate) fn new(role: Role, urls: &[EngineUrl]) -> Self {
        let engine = |url: &EngineUrl| {
            Arc::new(Engine { url: url.clone(), role, last: Mutex::new(None), template: Mutex::new(None) })
        };
        Self { role, engines: urls.iter().map(engine).collect(), next: AtomicUsize::new(0) }
    }

    /// The engines in the order in which this request should try them: each once, the first in rotation.
    pub(crate) fn pick(&self) -> impl Iterator<Item = &Arc<Engine>> {
        let first = self.next.fetch_add(1, Ordering::Relaxed) % self.engines.len().max(1);
        self.engines[first..].iter().chain(&self.engines[..first])
    }

    pub(crate) fn engines(&self) -> &[Arc<Engine>] {
        &self.engines
    }
}

impl Engine {
    /// Keeps what a request showed of this engine. One that cannot be reached, or that cut an answer off, may have
    /// started again: what it has said of streams before is not trusted any more.
    pub(crate) fn note(&self, seen: Seen) {
        if matches!(seen, Err(FailureKind::Connect | FailureKind::Closed)) {
            self.keep_template(None);
        }
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((seen, Instant::now()));
    }

    /// What a prefill engine has last said of itself for streams, as it came; none before its first answer.
    pub(crate) fn template(&self) -> Option<Arc<str>> {
        self.template.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Keeps what an answer says of streams, also that it says nothing.
    pub(crate) fn keep_template(&self, template: Option<Arc<str>>) {
        *self.template.lock().unwrap_or_else(PoisonError::into_inner) = template;
    }

    /// Forgets what was once said of streams; what has been said since stays.
    pub(crate) fn forget_template(&self, once: &str) {
        let mut kept = self.template.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.as_deref() == Some(once) {
            *kept = None;
        }
    }

    /// What the last request showed, and when.
    pub(crate) fn last(&self) -> Option<(Seen, Instant)> {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn picks_rotate_and_name_every_engine_once() {
        let urls: Vec<EngineUrl> = (1..=3).map(|i| format!("http://p:{i}").parse().unwrap()).collect();
        let pool = Pool::new(Role::Prefill, &urls);
        let order = |pool: &Pool| pool.pick().map(|e| e.url.clone()).collect::<Vec<_>>();
        assert_eq!(order(&pool), [urls[0].clone(), urls[1].clone(), urls[2].clone()]);
        assert_eq!(order(&pool), [urls[1].clone(), urls[2].clone(), urls[0].clone()]);
        assert_eq!(order(&pool)[0], urls[2]);
        assert_eq!(order(&pool)[0], urls[0]);
    }

    #[test]
    fn a_template_is_forgotten_with_its_run_and_no_later() {
        let urls: Vec<EngineUrl> = vec!["http://p:1".parse().unwrap()];
        let pool = Pool::new(Role::Prefill, &urls);
        let engine = &pool.engines()[0];
        engine.keep_template(Some("new".into()));
        engine.forget_template("old");
        assert_eq!(engine.template().as_deref(), Some("new"));
        engine.forget_template("new");
        assert_eq!(engine.template(), None);
        for (kind, kept) in [
            (FailureKind::Connect, false),
            (FailureKind::Closed, false),
            (FailureKind::Timeout, true),
            (FailureKind::Status, true),
        ] {
            engine.keep_template(Some("new".into()));
            engine.note(Err(kind));
            assert_eq!(engine.template().is_some(), kept, "{kind:?}");
        }
    }
}
