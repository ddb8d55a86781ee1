"""Sequences of a step dealt out by their attention: who gets which when, where that pays, that runs learn alike."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.microbatch_order import documents
from hocket import recipes
from hocket.config import Config, DataConfig, MeshConfig, TrainConfig
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.model.documents import documents_of
from hocket.planning import program_of, slowest_ranks
from hocket.predict.cost import costs_of, packed_costs
from hocket.predict.hardware import H200
from hocket.predict.part_sizes import attending
from hocket.predict.simulate import simulate
from hocket.program.documents import as_read, deals, dealt, lengths_of, works_of
from hocket.program.ops import Op
from hocket.program.stages import layout_of
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.train.data import make_streams
from hocket.train.sources import open_text
from tests.helpers.command import SMALL, hocket
from tests.helpers.parity import STEPS, assert_parity, config
from tests.reference import Batch, awkward_batches

WORKS = st.integers(1, 3).flatmap(
    lambda dp: st.integers(1, 3).flatmap(
        lambda sequences: st.integers(1, 5).flatmap(
            lambda m: st.tuples(
                st.just(dp),
                st.just(sequences),
                st.lists(st.integers(1, 9), min_size=dp * sequences * m, max_size=dp * sequences * m),
            )
        )
    )
)
"""Ranks, sequences of a microbatch, and the cost of each sequence of a step."""


@given(WORKS)
def test_every_sequence_of_a_step_has_one_place(case: tuple[int, int, list[int]]) -> None:
    dp, sequences, works = case
    found = dealt(works, dp, sequences)
    assert sorted(n for microbatch in found for mine in microbatch for n in mine) == list(range(len(works)))
    assert {len(mine) for microbatch in found for mine in microbatch} == {sequences}
    assert {len(microbatch) for microbatch in found} == {dp}


@given(WORKS)
def test_ranks_wait_less_for_each_other_than_as_read(case: tuple[int, int, list[int]]) -> None:
    """Neighbours in cost run at the same time, so the sum of the dearest is the least that parcels allow."""
    dp, _, works = case
    plain, found = (works_of(each, works) for each in (as_read(len(works) // dp, dp, 1), dealt(works, dp, 1)))
    assert sum(map(max, found)) <= sum(map(max, plain))
    totals = [sum(each) for each in zip(*found, strict=True)]
    assert max(totals) - min(totals) <= max(works)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9))
def test_a_cheap_microbatch_is_the_first_and_then_the_dearest_are(works: list[int]) -> None:
    found = [works[n] for ((n,),) in dealt(works, 1, 1)]
    assert found == [min(works), *sorted(works, reverse=True)[:-1]]


def test_sequences_of_a_microbatch_even_each_other_out() -> None:
    works = [1, 2, 3, 4, 5, 6, 7, 8]
    assert {cost for (cost,) in works_of(dealt(works, 1, 2), works)} == {9}


def test_sequences_that_fill_no_step_are_refused() -> None:
    with pytest.raises(ValueError, match="3 sequences do not fill microbatches of 1 on 2 ranks"):
        dealt([1, 2, 3], 2, 1)


# -- what sequences cost ---------------------------------------------------------------------------------------------


def texts_in(folder: Path, name: str = "text") -> str:
    """Documents whose lengths differ, and some that sequences cut."""
    path = folder / name
    path.mkdir()
    draws = random.Random(0)
    for n in range(120):
        (path / f"{n:02}.txt").write_text("".join(draws.choices("abcdefgh .", k=draws.choice((3, 9, 20, 31, 40)))))
    return str(path)


@pytest.mark.parametrize("packing", ["on", "best_fit"])
@pytest.mark.parametrize("several", [False, True])
def test_lengths_are_those_of_the_documents_that_layers_see(tmp_path: Path, packing: Any, several: bool) -> None:
    paths: dict[str, Any] = {"paths": (texts_in(tmp_path),)}
    if several:
        texts_in(tmp_path, "b")
        texts_in(tmp_path, "a")
        listed = "".join(f'[{n}]\npaths = ["{tmp_path / n}"]\nweight = 1\n' for n in "ab")
        (tmp_path / "sources.toml").write_text(listed)
        paths = {"paths": (str(tmp_path / "sources.toml"),)}
    data = DataConfig(**paths, cache=str(tmp_path / "cache"), sequence_length=32, packing=packing)
    settings = resolve(Config(data=data, mesh=MeshConfig(), train=TrainConfig(microbatches=2, eval_batches=0)))
    stream, _ = make_streams(open_text(settings), settings)
    for position in range(12):
        numbers = stream.batch([position])[2]
        assert numbers is not None
        lengths = np.diff(documents_of(numbers).bounds)
        found = stream.lengths(position)
        assert found[found > 0].tolist() == lengths.tolist()


MODELS = {
    "full": recipes.LLAMA3_8B,
    "windows": replace(recipes.LLAMA3_8B, window=512, full_layers=(3, 7)),
    "sinks and windows": recipes.GPT_OSS_20B,
    "latents": recipes.DEEPSEEK_V2_LITE,
    "delta nets": recipes.QWEN3_NEXT_80B_A3B,
}
WAYS: dict[str, dict[str, Any]] = {
    "alone": {}, "tp": {"mesh.tp": 2}, "cp": {"mesh.cp": 2},
}  # fmt: skip
CASES = [
    (model, way)
    for model in MODELS
    for way in WAYS
    if way == "alone" or model in ("full", "windows") or (model, way) == ("latents", "cp")
]


@pytest.mark.parametrize(("model", "way"), CASES)
def test_what_sequences_cost_is_what_the_ops_of_their_layers_take(model: str, way: str) -> None:
    """Seconds of a microbatch grow with the work of its documents: of layers with windows as of others."""
    length = 8192
    given = {"data.sequence_length": length, "train.sequences": 1, "precision.compute": "bf16", **WAYS[way]}
    c = changed(replace(Config(), model=MODELS[model]), {"overlap.cp.method": "gather", **given})
    documents = [[length], [4096, 4000, 96], [2048] * 4, [300] * 27 + [92], [1] * length]
    lengths = [lengths_of(each) for each in documents]
    whole = costs_of(c, replace(H200, clock=0.0))
    found = packed_costs(whole, c, replace(H200, clock=0.0), lengths)
    layout = layout_of(c)
    ops = [
        Op(verb, part.name, 0, 0, n)
        for n in range(c.model.layers)
        for part in layout.type_of(n).parts
        for verb in ("fwd", "bwd")
    ]
    seconds = [sum(float(found.of(op._replace(microbatch=m)).seconds) for op in ops) for m in range(len(lengths))]
    assert seconds[0] == pytest.approx(sum(float(whole.of(op).seconds) for op in ops), rel=1e-12)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] > 0
    works = [attending(c.model, length).work(each) for each in lengths]
    for m in (1, 2, 3):
        share = (works[m] - works[-1]) / (works[0] - works[-1])
        assert (seconds[m] - seconds[-1]) / (seconds[0] - seconds[-1]) == pytest.approx(share, abs=2e-3)


# -- what it gains ---------------------------------------------------------------------------------------------------

LONG = {"data.packing": "on", "data.sequence_length": 32768, "train.sequences": 1, "train.microbatches": 8}
LLAMA = changed(recipe("llama3_8b"), {"mesh.pp": 4, "mesh.dp": 2, **LONG})


def resolved(**given: Any) -> Settings:
    settings = {name.replace("__", "."): value for name, value in given.items()}
    return resolve(changed(LLAMA, settings), Host(gpus=8), settings)


@pytest.mark.parametrize(("order", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_simulated_steps_are_shorter_than_as_read(order: str, chunks: int) -> None:
    """Log-normal lengths, priced one microbatch at a time."""
    settings = resolved(plan__order=order, plan__chunks=chunks, plan__layers_per_stage=())
    program, read = program_of(settings), changed(settings, {"data.packing": "off"})
    seconds = {"dealt": 0.0, "read": 0.0}
    for step in range(4):
        sequences = [documents(settings.batch * step + n, settings.data.sequence_length) for n in range(settings.batch)]
        for name, each in (("dealt", settings), ("read", read)):
            costs = packed_costs(costs_of(settings, H200), settings, H200, slowest_ranks(each, sequences))
            seconds[name] += float(simulate(program, costs).makespan)
    assert seconds["dealt"] < 0.95 * seconds["read"]


def test_costs_of_microbatches_lie_between_those_of_short_and_whole_documents() -> None:
    chosen = resolved(plan__layers_per_stage=())
    whole, program = costs_of(chosen, H200), program_of(chosen)
    length = chosen.data.sequence_length
    half = costs_of(changed(chosen, {"data.sequence_length": length // 2, "train.sequences": 2}), H200)
    tables = [packed_costs(whole, chosen, H200, [((each, length),)] * 8) for each in (1, length // 2, length)]
    steps = [float(simulate(program, each).makespan) for each in tables]
    assert steps[0] < steps[1] < steps[2]
    assert steps[2] == pytest.approx(float(simulate(program, whole).makespan), rel=1e-9)
    assert steps[1] == pytest.approx(float(simulate(program, half).makespan), rel=1e-3)


def test_sequences_are_dealt_out_where_ranks_wait_for_each_other() -> None:
    assert deals(resolved())
    assert deals(resolved(mesh__pp=1))
    assert not deals(resolved(mesh__pp=1, mesh__dp=1))
    assert not deals(resolved(data__packing="off"))


# -- a step of dealt sequences ---------------------------------------------------------------------------------------


def in_order(step: list[list[Batch]]) -> list[list[Batch]]:
    """The microbatches of a step, [microbatch][rank], dealt out as a run does with one sequence in each."""
    flat, ranks = [batch for microbatch in step for batch in microbatch], len(step[0])
    works = [sum(n * (n + 1) // 2 for n in np.diff(batch[2].bounds).tolist()) for batch in flat]
    found = dealt(works, ranks, 1)
    assert found != as_read(len(step), ranks, 1)
    return [[flat[n] for (n,) in microbatch] for microbatch in found]


@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        (dict(pp=2, dp=2, ep=2), dict(chunks=2, merge="on", defer_wgrad="on", defer_layers=1)),
        (dict(pp=2, dp=2), dict(merge="off")),
    ],
)
def test_a_planned_step_equals_the_plain_one_over_the_same_order(mesh: dict[str, int], plan: dict[str, Any]) -> None:
    model = dict(layers=4, dense_layers=(0,), aux_loss=0.05, bias_rate=0.01)
    c = changed(config(model, mesh, plan, 4, "fp32"), {"data.packing": "on"})
    assert_parity(c, [in_order(step) for step in awkward_batches(c.model, STEPS, 4, c.mesh.dp)])


TWO = ["--mesh.dp", "2", "--mesh.ep", "2", "--train.microbatches", "4"]


def records(folder: Path, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_over_a_pipeline_learns_what_one_without_does(tmp_path: Path) -> None:
    """Bit for bit in the same order, resumed or not; and nearly so alone, in the order in which sequences are read."""
    common = [
        *SMALL, "--model.layers", "2", "--plan.chunks", "1", "--data.paths", texts_in(tmp_path),
        "--data.packing", "best_fit", "--train.device", "cpu", "--train.sequences", "2",
        "--data.sequence_length", "32", "--data.validation", "0.4",
    ]  # fmt: skip
    kinds = {
        "plain": ["--mesh.pp", "1", *TWO],
        "planned": ["--mesh.pp", "2", *TWO],
        "read": ["--mesh.pp", "1", "--mesh.dp", "1", "--mesh.ep", "1", "--train.microbatches", "8"],
    }
    for name, mine in kinds.items():
        for steps in (2, 4) if name == "planned" else (4,):
            done = hocket(tmp_path, "train", *common, *mine, "--run.name", name, "--train.steps", str(steps))
            assert done.code == 0, done.err
    found = {name: [r for r in records(tmp_path, name) if "loss" in r and "step" in r] for name in kinds}
    losses = {name: {r["step"]: r["loss"] for r in rows} for name, rows in found.items()}
    assert losses["plain"] == losses["planned"]
    assert losses["read"][1] == pytest.approx(losses["plain"][1], rel=1e-5)
    assert losses["read"][4] != losses["plain"][4]
    waits = {name: [r["waits"] for r in rows if "waits" in r] for name, rows in found.items()}
    assert waits["plain"]
    assert all(0 <= each < 1 for each in waits["plain"])
    assert not waits["read"]


def test_a_run_deals_out_sequences_by_what_windows_leave_of_their_attention(tmp_path: Path) -> None:
    """Lengths of documents as the run reads them, and pairs of tokens counted one by one."""
    data: dict[str, Any] = {
        "data.paths": (texts_in(tmp_path),), "data.packing": "best_fit", "data.sequence_length": 32,
        "data.validation": (0.4,), "mesh.dp": 2, "mesh.ep": 2, "mesh.pp": 1, "train.microbatches": 4,
        "train.device": "cpu", "model.window": 4, "train.steps": 1,
    }  # fmt: skip
    flags = ((f"--{name}", *(value if isinstance(value, tuple) else (value,))) for name, value in data.items())
    words = [str(word) for flag in flags for word in flag]
    done = hocket(tmp_path, "train", *SMALL, *words, "--run.name", "windows")
    assert done.code == 0, done.err
    settings = resolve(changed(recipe("tiny"), {**data, "data.cache": str(tmp_path / "cache"), "train.sequences": 1}))
    stream, _ = make_streams(open_text(settings), settings)
    documents = [stream.lengths(n).tolist() for n in range(8)]
    pairs, all_pairs = ([sum(min(t + 1, w) for n in each for t in range(n)) for each in documents] for w in (4, 32))
    groups, others = (sorted(works, reverse=True) for works in (pairs, all_pairs))
    expected, other = (sum(max(w[i : i + 2]) for i in range(0, 8, 2)) * 2 / sum(w) - 1 for w in (groups, others))
    (row,) = [row for row in records(tmp_path, "windows") if "waits" in row]
    assert row["waits"] == pytest.approx(expected, rel=1e-6)
    assert row["waits"] != pytest.approx(other, rel=0.1)
