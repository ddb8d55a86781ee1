"""The loss that `hocket eval` finds is that of transformers on the same text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5", exc_type=ImportError)

from hocket.config import BYTE_VOCAB
from tests.helpers.command import ALONE, SMALL, hocket, text_in
from tests.pretrained.folders import made

TEXTS = {"prose": ["once upon a time", "a b c", "the quick brown fox jumps over the lazy dog"], "code": ["x = 1"]}
LINE = re.compile(r"^(?:(\w+)  )?loss (\S+) nats per token, perplexity (\S+), ([\d,]+) tokens$")


def told(out: str) -> dict[str, tuple[float, int]]:
    """By source, loss and tokens."""
    lines = [match for line in out.splitlines() if (match := LINE.match(line))]
    return {line[1] or "": (float(line[2]), int(line[4].replace(",", ""))) for line in lines}


def sources_in(folder: Path) -> None:
    for name, texts in TEXTS.items():
        (folder / name).mkdir()
        for n, text in enumerate(texts):
            (folder / name / f"{n}.txt").write_text(text)
    (folder / "mix.toml").write_text("".join(f'[{name}]\nweight = 1\npaths = ["{name}"]\n' for name in TEXTS))


@pytest.mark.parametrize("how", [[], ["--data.packing", "best_fit", "--data.sequence_length", "50"]], ids=["", "bins"])
@pytest.mark.parametrize("case", ["qwen3_moe", "llama3"])
def test_a_published_model_has_the_loss_of_transformers_by_source(case: str, how: list[str], tmp_path: Path) -> None:
    theirs = made(case, vocab_size=BYTE_VOCAB)
    theirs.save_pretrained(tmp_path / "model")
    sources_in(tmp_path)
    ended = hocket(tmp_path, "eval", "model", "--data.paths", "mix.toml", "--train.device", "cpu", *how)
    assert ended.code == 0, ended.err
    sums = {}
    for name, texts in TEXTS.items():
        sums[name] = 0.0, 0
        for text in texts:
            ids = torch.tensor([[*text.encode(), 0]])  # and the separator
            with torch.no_grad():
                logits = theirs(ids[:, :-1]).logits[0]
            total, count = sums[name]
            loss = F.cross_entropy(logits.double(), ids[0, 1:], reduction="sum").item()
            sums[name] = total + loss, count + ids.shape[1] - 1
    sums["all"] = sum(total for total, _ in sums.values()), sum(count for _, count in sums.values())
    found = told(ended.out)
    assert list(found) == ["prose", "code", "all"]
    for name, (total, count) in sums.items():
        assert found[name] == (pytest.approx(total / count, rel=2e-6), count), name


def test_a_run_is_evaluated_as_it_was_validated(tmp_path: Path) -> None:
    words = [*SMALL, *ALONE, "--data.paths", text_in(tmp_path), "--train.steps", "2", "--data.validation", "0"]
    words += ["--data.sequence_length", "32", "--precision.compute", "fp32"]
    words += ["--data.validation", "0", "--train.eval_batches", "0"]
    assert (ended := hocket(tmp_path, "train", *words)).code == 0, ended.err
    (tmp_path / "held.txt").write_text("def f(x):\n    return x\n" * 7)
    ask = ["--data.paths", "held.txt", "--train.device", "cpu"]
    one, together = (hocket(tmp_path, "eval", "runs/tiny", *ask, "--train.sequences", n) for n in "13")
    assert one.code == 0, one.err
    (loss, count), (same, _) = told(one.out)[""], told(together.out)[""]
    assert count == 7 * len("def f(x):\n    return x\n")  # all but the first, and the separator
    assert loss == pytest.approx(same, rel=1e-5)
    assert 0 < loss < 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "hocket eval (command line): no model; fix: "),
        (["nowhere", "--data.paths", "text"], "eval nowhere (command line): "),
        (["model"], "hocket eval (command line): no text; fix: --data.paths my/texts"),
        (
            ["model", "--data.paths", "prose", "--train.steps", "3"],
            "train.steps (command line, --train.steps): no effect",
        ),
        (["model", "--data.paths", "prose", "--train.sequences", "0"], "train.sequences = 0 (command line, "),
        (["model", "--data.paths", "empty"], "data.paths = empty (command line, "),
        (
            ["model", "--data.paths", "code/0.txt", "--data.packing", "best_fit", "--data.sequence_length", "2"],
            "no token",
        ),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    made("llama3", vocab_size=BYTE_VOCAB).save_pretrained(tmp_path / "model")
    sources_in(tmp_path)
    (tmp_path / "empty").mkdir()
    ended = hocket(tmp_path, "eval", *words)
    assert ended.code == 2, ended.out
    assert said in ended.err
    assert [line for line in ended.err.splitlines() if not line.startswith("note: ")] == [ended.err.splitlines()[-1]]
