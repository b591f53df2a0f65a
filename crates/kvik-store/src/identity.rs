//! What makes a store block the one that is meant.
//!
//! ```text
//! namespace id = blake3 over every field of the namespace, each with its name and its length
//! key of block n = blake3 keyed by the key of block n - 1, over the block's tokens (the content chain)
//! ```
//!
//! The namespace is the start of the chain. So one field that differs, of the namespace or of the tokens before, gives
//! other keys: a miss, and never other bytes. A serving engine that has block hashes of its own brings those in place
//! of tokens ([`Namespace::key_of`]).

use kvik_core::{CONTENT_DIGEST_BYTES, Code, Error, Result, content_chain};
use std::fmt;
use std::ops::Range;

/// Longest text of a namespace, in bytes.
const MAX_TEXT: usize = 1024;

/// What a block is called: 32 bytes that stand for all that its KV depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub [u8; CONTENT_DIGEST_BYTES]);

/// What a namespace is called.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NamespaceId(pub [u8; 32]);

/// All that KV depends on besides tokens, and how its bytes lie. Two engines share blocks when all of it is equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Namespace {
    /// The model's name.
    pub model: String,
    /// Its weights: a revision, or a fingerprint.
    pub revision: String,
    /// The type of an element of KV, such as `bfloat16`.
    pub kv_dtype: String,
    /// How KV is quantised; empty where it is not.
    pub quantisation: String,
    /// The layers of a block, of all those that the model has.
    pub layers: Range<u32>,
    /// The layers that the model has.
    pub model_layers: u32,
    /// The KV heads of a block, of all those that the model has.
    pub heads: Range<u32>,
    /// The KV heads that the model has.
    pub model_heads: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// How the bytes of a block lie: the order of its dimensions, in the words of whoever writes them.
    pub layout: String,
    /// Sets tenants apart. Empty: shared by all who have it empty.
    pub salt: Vec<u8>,
    /// The adapter; empty for none.
    pub lora: String,
}

impl Namespace {
    /// What it is called.
    ///
    /// # Errors
    /// `InvalidArgument` for a text or salt of more than 1024 bytes, a block of no tokens, or a range that is empty or
    /// beyond what the model has.
    pub fn id(&self) -> Result<NamespaceId> {
        self.check()?;
        let mut hasher = blake3::Hasher::new_derive_key("kvik store namespace v1");
        for (name, value) in self.fields() {
            for part in [name.as_bytes(), &value] {
                hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
            }
        }
        Ok(NamespaceId(hasher.finalize().into()))
    }

    /// The keys of all whole blocks of a prompt, in their order. `extra` is what a serving engine mixes in beside the
    /// tokens, `items` what stands in for some of them (images), as for
    /// [`content_chain`](kvik_core::content_chain). A last block that is not full has no key.
    ///
    /// # Errors
    /// As for [`Namespace::id`].
    pub fn keys(&self, tokens: &[u32], extra: &[u8], items: &[(usize, &[u8])]) -> Result<Vec<BlockKey>> {
        let (id, block) = (self.id()?, self.block_tokens as usize);
        let whole = &tokens[..tokens.len() - tokens.len() % block];
        Ok(content_chain(&id.0, extra, whole, block, items).into_iter().map(BlockKey).collect())
    }

    /// The key of a block that a serving engine calls by a hash of its own, which covers all tokens up to its end.
    ///
    /// # Errors
    /// As for [`Namespace::id`]; `InvalidArgument` for a hash of less than 16 bytes, which others could meet by chance.
    pub fn key_of(&self, hash: &[u8]) -> Result<BlockKey> {
        if hash.len() < 16 {
            let text = format!(
                "a block hash of {} bytes is too short to stand for a block: take one of at least 16, such as \
                 vLLM's sha256_cbor",
                hash.len()
            );
            return Err(Error::new(Code::InvalidArgument, text));
        }
        let mut hasher = blake3::Hasher::new_keyed(&self.id()?.0);
        hasher.update(b"kvik store engine hash v1").update(&(hash.len() as u64).to_le_bytes()).update(hash);
        Ok(BlockKey(hasher.finalize().into()))
    }

    fn fields(&self) -> [(&'static str, Vec<u8>); 14] {
        let number = |number: u32| number.to_le_bytes().to_vec();
        let text = |text: &str| text.as_bytes().to_vec();
        [
            ("model", text(&self.model)),
            ("revision", text(&self.revision)),
            ("kv_dtype", text(&self.kv_dtype)),
            ("quantisation", text(&self.quantisation)),
            ("first_layer", number(self.layers.start)),
            ("layers", number(self.layers.end - self.layers.start)),
            ("model_layers", number(self.model_layers)),
            ("first_head", number(self.heads.start)),
            ("heads", number(self.heads.end - self.heads.start)),
            ("model_heads", number(self.model_heads)),
            ("block_tokens", number(self.block_tokens)),
            ("layout", text(&self.layout)),
            ("salt", self.salt.clone()),
            ("lora", text(&self.lora)),
        ]
    }

    fn check(&self) -> Result<()> {
        let wrong = |text: String| Err(Error::new(Code::InvalidArgument, text));
        let texts = [
            ("model", self.model.len()),
            ("revision", self.revision.len()),
            ("kv_dtype", self.kv_dtype.len()),
            ("quantisation", self.quantisation.len()),
            ("layout", self.layout.len()),
            ("salt", self.salt.len()),
            ("lora", self.lora.len()),
        ];
        if let Some((name, len)) = texts.into_iter().find(|(_, len)| *len > MAX_TEXT) {
            return wrong(format!("a namespace's {name} has at most {MAX_TEXT} bytes, not {len}"));
        }
        if self.model.is_empty() || self.kv_dtype.is_empty() || self.block_tokens == 0 {
            return wrong(
                "a namespace names a model and a KV dtype, and its blocks have at least one token".into(),
            );
        }
        for (name, part, all) in
            [("layers", &self.layers, self.model_layers), ("heads", &self.heads, self.model_heads)]
        {
            if part.is_empty() || part.end > all {
                return wrong(format!(
                    "a namespace's {name} are some of the model's {all}, not {} to {}",
                    part.start, part.end
                ));
            }
        }
        Ok(())
    }
}

fn hex(f: &mut fmt::Formatter<'_>, bytes: &[u8; 32]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(f, &self.0)
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(f, &self.0)
    }
}

impl fmt::Display for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(f, &self.0)
    }
}

impl fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex(f, &self.0)
    }
}
