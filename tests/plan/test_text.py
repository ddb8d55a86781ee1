"""Text, JSON and diff of programs."""

import json
import re
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.program.lower import build_program
from hocket.program.ops import LANES, Layout, Op, Program
from hocket.program.shard import Sharding
from hocket.program.text import diff, from_json, from_text, to_json, to_text
from tests.helpers.plans import planned
from tests.plan.programs import Case, cases, find, moved, sample, with_op, without

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
            tied=pp == 1 and draw(st.booleans()),
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
@settings(max_examples=200, deadline=None, derandomize=True)
def test_round_trip_of_anything(program: Program) -> None:
    assert from_text(to_text(program)) == program
    assert from_json(to_json(program)) == program
    assert from_json(json.dumps(to_json(program))) == program
    assert diff(program, program) == ""


@given(cases())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_round_trip_of_built_programs(case: Case) -> None:
    program = case.build()
    assert from_text(to_text(program)) == program
    assert from_json(json.dumps(to_json(program))) == program


@pytest.fixture(scope="module")
def program() -> Program:
    cases = (case for case in sample(50, 1) if case.layout.pp == 2 and case.sharding.dense == 2)
    return next(case.build() for case in cases if case.sharding.strategy == "optim_grads_params")


def test_one_op_per_line(program: Program) -> None:
    lines = to_text(program).splitlines()
    position = find(program, 1, "recv act m0")
    (line,) = [line for line in lines[lines.index("rank 1") :] if re.match(rf"\s+{position}  ", line)]
    assert line.split()[:5] == [str(position), "recv", "act", "m0", "c0"]
    assert "@pp_fwd" in line or "@recv" in line
    assert len(lines) == len(program) + 8 + len(program.notes) + 2 * len(program.ranks)


def test_comments_and_blank_lines_mean_nothing(program: Program) -> None:
    text = to_text(program)
    assert from_text("# why\n\n" + text.replace("\nrank 1\n", "\n\n  # the other one\nrank 1\n\n")) == program


def test_a_program_with_unprintable_numbers_is_refused() -> None:
    program = Program(Layout(("dense",)), 1, ((Op("fwd", "attn", -7, 0, 0),),))
    with pytest.raises(ValueError, match="below -1"):
        to_text(program)


GOOD = """hocket program 1
layout pp=1 chunks=1 ep=1 tied=no
kinds dense*2
bounds 0 2
microbatches 1
weight_slots dense=1

rank 0
    0  gather dense t0 c0 l0 s0   @gather
    1  fwd attn m0 c0 l0          @compute  <- 0  free 0
"""


def test_the_sample_is_good() -> None:
    program = from_text(GOOD)
    assert program.ranks[0][1] == Op("fwd", "attn", 0, 0, 0, deps=(0,), frees=(0,))
    assert program.in_flight == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hocket program 1", "hocket program 2", "line 1: a program starts with 'hocket program 1'"),
        ("layout pp=1", "layout pq=1", "line 2: expected 'pp=N"),
        ("pp=1", "pp=x", "line 2: invalid literal"),
        ("pp=1", "pp=2", "line 2: bounds must be 3 numbers"),
        ("dense*2", "sparse*2", "line 2: no description of layers of kind 'sparse'"),
        ("dense*2", "dense*two", "line 3: invalid literal"),
        ("bounds 0 2", "bounds 0 1", "line 2: bounds must be"),
        ("microbatches 1", "microbatches", "line 5: invalid literal"),
        ("microbatches 1\n", "", "the header has no line 'microbatches'"),
        ("microbatches 1", "bounds 0 2", "line 5: 'bounds' is given twice, first in line 4"),
        ("weight_slots dense=1", "weight_slots dense", "line 6: expected name=value, got 'dense'"),
        ("weight_slots dense=1", "weight_slots attn=1", "line 6: unknown class of units 'attn'"),
        ("weight_slots dense=1", "note unquoted", "line 6: "),
        ("weight_slots dense=1", "note 3", "line 6: a note is a string"),
        ("rank 0", "rank 1", "line 8: expected 'rank 0'"),
        ("rank 0\n", "", "line 8: expected one of layout"),
        ("    0  gather", "    1  gather", "line 9: expected op 0, got op 1"),
        ("    0  gather", "    gather", "line 9: expected 'position name @lane"),
        ("gather dense", "gather m0", "line 9: unknown part 'm0'"),
        ("gather dense", "fetch dense", "line 9: expected each of m, c, l, s"),
        ("fwd attn", "forward attn", "line 10: unknown verb 'forward'"),
        ("@compute", "@gpu", "line 10: unknown lane 'gpu'"),
        ("m0 c0", "m0 m0", "line 10: expected each of m, c, l, s with a number at most once, got 'm0'"),
        ("fwd attn m0", "fwd attn t0", "line 10: expected each of m, c, l, s"),
        ("<- 0", "<- a", "line 10: expected 'position name @lane"),
    ],
)
def test_bad_text(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ValueError, match=re.escape(message)):
        from_text(GOOD.replace(old, new, 1))


def test_empty_text() -> None:
    with pytest.raises(ValueError, match="line 1: the text is empty"):
        from_text("")


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
    tree = {**to_json(from_text(GOOD)), **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        from_json(tree)


def test_json_without_ranks() -> None:
    tree = to_json(from_text(GOOD))
    del tree["ranks"]
    with pytest.raises(ValueError, match="not a program: it has no ranks"):
        from_json(tree)


def test_diff_names_what_changed(program: Program) -> None:
    wgrad = find(program, 1, "wgrad")
    name = str(program.ranks[1][wgrad]._replace(slot=-1))
    assert diff(program, without(program, 1, wgrad)).splitlines()[:2] == ["rank 1", f"  - {name}  @compute"]
    added = diff(without(program, 1, wgrad), program).splitlines()
    assert added[0] == "rank 1"
    assert any(line.startswith(f"  + {name}  @compute, after ") for line in added)


def test_diff_of_an_inserted_op_is_short(program: Program) -> None:
    position = find(program, 0, "release")
    assert len(diff(without(program, 0, position), program).splitlines()) <= 4


def test_diff_of_a_moved_op_is_one_line(program: Program) -> None:
    wgrad = find(program, 0, "wgrad")
    target = wgrad + 4
    lines = diff(program, moved(program, 0, wgrad, target)).splitlines()
    name = str(program.ranks[0][wgrad]._replace(slot=-1))
    assert [line for line in lines if line.startswith("  >")] == [
        f"  > {name}: after {_name(program, wgrad - 1)} -> after {_name(program, target - 1)}"
    ]
    assert not [line for line in lines if line.startswith(("  +", "  -"))]


def _name(program: Program, position: int) -> str:
    return str(program.ranks[0][position]._replace(slot=-1))


def test_diff_of_dependencies_lane_and_slot(program: Program) -> None:
    position = find(program, 0, "bwd")
    dep = find(program, 0, "fwd attn")
    op = program.ranks[0][position]
    changed = with_op(program, 0, position, lane="reduce", slot=3, deps=(*op.deps, dep))
    assert diff(program, changed) == (
        f"rank 0\n  ~ {op}: lane {op.lane} -> reduce; slot -1 -> 3; now waits for {_name(program, dep)}\n"
    )
    assert f"no longer waits for {_name(program, dep)}" in diff(changed, program)


def test_diff_of_the_header_and_of_ranks(program: Program) -> None:
    other = replace(program, microbatches=program.microbatches + 1, ranks=program.ranks[:1])
    lines = diff(program, other).splitlines()
    assert lines[0] == f"microbatches: {program.microbatches} -> {program.microbatches + 1}"
    assert lines[1] == "rank 1"
    assert len(lines) == 2 + len(program.ranks[1])


def test_diff_tells_double_ops_apart(program: Program) -> None:
    ops = program.ranks[0]
    doubled = replace(program, ranks=((*ops, ops[0]), *program.ranks[1:]))
    assert diff(program, doubled).startswith(f"rank 0\n  + {ops[0]._replace(slot=-1)} #2  @")


@pytest.mark.parametrize("field", ["weight_slots", "grad_slots"])
@pytest.mark.parametrize("count", [1.5, "x", None, True])
def test_slots_that_are_no_whole_number_are_refused(field: str, count: object) -> None:
    tree: dict[str, Any] = json.loads(json.dumps(to_json(build_program(Layout(("dense",)), 1, planned(), Sharding()))))
    tree[field]["dense"] = count
    with pytest.raises(ValueError, match=rf"not a program: {field}\.dense = .*: not a whole number"):
        from_json(tree)
