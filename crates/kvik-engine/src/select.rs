//! Which transport a transfer takes.
//!
//! The engine's transports are asked in the order of its preference. The first that can serve the request is taken;
//! while one that comes before it is still opening, the transfer waits for that. Every transport that is not taken
//! has its reason, so that nothing is substituted in silence.

use crate::config::Preference;
use kvik_core::{Code, Error};
use kvik_transport::{Answer, Estimate, TransportId};
use std::fmt;
use std::sync::Arc;

/// A transport that was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    /// Which one.
    pub transport: TransportId,
    /// Why.
    pub reason: Reason,
}

/// Why a transport was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// Another one was asked for by name.
    NotAsked(Preference),
    /// This one serves the request too, and is preferred.
    Preferred(TransportId),
    /// It cannot serve the request.
    Unavailable(Arc<str>),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::NotAsked(wanted) => write!(f, "transport {:?} was asked for", wanted.name()),
            Reason::Preferred(other) => write!(f, "{other} reaches the peer too, and is preferred"),
            Reason::Unavailable(why) => f.write_str(why),
        }
    }
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.transport, self.reason)
    }
}

/// What came of asking all transports.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Selection {
    /// This one, by its place in the list.
    Taken {
        place: usize,
        estimate: Option<Estimate>,
        /// Every other one.
        rejected: Vec<Rejected>,
    },
    /// One of them is opening.
    Wait,
    /// None can.
    None(Error),
}

/// Takes one of the transports, given what each has said. `refused` are those that an owner has turned down for this
/// very transfer, whatever they say of themselves.
pub(crate) fn select(
    wanted: Preference,
    refused: &[Rejected],
    answers: impl Iterator<Item = (TransportId, Answer)>,
) -> Selection {
    let mut taken: Option<(usize, TransportId, Option<Estimate>)> = None;
    let mut rejected = Vec::new();
    for (place, (transport, answer)) in answers.enumerate() {
        let before = refused.iter().find(|before| before.transport == transport);
        let reason = match (before, answer, taken) {
            (Some(before), _, _) => before.reason.clone(),
            _ if !wanted.allows(transport) => Reason::NotAsked(wanted),
            (None, Answer::No(why), _) => Reason::Unavailable(why),
            (None, Answer::Ready(_) | Answer::Opening, Some((_, first, _))) => Reason::Preferred(first),
            (None, Answer::Opening, None) => return Selection::Wait,
            (None, Answer::Ready(estimate), None) => {
                taken = Some((place, transport, estimate));
                continue;
            }
        };
        rejected.push(Rejected { transport, reason });
    }
    match taken {
        Some((place, _, estimate)) => Selection::Taken { place, estimate, rejected },
        None => Selection::None(none(wanted, &rejected)),
    }
}

/// The error where none of the transports that were asked for can serve the request.
fn none(wanted: Preference, rejected: &[Rejected]) -> Error {
    let asked = rejected.iter().filter(|rejected| wanted.allows(rejected.transport));
    let mut why: Vec<String> = asked.map(|rejected| rejected.reason.to_string()).collect();
    if why.is_empty() {
        why.push(wanted.missing().to_owned());
    }
    let text =
        format!("transport {:?} cannot be used: {}; use \"auto\" or \"tcp\"", wanted.name(), why.join("; "));
    Error::new(Code::TransportUnavailable, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const LOCAL: TransportId = TransportId::Local;
    const VERBS: TransportId = TransportId::Verbs;
    const TCP: TransportId = TransportId::Tcp;

    fn ready(micros: u64) -> Answer {
        let total = Duration::from_micros(micros);
        Answer::Ready(Some(Estimate { start: total, total, bytes_per_second: 1.0, queued: 0, samples: 1 }))
    }

    fn no(why: &str) -> Answer {
        Answer::No(why.into())
    }

    fn run(wanted: Preference, refused: &[Rejected], answers: [Answer; 3]) -> Selection {
        select(wanted, refused, [LOCAL, VERBS, TCP].into_iter().zip(answers))
    }

    /// What was taken, and why the others were not.
    fn taken(selection: Selection) -> (usize, Option<Duration>, Vec<String>) {
        let Selection::Taken { place, estimate, rejected } = selection else { panic!("{selection:?}") };
        let rejected = rejected.iter().map(Rejected::to_string).collect();
        (place, estimate.map(|estimate| estimate.total), rejected)
    }

    #[test]
    fn auto_takes_the_first_that_can_and_says_why_not_each_other_one() {
        let none = [no("a"), no("b"), ready(3)];
        let all = [ready(1), ready(2), ready(3)];
        let after =
            |other: &str, first: &str| format!("{other}: {first} reaches the peer too, and is preferred");
        let time = |micros| Some(Duration::from_micros(micros));
        assert_eq!(
            taken(run(Preference::Auto, &[], none)),
            (2, time(3), vec!["local: a".into(), "verbs: b".into()])
        );
        let told = vec![after("verbs", "local"), after("tcp", "local")];
        assert_eq!(taken(run(Preference::Auto, &[], all)), (0, time(1), told));
        let told = vec!["local: a".into(), after("tcp", "verbs")];
        assert_eq!(
            taken(run(Preference::Auto, &[], [no("a"), Answer::Ready(None), ready(3)])),
            (1, None, told)
        );
    }

    #[test]
    fn one_that_is_opening_is_waited_for_unless_a_better_one_is_there() {
        let opening = [Answer::Opening, ready(2), ready(3)];
        assert_eq!(run(Preference::Auto, &[], opening.clone()), Selection::Wait);
        assert_eq!(taken(run(Preference::Tcp, &[], opening)).0, 2);
        assert_eq!(taken(run(Preference::Auto, &[], [ready(1), Answer::Opening, ready(3)])).0, 0);
    }

    #[test]
    fn who_is_asked_for_by_name_is_taken_or_nobody() {
        let all = || [ready(1), ready(2), ready(3)];
        for (wanted, place) in [(Preference::Local, 0), (Preference::Nics, 1), (Preference::Tcp, 2)] {
            let (took, _, rejected) = taken(run(wanted, &[], all()));
            assert_eq!((took, rejected.len()), (place, 2));
            assert!(rejected.iter().all(|why| why.ends_with("was asked for")), "{rejected:?}");
        }
        let Selection::None(error) = run(Preference::Nics, &[], [ready(1), no("its port is down"), ready(3)])
        else {
            panic!("another one was taken");
        };
        assert_eq!(error.code, Code::TransportUnavailable);
        assert!(error.text.contains("\"nics\"") && error.text.contains("its port is down"), "{error}");
        let without = select(Preference::Nics, &[], [(LOCAL, ready(1)), (TCP, ready(2))].into_iter());
        assert!(matches!(without, Selection::None(error) if error.text.contains("KVIK_NICS")));
    }

    #[test]
    fn one_that_was_refused_is_not_taken_again_and_its_reason_stays() {
        let refused = Rejected { transport: LOCAL, reason: Reason::Unavailable("the owner says no".into()) };
        let told =
            taken(run(Preference::Auto, std::slice::from_ref(&refused), [ready(1), no("b"), ready(3)]));
        assert_eq!((told.0, told.2), (2, vec!["local: the owner says no".into(), "verbs: b".into()]));
        let again = run(Preference::Local, &[refused], [Answer::Opening, ready(2), ready(3)]);
        assert!(matches!(again, Selection::None(error) if error.text.contains("the owner says no")));
    }
}
