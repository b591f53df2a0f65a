//! Replay of traces: their format, the definition of a hit, the optimum, and the selector beside fixed policies.

use kvik_store::policy::PolicyKind;
use kvik_store::replay::{Trace, Workload, compare, generate, optimum, parse_capacities, replay};
use std::collections::BTreeSet;

fn trace(requests: &[&[u64]]) -> Trace {
    let mut trace = Trace::default();
    requests.iter().for_each(|blocks| trace.push(0, 0, 0, blocks).unwrap());
    trace
}

fn parse(text: &str) -> Result<Trace, String> {
    Trace::parse(text.as_bytes()).map_err(|error| error.to_string())
}

#[test]
fn lines_of_json_are_requests() {
    let text = "\n{\"timestamp\": 27, \"input_length\": 900, \"output_length\": 52, \"hash_ids\": [46, 47], \"x\": 1}\r\n\
                {\"hash_ids\":[46,9],\"timestamp\":30.5,\"input_length\":1,\"output_length\":2}";
    let trace = parse(text).unwrap();
    let requests: Vec<_> =
        trace.requests().map(|(request, blocks)| (request.timestamp_ms, blocks.to_vec())).collect();
    assert_eq!(requests, [(27, vec![0, 1]), (30, vec![0, 2])]);
    let (first, _) = trace.requests().next().unwrap();
    assert_eq!((first.input_tokens, first.output_tokens), (900, 52));
    assert_eq!((trace.references(), trace.blocks(), trace.broken_chains()), (4, 3, 0));
    assert_eq!([0, 1, 2, 3].map(|block| trace.name(block)), [Some(46), Some(47), Some(9), None]);
}

#[test]
fn a_bad_line_is_named_with_its_number() {
    let good = "{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1]}\n";
    for (bad, says) in [
        ("{\"timestamp\": 1", "EOF"),
        ("[]", "invalid"),
        ("{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1}", "hash_ids"),
        ("{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [-1]}", "-1"),
        ("{\"timestamp\": -1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": []}", "at least 0"),
        ("{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": []} x", "trailing"),
        ("\u{0}\u{1}", "expected value"),
    ] {
        let error = parse(&format!("{good}\n{bad}\n{good}")).unwrap_err();
        assert!(error.contains("line 3") && error.contains(says), "{bad}: {error}");
    }
    let long = format!("{good}{}", " ".repeat((16 << 20) + 1));
    assert!(parse(&long).unwrap_err().contains("line 2 has more than"));
    assert!(Trace::parse(&b"\xff\xfe\n"[..]).unwrap_err().to_string().contains("line 1"));
    let error = Trace::read("/nowhere/trace.jsonl".as_ref()).unwrap_err().to_string();
    assert!(error.contains("/nowhere/trace.jsonl"), "{error}");
}

#[test]
fn a_hit_is_one_of_the_leading_run() {
    // 1, 2, 3 are there, but only the first two are a prefix of the second request; nothing of the third one is.
    let trace = trace(&[&[1, 2, 3], &[1, 2, 4, 3], &[5, 1, 2]]);
    for kind in PolicyKind::ALL {
        let outcome = replay(&trace, kind, 100).unwrap();
        assert_eq!((outcome.references, outcome.hits, outcome.inserted), (10, 2, 5), "{}", kind.name());
        assert_eq!((outcome.refused, outcome.evicted), (0, 0));
    }
    // The first block of a request is the newest: of 1, 2, 3 the last one makes room.
    let trace = self::trace(&[&[1, 2, 3], &[9], &[1, 2, 3]]);
    assert_eq!(replay(&trace, PolicyKind::Lru, 3).unwrap().hits, 2);
    assert!(replay(&trace, PolicyKind::Lru, 0).unwrap_err().to_string().contains("not for 0"));
}

/// The most hits, by trying every set of blocks that may stay after every request.
fn most_hits(requests: &[Vec<u32>], stays: &BTreeSet<u32>, capacity: usize) -> u64 {
    let Some((request, later)) = requests.split_first() else { return 0 };
    let hits = request.iter().take_while(|block| stays.contains(block)).count() as u64;
    let all: Vec<u32> = stays.iter().chain(request).copied().collect::<BTreeSet<_>>().into_iter().collect();
    let subsets =
        (0u32..1 << all.len()).filter(|subset| subset.count_ones() as usize == capacity.min(all.len()));
    let best = subsets.map(|subset| {
        let stays =
            all.iter().enumerate().filter(|(at, _)| subset >> at & 1 == 1).map(|(_, block)| *block).collect();
        most_hits(later, &stays, capacity)
    });
    hits + best.max().unwrap_or(0)
}

#[test]
fn no_choice_of_blocks_has_more_hits_than_the_optimum() {
    let seed: u64 = std::env::var("KVIK_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(4);
    println!("KVIK_SEED={seed}");
    let mut draw = seed;
    let mut below = |bound: u64| {
        draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (draw >> 33) % bound
    };
    let mut hits = 0;
    for _ in 0..150 {
        // A tree: block n has two children.
        let mut trace = Trace::default();
        for _ in 0..6 {
            let (mut block, mut blocks) = (1, Vec::new());
            for _ in 0..1 + below(3) {
                block = 2 * block + below(2);
                blocks.push(block);
            }
            trace.push(0, 0, 0, &blocks).unwrap();
        }
        let requests: Vec<Vec<u32>> = trace.requests().map(|(_, blocks)| blocks.to_vec()).collect();
        for capacity in 1..=3 {
            let best = optimum(&trace, capacity);
            assert_eq!(
                best,
                most_hits(&requests, &BTreeSet::new(), capacity),
                "{requests:?}, room for {capacity}"
            );
            hits += best;
            for kind in PolicyKind::ALL {
                assert!(replay(&trace, kind, capacity).unwrap().hits <= best);
            }
        }
    }
    assert!(hits > 500, "{hits} hits: this tried nothing");
}

#[test]
fn generated_traces_repeat_and_are_what_they_are_called() {
    for workload in Workload::ALL {
        let trace = generate(workload, 3000, 1).unwrap();
        assert_eq!(trace, generate(workload, 3000, 1).unwrap());
        assert_ne!(trace, generate(workload, 3000, 2).unwrap());
        assert_eq!((trace.requests().len(), trace.broken_chains()), (3000, 0));
        let times: Vec<u64> = trace.requests().map(|(request, _)| request.timestamp_ms).collect();
        assert!(times.is_sorted(), "{}", workload.name());
        let reuse = 1.0 - trace.blocks() as f64 / trace.references() as f64;
        println!("{}: {:.2} of all references come again", workload.name(), reuse);
        let expected = match workload {
            Workload::OneOff => 0.05..0.3,
            Workload::Agents => 0.8..1.0,
            _ => 0.5..0.95,
        };
        assert!(expected.contains(&reuse), "{}: {reuse}", workload.name());
    }
}

/// The promise of the default: at most 3 % below the best fixed policy, on loads that it does not know.
#[test]
fn the_selector_is_never_far_below_the_best() {
    for workload in Workload::ALL {
        for row in compare(&generate(workload, 12_000, 21).unwrap(), &[1000, 10_000]).unwrap() {
            let (best, gap) = (row.best_fixed().name(), row.gap());
            println!("{} at {}: {:+.1} % to {best}", workload.name(), row.capacity, gap * 100.0);
            assert!(gap >= -0.03, "{} at {}: {gap} to {best}", workload.name(), row.capacity);
            assert!(row.outcomes.iter().all(|(_, outcome)| outcome.hits <= row.optimum));
        }
    }
}

/// A load under which one policy is best, and then one under which another one is: neither is the best of the whole.
#[test]
fn the_selector_changes_its_mind() {
    let mut both = Trace::default();
    for (workload, offset) in
        [(Workload::Conversations, 0), (Workload::OneOff, 1 << 40), (Workload::Conversations, 1 << 41)]
    {
        let part = generate(workload, 4000, 8).unwrap();
        for (_, blocks) in part.requests() {
            let ids: Vec<u64> = blocks.iter().map(|block| part.name(*block).unwrap() + offset).collect();
            both.push(0, 0, 0, &ids).unwrap();
        }
    }
    let row = &compare(&both, &[2500]).unwrap()[0];
    println!("{:+.1} % to {}", row.gap() * 100.0, row.best_fixed().name());
    assert!(row.gap() > 0.0, "{} to {}", row.gap(), row.best_fixed().name());
}

#[test]
fn capacities_are_numbers_of_blocks() {
    assert_eq!(parse_capacities("1k, 30k,500,2m").unwrap(), [1000, 30_000, 500, 2_000_000]);
    for text in ["", "0", "1k,", "k", "-1", "1g", "99999999999999999999", "18446744073709551615k"] {
        assert!(parse_capacities(text).unwrap_err().to_string().contains("1k,3k,500"), "{text}");
    }
}
