"""Random models, sharded at random and driven at random, against the twin."""

from collections.abc import Sequence

import hypothesis
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

from tests.fsdp.graphs import LEAVES, SHARING, random_cases
from tests.fsdp.stories import STORIES, failed_steps
from tests.fsdp.twin import Case, Pair, naming
from tests.helpers.ranks import run_ranks

BATCH = 8
"""Cases per start of the processes."""

few = hypothesis.settings(
    max_examples=6,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # the case that failed is in the message; smaller ones would each cost a start
    suppress_health_check=list(HealthCheck),
)

Told = tuple[Case, tuple[str, ...]]
"""A case, and what happens before the microbatches of each step."""


def tell(rank: int, told: Sequence[Told]) -> None:
    stories = {**STORIES, "failed_steps": failed_steps}
    for case, names in told:
        with naming(case), naming(names):
            pair = Pair(case, rank, dist.get_world_size())
            for step in range(case.steps):
                if names and names[step % len(names)] in stories:
                    stories[names[step % len(names)]](pair)
                for i in range(case.microbatches):
                    pair.microbatch(last=i == case.microbatches - 1)
                pair.step()
            pair.compare_gathered()


def tales(cases: st.SearchStrategy[Case]) -> st.SearchStrategy[list[Told]]:
    names = st.lists(st.sampled_from(["", *STORIES, "failed_steps"]), max_size=4).map(tuple)
    return st.lists(st.tuples(cases, names), min_size=BATCH, max_size=BATCH)


@few
@given(tales(random_cases(LEAVES, [None])))
def test_trees(told):
    """Nested units, branches, skips, frozen parts and recomputation."""
    run_ranks(tell, 2, told)


@few
@given(tales(random_cases((*LEAVES, *SHARING), [None])))
def test_graphs_that_share_weights(told):
    """Also ties, modules called again, and weights read outside of their owner's forward."""
    run_ranks(tell, 2, told)


@hypothesis.settings(few, max_examples=2)
@given(tales(random_cases((*LEAVES, *SHARING), [None, (4,), (2, 2)])))
def test_on_four_ranks(told):
    run_ranks(tell, 4, told)
