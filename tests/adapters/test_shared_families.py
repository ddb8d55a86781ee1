"""Unmodified models of transformers whose sequences ranks share in a planned step, beside plain autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

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

import hocket
from hocket.adapters.costs import price_of, sizes_of
from hocket.adapters.transformers import FAMILIES, Pretrained
from hocket.config.rule import Host
from hocket.config.schema import DEFAULTS, changed
from hocket.model.documents import Documents, Microbatch, documents_of
from hocket.resolve import resolve
from tests.adapters.families import EXPERTS, LENGTH, SEQUENCES, VOCAB, model
from tests.adapters.runs import CHOSEN, SETTINGS, Batches, far, plain, planned
from tests.helpers.parity import whole
from tests.helpers.ranks import run_ranks

ROUNDING = 1e-5
"""The largest relative difference: attention of chunks, and gradients summed over ranks, add up in another order."""
SMALL = 0.01
"""Share of the whole gradient's norm below which a parameter's is measured by that share."""


class Packed(NamedTuple):
    """A step whose sequences documents share."""

    batches: Batches
    documents: list[list[Documents]]
    """By microbatch and data-parallel rank."""


def packed(microbatches: int, ranks: int = 1) -> Packed:
    """Documents of all lengths; a data-parallel rank has more targets that count than the other."""
    numbers = [[[0, 0, 0, 1, 1, 2, 2, 2], [0] * 8], [[0] + [1] * 7, [0, 0, 1, 1, 1, 1, 1, 2]]]
    documents = [[documents_of(torch.tensor(numbers[(m + r) % 2])) for r in range(ranks)] for m in range(microbatches)]
    batches = given(microbatches, ranks)
    for of_ranks in batches:
        of_ranks[0][1][1, 5:] = -100
    return Packed(batches, documents)


def plain_packed(one: Any, step: Packed) -> tuple[float, dict[str, Tensor]]:
    """The mean loss over all targets of a step, and its gradients, by transformers' own packing."""
    pairs = zip(chain(*step.batches), chain(*step.documents), strict=True)
    total, count = torch.zeros(()), 0
    for (ids, targets), documents in pairs:
        logits = one(input_ids=ids, position_ids=documents.position_T.view(ids.shape), use_cache=False).logits
        total = total + F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        count += int((targets != -100).sum())
    mean = total / count
    params = dict(one.named_parameters())
    return mean.item(), dict(zip(params, torch.autograd.grad(mean, [*params.values()]), strict=True))


def packed_steps(rank: int, families: list[str], settings: dict[str, Any], given: Packed) -> list[dict[str, Any]]:
    found = []
    for family in families:
        more = {"mesh.ep": 2} if family in EXPERTS else {}
        both = {**settings, **more, "data.packing": "on"}
        out = planned(made(family, settings), both, given.batches, documents=given.documents)
        out.pop("step").close()
        found.append(out)
    return found


def compare_packed(family: str, mesh: Mapping[str, Any], ranks: list[dict[str, Any]], step: Packed) -> None:
    mean, grads = plain_packed(made(family, mesh), step)
    for rank in ranks:
        assert rank["outcome"].loss == pytest.approx(mean, rel=ROUNDING), family
    found = whole([piece for rank in ranks for piece in rank["grads"]])
    least = SMALL * float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    wrong = {name: off for name, grad in grads.items() if not (off := far(found[name], grad, least)) <= ROUNDING}
    assert found.keys() == grads.keys()
    assert not wrong, f"gradients of {family}: {wrong}"


def given(microbatches: int, ranks: int = 1, ignored: bool = False) -> Batches:
    """Token ids and targets by microbatch and data-parallel rank. `ignored`: the first two targets do not count."""
    generator = torch.Generator().manual_seed(1)

    def batch() -> tuple[Tensor, Tensor]:
        ids = torch.randint(VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
        targets = ids[:, 1:].clone()
        targets[:, :2] = -100 if ignored else targets[:, :2]
        return ids[:, :-1].contiguous(), targets

    return [[batch() for _ in range(ranks)] for _ in range(microbatches)]


def made(family: str, mesh: Mapping[str, Any]) -> Any:
    """With a layer for each stage, and two at least."""
    layers = 2 * mesh.get("mesh.pp", 1)
    windows = dict(sliding_window=3, layer_types=["sliding_attention", "full_attention"] * (layers // 2))
    return model(family, num_hidden_layers=layers, **(windows if family == "olmo3" else {}))


def steps(rank: int, families: list[str], settings: dict[str, Any], batches: Batches) -> list[dict[str, Any]]:
    found = []
    for family in families:
        more = {"mesh.ep": 2} if family in EXPERTS and "mesh.ep" not in settings else {}
        out = planned(made(family, settings), {**settings, **more}, batches)
        step = out.pop("step")
        out["verbs"] = sorted({f"{op.verb} {op.part}" for ops in step.program.ranks for op in ops})
        out["seconds"] = float(step.simulate().makespan)
        mine = [of_ranks[step.engine.where.dp] for of_ranks in batches]
        out["evaluated"] = step.evaluate([Microbatch(*batch) for batch in mine])
        after = made(family, settings)
        step.load_into(after)
        losses, _ = plain(after, batches)
        out["after"] = sum(map(sum, losses)) / sum(map(len, losses))
        step.close()
        found.append(out)
    return found


def chosen(mesh: dict[str, Any]) -> dict[str, Any]:
    return {**(CHOSEN if "mesh.pp" in mesh else {}), **mesh}


def compare(family: str, mesh: Mapping[str, Any], ranks: list[dict[str, Any]], batches: Batches) -> None:
    """The mean loss of a step, and its gradients."""
    losses, grads = plain(made(family, mesh), batches)
    mean = sum(map(sum, losses)) / sum(map(len, losses))
    for rank in ranks:
        assert rank["outcome"].loss == pytest.approx(mean, rel=ROUNDING), family
        assert rank["evaluated"] == pytest.approx(rank["after"], rel=ROUNDING), f"{family} behind the step"
        assert 0 < rank["seconds"] < 1
    found = whole([piece for rank in ranks for piece in rank["grads"]])
    assert found.keys() == grads.keys()
    least = SMALL * float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    wrong = {name: off for name, grad in grads.items() if not (off := far(found[name], grad, least)) <= ROUNDING}
    assert not wrong, f"gradients of {family}: {wrong}"


CP: dict[str, Any] = {"mesh.cp": 2}


SOME = ["llama", "olmo3", "qwen3_moe"]
"""`make test` has all families in sequences whose heads are exchanged and in documents whose keys are gathered."""


@pytest.mark.parametrize(
    ("method", "families"),
    [
        ("heads", list(FAMILIES)),
        ("gather", SOME),
        pytest.param("gather", [family for family in FAMILIES if family not in SOME], marks=pytest.mark.full),
    ],
    ids=["heads", "gather", "gather, others"],
)
def test_two_ranks_share_sequences(method: str, families: list[str]) -> None:
    """Every family, where one rank has fewer targets that count than the other."""
    batches = given(2, ignored=True)
    ranks = run_ranks(steps, 2, families, {**CP, "overlap.cp.method": method}, batches)
    for i, family in enumerate(families):
        compare(family, CP, [rank[i] for rank in ranks], batches)
        moved = {"gather": "fwd kv", "heads": "fwd spread"}[method]
        assert {moved, "fwd keys", "bwd queries"} <= set(ranks[0][i]["verbs"])


WAYS: list[dict[str, Any]] = [
    {"mesh.cp": 2, "mesh.dp": 2},
    {"mesh.cp": 2, "mesh.pp": 2, "plan.chunks": 2, "plan.recompute": ("attn", "kv"), "overlap.cp.method": "gather"},
    {"mesh.cp": 4},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_four_ranks(way: dict[str, Any]) -> None:
    batches, families = given(4 if "mesh.pp" in way else 2, way.get("mesh.dp", 1)), ["smollm3", "qwen3_moe"]
    ranks = run_ranks(steps, 4, families, chosen(way), batches)
    for i, family in enumerate(families):
        compare(family, way, [rank[i] for rank in ranks], batches)


@pytest.mark.parametrize(
    ("mesh", "families"),
    [
        ({"mesh.dp": 2}, SOME),
        pytest.param({"mesh.dp": 2}, [family for family in FAMILIES if family not in SOME], marks=pytest.mark.full),
        ({"mesh.cp": 2, "overlap.cp.method": "gather"}, list(FAMILIES)),
        ({"mesh.cp": 2, "overlap.cp.method": "heads"}, ["olmo3", "qwen3_moe"]),
        ({"mesh.pp": 2, "mesh.cp": 2, "plan.chunks": 2, "overlap.cp.method": "gather"}, ["mistral", "mixtral"]),
        ({"mesh.pp": 2, "mesh.dp": 2, "plan.chunks": 2, "plan.recompute": ("attn",)}, ["olmo3", "qwen3_moe"]),
    ],
    ids=str,
)
def test_documents_share_sequences(mesh: dict[str, Any], families: list[str]) -> None:
    """Attention and positions end where documents do, and each target of a step weighs the same."""
    step = packed(4 if "mesh.pp" in mesh else 2, mesh.get("mesh.dp", 1))
    ranks = run_ranks(packed_steps, 4 if "mesh.pp" in mesh else 2, families, chosen(mesh), step)
    for i, family in enumerate(families):
        compare_packed(family, mesh, [rank[i] for rank in ranks], step)


def test_costs_are_those_of_its_heads() -> None:
    """Keys and values travel of two heads, though queries have four; a rank computes half of the tokens."""
    source = Pretrained(model("llama"))
    settings = {**SETTINGS, "mesh.cp": 2, "overlap.cp.method": "gather", "precision.compute": "fp32"}
    config = replace(changed(DEFAULTS, settings), model=sizes_of(source, 0))
    config = resolve(config, Host(workers=2, local_workers=2), {}, price_of(source))
    table, tokens, d, elements = price_of(source)(config).table, 8, 32, 4
    assert table["fwd", "keys", "dense"].flops == 2 * tokens * d * (16 + 16)
    assert table["fwd", "queries", "dense"].flops == 2 * tokens * d * 32
    assert table["fwd", "kv", "dense"].output_bytes == 2 * tokens * elements * (16 + 16)
    assert table["fwd", "mlp", "dense"].flops == 2 * tokens * 3 * d * 48


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "gemma2",
            {},
            r"mesh.cp = 2 .*: Gemma2ForCausalLM of type gemma2 is no .* may meet elsewhere than in attention",
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type of .*"),
        ("llama", {"is_causal": False}, "is_causal=False of LlamaForCausalLM is True"),
    ],
)
def test_what_ranks_would_compute_otherwise_is_refused(family: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"{words}; fix: mesh.cp = 1$"):
        hocket.plan_model(model(family, **changes), {**SETTINGS, "mesh.cp": 2})


def test_attention_that_does_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family's name is not taken on trust: here queries are scaled by what no piece knows."""
    one = model("llama")
    for layer in one.model.layers:
        layer.self_attn.scaling *= 1.5
    monkeypatch.setattr("hocket.adapters.step.other_ranks", lambda config: [])
    with pytest.raises(
        ValueError, match=r"attention of layer 0, .* cannot be shared: the output differs; fix: mesh.cp"
    ):
        hocket.plan_model(one, {**SETTINGS, "mesh.cp": 2})
