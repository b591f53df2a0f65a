//! The engines of one role, and what is known of each.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::config::EngineUrl;
use crate::metrics::{FailureKind, Role};

/// How long an engine that could not be reached, or did not answer, is left alone: the first time, and the longest.
/// Whoever asks it waits for all of a timeout.
const LEFT_ALONE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(30));

/// Engines of one role. All choosing between engines happens in [`Pool::pick`].
pub(crate) struct Pool {
    pub(crate) role: Role,
    engines: Vec<Arc<Engine>>,
    next: AtomicUsize,
    next_beside: AtomicUsize,
}

/// One engine.
pub(crate) struct Engine {
    pub(crate) url: EngineUrl,
    pub(crate) role: Role,
    last: Mutex<Option<(Seen, Instant)>>,
    away: Mutex<Option<Away>>,
    template: Mutex<Option<Arc<str>>>,
}

/// An engine that could not be reached, or did not answer.
struct Away {
    /// How long it is left alone.
    time: Duration,
    until: Instant,
    /// A request is finding out whether it is back.
    tried: bool,
}

/// What came of a request to an engine, as far as it tells whether the engine is there: an answer, with success or a
/// refusal; or none, or that it cannot serve.
pub(crate) type Seen = Result<(), FailureKind>;

impl Pool {
    pub(crate) fn new(role: Role, urls: &[EngineUrl]) -> Self {
        let engine = |url: &EngineUrl| {
            let (last, away, template) = (Mutex::default(), Mutex::default(), Mutex::default());
            Arc::new(Engine { url: url.clone(), role, last, away, template })
        };
        let (next, next_beside) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { role, engines: urls.iter().map(engine).collect(), next, next_beside }
    }

    /// The engines in the order in which this request should try them: each once, the first in rotation, and last those
    /// that could not be reached or did not answer lately. Of those, one whose turn it is is tried first now and then.
    pub(crate) fn pick(&self) -> Vec<Arc<Engine>> {
        self.pick_at(&self.next, Instant::now())
    }

    /// The same for what costs an engine nothing, with turns of its own: where one such request comes before each that does,
    /// all of those would go to every second engine.
    pub(crate) fn pick_beside(&self) -> Vec<Arc<Engine>> {
        self.pick_at(&self.next_beside, Instant::now())
    }

    fn pick_at(&self, turns: &AtomicUsize, now: Instant) -> Vec<Arc<Engine>> {
        let (turn, count) = (turns.fetch_add(1, Ordering::Relaxed), self.engines.len().max(1));
        let (first, round) = (turn % count, turn / count);
        let in_turn = self.engines[first..].iter().chain(&self.engines[..first]);
        let last = |(at, engine): &(usize, &Arc<Engine>)| engine.is_left_alone(*at == 0, now);
        let (last, mut ready): (Vec<_>, Vec<_>) = in_turn.enumerate().partition(last);
        // The turns of one that is left alone go to all others in rotation: the one behind it would get twice its share.
        if ready.first().is_some_and(|(at, _)| *at != 0) {
            let begin = round % ready.len();
            ready.rotate_left(begin);
        }
        ready.into_iter().chain(last).map(|(_, engine)| engine.clone()).collect()
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
        // Only an answer tells that it is back, and a stream that ends because its host is gone does not.
        if seen != Err(FailureKind::Closed) {
            self.note_away(matches!(seen, Err(FailureKind::Connect | FailureKind::Timeout)), Instant::now());
        }
        self.note_last(seen);
    }

    /// Keeps for reports alone what a look showed that gives up before a request would.
    pub(crate) fn note_last(&self, seen: Seen) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some((seen, Instant::now()));
    }

    /// Requests that were on their way together count as one.
    fn note_away(&self, gone: bool, now: Instant) {
        let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
        let time = match &*away {
            _ if !gone => return *away = None,
            None => LEFT_ALONE.0,
            Some(away) if away.tried => (away.time * 2).min(LEFT_ALONE.1),
            Some(_) => return,
        };
        *away = Some(Away { time, until: now + time, tried: false });
    }

    /// Whether it is not to be asked before others. A request that would ask it `first` does so where it was left alone for
    /// long enough, and no other one does meanwhile.
    fn is_left_alone(&self, first: bool, now: Instant) -> bool {
        let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(away) = &mut *away else { return false };
        if !first || now < away.until {
            return true;
        }
        // Who gives up tells nothing: then another one finds out.
        (away.tried, away.until) = (true, now + LEFT_ALONE.1);
        false
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

    /// So many engines, and their addresses.
    fn engines(count: usize) -> (Pool, Vec<EngineUrl>) {
        let urls: Vec<EngineUrl> = (0..count).map(|i| format!("http://p:{i}").parse().unwrap()).collect();
        (Pool::new(Role::Prefill, &urls), urls)
    }

    #[test]
    fn picks_rotate_and_name_every_engine_once() {
        let (pool, urls) = engines(3);
        let order = |pool: &Pool| pool.pick().iter().map(|e| e.url.clone()).collect::<Vec<_>>();
        assert_eq!(order(&pool), [urls[0].clone(), urls[1].clone(), urls[2].clone()]);
        assert_eq!(order(&pool), [urls[1].clone(), urls[2].clone(), urls[0].clone()]);
        assert_eq!(order(&pool)[0], urls[2]);
        assert_eq!(order(&pool)[0], urls[0]);
    }

    #[test]
    fn what_cannot_be_reached_is_tried_by_one_request_at_a_time() {
        let (pool, urls) = engines(2);
        let began = Instant::now();
        // Of two requests, one begins with the first engine: whether it does is asked of both.
        let tried = |after: Duration| {
            let orders: Vec<_> = (0..2).map(|_| pool.pick_at(&pool.next, began + after)).collect();
            assert!(orders.iter().all(|order: &Vec<_>| order.len() == 2));
            orders.iter().filter(|order| order[0].url == urls[0]).count()
        };
        let unreachable = |after| pool.engines()[0].note_away(true, began + after);
        assert_eq!(tried(Duration::ZERO), 1);
        // Those that were on their way together are one failure.
        (0..5).for_each(|_| unreachable(Duration::ZERO));
        let (short, long) = LEFT_ALONE;
        assert_eq!((tried(short / 2), tried(short), tried(short)), (0, 1, 0));
        unreachable(short);
        assert_eq!((tried(short * 2), tried(short * 3), tried(short * 3 + long / 2)), (0, 1, 0));
        // The one that tried has given up.
        assert_eq!(tried(short * 3 + long), 1);
        pool.engines()[0].note(Ok(()));
        assert_eq!((tried(short * 4 + long), tried(short * 4 + long)), (1, 1));
    }

    #[test]
    fn who_has_not_answered_is_not_back() {
        let (pool, urls) = engines(2);
        let (engine, began) = (&pool.engines()[0], Instant::now());
        for (seen, back) in [
            (Err(FailureKind::Timeout), false),
            (Err(FailureKind::Closed), false),
            (Err(FailureKind::Status), true),
            (Err(FailureKind::Protocol), true),
            (Ok(()), true),
        ] {
            engine.note(Err(FailureKind::Connect));
            engine.note(seen);
            let firsts = (0..2).filter(|_| pool.pick_at(&pool.next, began)[0].url == urls[0]).count();
            assert_eq!(firsts, usize::from(back), "{seen:?}");
        }
    }

    #[test]
    fn the_turns_of_one_that_is_left_alone_go_to_all_others() {
        let urls: Vec<EngineUrl> = (0..4).map(|i| format!("http://p:{i}").parse().unwrap()).collect();
        for gone in [&[0][..], &[0, 1], &[0, 2], &[3]] {
            let pool = Pool::new(Role::Prefill, &urls);
            let began = Instant::now();
            gone.iter().for_each(|at| pool.engines()[*at].note_away(true, began));
            let mut firsts = [0; 4];
            for _ in 0..240 {
                let order: Vec<_> = pool.pick_at(&pool.next, began).iter().map(|e| e.url.clone()).collect();
                assert!(urls.iter().all(|url| order.contains(url)));
                firsts[urls.iter().position(|url| *url == order[0]).unwrap()] += 1;
            }
            let share = 240 / (4 - gone.len());
            let fair: Vec<_> = (0..4).map(|at| if gone.contains(&at) { 0 } else { share }).collect();
            assert_eq!(firsts[..], fair, "{gone:?} are gone");
        }
    }

    #[test]
    fn a_template_is_forgotten_with_its_run_and_no_later() {
        let (pool, _) = engines(1);
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
