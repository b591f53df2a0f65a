"""A tokenizer of which each byte is a token, as a folder that `transformers` and `tokenizers` read."""

from __future__ import annotations

import json
from pathlib import Path

SPECIALS = ("<s>", "</s>", "<pad>")


def alphabet() -> list[str]:
    """A printable character for each byte, as byte-level tokenizers write them."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(one if one in plain else next(others)) for one in range(256)]


def write(folder: Path) -> Path:
    """Write it."""
    folder.mkdir()
    added = [
        {"id": at, "content": one, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for at, one in enumerate(SPECIALS)
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocab = {one: at for at, one in enumerate((*SPECIALS, *alphabet()))}
    model: dict[str, object] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": [],
    }  # fmt: skip
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIALS, strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
