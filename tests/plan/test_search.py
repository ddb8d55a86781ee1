"""The search finds what is best where that is known, and reports it."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from itertools import combinations, product
from typing import Any, get_args

import pytest

from hocket.commands.options import parse
from hocket.commands.plan import Plan, bytes_of, resolve_for_plan, run
from hocket.config import Strategy
from hocket.config.schema import changed
from hocket.planning import predict, program_of
from hocket.predict.cost import CostTable
from hocket.predict.hardware import hardware_of
from hocket.predict.simulate import CostKey, OpCost
from hocket.program.ops import Layout, Program
from hocket.resolve import Settings
from hocket.tune import search as tuner
from hocket.tune.choose import balanced
from hocket.tune.search import Trial
from tests.helpers.golden import assert_golden
from tests.helpers.plans import planned


def test_ranks_compute_for_equally_long() -> None:
    """The head takes as long as two layers, and embedding none; in a V the first rank has both."""
    table: dict[CostKey, OpCost] = {("fwd", "attn", "dense"): OpCost(1), ("fwd", "head", ""): OpCost(2)}
    layers, costs = ("dense",) * 10, CostTable(("dense",) * 10, table)
    assert balanced(Layout(layers, pp=2), costs) == (6, 4)
    assert balanced(Layout(layers, pp=2, chunks=2), costs) == (4, 3, 2, 1)
    assert balanced(Layout(layers, pp=2, chunks=2, turning=True), costs) == (3, 4, 2, 1)
    assert balanced(Layout(layers[:4], pp=4), CostTable(layers[:4], table)) == (2, 1, 1, 0)
    assert balanced(Layout(layers), costs) == (10,)


SMALL = ["--model.layers", "4", "--model.dense_layers", "0"]


def task(name: str, *flags: str, **changes: Any) -> tuner.Task:
    options, origins = parse(Plan, "plan", [name, *flags])
    return tuner.Task(config=options.config, origins=origins, resolve=resolve_for_plan, **changes)


def test_report_of_a_recipe(pytestconfig: pytest.Config) -> None:
    wanted = task("tiny", "--overlap.ep.merge", "on")
    result = tuner.search(wanted)
    text = tuner.report(wanted, replace(result, seconds=0.0))
    assert_golden("search_tiny.txt", text + "\n", pytestconfig)
    between = task("tiny", "--overlap.ep.merge", "on", "--network.ranks_per_host", "2")
    assert "note: network: 2 ranks on a host, each sends 48GB/s" in tuner.report(between, result)


def test_the_words_give_the_plan_that_was_found() -> None:
    wanted = task("moonlight_16b", "--model.layers", "5", "--train.microbatches", "4", "--plan.chunks", "1")
    wanted = replace(wanted, config=changed(wanted.config, {"plan.layers_per_stage": ()}))
    result = tuner.search(wanted)
    last = result.path[-1]
    assert last.seconds < 0.95 * result.path[0].seconds
    words = tuner.words(wanted, last.changes)
    options, origins = parse(Plan, "plan", words)
    settings = resolve_for_plan(options.config, origins)
    assert "plan.chunks" not in last.changes
    assert predict(settings, program_of(settings), hardware_of(settings)).makespan == last.seconds
    assert tuner.as_json(wanted, result)["words"] == words


def test_nothing_fits_is_told_with_the_smallest_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tiny", "--search", "--memory", "0.01MB", *SMALL, "--plan.order", "merged_v"]) == 1
    text = capsys.readouterr().out
    assert "NOTHING FITS: a rank may hold 10000 bytes, and the smallest need found is 0.0" in text
    assert " (over)" in text
    assert "\nhocket train" not in text


def test_nothing_beats_the_recipe() -> None:
    wanted = task("llama3_8b", "--model.layers", "2", "--train.microbatches", "1")
    result = tuner.search(wanted)
    assert len(result.path) == 1
    assert "Nothing tried is shorter than the step as given" in tuner.report(wanted, result)


ZERO_BUBBLE = [{"order": order, "merge": "off", "chunks": chunks} for order, chunks in (("zb_h1", 1), ("zb_v", 2))]


@pytest.mark.parametrize("plan", [{}, {"chunks": 1}, {"merge": "off"}, *ZERO_BUBBLE])
def test_long_steps_are_priced_by_their_period(plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = task("tiny", *SMALL).config
    config = changed(planned(config, **plan), {"train.microbatches": 73})
    wanted = replace(task("tiny"), config=config)
    asked: list[int] = []

    def counted(settings: Settings) -> Program:
        asked.append(settings.train.microbatches)
        return program_of(settings)

    monkeypatch.setattr(tuner, "program_of", counted)
    price = tuner.Search(wanted).trial
    short = price({}, whole=False)
    assert sum(asked) < 73
    whole = price({}, whole=True)
    assert asked[-1] == 73
    assert short is not None
    assert whole is not None
    assert short.seconds == pytest.approx(whole.seconds, rel=0.005)
    assert short.nbytes == pytest.approx(whole.nbytes, rel=0.01)


@pytest.mark.parametrize("late", [2, -1])
def test_what_a_rank_holds_is_known_where_the_head_waits(late: int) -> None:
    """All of its weight gradients, at the end, hold more with every microbatch: such a step has no period."""
    changes = {"train.microbatches": 64, "overlap.pp.defer_head": late}
    price = tuner.Search(replace(task("tiny"), config=changed(task("tiny", *SMALL).config, changes))).trial
    short, whole = price({}, whole=False), price({}, whole=True)
    assert short is not None
    assert whole is not None
    assert short.nbytes == pytest.approx(whole.nbytes, rel=0.01)


def test_the_command_keeps_to_a_cap(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--train.microbatches", "4"]
    words += ["--plan.order", "interleaved", "--overlap.ep.merge", "on"]  # which are not searched
    free = tuner.Search(task("tiny", *words)).trial({}, whole=True)
    assert free is not None
    cap = free.nbytes // 1000 * 900
    assert run(["tiny", "--search", "--memory", f"{cap // 100 / 10}KB", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cap_bytes"] == cap
    assert found["fits"]
    assert found["path"][-1]["peak_bytes"] <= cap
    assert found["plans"] > 10
    for words, problem in (
        (["--memory", "1GiB"], "there is no --search"),
        (["--search", "--memory", "much"], "memory = much .*not a size; fix: give one such as 80GiB"),
        (["--search", "--memory", "0GiB"], "memory = 0GiB .*fits in nothing; fix: give more than 0"),
        (["--search", "--svg", "x.svg"], "draws nothing"),
    ):
        with pytest.raises(ValueError, match=problem):
            run(["tiny", *words])


def test_sizes() -> None:
    assert [bytes_of(text) for text in ("80GiB", "1.5 GB", "10MiB")] == [80 * 2**30, 1500000000, 10 * 2**20]


def test_time_is_given_for_memory_only_where_a_step_does_not_fit() -> None:
    """Nothing but recomputation is free to change; the cap stands a little above, or below, what the plan needs."""
    fixed = {name: "test" for name in tuner.SEARCHED if name != "plan.recompute"}
    whole = task("tiny")
    start = tuner.Search(whole).trial({}, whole=True)
    assert start is not None
    for share, expected in ((1.01, False), (0.95, True)):
        capped = replace(whole, cap=int(share * start.nbytes), origins={**whole.origins, **fixed})
        found = tuner.search(capped)
        assert found.fits
        assert (found.path[-1].seconds > start.seconds) == expected


def test_parts_are_recomputed_in_fewer_layers_where_that_fits() -> None:
    fixed = {name: "test" for name in tuner.SEARCHED if name != "plan.recompute"}
    whole = task("tiny", "--model.layers", "16", "--train.sequences", "32")
    price = tuner.Search(whole).trial
    start, everywhere = (price({"plan.recompute": parts}, whole=True) for parts in ((), ("experts",)))
    assert start is not None
    assert everywhere is not None
    capped = replace(whole, cap=int(0.87 * start.nbytes), origins={**whole.origins, **fixed})
    found = tuner.search(capped)
    assert found.fits
    assert "experts:3" in found.path[-1].changes["plan.recompute"]
    assert found.path[-1].seconds < 0.99 * everywhere.seconds


VALUES: dict[str, list[Any]] = {
    "plan.order": ["1f1b", "interleaved", "sequential", "zb_h1", "zb_v", "merged_v"],
    "overlap.ep.merge": ["on", "off"],
    "plan.chunks": [1, 2],
    "plan.recompute": [some for n in (0, 1, 3) for some in combinations(("attn", "experts", "mlp"), n)],
    "overlap.dp.strategy": [*get_args(Strategy)],
    "overlap.dp.prefetch": [0, 2],
}


def between(*searched: str) -> tuner.Task:
    """A search that may change these settings."""
    wanted = task("tiny", *SMALL, "--train.sequences", "32")
    fixed = {name: "test" for name in tuner.SEARCHED if name not in searched}
    return replace(wanted, origins={**wanted.origins, **fixed})


@functools.cache
def combinations_of_all(*searched: str) -> tuple[int, list[Trial]]:
    """What the plan as given needs, and all plans that can be made of other values: no cap changes what they take."""
    price = tuner.Search(between(*searched)).trial
    start = price({}, whole=True)
    assert start is not None
    values = product(*(VALUES[name] for name in searched))
    trials = (price(dict(zip(searched, some, strict=True)), whole=False) for some in values)
    return start.nbytes, [trial for trial in trials if trial is not None]


@pytest.mark.parametrize(
    ("share", "searched"),
    [
        *((share, [*VALUES][:-1]) for share in (0.0, 0.7)),
        *(pytest.param(share, [*VALUES], marks=pytest.mark.full) for share in (0.0, 1.05, 0.85, 0.7, 0.6)),
    ],
)
def test_the_search_comes_close_to_all_combinations(share: float, searched: list[str]) -> None:
    """Of what decides about memory and time, under caps down to little more than half of what the plan needs."""
    needed, trials = combinations_of_all(*searched)
    wanted = replace(between(*searched), cap=int(share * needed))
    found = tuner.search(wanted)
    best = min((t.seconds for t in trials if not share or t.nbytes <= wanted.cap), default=float("inf"))
    assert found.fits == (best < float("inf"))
    assert not found.fits or found.path[-1].seconds <= 1.01 * best


def test_what_fits_is_offloaded_or_recomputed_whichever_is_shorter() -> None:
    sizes = ["--model.layers", "8", "--mesh.dp", "2", "--data.sequence_length", "32768", "--train.microbatches", "2"]
    whole = task("llama3_8b", *sizes, "--train.sequences", "1")
    start = tuner.Search(whole).trial({}, whole=True)
    assert start is not None
    capped = replace(whole, cap=int(0.93 * start.nbytes))
    free = tuner.search(capped)
    never = tuner.search(replace(capped, origins={**whole.origins, "plan.offload": "test"}))
    assert free.fits
    assert never.fits
    assert "plan.offload" in free.path[-1].changes
    assert free.path[-1].seconds < 0.99 * never.path[-1].seconds
