"""What a checkpoint costs a run: behind its steps, and between them.

    python -m benchmarks.saves --gpus 2 --folder /dev/shm

Trains Llama-3 8B's layers twice for some steps: with checkpoints for which training waits, and with some that are
written while training goes on. A result has the seconds of steps alone and beside a write, those of the copy and of the
write, until the folder has its name, and bytes per second, all of the second checkpoint: for the first one, memory of
the host is made. Beside them stands what the folder takes of plain writes of as many bytes, from memory that no cache
holds. The folder should be faster than a disk, such as one in memory. It needs room for two checkpoints, and the host
as much memory again for the copies: 12 bytes per parameter, so 45 GB for 12 layers and 97 GB for all 32. A virtual
machine may get memory slowly for the first time: `--warm` writes so many GB first and deletes them, three times as many
as a checkpoint has. Words that are no options here go to `hocket train`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.markdown import Result, table
from benchmarks.options import arguments
from benchmarks.record import ROOT, write

MODEL = "llama3_8b --model.layers {layers} --data.sequence_length {length} --train.microbatches 2 --mesh.dp {gpus}"
WARM = 8
"""First steps that are not counted: kernels are loaded, steps are recorded."""
THREADS, BLOCK = 16, 1 << 24
"""Plain writes: files at a time, and bytes of a write."""
SOURCE = 1 << 30
"""Bytes that they come from."""
WAYS = ("behind",)
"""How runs save; results of before have one `between` steps, too."""


def outcome(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the lines of a run's metrics: medians of steps, and its second checkpoint, with the steps beside its write."""
    seconds = {line["step"]: line["seconds"] for line in lines if "loss" in line and line["step"] > WARM}
    first, told, *_ = [line for line in lines if "saved" in line]
    busy = {step for line in (first, told) for step in range(line["saved"]["step"] + 1, line["step"] + 1)}
    beside = [seconds[step] for step in range(told["saved"]["step"] + 1, told["step"] + 1) if step in seconds]
    alone = median(each for step, each in seconds.items() if step not in busy)
    found = {**told["saved"], "first_copy_seconds": first["saved"]["copy_seconds"], "alone_seconds": alone}
    found["steps_beside"] = len(beside)
    return found | ({"beside_seconds": median(beside), "beside_total": sum(beside)} if beside else {})


def run(words: list[str], folder: Path, way: str) -> dict[str, Any]:
    """One run of `hocket train`, in a folder that is gone behind it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with TemporaryDirectory(dir=folder) as place:
        own = ["--run.name", way, "--run.folder", f"{place}/run", "--data.cache", f"{place}/text"]
        command = [sys.executable, "-m", "hocket", "train", *words, *own]
        subprocess.run(command, env=environment, check=True)
        text = Path(place, "run", "metrics.jsonl").read_text()
    return outcome([json.loads(line) for line in text.splitlines()])


def folder_gb_per_s(folder: Path, size: int) -> float:
    """How fast a folder takes `size` bytes, in files that several threads write from one end to the other."""
    share, many = -(-size // THREADS), max(1, SOURCE // BLOCK)
    source = memoryview(os.urandom(min(BLOCK, size)) * many)

    def fill(file: Path) -> None:
        with file.open("wb", buffering=0) as out:
            left = share
            while left > 0:
                begin = (left // BLOCK * THREADS + int(file.name)) % many * BLOCK
                left -= os.write(out.fileno(), source[begin : begin + min(BLOCK, left)])
            os.fsync(out.fileno())

    with TemporaryDirectory(dir=folder) as place, ThreadPoolExecutor(THREADS) as pool:
        begun = time.perf_counter()
        list(pool.map(fill, [Path(place, str(n)) for n in range(THREADS)]))
        return THREADS * share / (time.perf_counter() - begun) / 1e9


def saves(result: Result) -> str:
    """A row for each way to save."""
    rows = []
    for way in sorted(result["ways"]):
        found = result["ways"][way]
        alone, steps = found["alone_seconds"], found["steps_beside"]
        slower = found.get("beside_total", 0.0) - steps * alone
        stall = found["copy_seconds"] if way == "behind" else found["write_seconds"]
        rows.append(
            [
                way,
                f"{found['bytes'] / 1e9:.1f} GB",
                f"{found['copy_seconds']:.2f} s, {found['first_copy_seconds']:.2f} s" if way == "behind" else "-",
                f"{found['write_seconds']:.1f} s, {found['gb_per_s']:.1f} GB/s",
                f"{found['gb_per_s'] / result['folder_gb_per_s']:.0%} of {result['folder_gb_per_s']:.1f} GB/s",
                f"{1e3 * alone:.0f} ms",
                f"{1e3 * found['beside_seconds']:.0f} ms ({steps})" if steps and way == "behind" else "-",
                f"{stall + (slower if way == 'behind' else 0.0):.2f} s",
            ]
        )
    heads = [
        "written",
        "checkpoint",
        "copy, the first one",
        "write",
        "of plain writes",
        "step alone",
        "beside the write (steps)",
        "costs the run",
    ]
    return table(heads, rows)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--gpus", type=int, default=2, help="ranks, also without GPUs")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument(
        "--steps", type=int, default=48, help="of a run, which saves after a third, two, and at its end"
    )
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--warm", type=float, default=0.0, help="GB that the folder takes and loses before all else")
    options, more = parser.parse_known_args()
    words = [
        *shlex.split(MODEL.format(layers=options.layers, length=options.length, gpus=options.gpus)),
        "--train.keep",
        "1",
        *more,
    ]
    words += ["--train.steps", str(options.steps), "--train.eval_every", "0", "--train.eval_batches", "0"]
    words += ["--train.save_every", str(options.steps // 3)]
    if options.warm:
        folder_gb_per_s(options.folder, int(1e9 * options.warm))
    ways = {way: run(words, options.folder, way) for way in WAYS}
    plain = folder_gb_per_s(options.folder, max(found["bytes"] for found in ways.values()))
    result = {"words": shlex.join(words), "folder": str(options.folder), "folder_gb_per_s": plain, "ways": ways}
    print(write("saves", result, options.out, options.commit))
    print(saves(result))


if __name__ == "__main__":
    main()
