"""Random models, sharded at random and driven at random, against the twin.

A case is a function of a number, and a test runs a batch of cases in the same processes. To look at one that failed:
`tell` with its number alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch.distributed as dist

from tests.fsdp.graphs import LEAVES, SHARING, random_case
from tests.fsdp.stories import STORIES, failed_steps
from tests.fsdp.twin import Pair, naming
from tests.helpers.ranks import run_ranks

BATCH = 6


def tell(rank: int, numbers: Sequence[int], device: str = "cpu") -> None:
    """Steps of random cases; before the microbatches of each step something else may happen."""
    stories = {**STORIES, "failed_steps": failed_steps, "": lambda pair: None}
    world = dist.get_world_size()
    meshes: list[tuple[int, ...] | None] = [None, (4,), (2, 2)] if world == 4 else [None]
    for number in numbers:
        rng = Random(number)
        case = random_case(rng, (*LEAVES, *SHARING) if number % 2 else LEAVES, meshes)
        case = replace(case, device=device)
        told = [rng.choice([*stories, ""]) for _ in range(case.steps)]
        with naming(f"{number}: {case} {told}"):
            pair = Pair(case, rank, world)
            for story in told:
                stories[story](pair)
                for i in range(case.microbatches):
                    pair.microbatch(last=i == case.microbatches - 1)
                pair.step()
            pair.compare_gathered()


@pytest.mark.parametrize("batch", [0, *(pytest.param(more, marks=pytest.mark.full) for more in range(1, 8))])
def test_two_ranks(batch):
    run_ranks(tell, 2, range(BATCH * batch, BATCH * (batch + 1)))


def test_four_ranks():
    run_ranks(tell, 4, range(1000, 1002))
