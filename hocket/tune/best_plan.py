"""Searches the best plan of a recipe, and reports the result. Imports no torch."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hocket.collector import without_collector
from hocket.config import Config
from hocket.planning import network, predict, program_of
from hocket.program.check import assert_valid
from hocket.program.cost import CostTable, Measurement
from hocket.program.hardware import Hardware
from hocket.program.stages import arrival_bytes, costs_of, layout_of
from hocket.resolve import Settings
from hocket.settings.derived import most_layers
from hocket.settings.origins import command_words
from hocket.settings.schema import changed, leaf, show, types
from hocket.sizes import duration, parse_bytes
from hocket.tune.candidates import all_orders, better_orders, layer_seconds
from hocket.tune.period import continued, repeats, steady
from hocket.tune.search import WORTH, Found, Search, Trial
from hocket.tune.search_values import Changes, Known
from hocket.tune.transport_choice import TRANSPORT, chose_copies
from hocket.tune.trials import USABLE, model_costs, priced_as

DOUBT = 0.07
"""Measured errors of the predicted gain of one plan over another are below this: benchmarks/search_tables.py."""
_ORDERS = 3
"""Number of orders of a merged layer step that the search tries beside the named ones."""

_BY_SIMULATION = (
    "train.transport",
    "plan.graphs",
    "plan.layers_per_stage",
    "plan.offload",
    "plan.recompute",
    "plan.layer_order",
    "overlap.dp.strategy",
    "overlap.dp.update",
    "overlap.ep.splits",
    "overlap.pp.defer_layers",
    "overlap.pp.defer_head",
)
"""Settings that `auto` chooses by simulating steps. That is too slow to do for every plan of a search."""


class Resolve(Protocol):
    """From a configuration, and where its settings come from, to settings."""

    def __call__(
        self,
        config: Config,
        origins: dict[str, str],
        price: Callable[[Config], CostTable],
        /,
        *,
        memory: int = 0,
    ) -> Settings:
        """Raises ValueError if a rule refuses the settings."""
        ...


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a search: the recipe, its limits and its costs."""

    config: Config
    """The configuration as the user gave it. Automatic settings are still open."""
    origins: Mapping[str, str]
    """Where settings come from. What the user set on the command line stays as it is."""
    resolve: Resolve
    hardware: Hardware
    measured: Measurement | None = None
    cap: int = 0
    """Bytes that a rank may hold; 0 means no limit."""
    memory: int = 0
    """Bytes of memory that `auto` reckons with; 0 means those of the hardware."""

    def settled(self, changes: Changes, price: Callable[[Config], CostTable] | None = None) -> Settings:
        """The settings of a plan, with other costs than those of the search where `price` is given.

        Raises ValueError if they are refused.
        """
        origins = {**self.origins, **dict.fromkeys(changes, "search")}
        return self.resolve(changed(self.config, changes), origins, price or self.costs, memory=self.memory)

    def costs(self, config: Config) -> CostTable:
        """What ops cost."""
        return costs_of(config, self.hardware, self.measured)

    def without_simulations(self) -> Task:
        """The same, with what `auto` would choose by simulating chosen as for the plan that the search begins with."""
        start = self.settled({})
        chosen = {name: leaf(start, name) for name in _BY_SIMULATION}
        if start.overlap.ep.merge_ends == "off":  # which is always possible
            chosen["overlap.ep.merge_ends"] = "off"
        return replace(self, config=changed(self.config, chosen))


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a search, and its effort."""

    found: Found
    tried: int
    """Different plans that were priced."""
    orders: int
    """Orders of a merged layer step that were compared on a model of the step; 0 where there is nothing to order."""
    suggested: tuple[str, ...]
    """The orders that were faster on that model than all named ones, the fastest first."""
    seconds: float
    """Seconds of the search; 0 leaves them out of reports."""


@without_collector()
def search(task: Task) -> Result:
    """Search. Raises ValueError if the configuration itself is refused."""
    begun = time.perf_counter()
    start = task.settled({})
    layout, costs = layout_of(start), task.costs(start)
    seconds = layer_seconds(costs, layout)
    orders = better_orders(seconds, most_layers(start), _ORDERS) if seconds else []
    price = Pricer(task)
    if price({}, whole=False) is None:
        program_of(start)  # which says why there is no such step
    found = Search(start, Known(costs, tuple(orders)), price, task.cap, task.origins).run()
    assert_valid(program_of(task.without_simulations().settled(found.path[-1].changes)))
    return Result(
        found=found,
        tried=price.tried,
        orders=len(all_orders()) if seconds else 0,
        suggested=tuple(orders),
        seconds=time.perf_counter() - begun,
    )


class Pricer:
    """Builds plans and simulates them, equal plans only once."""

    def __init__(self, task: Task) -> None:
        self._task = task.without_simulations()
        self._known: dict[tuple[Any, bool], Trial | None] = {}
        self._settings: dict[tuple[tuple[str, Any], ...], Settings | None] = {}
        self._relieved: dict[tuple[Any, ...], Changes | None] = {}
        self._costs: dict[Config, CostTable] = {}

    @property
    def tried(self) -> int:
        """Different plans that were priced."""
        return len({plan for (plan, _), trial in self._known.items() if trial})

    def __call__(self, changes: Changes, *, whole: bool) -> Trial | None:
        """See `search.Price`."""
        settings = self._settled(changes)
        if settings is None:
            return None
        key = ((settings.plan, settings.overlap), whole or not repeats(settings))
        if key not in self._known:
            self._known[key] = self._simulated(settings) if key[1] else self._estimated(settings)
        trial = self._known[key]
        return trial and replace(trial, changes=dict(changes))

    def relieved(self, changes: Changes, names: Collection[str]) -> Changes | None:
        """See `search.Price`."""
        key = tuple(sorted(changes.items())), frozenset(names)
        if key not in self._relieved:
            left = {name: value for name, value in changes.items() if name not in names}
            open_ = {name: ("auto",) if name in ("plan.recompute", "plan.offload") else "auto" for name in names}
            try:
                settings = replace(self._task, memory=int(self._task.cap / USABLE)).settled(
                    {**left, **open_}, self._priced
                )
                self._relieved[key] = {**left, **{name: leaf(settings, name) for name in names}}
            except ValueError:
                self._relieved[key] = None
        return self._relieved[key]

    def _priced(self, config: Config) -> CostTable:
        """What ops cost."""
        key = priced_as(config)
        if key not in self._costs:
            self._costs[key] = self._task.costs(config)
        return self._costs[key]

    def _settled(self, changes: Changes) -> Settings | None:
        """The settings of a plan; None if they are refused."""
        name = tuple(sorted(changes.items()))
        if name not in self._settings:
            try:
                self._settings[name] = self._task.settled(changes, self._priced)
            except ValueError:
                self._settings[name] = None
        return self._settings[name]

    def _estimated(self, settings: Settings) -> Trial | None:
        """See Note: [Long steps are priced by their period] in period.py."""
        few, more = steady(settings)
        steps = (replace(settings, train=replace(settings.train, microbatches=n)) for n in (few, more))
        short, long = (self._simulated(step) for step in steps)
        if short is None or long is None:
            return self._simulated(settings)
        periods = (settings.train.microbatches - few) / (more - few)
        return replace(long, seconds=continued(short.seconds, long.seconds, periods), ops=short.ops + long.ops)

    def _simulated(self, settings: Settings) -> Trial | None:
        """None if there is no legal order."""
        try:
            program = program_of(settings)
        except ValueError:
            return None
        timeline = predict(settings, program, self._task.hardware, self._task.measured)
        ranks = timeline.ranks
        return Trial(
            changes={},
            seconds=float(timeline.makespan),
            exposed={kind: sum(float(use.exposed[kind]) for use in ranks) / len(ranks) for kind in ranks[0].exposed},
            idle=sum(float(use.idle) for use in ranks) / len(ranks),
            peak_bytes=max(use.peak_bytes for use in ranks) + arrival_bytes(settings),
            ops=len(program),
        )


def report(task: Task, result: Result) -> str:
    """The result of a search as text for a terminal."""
    found, first = result.found, result.found.path[0]
    costs = f"with measured costs of {task.measured.source}" if task.measured else "with modelled costs"
    cap = f"; at most {_gib(task.cap)} on a rank" if task.cap else ""
    settings = task.settled({})
    return "\n".join(
        [
            f"SEARCH  {settings.run.name} on {task.hardware.name}, {settings.precision.compute}, {costs}{cap}",
            f"{result.tried} plans tried" + (f" in {result.seconds:.1f} s" if result.seconds else ""),
            "",
            *_table(found.path, task.cap),
            "",
            *_verdict(task, result),
            *(f"note: {note}" for note in _notes(task, result, 1 - found.path[-1].seconds / first.seconds)),
        ]
    )


def _table(path: tuple[Trial, ...], cap: int) -> Iterator[str]:
    """A row for each trial. Gains are relative to the first trial."""
    rows = []
    for n, trial in enumerate(path):
        added = [name for name in trial.changes if n and name not in path[n - 1].changes]
        name = ", ".join(f"{setting} = {show(trial.changes[setting])}" for setting in added) or "as given"
        times = [trial.seconds, *trial.exposed.values(), trial.idle]
        over = " (over)" if cap and trial.peak_bytes > cap else ""
        cells = [duration(times[0]), f"{1 - trial.seconds / path[0].seconds:.1%}", *(duration(t) for t in times[1:])]
        rows.append([("+ " if n > 1 else "") + name, *cells, _gib(trial.peak_bytes) + over])
    head = ["", "step", "gain", *(f"exp. {kind}" for kind in path[0].exposed), "idle", "peak memory"]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()


def _verdict(task: Task, result: Result) -> Iterator[str]:
    found = result.found
    command = shlex.join(words(task, found.path[-1].changes))
    if not found.fits:
        yield (
            f"NOTHING FITS: a rank may hold {_gib(task.cap)}, and the smallest need found is "
            f"{_gib(found.path[-1].peak_bytes)}, with {command}"
        )
        yield "shorter sequences, fewer train.sequences or more ranks need less"
    elif len(found.path) == 1:
        yield f"Nothing tried is shorter than the step as given by {WORTH:.1%} or more."
    else:
        yield f"hocket train {command}"


def _notes(task: Task, result: Result, gain: float) -> Iterator[str]:
    if result.orders:
        better = "none is faster than those with names" if not result.suggested else "the fastest were tried as well"
        yield f"{result.orders} orders of parts were compared on a model of one merged layer step: {better}"
    if 0 < gain < DOUBT:
        yield f"predicted gains have been off by up to {DOUBT:.0%}: time both plans before relying on this one"
    settings = task.settled({})
    if chose_copies(settings, settings.decisions):
        yield next(str(decision) for decision in settings.decisions if decision.setting == TRANSPORT)
    if task.measured is None:
        yield "costs are figures of the hardware; --from takes them from the traces of a run"
        if wide := network(settings):
            yield wide


def words(task: Task, changes: Changes) -> list[str]:
    """Words for `hocket train` that give a plan: recipe or file, the user's settings, and what the search changed.

    Also what `auto` would choose otherwise there: it does not know the costs that the search knows, and the search left
    some of it as it was chosen for the plan that it began with.
    """
    settings, names = task.without_simulations().settled(changes), set(changes)
    while True:
        there = task.settled({name: leaf(settings, name) for name in names}, model_costs)
        otherwise = {name for name in types() if leaf(settings, name) != leaf(there, name)} - names
        otherwise = {name for name in otherwise if _works(task, settings, names | {name})}
        if not otherwise:
            return command_words(settings, task.origins, names)
        names |= otherwise


def _works(task: Task, settings: Settings, names: set[str]) -> bool:
    """Whether the rules take these values where a user sets them: some have no effect beside the others."""
    try:
        task.settled({name: leaf(settings, name) for name in names}, model_costs)
    except ValueError:
        return False
    return True


def as_json(task: Task, result: Result) -> dict[str, Any]:
    """The same as JSON."""
    rows = [
        {
            "changes": dict(trial.changes),
            "step_seconds": trial.seconds,
            "exposed": dict(trial.exposed),
            "idle": trial.idle,
            "peak_bytes": trial.peak_bytes,
        }
        for trial in result.found.path
    ]
    return {
        "recipe": task.config.run.name,
        "hardware": task.hardware.name,
        "cap_bytes": task.cap,
        "fits": result.found.fits,
        "plans": result.tried,
        "seconds": result.seconds,
        "path": rows,
        "words": words(task, result.found.path[-1].changes),
    }


def bytes_of(text: str) -> int:
    """Bytes that a text such as `80GiB` means. Raises ValueError."""
    try:
        size = parse_bytes(text, "memory")
    except ValueError:
        raise ValueError(f"memory = {text} (command line, --memory): not a size; fix: give one such as 80GiB") from None
    if not size:
        raise ValueError(f"memory = {text} (command line, --memory): no plan fits in nothing; fix: give more than 0")
    return size


def _gib(size: int) -> str:
    """A size in GiB, or in a smaller unit if GiB would show 0."""
    if size >= 2**30 // 100:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 // 100 else f"{size} bytes"
