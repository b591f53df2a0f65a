//! The content digest: what KV *is*, apart from where it lies.
//!
//! The KV of a position depends on the model (the namespace), on every token up to it, and on what the serving
//! engine mixes in beside the tokens (LoRA, salt, images). The digest is a blake3 chain over those, one link a KV
//! block, so that a prefix can be checked against the whole: two prompts share a link exactly as far as they share
//! everything that KV depends on.

/// Bytes of one link of the chain.
pub const CONTENT_DIGEST_BYTES: usize = 32;

/// One link of the chain: it stands for all tokens up to the end of its KV block.
pub type ContentDigest = [u8; CONTENT_DIGEST_BYTES];

/// The chain over `tokens` in KV blocks of `block_tokens`; the last link covers the last, maybe partial, KV block.
///
/// `namespace` names model, weights, dtype and layout; `extra` the serving engine's extra keys, in one canonical
/// encoding. Empty `tokens` give an empty chain. `block_tokens` of 0 is taken as 1.
pub fn content_chain(
    namespace: &[u8],
    extra: &[u8],
    tokens: &[u32],
    block_tokens: usize,
) -> Vec<ContentDigest> {
    let mut root = blake3::Hasher::new_derive_key("kvik content digest v1");
    for part in [namespace, extra] {
        root.update(&(part.len() as u64).to_le_bytes());
        root.update(part);
    }
    let mut parent: ContentDigest = root.finalize().into();
    tokens
        .chunks(block_tokens.max(1))
        .map(|block| {
            let mut link = blake3::Hasher::new_keyed(&parent);
            for token in block {
                link.update(&token.to_le_bytes());
            }
            parent = link.finalize().into();
            parent
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_shares_its_links_and_nothing_else_does() {
        let tokens: Vec<u32> = (0..40).collect();
        let chain = content_chain(b"model", b"", &tokens, 16);
        assert_eq!(chain.len(), 3);
        assert_eq!(content_chain(b"model", b"", &tokens[..32], 16), chain[..2]);
        let mut other = tokens.clone();
        other[20] = 99;
        let changed = content_chain(b"model", b"", &other, 16);
        assert_eq!(changed[0], chain[0]);
        assert_ne!(changed[1], chain[1]);
        assert_ne!(changed[2], chain[2]);
        assert_ne!(content_chain(b"model", b"salt", &tokens, 16)[0], chain[0]);
        assert_ne!(
            content_chain(b"models", b"alt", &tokens, 16)[0],
            content_chain(b"model", b"salt", &tokens, 16)[0]
        );
    }
}
