//! The content digest: what KV *is*, apart from where it lies.
//!
//! The KV of a position depends on the model (the namespace), on every token up to it, and on what the serving
//! engine mixes in beside the tokens (LoRA, salt, images). The digest is a blake3 chain over those, one link a KV
//! block, so that a prefix can be checked against the whole: two prompts share a link exactly as far as they share
//! everything that KV depends on.
//!
//! A grant of KV has a [`Content`]: the link of each of its pages in their order, and which part of the model's KV
//! they hold. Who wants to use the grant computes the same by itself and states a claim; the owner compares.

use crate::{Code, Error, Result};
use std::sync::Arc;

/// Bytes of one link of the chain.
pub const CONTENT_DIGEST_BYTES: usize = 32;
/// Longest description of a part, in bytes.
pub const MAX_CONTENT_PART: usize = 4096;

/// One link of the chain: it stands for all tokens up to the end of its KV block.
pub type ContentDigest = [u8; CONTENT_DIGEST_BYTES];
/// What travels: content up to some page, and its part, in one value.
pub type ContentClaim = [u8; CONTENT_DIGEST_BYTES];

/// Sets a claim apart from the next link, which is keyed by the same link: there the first eight bytes are a number of
/// tokens, and no block has as many as these letters make.
const CLAIM: &[u8] = b"kvik content claim v1";

/// The chain over `tokens` in KV blocks of `block_tokens`; the last link covers the last, maybe partial, KV block.
///
/// `namespace` names model, weights, dtype and layout; `extra` the serving engine's extra keys, in one canonical
/// encoding. `items` are what stands in for some of the tokens (images): the offset of its first token, and a canonical
/// key that says what it is and how long. They come in any order; each is part of the link of the block where it
/// begins, so that a prefix which ends before it does not depend on it. One that begins behind the last token is left
/// out. Empty `tokens` give an empty chain. `block_tokens` of 0 is taken as 1.
pub fn content_chain(
    namespace: &[u8],
    extra: &[u8],
    tokens: &[u32],
    block_tokens: usize,
    items: &[(usize, &[u8])],
) -> Vec<ContentDigest> {
    let mut root = blake3::Hasher::new_derive_key("kvik content digest v2");
    for part in [namespace, extra] {
        root.update(&(part.len() as u64).to_le_bytes());
        root.update(part);
    }
    let mut parent: ContentDigest = root.finalize().into();
    let mut items = items.to_vec();
    items.sort_by_key(|(at, _)| *at);
    let (mut items, mut end) = (items.into_iter().peekable(), 0);
    let link = |block: &[u32]| {
        end += block.len();
        let mut link = blake3::Hasher::new_keyed(&parent);
        link.update(&(block.len() as u64).to_le_bytes());
        for token in block {
            link.update(&token.to_le_bytes());
        }
        while let Some((at, key)) = items.next_if(|(at, _)| *at < end) {
            link.update(&(at as u64).to_le_bytes()).update(&(key.len() as u64).to_le_bytes()).update(key);
        }
        parent = link.finalize().into();
        parent
    };
    tokens.chunks(block_tokens.max(1)).map(link).collect()
}

/// What the pages of a grant, or of a prompt, hold: a link for each page in their order, and the part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    chain: Arc<[ContentDigest]>,
    part: Arc<[u8]>,
}

impl Content {
    /// Content of the links in `chain`, one after the other, that is the `part` (a canonical description) of the
    /// model's KV.
    ///
    /// # Errors
    /// `InvalidArgument` for a chain that is empty or not of whole links, and for a part that is empty or longer than
    /// [`MAX_CONTENT_PART`].
    pub fn new(chain: &[u8], part: &[u8]) -> Result<Content> {
        let wrong = |why: String| Err(Error::new(Code::InvalidArgument, why));
        let (links, rest) = chain.as_chunks::<CONTENT_DIGEST_BYTES>();
        if links.is_empty() || !rest.is_empty() {
            return wrong(format!(
                "a content's chain has {CONTENT_DIGEST_BYTES} bytes for each page, not {} in all",
                chain.len()
            ));
        }
        if part.is_empty() || part.len() > MAX_CONTENT_PART {
            return wrong(format!(
                "a content's part says which part of the KV the pages hold, in 1 to {MAX_CONTENT_PART} bytes, not {}",
                part.len()
            ));
        }
        Ok(Content { chain: links.into(), part: part.into() })
    }

    /// Number of links, at least one.
    pub fn links(&self) -> usize {
        self.chain.len()
    }

    /// All links.
    pub fn chain(&self) -> &[ContentDigest] {
        &self.chain
    }

    /// Which part of the KV it is.
    pub fn part(&self) -> &[u8] {
        &self.part
    }

    /// What is claimed of the pages up to that of this link; none where there is no such link.
    pub fn claim(&self, link: usize) -> Option<ContentClaim> {
        let mut claim = blake3::Hasher::new_keyed(self.chain.get(link)?);
        claim.update(CLAIM).update(&(self.part.len() as u64).to_le_bytes()).update(&self.part);
        Some(claim.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMAGE: &[u8] = b"an image of 20 tokens";

    fn plain(namespace: &[u8], extra: &[u8], tokens: &[u32]) -> Vec<ContentDigest> {
        content_chain(namespace, extra, tokens, 16, &[])
    }

    #[test]
    fn a_prefix_shares_its_links_and_nothing_else_does() {
        let tokens: Vec<u32> = (0..40).collect();
        let chain = plain(b"model", b"", &tokens);
        assert_eq!(chain.len(), 3);
        assert_eq!(plain(b"model", b"", &tokens[..32]), chain[..2]);
        let mut other = tokens.clone();
        other[20] = 99;
        let changed = plain(b"model", b"", &other);
        assert_eq!(changed[0], chain[0]);
        assert_ne!(changed[1], chain[1]);
        assert_ne!(changed[2], chain[2]);
        assert_ne!(plain(b"model", b"salt", &tokens)[0], chain[0]);
        assert_ne!(plain(b"models", b"alt", &tokens)[0], plain(b"model", b"salt", &tokens)[0]);
    }

    #[test]
    fn an_item_is_part_of_the_link_of_the_block_where_it_begins() {
        let tokens: Vec<u32> = (0..64).collect();
        let chain = |items: &[(usize, &[u8])]| content_chain(b"model", b"", &tokens, 16, items);
        let (none, one) = (chain(&[]), chain(&[(17, IMAGE)]));
        assert_eq!(one[0], none[0]);
        assert!((1..4).all(|link| one[link] != none[link]));
        // It begins with a block's first token, or with the last of the one before.
        assert_eq!(chain(&[(16, IMAGE)])[0], none[0]);
        assert_ne!(chain(&[(15, IMAGE)])[0], none[0]);
        assert_ne!(chain(&[(18, IMAGE)])[1], one[1]);
        assert_ne!(chain(&[(17, b"another")])[1], one[1]);
        // In whatever order they are told; what begins behind the end is no part of it.
        let (a, b) = ((3, &b"first"[..]), (40, &b"second"[..]));
        assert_eq!(chain(&[b, a, (64, IMAGE)]), chain(&[a, b]));
        assert_eq!(content_chain(b"model", b"", &tokens[..32], 16, &[b, a]), chain(&[a, b])[..2]);
        // One key that holds what two others hold is neither of them.
        assert_ne!(chain(&[(3, b"ab"), (3, b"c")])[0], chain(&[(3, b"a"), (3, b"bc")])[0]);
    }

    #[test]
    fn a_claim_is_of_its_link_and_its_part() {
        let chain = plain(b"model", b"", &(0..40).collect::<Vec<u32>>()).concat();
        let content = Content::new(&chain, b"heads 0 to 4").unwrap();
        let shorter = Content::new(&chain[..64], b"heads 0 to 4").unwrap();
        assert_eq!((content.links(), shorter.links()), (3, 2));
        assert_eq!(content.claim(1), shorter.claim(1));
        assert_ne!(content.claim(1), content.claim(2));
        assert_ne!(content.claim(1), Content::new(&chain, b"heads 4 to 8").unwrap().claim(1));
        assert_eq!(shorter.claim(2), None);
        assert!(content.chain().iter().all(|link| (0..3).all(|at| content.claim(at) != Some(*link))));
    }

    #[test]
    fn what_is_no_content_is_refused() {
        let long = [0; MAX_CONTENT_PART + 1];
        for (chain, part) in [(0, 1), (31, 1), (33, 1), (32, 0), (32, long.len())] {
            let error = Content::new(&[7; 64][..chain], &long[..part]).unwrap_err();
            assert_eq!(error.code, Code::InvalidArgument, "{chain} {part}");
        }
    }
}
