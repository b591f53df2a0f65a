"""What vLLM's KV depends on besides tokens, by its bytes, for what is kept in a store.

vLLM calls models and adapters by names, and images by what a client may choose (`uuid`), so that two contents
can have one name. Here are the bytes instead. What vLLM's configuration says that no bytes stand for is
refused by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvik.handover import digest
from kvik.serving_cache.config import CacheConfig
from kvik.serving_cache.content import NoContentError, files_digest
from kvik.serving_cache.naming import ModelContent

# Speculation that has no weights, and so no KV, of its own.
DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})


def unkept(vllm_config: Any, windows: list[int]) -> str | None:
    """Why this server's KV cannot be kept in a store, if it cannot. windows: of each group of layers, how
    many tokens a token sees; 0 for all."""
    if len(windows) > 1 or any(windows):
        return (
            "a store keeps KV of models whose layers all see all tokens; this one has "
            f"{len(windows)} group(s) of layers with windows of {windows} (0: all)"
        )
    drafts = getattr(getattr(vllm_config, "speculative_config", None), "method", None)
    if drafts is not None and drafts not in DRAFTS_WITHOUT_KV:
        return f"a store does not keep KV of a drafting model (speculative method {drafts!r})"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales: KV depends on what this server happened to compute first"
    return None


def model_content(vllm_config: Any, identity: Mapping[str, str], config: CacheConfig) -> ModelContent:
    """What all KV of this server depends on. identity: as of a handover."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return ModelContent(
        identity={**identity, "config": _config_digest(getattr(model, "hf_config", None))},
        weights=lambda: _weights(vllm_config, config),
        quantisation="" if str(cache.cache_dtype) == "auto" else str(cache.cache_dtype),
        image=image_bytes,
    )


def _config_digest(hf_config: Any) -> str:
    """The model's configuration as vLLM runs it, with what `--hf-overrides` has changed. Without private
    names, of which one is the path, and without the version of what wrote it."""
    told = hf_config.to_dict() if hasattr(hf_config, "to_dict") else {}
    kept = {name: told[name] for name in told if not name.startswith("_") and name != "transformers_version"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def _weights(vllm_config: Any, config: CacheConfig) -> bytes:
    """32 bytes that stand for the weights. Takes as long as reading them does."""
    if config.weights is not None:
        return hashlib.sha256(b"stated " + config.weights.encode()).digest()
    load = getattr(vllm_config, "load_config", None)
    if str(getattr(load, "load_format", "auto")) == "dummy":
        raise NoContentError(
            "weights of --load-format dummy are in no file; say what stands for them (weights)"
        )
    return files_digest(_folder(vllm_config.model_config, getattr(load, "download_dir", None)))


def _folder(model: Any, download_dir: str | None) -> Path:
    """Where the model's files are: its path, or what was downloaded of its name."""
    if Path(model.model).is_dir():
        return Path(model.model)
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                model.model, revision=model.revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except Exception as error:  # whatever it is, there is no folder
        raise NoContentError(
            f"the files of the weights of {model.model!r} were not found ({error}); say what stands for them "
            "(weights)"
        ) from error


def image_bytes(feature: Any) -> bytes:
    """What stands for one image (or other item) of a request: 32 bytes over what the model is given of it.

    Raises NoContentError where vLLM's scheduler process has not got that.
    """
    if getattr(feature, "data", None) is None:
        raise NoContentError(f"{feature.modality}: its data are not in vLLM's scheduler process")
    whole = hashlib.sha256()
    _add(whole, feature.data)
    return digest.canonical([str(feature.modality), whole.hexdigest()])


def _add(whole: Any, value: Any) -> None:
    """Add a value to a digest, with what tells it from another of the same bytes."""
    if isinstance(value, Mapping):
        _frame(whole, "mapping", len(value))
        for name in sorted(value):
            _frame(whole, str(name))
            _add(whole, value[name])
    elif isinstance(value, list | tuple):
        _frame(whole, "list", len(value))
        for one in value:
            _add(whole, one)
    elif hasattr(value, "field") and hasattr(value, "data"):  # vLLM's MultiModalFieldElem
        if value.data is None:
            raise NoContentError("an item's data are not in vLLM's scheduler process")
        _add(whole, value.data)
    elif hasattr(value, "untyped_storage"):
        _frame(whole, "tensor", value.dtype, tuple(value.shape))
        whole.update(_bytes_of(value))
    elif value is None or isinstance(value, str | bytes | bool | int | float):
        _frame(whole, type(value).__name__, repr(value))
    else:
        raise NoContentError(f"an item has data of type {type(value).__name__}, whose bytes are not known")


def _frame(whole: Any, *words: object) -> None:
    told = repr(words).encode()
    whole.update(len(told).to_bytes(8, "little") + told)


def _bytes_of(tensor: Any) -> Any:
    import torch

    if tensor.device.type != "cpu":
        raise NoContentError("an item's data are on a device")
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
