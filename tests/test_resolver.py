"""The resolver: the cases of the field, all reasons at once, nothing silent, nothing changed, soon done."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.config import Config, MeshConfig
from hocket.config.rule import Host, OnlyWith, leaf
from hocket.config.schema import annotated, changed, types
from hocket.decision import Decision
from hocket.explain.build import overlaps
from hocket.launching.launch import check_memory, too_few_gpus
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.variables import survey
from tests.overlap_cases import CASES, CONNECTIONS, MESHES, Case

TINY = recipe("tiny")


def flags(names: Any) -> dict[str, str]:
    return {name: f"command line, --{name}" for name in names}


def outcome(config: Config, origins: dict[str, str], gives_up: bool) -> tuple[Settings | None, str]:
    """Settings, or why there are none."""
    try:
        return resolve(config, None, origins, gives_up=gives_up), ""
    except ValueError as error:
        return None, str(error)


def decided(found: Settings, setting: str) -> Decision:
    (one,) = [decision for decision in found.decisions if decision.setting == setting]
    return one


NETWORK = {name for name in types() if name.startswith("network.")}
"""Of one host there is nothing to choose."""
EFFECT = {name for name, (_, marks) in annotated().items() if any(isinstance(mark, OnlyWith) for mark in marks)}
"""Nor where they have no effect."""


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_cases_of_the_field(case: Case) -> None:
    config = changed(Config(), {**case.given, **case.asked})
    origins = flags(case.asked)
    before = repr((config, origins))
    host = Host(gpus=64) if config.train.device == "cuda" else Host()
    if case.refused:
        with pytest.raises(ValueError) as caught:
            resolve(config, host, origins)
        assert [word for word in (*case.refused, "fix: ") if word not in str(caught.value)] == []
        return
    found = resolve(config, host, origins)
    assert repr((config, origins)) == before
    assert {name: leaf(found, name) for name in case.settings} == case.settings
    open_ = {name for name in types() if leaf(found, name) in ("auto", ("auto",))}
    assert open_ <= {"run.resume", "data.bos", *NETWORK}
    rows: dict[str, str] = {}
    for row in overlaps(found):
        rows[row.axis] = row.state if rows.get(row.axis) != "on" else "on"
    assert {axis: rows[axis] for axis in case.rows} == case.rows


@pytest.mark.parametrize("mesh", MESHES)
def test_the_environment_does_not_depend_on_the_mesh(mesh: dict[str, Any]) -> None:
    assert {name for name in mesh if name.startswith("mesh")} <= set(types())
    wanted = {finding.name: finding.wanted for finding in survey({})}
    assert wanted["CUDA_DEVICE_MAX_CONNECTIONS"] == CONNECTIONS


def test_every_reason_and_every_fix_is_in_the_one_line_about_a_request() -> None:
    config = changed(TINY, {"plan.order": "sequential", "train.microbatches": 1, "overlap.ep.merge": "on"})
    with pytest.raises(ValueError) as caught:
        resolve(config, None, flags(["overlap.ep.merge"]))
    (line,) = [line for line in str(caught.value).splitlines() if "overlap.ep.merge" in line.split("(")[0]]
    assert line.count("[1]") == line.count("[2]") == 2
    assert "sequential order" in line
    assert "all forwards of 1 microbatches are warm-up" in line


def test_merging_without_experts_is_possible_and_remarked_on() -> None:
    config = changed(TINY, {"mesh.ep": 1, "overlap.ep.merge": "on"})
    found = resolve(config, None, flags(["overlap.ep.merge"]))
    assert found.overlap.ep.merge == "on"
    assert "there is none (mesh.ep = 1)" in decided(found, "overlap.ep.merge").reason


def test_impossible_values_and_broken_rules_come_together() -> None:
    config = changed(TINY, {"train.steps": 0, "model.heads": 5, "train.lr": "fast"})
    with pytest.raises(ValueError) as caught:
        resolve(config)
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == [
        "train.steps",
        "train.lr",
        "model.heads",
    ]


def test_experts_are_shared_by_tensor_parallel_ranks_without_data_parallel_ones() -> None:
    asked = {"overlap.dp.strategy": "no_shard", "mesh.dp": 1, "mesh.ep": 1, "mesh.tp": 2}
    found = resolve(changed(TINY, asked), None, flags(asked))
    assert found.overlap.dp.strategy == "no_shard"
    with pytest.raises(ValueError, match=r"overlap.dp.prefetch = 3 .*no effect with overlap.dp.strategy = no_shard"):
        resolve(changed(TINY, {**asked, "overlap.dp.prefetch": 3}), None, flags(["overlap.dp.prefetch"]))
    dense = changed(TINY, {**asked, "model.experts": 0, "overlap.ep.merge": "off"})
    with pytest.raises(ValueError, match=r"overlap.dp.strategy = no_shard .*no effect without shared weights"):
        resolve(dense, None, flags(["overlap.dp.strategy"]))
    rows = overlaps(resolve(changed(dense, {"overlap.dp.strategy": "optim"})))
    assert {row.state for row in rows if row.axis == "dp"} == {"n/a"}


# ----------------------------------------------------------------------------------------------------- warn

UNMET: list[tuple[dict[str, Any], str, Any]] = [
    ({"overlap.ep.merge": "on", "plan.order": "sequential"}, "overlap.ep.merge", "off"),
    ({"overlap.ep.merge": "on", "train.microbatches": 1, "mesh.pp": 1, "plan.chunks": 1}, "overlap.ep.merge", "off"),
    ({"overlap.ep.merge": "off", "overlap.ep.merge_ends": "on"}, "overlap.ep.merge_ends", "off"),
    ({"mesh.pp": 1, "overlap.pp.defer_layers": 2}, "overlap.pp.defer_layers", 0),
    ({"mesh.dp": 1, "mesh.ep": 1, "overlap.dp.prefetch": 3}, "overlap.dp.prefetch", 2),
    ({"mesh.dp": 1, "mesh.ep": 1, "overlap.dp.strategy": "optim"}, "overlap.dp.strategy", "optim_grads_params"),
    ({"overlap.ep.merge": "off", "plan.order": "zb_v", "overlap.defer_wgrad": "off"}, "overlap.defer_wgrad", "on"),
]


@pytest.mark.parametrize(("changes", "setting", "value"), UNMET, ids=[f"{n} {case[1]}" for n, case in enumerate(UNMET)])
def test_what_cannot_be_had_is_an_error_or_is_given_up_and_said(
    changes: dict[str, Any], setting: str, value: Any
) -> None:
    origins = flags(changes)
    with pytest.raises(ValueError, match=setting):
        resolve(changed(TINY, changes), None, origins)
    found = resolve(changed(TINY, changes), None, origins, gives_up=True)
    assert leaf(found, setting) == value
    one = decided(found, setting)
    assert one.unmet
    assert (one.asked, one.value, one.source) == (changes[setting], value, f"command line, --{setting}")
    assert all(len(reason) > 10 for reason in one.reasons)
    assert one.fix
    assert f"asked for {changes[setting]}" in str(one)


def test_what_is_no_overlap_stays_an_error() -> None:
    with pytest.raises(ValueError, match=r"model.heads"):
        resolve(changed(TINY, {"model.heads": 5}), gives_up=True)


# ------------------------------------------------------------------------------------------------ properties

NUMBERS: dict[str, tuple[Any, ...]] = {
    "mesh.pp": (1, 2, 3),
    "mesh.dp": (1, 2, 4),
    "mesh.ep": (1, 2),
    "mesh.tp": (1, 2),
    "network.ranks_per_host": ("auto", 1, 2),
    "model.experts": (0, 4),
    "plan.chunks": (1, 2),
    "plan.group": (0, 2, 4),
    "plan.recompute": ((), ("auto",), ("attn", "mlp")),
    "train.microbatches": (1, 2, 6),
    "train.sequences": (1, 4),
    "overlap.pp.defer_layers": ("auto", 0, 2, -1, "attn:1", "attn"),
    "overlap.dp.prefetch": (0, 2, 5),
    "overlap.ep.room": (1.5, 2.0),
}
SETTLED = ("train.device", "run.resume")
"""What is given to all trees, or is no matter of resolving."""
NAMED = {name: get_args(hint) for name, hint in types().items() if get_origin(hint) is Literal and name not in SETTLED}
VALUES = {**NUMBERS, **NAMED}
"""Every setting that has a list of names, whichever there are, and numbers that make a difference."""
FIRM = ("mesh.pp", "mesh.dp", "mesh.ep", "model.experts", "plan.order", "plan.chunks", "train.microbatches")
"""Drawn in most trees: what the others depend on."""


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """A few settings, so that some trees can be had, together with what they depend on."""
    names = [*draw(st.sets(st.sampled_from(FIRM))), *draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=5))]
    tree = {name: draw(st.sampled_from(VALUES[name])) for name in names}
    return {"model.layers": 6, **tree}


@settings(max_examples=80, deadline=None)
@given(trees(), st.booleans())
def test_resolving_is_pure_repeatable_and_never_silent(tree: dict[str, Any], gives_up: bool) -> None:
    config, origins = changed(Config(), tree), flags(tree)
    before = repr((config, origins))
    found, refusal = outcome(config, origins, gives_up)
    assert outcome(config, origins, gives_up) == (found, refusal)
    assert repr((config, origins)) == before
    if found is None:
        assert "fix: " in refusal
        return
    assert resolve(found) == found
    for name, value in tree.items():
        if value not in ("auto", ("auto",)) and leaf(found, name) != value:
            one = decided(found, name)
            assert one.unmet
            assert one.asked == value
            assert one.reasons
    for name in types():
        unasked = {"run.resume", "data.bos", *NETWORK, *EFFECT}
        if leaf(config, name) == "auto" and name not in unasked:
            assert decided(found, name).reason is not None


def test_resolving_again_with_a_change_keeps_the_reasons_that_hold() -> None:
    once = resolve(TINY)
    again = resolve(changed(once, {"train.lr": 1e-2, "overlap.dp.prefetch": 1}))
    kept = {d.setting for d in again.decisions}
    assert {"plan.order", "overlap.pp.defer_layers"} <= kept
    assert again.overlap.dp.prefetch == 1


def test_a_model_that_a_host_has_no_memory_for_is_refused_before_a_kernel_ends_processes() -> None:
    whole = resolve(recipe("llama3_8b"), Host())
    with pytest.raises(ValueError, match=r"^train.device = cpu .*: weights and .* take 60 GiB, and .* has 23 GiB"):
        check_memory(whole, 8, 23 << 30)
    check_memory(whole, 8, 64 << 30)
    check_memory(whole, 2, 23 << 30)  # the others are on other hosts
    check_memory(resolve(recipe("llama3_8b"), Host(gpus=8)), 8, 23 << 30)


def test_a_run_that_was_meant_for_gpus_says_at_once_that_it_computes_on_cpus() -> None:
    def told(recipe_name: str, host: Host, **changes: str) -> list[str]:
        return too_few_gpus(resolve(changed(recipe(recipe_name), changes), host))

    assert told("llama3_8b", Host(gpus=8)) == []
    assert told("llama3_8b", Host()) == ["train.device = cpu: torch finds no usable GPU"]
    assert told("llama3_8b", Host(), **{"train.device": "cpu"}) == []
    (line,) = told("llama3_8b", Host(gpus=4))
    assert line.startswith("train.device = cpu: 8 ranks on this host, but only 4 GPUs; on several hosts torchrun")
    assert told("llama3_8b", Host(gpus=4, workers=8, local_workers=8)) == [line.split(";")[0]]
    assert told("tiny", Host()) == []


@pytest.mark.parametrize(
    ("setting", "value", "others", "host"),
    [
        ("model.ffn", 96, {"model.dense_layers": ()}, Host()),
        ("model.bias_rate", 0.1, {"model.routing": "even"}, Host()),
    ],
)
def test_what_scripts_of_all_kinds_set_and_this_run_does_not_read_is_a_remark(
    setting: str, value: Any, others: dict[str, Any], host: Host
) -> None:
    for origins in ({setting: "run.toml:3"}, {}):
        remark = decided(resolve(changed(TINY, {**others, setting: value}), host, origins), setting)
        assert remark.reason.startswith("no effect")
        assert remark.fix
        assert not remark.unmet
    assert not [d for d in resolve(changed(TINY, {setting: value})).decisions if d.setting == setting]


@pytest.mark.parametrize(
    ("warmup", "steps", "setting"),
    [(15, 10, "train.warmup"), (10, 4, "train.steps"), (300, 100, "train.warmup"), (10, 10, ""), (0, 1, "")],
)
def test_a_warmup_longer_than_the_run_is_remarked_on_once(warmup: int, steps: int, setting: str) -> None:
    """Short tries of a recipe go on, and say that their learning rate stays below its top."""
    found = resolve(changed(TINY, {"train.warmup": warmup, "train.steps": steps}))
    about = [d for d in found.decisions if d.setting in ("train.warmup", "train.steps")]
    assert [d.setting for d in about] == [setting] * bool(setting)
    for remark in about:
        assert f"{warmup} steps of train.warmup are more than train.steps = {steps}, so the learning" in remark.reason
        assert remark.fix
        assert not remark.unmet


def test_methods_that_the_host_cannot_serve_are_given_up() -> None:
    dense = Config(mesh=MeshConfig(tp=2))
    host = Host(gpus=2, no_peer_memory="GPU 0 cannot reach the memory of GPU 1")
    asked = {"overlap.tp.method": ("qkv_forward:ring",)}
    found = resolve(changed(dense, asked), host, flags(asked), gives_up=True)
    given_up = decided(found, "overlap.tp.method")
    assert (given_up.asked, given_up.unmet, found.overlap.tp.way("qkv", "forward")) == (
        ("qkv_forward:ring",),
        True,
        "off",
    )
    assert "cannot reach" in given_up.reason
    assert set(resolve(dense, host).overlap.tp.named().values()) <= {"off", "bulk"}
