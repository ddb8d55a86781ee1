"""The training comparison: the same model, weights and text give both sides the same curves."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import training_peer
from benchmarks.training import outcome, rows_of, train
from tests.helpers.command import SMALL, hocket, text_in
from tests.helpers.ranks import run_ranks


def shrunk(recipe: str, **changes: str) -> list[str]:
    """Words of a run with the small model's sizes."""
    settings = dict(zip(SMALL[1::2], SMALL[2::2], strict=True))
    settings |= {f"--{name.replace('__', '.')}": value for name, value in changes.items()}
    settings |= {"--mesh.dp": "2", "--mesh.pp": "1", "--plan.chunks": "1", "--train.device": "cpu"}
    settings |= {"--train.microbatches": "2", "--train.steps": "4", "--train.warmup": "2", "--train.keep": "0"}
    settings |= {"--precision.compute": "fp32", "--run.name": "compared", "--train.save_every": "0"}
    left = {"--model.shared_ffn", "--model.dense_layers"} | (
        {"--model.experts", "--model.expert_ffn"} if recipe == "llama3_8b" else set()
    )
    return [recipe, *(word for flag, value in settings.items() if flag not in left for word in (flag, value))]


def forked(words: list[str], folder: Path, side: str, ranks: int) -> dict[str, Any]:
    """What `train` of the benchmark gives, of processes that need not import torch."""
    place = folder / side
    place.mkdir()
    if side == "hocket":
        ended = hocket(place, "train", *words)
        assert ended.code == 0, ended.err
    else:
        run_ranks(peer, ranks, words, place)
    return outcome(rows_of(place / "runs" / "compared" / "metrics.jsonl"))


def peer(rank: int, words: list[str], place: Path) -> None:
    os.chdir(place)
    training_peer.train(words)


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "run"),
    [
        (shrunk("llama3_8b"), train),
        (shrunk("qwen3_30b_a3b", model__aux_loss="0", model__top_k="2", mesh__ep="2"), forked),
    ],
    ids=["dense", "experts"],
)
def test_both_sides_have_the_same_curves(
    tmp_path: Path, words: list[str], run: Callable[[list[str], Path, str, int], dict[str, Any]]
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    words += ["--data.paths", text_in(tmp_path), "--data.cache", str(tmp_path / "cache")]
    ours, theirs = (run(words, tmp_path, side, 2) for side in ("hocket", "transformers"))
    assert len(ours["loss"]) == 4
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-4)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3, abs=1e-4)
    assert ours["validation_loss"][4] == pytest.approx(theirs["validation_loss"][4], abs=2e-4)
    rows = rows_of(tmp_path / "transformers" / "runs" / "compared" / "metrics.jsonl")
    assert outcome(rows) == theirs
