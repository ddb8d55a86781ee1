"""Programs as people write them train under `hocket.fully_shard` as they do unsharded, or are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from tests.fsdp.zoo.judge import FILES, Verdict, compare, judge, programs, run
from tests.fsdp.zoo.program import STEPS, Block, Program, Run, fit, stack
from tests.helpers.ranks import run_ranks


@pytest.mark.timeout(240)  # many programs, of which each is to end in a second
@pytest.mark.parametrize("file", FILES)
def test_programs_are_right_or_refused(file: str) -> None:
    quick = {name: one for name, one in programs(file).items() if not one.heavy}
    if file == "packages" and not quick:
        pytest.skip("peft and timm are not installed")
    found = {name: forms["hocket"] for name, forms in judge(list(quick), ["hocket"]).items()}
    wanted = {name: "refused" if one.no else "right" for name, one in quick.items()}
    wrong = {name: verdict for name, verdict in found.items() if _said(verdict) != wanted[name]}
    assert len(found) == len(quick) > (0 if file == "packages" else 3)
    assert wrong == {}


def _said(verdict: Verdict) -> str:
    return "right" if verdict.good else verdict.kind


def test_the_judge_notices_what_is_wrong() -> None:
    assert run_ranks(_judged, 2) == [["bits", "wrong", "refused", "failed"]] * 2


def _judged(rank: int) -> list[str]:
    def train(found: Run, **options: object) -> None:
        model = found.shard(stack(), Block, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            for seed in found.seeds(step):
                found.backward(fit(4, 8)(model, torch.Generator().manual_seed(seed)))
            optimizer.step()
            optimizer.zero_grad()
        found.note_weights(model)

    def alone(found: Run) -> None:
        train(found, options=hocket.ShardOptions(transport="null"))

    def refused(found: Run) -> None:
        found.shard(nn.Identity())

    def late(found: Run) -> None:
        train(found)
        raise ValueError("after the steps")

    plain, _ = run(Program("plain", train), "plain", rank, 2)
    said = []
    for one in (train, alone, refused, late):
        found, error = run(Program("one", one), "hocket", rank, 2)
        said.append((error or compare(plain, found)).kind)
    return said
