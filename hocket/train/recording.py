"""Steps recorded with the profiler, as traces that explain themselves: every op under its name, and the run's program.

A trace holds `hocket step 12` around an optimizer step, the ops of the plan under their names (`fwd attn m0 c1 l5`), on
a CPU also `wait <op>` where the host stands still for a collective, and the top-level key `hocket` that `describe`
makes. Everything is off again behind the recorded steps. Steps that are replayed as one CUDA graph are recorded as they
run, and a replay issues no op whose name a trace could show: its kernels tell by themselves what they are for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hocket.config import LABELS, Config
from hocket.engine import Engine
from hocket.measured.stored import describe as stored
from hocket.model.transformer import parameter_counts
from hocket.resolve import Settings

GZIP_LEVEL = 3
"""A trace shrinks to a tenth with this; the highest level takes five times as long for a few percent more."""


def describe(config: Config, engine: Engine, rank: int) -> dict[str, Any]:
    """What a trace of this rank says about its run, as JSON values."""
    described: dict[str, Any] = {
        **stored(config, engine.program, engine.where.pp),
        "transport": config.train.transport,
        "label": LABELS.get(config.train.transport, ""),
        "rank": rank,
        "pp_rank": engine.where.pp,
        "coordinates": dataclasses.asdict(engine.where),
        "parameters": parameter_counts(config.model)[0],
        "hostname": platform.node(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "nccl": _nccl()},
    }
    if isinstance(config, Settings):
        described["host"] = dataclasses.asdict(config.host)
    return _plain(described)


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""


def _plain(value: Any) -> Any:
    """The same without quotes, backslashes and control characters in strings: the profiler writes those wrongly."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return "".join(c for c in value.replace('"', "'").replace("\\", "/") if c.isprintable())
    return value


class Recording:
    """Records steps of one engine as they run. `start`, then `with step(n)` around each, `stop`, `write`."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self._engine = engine
        self._about = json.dumps(describe(engine.config, engine, rank), ensure_ascii=False)
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)
        self._prepared = False

    def prepare(self) -> None:
        """Set the profiler up a step early, so that its own start does not lengthen the first recorded one."""
        self._profiler.prepare_trace()
        self._prepared = True

    def start(self) -> None:
        """Record from now on."""
        if not self._prepared:
            self.prepare()
        if not self._engine.replays:
            self._engine.executor.annotate()
        self._profiler.start_trace()
        self._profiler.add_metadata_json("hocket", self._about)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around an optimizer step, up to where its loss is known."""
        with record_function(f"hocket step {number}"):
            yield

    def stop(self) -> None:
        """Record no longer, and leave the engine as it was."""
        self._engine.executor.annotate(False)
        self._profiler.stop_trace()

    def write(self, path: Path) -> None:
        """Write the trace, whole or not at all. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text, packed = path.with_name(path.name + ".text.tmp"), path.with_name(path.name + ".tmp")
        try:
            self._profiler.export_chrome_trace(str(text))
            with text.open("rb") as source, gzip.open(packed, "wb", GZIP_LEVEL) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            packed.replace(path)
        finally:
            text.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
