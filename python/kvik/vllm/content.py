"""What vLLM's KV depends on besides tokens, by its bytes, for what is kept in a store or handed over.

vLLM calls models and adapters by names, and images by what a client may choose (`uuid`), so that two contents
can have one name. Here are the bytes instead. What vLLM's configuration says that no bytes stand for is
refused by name."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvik.handover import digest
from kvik.handover.config import ConnectorConfig
from kvik.handover.content import files_digest, files_sample
from kvik.handover.items import Items, NoContentError
from kvik.serving_cache.config import CacheConfig
from kvik.serving_cache.naming import ModelContent
from kvik.vllm import log

logger = logging.getLogger(log.NAME)

# Speculation that has no weights, and so no KV, of its own.
DRAFTS_WITHOUT_KV = frozenset({"ngram", "ngram_gpu", "suffix"})
# Of a multimodal model: what of its server's settings changes KV, beside the data of an item.
ITEM_SETTINGS = (
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "video_pruning_rate",
    "video_pruning_method",
)
# An item's own data have far more for each token that it stands for; a place in shared memory, or the size of
# an image whose embeddings come from elsewhere, has less.
LEAST_BYTES_A_TOKEN = 16
# What vLLM's classes of models write into the configuration while they load one: with one rank that is the
# scheduler's object, with several it is not. The model's type, and its own class, are told all the same.
WRITTEN_BY_LOADING = frozenset({"dtype", "torch_dtype", "max_model_len"})
# What they write there as the type of a YaRN rope, where attention has a latent (`kv_lora_rank`; DeepSeek and
# models like it). Elsewhere these are types of their own.
YARN_WRITTEN = ("deepseek_yarn", "deepseek_llama_scaling")
# Llama 4 scales its attention where requests may be longer than this (vLLM's `Llama4ForCausalLM`).
LLAMA4_TOKENS = 32_768
LLAMA4 = frozenset({"llama4", "llama4_text"})
LONG_ROPE = frozenset({"longrope", "su"})  # the same by its older name


def unkept(vllm_config: Any, windows: list[int]) -> str | None:
    """Why this server's KV cannot be kept in a store, if it cannot. windows: of each group of layers, how
    many tokens a token sees; 0 for all."""
    if len(windows) > 1 or any(windows):
        return (
            "a store keeps KV of models whose layers all see all tokens; this one has "
            f"{len(windows)} group(s) of layers with windows of {windows} (0: all)"
        )
    # A prompt that begins with KV from elsewhere ends such a server, or gives it wrong answers.
    if not getattr(vllm_config.model_config, "is_prefix_caching_supported", True):
        return (
            "a store keeps KV of models that vLLM's prefix caching supports; this one has to compute each "
            "prompt whole, as models do that pool all of its tokens"
        )
    drafts = getattr(getattr(vllm_config, "speculative_config", None), "method", None)
    if drafts is not None and drafts not in DRAFTS_WITHOUT_KV:
        return f"a store does not keep KV of a drafting model (speculative method {drafts!r})"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales: KV depends on what this server happened to compute first"
    return None


def model_identity(vllm_config: Any, config: ConnectorConfig, store: CacheConfig) -> dict[str, str]:
    """What all KV of this server depends on besides tokens and shape, as two servers compare it. `namespace`
    replaces name and revision (often a path), and nothing else."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    name = config.namespace or f"{model.model}@{getattr(model, 'revision', None)}"
    return {
        "model": name,
        "dtype": str(model.dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "cache_dtype": str(cache.cache_dtype),
        "config": _config_digest(getattr(model, "hf_config", None)),
        "weights": _weights_sample(vllm_config, store),
        **_length_settings(model),
        **_item_settings(model),
    }


def model_content(vllm_config: Any, identity: Mapping[str, str], config: CacheConfig) -> ModelContent:
    """What all KV of this server depends on. identity: as of a handover."""
    cache = vllm_config.cache_config
    return ModelContent(
        identity=identity,
        weights=lambda: _weights(vllm_config, config),
        quantisation="" if str(cache.cache_dtype) == "auto" else str(cache.cache_dtype),
    )


def items_of(vllm_config: Any) -> Items:
    """Images and other items of this server's requests."""
    return Items(partial(image_bytes, unread=_items_unread(vllm_config)))


def _config_digest(hf_config: Any) -> str:
    """The model's configuration as vLLM runs it, with what `--hf-overrides` has changed. Without private
    names, of which one is the path, without the version of what wrote it, and without what loading the model
    writes there: that is in the scheduler's process only where the one rank is, too."""
    told = _kept(_told(hf_config))
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=_said).encode()).hexdigest()


def _told(hf_config: Any) -> dict[str, Any]:
    return dict(hf_config.to_dict()) if hasattr(hf_config, "to_dict") else {}


def _kept(told: Any, inner: bool = False, latent: bool = False) -> Any:
    """inner: of a model's part, whose class vLLM may have filled in; latent: of attention with a latent."""
    if isinstance(told, Mapping):
        latent = latent or bool(told.get("kv_lora_rank"))
        left = WRITTEN_BY_LOADING | {"transformers_version"} | ({"architectures"} if inner else set())
        named = {str(name): _kept(value, True, latent) for name, value in told.items()}
        if latent and named.get("rope_type") in YARN_WRITTEN:
            named["rope_type"] = "yarn"
        return {name: named[name] for name in named if name[:1] != "_" and name not in left}
    return [_kept(value, True, latent) for value in told] if isinstance(told, list | tuple) else told


def _length_settings(model: Any) -> dict[str, str]:
    """What vLLM derives from how long requests may be (`--max-model-len`) and makes KV with: which factors of
    a long rope it takes, and whether Llama 4 scales its attention. The decisions and not the length, in which
    servers may differ. Nothing of other models."""
    bounds = set(_bounds(_told(getattr(model, "hf_config", None))))
    if not bounds:
        return {}
    # Fitted to the memory, it was another one when the model was made: that which its configuration says.
    fitted = getattr(model, "original_max_model_len", None) == -1
    longer = {str(bound): "fitted" if fitted else _longer(model.max_model_len, bound) for bound in bounds}
    return {"longer": json.dumps([longer, _scaled(model)], sort_keys=True)}


def _longer(length: int, bound: int | None) -> bool | int:
    """The length itself where it is not known what it is compared with."""
    return length if bound is None else length > bound


def _bounds(told: Any, outer: Any = None) -> Iterator[int | None]:
    """The lengths of requests from which on KV is made in another way, in a configuration and its parts; None
    where one is not said. outer: the length that a long rope was trained for, where it is said outside."""
    if not isinstance(told, Mapping):
        return
    trained = told.get("original_max_position_embeddings") or outer
    if told.get("rope_type", told.get("type")) in LONG_ROPE:
        yield trained
    if told.get("model_type") in LLAMA4:
        yield LLAMA4_TOKENS
    for part in told.values():
        yield from _bounds(part, trained)


def _scaled(model: Any) -> Any:
    """Whether Llama 4 is told to scale its attention, whatever the length; None where it is not."""
    told = dict(getattr(model, "try_get_generation_config", dict)())
    told.update(getattr(model, "override_generation_config", None) or {})
    return told.get("attn_temperature_tuning")


def _said(value: Any) -> str:
    """A value that is not JSON's; one that only says where it lies in memory, by its type."""
    said = str(value)
    return type(value).__qualname__ if f"{id(value):x}" in said else said


def _item_settings(model: Any) -> dict[str, str]:
    """How this server makes a model's input of images; nothing of a model that takes none."""
    settings = getattr(model, "multimodal_config", None)
    if settings is None:
        return {}
    told = {name: getattr(settings, name, None) for name in ITEM_SETTINGS}
    return {"items": json.dumps(told, sort_keys=True, default=str)}


def _items_unread(vllm_config: Any) -> str | None:
    """Why the data of an item would not say what this server makes of it, if they would not."""
    if getattr(vllm_config, "ec_transfer_config", None) is not None:
        return "an encoder's outputs come from another server by a name (--ec-transfer-config)"
    settings = getattr(vllm_config.model_config, "multimodal_config", None)
    if getattr(settings, "mm_encoder_attn_dtype", None) is not None:
        return "--mm-encoder-attn-dtype: scales may follow from what this server happened to compute first"
    return None


def _weights(vllm_config: Any, config: CacheConfig) -> bytes:
    """32 bytes that stand for the weights. Takes as long as reading them does."""
    return _stated(config) or files_digest(_files(vllm_config))


def _weights_sample(vllm_config: Any, config: CacheConfig) -> str:
    """What stands for the weights while their bytes are not all read; nothing where they are in no file that
    is known here, and equal names are trusted."""
    try:
        return (_stated(config) or files_sample(_files(vllm_config))).hex()
    except NoContentError as error:
        logger.info("kvik: a handover goes by the name of the model alone: %s", error)
        return ""


def _stated(config: CacheConfig) -> bytes | None:
    """Of what the user has said stands for the weights."""
    return None if config.weights is None else hashlib.sha256(b"stated " + config.weights.encode()).digest()


def _files(vllm_config: Any) -> Path:
    """Where the files of the weights are."""
    load = getattr(vllm_config, "load_config", None)
    if str(getattr(load, "load_format", "auto")) == "dummy":
        raise NoContentError(
            "weights of --load-format dummy are in no file; say what stands for them (weights)"
        )
    return _folder(vllm_config.model_config, getattr(load, "download_dir", None))


def _folder(model: Any, download_dir: str | None) -> Path:
    """Where the model's files are: its path, or what was downloaded of its name."""
    if Path(model.model).exists():
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


def image_bytes(feature: Any, unread: str | None = None) -> bytes:
    """What stands for one image (or other item) of a request: 32 bytes over what the model is given of it.

    Raises NoContentError where vLLM's scheduler process has not got that, or for the reason `unread`.
    """
    modality = str(getattr(feature, "modality", "item"))
    if unread is not None:
        raise NoContentError(f"{modality}: {unread}")
    if getattr(feature, "data", None) is None:
        raise NoContentError(f"{modality}: its data are not in vLLM's scheduler process")
    whole = hashlib.sha256()
    if _add(whole, feature.data) < LEAST_BYTES_A_TOKEN * int(feature.mm_position.length):
        raise NoContentError(
            f"{modality}: vLLM's scheduler process has only {_names(feature.data)} of it, and not its data "
            "(--mm-processor-cache-type shm, or embeddings that the request leaves out)"
        )
    return digest.canonical([modality, whole.hexdigest()])


def _names(data: Any) -> str:
    return ", ".join(sorted(map(str, data))) if isinstance(data, Mapping) else type(data).__name__


def _add(whole: Any, value: Any) -> int:
    """Add a value to a digest, with what tells it from another of the same bytes. Gives how many bytes of
    tensors were in it."""
    if isinstance(value, Mapping):
        _frame(whole, "mapping", len(value))
        found = 0
        for name in sorted(value):
            _frame(whole, str(name))
            found += _add(whole, value[name])
        return found
    if isinstance(value, list | tuple):
        _frame(whole, "list", len(value))
        return sum([_add(whole, one) for one in value])
    if hasattr(value, "field") and hasattr(value, "data"):  # vLLM's MultiModalFieldElem
        if value.data is None:
            raise NoContentError("an item's data are not in vLLM's scheduler process")
        return _add(whole, value.data)
    if hasattr(value, "untyped_storage"):
        data = _bytes_of(value)
        _frame(whole, "tensor", value.dtype, tuple(value.shape))
        whole.update(data)
        return int(data.nbytes)
    if value is None or isinstance(value, str | bytes | bool | int | float):
        _frame(whole, type(value).__name__, repr(value))
        return 0
    raise NoContentError(f"an item has data of type {type(value).__name__}, whose bytes are not known")


def _frame(whole: Any, *words: object) -> None:
    told = repr(words).encode()
    whole.update(len(told).to_bytes(8, "little") + told)


def _bytes_of(tensor: Any) -> Any:
    import torch

    if tensor.device.type != "cpu":
        raise NoContentError("an item's data are on a device")
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
