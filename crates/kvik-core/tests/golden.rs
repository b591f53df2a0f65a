//! Tickets, digests and numbers of errors are what every earlier release made of them. `docs/compatibility.md`

#[path = "../../../tests/golden/format.rs"]
mod format;

use format::{Entry, Fields, all, grown};
use kvik_core::{
    Code, Content, EngineId, GrantId, HostTag, Incarnation, Layers, Layout, Right, Ticket, content_chain,
    page_sum,
};
use std::time::Duration;

fn ticket(right: Right, millis: u64, addresses: &[&str]) -> Ticket {
    Ticket {
        engine: EngineId(std::array::from_fn(|at| at as u8)),
        incarnation: Incarnation(0x1122_3344_5566_7788),
        grant: GrantId(std::array::from_fn(|at| 0xF0 - at as u8)),
        right,
        expiry: Duration::from_millis(millis),
        layout: [1, 2, 3, 4, 5, 6, 7, 8],
        host: HostTag([9, 10, 11, 12, 13, 14, 15, 16]),
        addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
    }
}

fn describe(ticket: &Ticket) -> Fields {
    let Ticket { engine, incarnation, grant, right, expiry, layout, host, addresses } = ticket;
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    vec![
        ("engine", engine.to_string()),
        ("incarnation", format!("{:x}", incarnation.0)),
        ("grant", grant.to_string()),
        ("right", right.name().to_owned()),
        ("expiry", format!("{} ms", expiry.as_millis())),
        ("layout", format!("{layout:02x?}")),
        ("host", format!("{:02x?}", host.0)),
        ("addresses", addresses.join(" ")),
    ]
}

#[test]
fn tickets_of_every_release_are_read() {
    let many = ["10.77.1.1:4000", "[fd77::1]:4001", "192.0.2.7:65535", "[2001:db8::ff:1]:1"];
    let today = [
        ("read-v4", ticket(Right::Read, 120_000, &["127.0.0.1:4000"])),
        ("write-v6", ticket(Right::Write, 1, &["[::1]:40000"])),
        ("read-several", ticket(Right::Read, u64::from(u32::MAX), &many)),
    ];
    let today =
        today.map(|(name, ticket)| Entry::new(name, describe(&ticket), ticket.to_string().into_bytes()));
    for golden in all("tickets", "ticket kvik1", &today) {
        for Entry { name, fields, bytes } in &golden.entries {
            let text = std::str::from_utf8(bytes).unwrap();
            let ticket: Ticket =
                text.parse().unwrap_or_else(|error| panic!("{:?} {name}: {error}", golden.path));
            assert_eq!(
                &Entry::new(name, describe(&ticket), bytes.clone()).fields,
                fields,
                "{:?} {name}",
                golden.path
            );
            if golden.is_written_today {
                assert_eq!(ticket.to_string(), text, "{:?} {name}", golden.path);
            }
        }
    }
}

/// Both sides of a handover compute these for themselves: they must come to the same.
#[test]
fn digests_are_those_of_every_release() {
    let bytes: Vec<u8> = (0..10_000u32).map(|at| (at * 31 % 251) as u8).collect();
    let strided = Layers::Strided { count: 3, stride: 65_536 };
    let layouts = [
        Layout::new(64, 8, 1024, 8192, 8, 1024, strided).unwrap(),
        Layout::new(0, 8, 16, 64, 1, 0, Layers::At(vec![0, 16, 48])).unwrap(),
    ];
    let tokens: Vec<u32> = (0..40).map(|token| token * 1_000_003).collect();
    let chain = |namespace: &[u8], extra: &[u8], items: &[(usize, &[u8])]| {
        content_chain(namespace, extra, &tokens, 16, items).concat()
    };
    let images: [(usize, &[u8]); 2] = [(32, b"the second image"), (15, b"an image")];
    let content = Content::new(&chain(b"a namespace", b"", &images), b"a part").unwrap();
    let today = [
        Entry::new("page-sum/empty", vec![], page_sum(b"").to_le_bytes().to_vec()),
        Entry::new("page-sum/10000", vec![], page_sum(&bytes).to_le_bytes().to_vec()),
        Entry::new("layout/strided", vec![], layouts[0].digest().to_vec()),
        Entry::new("layout/at", vec![], layouts[1].digest().to_vec()),
        Entry::new("content/plain", vec![], chain(b"a namespace", b"", &[])),
        Entry::new("content/extra", vec![], chain(b"a namespace", b"lora, salt", &[])),
        Entry::new("content/items", vec![], chain(b"a namespace", b"", &images)),
        Entry::new("content/claim", vec![], content.claim(1).unwrap().to_vec()),
    ];
    for golden in all("digests", "xxh3-64, layout v1, content v2, claim v1", &today) {
        for entry in golden.entries {
            let found = today.iter().find(|now| now.name == entry.name);
            assert_eq!(found, Some(&entry), "{:?}", golden.path);
        }
    }
}

/// A number on the wire never changes its meaning; new ones may come.
#[test]
fn numbers_of_errors_keep_their_meaning() {
    let named = |code: Code| Entry::new(code.name(), vec![], (code as u16).to_le_bytes().to_vec());
    let today: Vec<Entry> = Code::ALL.iter().copied().map(named).collect();
    for golden in grown("errors", "u16", &today) {
        for Entry { name, bytes, .. } in golden.entries {
            let code = Code::from_wire(u16::from_le_bytes(bytes.try_into().unwrap()));
            assert_eq!(code.name(), name, "{:?}", golden.path);
        }
    }
}
