"""Kinds of layers that are not hocket's own: described, planned, checked, dry-run, simulated, stored."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from hocket.config import Config, MeshConfig
from hocket.measured import named
from hocket.predict.cost import Pricing, purpose_of
from hocket.predict.hardware import H200
from hocket.predict.part_sizes import PartSize, unit_weights
from hocket.predict.simulate import OpCost, Time, simulate
from hocket.program.check import check
from hocket.program.layer import _VERBS, FULL, chains, interleaved, merged_order, order_problem
from hocket.program.lower import Draft, build_forward, build_program, inserted
from hocket.program.ops import Layout, Op, Program
from hocket.program.parts import LayerKind, Part, layer_kind
from hocket.program.shard import Sharding
from hocket.program.stages import layout_of
from hocket.program.transformer import DENSE, moe
from hocket.program.values import reads
from hocket.timeline import html_timeline, svg_timeline, text_timeline
from hocket.tune.choose import seconds_of_experts
from hocket_trace.parse import plan_of
from tests.helpers.costs import Table
from tests.helpers.dryrun import dry_run, reference
from tests.helpers.plans import planned, small
from tests.plan.programs import with_op
from tests.plan.test_mutation import caught_by_dry_run, needed


def spelt(tokens: Any) -> str:
    """The text of a template: what `template` parses."""
    letters = {verb: letter for letter, verb in _VERBS.items()}
    return " ".join(letter + letters[verb] for verb, letter in tokens)


def ring(ranks: int = 2) -> LayerKind:
    """A layer whose keys and values are gathered on a lane of its own, and whose experts are on other ranks."""
    return layer_kind(
        "ring",
        (
            Part("qkv", "q", outputs=("query", "keys", "residual"), unit="dense", kept=("input",)),
            Part("spread", "g", ("qkv.keys",), lane="cp", purpose="a2a", ranks=ranks),
            Part(
                "core", "a", ("qkv.query", "spread", "qkv.residual"), outputs=("rows", "rest"), makes=("routing",),
                unit="dense", kept=("fwd spread",), recomputable=True,
            ),
            Part("dispatch", "d", ("core.rows",), lane="a2a", purpose="a2a", ranks=ranks, way="out", counted=True),
            Part("experts", "e", ("dispatch",), takes=("splits",), unit="experts"),
            Part("combine", "c", ("experts",), lane="a2a", purpose="a2a", ranks=ranks, way="back"),
            Part("unpermute", "u", ("combine", "core.rest"), takes=("routing",), early=True, kept=("fwd combine",)),
        ),
    )  # fmt: skip


def three(ranks: int = 2) -> LayerKind:
    """A layer with three dense parts, the last of which must compute its weight gradient at once, and a transfer."""
    return layer_kind(
        "three",
        (
            Part("one", "q", unit="dense", kept=("input",)),
            Part("move", "g", ("one",), lane="cp", purpose="a2a", ranks=ranks),
            Part("two", "a", ("move",), unit="dense", wgrad_kept=("fwd move",), kept=("fwd move",)),
            Part("last", "e", ("two",), unit="dense", deferrable=False, wgrad_kept=("output gradient",)),
        ),
    )  # fmt: skip


def layout(**changes: object) -> Layout:
    given = {"kinds": ("ring", "three") * 4, "pp": 2, "ep": 2, "types": (ring(), three()), **changes}
    return Layout(**given)  # type: ignore[arg-type]


def programs() -> list[Program]:
    found = []
    for pp, chunks, merge, update in (
        (1, 1, "on", "end"),
        (2, 1, "on", "end"),
        (2, 2, "on", "next_step"),
        (2, 2, "off", "end"),
    ):
        plan = planned(merge=merge, chunks=chunks, update=update)
        found.append(build_program(layout(pp=pp, chunks=chunks), 5, plan, Sharding(2, 2)))
    return found


@pytest.mark.parametrize("recompute", [(), ("core",)])
@pytest.mark.parametrize("seed", range(4))
def test_any_kind_of_layer_computes_what_plain_training_computes(seed: int, recompute: tuple[str, ...]) -> None:
    draw = random.Random(seed)
    for _ in range(6):
        pp, chunks = draw.choice([(1, 1), (2, 1), (2, 2), (3, 1)])
        kinds = tuple(draw.choice(["ring", "three"]) for _ in range(pp * chunks * 2))
        settings = planned(
            merge=draw.choice(["on", "off"]), chunks=chunks, defer_wgrad=draw.choice(["on", "off"]),
            defer_layers=draw.choice([0, 1, -1, "attn:1", "attn"]),
            prefetch=draw.choice([0, 1, 2]), update=draw.choice(["end", "next_step"]),
        )  # fmt: skip
        there = layout(kinds=kinds, pp=pp, chunks=chunks, recompute=recompute)
        program = build_program(there, draw.choice([2, 4, 5]), settings, Sharding(2, 2))
        assert not check(program)
        dry_run(program, seed)
        forward = build_forward(program, settings, Sharding(2, 2))
        assert not check(forward, forward_only=True)
        dry_run(forward, seed, forward_only=True)


def test_the_tape_agrees_with_layers_that_are_spelt_out() -> None:
    """`reference` writes hocket's own layers by hand; a layer of another name with the same parts goes by the tape."""
    for ep in (1, 2):
        spelt_out = Layout(("dense", "moe", "moe"), ep=ep)
        names = {"dense": "d", "moe": "m"}
        taped = replace(
            spelt_out, kinds=("d", "m", "m"), types=tuple(LayerKind(names[k.name], k.parts) for k in (DENSE, moe(ep)))
        )
        by_hand, by_tape = reference(spelt_out, 2), reference(taped, 2)
        assert by_hand.losses == by_tape.losses
        assert by_hand.reduced == by_tape.reduced


def test_deleted_dependencies_are_caught() -> None:
    """Of all waits that nothing else implies, the checker misses at most one in a hundred."""
    every = [(program, *where) for program in programs() for where in needed(program)]
    assert len(every) > 700
    missed, chosen = [], random.Random(0).sample(every, 100)
    for program, rank, position, dep in chosen:
        op = program.ranks[rank][position]
        mutant = with_op(program, rank, position, deps=tuple(d for d in op.deps if d != dep))
        if not check(mutant) and not caught_by_dry_run(mutant):
            missed.append(f"{op} <- {program.ranks[rank][dep]}")
    assert len(missed) <= 1, missed


def test_a_lane_of_its_own_is_simulated_and_drawn() -> None:
    program = programs()[1]
    verbs = ("fwd", "bwd", "wgrad", "recompute")
    seconds: dict[tuple[str, str], Time] = {
        (verb, part.name): 1 for kind in (ring(), three()) for part in kind.parts for verb in verbs
    }
    seconds |= {("fwd", "spread"): 3, ("bwd", "spread"): 3, ("fwd", "embed"): 1, ("fwd", "head"): 1}
    timeline = simulate(program, Table(seconds))
    exposed = timeline.ranks[0].exposed
    assert exposed["cp"] > 0
    for use in timeline.ranks:
        assert use.busy + use.exposed_total + use.idle == timeline.makespan
    text = text_timeline(timeline, program)
    assert "cp " in text
    assert "Q qkv" in text
    assert "cp</text>" in svg_timeline(timeline, program)
    assert '"cp"' in html_timeline(timeline, program)


def sized(kind: LayerKind) -> LayerKind:
    """The kind with sizes per token that differ by part: products, results, and 640 times as many weights."""

    def size(number: int, part: Part) -> PartSize:
        return PartSize(gemm=number, weights=640 * number if part.unit else 0, output=number, grad=number)

    sizes = {part.name: size(number, part) for number, part in enumerate(kind.parts, start=1)}
    return LayerKind(kind.name, tuple(replace(part, size=lambda s, name=part.name: sizes[name]) for part in kind.parts))


def test_layers_of_ones_own_are_priced_by_their_sizes() -> None:
    there, tokens, b = layout(types=(sized(ring()), sized(three()))), 100, 2
    costs = Pricing(small(), there, tokens, 10, Sharding(4, 2), H200, b).costs()
    assert costs.table["fwd", "two", "three"].flops == 2 * tokens * 3
    assert costs.table["fwd", "move", "three"].wire_bytes == tokens * 2 * b // 2, "half of what comes is a rank's own"
    weights = {("dense", "ring"): 640 * (1 + 3), ("experts", "ring"): 640 * 5, ("dense", "three"): 640 * (1 + 3 + 4)}
    for (unit, kind), whole in weights.items():
        group = 2 if unit == "experts" else 4
        assert costs.table["gather", unit, kind].wire_bytes == whole // group * (group - 1) * b
    ends = unit_weights(small(), there, "embed", ""), unit_weights(small(), there, "head", "")
    for rank, end in enumerate(ends):
        dense, experts = weights["dense", "ring"] + weights["dense", "three"], weights["experts", "ring"]
        assert costs.state_bytes[rank] == 12 * (2 * dense // 4 + 2 * experts // 2 + -(-end // 4))
    program = build_program(there, 4, planned(merge="on"), Sharding(4, 2))
    free = {op.verb for _, _, op in program if costs.of(op) == OpCost()}
    assert free <= {"send", "release", "add"}
    assert simulate(program, costs).ranks[0].exposed["cp"] > 0


def test_what_groups_are_for_is_said_by_the_parts_that_communicate() -> None:
    own = LayerKind("mean", tuple(replace(p, purpose="reduce_dense") if p.communicates else p for p in three().parts))
    there = layout(kinds=("mean", "ring"), types=(own, ring()))
    assert purpose_of(("fwd", "move", "mean"), there) == "reduce_dense"
    assert purpose_of(("bwd", "spread", "ring"), there) == "a2a"
    assert purpose_of(("gather", "experts", "ring"), there) == "gather_experts"
    assert {purpose_of(("fwd", part, kind), there) for part, kind in (("two", "mean"), ("embed", ""))} == {None}
    program = build_program(there, 3, planned(merge="on"), Sharding(2, 2))
    told = plan_of(named(program, 0, tensors=False))
    rows = {" ".join(name.split()[:2]): row[:3] for name, row in told.ops.items()}
    assert rows["fwd move"] == ("cp", "reduce", "reduce_dense")
    assert rows["step all"] == ("compute", "control", "")
    assert rows["fwd two"] == ("compute", "compute", "")


def test_what_choices_ask_of_layers_is_asked_of_their_descriptions() -> None:
    """Layers with the parts of hocket's own and other names are chosen for alike, and those without are left out."""
    own = Layout(("moe", "dense", "moe", "dense"), pp=2, chunks=2, ep=2)
    named_otherwise = {"dense": "d", "moe": "m"}
    kinds = tuple(named_otherwise[kind] for kind in own.kinds)
    others = replace(own, kinds=kinds, types=(LayerKind("d", DENSE.parts), LayerKind("m", moe(2).parts)))
    priced = [Pricing(small(), each, 64, 8, Sharding(2, 1), H200, 2).costs() for each in (own, others)]
    asked_of = [seconds_of_experts(c, each) for c, each in zip(priced, (own, others), strict=True)]
    assert asked_of[0] == asked_of[1]
    assert min(asked_of[0]) > 0
    bare = layout(kinds=("three",) * 4, types=(sized(three()),))
    costs = Pricing(small(), bare, 64, 8, Sharding(2, 1), H200, 2).costs()
    assert seconds_of_experts(costs, bare) == (0, 0)


def test_weight_gradients_of_layers_that_begin_with_a_product_read_what_was_received() -> None:
    """With the norms behind, nothing stands between a layer's input and the weights of attention."""
    for norms in ("before", "after"):
        c = Config(model=small(layers=4, experts=0, norms=norms), mesh=MeshConfig(pp=2))
        layout = layout_of(c)
        assert [value[0] for value in reads(Op("wgrad", "attn", 0, 0, 2), layout, 1)] == ["recv"] * (norms == "after")
        program = build_program(layout, 4, planned(defer_wgrad="on"), Sharding(1, 1))
        assert not check(program)
        dry_run(program, 0)


def test_a_template_is_woven_for_other_letters() -> None:
    for kind in (ring(), three(), FULL, DENSE):
        assert not order_problem(spelt(interleaved(kind)), kind), kind.name
    assert merged_order("literature", layout(kinds=("ring",) * 2, types=(ring(),))) == interleaved(ring())
    text = spelt(interleaved(ring()))
    assert {word for chain in chains(ring()) for word in chain} == set(text.split())
    with pytest.raises(ValueError, match="no kind of layer has all the letters of left and right"):
        merged_order(
            "literature",
            Layout(
                ("left", "right"),
                types=(LayerKind("left", (Part("x", "x"),)), LayerKind("right", (Part("y", "y"),))),
            ),
        )


def hocket_letters(*, late_weights: bool, swapped: bool) -> LayerKind:
    """A layer with hocket's letters, in roles that hocket's own layers do not have."""
    first, middle, last = ("e", "c", "a") if swapped else ("a", "c", "u")
    unit = "dense" if late_weights else None
    return LayerKind(
        "other",
        (
            Part("one", first, outputs=("rows", "rest"), unit="dense", kept=("input",)),
            Part("move", middle, ("one.rows",), lane="a2a", purpose="a2a", ranks=2),
            Part("last", last, ("move", "one.rest"), unit=unit, early=not swapped, kept=("fwd move",)),
        ),
    )


@pytest.mark.parametrize("defer", ["on", "off"])
@pytest.mark.parametrize("named", ["literature", "early_release", "wgrad_last"])
@pytest.mark.parametrize(("late_weights", "swapped"), [(True, False), (False, True)])
def test_letters_in_other_roles_get_an_order_of_their_own(
    late_weights: bool, swapped: bool, named: str, defer: str
) -> None:
    kind = hocket_letters(late_weights=late_weights, swapped=swapped)
    c = planned(merge="on", layer_order=named, defer_wgrad=defer)
    program = build_program(Layout(("other",) * 4, pp=2, types=(kind,)), 4, c, Sharding(2, 2))
    assert not check(program)
    dry_run(program, 0)


def test_kinds_whose_letters_stand_in_two_orders_are_refused() -> None:
    kinds = tuple(LayerKind(a + e, (Part(f"{a}1", a), Part(f"{e}2", e, (f"{a}1",)))) for a, e in ("ae", "ea"))
    with pytest.raises(ValueError, match="no kind of layer has all the letters of ae and ea in their order: a e; give"):
        build_program(Layout(("ae", "ea"), types=kinds), 2, planned(), Sharding())


@pytest.mark.parametrize("kind", [ring(), three(), hocket_letters(late_weights=True, swapped=False)])
def test_pairs_of_other_roles_are_refused(kind: LayerKind) -> None:
    c = planned(merge="on", merge_ends="on")
    with pytest.raises(ValueError, match=r"merge_ends=on: .* has others; use overlap.ep.merge_ends=off"):
        build_program(Layout((kind.name,) * 4, pp=2, types=(kind,)), 8, c, Sharding(2, 2))


def test_a_spelt_order_that_cannot_run_is_refused() -> None:
    words = spelt(interleaved(ring())).split()
    words[0], words[-1] = words[-1], words[0]
    with pytest.raises(ValueError, match=r"plan.layer_order=.* needs .*, which comes later"):
        build_program(layout(), 4, planned(layer_order=" ".join(words)), Sharding())


def late_experts(draft: Draft) -> Draft:
    """A pass: the weight gradients of experts at the end of their step."""

    def change(_: int, steps: tuple[list, ...]) -> list[list]:
        late = [[op for op in ops if (op.verb, op.part) == ("wgrad", "experts")] for ops in steps]
        return [[op for op in ops if op not in end] + end for ops, end in zip(steps, late, strict=True)]

    return draft.each(change)


def test_a_pass_of_ones_own_is_part_of_the_chain() -> None:
    passes = inserted("sends", late_experts)
    assert list(passes)[:3] == ["expand", "sends", "late_experts"]
    there = Layout(("moe",) * 4, pp=2, ep=2)
    program = build_program(there, 4, planned(), Sharding(2, 2), passes=passes)
    assert not check(program)
    dry_run(program, 3)
    assert program != build_program(there, 4, planned(), Sharding(2, 2))
    with pytest.raises(ValueError, match="there is no pass 'send'; there are expand, sends"):
        inserted("send", late_experts)


def test_an_order_that_cannot_run_names_what_it_lacks() -> None:
    def backwards(draft: Draft) -> Draft:
        return draft.each(lambda _, steps: [ops[::-1] for ops in steps])

    with pytest.raises(ValueError, match=r"this order cannot run: '.*' needs '.*', which comes later in the order"):
        build_program(Layout(("dense",) * 2), 2, planned(), Sharding(), passes=inserted("sends", backwards))


A, B = Part("one", "a"), Part("two", "b", ("one",))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "it has no parts"),
        ((B,), "its first part, 'two', must read the layer's input alone"),
        ((A, Part("one", "c", ("one",))), "two parts have the name 'one'"),
        ((A, Part("two", "a", ("one",))), "two parts have the letter 'a'"),
        ((A, Part("two", "b", ("three",))), "'two' reads 'three', which no part before it makes; there are one"),
        ((A, Part("two", "b", ("one.x",))), "'two' reads 'one.x', which no part before it makes"),
        ((A, Part("two", "b", ("input",))), "'two' reads the layer's input, which only the first part may"),
        ((A, B, Part("three", "c", ("two", "one"))), "'one' is read by 'two' and 'three'; hand it on as two outputs"),
        ((Part("one", "a", outputs=("x", "y")), Part("two", "b", ("one.x",))), "nothing reads 'one.y'"),
        ((A, Part("two", "b", ("one",), lane="cp", purpose="a2a")), "its last part, 'two', must compute one output"),
        ((A, Part("two", "b", ("one",), outputs=("x", "y"))), "its last part, 'two', must compute one output"),
        ((Part("one", "a", early=True), B), "'one' is early, which only the last part may be"),
        ((A, Part("two", "b", ("one",), kept=("fwd x",))), "'two' keeps 'fwd x', which is no value of the layer"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts: tuple[Part, ...], message: str) -> None:
    with pytest.raises(ValueError, match=rf"layer kind 'odd': .*{message}"):
        LayerKind("odd", parts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "an expert"}, "a name is a Python identifier"),
        ({"letter": "A"}, "letter must be one lower-case letter"),
        ({"lane": "cp"}, "a part communicates with both or computes with none"),
        ({"lane": "cp", "purpose": "a2a", "unit": "dense"}, "it has one input, one output and no weights"),
        ({"lane": "cp", "purpose": "a2a", "makes": ("routing",)}, "a part that communicates makes no state"),
        ({"way": "out"}, "a part that computes exchanges no rows"),
        ({"unit": "shared"}, "unit must be one of embed, dense, experts, head"),
        ({"reads": ("input", "input")}, "must differ"),
    ],
)
def test_a_part_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"name": "one", "letter": "a", **fields}
    with pytest.raises(ValueError, match=message):
        Part(**given)


def test_kinds_of_one_layout_agree() -> None:
    other = LayerKind("other", (Part("attn", "a", unit="experts"),))
    with pytest.raises(ValueError, match="another part 'attn' has another unit, lane or purpose"):
        Layout(("dense", "other"), types=(DENSE, other))
    with pytest.raises(ValueError, match="no description of layers of kind 'sparse': there are dense and moe"):
        Layout(("sparse",))
    with pytest.raises(
        ValueError, match="part 'norm' cannot be recomputed: there are attn, dispatch, experts, kv, mlp"
    ):
        Layout(("dense",), recompute=("norm",))


def test_a_part_without_a_cost_function_cannot_be_priced() -> None:
    from hocket.predict.part_sizes import size_of

    with pytest.raises(ValueError, match="part 'one' has no cost function: give its description a `size`"):
        size_of(A, None)  # type: ignore[arg-type]
    assert size_of(replace(A, size=lambda shapes: PartSize(output=3)), None).output == 3  # type: ignore[arg-type]
