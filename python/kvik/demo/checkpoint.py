"""A tiny Llama with random weights and a byte-level tokenizer, made without a network.

The weights are truly random and wide (not a serving engine's "dummy" weights, whose logits are all alike):
each next token depends on every earlier one with a clear margin, so KV that is wrong anywhere gives other
tokens.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvik.roles.processes import ProcessError

FIRST_BYTE_TOKEN = 3  # tokens 3..258 are the 256 bytes
SPEC: dict[str, int | float | str | bool] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
SEED = 7
MAKING = ".making-"
MAKING_LIMIT = 300.0  # seconds
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }}\n{% endfor %}<assistant>"
)
KV_BYTES_PER_TOKEN = 4 * 2 * 4 * 32 * 4  # layers, K and V, KV heads, head dimension, bytes of a float32


def ensure_checkpoint(layers: int | None = None, hidden: int | None = None) -> Path:
    """The folder of the checkpoint; made in a child process (it imports torch) when it is not there yet.
    `layers`: another number of them. `hidden`: another hidden size, for more to compute and as much KV."""
    spec = _spec(layers, hidden)
    sizes = [str(spec["num_hidden_layers"]), str(spec["hidden_size"])]
    return made_once("tiny-llama", [spec, SEED, CHAT_TEMPLATE], __name__, *sizes)


def made_once(name: str, content: object, module: str, *more: str) -> Path:
    """The folder of a model: kept by its name and what it is made of, and where it is not there yet, made by
    `python -m module FOLDER more...`. `ProcessError` where that fails."""
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvik" / "models"
    final = base / f"{name}-{key}"
    if final.is_dir():
        return final
    base.mkdir(parents=True, exist_ok=True)
    _clear_away(base)
    making = Path(tempfile.mkdtemp(prefix=MAKING, dir=base))
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        command = [sys.executable, "-m", module, str(making), *more]
        subprocess.run(command, env=env, check=True, timeout=MAKING_LIMIT)
        making.chmod(0o755)
        _keep(making)
        try:
            making.rename(final)
        except OSError:
            if not final.is_dir():  # else another run was quicker, with the same content
                raise
    except subprocess.SubprocessError as error:
        raise ProcessError(f"{name} was not made in {base}: {error} (it says why above)") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return final


def _clear_away(base: Path) -> None:
    """Remove what runs have left that were killed while they made a model: no other one takes so long."""
    for left in base.glob(f"{MAKING}*"):
        with contextlib.suppress(OSError):  # another run does the same
            if time.time() - left.stat().st_mtime > 2 * MAKING_LIMIT:
                shutil.rmtree(left, ignore_errors=True)


def _keep(folder: Path) -> None:
    """Let the files be on the disk before their name is: who finds the folder takes it for whole."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _spec(layers: int | None, hidden: int | None) -> dict[str, int | float | str | bool]:
    spec = SPEC if layers is None else SPEC | {"num_hidden_layers": layers}
    return spec if hidden is None else spec | {"hidden_size": hidden, "intermediate_size": 2 * hidden}


def write_checkpoint(folder: Path, layers: int | None = None, hidden: int | None = None) -> None:
    """Write configuration, weights and tokenizer into an existing folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(**_spec(layers, hidden), rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    )
    model.to(torch.float32).save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path, more: Sequence[str] = (), template: str = CHAT_TEMPLATE) -> None:
    """Write a byte-level tokenizer. more: special tokens besides, whose ids come behind all others."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<s>", "</s>", "<pad>"]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*specials, *symbols, *more])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*specials, *more])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": specials[0],
        "eos_token": specials[1],
        "pad_token": specials[2],
        "model_max_length": SPEC["max_position_embeddings"],
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), *map(int, sys.argv[2:]))
