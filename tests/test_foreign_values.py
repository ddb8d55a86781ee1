"""Settings of other systems: what is left out has its own default there, and no value is without an answer."""

from __future__ import annotations

from typing import Any

import pytest

from hocket.foreign import read
from hocket.foreign.entry import Given
from hocket.foreign.systems import BRIDGE, DEEPSPEED, MEGATRON, TORCHTITAN
from hocket.foreign.translate import System, fitting, translate


def settings(words: str) -> dict[str, Any]:
    return dict(translate(MEGATRON, read.flags(words)).settings)


def test_a_model_is_what_it_is_without_the_flags_that_were_left_out() -> None:
    sizes = "--num-layers 2 --hidden-size 1024 --num-experts 4"
    found = settings(f"{sizes} --swiglu")
    assert (found["model.ffn"], found["model.expert_ffn"], found["model.norm_eps"]) == (2688, 2688, 1e-5)
    assert settings(f"{sizes} --ffn-hidden-size 3000")["model.expert_ffn"] == 3000
    given = settings(f"{sizes} --ffn-hidden-size 3000 --moe-ffn-hidden-size 700 --norm-epsilon 1e-6")
    assert (given["model.ffn"], given["model.expert_ffn"], given["model.norm_eps"]) == (3000, 700, 1e-6)

    def unlike(text: str) -> set[str]:
        return {row.name for row in translate(MEGATRON, read.flags(text)).of("not there") if not row.given}

    like = "--swiglu --normalization RMSNorm --use-rotary-position-embeddings --disable-bias-linear"
    like += " --attention-dropout 0.0 --hidden-dropout 0"
    assert unlike(f"{sizes} {like}") == {"(--gpus)"}
    kinds = {f"(no --{name})" for name in ("swiglu", "normalization", "position-embedding-type", "disable-bias-linear")}
    kinds |= {"(no --hidden-dropout)", "(no --attention-dropout)"}
    assert unlike(sizes) == {"(--gpus)"} | kinds
    assert unlike("--num-layers 2") == {"(--gpus)"}
    model = translate(BRIDGE, read.keys("model.num_layers=2 model.hidden_size=1024")).settings
    assert not {"model.ffn", "model.norm_eps"} & model.keys()


def test_latent_attention_and_groups_of_experts() -> None:
    sizes = "--num-attention-heads 16 --hidden-size 2048 --multi-latent-attention --qk-layernorm --moe-router-topk 8"
    found = settings(f"{sizes} --kv-lora-rank 512 --q-lora-rank 1536 --v-head-dim 128 --moe-router-group-topk 4")
    wanted = {"kv_lora_rank": 512, "q_lora_rank": 1536, "v_head_dim": 128, "route_top_groups": 4}
    assert {name: found[f"model.{name}"] for name in wanted} == wanted
    assert found["model.route_group_score"] == "best_two"
    assert not {"model.kv_heads", "model.head_dim", "model.qk_norm"} & found.keys()
    (row,) = (row for row in translate(MEGATRON, read.flags(sizes)).of("not there") if "latent" in row.name)
    assert row.answer.words == "it needs --kv-lora-rank"


def test_tensor_ranks_of_deepspeed_are_no_data_ranks() -> None:
    pairs = [("tensor_parallel.autotp_size", 2), ("train_batch_size", 64), ("train_micro_batch_size_per_gpu", 1)]
    found = translate(DEEPSPEED, pairs, 8).settings
    assert (found["mesh.dp"], found["train.microbatches"]) == (4, 16)


ODD: dict[type, list[Any]] = {
    bool: [True, False, 0],
    int: [0, -1, 1, 10**30],
    float: [0, -1.0, float("nan"), float("inf")],
    str: ["", 0, ["a", "b"], None, "[0]*2"],
    list: [[], ["x"], [1, 2], "x", 3, None],
    object: [1, [1], None],
}


@pytest.mark.parametrize("system", [MEGATRON, BRIDGE, TORCHTITAN, DEEPSPEED], ids=lambda system: system.name)
@pytest.mark.parametrize("others", [0, -1, 3])
def test_every_value_has_an_answer_beside_whatever_else_is_given(system: System, others: int) -> None:
    numbers = {name: others for row in system.entries if row.takes is int for name in row.names}
    for row in system.entries:
        for value in ODD[row.takes]:
            given = Given({**numbers, **dict.fromkeys(row.names, value)}, 8)
            answer = fitting(row.rule(value, given))
            assert answer.settings or answer.words, (row.names, value)
    for _, make in system.defaults:
        make(Given(numbers, 8))
