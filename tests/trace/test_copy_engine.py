"""A real step whose communication holds no SM: `fully_shard` on two H200, gathers and reductions on copy engines.

Six blocks of 268,451,840 weights in bf16 and a root of 16,384, two microbatches, AdamW; rank 0's trace, whole.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket_trace import load, report

BLOCK = 268_451_840
"""Bytes that a gather or a reduction of a block brings to a rank of two."""


@pytest.fixture(scope="module")
def found():
    (step,) = report(load([Path(__file__).parent / "copy_engine.json.gz"])).steps
    return step.kinds


def test_copies_between_gpus_are_communication(found):
    assert set(found) == {"gather", "reduce"}
    # In two microbatches: 6 + 4 blocks in the first, 4 + 4 in the second (2 of 6 stay at every turn), and the root.
    assert found["gather"].count == 6 + 4 + 4 + 4 + 1
    assert found["reduce"].count == 2 * 6 + 2
    assert found["gather"].bytes == pytest.approx(18 * BLOCK, rel=1e-3)
    assert found["reduce"].bytes == pytest.approx(12 * BLOCK, rel=1e-3)


def test_they_reach_what_the_links_allow_and_are_mostly_hidden(found):
    for share in found.values():
        assert 300e9 < share.bandwidth < 320e9
    assert found["gather"].hidden == pytest.approx(0.829, abs=1e-3)
    assert found["reduce"].hidden == pytest.approx(0.752, abs=1e-3)
