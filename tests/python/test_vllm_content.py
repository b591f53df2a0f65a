"""Models and adapters of a handover, against each supported vLLM: compared by bytes where names are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvik.handover import content
from tests.python.fake_engine import FakeNative
from tests.python.vllm_harness import Server, admit, offer, prompt, request
from tests.python.vllm_store_harness import lora, weights


def asked(d: Server, params: dict[str, Any], number: int = 1, **more: Any) -> int:
    """The tokens that a request is to load of an offer of 8."""
    return admit(d, request(f"d-{number}", prompt(8), params, **more), [5, 6])


# Adapters.


def test_an_adapter_is_compared_by_its_bytes(pair: tuple[Server, Server], tmp_path: Path) -> None:
    """Neither its name nor its path says what is in it, as where a server has loaded a newer one."""
    p, d = pair
    one, two, copy = (weights(tmp_path / name, name[:1].encode()) for name in ("one", "two", "one again"))
    params = offer(p, prompt(8), [1, 2], lora_request=lora(one, name="sql"))
    p.step()
    assert asked(d, params, 1, lora_request=lora(two, 1, "sql")) == 0
    assert asked(d, params, 2) == 0
    d.step()
    assert d.total("recomputed_digest_mismatch") == 2
    assert asked(d, params, 3, lora_request=lora(copy, 2, "other name")) == 8
    assert d.step().received == {"d-3"}
    assert d.values(5) == {1}


def test_one_path_of_two_adapters_is_another_adapter(pair: tuple[Server, Server], tmp_path: Path) -> None:
    p, d = pair
    path = weights(tmp_path / "sql", b"one")
    params = offer(p, prompt(8), [1, 2], lora_request=lora(path))
    p.step()
    weights(path, b"two")
    assert asked(d, params, lora_request=lora(path)) == 0
    d.step()
    assert d.total("recomputed_digest_mismatch") == 1


@pytest.mark.parametrize("change", ["files", "name", "in place"])
def test_an_adapter_that_is_not_certain_is_not_handed_over(
    pair: tuple[Server, Server], tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """vLLM may have loaded the new files or not, and its cache may go by the name."""
    p, d = pair
    path = weights(tmp_path / "sql", b"one")
    params = offer(p, prompt(8), [1, 2], lora_request=lora(path, name="sql"))
    p.step()
    if change == "files":
        weights(path, b"two")
        other = lora(path, name="sql")
    else:
        other = lora(weights(tmp_path / "other", b"two"), 2, "sql")
        other.load_inplace = change == "in place"
    assert p.prefill("p-2", prompt(8), [3, 4], lora_request=other) is None
    assert "request p-2 is not handed over: adapter 'sql'" in caplog.text
    if change == "in place":  # decode knows as little of it
        assert asked(d, params, lora_request=other) == 0
        d.step()
        assert d.total("recomputed_adapter_uncertain") == 1


# Models.


@pytest.fixture
def servers(kvik_vllm: ModuleType, native: FakeNative) -> Callable[..., Server]:
    def made(role: str, model: Path, **more: Any) -> Server:
        return Server(kvik_vllm, native, f"kv_{role}", model=str(model), **more)

    return made


def config_of(**fields: Any) -> Any:
    """A model's configuration, as transformers has it."""
    return SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4, "torch_dtype": object(), **fields})


def exchanged(p: Server, d: Server) -> bool:
    """Whether KV of one server is loaded by the other."""
    params = offer(p, prompt(8), [1, 2])
    p.step()
    tokens = asked(d, params)
    d.step()
    p.step()
    assert d.total("recomputed_namespace_mismatch") == (tokens == 0)
    return tokens == 8


def test_other_weights_under_one_path_are_another_model(
    servers: Callable[..., Server], tmp_path: Path
) -> None:
    """As where a server of a rolling update has mounted the next training in the same place."""
    model = weights(tmp_path / "model", b"x" * 100_000 + b"one")
    old, same = servers("producer", model), servers("consumer", model)
    assert exchanged(old, same)
    weights(model, b"x" * 100_000 + b"two")
    new = servers("consumer", model)
    assert not exchanged(old, new)
    stated = {"extra": {"store": {"weights": "build 7"}}}
    assert exchanged(servers("producer", model, **stated), servers("consumer", weights(model), **stated))


def test_one_model_under_two_paths(servers: Callable[..., Server], tmp_path: Path) -> None:
    """A stated name replaces the path; the weights count all the same."""
    extra = {"extra": {"namespace": "ours"}}
    paths = [weights(tmp_path / name, name[:1].encode()) for name in ("one", "one again", "two")]
    p, same, other = (
        servers(role, path, **extra)
        for role, path in zip(("producer", "consumer", "consumer"), paths, strict=True)
    )
    assert exchanged(p, same)
    assert not exchanged(p, other)


@pytest.mark.parametrize(
    ("fields", "equal"),
    [
        ({}, True),
        ({"rope_theta": 5e5}, False),
        ({"text_config": {"hidden_size": 9}}, False),
        ({"_name_or_path": "elsewhere", "transformers_version": "9"}, True),
    ],
)
def test_the_configuration_as_vllm_runs_it_is_compared(
    servers: Callable[..., Server], tmp_path: Path, fields: dict[str, Any], equal: bool
) -> None:
    """Of one model under one path, which `--hf-overrides` may have changed."""
    model = weights(tmp_path / "model")
    p = servers("producer", model, hf_config=config_of())
    assert exchanged(p, servers("consumer", model, hf_config=config_of(**fields))) == equal


LONG_ROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 4096}},
        {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096},
        {"text_config": {"rope_parameters": {"full": LONG_ROPE}, "original_max_position_embeddings": 4096}},
    ],
)
def test_which_factors_a_long_rope_has_follows_from_the_longest_request(
    servers: Callable[..., Server], tmp_path: Path, fields: dict[str, Any]
) -> None:
    """vLLM rotates by the long ones where requests may be longer than what the model was trained for."""
    model, config = weights(tmp_path / "model"), config_of(**fields)

    def exchange(one: int, other: int, **more: Any) -> bool:
        p = servers("producer", model, hf_config=config, length=one)
        return exchanged(p, servers("consumer", model, hf_config=config, length=other, **more))

    assert not exchange(4096, 8192)
    assert exchange(8192, 16384)
    assert exchange(2048, 4096)
    assert not exchange(2048, 2048, fitted=True), "it was another one when the model was made"


def test_what_a_long_rope_was_trained_for_is_not_said(servers: Callable[..., Server], tmp_path: Path) -> None:
    model, config = weights(tmp_path / "model"), config_of(rope_parameters=LONG_ROPE)
    p = servers("producer", model, hf_config=config, length=4096)
    assert exchanged(p, servers("consumer", model, hf_config=config, length=4096))
    assert not exchanged(p, servers("consumer", model, hf_config=config, length=8192))


def test_whether_llama_4_scales_its_attention_is_compared(
    servers: Callable[..., Server], tmp_path: Path
) -> None:
    model, config = weights(tmp_path / "model"), config_of(text_config={"model_type": "llama4_text"})
    p = servers("producer", model, hf_config=config, length=32_768)
    assert exchanged(p, servers("consumer", model, hf_config=config, length=8192))
    assert not exchanged(p, servers("consumer", model, hf_config=config, length=32_769))
    told = {"hf_config": config, "generation": {"attn_temperature_tuning": True}}
    assert not exchanged(p, servers("consumer", model, length=8192, **told))


def test_requests_of_any_length_of_other_models(servers: Callable[..., Server], tmp_path: Path) -> None:
    model, config = weights(tmp_path / "model"), config_of(rope_parameters={"rope_type": "yarn"})
    p = servers("producer", model, hf_config=config, length=4096)
    assert exchanged(p, servers("consumer", model, hf_config=config, length=65_536))


@pytest.mark.parametrize(
    ("fields", "equal"),
    [
        ({"dtype": "bfloat16", "torch_dtype": None, "max_model_len": 9}, True),
        ({"text_config": {"architectures": ["MistralForCausalLM"], "dtype": "bfloat16"}}, True),
        ({"architectures": ["AnotherForCausalLM"]}, False),
    ],
)
def test_what_loading_writes_into_the_configuration_is_not_compared(
    servers: Callable[..., Server], tmp_path: Path, fields: dict[str, Any], equal: bool
) -> None:
    """With one rank a model is loaded in the scheduler's process, before its configuration is read."""
    model, before = weights(tmp_path / "model"), {"architectures": ["OneForCausalLM"], "text_config": {}}
    p = servers("producer", model, hf_config=config_of(**before))
    assert exchanged(p, servers("consumer", model, hf_config=config_of(**{**before, **fields}))) == equal


@pytest.mark.parametrize(
    ("before", "after", "equal"),
    [
        ("yarn", "deepseek_yarn", True),
        ("yarn", "deepseek_llama_scaling", True),
        ("yarn", "linear", False),
        ("default", "deepseek_yarn", False),
    ],
)
@pytest.mark.parametrize("inner", [False, True])
def test_what_loading_calls_the_rope_of_a_model_with_a_latent_is_not_compared(
    servers: Callable[..., Server], tmp_path: Path, before: str, after: str, equal: bool, inner: bool
) -> None:
    """DeepSeek's classes write it, and those made of them. Of other models it is another rope."""
    model = weights(tmp_path / "model")

    def config(rope_type: str, **more: Any) -> Any:
        fields = {"rope_parameters": {"rope_type": rope_type, "factor": 40.0}, **more}
        return config_of(**({"text_config": fields} if inner else fields))

    latent = {"kv_lora_rank": 512}
    p = servers("producer", model, hf_config=config(before, **latent))
    assert exchanged(p, servers("consumer", model, hf_config=config(after, **latent))) == equal
    other = servers("producer", model, hf_config=config(before))
    assert not exchanged(other, servers("consumer", model, hf_config=config(after)))


def test_settings_of_images_are_compared(servers: Callable[..., Server], tmp_path: Path) -> None:
    """Models that normalise images themselves are given the same data, whatever that is set to."""
    model, settings = weights(tmp_path / "model"), SimpleNamespace(mm_processor_kwargs={"image_mean": [0.1]})
    p = servers("producer", model, multimodal=settings)
    assert exchanged(p, servers("consumer", model, multimodal=settings))
    assert not exchanged(p, servers("consumer", model, multimodal=SimpleNamespace()))


def test_a_sample_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file from its beginning on, a few bytes of each stretch; no more than so many places."""
    monkeypatch.setattr(content, "SAMPLE_PLACES", 8)
    monkeypatch.setattr(content, "SAMPLE_BYTES", 10)
    data = bytearray(2000)
    (tmp_path / "a.safetensors").write_bytes(b"small")
    file = tmp_path / "b.safetensors"
    file.write_bytes(data)
    (tmp_path / "config.json").write_text("{}")
    before = content.files_sample(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert content.files_sample(tmp_path) == before
    seen = []
    for place in range(0, 2000, 10):
        file.write_bytes(data[:place] + b"1" + data[place + 1 :])
        if content.files_sample(tmp_path) != before:
            seen.append(place)
    assert len(seen) == 8
    assert seen[0] == 0
    assert seen[-1] > 1700
    file.write_bytes(bytes(2001))
    assert content.files_sample(tmp_path) != before
    file.write_bytes(data)
    assert content.files_sample(tmp_path) == before
    assert content.files_sample(file) != before, "of one file alone"
