//! One field that differs is another namespace.

use crate::rig::*;
use kvik_core::Code;
use kvik_store::{BlockKey, Namespace};

/// Every namespace that differs from `of` in one field.
fn others(of: &Namespace) -> Vec<(&'static str, Namespace)> {
    let change = |name, change: &dyn Fn(&mut Namespace)| {
        let mut other = of.clone();
        change(&mut other);
        (name, other)
    };
    vec![
        change("model", &|n| n.model.push('2')),
        change("revision", &|n| n.revision.push('2')),
        change("kv_dtype", &|n| n.kv_dtype = "float8_e4m3".into()),
        change("quantisation", &|n| n.quantisation = "per-head".into()),
        change("layers", &|n| n.layers = 0..LAYERS - 1),
        change("first layer", &|n| n.layers = 1..LAYERS),
        change("model_layers", &|n| n.model_layers += 1),
        change("heads", &|n| n.heads = 0..2),
        change("first head", &|n| n.heads = 2..4),
        change("model_heads", &|n| n.model_heads += 1),
        change("block_tokens", &|n| n.block_tokens = 8),
        change("layout", &|n| n.layout.push('!')),
        change("salt", &|n| n.salt = b"tenant".to_vec()),
        change("lora", &|n| n.lora = "adapter".into()),
    ]
}

#[test]
fn another_identity_is_a_miss() {
    let rig = Rig::new(1 << 20);
    rig.put(&[1, 2, 3]);
    for (name, other) in others(&rig.namespace) {
        let space = rig.client.open("one", &other, shape()).unwrap();
        assert_eq!(get(&space, &rig.pages, &keys(&other, &[1, 2, 3])), 0, "{name}");
        // Whoever brings another's keys along gets nothing either.
        assert_eq!(get(&space, &rig.pages, &rig.keys(&[1, 2, 3])), 0, "{name}, with the keys of the other");
    }
    assert_eq!(rig.get(&[1, 2, 3]), 3);
}

#[test]
fn all_ids_differ_and_none_slides_into_another() {
    let mut all = vec![namespace("m")];
    all.extend(others(&namespace("m")).into_iter().map(|(_, other)| other));
    all.push(Namespace { model: "m1".into(), revision: String::new(), ..namespace("m") });
    let mut ids: Vec<_> = all.iter().map(|namespace| namespace.id().unwrap()).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), all.len());
}

#[test]
fn the_keys_of_a_prefix_are_a_prefix_of_the_keys() {
    let namespace = namespace("m");
    let all = keys(&namespace, &[1, 2, 3, 4]);
    assert_eq!(keys(&namespace, &[1, 2])[..], all[..2]);
    assert_ne!(keys(&namespace, &[9, 2])[1], all[1]);
    // A block that is not full has no key; what stands beside the tokens counts.
    let tokens: Vec<u32> = (0..40).collect();
    assert_eq!(namespace.keys(&tokens, b"", &[]).unwrap().len(), 2);
    assert_ne!(namespace.keys(&tokens, b"", &[]).unwrap(), namespace.keys(&tokens, b"x", &[]).unwrap());
    assert_ne!(
        namespace.keys(&tokens, b"", &[]).unwrap()[0],
        namespace.keys(&tokens, b"", &[(3, b"image")]).unwrap()[0]
    );
}

#[test]
fn a_serving_engines_hash_is_a_key_in_its_namespace_only() {
    let (one, other) = (namespace("m"), namespace("n"));
    let hash = [7; 32];
    assert_ne!(one.key_of(&hash).unwrap(), other.key_of(&hash).unwrap());
    assert_ne!(one.key_of(&hash).unwrap(), BlockKey(hash));
    assert_eq!(one.key_of(&hash[..8]).unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn what_is_no_namespace_is_refused() {
    let bad = [
        Namespace { model: String::new(), ..namespace("m") },
        Namespace { kv_dtype: String::new(), ..namespace("m") },
        Namespace { block_tokens: 0, ..namespace("m") },
        Namespace { layers: 2..2, ..namespace("m") },
        Namespace { layers: 0..LAYERS + 1, ..namespace("m") },
        Namespace { heads: 3..9, ..namespace("m") },
        Namespace { salt: vec![0; 1025], ..namespace("m") },
    ];
    for namespace in bad {
        assert_eq!(namespace.id().unwrap_err().code, Code::InvalidArgument, "{namespace:?}");
    }
}

/// Where vectors lie that Python reads too.
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/0.1/store_keys.json");

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn vector(namespace: &Namespace) -> serde_json::Value {
    let tokens: Vec<u32> = (0..50).map(|token| token * 65_537).collect();
    let (extra, items) = (b"extra".as_slice(), [(20, b"image".as_slice())]);
    let keys = namespace.keys(&tokens, extra, &items).unwrap();
    serde_json::json!({
        "namespace": {
            "model": namespace.model, "revision": namespace.revision, "kv_dtype": namespace.kv_dtype,
            "quantisation": namespace.quantisation,
            "layers": [namespace.layers.start, namespace.layers.end], "model_layers": namespace.model_layers,
            "heads": [namespace.heads.start, namespace.heads.end], "model_heads": namespace.model_heads,
            "block_tokens": namespace.block_tokens, "layout": namespace.layout,
            "salt": hex(&namespace.salt), "lora": namespace.lora,
        },
        "tokens": tokens, "extra": hex(extra), "items": [[20, hex(b"image")]],
        "id": namespace.id().unwrap().to_string(),
        "keys": keys.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "hash": hex(&[7; 32]), "key_of": namespace.key_of(&[7; 32]).unwrap().to_string(),
    })
}

/// What a release has put into a store is found by the next one. KVIK_TEST_GOLDEN=write makes the file if it is not
/// there.
#[test]
fn golden_keys() {
    let mut all = vec![namespace("größe")];
    all.extend(others(&namespace("m")).into_iter().map(|(_, other)| other));
    let found = serde_json::Value::Array(all.iter().map(vector).collect());
    if std::env::var("KVIK_TEST_GOLDEN").is_ok_and(|value| value == "write")
        && !std::path::Path::new(GOLDEN).exists()
    {
        std::fs::write(GOLDEN, serde_json::to_string_pretty(&found).unwrap() + "\n").unwrap();
    }
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(GOLDEN).unwrap()).unwrap();
    assert_eq!(found, golden);
}
