"""One load from its specification to its result."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from kvik_lab.load.drive import opened
from kvik_lab.load.search import search
from kvik_lab.load.spec import LoadSpec
from kvik_lab.load.summary import summarise
from kvik_lab.records import Client, Figure, LoadResult
from kvik_lab.records.measures import Goals


async def run(spec: LoadSpec) -> LoadResult:
    """Warm up, send the load, and give what was seen; requests that fail are in it, with why.

    Raises `LabError` where the server does not answer at all, or the load cannot be made as it is stated.
    """
    began = time.time_ns()
    async with opened(spec) as (driver, watch):
        warmed = await driver.warm_up()
        figures: Sequence[Figure] = ()
        if spec.search is not None:
            figures = await search(driver)
        else:
            await driver.run()
        clock = await watch.stop()
        requests = driver.requests()
        measured = [request for request in requests if request.phase != "warmup"]
        goals = None if spec.goals is None or spec.search is not None else Goals(**spec.goals.model_dump())
        repeated = Figure(metric="repeated_prompt_share", unit="1", value=driver.repeated_share())
        return LoadResult(
            zero=driver.zero,
            began=began,
            ended=time.time_ns(),
            client=Client(
                driver="builtin",
                version=_version(),
                target=spec.url,
                load=spec.model_dump(mode="json", exclude_defaults=True),
                seed=spec.seed,
                warmup=warmed,
                cpu_seconds=watch.cpu_seconds,
                wall_seconds=watch.wall_seconds,
                largest_lag=watch.largest_lag,
                clock=clock,
            ),
            requests=requests,
            figures=(*figures, repeated, *summarise(measured, goals)),
        )


def _version() -> str | None:
    try:
        return version("kvik-lab")
    except PackageNotFoundError:
        return None
