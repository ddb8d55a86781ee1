"""Host memory that a rank takes beyond its shards while weights come in from a folder and go out again.

    python -m benchmarks.weights_memory

Four CPU ranks, a folder of a Qwen3-MoE with random weights. Anonymous memory of each process is read every half
millisecond; what it held before counts as shards. The bound is in parameters: the largest one of the model, in fp32.
Needs transformers, whose model `fully_shard` shards.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import hocket
from benchmarks.options import arguments
from benchmarks.record import write
from hocket.config import Config, DataConfig, MeshConfig, PrecisionConfig, TrainConfig
from hocket.config.rule import Host
from hocket.engine import Engine
from hocket.pretrained.families import model_of, read_config
from hocket.resolve import resolve

SIZES: dict[str, Any] = dict(
    vocab_size=32768, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256, intermediate_size=512, tie_word_embeddings=False,
)  # fmt: skip
RANKS, BUCKET = 4, 2**27
MMAP_THRESHOLD = -3
"""A parameter of glibc's malloc."""


class Peak:
    """The most anonymous memory of this process, in bytes, beyond what it held at the beginning."""

    def __enter__(self) -> Peak:
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**17)  # what is freed goes back to the system, and is not counted
        self.before = self._most = anonymous()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.0005):
            self._most = max(self._most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()
        self._most = max(self._most, anonymous())

    @property
    def nbytes(self) -> int:
        return self._most - self.before


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def make_folder(folder: Path, **sizes: Any) -> None:
    """A folder of a model with random weights in bf16, as transformers writes it."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config: Any = Qwen3MoeConfig(**{**SIZES, **sizes}, max_position_embeddings=4096)
    model: Any = Qwen3MoeForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def planned(folder: Path) -> tuple[int, int, Callable[[], Any]]:
    """Bytes of shards and elements of the largest parameter of a planned step, and what reads its weights."""
    model = replace(model_of(read_config(folder)), weights=str(folder))
    config = Config(
        model=model,
        mesh=MeshConfig(pp=2, dp=2, ep=2),
        precision=PrecisionConfig(compute="fp32"),
        data=DataConfig(sequence_length=16),
        train=TrainConfig(microbatches=2, sequences=1, device="cpu"),
    )
    engine = Engine(resolve(config, Host()), dist.get_rank(), torch.device("cpu"), update=False)
    units = engine.sharded.units.values()
    return (
        sum(unit.group.main.nbytes for unit in units),
        max(weight.shape.numel() for unit in units for weight in unit.weights),
        engine.init_weights,
    )


def sharded(folder: Path) -> tuple[int, int, Any]:
    """Bytes of shards and elements of the largest parameter of a model under `fully_shard`, and its context."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    largest = max(param.numel() for param in model.parameters())
    context = hocket.fully_shard(model, units=type(model.model.layers[0]))
    groups = [group for unit in context.units for group in unit.groups]
    return sum(group.main.nbytes for group in groups), largest, context


def measured(rank: int, ranks: int, folder: Path, out: Path) -> None:
    """One rank of the measurement."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{folder}/meet")
    rows = []

    def row(what: str, shards: int, largest: int, work: Callable[[], Any]) -> None:
        with Peak() as peak:
            work()
        rows.append({"what": what, "shards": shards, "largest": 4 * largest, "peak": peak.nbytes})

    shards, largest, read = planned(folder)
    row("planned", shards, largest, read)
    del read
    shards, largest, context = sharded(folder)
    row("load", shards, largest, lambda: hocket.checkpoint.load_pretrained(context, folder))
    row(
        "buckets",
        shards,
        largest,
        lambda: [bucket.clear() for bucket in hocket.checkpoint.pretrained_buckets(context, BUCKET)],
    )
    row("save", shards, largest, lambda: hocket.checkpoint.save_pretrained(context, out))
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, rows)
    if rank == 0:
        torch.save(
            [max(of_ranks, key=lambda found: found["peak"]) for of_ranks in zip(*every, strict=True)], out / "rows"
        )
    dist.destroy_process_group()


def main() -> None:
    given = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "model", Path(name) / "out"
        make_folder(folder)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        mp.spawn(measured, (RANKS, folder, out), RANKS)
        rows = torch.load(out / "rows")
    for found in rows:
        print(f"{found['what']}: shards {found['shards'] / 1e6:,.0f} MB, {found['peak'] / 1e6:,.0f} MB more")
    print(
        write(
            "weights_memory", {"ranks": RANKS, "folder": size, "bucket": BUCKET, "rows": rows}, given.out, given.commit
        )
    )


if __name__ == "__main__":
    main()
