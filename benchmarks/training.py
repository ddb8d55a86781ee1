"""Train a model for some hundred steps, and beside it transformers' own class under torch's FSDP2.

    python -m benchmarks.training dense --gpus 2 --seeds 0 1 2 --peer
    python -m benchmarks.training experts --gpus 2
    python -m benchmarks.training experts --gpus 2 --steps 60 --peer --model.aux_loss 0

Both sides begin with the same weights and read the same tokens in the same order; a seed is one of that order. The text
is the source of torch and transformers as they are installed. Its byte-pair tokenizer is trained on an eighth of the
files. Words that are no options here go to `hocket train`. A result keeps the curves, and where they come from. It is
no comparison of speed: the peer is not compiled.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.options import arguments
from benchmarks.record import ROOT, write

PACKAGES = ("torch", "transformers")
VOCAB = 32768
RUNS = {
    "dense": "llama3_8b --model.hidden 2048 --model.layers 16 --model.heads 16 --model.kv_heads 8 --model.ffn 8192 "
    f"--model.vocab {VOCAB} --data.sequence_length 2048 --train.microbatches 4 --train.warmup 30",
    "experts": "qwen3_30b_a3b --model.layers 12 --mesh.pp 1 --plan.chunks 1 --mesh.ep {gpus} --train.microbatches 4 "
    "--train.warmup 30",
    "whole_experts": "qwen3_30b_a3b --mesh.pp 1 --plan.chunks 1 --mesh.ep {gpus} --train.microbatches 8 "
    "--train.warmup 30",
    "llama3_8b": "llama3_8b --data.sequence_length 2048 --train.microbatches 2 --train.warmup 100",
    "whole_8b": "llama3_8b --precision.averages bf16 --data.sequence_length 4096 --train.microbatches 8 "
    "--train.warmup 100",
}
"""Words of `hocket train`: 1.1 billion parameters; 12 layers of Qwen3-30B-A3B, and all 48; the whole Llama-3 8B, also
with the 32,768 tokens in a step of one GPU with which rates are published."""
STEPS = 300
CURVES = ("loss", "grad_norm", "load")
RATES = ("tokens_per_second", "tflops_per_gpu", "mfu")
"""Medians of these are kept too. Model FLOPs: recomputation does not count."""


def prepare(folder: Path) -> list[str]:
    """Train the tokenizer. Returns the words of `hocket train` that name it and the text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    roots = [_root(name) for name in PACKAGES]
    files = sorted(str(file) for root in roots for file in root.rglob("*.py"))[::8]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        files,
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    paths = [f"{root}/**/*.py" for root in roots]
    return ["--data.paths", *paths, "--data.tokenizer", str(folder / "tokenizer.json"), "--data.cache", str(folder)]


def _root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        raise ValueError(f"{package}: its source is part of the text; fix: install it")
    return Path(spec.origin).parent


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Curves of a run by step, its validation losses by step, and the median of its steps' seconds."""
    steps = [row for row in rows if "loss" in row]
    curves = {name: [round(row[name], 4) for row in steps] for name in CURVES if name in steps[0]}
    validation = {row["step"]: round(row["validation_loss"], 4) for row in rows if "validation_loss" in row}
    rates = {name: round(median(row[name] for row in steps), 4) for name in RATES if name in steps[0]}
    return {
        **curves,
        "validation_loss": validation,
        "seconds": round(median(row["seconds"] for row in steps), 4),
        **rates,
    }


def train(words: list[str], folder: Path, side: str, gpus: int) -> dict[str, Any]:
    """One run in a folder of its own: of `hocket`, or of its peer."""
    place = folder / side
    place.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "hocket", "train", *words]
    if side != "hocket":
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
        command = [sys.executable, *ranks, "-m", "benchmarks.training_peer", *words]
    subprocess.run(command, cwd=place, env=environment, check=True)
    return outcome(rows_of(place / "runs" / "compared" / "metrics.jsonl"))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("run", choices=list(RUNS))
    parser.add_argument("--gpus", type=int, default=2, help="ranks, also without GPUs")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the order of the text")
    parser.add_argument("--peer", action="store_true", help="train transformers' own class too")
    options, more = parser.parse_known_args()
    words = shlex.split(RUNS[options.run].format(gpus=options.gpus))
    for flag in (word for word in more if word in words):  # said here, so no more as the run has it
        del words[words.index(flag) : words.index(flag) + 2]
    words += ["--mesh.dp", str(options.gpus), "--train.steps", str(options.steps), "--train.eval_every", "100"]
    words += ["--train.keep", "0", "--run.name", "compared", *more]
    sides = ["hocket", *(["transformers"] if options.peer else [])]
    runs: dict[str, dict[str, Any]] = {side: {} for side in sides}
    name, path = f"training_{options.run}" + ("_peer" if options.peer else ""), None
    result = {"run": options.run, "words": shlex.join(words), "runs": runs}
    with TemporaryDirectory() as made:
        folder = Path(made)
        text = prepare(folder)
        digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()[:12]
        for seed in options.seeds:
            for side in sides:
                with TemporaryDirectory(dir=folder) as place:
                    own = [*words, *text, "--train.seed", str(seed)]
                    runs[side][str(seed)] = train(own, Path(place), side, options.gpus)
                path = write(name, {**result, "tokenizer": digest}, options.out, options.commit)  # a limit may end it
    print(path)
    for side, seeds in runs.items():
        for seed, run in seeds.items():
            first, last = run["loss"][0], run["loss"][-1]
            load = f", load {run['load'][0]:.1f} to {run['load'][-1]:.1f}" if "load" in run else ""
            norms = ", ".join(f"{norm:.2f}" for norm in run["grad_norm"][:3])
            print(
                f"{side:>12} seed {seed}: loss {first:.3f} to {last:.3f}, validation {run['validation_loss']}, "
                f"gradient norms {norms} ... {run['grad_norm'][-1]:.2f}{load}, {run['seconds']:.3f} s"
                + "".join(f", {run[rate]:,.4g} {rate}" for rate in RATES if rate in run)
            )


if __name__ == "__main__":
    main()
