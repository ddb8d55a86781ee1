"""Text of programs."""

import re

import pytest

from hocket.program.ops import Layout, Op, Program
from hocket.program.text import to_text
from tests.plan.programs import find, sample


@pytest.fixture(scope="module")
def program() -> Program:
    cases = (case for case in sample(300, 1) if case.layout.pp == 2 and case.sharding.dense == 2)
    return next(case.build() for case in cases if case.sharding.strategy == "optim_grads_params")


def test_one_op_per_line(program: Program) -> None:
    lines = to_text(program).splitlines()
    position = find(program, 1, "recv act m0")
    (line,) = [line for line in lines[lines.index("rank 1") :] if re.match(rf"\s+{position}  ", line)]
    assert line.split()[:5] == [str(position), "recv", "act", "m0", "c0"]
    assert "@pp_fwd" in line or "@recv" in line
    assert len(lines) == len(program) + 8 + len(program.notes) + 2 * len(program.ranks)


def test_a_program_with_unprintable_numbers_is_refused() -> None:
    program = Program(Layout(("dense",)), 1, ((Op("fwd", "attn", -7, 0, 0),),))
    with pytest.raises(ValueError, match="below -1"):
        to_text(program)
