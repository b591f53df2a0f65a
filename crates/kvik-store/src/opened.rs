//! What a client has said of namespaces, to say it again: to a store that was started anew, to a server that joins, and to one
//! that has forgotten a namespace for others.
//!
//! Invariant: what somebody still needs is said to every store that is met, before anybody takes that for up.

use crate::NamespaceId;
use crate::sync::lock;
use crate::wire::Request;
use std::sync::{Arc, Mutex};

/// See the module's text. Each request with how many need it. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Opened(Arc<Mutex<Vec<(Request, usize)>>>);

/// Somebody needs a namespace. Dropped, nobody is told of it any more.
pub(crate) struct Needed {
    opened: Opened,
    request: Request,
}

impl Opened {
    /// Has it said from now on.
    pub fn need(&self, request: &Request) -> Needed {
        let mut all = lock(&self.0);
        match all.iter_mut().find(|(said, _)| said == request) {
            Some((_, needed)) => *needed += 1,
            None => all.push((request.clone(), 1)),
        }
        Needed { opened: self.clone(), request: request.clone() }
    }

    /// What was said of a namespace.
    pub fn of(&self, id: &NamespaceId) -> Option<Request> {
        let is_of = |request: &Request| matches!(request, Request::Open { namespace, .. } if namespace == id);
        lock(&self.0).iter().find(|(request, _)| is_of(request)).map(|(request, _)| request.clone())
    }

    /// What was not said yet. Where there is nothing, `all_said` is done before anything else is needed.
    pub fn next(&self, said: &[Request], all_said: impl FnOnce()) -> Option<Request> {
        let all = lock(&self.0);
        let next =
            all.iter().find(|(request, _)| !said.contains(request)).map(|(request, _)| request.clone());
        if next.is_none() {
            all_said();
        }
        next
    }
}

impl Drop for Needed {
    fn drop(&mut self) {
        lock(&self.opened.0).retain_mut(|(request, needed)| {
            *needed -= usize::from(*request == self.request);
            *needed > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shape;

    #[test]
    fn what_nobody_needs_is_not_said() {
        let of = |number: u8| Request::Open {
            namespace: NamespaceId([number; 32]),
            shape: Shape::new(1, 1, 4096).unwrap(),
            tenant: "one".into(),
            model: String::new(),
        };
        let opened = Opened::default();
        let (one, same, other) = (opened.need(&of(1)), opened.need(&of(1)), opened.need(&of(2)));
        assert_eq!(opened.next(&[of(1)], || panic!("one was not said")), Some(of(2)));
        drop((one, other));
        assert_eq!((opened.of(&NamespaceId([1; 32])), opened.of(&NamespaceId([2; 32]))), (Some(of(1)), None));
        drop(same);
        let mut all = false;
        assert_eq!(opened.next(&[], || all = true), None);
        assert!(all && lock(&opened.0).is_empty());
    }
}
