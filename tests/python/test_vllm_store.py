"""vLLM with a store, against the base class of each supported release: what is found, and what must not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvik.handover.content import SAMPLE_BYTES, SAMPLE_PLACES
from tests.python.store_rig import Served
from tests.python.vllm_harness import Status
from tests.python.vllm_images import Data, Pixels, image, pixels
from tests.python.vllm_store_harness import BLOCK, StoreServer, lora, make, running, weights

PROMPT = list(range(200, 200 + 4 * BLOCK + 1))
WHOLE = 4 * BLOCK
HOST = {"host_cache": "1MiB", "deadline": 20.0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served("--memory", "16MiB") as store:
        yield store


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of this test alone, so that the store has nothing of it."""
    return weights(tmp_path / "model", str(tmp_path).encode())


def at(served: Served, **more: Any) -> dict[str, Any]:
    return {"address": served.address, "deadline": 20.0, **more}


def test_kv_outlives_the_engine(kvik_vllm: ModuleType, served: Served, model: Path) -> None:
    """Put by one engine, found by the next one: nothing but the last token is computed."""
    with running(StoreServer(kvik_vllm, model, at(served)).met()) as (first,):
        cold = first.serve(PROMPT)
        assert (cold.hit, cold.computed) == (0, len(PROMPT))
    with running(StoreServer(kvik_vllm, model, at(served)).met()) as (second,):
        warm = second.serve(PROMPT)
        assert (warm.hit, warm.computed) == (WHOLE, 1)
        assert second.total("cache_remote_blocks") == 4
        assert second.total("cache_hit_tokens") == WHOLE
        longer = second.serve([*PROMPT[:WHOLE], *range(900, 900 + BLOCK)])
        assert (longer.hit, longer.computed) == (WHOLE, BLOCK)
        assert second.serve([1, *PROMPT]).hit == 0


def test_an_answer_is_kept_too(kvik_vllm: ModuleType, model: Path) -> None:
    """But for its last token, which was never computed."""
    with running(StoreServer(kvik_vllm, model, HOST).met()) as (server,):
        server.serve(PROMPT[:BLOCK], answer=BLOCK + 1)
        conversation = [*PROMPT[:BLOCK], *range(5000, 5000 + BLOCK + 1), 7, 8, 9]
        assert server.serve(conversation).hit == 2 * BLOCK


def test_the_own_memory_comes_first(kvik_vllm: ModuleType, served: Served, model: Path) -> None:
    """What only the server has comes into the process' memory with the request that has loaded it."""
    both = at(served, host_cache="1MiB")
    with running(StoreServer(kvik_vllm, model, both).met()) as (first,):
        first.serve(PROMPT)
        assert first.serve(PROMPT).hit == WHOLE
        assert (first.total("cache_host_blocks"), first.total("cache_remote_blocks")) == (4, 0)
    with running(StoreServer(kvik_vllm, model, both).met()) as (second,):
        assert [second.serve(PROMPT).hit for _ in range(2)] == [WHOLE, WHOLE]
        assert (second.total("cache_host_blocks"), second.total("cache_remote_blocks")) == (4, 4)


def test_only_what_vllm_has_not_is_loaded(kvik_vllm: ModuleType, model: Path) -> None:
    with running(StoreServer(kvik_vllm, model, HOST).met()) as (server,):
        server.serve(PROMPT)
        told = server.serve(PROMPT, local=2 * BLOCK)
        assert (told.hit, told.computed) == (2 * BLOCK, 1)
        assert server.total("cache_host_blocks") == 2
        assert server.serve(PROMPT, local=WHOLE).hit == 0


@pytest.mark.parametrize("tp", [2])
def test_ranks_have_a_part_each(kvik_vllm: ModuleType, served: Served, model: Path, tp: int) -> None:
    with running(StoreServer(kvik_vllm, model, at(served), tp=tp).met()) as (first,):
        first.serve(PROMPT)
    with running(StoreServer(kvik_vllm, model, at(served), tp=tp).met()) as (second,):
        assert second.serve(PROMPT).hit == WHOLE
        assert second.total("cache_remote_blocks") == 4 * tp
    with running(StoreServer(kvik_vllm, model, at(served), dims={"heads": 4}).met()) as (whole,):
        assert whole.serve(PROMPT).hit == 0  # all heads in one rank: other blocks


def test_a_salt_sets_tenants_apart(kvik_vllm: ModuleType, model: Path) -> None:
    with running(StoreServer(kvik_vllm, model, HOST).met()) as (server,):
        server.serve(PROMPT, cache_salt="one")
        assert server.serve(PROMPT, cache_salt="two").hit == 0
        assert server.serve(PROMPT).hit == 0
        assert server.serve(PROMPT, cache_salt="one").hit == WHOLE


def test_other_weights_under_one_name_are_a_miss(kvik_vllm: ModuleType, served: Served, model: Path) -> None:
    """They differ in a byte that the sample of a handover has not: it has each other 4 KiB of these."""
    content = bytearray(str(model).encode().ljust(2 * SAMPLE_PLACES * SAMPLE_BYTES))
    weights(model, bytes(content))
    with running(StoreServer(kvik_vllm, model, at(served)).met()) as (first,):
        first.serve(PROMPT)
    content[SAMPLE_BYTES + 1] = 1
    weights(model, bytes(content))
    with running(StoreServer(kvik_vllm, model, at(served)).met()) as (second,):
        assert second.serve(PROMPT).hit == 0


def test_an_adapter_is_told_by_its_bytes(
    kvik_vllm: ModuleType, served: Served, model: Path, tmp_path: Path
) -> None:
    path, copy = weights(tmp_path / "lora", b"one"), weights(tmp_path / "copy", b"one")
    with running(StoreServer(kvik_vllm, model, at(served)).met()) as (first,):
        first.serve(PROMPT, lora_request=lora(path))
        assert first.serve(PROMPT).hit == 0
        assert first.serve(PROMPT, lora_request=lora(copy, 2, "other name")).hit == WHOLE
    weights(path, b"two")
    with running(StoreServer(kvik_vllm, model, at(served)).met()) as (second,):
        assert second.serve(PROMPT, lora_request=lora(path)).hit == 0
        assert second.serve(PROMPT, lora_request=lora(copy, 2)).hit == WHOLE


def test_an_adapter_that_changes_under_a_running_server_is_not_kept(
    kvik_vllm: ModuleType, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether vLLM has loaded the new files or not cannot be known."""
    path = weights(tmp_path / "lora", b"one")
    with running(StoreServer(kvik_vllm, model, HOST).met()) as (server,):
        server.serve(PROMPT, lora_request=lora(path))
        weights(path, b"two")
        for _ in range(2):
            assert server.serve(PROMPT, lora_request=lora(path)).hit == 0
        assert "have changed since this server first used that name" in caplog.text
        weights(path, b"one")
        assert server.serve(PROMPT, lora_request=lora(path)).hit == 0
        longer = [*PROMPT, *range(900, 900 + BLOCK)]
        assert server.serve(longer, lora_request=lora(path, 2)).hit == WHOLE  # of before
        assert server.total("cache_requests_not_kept") == 4
        assert server.serve(PROMPT, lora_request=lora(path, 3, "another")).hit == WHOLE


def test_an_adapter_under_the_name_of_another_is_not_kept(
    kvik_vllm: ModuleType, model: Path, tmp_path: Path
) -> None:
    """Releases whose prefix cache goes by the name have KV of the other one."""
    one, two = (weights(tmp_path / name, name.encode()) for name in ("one", "two"))
    with running(StoreServer(kvik_vllm, model, HOST).met()) as (server,):
        server.serve(PROMPT, lora_request=lora(one))
        longer = [*PROMPT, *range(900, 900 + BLOCK)]
        for path, number, hit in ((two, 2, 0), (one, 3, WHOLE)):  # what was kept before is found
            assert server.serve(longer, lora_request=lora(path, number)).hit == hit
        assert server.total("cache_requests_not_kept") == 2
        assert server.serve(longer, lora_request=lora(two, 4, "two")).hit == 0
        assert server.serve(longer, lora_request=lora(one, 5, "one")).hit == WHOLE


def test_an_image_is_told_by_its_data(
    kvik_vllm: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The identifier may be what a client has chosen."""
    with running(StoreServer(kvik_vllm, model, HOST).met()) as (server,):
        server.serve(PROMPT, mm_features=[image(pixels(3), "same")])
        assert server.serve(PROMPT, mm_features=[image(pixels(3), "another")]).hit == WHOLE
        assert server.serve(PROMPT, mm_features=[image(pixels(4), "other")]).hit == BLOCK  # before the image
        assert server.serve(PROMPT, mm_features=[image(pixels(3), "same", offset=6)]).hit == BLOCK
        assert server.serve(PROMPT, mm_features=[image(pixels(3), "same")]).hit == WHOLE
        assert server.total("cache_requests_not_kept") == 0
        for unknown in (None, {"pixels": object()}):
            assert server.serve(PROMPT, mm_features=[image(unknown, "unknown")]).hit == 0
        assert "its data are not in vLLM's scheduler process" in caplog.text
        assert "data of type object" in caplog.text


def test_what_only_says_where_an_image_is_is_no_image(
    kvik_vllm: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A place in shared memory means another image on the next server; the size of one, many."""
    places = Data(address=0, monotonic_id=0, signature=[7] * 32), Data(image_grid_thw=Pixels(2.0))
    with running(StoreServer(kvik_vllm, model, HOST).met()) as (server,):
        for place in places:
            for _ in range(2):
                assert server.serve(PROMPT, mm_features=[image(place, "same")]).hit == 0
        assert server.total("cache_requests_not_kept") == 4
        for names in ("address, monotonic_id, signature", "image_grid_thw"):
            assert f"has only {names} of it" in caplog.text


def test_one_name_of_two_images_is_not_kept(
    kvik_vllm: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM may have computed either with what it knew of the other. What was kept before is found."""
    with running(StoreServer(kvik_vllm, model, HOST).met()) as (server,):
        server.serve(PROMPT, mm_features=[image(pixels(3), "same")])
        server.serve(PROMPT, mm_features=[image(pixels(4), "same")])
        longer = [*PROMPT, *range(900, 900 + BLOCK)]
        assert server.serve(longer, mm_features=[image(pixels(3), "same")]).hit == WHOLE
        assert "image 'same' was not always the same here" in caplog.text
        assert server.total("cache_requests_not_kept") == 2
        assert server.serve(PROMPT, mm_features=[image(pixels(4), "four")]).hit == BLOCK
        assert server.serve(longer, mm_features=[image(pixels(3), "three")]).hit == WHOLE


def test_how_a_server_prepares_images_is_part_of_the_name(
    kvik_vllm: ModuleType, served: Served, model: Path
) -> None:
    """Models that normalise images themselves are given the same data, whatever that is set to."""
    normal = {"mm_processor_kwargs": None, "mm_device_do_normalize": True}
    others = {**normal, "mm_processor_kwargs": {"image_mean": [0.1]}}
    for settings, hit in ((None, 0), (normal, 0), (others, 0), (normal, WHOLE)):
        given = None if settings is None else SimpleNamespace(**settings)
        with running(StoreServer(kvik_vllm, model, at(served), multimodal=given).met()) as (server,):
            assert server.serve(PROMPT).hit == hit
    (model / "preprocessor_config.json").write_text('{"image_mean": [0.1]}')
    with running(StoreServer(kvik_vllm, model, at(served), multimodal=SimpleNamespace(**normal)).met()) as (
        server,
    ):
        assert server.serve(PROMPT).hit == 0


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"encoders": object()}, "--ec-transfer-config"),
        ({"multimodal": SimpleNamespace(mm_encoder_attn_dtype="fp8")}, "--mm-encoder-attn-dtype"),
    ],
)
def test_where_data_do_not_say_what_is_made_of_an_image(
    kvik_vllm: ModuleType, model: Path, caplog: pytest.LogCaptureFixture, more: dict[str, Any], text: str
) -> None:
    with running(StoreServer(kvik_vllm, model, HOST, **more).met()) as (server,):
        for _ in range(2):
            assert server.serve(PROMPT, mm_features=[image(pixels(3), "same")]).hit == 0
        assert text in caplog.text
        assert server.total("cache_requests_not_kept") == 2


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"prompt_embeds": object()}, "prompt embeddings"),
        ({"resumable": True}, "streamed input"),
    ],
)
def test_what_nothing_stands_for_is_not_kept(
    kvik_vllm: ModuleType, model: Path, caplog: pytest.LogCaptureFixture, more: dict[str, Any], text: str
) -> None:
    with running(StoreServer(kvik_vllm, model, HOST).met()) as (server,):
        for _ in range(2):
            assert server.serve(PROMPT, **more).hit == 0
        assert server.serve(PROMPT).hit == 0
        said = {record.getMessage() for record in caplog.records if text in record.getMessage()}
        assert len(said) == 1, "it is said once, of one request"
        assert server.total("cache_requests_not_kept") == 2


def test_a_request_that_wants_every_token_computed(kvik_vllm: ModuleType, model: Path) -> None:
    """Log probabilities of the prompt: it is not loaded, and kept all the same."""
    with running(StoreServer(kvik_vllm, model, HOST).met()) as (server,):
        for _ in range(2):
            assert server.serve(PROMPT, skip_reading_prefix_cache=True).hit == 0
        assert server.serve(PROMPT).hit == WHOLE


def test_weights_that_cannot_be_read_keep_nothing(
    kvik_vllm: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    with running(StoreServer(kvik_vllm, tmp_path / "empty", HOST).named()) as (server,):
        for _ in range(2):
            assert server.serve(PROMPT).hit == 0
        assert "has no file of weights" in caplog.text
    stated = {**HOST, "weights": "build 7"}
    with running(StoreServer(kvik_vllm, tmp_path / "empty", stated).met()) as (server,):
        server.serve(PROMPT)
        assert server.serve(PROMPT).hit == WHOLE


def test_blocks_that_go_before_they_are_read_are_computed(
    kvik_vllm: ModuleType, served: Served, model: Path
) -> None:
    """The answer was true when it was given. vLLM is told which KV blocks are missing, and no others."""
    with running(StoreServer(kvik_vllm, model, at(served)).met()) as (server,):
        server.serve(PROMPT)
        rank = server.server.workers[0]._cache_rank
        look = rank._tiers.look

        def then_remove(links: bytes) -> Any:
            found = look(links)
            store = rank._tiers._remote
            store.remove(rank._tiers._keys(store, links[2 * 32 : 3 * 32]))
            return found

        rank._tiers.look = then_remove
        told = server.serve(PROMPT)
        assert (told.hit, len(told.invalid), told.computed) == (WHOLE, 2, 2 * BLOCK + 1)
        assert server.total("cache_missing_blocks") == 2
        rank._tiers.look = look
        assert server.serve(PROMPT).hit == WHOLE  # put again


def until_hits(server: StoreServer) -> None:
    """Ask until the store is met, and has the blocks."""
    until = time.monotonic() + 60.0
    while not server.serve(PROMPT).hit:
        assert time.monotonic() < until, "hits do not resume"


def test_a_store_that_dies_and_comes_back(kvik_vllm: ModuleType, model: Path) -> None:
    """Requests are computed, and hits resume by themselves."""
    with (
        Served("--memory", "16MiB") as store,
        running(StoreServer(kvik_vllm, model, at(store, deadline=2.0)).met()) as (server,),
    ):
        until_hits(server)  # a rank that has no turn for as long as the deadline is late
        store.kill()
        assert server.serve(PROMPT).hit == 0
        store.again()
        until_hits(server)


def test_a_store_that_stops_costs_a_deadline(kvik_vllm: ModuleType, model: Path) -> None:
    """By the scheduler's clock where no rank answers; and each rank answers by its own."""
    options = {"deadline": 0.5, "save_deadline": 1.0}
    now = [1000.0]
    with (
        Served("--memory", "16MiB") as store,
        running(StoreServer(kvik_vllm, model, at(store, **options)).met()) as (server,),
    ):
        scheduler = server.server.scheduler
        scheduler._cache._clock = lambda: now[0]
        server.serve(PROMPT)
        with store.stopped():
            wanted = make(PROMPT, status=Status.FINISHED_ABORTED)
            server.server.arrive(wanted)
            for passed, told in ((0.0, (None, False)), (0.4, (None, False)), (0.2, (0, False))):
                now[0] += passed
                assert scheduler.get_num_new_matched_tokens(wanted, 0) == told
            scheduler.request_finished_all_groups(wanted, ([],))
            server.server.step()
            assert server.total("cache_late") == 1
            for _ in range(3):
                assert server.asked(PROMPT) == 0
        until_hits(server)


def test_a_store_that_is_not_there_yet(kvik_vllm: ModuleType, model: Path) -> None:
    with Served("--memory", "16MiB") as store:
        store.kill()
        with running(StoreServer(kvik_vllm, model, at(store)).named()) as (server,):
            assert server.serve(PROMPT).hit == 0
            assert server.total("cache_saves_failed_remote_store_unavailable") >= 1
            store.again()
            until_hits(server)
