"""How many of the head's weight gradients wait for the end of the step, by themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hocket.config import Config, MeshConfig, ModelConfig, PrecisionConfig, TrainConfig
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.planning import program_of
from hocket.predict.cost import costs_of
from hocket.predict.hardware import H200, HARDWARE
from hocket.predict.simulate import simulate
from hocket.resolve import Settings, resolve
from hocket.rules import few_microbatches
from hocket.tune.choose import fewest_late
from hocket.tune.trials import Trials

MODEL = ModelConfig(vocab=128256, hidden=4096, layers=8, heads=32, kv_heads=8, head_dim=128, ffn=14336)
BASE = Config(
    model=MODEL,
    mesh=MeshConfig(pp=4),
    train=TrainConfig(microbatches=8, sequences=32, device="cuda"),
    precision=PrecisionConfig(compute="bf16"),
)


def settings(**changes: object) -> Settings:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return resolve(changed(BASE, named), Host(gpus=64))


def seconds(s: Settings) -> float:
    return float(simulate(program_of(s), costs_of(s, H200)).makespan)


def reason(s: Settings) -> str:
    return next(d.reason for d in s.decisions if d.setting == "overlap.pp.defer_head")


HEAVY: dict[str, object] = {"plan__layers_per_stage": (3, 2, 2, 1)}
"""With a layer beside the head its rank computes longest."""


def test_what_fills_the_time_at_the_end_is_deferred() -> None:
    found = settings(**HEAVY)
    count = found.overlap.pp.defer_head
    assert isinstance(count, int)
    assert count > 1
    assert "instead of" in reason(found)
    times = {n: seconds(settings(**HEAVY, overlap__pp__defer_head=n)) for n in (0, 1, count)}
    assert times[count] < times[1] < times[0]


NARROW = {
    "model__layers": 12, "model__vocab": 32768, "train__sequences": 1, "train__microbatches": 12, "plan__chunks": 3,
    "data__sequence_length": 1024, "plan__group": 12, "plan__layers_per_stage": (), "plan__recompute": ("attn",),
    "mesh__dp": 2,
}  # fmt: skip
"""One more than leaves the head's rank nothing to wait for is best here."""


@pytest.mark.parametrize("changes", [{}, {"plan__chunks": 2, "plan__layers_per_stage": ()}, NARROW])
def test_neither_more_nor_fewer_are_better(changes: dict[str, object]) -> None:
    found, trials = settings(**changes), Trials()
    steps = few_microbatches(found)
    times = [trials.seconds(changed(found, {"overlap.pp.defer_head": n}), steps) for n in range(steps + 1)]
    assert 0 < times[found.overlap.pp.defer_head] < 1.001 * min(times)  # type: ignore[index]


def test_of_about_equal_numbers_the_least_is_taken() -> None:
    assert fewest_late({0: 2.0, 5: 1.0, 3: 1.0003, 2: 1.01}) == 3


def test_memory_bounds_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = settings(**HEAVY).overlap.pp.defer_head
    assert isinstance(wanted, int)
    peaks = {
        n: simulate(program_of(s), costs_of(s, H200)).ranks[3].peak_bytes
        for n in (0, wanted)
        for s in [settings(**HEAVY, overlap__pp__defer_head=n)]
    }
    assert peaks[wanted] > peaks[0]
    tight = replace(H200, memory=int((peaks[0] + 0.5 * (peaks[wanted] - peaks[0])) / 0.9))
    monkeypatch.setitem(HARDWARE, "h200", tight)  # type: ignore[arg-type]
    less = settings(**HEAVY, plan__recompute=())
    assert 0 < less.overlap.pp.defer_head < wanted  # type: ignore[operator]
    assert "no memory" in reason(less)
    monkeypatch.setitem(HARDWARE, "h200", replace(H200, memory=int(peaks[0] / 0.95)))  # type: ignore[arg-type]
    none = settings(**HEAVY, plan__recompute=())
    assert none.overlap.pp.defer_head == 0
    assert "no memory" in reason(none)


@pytest.mark.parametrize("changes", [{"mesh__pp": 1}, {"overlap__defer_wgrad": "off"}])
def test_where_it_has_no_effect_nothing_is_chosen(changes: dict[str, object]) -> None:
    found = settings(**changes)
    assert found.overlap.pp.defer_head == 0
    assert not [d for d in found.decisions if d.setting == "overlap.pp.defer_head"]


def test_where_nothing_is_gained_none_is() -> None:
    found = settings(model__vocab=256)
    assert found.overlap.pp.defer_head == 0
    assert "with defer_head = " in reason(found)


def test_fewer_are_deferred_where_those_that_fill_the_time_had_been_hidden() -> None:
    sizes = {"model__layers": 19, "model__hidden": 2048, "model__heads": 16, "model__ffn": 4096}
    step = {"train__microbatches": 12, "train__sequences": 1, "data__sequence_length": 2048}
    made = {"plan__recompute": ("attn",), "plan__layers_per_stage": (6, 6, 6, 1), "overlap__pp__defer_layers": 0}
    fixed = {**sizes, **step, **made}
    count = settings(**fixed).overlap.pp.defer_head
    assert isinstance(count, int)
    assert count > 0
    times = [seconds(settings(**fixed, overlap__pp__defer_head=n)) for n in (0, count, 12)]
    assert times[1] < times[0] < times[2]
