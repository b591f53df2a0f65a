//! Puts and gets, one after the other.

use crate::rig::*;
use kvik_core::Code;
use kvik_store::{Ack, BlockKey, Shape, Stored};
use std::time::Duration;

fn stored(stored: u64, known: u64, refused: u64) -> Stored {
    Stored { stored, known, refused }
}

#[test]
fn what_was_put_comes_back_up_to_the_first_that_is_missing() {
    let rig = Rig::new(1 << 20);
    assert_eq!(rig.get(&[1, 2, 3]), 0);
    assert_eq!(rig.put(&[1, 2, 3, 4, 5]), stored(5, 0, 0));
    assert_eq!(rig.get(&[1, 2, 3, 4, 5]), 5);
    assert_eq!(rig.get(&[1, 2, 3, 7, 5]), 3);
    assert_eq!(rig.get(&[2, 1]), 0);
    assert_eq!(rig.put(&[1, 2, 3, 8]), stored(1, 3, 0));
    assert_eq!(rig.get(&[1, 2, 3, 8]), 4);
    assert_eq!(rig.space.contains(&rig.keys(&[1, 2, 9])).unwrap(), [true, true, false]);
    assert_eq!(rig.client.stat().unwrap().blocks, 6);
}

#[test]
fn a_put_goes_on_where_another_one_ended() {
    let rig = Rig::new(1 << 20);
    let keys = rig.keys(&[1, 2, 3, 4]);
    assert_eq!(put(&rig.space, &rig.pages, Some(keys[1]), &keys[2..]), stored(0, 0, 2));
    assert_eq!(put(&rig.space, &rig.pages, None, &keys[..2]), stored(2, 0, 0));
    assert_eq!(put(&rig.space, &rig.pages, Some(keys[1]), &keys[2..]), stored(2, 0, 0));
    assert_eq!(rig.get(&[1, 2, 3, 4]), 4);
    assert_eq!(rig.client.stat().unwrap().refused_orphan, 2);
}

#[test]
fn an_accepted_put_is_stored_in_the_end() {
    let rig = Rig::new(1 << 20);
    let keys = rig.keys(&[1, 2]);
    keys.iter().enumerate().for_each(|(page, key)| rig.pages.fill(page as u32, key));
    let mut putting = rig.space.put(&keys, &rig.pages.set(&[0, 1]), Ack::Accepted, None).unwrap();
    assert_eq!(putting.acknowledged(None).unwrap(), None);
    assert_eq!(putting.wait(None).unwrap(), stored(2, 0, 0));
    assert_eq!(rig.get(&[1, 2]), 2);
    let refused = rig.space.put(&keys, &rig.pages.set(&[0, 1]), Ack::Durable, None).unwrap().wait(None);
    assert_eq!(refused.unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn what_is_removed_or_cleared_is_gone_with_all_that_came_after_it() {
    let rig = Rig::new(1 << 20);
    rig.put(&[1, 2, 3]);
    rig.put(&[1, 2, 4]);
    rig.put(&[5, 6]);
    assert_eq!(rig.space.remove(&rig.keys(&[1, 2])[1..]).unwrap(), 3);
    assert_eq!((rig.get(&[1, 2, 3]), rig.get(&[5, 6])), (1, 2));
    // Put again, it is there again.
    rig.put(&[1, 2, 4]);
    assert_eq!(rig.get(&[1, 2, 4]), 3);
    let other = rig.client.open("two", &namespace("other"), shape()).unwrap();
    put(&other, &rig.pages, None, &keys(&namespace("other"), &[1]));
    assert_eq!(rig.space.clear().unwrap(), 5);
    assert_eq!(rig.client.stat().unwrap().blocks, 1);
    assert_eq!(rig.client.clear_tenant("two").unwrap(), 1);
    assert_eq!(rig.client.clear_tenant("nobody").unwrap(), 0);
    rig.becomes_empty();
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let rig = Rig::new(1 << 20);
    let keys = rig.keys(&[1, 2]);
    let code = |result: kvik_core::Result<kvik_store::Putting>| result.err().map(|error| error.code);
    let put =
        |keys: &[BlockKey], pages: &[u32]| rig.space.put(keys, &rig.pages.set(pages), Ack::Stored, None);
    assert_eq!(code(put(&keys, &[0])), Some(Code::InvalidArgument));
    assert_eq!(code(put(&[], &[0])), Some(Code::InvalidArgument));
    let wider = Pages::new(&rig.engine, 4, Shape::new(LAYERS, SLICES, 2 * RUN).unwrap());
    let refused = rig.space.put(&keys[..1], &wider.set(&[0]), Ack::Stored, None);
    assert_eq!(code(refused), Some(Code::ShapeMismatch));
    // The same namespace with another shape, or of another tenant.
    let wide = Shape::new(LAYERS, SLICES, 2 * RUN).unwrap();
    let open = |tenant, shape| rig.client.open(tenant, &rig.namespace, shape).err().map(|error| error.code);
    assert_eq!(open("one", wide), Some(Code::ShapeMismatch));
    assert_eq!(open("two", shape()), Some(Code::InvalidArgument));
    assert_eq!(open("", shape()), Some(Code::InvalidArgument).filter(|_| true));
    assert_eq!(open("one", shape()), None);
}

#[test]
fn nothing_is_lent_for_longer_than_its_grant() {
    let rig = Rig::new(1 << 20);
    rig.put(&[1, 2]);
    // A client that asks and never reads.
    let keys = rig.keys(&[1, 2]);
    let getting = rig.space.get(&keys, &rig.pages.set(&[0, 1]), Some(Duration::from_millis(200))).unwrap();
    drop(getting);
    rig.space.remove(&keys).unwrap();
    rig.becomes_empty();
}
