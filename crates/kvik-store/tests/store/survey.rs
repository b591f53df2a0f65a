//! What all servers of a store hold: of those that answer, and by one deadline.

use crate::many::{Asking, Member, addresses, prompt};
use crate::watch;
use kvik_core::Code;
use kvik_store::{Chain, LogOptions, Looked, ServerSurvey, StoreOptions, Survey, SurveyOptions};
use std::time::Duration;

fn survey(asking: &Asking, copies: Option<usize>) -> Survey {
    asking.client.survey(&SurveyOptions { copies, ..SurveyOptions::default() }).unwrap()
}

fn sum(survey: &Survey, get: fn(&ServerSurvey) -> u64) -> u64 {
    survey.servers.iter().map(get).sum()
}

#[test]
fn what_several_servers_hold_is_counted_by_copy_and_place() {
    let members = [Member::start(), Member::start(), Member::start()];
    let mut all = addresses(&members.iter().collect::<Vec<_>>());
    all.sort();
    let (asking, one) = (Asking::of(&all, 2), Asking::of(&all[..1], 1));
    for first in 0..4 {
        assert_eq!(asking.put(Chain::from(&prompt(first * 1000)), None).unwrap().stored, 300);
    }
    let told = survey(&asking, None);
    assert_eq!((told.copies, told.sample, told.rows), (2, 1, 2400));
    let copies: Vec<u64> = told.by_copies.iter().map(|amount| amount.blocks).collect();
    assert_eq!(copies, [0, 0, 1200]);
    assert_eq!(told.by_copies[2].bytes, 1200 * crate::rig::BLOCK);
    // Four prompts of five segments each.
    assert_eq!((told.segments.count, told.segments.blocks, told.segments.largest), (20, 1200, 64));
    assert_eq!((told.namespaces.len(), told.namespaces[0].tenant.as_str()), (1, "one"));
    for (server, member) in told.servers.iter().zip(&all) {
        let held = members.iter().find(|one| one.address() == *member).unwrap().blocks();
        assert_eq!((&server.name, server.held.blocks, server.owed.blocks), (member, held, held));
        assert_eq!((&server.looked, server.version.is_empty()), (&Looked::Whole, false));
        assert!(server.metrics.as_ref().unwrap().contains("kvik_store_blocks"));
    }
    assert_eq!(sum(&told, |one| one.stray.blocks + one.lacking.blocks + one.lost.blocks), 0);
    // One whose list is another one puts its blocks where the others do not all look: of thirty segments, of which
    // each has two of three servers, it is as good as certain that some are not looked for on this one.
    for first in 0..6 {
        assert_eq!(one.put(Chain::from(&prompt(9000 + first * 1000)), None).unwrap().stored, 300);
    }
    let told = survey(&asking, Some(2));
    let copies: Vec<u64> = told.by_copies.iter().map(|amount| amount.blocks).collect();
    assert_eq!((copies.iter().sum::<u64>(), told.short.blocks), (3000, 1800));
    assert!(copies[0] > 0, "{copies:?}");
    assert_eq!(told.short_unseen.blocks, 0);
    assert_eq!(sum(&told, |one| one.lost.blocks), copies[1]);
    assert_eq!(sum(&told, |one| one.stray.blocks), copies[0]);
    assert_eq!(sum(&told, |one| one.lacking.blocks), 2 * copies[0] + copies[1]);
}

#[test]
fn what_is_in_its_log_comes_back_and_what_is_in_memory_does_not() {
    let folder = crate::rig::Folder::new("survey");
    let log = Some((folder.0.clone(), LogOptions::new(64 << 20)));
    let options = StoreOptions { memory: 64 << 20, log, ..StoreOptions::default() };
    let members = [Member::with(&options), Member::start()];
    let asking = Asking::of(&addresses(&members.iter().collect::<Vec<_>>()), 1);
    assert_eq!(asking.put(Chain::from(&prompt(0)), None).unwrap().stored, 300);
    let written = || members[0].server.counts().written == members[0].blocks();
    crate::rig::becomes(written);
    let told = survey(&asking, None);
    for (at, member) in members.iter().enumerate() {
        let server = told.servers.iter().find(|one| one.name == member.address()).unwrap();
        let held = member.blocks();
        assert_eq!(server.tiers[1].blocks, if at == 0 { held } else { 0 });
        let gone = (server.lost.blocks, server.away.blocks);
        assert_eq!(gone, if at == 0 { (0, held) } else { (held, 0) }, "{server:?}");
    }
}

#[test]
fn who_does_not_answer_costs_one_deadline_and_no_other_servers_blocks() {
    let members = [Member::start(), Member::start(), Member::start(), Member::start()];
    let asking = Asking::of(&addresses(&members.iter().collect::<Vec<_>>()), 2);
    assert_eq!(asking.put(Chain::from(&prompt(0)), None).unwrap().stored, 300);
    // Those that are asked first. Their engines go on: requests arrive, and nobody answers them.
    let mut silent: Vec<&Member> = members.iter().collect();
    silent.sort_by_key(|member| member.address());
    silent.truncate(2);
    silent.iter().for_each(|member| member.server.stop());
    let (deadline, began) = (Duration::from_secs(4), watch::start());
    let options = SurveyOptions { copies: Some(2), deadline, ..SurveyOptions::default() };
    let told = asking.client.survey(&options).unwrap();
    println!("it took {:?}", began.elapsed());
    assert!(began.elapsed() < deadline + Duration::from_secs(1), "it took {:?}", began.elapsed());
    for member in &members {
        let server = told.servers.iter().find(|one| one.name == member.address()).unwrap();
        match silent.iter().any(|one| one.address() == member.address()) {
            true => assert!(matches!(&server.looked, Looked::Down(_)), "{server:?}"),
            false => assert_eq!((&server.looked, server.held.blocks), (&Looked::Whole, member.blocks())),
        }
    }
    let seen: u64 = told.by_copies.iter().map(|amount| amount.blocks).sum();
    assert!(seen <= 300);
    assert_eq!(told.short, told.short_unseen, "only what may be at the silent ones is missing");
}

#[test]
fn a_sample_of_many_is_of_the_same_blocks_everywhere() {
    let members = [Member::start(), Member::start()];
    let asking = Asking::of(&addresses(&members.iter().collect::<Vec<_>>()), 2);
    for first in 0..8 {
        assert_eq!(asking.put(Chain::from(&prompt(first * 1000)), None).unwrap().stored, 300);
    }
    let options = SurveyOptions { copies: Some(2), most: 700, ..SurveyOptions::default() };
    let told = asking.client.survey(&options).unwrap();
    println!("{} of 4800 copies were looked at: {:?}", told.rows, told.by_copies);
    assert_eq!((told.sample, told.short.blocks), (8, 0));
    // 300 of 2400 blocks at one in eight, with a standard deviation of 16: six of them are chance once in 10^8 times.
    assert!((2 * 204..=2 * 396).contains(&told.rows), "{}", told.rows);
    assert_eq!(told.by_copies[2].blocks, told.rows / 2 * 8);
}

#[test]
fn copies_that_there_cannot_be_are_refused_and_one_server_is_a_store_too() {
    let member = Member::start();
    let asking = Asking::of(&addresses(&[&member]), 1);
    assert_eq!(asking.put(Chain::from(&prompt(0)), None).unwrap().stored, 300);
    for copies in [0, 17] {
        let options = SurveyOptions { copies: Some(copies), ..SurveyOptions::default() };
        assert_eq!(asking.client.survey(&options).unwrap_err().code, Code::InvalidArgument);
    }
    let told = survey(&asking, Some(2));
    assert_eq!((told.copies, told.servers.len(), told.servers[0].lost.blocks), (1, 1, 300));
    assert_eq!((told.segments.count, told.servers[0].unplaced.blocks), (0, 0));
}
