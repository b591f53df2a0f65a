//! Many threads that put, get and remove at once: nobody reads another block than he asked for.

use crate::rig::*;
use kvik_core::Code;
use kvik_store::Ack;

#[test]
fn many_at_once_read_what_was_put_or_nothing() {
    let rig = Rig::new(1 << 20);
    let seed = Random::new().next();
    let hits: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6)
            .map(|thread| {
                let rig = &rig;
                scope.spawn(move || {
                    let mut random = Random::with(seed ^ thread);
                    let pages = Pages::new(&rig.engine, 64, shape());
                    let mut hits = 0;
                    for _ in 0..200 {
                        let length = 1 + random.below(8) as usize;
                        let prompt: Vec<u32> =
                            (0..length).map(|at| (random.below(3) + 10 * at as u64) as u32).collect();
                        let keys = rig.keys(&prompt);
                        match random.below(10) {
                            0 => drop(rig.space.remove(&keys[length - 1..]).unwrap()),
                            1..4 => {
                                keys.iter().enumerate().for_each(|(page, key)| pages.fill(page as u32, key));
                                let ids: Vec<u32> = (0..length as u32).collect();
                                let set = pages.set(&ids);
                                rig.space.put(&keys, &set, Ack::Stored, None).unwrap().wait(None).unwrap();
                            }
                            _ => hits += get(&rig.space, &pages, &keys),
                        }
                    }
                    hits
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(hits > 200, "only {hits} blocks were read");
    let all = rig.client.stat().unwrap();
    assert_eq!(all.hits as usize, hits, "{all:?}");
    rig.space.clear().unwrap();
    rig.becomes_empty();
}

#[test]
fn a_closed_engine_ends_what_is_asked() {
    let rig = Rig::new(1 << 20);
    rig.put(&[1]);
    rig.engine.close(std::time::Duration::from_secs(60)).unwrap();
    let error = rig.space.put(&rig.keys(&[2]), &rig.pages.set(&[0]), Ack::Stored, None).err().unwrap();
    assert_eq!(error.code, Code::EngineClosed);
}
