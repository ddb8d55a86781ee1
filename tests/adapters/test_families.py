"""Unmodified models of transformers in the planned step, beside plain autograd."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip(
    "transformers",
    minversion="5.0",
    reason="needs transformers 5, which make setup installs where there is a network",
    exc_type=ImportError,
)

from hocket.adapters.transformers import Pretrained
from hocket.config.rule import Host
from hocket.config.schema import DEFAULTS, changed
from hocket.model.documents import Microbatch
from hocket.program.check import check
from hocket.program.lower import build_program
from hocket.program.stages import layout_of, sharding_of
from hocket.resolve import resolve
from tests.adapters.families import DENSE, EXPERTS, FAMILIES, batches, model
from tests.adapters.runs import CHOSEN, Batches, far, of_family, plain, planned
from tests.helpers.parity import whole
from tests.helpers.ranks import run_ranks

ROUNDING = 1e-6
"""The largest relative difference where sums have another order: experts' outputs, and gradients of shared rows."""
SMALL = 0.01
"""Share of the whole gradient's norm below which a parameter's is what is left of larger numbers, and measured by
it."""


def compare(family: str, losses: list[list[float]], ranks: list[dict[str, Any]], expected: Any) -> None:
    wanted, grads = expected
    bitwise = family in DENSE
    assert len(losses) == len(wanted)
    for got, exact in zip(losses, wanted, strict=True):
        assert got == (exact if bitwise else pytest.approx(exact, rel=ROUNDING)), f"losses of {family}"
    found = whole([piece for rank in ranks for piece in rank["grads"]])
    assert found.keys() == grads.keys()
    least = SMALL * float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    for name, grad in grads.items():
        same = torch.equal(found[name], grad) if bitwise else far(found[name], grad, least) <= ROUNDING
        assert same, f"gradient of {name} of {family}: {far(found[name], grad, least):.2g}"


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank(family: str) -> None:
    made, given = model(family), batches(2)
    out = planned(made, {}, given)
    compare(family, [[loss] for loss in out["losses"]], [out], plain(made, given))


def several(rank: int, families: list[str], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """All families one after the other: importing transformers takes longer than their steps."""
    return [
        of_family(family, {**settings, **({"mesh.ep": 2} if family in EXPERTS else {})}, 4, 2) for family in families
    ]


PIPELINE = {"mesh.pp": 2, "mesh.dp": 2, "plan.chunks": 2, "overlap.defer_wgrad": "on"}
GROUPS = [list(FAMILIES)[i::7] for i in range(7)]


OTHERS = ("llama", "qwen2", "qwen3")
"""Groups that begin so have what the others have too."""


@pytest.mark.parametrize(
    "families", [pytest.param(g, marks=[pytest.mark.full] * (g[0] in OTHERS), id=" ".join(g)) for g in GROUPS]
)
def test_pipeline_sharding_experts(families: list[str]) -> None:
    """Interleaved pipeline, full sharding; experts on two ranks, forwards merged with backwards."""
    ranks = run_ranks(several, 4, families, {**PIPELINE, **CHOSEN})
    for i, family in enumerate(families):
        mine = [rank[i] for rank in ranks]
        last = [rank["losses"] for rank in mine if rank["losses"]]
        compare(family, [list(losses) for losses in zip(*last, strict=True)], mine, plain(model(family), batches(4, 2)))
        assert {"gather dense", "reduce dense", "wgrad attn"} <= set(mine[0]["verbs"])
        assert ("fwd dispatch" in mine[0]["verbs"]) == (family in EXPERTS)


LEARNT = [[16, 2], [0, 0], [0, 13], [1, 5]]
"""Targets that count, by microbatch and data-parallel rank."""


def uneven(ranks: int) -> Batches:
    """Batches of `LEARNT`, those of one rank one after the other if there is one."""
    given = batches(4, 2)
    for of_ranks, counts in zip(given, LEARNT, strict=True):
        for (_, targets), count in zip(of_ranks, counts, strict=True):
            targets.view(-1)[count:] = -100
    return given if ranks == 2 else [[batch] for of_ranks in given for batch in of_ranks]


def weighed(rank: int, families: list[str], settings: dict[str, Any], given: Batches) -> list[dict[str, Any]]:
    found = []
    for family in families:
        out = planned(model(family), {**settings, **({"mesh.ep": 2} if family in EXPERTS and settings else {})}, given)
        step = out.pop("step")
        step.load_into(after := model(family))
        out["evaluated"] = step.evaluate([Microbatch(*of_ranks[step.engine.where.dp]) for of_ranks in given])
        out["after"] = mean_loss(after, given).item()
        step.close()
        found.append(out)
    return found


def mean_loss(made: Any, given: Batches) -> Tensor:
    """The sum over targets of all microbatches and ranks, divided once by their number: transformers', in fp64."""
    made.config._experts_implementation = "eager"  # whose products take fp64
    made, total, count = made.double(), torch.zeros((), dtype=torch.float64), 0
    for ids, targets in chain(*given):
        logits = made(input_ids=ids, use_cache=False).logits
        total = total + F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        count += int((targets != -100).sum())
    return total / count


@pytest.mark.parametrize("settings", [{}, PIPELINE], ids=["one rank", "pipeline"])
def test_each_target_that_counts_weighs_the_same(settings: dict[str, Any]) -> None:
    families, given = ["llama", "qwen3_moe"], uneven(2 if settings else 1)
    ranks = run_ranks(weighed, 4 if settings else 1, families, settings, given)
    for i, family in enumerate(families):
        made, mine = model(family), [rank[i] for rank in ranks]
        loss = mean_loss(made, given)
        for rank in mine:
            assert rank["outcome"].loss == pytest.approx(loss.item(), rel=1e-6), family
            assert rank["evaluated"] == pytest.approx(rank["after"], rel=1e-6), family
        grads = dict(zip(dict(made.named_parameters()), torch.autograd.grad(loss, [*made.parameters()]), strict=True))
        found = whole([piece for rank in mine for piece in rank["grads"]])
        least = SMALL * float(torch.stack([grad.norm() for grad in grads.values()]).norm())
        wrong = {name: off for name, grad in grads.items() if not (off := far(found[name], grad, least)) <= 1e-5}
        assert not wrong, f"gradients of {family}: {wrong}"


WAYS: list[dict[str, Any]] = [
    {"plan.recompute": ("attn", "experts"), "overlap.ep.copies": "per_rank"},
    {"plan.order": "merged_v", "overlap.ep.merge": "on"},
    {"overlap.dp.strategy": "optim", "overlap.dp.update": "next_step", "mesh.ep": 1},
]


def in_ways(rank: int, family: str) -> list[dict[str, Any]]:
    return [of_family(family, {**PIPELINE, **CHOSEN, "mesh.ep": 2, **way}, 4, 2) for way in WAYS]


def test_other_plans() -> None:
    """Parts that run once more, one copy of a token for each rank, a merged V, gradients that stay whole."""
    family = "granitemoe"
    expected, ranks = plain(model(family), batches(4, 2)), run_ranks(in_ways, 4, family)
    for i in range(len(WAYS)):
        mine = [rank[i] for rank in ranks]
        last = [rank["losses"] for rank in mine if rank["losses"]]
        compare(family, [list(losses) for losses in zip(*last, strict=True)], mine, expected)
    assert "recompute experts" in ranks[0][0]["verbs"]


@pytest.mark.parametrize("order", [{"plan.order": "zb_h1", "plan.chunks": 1}, {"plan.order": "zb_v"}])
def test_what_was_received_lives_until_weight_gradients_have_read_it(order: dict[str, Any]) -> None:
    """OLMo 2 projects a layer's input as it came, and hocket's own layers, for which plans would drop it, do not."""
    settings = {**PIPELINE, "train.microbatches": 8, **order}
    config = resolve(changed(DEFAULTS, settings), Host(workers=4, local_workers=4))
    own, theirs = layout_of(config), Pretrained(model("olmo2")).layout(config)
    programs = [build_program(layout, 8, config, sharding_of(config)) for layout in (own, theirs)]
    assert [check(program) for program in programs] == [[], []]
    dropped = check(replace(programs[0], layout=theirs))
    assert {violation.name for violation in dropped} == {"values outlive their readers"}
    assert all("wgrad attn" in violation.message for violation in dropped)
