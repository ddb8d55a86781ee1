"""What is predicted of published runs: in the right range, with nothing tuned to them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.published import FACTS, config_of, rows
from hocket.config.schema import types
from hocket.gpus import GPUS

RUNS = json.loads(FACTS.read_text())
QUICK = [run for run in RUNS if run["gpus"] <= 128]
"""Those without a pipeline, whose steps are simulated in a moment."""


@pytest.mark.parametrize("run", QUICK, ids=lambda run: run["name"])
def test_a_published_run_is_predicted_in_a_plausible_range(run: dict[str, Any]) -> None:
    """Within a factor of 1.5. What runs an H100 of 500 W, or recomputes otherwise, is further off than the others."""
    (row,) = rows([run])
    assert 1 / 1.5 < row.ratio < 1.5, row


@pytest.mark.full
def test_long_sequences_that_ranks_share_are_ranked_as_published() -> None:
    """Qwen3-235B-A22B at 16k tokens a rank: the two ends, each within 16 %."""
    ends = [run for run in RUNS if run["name"].endswith(("seq16k_cp1", "seq128k_cp8"))]
    short, long = rows(ends)
    assert short.published < long.published
    assert short.predicted < long.predicted
    assert all(0.84 < each.ratio < 1.16 for each in (short, long)), (short, long)


def test_facts_name_their_source_and_settings_that_there_are() -> None:
    assert len({run["name"] for run in RUNS}) == len(RUNS) >= 8
    for run in RUNS:
        assert run["source"]
        assert run["gpu"] in GPUS
        assert set(run["settings"]) <= set(types())
        assert config_of(run, 1).mesh.world == run["gpus"]
