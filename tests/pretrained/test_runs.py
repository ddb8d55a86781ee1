"""Runs that begin with imported weights on several ranks, and what they export."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5", exc_type=ImportError)

from safetensors.torch import load_file

from hocket.commands.options import parse
from hocket.commands.train import Train
from hocket.config import BYTE_VOCAB
from hocket.config.rule import Host
from hocket.pretrained.families import FURTHER_LAYERS
from hocket.resolve import resolve
from hocket.train.data import make_streams
from hocket.train.sources import open_text
from tests.helpers.command import environment, hocket, text_in
from tests.pretrained.folders import made

BALANCED = ("glm4_moe_partial", "deepseek_v3")
"""Cases with a bias of balance."""
MESHES = {
    "one rank": [],
    "pipeline and experts": ["--mesh.pp", "2", "--mesh.dp", "2", "--mesh.ep", "2"],
    "pipeline": ["--mesh.pp", "2"],
    "tensors": ["--mesh.tp", "2", "--mesh.dp", "2", "--mesh.ep", "2"],
}


def words(folder: Path, *more: str) -> list[str]:
    return [
        "run.toml", "--data.paths", text_in(folder), "--data.sequence_length", "16", "--train.eval_batches", "2",
        "--train.device", "cpu", "--train.microbatches", "2", *more,
    ]  # fmt: skip


def imported(folder: Path, case: str) -> None:
    made(case, vocab_size=BYTE_VOCAB, num_hidden_layers=4).save_pretrained(folder / "model")
    (folder / "model" / "tokenizer_config.json").write_text("{}")
    done = hocket(folder, "import", "model", "run.toml")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        pytest.param("glm4_moe_partial", "pipeline and experts", marks=pytest.mark.full),
        pytest.param("deepseek_v3", "one rank", marks=pytest.mark.full),
        ("deepseek_v3", "tensors"),
        ("olmoe", "tensors"),
        ("llama_tied", "pipeline"),
        pytest.param("gpt_oss", "pipeline and experts", marks=pytest.mark.full),
        pytest.param("gpt_oss", "tensors", marks=pytest.mark.full),
    ],
)
def test_weights_pass_through_any_mesh(case: str, mesh: str, tmp_path: Path) -> None:
    """`test_live.py` has gpt_oss and glm4_moe_partial on these meshes."""
    imported(tmp_path, case)
    still = ["--train.steps", "1", "--train.lr", "1e-30", "--train.min_lr", "0", "--train.eval_batches", "0"]
    still += ["--model.bias_rate", "1e-30"] if case in BALANCED else []
    done = hocket(tmp_path, "train", *words(tmp_path, *still, *MESHES[mesh]))
    assert done.code == 0, done.err
    done = hocket(tmp_path, "export", "runs/run", "back")
    assert done.code == 0, done.err
    there, back = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "back"))
    assert there.keys() == back.keys()
    assert all(torch.equal(there[name], back[name]) for name in there)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "back"))
    further = {key: 0 for key in FURTHER_LAYERS if key in before}
    assert after == {**before, "torch_dtype": "float32", **further}
    assert (tmp_path / "back" / "tokenizer_config.json").exists()
    assert "note:" not in done.out
    if case == "llama_tied":
        (tmp_path / "model").rename(tmp_path / "moved")
        done = hocket(tmp_path, "export", "runs/run", "again")
        assert done.code == 0, done.err
        assert "note: model.weights = " in done.out
        assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == before["model_type"]


def test_transformers_finds_the_same_loss(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    imported(tmp_path, "qwen3_moe")
    mine = words(tmp_path, "--train.steps", "8", "--train.warmup", "0", *MESHES["pipeline and experts"])
    done = hocket(tmp_path, "train", *mine)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    assert hocket(tmp_path, "export", "runs/run", "back").code == 0
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    expected = loss_of(model, tmp_path, mine)
    (validated,) = (line["validation_loss"] for line in lines if "validation_loss" in line)
    assert validated == pytest.approx(expected, rel=1e-5)
    again = hocket(tmp_path, "export", "runs/run", "back")
    assert again.code == 2
    assert "back exists already; fix: another folder, or remove it first" in again.err
    assert again.err.count("fix:") == 1
    assert hocket(tmp_path, "export", "runs/run", "half", "--dtype", "bf16").code == 0
    half = load_file(tmp_path / "half" / "model.safetensors")
    assert {value.dtype for value in half.values()} == {torch.bfloat16}


def loss_of(model: Any, folder: Path, mine: list[str]) -> float:
    """The validation loss, by transformers."""
    options, origins = parse(Train, "train", [str(folder / "run.toml"), *mine[1:]])
    settings = resolve(options.config, Host(), origins)
    stream = make_streams(open_text(settings), settings)[1][""]
    losses = []
    with torch.no_grad():
        for batch in range(2):
            for m in range(2):
                for rank in range(2):
                    ids, targets, _ = stream.batch([batch * settings.batch + 2 * m + rank])
                    losses.append(F.cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten()).item())
    return sum(losses) / len(losses)


def test_a_resumed_run_needs_no_folder_of_weights(tmp_path: Path) -> None:
    imported(tmp_path, "deepseek_v3")
    every_two = ["--train.steps", "4", "--train.warmup", "0", "--train.save_every", "2", "--train.eval_batches", "0"]
    mine = words(tmp_path, *every_two, "--mesh.dp", "2")
    assert hocket(tmp_path, "train", *mine).code == 0
    assert hocket(tmp_path, "export", "runs/run", "undisturbed").code == 0
    shutil.rmtree(tmp_path / "runs/run/checkpoints/step-00000004")
    shutil.rmtree(tmp_path / "model")
    done = hocket(tmp_path, "train", *mine)
    assert done.code == 0, done.err
    lines = map(json.loads, (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert hocket(tmp_path, "export", "runs/run", "resumed").code == 0
    there, back = (load_file(tmp_path / name / "model.safetensors") for name in ("undisturbed", "resumed"))
    assert there.keys() == back.keys()
    assert all(torch.equal(there[name], back[name]) for name in there)
    shutil.rmtree(tmp_path / "runs/run/checkpoints")
    done = hocket(tmp_path, "train", *mine)
    assert done.code == 2
    assert "model/config.json cannot be read" in done.err


def test_runs_of_another_model_are_refused(tmp_path: Path) -> None:
    imported(tmp_path, "qwen3_moe")
    for flag, said in (
        (["--model.hidden", "32"], "its config.json says model.hidden = 24; fix: hocket import /"),
        (
            ["--model.weights", "nothing"],
            r"model.weights = nothing (command line, --model.weights): nothing/config.json cannot be read",
        ),
    ):
        done = hocket(tmp_path, "train", *words(tmp_path, *flag))
        assert done.code == 2
        assert done.err.startswith("hocket: model.weights = ")
        assert said in done.err
        assert done.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_run_of_no_family_is_not_exported(tmp_path: Path) -> None:
    small = ["tiny", *words(tmp_path, "--train.steps", "1", "--model.layers", "4", "--model.dense_layers", "0")[1:]]
    assert hocket(tmp_path, "train", *small).code == 0
    done = hocket(tmp_path, "export", "runs/tiny", "back")
    assert done.code == 2
    assert "no family computes it: the nearest is qwen2_moe, with model.shared_gate = True" in done.err
    assert not (tmp_path / "back").exists()
    assert not (tmp_path / "back.tmp").exists()
    assert "is not a checkpoint" in hocket(tmp_path, "export", "runs", "back").err


MEMORY = """
import threading
from pathlib import Path
import torch
from hocket.commands.options import parse
from hocket.commands.train import Train
from hocket.engine import Engine
from hocket.resolve import resolve
from hocket.config.rule import Host

torch.set_num_threads(1)
config, origins = parse(Train, "train", ["run.toml"])
engine = Engine(resolve(config.config, Host(), origins), 0, torch.device("cpu"))

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

before, most, over = anonymous(), 0, threading.Event()

def watch():
    global most
    while not over.wait(0.0005):
        most = max(most, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
engine.init_weights()
over.set()
watcher.join()
weights = [weight for unit in engine.sharded.units.values() for weight in unit.weights]
sizes = [weight.shape.numel() * 4 for weight in weights]
print(sum(sizes), max(sizes), max(most, anonymous()) - before)
"""


def test_a_rank_holds_a_parameter_beside_its_shards(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_experts": 16, "moe_intermediate_size": 128, "num_hidden_layers": 16}
    made("qwen3_moe", vocab_size=BYTE_VOCAB, **sizes).save_pretrained(tmp_path / "model")
    assert hocket(tmp_path, "import", "model", "run.toml").code == 0
    found = subprocess.run(
        [sys.executable, "-c", MEMORY], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    total, largest, taken = map(int, found.stdout.split())
    assert taken < 4 * largest < total / 5  # shards lie there already
