//! The stand-in for libibverbs (`tests/standins/verbs`): the tests of devices over it, each in a process of its own,
//! and what only a device does that obeys.

mod faults;
mod processes;
mod rules;

use super::standin::{Control, Standin};
use super::{device, failing, moving};

/// The two sides are on a device each.
const DEVICES: [(&str, &str); 2] =
    [("KVIK_TEST_VERBS", "roce0,roce1"), ("KVIK_TEST_VERBS_ALONE", "a process of its own")];

/// `test` is the whole path of the test that calls.
fn alone(test: &str, settings: &[(&str, &str)], body: impl FnOnce(Control)) {
    let name = test.split_once("::").map_or(test, |(_, name)| name);
    Standin::Verbs.alone(name, &[&DEVICES, settings].concat(), body);
}

/// Tests with the devices of the stand-in.
macro_rules! over {
    ($(fn $name:ident($control:ident) $body:block)*) => {
        $(#[test]
        fn $name() {
            crate::over::alone(concat!(module_path!(), "::", stringify!($name)), &[], |mut $control| $body);
        })*
    };
}
use over;

macro_rules! again {
    ($($file:ident::$name:ident)*) => { over! { $(fn $name(_control) { $file::$name(); })* } };
}

again! {
    device::a_port_says_what_it_is
    device::any_gid_of_the_table_can_be_named
    device::a_descriptor_tells_of_completions
    device::a_hundred_connections_leave_nothing_behind
    failing::a_wrong_key_is_an_error_by_name_and_the_rest_is_flushed
    failing::a_target_that_fails_its_queue_pair_gets_no_byte_more
    failing::an_initiator_that_fails_its_queue_pair_gets_back_all
    failing::reads_of_a_drained_queue_pair_touch_memory_no_more
    failing::a_peer_that_is_gone_is_an_error_in_time
    failing::a_queue_pair_that_is_dropped_gives_back_its_requests
    moving::scattered_pages_are_written_and_read
    moving::there_is_never_more_in_flight_than_the_depth
    moving::every_token_comes_back_in_order_though_few_requests_ask
    moving::what_no_device_should_see_is_not_posted
    moving::completions_of_queue_pairs_that_share_a_device_are_told_apart
}

over! {
    fn a_port_that_loses_its_link_is_an_event(control) {
        device::loses_its_link("roce1", |_, state| drop(control.say(&format!("{state} device=1"))));
    }
}

#[test]
fn a_small_device_is_no_other() {
    let small = [("KVIK_STANDIN_DEPTH", "17"), ("KVIK_STANDIN_PIECES", "4")];
    alone(concat!(module_path!(), "::a_small_device_is_no_other"), &small, |_| {
        moving::scattered_pages_are_written_and_read();
        moving::there_is_never_more_in_flight_than_the_depth();
    });
}
