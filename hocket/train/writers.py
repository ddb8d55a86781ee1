"""Destinations of metrics in addition to metrics.jsonl, which is complete: TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from hocket.config.rule import problem
from hocket.config.schema import flat
from hocket.problems import stop_if
from hocket.resolve import Settings
from hocket.train.runs import stored


class Writer(Protocol):
    """One destination. If it raises, the run continues without it and prints a warning."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, by name such as `loss` or `validation_losses.web`."""
        ...

    def close(self) -> None:
        """Called after the last step."""
        ...


class TensorBoard:
    """Event files in the run's folder. A resumed run hides later events of the former run."""

    def __init__(self, settings: Settings, done: int) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        folder = str(Path(settings.run.folder) / "tensorboard")
        self._writer = module.SummaryWriter(folder, purge_step=done + 1 if done else None)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """A scalar for each name."""
        for name, value in values.items():
            self._writer.add_scalar(name.replace(".", "/"), value, step)

    def close(self) -> None:
        """Write buffered events."""
        self._writer.close()


class Wandb:
    """An offline Weights & Biases run in the run's folder; `wandb sync` uploads it. A resumed run adds another."""

    def __init__(self, settings: Settings, done: int) -> None:
        self._wandb = importlib.import_module("wandb")
        run = settings.run
        self._run = self._wandb.init(
            mode="offline", project="hocket", name=run.name, group=run.name, dir=run.folder, config=stored(settings),
            settings=self._wandb.Settings(console="off", silent=True),
        )  # fmt: skip

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Write buffered rows. They are complete once the service has ended."""
        self._run.finish()
        self._wandb.teardown()


WRITERS: dict[str, tuple[str, Callable[[Settings, int], Writer]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", Wandb),
}
"""Name -> required package, and factory from the settings and the number of steps done."""


def require_writers(settings: Settings) -> None:
    """Raise ValueError for writers whose packages are not installed."""
    where = settings.origins
    stop_if(
        [
            problem("train.writers", name, where, f"the package `{package}` is not installed", _fix(name))
            for name, (package, _) in WRITERS.items()
            if name in settings.train.writers and importlib.util.find_spec(package) is None
        ]
    )


def _fix(name: str) -> str:
    return f"pip install 'hocket[{name}]', or leave it out"


class Writers:
    """All writers of a run. `warn` gets one message for each writer that fails."""

    def __init__(self, settings: Settings, done: int, warn: Callable[[str], None]) -> None:
        """Raises ValueError for a writer that cannot start."""
        self._warn, self._writers = warn, dict[str, Writer]()
        for name in dict.fromkeys(settings.train.writers):
            try:
                self._writers[name] = WRITERS[name][1](settings, done)
            except Exception as error:  # whatever the package raises
                self.close()
                reason = f"cannot begin ({_shortly(error)})"
                raise ValueError(problem("train.writers", name, settings.origins, reason, _fix(name))) from None

    def add(self, record: Mapping[str, Any]) -> None:
        """Pass on the numbers of a record of metrics."""
        values = dict(_numbers(record))
        for name, writer in list(self._writers.items()):
            self._try(name, lambda writer=writer: writer.add(record["step"], values))

    def close(self) -> None:
        """Close all writers."""
        for name, writer in list(self._writers.items()):
            self._try(name, writer.close)
        self._writers.clear()

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever the package raises
            del self._writers[name]
            self._warn(f"WARNING  train.writers: {name} has failed and gets no more ({_shortly(error)})")


def _shortly(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in flat(record).items():
        if name != "step" and isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)
