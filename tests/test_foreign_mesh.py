"""Meshes of other systems: translated whole, from what is given and from how many ranks there are."""

from __future__ import annotations

import pytest

from hocket.foreign import read
from hocket.foreign.systems import BRIDGE, DEEPSPEED, MEGATRON, TORCHTITAN
from hocket.foreign.translate import System, translate
from hocket.variables import WANTED
from tests.test_foreign import settings, words_of

MESH = ("mesh.tp", "mesh.pp", "plan.chunks", "mesh.ep", "mesh.dp")


@pytest.mark.parametrize(
    ("system", "words", "mesh"),
    [
        (MEGATRON, "--bf16", (1, 1, 1, 1, 16)),
        (MEGATRON, "--tensor-model-parallel-size 2 --expert-model-parallel-size 4", (2, 1, 1, 4, 8)),
        (MEGATRON, "--num-layers 8 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4",
         (1, 2, 4, 1, 8)),
        (BRIDGE, "--context-parallel-size 2", (1, 1, 1, 1, 8)),
        (TORCHTITAN, "--parallelism.context_parallel_degree 4", (1, 1, 1, 1, 4)),
        (TORCHTITAN, "--parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree 8",
         (1, 2, 1, 1, 8)),
        (TORCHTITAN, "--parallelism.pipeline_parallel_schedule ZBVZeroBubble --parallelism.pipeline_parallel_degree 4",
         (1, 4, 2, 1, 4)),
        (DEEPSPEED, "tensor_parallel.autotp_size 4", (4, 1, 1, 1, 4)),
    ],
)  # fmt: skip
def test_a_mesh_is_translated_whole(system: System, words: str, mesh: tuple[int, ...]) -> None:
    """A size that is not given is 1, so the recipe of the file adds no ranks. The output says what is assumed."""
    pairs = read.flags(words) if words.startswith("--") else [tuple(map(read.scalar, words.split()))]
    found = translate(system, pairs, 16)
    assert tuple(found.settings[name] for name in MESH) == mesh
    assumed = next((row for row in found.rows if row.name == "(not given)"), None)
    given = {name for row in found.rows if row.given for name in row.answer.settings}
    assert (set(assumed.answer.settings) if assumed else set()) == {*MESH, "mesh.cp"} - given - {"mesh.dp"}
    assert not assumed or "assumed" in assumed.answer.words


def test_ranks_are_those_that_are_started_or_that_bridge_names() -> None:
    started = "torchrun --nproc-per-node 8 --nnodes=4 pretrain_gpt.py --pipeline-model-parallel-size 4"
    assert settings(started)["mesh.dp"] == 8
    assert settings(started, gpus=16)["mesh.dp"] == 4, "what --gpus says comes before"
    sources = [translate(MEGATRON, read.flags(started), gpus).sources["mesh.dp"] for gpus in (0, 16, 32)]
    assert sources == ["(started by torchrun)", "(--gpus)", "(--gpus)"]
    named = translate(BRIDGE, read.keys("comm_overlap.data_parallel_size=4 model.expert_model_parallel_size=3"))
    assert named.settings["mesh.dp"] == 4
    assert "3 does not divide the 4" in named.of("not there")[0].answer.words


def test_expert_ranks_are_data_and_tensor_ranks() -> None:
    text = "--tensor-model-parallel-size 4 --expert-model-parallel-size 8 --num-experts 16 {}"
    assert "8 does not divide the 12 data" in words_of(text.format(""), "--expert-model-parallel-size", 12)
    assert "splits each expert" in words_of(text.format(""), "(no --expert-tensor-parallel-size)", 8)
    one = translate(MEGATRON, read.flags(text.format("--expert-tensor-parallel-size 1")), 8)
    assert tuple(one.settings[name] for name in MESH) == (4, 1, 1, 8, 2)
    assert not any("splits each expert" in row.answer.words for row in one.rows)
    names = {"tensor": 4, "expert": 16, "expert_tensor": 1}
    words = " ".join(f"--parallelism.{name}_parallel_degree {size}" for name, size in names.items())
    found = translate(TORCHTITAN, read.flags(words), 16)
    assert tuple(found.settings[name] for name in MESH) == (4, 1, 1, 16, 4)


# What others set when they launch

LAUNCHES: list[tuple[str, int, int | None]] = [
    ("--tensor-model-parallel-size 4 --context-parallel-size 2 --pipeline-model-parallel-size 4", 8, None),
    ("--tensor-model-parallel-size 2", 8, 4),
    ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep", 8, 8),
    ("--tensor-model-parallel-size 2 --overlap-moe-expert-parallel-comm", 8, 4),
    ("--tensor-model-parallel-size 4", 8, 2),
    ("--tensor-model-parallel-size 2 --context-parallel-size 2 --pipeline-model-parallel-size 2", 16, 2),
    ("--tensor-model-parallel-size 8", 8, 1),
    ("", 8, 8),
]
"""Flags, ranks and the number of data ranks that is left; None where they do not fit together."""


@pytest.mark.parametrize(("text", "gpus", "dp"), LAUNCHES)
@pytest.mark.parametrize("connections", [1, 8, 32])
def test_no_launch_needs_another_number_of_connections_and_data_ranks_are_counted(text, gpus, dp, connections) -> None:
    """Others launch with 1, 8 or 32 connections, depending on what is on; hocket's order of ops does not care."""
    variables = f"CUDA_DEVICE_MAX_CONNECTIONS={connections} NVTE_FWD_LAYERNORM_SM_MARGIN=16 NCCL_P2P_NET_CHUNKSIZE=2048"
    found = translate(MEGATRON, read.flags(f"{variables} {text}"), gpus)
    assert [row.name for row in found.of("not needed")][:3] == [word.split("=")[0] for word in variables.split()]
    assert found.settings.get("mesh.dp") == dp
    if dp is None:
        assert "8 ranks cannot be split into 32" in found.of("not there")[-1].answer.words
    assert {v.name: v.value for v in WANTED}["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
