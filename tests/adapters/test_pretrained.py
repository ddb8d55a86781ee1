"""Models of transformers: what is refused, models on the meta device, tied ones, costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip(
    "transformers",
    minversion="5.0",
    reason="needs transformers 5, which make setup installs where there is a network",
    exc_type=ImportError,
)

import hocket
from hocket.adapters.costs import count_parts, price_of
from hocket.adapters.transformers import Pretrained
from hocket.config import ModelConfig
from hocket.predict.cost import costs_of
from hocket.predict.hardware import H200
from tests.adapters.families import REFUSED, VOCAB, batches, configuration, model
from tests.adapters.runs import SETTINGS, plain, planned
from tests.adapters.test_families import compare
from tests.helpers.ranks import run_ranks


def refused(made: nn.Module, words: str, **settings: Any) -> None:
    with pytest.raises(ValueError, match=words) as error:
        hocket.plan_model(made, {**SETTINGS, **settings})
    assert "; fix: " in str(error.value)


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_do_not_fit(family: str) -> None:
    refused(model(family), rf"^model = \w+: .*{REFUSED[family][1]}.*; fix: hocket.fully_shard")


def test_dropout() -> None:
    refused(model("llama", attention_dropout=0.1), r"model = LlamaForCausalLM: config.attention_dropout = 0.1, and a")


def test_a_loss_over_routers() -> None:
    refused(model("mixtral", output_router_logits=True), r"config.output_router_logits adds a loss")


def test_no_causal_model() -> None:
    refused(model("llama").model, r"model = LlamaModel: a plan needs a model for causal language modelling")


def test_a_forward_that_does_more() -> None:
    """A layer with the children of a Llama's and another forward is found out."""
    made = model("llama")
    kind: Any = type(made.model.layers[2])

    class Louder(kind):
        def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states, **kwargs) * 1.01

    made.model.layers[2] = Louder(made.config, 2)
    refused(made, r"the pieces of layer 2, Louder, do not compute what its forward does: the output differs")


def test_a_model_that_computes_between_layers() -> None:
    made = model("llama")
    kind: Any = type(made.model)

    class Between(kind):
        def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
            x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            for layer in self.layers:
                x = layer(x) + 1
            return SimpleNamespace(last_hidden_state=x, past_key_values=None, hidden_states=None, attentions=None)

    made.model.__class__ = Between
    refused(made, r"it computes between its layers, and no part of a plan does that")


def tied(rank: int, settings: dict[str, Any], given: Any) -> Any:
    out = planned(model("qwen3", tie_word_embeddings=True), settings, given)
    return out["losses"], out["grads"]


@pytest.mark.parametrize("settings", [{}, {"plan.chunks": 2}, {"mesh.pp": 2}])
def test_tied(settings: dict[str, Any]) -> None:
    made, given = model("qwen3", tie_word_embeddings=True), batches(2)
    ranks = run_ranks(tied, settings.get("mesh.pp", 1), settings, given)
    losses, grads = plain(made, given)
    assert [[loss] for loss in ranks[-1][0]] == losses
    found = {name: (shape, values) for _, pieces in ranks for name, shape, _, _, values in pieces}
    assert found.keys() == grads.keys()
    for name, (shape, values) in found.items():
        torch.testing.assert_close(values.view(shape), grads[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "ernie4_5_moe"])
def test_a_model_on_the_meta_device(family: str) -> None:
    """Rotary tables are filled in, and everything that is saved comes from the caller."""
    known, given = model(family), batches(2)
    with torch.device("meta"):
        made = type(known)(configuration(family)).train()
    state = known.state_dict()
    out = planned(made, {}, given, values=lambda name: state[name])
    compare(family, [[loss] for loss in out["losses"]], [out], plain(known, given))


def test_the_model_goes_on_with_what_was_learnt() -> None:
    made, given = model("qwen3_moe"), batches(2)
    step = planned(made, {}, given)["step"]
    step.load_into(made)
    losses, _ = plain(made, given)
    batch = torch.cat([ids for ((ids, _),) in given]), torch.cat([targets for ((_, targets),) in given])
    assert step.evaluate(batch) == pytest.approx(sum(loss for (loss,) in losses) / 2, rel=1e-5)


def test_costs_are_counted() -> None:
    """FLOPs of llama's parts are those of its matrices, and of attention."""
    made = model("llama")
    step = hocket.plan_model(made, SETTINGS)
    c = step.settings
    found = count_parts(Pretrained(made), c)
    table = price_of(Pretrained(made))(c).table
    tokens, d = 16, 32
    attention, square = d * (32 + 16 + 16 + 32), 2 * 2 * 2 * 8 * 8 * 32  # q, k, v, o; two products of two sequences
    causal = square // 2
    assert table["fwd", "mlp", "dense"].flops == 2 * tokens * 3 * d * 48
    assert table["fwd", "attn", "dense"].flops == 2 * tokens * attention + causal
    assert table["fwd", "head", ""].flops == 2 * tokens * d * VOCAB
    assert found["mlp", "dense"]["saved"] > d + 2 * 48
    params = sum(param.numel() for param in made.parameters())
    assert price_of(Pretrained(made))(c).state_bytes == (3 * 4 * params,), "weights and averages, in fp32"
    assert 0 < float(step.simulate().makespan) < 1
    assert "rank 0 compute" in step.draw(80)


@pytest.mark.parametrize(("family", "full"), [("llama", range(4)), ("mistral", ()), ("gemma2", (1, 3))])
def test_attention_costs_what_it_costs_in_hockets_transformer(family: str, full: Sequence[int]) -> None:
    """Causal pairs count, and in layers with a window those within it; layers of one kind cost their mean."""
    made = model(family)
    step = hocket.plan_model(made, SETTINGS)
    found = price_of(Pretrained(made))(step.settings).table["fwd", "attn", "dense"].flops
    assert made.config.num_hidden_layers == 4
    sizes = {"hidden": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "window": 4}
    own = replace(step.settings, model=ModelConfig(**sizes, full_layers=tuple(full)))
    table = costs_of(own, H200).table
    assert found == sum(table["fwd", "attn", kind].flops for kind in own.model.layer_kinds()) / 4
