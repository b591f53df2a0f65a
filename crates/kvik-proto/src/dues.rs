//! When each session wants to be looked at: what a timer asks, so that it need not look at all of them.

use crate::sync::{Mutex, Soonest, lock};
use std::collections::BTreeSet;
use std::time::Duration;

/// See the module's text. Its lock is taken inside a session's, when the session's time changes.
#[derive(Default)]
pub(crate) struct Dues {
    queue: Mutex<BTreeSet<(Duration, u64)>>,
    soonest: Soonest,
}

impl Dues {
    /// A session wanted to be looked at then, and does so at another time now, or not at all.
    pub fn change(&self, session: u64, from: Option<Duration>, to: Option<Duration>) {
        if from == to {
            return;
        }
        let mut queue = lock(&self.queue);
        if let Some(from) = from {
            queue.remove(&(from, session));
        }
        if let Some(to) = to {
            queue.insert((to, session));
        }
        self.soonest.set(queue.first().map(|(at, _)| *at));
    }

    /// The next time.
    pub fn soonest(&self) -> Option<Duration> {
        self.soonest.get()
    }

    /// A session whose time has come.
    pub fn overdue(&self, now: Duration) -> Option<u64> {
        lock(&self.queue).first().filter(|(at, _)| *at <= now).map(|(_, session)| *session)
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn each_session_has_one_time_and_it_may_come_sooner() {
        let (dues, at) = (Dues::default(), |second| Some(Duration::from_secs(second)));
        dues.change(1, None, at(5));
        dues.change(2, None, at(4));
        dues.change(1, at(5), at(3));
        assert_eq!((dues.soonest(), dues.overdue(Duration::from_secs(3))), (at(3), Some(1)));
        dues.change(1, at(3), at(9));
        assert_eq!((dues.soonest(), dues.overdue(Duration::from_secs(3))), (at(4), None));
        dues.change(2, at(4), None);
        assert_eq!(dues.soonest(), at(9));
        dues.change(1, at(9), None);
        assert_eq!(dues.soonest(), None);
    }
}
