"""What a resolver of overlap settings must answer, as data: the 26 cases that the field's own tests pin down.

Each is put to hocket in its own names. Where hocket's answer is another than the usual one, `why` says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MOE = {"model.experts": 4, "model.top_k": 2, "mesh.ep": 2, "mesh.dp": 2}
TENSOR = {"mesh.tp": 4, "model.kv_heads": 4}
FOUR_STAGES = {"mesh.pp": 4, "model.layers": 8}


class Case(NamedTuple):
    """One question and its answer."""

    number: int
    name: str
    given: dict[str, Any]
    """What differs from the defaults, by dotted name."""
    asked: dict[str, Any] = {}  # noqa: RUF012  (a NamedTuple's default is never written to)
    """The part that a user asked for, on the command line."""
    settings: dict[str, Any] = {}  # noqa: RUF012
    """Settings after resolving."""
    rows: dict[str, str] = {}  # noqa: RUF012
    """State of what is hidden, by axis: on if anything of it is, else off, or n/a."""
    refused: tuple[str, ...] = ()
    """What the error says."""
    why: str = ""


CASES = (
    Case(1, "the request stays as it is", {**TENSOR, "mesh.dp": 2}, {"overlap.tp.method": ("pipeline",)},
         {"overlap.tp.method": ("pipeline",)}),
    Case(2, "nothing to hide", {}, {}, {}, {"tp": "n/a", "pp": "n/a", "dp": "n/a", "ep": "n/a"}),
    Case(3, "no way to move tokens piece by piece", {**TENSOR, "train.device": "cuda", "train.transport": "slow",
         "train.slow": ("100ms",)}, {"overlap.tp.method": ("ring",)}, refused=("overlap.tp.method = ring",)),
    Case(4, "no tensor parallelism", {}, {"overlap.tp.method": ("ring",)},
         refused=("overlap.tp.method = ring", "mesh.tp")),
    Case(5, "tokens are not divided", {**TENSOR, "data.sequence_length": 126}, {"overlap.tp.method": ("ring",)},
         refused=("mesh.tp", "data.sequence_length"),
         why="layers share out tokens whenever they share out weights, so there is no switch for it, but tokens must"
             " be divisible"),
    Case(6, "pipeline with virtual stages", {**FOUR_STAGES, "plan.chunks": 2}, {}, {"plan.order": "interleaved"},
         {"pp": "on"}),
    Case(7, "pipeline without virtual stages", FOUR_STAGES, {}, {"plan.order": "1f1b", "overlap.defer_wgrad": "on"},
         {"pp": "on"},
         why="a send has lanes and groups of its own in any order, and weight gradients behind it; nothing is batched"),
    Case(8, "data parallel", {"mesh.dp": 4}, {}, {"overlap.dp.prefetch": 2}, {"dp": "on"},
         why="a plan gathers and reduces layer by layer; buckets of 128Mi parameters are those of fully_shard"),
    Case(9, "one data-parallel rank", {}, {}, {}, {"dp": "n/a"}),
    Case(10, "data parallel in a pipeline", {**FOUR_STAGES, "plan.chunks": 2, "mesh.dp": 4}, {}, {}, {"dp": "on"},
         why="each rank's plan puts gathers before their readers, so there is nothing to align"),
    Case(11, "every leaf is taken over", {}, {"overlap.ep.merge": "on", "overlap.defer_wgrad": "on",
         "overlap.dp.strategy": "optim_grads_params", "train.steps": 7},
         {"overlap.ep.merge": "on", "overlap.defer_wgrad": "on", "train.steps": 7}),
    Case(12, "auto overrides nothing", FOUR_STAGES, {"overlap.defer_wgrad": "off", "overlap.ep.merge": "auto"},
         {"overlap.defer_wgrad": "off", "overlap.ep.merge": "off"}),
    Case(13, "everything at once", {**TENSOR, "mesh.dp": 4, **FOUR_STAGES}, {"overlap.tp.method": ("pipeline",)},
         {"overlap.tp.method": ("pipeline",)}, {"dp": "on", "pp": "on", "tp": "on"}),
    Case(14, "tensor overlap not asked for", {"mesh.tp": 2, "mesh.dp": 2}, {"overlap.tp.method": ("off",)},
         {"overlap.tp.method": ("off",)}, {"dp": "on"}),
    Case(15, "nothing sharded", {"mesh.dp": 4, "overlap.dp.strategy": "no_shard"}, {},
         {"overlap.dp.strategy": "no_shard"}, {"dp": "on"},
         why="without shards there is nothing to gather, and gradients are reduced under compute all the same"),
    Case(16, "sends not hidden", {**FOUR_STAGES, "plan.chunks": 2},
         {"overlap.defer_wgrad": "off"}, {"overlap.defer_wgrad": "off", "overlap.pp.defer_layers": 0}),
    Case(17, "a way for each layer", TENSOR, {"overlap.tp.method": ("fc2_forward:pipeline",)},
         rows={"tp": "on"}),
    Case(18, "no ways named", TENSOR, {"overlap.tp.method": ("pipeline",)},
         {"overlap.tp.method": ("pipeline",)}, {"tp": "on"}, why="each layer gets what its direction can do"),
    Case(19, "nothing is left open", TENSOR, why="what each direction of each layer does is chosen from its shape"),
    Case(20, "experts", MOE, {"overlap.ep.merge": "on"}, {"overlap.ep.merge": "on"}, {"ep": "on"}),
    Case(21, "experts, weight gradients later", MOE, {"overlap.ep.merge": "on", "overlap.defer_wgrad": "on"},
         {"overlap.defer_wgrad": "on"}, {"ep": "on"}),
    Case(22, "beside reduced gradients", {**MOE, "mesh.dp": 4}, {"overlap.ep.merge": "on", "overlap.defer_wgrad": "on"},
         {"overlap.defer_wgrad": "on"}, {"ep": "on", "dp": "on"}),
    Case(23, "weight gradients later without merging", MOE, {"overlap.ep.merge": "off", "overlap.defer_wgrad": "on"},
         {"overlap.ep.merge": "off", "overlap.defer_wgrad": "on"}, {"ep": "on"},
         why="a weight gradient is an op that can wait, whatever it waits for; experts' ones run under an all-to-all"),
    Case(24, "a graph of attention, gradients not added up in products", MOE,
         {"overlap.defer_wgrad": "on"}, {"overlap.defer_wgrad": "on"},
         why="weight gradients are always added up in their buffers, by products of their own"),
    Case(25, "a graph of attention with biases", MOE, {"overlap.defer_wgrad": "on"}, {"overlap.defer_wgrad": "on"},
         why="biases are weights like others"),
    Case(26, "a graph of attention", MOE, {"overlap.ep.merge": "on", "overlap.defer_wgrad": "on"},
         {"overlap.defer_wgrad": "on"}, {"ep": "on"}),
)  # fmt: skip
"""In the order of the field's tests. Cases that differ in what hocket has no setting for have the same answer."""


CONNECTIONS = "32"
"""CUDA_DEVICE_MAX_CONNECTIONS, in all eight cases of the environment: see `hocket/variables.py`."""
MESHES = (
    {"mesh.tp": 4, "mesh.pp": 4}, {"mesh.tp": 2}, {}, {"mesh.tp": 2, **MOE}, {"mesh.tp": 4},
    {"mesh.tp": 2, "mesh.pp": 2, "mesh.dp": 2}, {"mesh.tp": 8}, {"mesh.dp": 8},
)  # fmt: skip
"""For which others take 1, 8 or 32, by the parallelism and the GPU."""
