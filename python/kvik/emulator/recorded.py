"""Step times of hardware that `kvik doctor` has recorded: `doctor=FILE,model=NAME[,tp=N][,pp=N]`.

A decode step takes what the doctor's cost model says of a cluster of such hosts (`kvik.doctor.cost`), linear
in the number of sequences. So what is measured of such an emulator is that model, and not the hardware.
"""

from __future__ import annotations

from pathlib import Path

from kvik.doctor import RecordingError, examine, load
from kvik.doctor.cost import MODELS, Model, best_path, path_gbs, step_s
from kvik.errors import InvalidArgument

KEYS = ("doctor", "model", "tp", "pp")


def step_of_recording(text: str) -> tuple[float, float]:
    """Seconds of a step without a sequence, and more of each. `InvalidArgument` says what is wrong."""
    said = dict(part.partition("=")[::2] for part in text.split(","))
    if unknown := said.keys() - set(KEYS):
        raise InvalidArgument(
            f"compute model {text!r}: {sorted(unknown)[0]!r} is none of {', '.join(KEYS)}, which are all "
            "that go with doctor="
        )
    model = _model(said.get("model", ""))
    tp, pp = _ranks("tp", said.get("tp", "1")), _ranks("pp", said.get("pp", "1"))
    try:
        machine = examine(load(Path(said["doctor"])))
    except RecordingError as error:
        raise InvalidArgument(f"compute model: {error}; make one with `kvik doctor --save`") from error
    path = best_path(machine)
    if path is None:
        raise InvalidArgument(f"compute model: {said['doctor']} has no path from a GPU to a NIC with a port")
    none, one = (step_s(model, tp, pp, batch, path_gbs(machine, path), path.chipset) for batch in (0, 1))
    return none, one - none


def _model(name: str) -> Model:
    found = next((one for one in MODELS if one.name.lower() == name.lower()), None)
    if found is None:
        known = ", ".join(one.name for one in MODELS)
        raise InvalidArgument(f"compute model: model={name!r}; the doctor's cost model knows {known}")
    return found


def _ranks(key: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise InvalidArgument(f"compute model: {key}={text!r} is no whole number from 1 to 1024")
    return int(text)
