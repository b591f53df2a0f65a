//! When each session wants to be looked at: what a timer asks, so that it need not look at all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// See the module's text.
#[derive(Default)]
pub(crate) struct Dues {
    order: BTreeSet<(Duration, u64)>,
    of: BTreeMap<u64, Duration>,
}

impl Dues {
    /// A session wants to be looked at then, or not at all.
    pub fn set(&mut self, session: u64, due: Option<Duration>) {
        if self.of.get(&session).copied() == due {
            return;
        }
        if let Some(old) = self.of.remove(&session) {
            self.order.remove(&(old, session));
        }
        if let Some(due) = due {
            self.of.insert(session, due);
            self.order.insert((due, session));
        }
    }

    /// The next time, and whose it is.
    pub fn first(&self) -> Option<(Duration, u64)> {
        self.order.first().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_session_has_one_time_and_it_may_come_sooner() {
        let (mut dues, at) = (Dues::default(), Duration::from_secs);
        dues.set(1, Some(at(5)));
        dues.set(2, Some(at(4)));
        dues.set(1, Some(at(3)));
        assert_eq!(dues.first(), Some((at(3), 1)));
        dues.set(1, Some(at(9)));
        assert_eq!(dues.first(), Some((at(4), 2)));
        dues.set(2, None);
        assert_eq!(dues.first(), Some((at(9), 1)));
        dues.set(1, None);
        assert_eq!(dues.first(), None);
    }
}
