"""How well do measured costs predict steps that were measured in other runs? From kept traces, without a GPU.

    python -m benchmarks.prediction --traces folder

The traces are those that `benchmarks/overlap_trace.py` keeps of the merged plan: of all ranks, and of some without
communication. Costs measured on them predict the step of that run, and those of the plans that
`benchmarks/step_time.py` timed. What was measured is read from the results of these two. So the runs differ: in their
days, in the version of hocket, and in where the tokens went.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.bench.record import origins
from benchmarks.calibration import predictions
from benchmarks.options import arguments
from benchmarks.record import RESULTS, write
from benchmarks.step_time import contenders
from benchmarks.stored import config_of
from hocket.config.rule import Host
from hocket.resolve import Settings, resolve
from hocket_trace.align import load

SIZES = ("model", "mesh", "data", "train")
"""Sections of a configuration that two runs must agree on, as far as both have a setting."""
APART = ("transport", "device", "steps", "hang_timeout", "profile")
"""Settings of these sections that don't change what a step computes."""


def assert_same_sizes(settings: Settings, measured: dict[str, Any]) -> None:
    """Raise ValueError if a result is of another model, mesh or batch than the traces."""
    for section in SIZES:
        for name, value in measured["config"][section].items():
            here = getattr(getattr(settings, section), name, value)
            here = json.loads(json.dumps(asdict(here) if is_dataclass(here) else here))
            if name not in APART and here != value:
                raise ValueError(
                    f"{section}.{name} = {here} (traces): {value} in the result of `{measured['command']}`; "
                    "fix: traces and results of the same sizes"
                )


def predicted(folder: Path, results: Path = RESULTS) -> dict[str, Any]:
    """Predicted and measured steps, as `calibration.predictions` has them, and which runs they are of."""
    real, null = (load(sorted(folder.glob(f"{kind}_rank*.json.gz"))) for kind in ("real", "null"))
    config = config_of(real[0].run["settings"])
    settings = resolve(config, Host(gpus=config.mesh.world))
    recorded, timed = (json.loads((results / f"{name}.json").read_text()) for name in ("overlap_trace", "step_time"))
    for found in (recorded, timed):
        assert_same_sizes(settings, found)
    plans = {"as recorded": settings} | {name: cast(Settings, each) for name, each in contenders(settings).items()}
    times = {"as recorded": [recorded["seconds_without_profiler"]["real"]]}
    for name, row in timed["contenders"].items():
        if name in plans and name != "bound":  # which does not communicate
            times[name] = [seconds for block in row["blocks"] for seconds in block]
    found = predictions(real, null, {name: plans[name] for name in times}, times)
    runs = {"recorded": origins(recorded)[0], "timed": origins(timed)[0]}
    return {"runs": runs, "shapes": {settings.run.name: found}}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    options = parser.parse_args()
    found = predicted(options.traces)
    for name, shape in found["shapes"].items():
        for plan, row in shape["plans"].items():
            both = f"measured {row['measured']:.4f} s  predicted {row['predicted']:.4f} s"
            print(f"{name:10} {plan:24} {both}  {row['ratio']:.3f}")
    print(write("prediction", found, options.out, options.commit))


if __name__ == "__main__":
    main()
