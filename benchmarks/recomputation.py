"""What recomputed and offloaded parts cost and save: whole training steps on one GPU, with them and without.

    torchrun --nproc-per-node 1 -m benchmarks.recomputation
    torchrun --nproc-per-node 1 -m benchmarks.recomputation offload --lengths 32768 --microbatches 2

Six layers of Qwen3-30B-A3B with AdamW, four microbatches of one sequence. There is room for one engine, so each block
of steps has a new one. They take turns, there and back. Each begins with steps of deterministic kernels, whose losses
are kept: where saved tensors come from must not change a bit of them. Then it is timed, with the kernels of any run.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench.gate import curve, gentle
from benchmarks.bench.measure import Gauge, Timer, nvml
from benchmarks.bench.ours import Planned
from benchmarks.bench.workload import Workload, batches
from benchmarks.options import arguments
from benchmarks.ranks import join
from benchmarks.record import write
from hocket.collector import no_collection
from hocket.config import Config
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve

RECIPE = "qwen3_30b_a3b"
SIZES: dict[str, Any] = {
    "model.layers": 6, "mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "plan.chunks": 1, "train.microbatches": 4,
    "train.transport": "nccl",
}  # fmt: skip
Choice = dict[str, tuple[str, ...]]
"""Settings and their values."""
STUDIES: dict[str, dict[str, Choice]] = {
    "recomputation": {
        "": {},
        "dispatch": {"plan.recompute": ("dispatch",)},
        "experts": {"plan.recompute": ("experts",)},
        "attn": {"plan.recompute": ("attn",)},
    },
    "offload": {
        "": {},
        "attn recomputed": {"plan.recompute": ("attn:5",)},
        "attn offloaded": {"plan.offload": ("attn:5",)},
        "experts recomputed": {"plan.recompute": ("experts:5",)},
        "experts offloaded": {"plan.offload": ("experts:5",)},
    },
}
"""Name -> what is compared, by name; empty: all stays where it is. The last layer's backward follows its forward."""
FIRST = 4
"""Steps whose losses are kept."""


def settings_of(choice: Choice, length: int, host: Host, sizes: Mapping[str, Any]) -> Settings:
    """Of steps with sequences of `length` tokens."""
    return resolve(
        changed(recipe(RECIPE), {"plan.recompute": (), **sizes, "data.sequence_length": length, **choice}), host
    )


def measure(settings: Settings, device: torch.device, steps: int, gauge: Gauge) -> dict[str, Any]:
    """The losses of the first steps, a block of steps, and the largest memory in use meanwhile, in bytes."""
    workload, timer = gentle(Workload(settings)), Timer(device)
    timer.settle()  # gives back what the engine before has had
    if timer.on_gpu:
        torch._C._cuda_clearCublasWorkspaces()  # of its streams; a new engine has others
    planned, microbatches = Planned(workload, 0, device, workload.config), batches(workload, 0, 0, device)
    torch.use_deterministic_algorithms(True)  # flash attention adds up gradients in a fixed order
    losses = curve(planned, workload, 0, device, FIRST)
    torch.use_deterministic_algorithms(False)
    step = functools.partial(planned.step, microbatches)
    with no_collection():
        (seconds,) = timer.steps(step, 1)
        block = timer.block(step, timer.uncounted(seconds), steps, gauge)
    peak = torch.cuda.max_memory_allocated(device) if timer.on_gpu else 0
    planned.close()
    return {"first_losses": losses, **asdict(block), "peak_bytes": peak}


def take_turns(
    study: str, choices: Mapping[str, Settings], blocks: int, steps: int, device: torch.device
) -> dict[str, Any]:
    """The configuration, what is compared, and blocks of every choice by round."""
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in choices}
    with Gauge(nvml(device)) as gauge:
        for number in range(blocks):
            for part in list(choices)[:: 1 if number % 2 == 0 else -1]:
                found[part].append(measure(choices[part], device, steps, gauge))
                say(part, found[part][-1])
    config = {each.name: asdict(getattr(choices[""], each.name)) for each in fields(Config)}
    return {"config": config, "choices": STUDIES[study], "blocks": found}


def say(part: str, block: Mapping[str, Any]) -> None:
    times = ", ".join(f"{1e3 * seconds:.1f}" for seconds in block["seconds"])
    peak = block["peak_bytes"] / 2**30
    print(f"{part or 'nothing':18} {times} ms  {peak:.2f} GiB  losses {block['first_losses']}", flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("study", nargs="?", choices=STUDIES, default="recomputation", help="what is compared")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--blocks", type=int, default=4, help="of each choice")
    parser.add_argument("--steps", type=int, default=6, help="of a block")
    options = parser.parse_args()
    _, device = join()
    host = Host(gpus=1, kinds=(torch.cuda.get_device_name(device),))
    found: list[dict[str, Any]] = []
    for length in options.lengths:
        sizes = {**SIZES, "train.microbatches": options.microbatches}
        choices = {name: settings_of(choice, length, host, sizes) for name, choice in STUDIES[options.study].items()}
        found.append(take_turns(options.study, choices, options.blocks, options.steps, device))
        print(write(options.study, {"lengths": found}, options.out, options.commit), flush=True)  # a limit may end it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
