"""What `train.transport = auto` becomes: every reason for copy engines and against them, memory, and a failed trial."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.run import Bench, Sized, without
from hocket.config import Config
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.decision import Decision
from hocket.explain.build import explain
from hocket.launching import launch
from hocket.launching.agreement import copies_tested
from hocket.predict.arrivals import arrival_bytes
from hocket.program.mesh import Purpose
from hocket.resolve import Settings, resolve, without_copies
from hocket.tune.rules import lost_copies
from hocket.tune.trials import Trials
from hocket.variables import survey

BASE: dict[str, Any] = {"model.layers": 8, "train.microbatches": 8, "plan.graphs": "off"}
DENSE = changed(Config(), BASE | {"mesh.dp": 4})
EXPERTS = changed(Config(), BASE | {"model.experts": 8, "mesh.dp": 4, "mesh.ep": 4})
PIPED = changed(Config(), BASE | {"mesh.pp": 4})
SHARED = changed(Config(), BASE | {"mesh.cp": 4})
HERE = Host(gpus=8, gpu="NVIDIA H200")
"""A host that was examined."""
TWO_HOSTS = Host(gpus=2, gpu="NVIDIA H200", workers=4, local_workers=2)


def found(**variables: str) -> Host:
    return replace(HERE, variables=tuple(survey(variables)))


def chosen(settings: Settings, name: str = "train.transport") -> Decision:
    return next(decision for decision in settings.decisions if decision.setting == name)


@pytest.mark.parametrize("config", [DENSE, EXPERTS, PIPED, SHARED], ids=["dense", "experts", "pipeline", "context"])
def test_ranks_on_gpus_of_one_host_copy(config: Config) -> None:
    settings = resolve(config, HERE)
    decision = chosen(settings)
    assert settings.train.transport == decision.value == "copy_engine"
    assert decision.reason == "4 ranks on GPUs of one host, which reach each other's memory"
    assert decision.source == "auto"
    again = resolve(settings)
    assert (again.train, again.decisions) == (settings.train, settings.decisions)


def test_a_reason_says_that_memory_was_not_checked() -> None:
    assert chosen(resolve(DENSE, Host(gpus=8))).reason.endswith(
        "hocket assumes that they reach each other's memory, without a check"
    )


AGAINST: list[tuple[str, dict[str, Any], Host, str, str]] = [
    ("CPUs", {}, Host(), "gloo", "the ranks compute on CPUs"),
    ("one rank", {"mesh.dp": 1}, HERE, "nccl", "no group that copy engines serve has several ranks"),
    ("tensor-parallel ranks alone", {"mesh.dp": 1, "mesh.tp": 2}, HERE, "nccl", "no group that copy engines serve"),
    ("tensor-parallel ranks beside others", {"mesh.dp": 2, "mesh.tp": 2}, HERE, "nccl", "have not been timed"),
    ("two hosts", {}, TWO_HOSTS, "nccl", "GPUs of one host, and of 4 ranks 2 are on each"),
    ("two hosts, as given", {"network.ranks_per_host": 2}, HERE, "nccl", "of 4 ranks 2 are on each"),
    ("an old NCCL", {}, replace(HERE, no_copy_engine="NCCL is old"), "nccl", "NCCL is old"),
    ("GPUs apart", {}, replace(HERE, no_peer_memory="GPU 0 is far"), "nccl", "GPU 0 is far"),
    ("no peers", {}, found(NCCL_P2P_DISABLE="1"), "nccl", "NCCL_P2P_DISABLE = 1 (environment)"),
    ("peers of no level", {}, found(NCCL_P2P_LEVEL="LOC"), "nccl", "NCCL_P2P_LEVEL = LOC (environment)"),
    ("peers of any level", {}, found(NCCL_P2P_LEVEL="SYS"), "copy_engine", "which reach each"),
    ("what harms others", {}, found(NCCL_IB_DISABLE="1"), "copy_engine", "which reach each"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "host", "value", "reason"), [c[1:] for c in AGAINST], ids=[c[0] for c in AGAINST])
def test_what_speaks_against_copies(changes: dict[str, Any], host: Host, value: str, reason: str) -> None:
    settings = resolve(changed(DENSE, changes), host)
    assert settings.train.transport == chosen(settings).value == value
    assert reason in chosen(settings).reason
    # A run reports at its start only faults of a host. The other reasons follow from the user's settings.
    mend = bool(host.no_copy_engine or host.no_peer_memory or (value == "nccl" and host.variables))
    assert bool(list(lost_copies(host, settings.decisions))) == mend


@pytest.mark.parametrize("asked", ["nccl", "copy_engine", "copy_engine_gathers", "null"])
def test_a_demanded_transport_stays(asked: str) -> None:
    origins = {"train.transport": "command line"}
    settings = resolve(changed(DENSE, {"train.transport": asked}), HERE, origins)
    assert settings.train.transport == asked
    assert "train.transport" not in {decision.setting for decision in settings.decisions}
    assert without_copies(settings, "no memory") is settings
    assert not list(lost_copies(settings.host, settings.decisions))


@pytest.mark.parametrize("host", [TWO_HOSTS, replace(HERE, no_copy_engine="NCCL is old")])
def test_copies_that_somebody_asks_for_and_cannot_have_are_refused(host: Host) -> None:
    origins = {"train.transport": "command line"}
    with pytest.raises(
        ValueError, match=r"train\.transport = copy_engine \(command line\).*fix: train\.transport = nccl"
    ):
        resolve(changed(DENSE, {"train.transport": "copy_engine"}), host, origins)


@pytest.mark.parametrize(
    ("no_copies", "said"), [("", ""), ("NCCL is old", "hocket: train.transport = nccl: NCCL is old\n")]
)
def test_a_run_says_what_on_its_host_keeps_it_from_copies(
    no_copies: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(launch, "prepare", lambda *given: [])
    monkeypatch.setattr(launch, "probe", lambda *given: replace(HERE, no_copy_engine=no_copies))
    settings, worker = launch.prepare_and_resolve(DENSE, {})
    assert worker is None
    assert settings.train.transport == ("nccl" if no_copies else "copy_engine")
    assert capsys.readouterr().err == said


# Memory


def needs(config: Config, **changes: Any) -> int:
    """Bytes that a step needs."""
    wanted = {name.replace("__", "."): value for name, value in changes.items()}
    return Trials().step(resolve(changed(config, wanted), HERE)).nbytes


def holding(nbytes: int) -> Host:
    """A host whose GPUs have as much memory as a step that needs so many bytes must find there."""
    return replace(HERE, memory=-(-nbytes * 10 // 9) + 1)


def test_copies_give_way_where_a_step_fits_without_their_buffers_alone() -> None:
    copies, nccl = (needs(PIPED, train__transport=transport) for transport in ("copy_engine", "nccl"))
    assert copies - nccl == arrival_bytes(resolve(PIPED, HERE)) > 0
    assert resolve(PIPED, holding(copies)).train.transport == "copy_engine"
    tight = resolve(PIPED, holding(nccl))
    assert tight.train.transport == "nccl"
    assert "with room for copies a step needs" in chosen(tight).reason
    assert "it fits with" in chosen(tight).reason
    assert "even without room for copies" in chosen(resolve(PIPED, holding(nccl - 1000))).reason


def test_copies_that_were_asked_for_stay_however_little_memory_there_is() -> None:
    asked = changed(PIPED, {"train.transport": "copy_engine"})
    assert resolve(asked, replace(HERE, memory=1000)).train.transport == "copy_engine"


def test_parts_are_recomputed_only_where_no_step_fits_otherwise() -> None:
    settled = {"overlap.pp.defer_layers": 0, "overlap.pp.defer_head": 0}
    piped = changed(PIPED, {**settled, "plan.layers_per_stage": ()})
    free = changed(piped, {"plan.recompute": ("auto",)})
    every = ("attn", "mlp")
    nccl = needs(piped, train__transport="nccl")
    assert resolve(free, holding(nccl)).train.transport == "nccl"  # which needs nothing recomputed, as copies would
    assert resolve(free, holding(nccl)).plan.recompute == ()
    least = needs(piped, train__transport="copy_engine", plan__recompute=every)
    assert least < nccl
    settings = resolve(free, holding(least))
    assert (settings.train.transport, settings.plan.recompute) == ("copy_engine", every)
    tight = resolve(free, holding(least - arrival_bytes(settings)))
    assert (tight.train.transport, tight.plan.recompute) == ("nccl", every)
    assert "it fits with" in chosen(tight).reason


def test_a_graph_that_would_be_recorded_comes_before_copies() -> None:
    recorded = changed(PIPED, {"plan.graphs": "auto"})  # so small a model that a host is late
    assert resolve(recorded, HERE).plan.graphs == "on"
    copies, nccl = (needs(recorded, train__transport=transport) for transport in ("copy_engine", "nccl"))
    for memory, transport in ((copies, "copy_engine"), (nccl, "nccl")):
        settings = resolve(recorded, holding(memory))
        assert (settings.train.transport, settings.plan.graphs) == (transport, "on")
    issued = needs(PIPED, train__transport="copy_engine")
    assert issued < nccl, "a graph with NCCL needs more than issued copies"
    settings = resolve(recorded, holding(issued))
    assert (settings.train.transport, settings.plan.graphs) == ("copy_engine", "off")


# A trial that fails

WHY = "a trial failed (RuntimeError: pidfd_getfd: Operation not permitted)"
FAST = changed(DENSE, {"train.microbatches": 1, "model.hidden": 1024, "model.ffn": 4096, "model.vocab": 131072})
"""Its first gathers are a large part of a step."""


def test_without_copies_what_hung_on_them_is_chosen_anew_and_nothing_else() -> None:
    before = resolve(FAST, HERE)
    assert (before.train.transport, before.overlap.dp.update) == ("copy_engine", "next_step")
    after = without_copies(before, WHY)
    assert chosen(after).reason == WHY
    assert "NCCL's kernels no more than noise was gained" in chosen(after, "overlap.dp.update").reason
    assert after == replace(resolve(FAST, replace(HERE, no_copy_engine=WHY)), decisions=after.decisions), (
        "not as if the host had said so before"
    )
    names = [decision.setting for decision in after.decisions]
    assert sorted(names) == sorted(decision.setting for decision in before.decisions)
    asked = resolve(changed(FAST, {"overlap.dp.update": "next_step"}), HERE)
    assert without_copies(asked, WHY).overlap.dp.update == "next_step"


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_settle_for_nccl_and_rank_0_says_so(rank: int, tmp_path: Path, capsys: Any) -> None:
    settings = resolve(changed(FAST, {"run.folder": str(tmp_path)}), HERE)
    asked: list[tuple[Any, ...]] = []

    def fails(*given: Any) -> str:
        asked.append(given)
        return WHY

    after = copies_tested(settings, rank, "cuda:0", fails)
    assert asked == [(["gather_dense"], "cuda:0", 60.0)]
    assert after == without_copies(settings, WHY)
    assert capsys.readouterr().out == (f"hocket: train.transport = nccl: {WHY}\n" if rank == 0 else "")
    written = json.loads(json.dumps(explain(after, ()).as_json()))
    assert all(group["moved_by"].startswith("NCCL") for group in written["groups"])


@pytest.mark.parametrize(
    ("config", "purposes"),
    [(DENSE, ["gather_dense"]), (EXPERTS, ["gather_dense", "a2a"]), (PIPED, ["a2a"]), (SHARED, ["gather_dense"])],
)
def test_a_trial_that_succeeds_changes_nothing(config: Config, purposes: list[Purpose], capsys: Any) -> None:
    settings = resolve(config, HERE)
    asked: list[Any] = []
    assert copies_tested(settings, 0, "cuda:0", lambda wanted, *rest: asked.append(wanted) or "") is settings
    assert asked == [purposes]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("asked", ["copy_engine", "nccl"])
def test_nothing_is_tried_where_somebody_has_asked(asked: str) -> None:
    settings = resolve(changed(DENSE, {"train.transport": asked}), HERE)
    assert copies_tested(settings, 0, "cuda:0", lambda *given: sys.exit("was tried")) is settings


def test_contenders_for_whom_copies_were_chosen_are_on_nccl_too() -> None:
    def of(**train: str) -> Settings:
        return resolve(changed(FAST, {f"train.{name}": value for name, value in train.items()}), HERE)

    bench = Bench(
        ("hocket", "hocket_ce", "own"), (Sized(of(), {"hocket_ce": of(transport="copy_engine"), "own": of()}),)
    )
    assert without(bench, "") is bench
    (sized,) = without(bench, WHY).sized
    transports = [sized.settings, sized.variants["hocket_ce"], sized.variants["own"]]
    assert [settings.train.transport for settings in transports] == ["nccl", "copy_engine", "nccl"]
