"""Text and JSON of programs."""

import json
import re
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.program.lower import build_program
from hocket.program.ops import LANES, Layout, Op, Program
from hocket.program.shard import Sharding
from hocket.program.text import from_json, to_json, to_text
from tests.helpers.plans import planned
from tests.plan.programs import Case, cases, find, sample

NONE_OR_MORE = st.integers(-1, 200)
OPS = st.builds(
    Op,
    verb=st.sampled_from(("fwd", "bwd", "wgrad", "send", "recv", "gather", "release", "reduce", "step")),
    part=st.sampled_from(("embed", "attn", "dispatch", "head", "act", "grad", "dense", "all")),
    microbatch=NONE_OR_MORE,
    chunk=NONE_OR_MORE,
    layer=NONE_OR_MORE,
    lane=st.sampled_from(LANES),
    slot=NONE_OR_MORE,
    deps=st.lists(st.integers(-3, 300), max_size=4).map(tuple),
    frees=st.lists(st.integers(-3, 300), max_size=4).map(tuple),
    trims=st.lists(st.integers(-3, 300), max_size=4).map(tuple),
)


@st.composite
def any_program(draw: st.DrawFn) -> Program:
    """Programs that only have to be well-formed: the text must carry broken ones too."""
    pp = draw(st.integers(1, 3))
    dense: Literal["dense"] = "dense"
    moe: Literal["moe"] = "moe"
    kinds = tuple(draw(st.lists(st.sampled_from((dense, moe)), min_size=pp, max_size=8)))
    slots = st.dictionaries(st.sampled_from(("embed", "dense", "experts", "head")), st.integers(0, 9))
    return Program(
        layout=Layout(
            kinds,
            pp=pp,
            ep=draw(st.integers(1, 4)),
            tied=draw(st.booleans()),
            turning=draw(st.booleans()),
            per_rank=draw(st.booleans()),
            placed=draw(st.booleans()),
            uncounted=draw(st.booleans()),
        ),
        microbatches=draw(st.integers(0, 99)),
        ranks=tuple(tuple(draw(st.lists(OPS, max_size=6))) for _ in range(pp)),
        weight_slots=draw(slots),
        grad_slots=draw(slots),
        in_flight=tuple(draw(st.lists(st.integers(0, 99), max_size=3))),
        notes=tuple(draw(st.lists(st.text(), max_size=3))),
    )


@given(any_program())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_round_trip_of_anything(program: Program) -> None:
    assert from_json(to_json(program)) == program
    assert from_json(json.dumps(to_json(program))) == program


@given(cases())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_round_trip_of_built_programs(case: Case) -> None:
    program = case.build()
    assert from_json(json.dumps(to_json(program))) == program


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


GOOD = Program(
    Layout(("dense",) * 2),
    1,
    ((Op("gather", "dense", 0, 0, 0, "gather", slot=0), Op("fwd", "attn", 0, 0, 0, deps=(0,), frees=(0,))),),
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "not a program"),
        ({"ranks": [[{"verb": "fwd", "lane": "compute"}]]}, "ranks.0.0: Op.__new__() missing 1 required"),
        ({"ranks": [[{"verb": "fwd", "part": "x", "lane": "compute"}]]}, "not a program: ranks.0.0: unknown part 'x'"),
        (
            {"ranks": [[{"verb": "fwd", "part": "attn", "lane": "compute", "slot": "1"}]]},
            "ranks.0.0.slot = '1': not a whole number",
        ),
        (
            {"ranks": [[{"verb": "fwd", "part": "attn", "lane": "compute", "deps": 1}]]},
            "ranks.0.0.deps = 1: not a list of whole numbers",
        ),
        ({"layout": {"kinds": ["dense"], "size": 3}}, "not a program: layout.size: no such field; there are kinds, pp"),
        ({"layout": {"pp": 2}}, "missing 1 required positional argument: 'kinds'"),
        ({"layout": {"kinds": ["dense"], "ep": 1.5}}, "layout.ep = 1.5: not a whole number"),
        ({"layout": {"kinds": ["dense"], "ep": 10**9}}, "layout.ep = 1000000000: more than 134217728"),
        ({"layout": {"kinds": ["dense"], "recompute": {}}}, "layout.recompute = {}: not a list of texts"),
        ({"layout": {"kinds": ["dense"], "uncounted": -1}}, "layout.uncounted = -1: not True or False"),
        (
            {"layout": {"kinds": ["dense"], "types": [{"name": "dense", "parts": [{"name": "x", "letter": 1}]}]}},
            "layout.types.0.parts.0.letter = 1: not text",
        ),
        (
            {
                "layout": {
                    "kinds": ["dense"],
                    "types": [{"name": "d", "parts": [{"name": "x", "letter": "a", "size": 1}]}],
                }
            },
            "layout.types.0.parts.0.size: no such field",
        ),
        ({"layout": 3}, "layout = 3: not an object"),
        ({"weight_slots": {"dense": 10**9}}, "weight_slots.dense = 1000000000: more than 134217728"),
        ({"weight_slots": [1]}, "weight_slots = [1]: not an object"),
        ({"in_flight": ["x"]}, "in_flight.0 = 'x': not a whole number"),
        ({"notes": "x"}, "notes = 'x': not a list of texts"),
        ({"microbatches": float("nan")}, "microbatches = nan: not a whole number"),
        ({"layout": {"kinds": ["mixed"]}}, "no description of layers of kind 'mixed'"),
    ],
)
def test_bad_json(change: dict, message: str) -> None:
    tree = {**to_json(GOOD), **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        from_json(tree)


def test_json_without_ranks() -> None:
    tree = to_json(GOOD)
    del tree["ranks"]
    with pytest.raises(ValueError, match="not a program: it has no ranks"):
        from_json(tree)


@pytest.mark.parametrize("field", ["weight_slots", "grad_slots"])
@pytest.mark.parametrize("count", [1.5, "x", None, True])
def test_slots_that_are_no_whole_number_are_refused(field: str, count: object) -> None:
    tree: dict[str, Any] = json.loads(json.dumps(to_json(build_program(Layout(("dense",)), 1, planned(), Sharding()))))
    tree[field]["dense"] = count
    with pytest.raises(ValueError, match=rf"not a program: {field}\.dense = .*: not a whole number"):
        from_json(tree)
