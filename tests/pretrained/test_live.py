"""Weights of sharded models as Hugging Face's files have them: read into shards, written, and given away in buckets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5", exc_type=ImportError)

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import hocket
from benchmarks import weights_memory
from hocket.config import BYTE_VOCAB, Config
from hocket.config.schema import changed
from tests.helpers.ranks import run_ranks
from tests.pretrained.folders import change_config, saved, settings

CASES = ("llama_tied", "mixtral", "gpt_oss", "deepseek_v3")
"""Experts stacked, turned over and beside one another, other names in memory, saved buffers, a tied head."""
NBYTES = 300_000


def other(folder: Path) -> Any:
    """A model like that of a folder, with other weights."""
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def sharded(folder: Path) -> Any:
    model = other(folder)
    return model, hocket.fully_shard(model, units=type(model.model.layers[0]))


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


def there_and_back(rank: int, folder: Path) -> None:
    for case in CASES:
        model, context = sharded(folder / case)
        hocket.checkpoint.load_pretrained(context, folder / case)
        expected = torch.load(folder / f"{case}.pt")
        with context.gathered():
            found = bits(model.state_dict())
        assert found.keys() == expected.keys(), case
        assert all(torch.equal(found[name], expected[name]) for name in expected), case
        hocket.checkpoint.save_pretrained(context, folder / f"{case}_back", dtype=torch.float32, largest=40_000)
        files = load_file(folder / case / "model.safetensors")
        streamed: dict[str, Tensor] = {}
        for bucket in hocket.checkpoint.pretrained_buckets(context, NBYTES, torch.float32):
            assert sum(value.nbytes for _, value in bucket) <= NBYTES, case
            assert not streamed.keys() & {name for name, _ in bucket}, case
            streamed |= bucket
        assert_bitwise(streamed, files)


def assert_bitwise(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_shards_take_a_folder_and_write_it_again(tmp_path: Path) -> None:
    """Over four ranks, bit for bit, and transformers opens what was written."""
    for case in CASES:
        saved(case, tmp_path / case)
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / case, dtype=torch.float32).state_dict()
        torch.save(expected, tmp_path / f"{case}.pt")
    run_ranks(there_and_back, 4, tmp_path)
    for case in CASES:
        back = {}
        for file in sorted((tmp_path / f"{case}_back").glob("*.safetensors")):
            back |= load_file(file)
        assert_bitwise(back, load_file(tmp_path / case / "model.safetensors"))
        opened, report = AutoModelForCausalLM.from_pretrained(tmp_path / f"{case}_back", output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        assert (
            type(opened).__name__ == json.loads((tmp_path / f"{case}_back/config.json").read_text())["architectures"][0]
        )


STEP = {
    "train.device": "cpu", "train.sequences": 1, "train.microbatches": 2, "data.sequence_length": 16,
    "precision.compute": "fp32", "train.lr": 1e-2,
}  # fmt: skip
FOUR = {"mesh.pp": 2, "mesh.dp": 2, "mesh.ep": 2}


def planned_there_and_back(rank: int, folder: Path) -> None:
    """A planned step over transformers' model takes first values from a folder, and later those of another one."""
    case = folder / "qwen3_moe"
    with torch.device("meta"):
        model = other(case)
    step = hocket.plan_model(model, {**STEP, **FOUR}, values=case)
    files = load_file(case / "model.safetensors")
    assert_bitwise(dict(pair for bucket in buckets(step, 150_000) for pair in bucket), files)
    ids = torch.arange(32).view(2, 16) % 61
    trained = step((ids, ids.flip(1)))
    hocket.checkpoint.save_pretrained(step, folder / "trained")
    hocket.checkpoint.load_pretrained(step, case)
    assert_bitwise(dict(pair for bucket in buckets(step, 150_000) for pair in bucket), files)
    assert step((ids, ids.flip(1))) == trained  # the optimizer has begun anew
    assert_bitwise(
        dict(pair for bucket in buckets(step, 150_000) for pair in bucket),
        load_file(folder / "trained/model.safetensors"),
    )


def buckets(step: Any, nbytes: int = NBYTES) -> Any:
    found = list(hocket.checkpoint.pretrained_buckets(step, nbytes))
    assert len(found) > 1
    assert all(sum(value.nbytes for _, value in bucket) <= nbytes for bucket in found)
    return found


def test_a_planned_step_takes_a_folder_and_writes_it(tmp_path: Path) -> None:
    saved("qwen3_moe", tmp_path / "qwen3_moe")
    run_ranks(planned_there_and_back, 4, tmp_path)


def own_goes_on(rank: int, folder: Path, case: str, mesh: dict[str, int]) -> None:
    """hocket's own transformer: import, train, export, import, go on."""

    def started(weights: Path) -> Any:
        config = changed(Config(model=replace(settings(weights), weights=str(weights))), {**STEP, **mesh})
        return hocket.plan(config).start()

    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(BYTE_VOCAB, (2, 17), generator=generator) for _ in range(4)]
    given = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in texts]
    step = started(folder / case)
    assert_bitwise(
        dict(pair for bucket in buckets(step) for pair in bucket), load_file(folder / case / "model.safetensors")
    )
    for batch in given[:3]:
        step(batch)
    out = folder / f"{case}_{mesh['mesh.pp']}"
    hocket.checkpoint.save_pretrained(step, out)
    streamed = dict(pair for bucket in buckets(step) for pair in bucket)
    assert_bitwise(streamed, load_file(out / "model.safetensors"))
    again = started(out)
    assert again(given[3]).loss == step(given[3]).loss
    with pytest.raises(ValueError, match=r"hocket's own transformer; fix: model\.weights = "):
        hocket.checkpoint.load_pretrained(step, out)


@pytest.mark.parametrize(
    ("case", "mesh"), [("glm4_moe_partial", FOUR), ("gpt_oss", {"mesh.pp": 1, "mesh.tp": 2, "mesh.dp": 2})]
)
def test_what_was_exported_goes_on_with_the_same_loss(case: str, mesh: dict[str, int], tmp_path: Path) -> None:
    """Bit for bit, and what was streamed is what was written."""
    saved(case, tmp_path / case, vocab_size=BYTE_VOCAB)
    run_ranks(own_goes_on, 4, tmp_path, case, mesh)


def without(path: Path) -> None:
    change_tensors(path, lambda tensors: tensors.pop("model.norm.weight"))


def with_more(path: Path) -> None:
    change_tensors(path, lambda tensors: tensors.update(more=torch.zeros(2)))


def wider(path: Path) -> None:
    change_tensors(path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(25)}))


def truncated(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def untied(path: Path) -> None:
    change_tensors(path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(61, 24)}))


def of_another_kind(path: Path) -> None:
    change_config(path, model_type="qwen2")


def quantised(path: Path) -> None:
    change_config(path, quantization_config={"quant_method": "fp8"})


def in_fp8(path: Path) -> None:
    name = "model.norm.weight"
    change_tensors(path, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))


def change_tensors(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


REFUSED = {
    without: "lacks what makes model.norm.weight; fix: the folder of such a model",
    with_more: "has more, which the model does not take",
    wider: r"model.norm.weight has shape \[25\] in .*, the model's \[24\]",
    truncated: "model.safetensors is truncated or damaged",
    untied: "lm_head.weight and model.embed_tokens.weight are both model.embed_tokens.weight, and are not equal",
    of_another_kind: "config.json has model_type = qwen2, the model llama",
    quantised: "config.json has a quantization_config: only plain weights are read here",
    in_fp8: "model.norm.weight has elements of F8_E4M3",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda spoil: spoil.__name__)
def test_a_folder_that_does_not_fit_changes_nothing(spoil: Any, tmp_path: Path) -> None:
    saved("llama_tied", tmp_path / "there")
    model, context = sharded(tmp_path / "there")
    with context.gathered():
        before = bits(model.state_dict())
    spoil(tmp_path / "there")
    with pytest.raises(ValueError, match=f"^folder = .*{REFUSED[spoil]}"):
        hocket.checkpoint.load_pretrained(context, tmp_path / "there")
    with context.gathered():
        assert_bitwise(bits(model.state_dict()), before)
    with pytest.raises(ValueError, match=f"^values = .*{REFUSED[spoil]}"):
        hocket.plan_model(other_of("llama_tied", tmp_path), STEP, values=tmp_path / "there")


def other_of(case: str, folder: Path) -> Any:
    return other(saved(case, folder / "plain"))


def test_any_module_goes_by_its_own_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    wanted = bits(layers.state_dict())
    context = hocket.fully_shard(layers)
    hocket.checkpoint.save_pretrained(context, tmp_path / "out")
    assert_bitwise(load_file(tmp_path / "out/model.safetensors"), wanted)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    other_layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    context = hocket.fully_shard(other_layers)
    hocket.checkpoint.load_pretrained(context, tmp_path / "out")
    with hocket.sharding.context_of(context).gathered():
        assert_bitwise(bits(other_layers.state_dict()), wanted)
    with pytest.raises(ValueError, match="exists already"):
        hocket.checkpoint.save_pretrained(context, tmp_path / "out")
    with pytest.raises(ValueError, match=r"^nbytes = 10: 0\.weight takes 120; fix: at least as many"):
        hocket.checkpoint.pretrained_buckets(context, 10)
    with pytest.raises(ValueError, match=r"^Sequential: no ShardContext and no step"):
        hocket.checkpoint.load_pretrained(nn.Sequential(nn.Linear(6, 5)), tmp_path / "out")


SMALL = 2**24
"""Bytes of names, conversions, and what else has nothing to do with the size of a model."""


def held(rank: int, folder: Path) -> None:
    shards, elements, context = weights_memory.sharded(folder)
    largest, bucket = 4 * elements, 12 * elements
    assert 10 * largest < shards
    with weights_memory.Peak() as peak:
        hocket.checkpoint.load_pretrained(context, folder)
    assert peak.nbytes < 3 * largest + SMALL < shards
    with weights_memory.Peak() as peak:
        for tensors in hocket.checkpoint.pretrained_buckets(context, bucket):
            assert sum(value.nbytes for _, value in tensors) <= bucket
            tensors.clear()
    assert peak.nbytes < bucket + SMALL < shards


def test_no_rank_holds_the_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_experts": 16, "moe_intermediate_size": 128, "num_hidden_layers": 12}
    weights_memory.make_folder(tmp_path / "model", vocab_size=256, **sizes)
    run_ranks(held, 2, tmp_path / "model")
