//! What goes when there is no room.

use crate::rig::*;
use kvik_store::policy::PolicyKind;
use kvik_store::{Namespace, Shape, Space, StoreOptions, TenantOptions};
use std::time::Duration;

/// Slots are whole pages of 4 KiB.
const SLOT: u64 = BLOCK.next_multiple_of(4096);

#[test]
fn the_capacity_is_kept_and_what_is_left_is_right() {
    let rig = Rig::new(1 << 20);
    for prompt in 0..60 {
        rig.put(&[prompt, prompt + 100, prompt + 200, prompt + 300]);
        assert!(rig.client.stat().unwrap().memory_taken <= 1 << 20);
    }
    let counts = rig.client.stat().unwrap();
    assert_eq!(counts.stored, 240);
    assert!(counts.evicted >= 240 - (1 << 20) / SLOT, "{counts:?}");
    let found: usize = (0..60).map(|p| rig.get(&[p, p + 100, p + 200, p + 300])).sum();
    assert_eq!(found as u64, rig.client.stat().unwrap().blocks);
    assert!(found > 60, "{found}");
    // The last prompt is there as a whole.
    assert_eq!(rig.get(&[59, 159, 259, 359]), 4);
}

#[test]
fn what_is_pinned_stays_until_it_is_let_go_of() {
    // With this policy whatever was not used for long goes.
    let options = StoreOptions { memory: 1 << 20, policy: PolicyKind::Lru, ..StoreOptions::default() };
    let rig = Rig::with(options);
    rig.put(&[1, 2, 3]);
    assert_eq!(rig.space.pin(&rig.keys(&[1, 2, 3]), Duration::from_secs(600)).unwrap(), 3);
    for prompt in 10..200 {
        rig.put(&[prompt]);
    }
    assert_eq!(rig.get(&[1, 2, 3]), 3);
    // Not more than half of the memory is kept.
    let many: Vec<u32> = (1000..1000 + 60).collect();
    put(&rig.space, &Pages::new(&rig.engine, 64, shape()), None, &rig.keys(&many[..44]));
    let kept = rig.space.pin(&rig.keys(&many[..44]), Duration::from_secs(600)).unwrap();
    assert!(kept < 44 && kept > 30, "{kept}");
    assert_eq!(rig.space.pin(&rig.keys(&many[..44]), Duration::ZERO).unwrap(), 44);
    // A pin is never shortened by another one, only let go of.
    assert_eq!(rig.space.pin(&rig.keys(&[1, 2, 3]), Duration::ZERO).unwrap(), 3);
    assert_eq!(rig.space.pin(&rig.keys(&[1, 2, 3]), Duration::from_millis(900)).unwrap(), 3);
    let until = std::time::Instant::now() + Duration::from_secs(60);
    let mut prompt = 2000;
    while rig.space.contains(&rig.keys(&[1, 2, 3])).unwrap() == [true; 3] {
        assert!(std::time::Instant::now() < until, "it is kept for ever");
        (0..100).for_each(|_| {
            prompt += 1;
            rig.put(&[prompt]);
        });
    }
}

#[test]
fn blocks_of_another_shape_get_room() {
    let rig = Rig::new(1 << 20);
    for prompt in 0..100 {
        rig.put(&[prompt]);
    }
    let wide = Shape::new(LAYERS, SLICES, 3 * RUN).unwrap();
    let other = namespace("wide");
    let (space, pages) = (rig.client.open("one", &other, wide).unwrap(), Pages::new(&rig.engine, 64, wide));
    for prompt in 0..100 {
        // What was read is let go of a moment later, and keeps its slab from going until then.
        becomes(|| put(&space, &pages, None, &keys(&other, &[prompt])).refused == 0);
        assert_eq!(get(&space, &pages, &keys(&other, &[prompt])), 1);
        becomes(|| rig.put(&[prompt, 7]).refused == 0);
    }
    assert!(rig.client.stat().unwrap().memory_taken <= 1 << 20);
}

#[test]
fn blocks_of_another_shape_drive_out_few_where_they_get_no_room() {
    let rig =
        Rig::with(StoreOptions { memory: 16 << 20, policy: PolicyKind::Lru, ..StoreOptions::default() });
    let mut count = 0;
    while rig.client.stat().unwrap().evicted == 0 {
        rig.put(&[count]);
        count += 1;
    }
    // Of those that were put one after the other, which lie together, some are to stay.
    for prompt in (1..count).step_by(5) {
        assert_eq!(rig.space.pin(&rig.keys(&[prompt]), Duration::from_secs(600)).unwrap(), 1);
    }
    let (space, pages, of) = of_shape(&rig, "one", 3);
    let before = rig.client.stat().unwrap().blocks;
    assert_eq!(put(&space, &pages, None, &keys(&of, &[1])).refused, 1);
    let after = rig.client.stat().unwrap().blocks;
    assert!(after > before * 9 / 10, "{after} blocks of {before} are left");
}

#[test]
fn a_tenant_has_no_more_than_its_quota_and_takes_from_itself() {
    let quota = 10 * BLOCK;
    let tenants = vec![TenantOptions { name: "small".into(), quota: Some(quota), apart: true }];
    let rig = Rig::with(StoreOptions { memory: 1 << 20, tenants, ..StoreOptions::default() });
    rig.put(&[1, 2, 3, 4, 5]);
    let mine = namespace("small");
    let space = rig.client.open("small", &mine, shape()).unwrap();
    for prompt in 0..50 {
        assert_eq!(put(&space, &rig.pages, None, &keys(&mine, &[prompt])).stored, 1);
    }
    let here: usize = (0..50).map(|prompt| get(&space, &rig.pages, &keys(&mine, &[prompt]))).sum();
    assert_eq!(here, 10);
    assert_eq!(rig.get(&[1, 2, 3, 4, 5]), 5);
}

/// A store in which whatever was not used for long goes.
fn with_quotas(memory: u64, quotas: &[(&str, u64)]) -> Rig {
    let tenant = |(name, quota): &(&str, u64)| TenantOptions {
        name: (*name).into(),
        quota: Some(*quota),
        apart: false,
    };
    let (tenants, policy) = (quotas.iter().map(tenant).collect(), PolicyKind::Lru);
    Rig::with(StoreOptions { memory, tenants, policy, ..StoreOptions::default() })
}

/// Puts 200 blocks, more than the memory has room for.
fn fill(rig: &Rig, space: &Space, namespace: &Namespace, first: u32) {
    for prompt in first..first + 200 {
        put(space, &rig.pages, None, &keys(namespace, &[prompt]));
    }
}

#[test]
fn a_tenant_within_its_quota_makes_no_room_for_others() {
    let quota = 3 << 18;
    let rig = with_quotas(1 << 20, &[("large", quota)]);
    let mine = namespace("large");
    let space = rig.client.open("large", &mine, shape()).unwrap();
    let count = (quota / BLOCK) as u32;
    for prompt in 0..count {
        assert_eq!(put(&space, &rig.pages, None, &keys(&mine, &[prompt])).stored, 1);
    }
    // It has its quota also of a memory that others have filled.
    space.clear().unwrap();
    for turn in 0..2 {
        fill(&rig, &rig.space, &rig.namespace, 1000 * turn);
        for prompt in 0..count {
            assert_eq!(put(&space, &rig.pages, None, &keys(&mine, &[prompt])).refused, 0);
        }
    }
    fill(&rig, &rig.space, &rig.namespace, 5000);
    let here = (0..count).filter(|prompt| get(&space, &rig.pages, &keys(&mine, &[*prompt])) == 1).count();
    assert_eq!(here as u32, count);
    // The others have what is left.
    assert!(rig.client.stat().unwrap().blocks > u64::from(count));
}

/// Blocks of this many times the bytes, as a tenant of this name.
fn of_shape(rig: &Rig, tenant: &str, times: u64) -> (Space, Pages, Namespace) {
    let (of, shape) =
        (namespace(&format!("{tenant} {times}")), Shape::new(LAYERS, SLICES, times * RUN).unwrap());
    (rig.client.open(tenant, &of, shape).unwrap(), Pages::new(&rig.engine, 4, shape), of)
}

/// Puts blocks of two shapes in turn, as a tenant of this name.
fn put_two_shapes(rig: &Rig, tenant: &str) {
    let spaces = [1, 3].map(|times| of_shape(rig, tenant, times));
    for prompt in 0..100 {
        for (space, pages, of) in &spaces {
            for more in 0..5 {
                let keys = keys(of, &[5 * prompt + more]);
                // What is being written holds its slab for a moment.
                becomes(|| put(space, pages, None, &keys).refused == 0);
            }
        }
    }
}

#[test]
fn a_tenant_within_its_quota_makes_no_room_for_other_shapes() {
    let quota = 3 << 17;
    let rig = with_quotas(1 << 20, &[("steady", quota), ("changing", quota)]);
    let mine = namespace("steady");
    let space = rig.client.open("steady", &mine, shape()).unwrap();
    // Others' blocks are among the first ones that come.
    rig.put(&[1]);
    let count = (quota / BLOCK) as u32;
    for prompt in 0..count {
        assert_eq!(put(&space, &rig.pages, None, &keys(&mine, &[prompt])).stored, 1);
        rig.put(&[1000 + prompt]);
    }
    for tenant in ["anybody", "changing", "anybody"] {
        put_two_shapes(&rig, tenant);
        let here = (0..count).filter(|prompt| space.contains(&keys(&mine, &[*prompt])).unwrap() == [true]);
        assert_eq!(here.count() as u32, count, "beside {tenant}");
    }
}

/// Puts these prompts of each shape in turn: all are taken, and are there then.
fn put_of_each(spaces: &[(Space, Pages, Namespace)], prompts: std::ops::Range<u32>) {
    for prompt in prompts.clone() {
        for (at, (space, pages, of)) in spaces.iter().enumerate() {
            assert_eq!(put(space, pages, None, &keys(of, &[prompt])).stored, 1, "{prompt} of shape {at}");
        }
    }
    for (at, (space, _, of)) in spaces.iter().enumerate() {
        let here = prompts.clone().filter(|prompt| space.contains(&keys(of, &[*prompt])).unwrap() == [true]);
        assert_eq!(here.count(), prompts.len(), "of shape {at}");
    }
}

#[test]
fn a_quota_has_room_for_several_shapes() {
    let rig = with_quotas(16 << 20, &[("two", 1 << 20), ("six", 4 << 20)]);
    let two = [1, 3].map(|times| of_shape(&rig, "two", times));
    let (first, pages, of) = &two[0];
    assert_eq!(put(first, pages, None, &keys(of, &[0])).stored, 1);
    // What is kept does not keep another shape out.
    assert_eq!(first.pin(&keys(of, &[0]), Duration::from_secs(600)).unwrap(), 1);
    put_of_each(&two, 1..4);
    assert_eq!(first.contains(&keys(of, &[0])).unwrap(), [true]);
    // Together they take two thirds of it.
    put_of_each(&[1, 2, 3, 4, 5, 6].map(|times| of_shape(&rig, "six", times)), 0..10);
}

#[test]
fn who_uses_little_of_a_large_quota_takes_no_room_of_others() {
    let names: Vec<String> = (0..20).map(|number| format!("tenant {number}")).collect();
    let quotas: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 2 << 20)).collect();
    let rig = with_quotas(16 << 20, &quotas);
    let all: Vec<_> = names.iter().map(|name| of_shape(&rig, name, 1)).collect();
    put_of_each(&all, 0..2);
    assert_eq!(rig.put(&[1]).stored, 1);
    put_of_each(&all, 2..4);
    assert_eq!(rig.get(&[1]), 1);
}

#[test]
fn a_block_that_has_no_room_even_alone_drives_out_nobody() {
    let rig = with_quotas(1 << 20, &[("small", 2 * BLOCK)]);
    assert_eq!(rig.put(&[1, 2, 3]).stored, 3);
    let (small, pages, of) = of_shape(&rig, "small", 1);
    assert_eq!(put(&small, &pages, None, &keys(&of, &[1])).stored, 1);
    for (tenant, times) in [("one", (1 << 20) / BLOCK + 1), ("small", 3)] {
        let (space, pages, of) = of_shape(&rig, tenant, times);
        assert_eq!(put(&space, &pages, None, &keys(&of, &[1])).refused, 1, "of {tenant}");
    }
    assert_eq!(rig.client.stat().unwrap().evicted, 0);
    assert_eq!((rig.get(&[1, 2, 3]), get(&small, &rig.pages, &keys(&of, &[1]))), (3, 1));
}

#[test]
fn quotas_of_more_than_the_memory_are_served_alike() {
    let rig = with_quotas(1 << 20, &[("first", 1 << 20), ("second", 1 << 20)]);
    let mut here = Vec::new();
    for name in ["first", "second"] {
        let mine = namespace(name);
        let space = rig.client.open(name, &mine, shape()).unwrap();
        fill(&rig, &space, &mine, 0);
        here.push((mine, space));
    }
    for (mine, space) in here {
        let count = (0..200).filter(|prompt| get(&space, &rig.pages, &keys(&mine, &[*prompt])) == 1).count();
        assert!(count >= 30, "{count}");
    }
}

#[test]
fn what_is_longer_than_the_memory_is_kept_as_far_as_it_goes() {
    let rig = Rig::new(1 << 20);
    let pages = Pages::new(&rig.engine, 300, shape());
    let prompt: Vec<u32> = (0..200).collect();
    let stored = put(&rig.space, &pages, None, &rig.keys(&prompt));
    // Each comes after the one before, so none of them can go for the next.
    assert_eq!(stored.stored + stored.refused, 200);
    assert!(stored.stored > 60 && stored.refused > 100, "{stored:?}");
    assert_eq!(get(&rig.space, &pages, &rig.keys(&prompt)) as u64, stored.stored);
}
