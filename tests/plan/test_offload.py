"""What parts keep in the host's memory: where a plan copies it, what the checker asks of that, what it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hocket.config import Config
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.planning import predict, program_of, report
from hocket.predict.cost import costs_of
from hocket.predict.hardware import H200, HARDWARE
from hocket.predict.simulate import simulate
from hocket.program.check import check
from hocket.program.lower import build_program
from hocket.program.offload import host_slots
from hocket.program.ops import Layout, Program
from hocket.program.shard import Sharding
from hocket.recipes import qwen3_30b_a3b
from hocket.resolve import resolve
from tests.helpers.dryrun import dry_run
from tests.helpers.plans import planned
from tests.plan.programs import find, moved, with_op, without

LAYOUT = Layout(kinds=("dense",) * 4, offload=("attn:3",))
PLAIN = planned(merge="off")


def program(layout: Layout = LAYOUT, microbatches: int = 2) -> Program:
    return build_program(layout, microbatches, PLAIN, Sharding())


def test_copies_stand_behind_the_forward_and_a_pass_ahead_of_the_backward() -> None:
    there = program(microbatches=1)
    ops = there.ranks[0]
    found = [str(op) for op in ops if op.verb in ("fwd", "bwd", "offload", "reload") and op.part != "embed"]
    assert found == [
        "fwd attn m0 c0 l0", "offload attn m0 c0 l0 s0", "fwd mlp m0 c0 l0",
        "fwd attn m0 c0 l1", "offload attn m0 c0 l1 s1", "fwd mlp m0 c0 l1",
        "fwd attn m0 c0 l2", "offload attn m0 c0 l2 s2", "fwd mlp m0 c0 l2",
        "fwd attn m0 c0 l3", "fwd mlp m0 c0 l3", "fwd head m0 c0", "bwd head m0 c0",
        "reload attn m0 c0 l2 s2", "bwd mlp m0 c0 l3", "bwd attn m0 c0 l3",
        "reload attn m0 c0 l1 s1", "bwd mlp m0 c0 l2", "bwd attn m0 c0 l2",
        "reload attn m0 c0 l0 s0", "bwd mlp m0 c0 l1", "bwd attn m0 c0 l1", "bwd mlp m0 c0 l0", "bwd attn m0 c0 l0",
        "bwd embed m0 c0",
    ][: len(found)]  # fmt: skip
    third = ops[find(there, 0, "fwd attn m0 c0 l2")]
    gone = find(there, 0, "offload attn m0 c0 l0")
    assert gone in third.deps, "what two passes keep is here at most"
    assert gone in third.frees


def test_slots_are_used_again_once_they_have_been_read() -> None:
    there = program(microbatches=4)
    assert host_slots(there.ranks[0]) == {"attn": 3}
    again = find(there, 0, "offload attn m1 c0 l0")
    slot = there.ranks[0][again].slot
    read = max(i for i, op in enumerate(there.ranks[0][:again]) if op.verb == "reload" and op.slot == slot)
    deps = there.ranks[0][again].deps
    assert read in deps or any(op > read for op in deps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: without(p, 0, find(p, 0, "offload attn m0 c0 l0")), "offload attn m0 c0 l0 is missing"),
        (lambda p: without(p, 0, find(p, 0, "reload attn m0 c0 l0")), "reload attn m0 c0 l0 is missing"),
        (lambda p: with_op(p, 0, find(p, 0, "offload attn m0 c0 l1"), slot=0), "overwrites 2 offload"),
        (lambda p: with_op(p, 0, find(p, 0, "offload attn m0 c0 l1"), slot=-1), "attn has 0 slots of saved tensors"),
        (lambda p: with_op(p, 0, find(p, 0, "reload attn m0 c0 l1"), slot=0), "finds no saved tensors of its own"),
        (lambda p: with_op(p, 0, find(p, 0, "reload attn m0 c0 l1"), lane="gather"), "is on lane gather, not reload"),
        (lambda p: with_op(p, 0, find(p, 0, "reload attn m0 c0 l1"), deps=()), "may be issued before"),
        (lambda p: with_op(p, 0, find(p, 0, "bwd attn m0 c0 l1"), deps=()), "may run before"),
        (lambda p: with_op(p, 0, find(p, 0, "fwd attn m0 c0 l2"), deps=()), "may still read it"),
        (
            lambda p: moved(p, 0, find(p, 0, "reload attn m0 c0 l0"), find(p, 0, "bwd attn m0 c0 l0") + 1),
            "bwd attn m0 c0 l0 may run before",
        ),
    ],
)
def test_broken_plans_are_noticed(change: Callable[[Program], Program], message: str) -> None:
    there = program()
    assert check(there) == []
    found = [str(violation) for violation in check(change(there))]
    assert any(message in text for text in found), found


def test_a_slot_that_is_overwritten_is_noticed_by_the_dry_run() -> None:
    there = program()
    dry_run(there, 0)
    wrong = with_op(there, 0, find(there, 0, "offload attn m0 c0 l1"), slot=0)
    with pytest.raises(ValueError, match="dry run"):
        dry_run(wrong, 0)


def test_what_cannot_be_offloaded_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="part 'kv' cannot be offloaded: there are attn, experts, mlp"):
        Layout(kinds=("dense",), offload=("kv",))


def step(**settings: object) -> Config:
    """One GPU, four microbatches of one long sequence."""
    c = changed(qwen3_30b_a3b(), {"mesh.pp": 1, "mesh.dp": 1, "mesh.ep": 1, "model.layers": 4, "plan.chunks": 1})
    c = changed(c, {"train.sequences": 1, "data.sequence_length": 65536, "train.microbatches": 2})
    return changed(c, {"train.transport": "nccl", **{f"plan.{name}": value for name, value in settings.items()}})


def test_memory_of_the_gpu_falls_and_that_of_the_host_is_told() -> None:
    host = Host(gpus=1, gpu="NVIDIA H200")
    kept, away = (resolve(step(offload=parts), host) for parts in ((), ("attn:3", "experts:3")))
    before, after = (predict(s, program_of(s), H200) for s in (kept, away))
    assert after.ranks[0].peak_bytes < 0.9 * before.ranks[0].peak_bytes
    assert before.ranks[0].host_bytes == 0
    saved = costs_of(away, H200).table["offload", "attn", "moe"].output_bytes
    assert after.ranks[0].host_bytes > 3 * saved
    assert float(after.makespan) < 1.2 * float(before.makespan)
    shown = report(away, program_of(away), H200, 100, 0)
    assert "on the host" in shown
    assert f"{after.ranks[0].host_bytes / 2**30:.2f} GiB" in shown
    assert "on the host" not in report(kept, program_of(kept), H200, 100, 0)


def test_a_slow_link_makes_forward_wait_and_no_memory_grow() -> None:
    """Pacing: a rank holds what two passes keep, however long a copy takes."""
    away = resolve(step(offload=("attn:3",)), Host(gpus=1, gpu="NVIDIA H200"))
    fast, slow = (replace(H200, host=replace(H200.host, bandwidth=rate)) for rate in (1e15, 1e9))
    quick, late = (simulate(program_of(away), costs_of(away, hardware)) for hardware in (fast, slow))
    assert float(late.makespan) > 2 * float(quick.makespan)
    saved = costs_of(away, slow).table["offload", "attn", "moe"].output_bytes
    assert late.ranks[0].peak_bytes <= quick.ranks[0].peak_bytes + 3 * saved


def test_links_to_hosts_are_scaled_from_data_sheets() -> None:
    assert HARDWARE["h100-sxm"].host.bandwidth == H200.host.bandwidth
    assert HARDWARE["gh200"].host.bandwidth > 5 * H200.host.bandwidth


def test_auto_offloads_as_few_layers_as_fit_where_that_is_shorter() -> None:
    c = step(offload=("auto",), recompute=("auto",))
    kept = resolve(step(), Host(gpus=1, gpu="NVIDIA H200"))
    need = predict(kept, program_of(kept), H200).ranks[0].peak_bytes
    for share, expected in ((1.3, False), (1.05, True)):
        found = resolve(c, Host(gpus=1, gpu="NVIDIA H200", memory=int(share * need)))
        assert bool(found.plan.offload) == expected
        assert found.plan.recompute == ()
        (told,) = (d for d in found.decisions if d.setting == "plan.offload")
        assert ("offload = (none) does not fit" in told.reason) == expected
    assert all(":" in part for part in found.plan.offload), "not in all layers"
