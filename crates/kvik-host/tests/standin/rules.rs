//! Rules of libfabric that the stand-in ends a process for.

use crate::standin::Standin;

fn broken(rule: &str) -> (Option<i32>, String) {
    Standin::Fabric.broken(rule)
}

fn ends(rule: &str, words: &[&str]) {
    Standin::Fabric.ends(rule, words);
}

#[test]
fn who_keeps_the_rules_is_let_be() {
    let (signal, text) = broken("none");
    assert_eq!(signal, None, "{text}");
    assert!(!text.contains("broken"), "{text}");
}

#[test]
fn two_threads_in_one_domain_end_the_process() {
    ends("threads", &["fi_cq_read", "FI_THREAD_DOMAIN", "of the same domain"]);
}

#[test]
fn memory_and_peers_in_use_may_not_be_taken_away() {
    ends("memory", &["deregistered while 1 own operations"]);
    ends("peer", &["removed while 1 own operations"]);
}

#[test]
fn what_others_need_may_not_be_closed() {
    ends("queue", &["completion queue", "before an endpoint"]);
    ends("vector", &["address vector", "1 endpoints"]);
    ends("domain", &["1 address vectors, 1 completion queues, 1 endpoints and 1 registrations"]);
    ends("fabric", &["before 1 of its domains"]);
}

#[test]
fn an_endpoint_that_may_use_shared_memory_ends_the_process() {
    ends("shared", &["shared memory"]);
}

#[test]
fn an_endpoint_that_may_copy_memory_of_gpus_by_cuda_ends_the_process() {
    ends("copies", &["by CUDA", "stands still"]);
}
