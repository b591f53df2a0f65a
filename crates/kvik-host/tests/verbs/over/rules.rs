//! Rules of libibverbs that the stand-in ends a process for, and what it refuses.

use crate::standin::Standin;

#[test]
fn states_bounds_and_queues_are_those_of_the_specification() {
    for rule in ["states", "bounds", "reads", "errors", "overflow"] {
        let (signal, text) = Standin::Verbs.broken(rule);
        assert_eq!(signal, None, "{rule}: {text}");
    }
}

#[test]
fn what_would_be_undefined_ends_the_process() {
    let ends = |rule, words: &[&str]| Standin::Verbs.ends(rule, words);
    ends("memory", &["deregistered while 1 own requests"]);
    ends("event", &["completion queue", "1 events that were not acknowledged"]);
    ends("device", &["closed before 3 things"]);
    ends("list", &["the list that it was in is freed"]);
}
