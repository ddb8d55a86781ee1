"""Models that a plan cannot run are refused before anything starts: by name, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hocket
from hocket.model.documents import Microbatch, documents_of
from tests.adapters.own_layers import HIDDEN, Dense, Experts, Model, Routed
from tests.helpers.ranks import run_ranks

SETTINGS: dict[str, Any] = {"train.sequences": 2, "data.sequence_length": 8, "train.device": "cpu"}


def refused(model: nn.Module, words: str, settings: Any = None, **how: Any) -> str:
    given = {**SETTINGS, **settings} if isinstance(settings, dict) else settings or SETTINGS
    with pytest.raises(ValueError, match=words) as error:
        hocket.plan_model(model, given, **how)
    text = str(error.value)
    assert "; fix: " in text
    assert "\n" not in text
    return text


def test_layers_of_ones_own_have_their_sequences_whole() -> None:
    words = (
        r"mesh.cp = 2 \(plan_model\): Model of type None is no causal language model of llama, .*; fix: mesh.cp = 1$"
    )
    with pytest.raises(ValueError, match=words):
        hocket.plan_model(Model([Dense()]), {**SETTINGS, "mesh.cp": 2})


def test_a_module_that_is_no_model() -> None:
    refused(nn.Linear(3, 3), r"model = Linear: it is no model of transformers, and has no embed, layers and head")


def test_a_layer_without_a_piece() -> None:
    class Half(nn.Linear):
        def attention(self, x_BSD: Tensor, context: Tensor) -> Tensor:
            return self(x_BSD)

    refused(
        Model([Half(HIDDEN, HIDDEN)]),
        r"model = Model: Half has no mlp; fix: the methods of hocket.adapters.layer.DenseLayer",
    )


def test_a_module_shared_between_layers() -> None:
    first, second = Dense(), Dense()
    second.mixer = first.mixer
    refused(
        Model([first, second]), r"layers.0.mixer.norm.weight is shared: it is layers.0.* and layers.1.*; fix: give each"
    )


def test_a_module_without_parameters_shared_between_layers() -> None:
    first, second = Dense(), Dense()
    first.act = second.act = nn.GELU()
    refused(Model([first, second]), r"layers share a module, GELU")


def test_a_parameter_shared_between_layers() -> None:
    first, second = Dense(), Dense()
    second.scale = first.scale
    refused(Model([first, second]), r"layers.0.scale is shared: it is layers.0.scale and layers.1.scale")


def test_a_parameter_that_no_part_claims() -> None:
    model = Model([Dense()])
    model.more = nn.Parameter(torch.ones(3))
    refused(model, r"no part claims the parameters more; fix: hocket.fully_shard")


def test_a_module_that_no_part_claims() -> None:
    model = Model([Dense()])
    model.more = nn.Linear(3, 3)
    refused(model, r"it has more than embed, layers and head: more")


def test_a_frozen_parameter() -> None:
    model = Model([Dense(), Dense()])
    for layer in model.layers:
        layer.scale.requires_grad_(False)
    text = refused(
        model, r"requires_grad is False for layers.0.scale, layers.1.scale, and a plan trains every parameter"
    )
    assert "; fix: hocket.fully_shard, which leaves frozen parameters alone; requires_grad_(True) trains" in text
    hocket.plan_model(model.requires_grad_(True), SETTINGS)


def test_layers_that_are_told_a_parameter() -> None:
    class Telling(Model):
        def context(self, x_BSD: Tensor) -> Tensor:
            return self.head.weight[0].expand(x_BSD.shape)

    refused(Telling([Dense()]), r"what its layers are told depends on parameters")


def test_dropout() -> None:
    layer = Dense()
    layer.drop = nn.Dropout(0.1)
    refused(Model([layer]), r".* drops with p = 0.1, and a planned step makes no random numbers; fix: p = 0")


def test_experts_of_different_numbers() -> None:
    layer = Routed()
    layer.stacked.down = nn.Parameter(torch.randn(3, HIDDEN, 24))
    refused(Model([layer]), r"not stacked by the same number: .*stacked.up \(4, 24, 16\), .*stacked.down \(3, 16, 24\)")


def test_experts_that_are_more_than_there_are() -> None:
    class Far(Routed):
        def route(self, x_BSD: Tensor) -> Any:
            rows_TD, ids_TK, weights_TK, keep = super().route(x_BSD)
            return rows_TD, ids_TK + 2, weights_TK, keep

    refused(Model([Far()]), r"pieces of layer 0, Far, do not fit together: route chooses expert 5 of 4")


def test_layers_that_choose_different_numbers() -> None:
    class Choosy(Routed):
        def route(self, x_BSD: Tensor) -> Any:
            rows_TD, ids_TK, weights_TK, keep = super().route(x_BSD)
            return rows_TD, ids_TK[:, :1], weights_TK[:, :1], keep

        def forward(self, x_BSD: Tensor, context: Tensor) -> Tensor:
            rows_TD, ids_TK, weights_TK, keep = self.route(self.attention(x_BSD, context))
            e = self.stacked
            every = [nn.functional.silu(rows_TD @ up.T) @ down.T for up, down in zip(e.up, e.down, strict=True)]
            chosen_TD = torch.stack(every, 1)[torch.arange(len(rows_TD)), ids_TK[:, 0]]
            return self.merge(chosen_TD * weights_TK, keep)

    refused(Model([Routed(), Choosy()]), r"layers choose different numbers of experts per token: \[1, 2\]")


def wide(width: int) -> Routed:
    layer = Routed()
    layer.stacked.up = nn.Parameter(torch.randn(4, width, HIDDEN))
    layer.stacked.down = nn.Parameter(torch.randn(4, HIDDEN, width))
    return layer


def test_experts_of_odd_widths() -> None:
    words = r"layers.0.stacked.up has the shape \(4, 22, 16\), .* in fp32 need widths of a multiple of 4"
    refused(Model([wide(22)]), words)
    refused(Model([wide(20)]), r"in bf16 need widths of a multiple of 8", {"precision.compute": "bf16"})


def test_fp8() -> None:
    refused(
        Model([Routed()]), r"precision.compute = fp8 \(plan_model\): layers of others", {"precision.compute": "fp8"}
    )


def test_parameters_on_the_meta_device() -> None:
    refused(Model([Dense()]).to("meta"), r"its parameters are on the meta device; fix: plan_model\(..., values=...\)")


def test_values_of_another_shape() -> None:
    model = Model([Dense()]).to("meta")
    refused(
        model,
        r"values\('embed.weight'\) has the shape \(1,\), the parameter \(32, 16\)",
        values=lambda name: torch.ones(1),
    )


def test_a_model_on_the_wrong_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one device here, so a parameter says that it is elsewhere."""
    model = Model([Dense()])

    class Elsewhere(nn.Parameter):
        device = torch.device("cuda", 3)

    model.head.weight = Elsewhere(model.head.weight.detach())
    refused(
        model, r"head.weight is on cuda:3, and this rank computes on cpu; fix: keep the model on the CPU or the meta"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"mesh.dp": 2},
            r"mesh.pp \* mesh.dp \* mesh.tp = 2: 1 rank has started, without a process group; fix: torchrun",
        ),
        ({"train.sequencs": 2}, r"train.sequencs = 2 \(plan_model\): no such setting; fix: train.sequences"),
        ({"data.packing": "on"}, r"data.packing = on"),
        ({"mesh.pp": 3}, r"mesh.tp = 3: 1 rank has started, without a process group; fix: .* 3, or a mesh of 1$"),
        ({"mesh.ep": 2}, r"mesh.ep = 2 \(plan_model\): .*no MoE layer .*; fix: .*or a model with experts$"),
        ({3: 4}, r"3 = 4 \(plan_model\): no such setting"),
        ([("mesh.dp", 2)], r"settings = \[.* \(plan_model\): no values by dotted name"),
        ({"model.hidden": 8}, r"model.hidden = 8 \(plan_model\): the model itself says that; fix: leave it out"),
        ({"train.microbatches": 0}, r"train.microbatches = 0 \(plan_model\)"),
    ],
)
def test_settings(settings: Any, words: str) -> None:
    refused(Model([Dense()]), words, settings)


def test_a_batch_of_another_shape() -> None:
    step = hocket.plan_model(Model([Dense()]), {**SETTINGS, "train.microbatches": 2})
    with pytest.raises(
        ValueError, match=r"planned for train.microbatches = 2 of \(2, 8\); fix: ids and targets of 4 seq"
    ):
        step((torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.int64)))


IDS = torch.arange(32).view(4, 8)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        *((bad, "give the microbatches, or") for bad in (None, 3, [], (IDS,), (IDS, None), "ab", IDS, (IDS, IDS, IDS))),
        *((bad, "whole numbers") for bad in ((IDS.float(), IDS), (IDS > 3, IDS), (IDS.to("meta"), IDS), [None, None])),
        *((bad, "whole numbers") for bad in ((IDS.to_sparse(), IDS), [Microbatch(IDS[:2], None)] * 2)),  # type: ignore
        ([Microbatch(IDS[:2], IDS[:2]), IDS], "give the microbatches, or"),
        ((IDS, IDS[:2]), r"planned for train.microbatches = 2 of \(2, 8\)"),
        ((IDS[0, 0], IDS[0, 0]), r"planned for train.microbatches = 2 of \(2, 8\)"),
        ([Microbatch(IDS[:2], IDS[:2])], r"1 microbatches, .* planned for train.microbatches = 2"),
        ((IDS + 1, IDS), "token ids of microbatch 1 go from 17 to 32, and the model's from 0 to 31; fix: "),
        ((IDS - 1, IDS), "token ids of microbatch 0 go from -1 to 14, and the model's from 0 to 31; fix: "),
        ((IDS, IDS + 100), "targets of microbatch 0 go from 100 to 115, and the model's from 0 to 31; fix: "),
        ((IDS, IDS - 99), "targets of microbatch 0 go from -99 to -84, and the model's from 0 to 31; fix: "),
        ((IDS, IDS.new_full(IDS.shape, -100)), "no target of any microbatch or rank counts, and the mean of none is "),
        (
            [Microbatch(IDS[:2], IDS[:2], documents=documents_of(torch.zeros(2, 8, dtype=torch.int32)))] * 2,
            "microbatch 0 has documents of its tokens, and data.packing = off; fix: ",
        ),
    ],
)
def test_a_batch_that_is_none(batch: Any, words: str) -> None:
    """Refused by a step and by an evaluation, and the next ones are what they would have been."""
    step = hocket.plan_model(Model([Dense()]), {**SETTINGS, "train.microbatches": 2})
    before = step.evaluate((IDS, IDS))
    for call in (step, step.evaluate):
        with pytest.raises(ValueError, match=rf"^batch: .*{words}"):
            call(batch)
    assert step.evaluate((IDS, IDS)) == step((IDS, IDS)).loss == before


def test_an_error_inside_of_a_step_leaves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Model([Dense()])
    first, second = (hocket.plan_model(model, {**SETTINGS, "train.microbatches": 2}) for _ in range(2))

    def fail() -> Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(first.engine.optimizer, "grad_norm", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            first((IDS, IDS))
    assert first((IDS, IDS)) == second((IDS, IDS))


def test_a_closed_step_does_nothing() -> None:
    step = hocket.plan_model(Model([Dense()]), {**SETTINGS, "train.microbatches": 2})
    step.close()
    step.close()
    for call in (lambda: step((IDS, IDS)), lambda: step.evaluate((IDS, IDS)), step.state_dict, step.draw):
        with pytest.raises(ValueError, match=r"^step: it is closed; fix: plan it again"):
            call()


def test_a_model_of_another_shape_takes_no_weights() -> None:
    step = hocket.plan_model(Model([Dense()]), {**SETTINGS, "train.microbatches": 1})
    for model, words in ((None, "NoneType: it lacks"), (nn.Linear(3, 3), "Linear: it lacks .*; it has weight, bias")):
        with pytest.raises(ValueError, match=f"^model = {words}.*; fix: a model like the one that was planned"):
            step.load_into(model)  # type: ignore[arg-type]
    wide = Model([Dense()])
    wide.head = nn.Linear(HIDDEN, 33, bias=False)
    with pytest.raises(ValueError, match=r"head.weight is 33 x 16 in it and 32 x 16"):
        step.load_into(wide)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "values = dict: no function; fix: such as values=tensors.__getitem__"),
        (lambda name: None, r"values\('embed.weight'\): no floating-point tensor with data"),
        (lambda name: torch.empty(32, 16, device="meta"), r"values\('embed.weight'\): no floating-point tensor"),
        (lambda name: torch.zeros(32, 16, dtype=torch.int64), r"values\('embed.weight'\): no floating-point tensor"),
    ],
)
def test_values_that_are_none(values: Any, words: str) -> None:
    refused(Model([Dense()]).to("meta"), words, values=values)


def test_a_model_on_the_meta_device_with_values() -> None:
    torch.manual_seed(0)
    model = Model([Dense(), Routed()])
    known = dict(model.named_parameters())
    shell = Model([Dense(), Routed()]).to("meta")
    ids = torch.randint(32, (2, 9))
    outcomes = [
        hocket.plan_model(made, {**SETTINGS, "train.microbatches": 1}, **how)((ids[:, :-1], ids[:, 1:]))
        for made, how in ((model, {}), (shell, {"values": known.__getitem__}))
    ]
    assert outcomes[0] == outcomes[1]
    assert all(param.is_meta for param in shell.parameters())


def differing(rank: int) -> str:
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="ranks hold different weights") as error:
        hocket.plan_model(Model([Dense()]), {**SETTINGS, "mesh.dp": 2})
    return str(error.value)


def test_ranks_with_different_weights() -> None:
    first, second = run_ranks(differing, 2)
    assert first == second
    assert first.startswith("model = Model: ranks hold different weights, such as embed.weight; fix: torch.manual_seed")


def test_the_model_is_left_as_it_is() -> None:
    model = Model([Dense(), Routed()])
    before = {name: param.clone() for name, param in model.named_parameters()}
    step = hocket.plan_model(model, {**SETTINGS, "train.microbatches": 1})
    ids = torch.randint(32, (2, 9))
    step((ids[:, :-1], ids[:, 1:]))
    assert isinstance(model.layers[1].stacked, Experts)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
        assert param.grad is None
    assert any(not torch.equal(value, before[name]) for name, value in step.state_dict().items())
