"""Searches the plan settings that make a step shortest under a memory cap, and reports them. Imports no torch.

Note: [How the search goes]
All combinations would be tens of thousands of plans. So the search prices all orders of microbatches and stages, each
as given and, under a cap, with the strategy and the recomputed parts that `auto` chooses for it under that cap: an
order that needs much memory may be the best one with a part recomputed. It then improves the best plans of three orders
group by group, and tries all combinations inside a group. If a value makes a step shorter but too large, or smaller but
longer, the search tries it again with the parts recomputed that `auto` chooses. In the end it undoes changes that gain
nothing. The search is bounded by the number of simulated operations, not by time, so the same command finds the same
plan. Compared with all combinations of small recipes the search stays within 1 % (`tests/plan/test_search.py`).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, get_args

from hocket.collector import without_collector
from hocket.config import Config, Strategy
from hocket.config.rule import leaf, show
from hocket.config.schema import changed, command_words, types
from hocket.planning import network, predict, program_of
from hocket.predict.arrivals import arrival_bytes
from hocket.predict.cost import CostTable
from hocket.predict.hardware import hardware_of
from hocket.predict.simulate import Kind
from hocket.program.check import assert_valid
from hocket.program.layer import MERGED
from hocket.program.stages import layout_of
from hocket.resolve import Settings
from hocket.rules import named_parts
from hocket.sizes import duration
from hocket.tune.choose import balanced, part_sets
from hocket.tune.rules import TRANSPORT, chose_copies
from hocket.tune.trials import USABLE, Changes, Price, Trials, best, continued, model_costs, repeats, steady

BEAM = 3
"""Number of orders, with their numbers of chunks, for which all other settings are tried."""
WORTH = 1e-3
"""Share of the step that a change of a setting must gain."""
SPEND = 2_000_000
"""Largest number of simulated operations, without those of the plans that are shown."""
DOUBT = 0.07
"""Errors of the predicted gain of one plan over another are below this: at most 6.6 % of 18 pairs on four H200."""

# -- What is tried -----------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """A setting that the search may change, and the values that it tries in a plan."""

    setting: str
    values: Callable[[Config, CostTable], Sequence[Any]]
    instead: bool = False
    """Whether the values, if there are any, replace the setting's present value instead of joining it."""


def _orders(c: Config, costs: CostTable) -> Sequence[str]:
    """All orders except the one that `auto` takes for one pipeline rank."""
    usual = "1f1b" if c.plan.chunks == 1 else "interleaved"
    return (usual, "sequential", "zb_h1", "zb_v", "merged_v") if c.mesh.pp > 1 else ()


def _chunks(c: Config, costs: CostTable) -> Sequence[int]:
    """Numbers of chunks with equally many layers; all numbers, if ranks cannot have equally many layers."""
    per_rank, rest = divmod(c.model.layers, c.mesh.pp)
    if c.mesh.pp == 1:
        return ()
    own = {"sequential": (1,), "zb_h1": (1,), "zb_v": (2,), "merged_v": (2,)}.get(c.plan.order, (1, 2, 3, 4, 6, 8))
    most = (c.model.layers + 2) // c.mesh.pp
    return [count for count in own if count <= most and (rest or per_rank % count == 0)]


def _balanced(c: Config, costs: CostTable) -> Sequence[tuple[int, ...]]:
    """The split that balances the compute time of all ranks."""
    if c.mesh.pp == 1 or c.mesh.pp * c.plan.chunks > c.model.layers + 2:
        return ()
    return [balanced(layout_of(changed(c, {STAGES: ()})), costs)]


def _parts(setting: str) -> Callable[[Config, CostTable], list[tuple[str, ...]]]:
    """The recomputed or offloaded parts without one of them, and with one more in all layers."""

    def values(c: Config, costs: CostTable) -> list[tuple[str, ...]]:
        items: tuple[str, ...] = leaf(c, setting)
        fewer = [tuple(other for other in items if other != item) for item in items]
        more = (part for part in part_sets(c, setting)[-1] if part not in named_parts(items))
        return [*fewer, *((*items, part) for part in more)]

    return values


def _groups(c: Config, costs: CostTable) -> Sequence[int]:
    """The smallest group, and one large enough to hide the p2p transfer around the ring."""
    return (0, 2 * c.mesh.pp) if c.mesh.pp > 1 else ()


OFFLOAD, RECOMPUTE, STAGES = "plan.offload", "plan.recompute", "plan.layers_per_stage"
ORDER: tuple[Choice, ...] = (
    Choice("plan.order", _orders),
    Choice("overlap.ep.merge", lambda c, costs: ("on", "off")),
    Choice("plan.chunks", _chunks),
    Choice(STAGES, _balanced, instead=True),
)
"""Settings that decide which microbatch runs when, and where."""
RELIEF: tuple[Choice, ...] = (
    Choice("overlap.dp.strategy", lambda c, costs: get_args(Strategy)),
    Choice(RECOMPUTE, _parts(RECOMPUTE)),
)
"""Settings that trade time for memory, or memory for time."""
GROUPS: tuple[tuple[Choice, ...], ...] = (
    ORDER,
    RELIEF,
    (
        Choice("plan.group", _groups),
        Choice("overlap.ep.merge_ends", lambda c, costs: ("on", "off")),
    ),
    (
        Choice("overlap.defer_wgrad", lambda c, costs: ("on", "off")),
        Choice("overlap.pp.defer_layers", lambda c, costs: (0, "attn:1", "attn:2", "attn", 1, 2, -1)),
    ),
    (Choice("overlap.cp.method", lambda c, costs: ("gather", "heads") if c.mesh.cp > 1 else ()),),
    (Choice(OFFLOAD, _parts(OFFLOAD)), Choice(RECOMPUTE, _parts(RECOMPUTE))),
    (Choice("overlap.pp.defer_head", lambda c, costs: (0, 1, 2, -1)),),
    (Choice("plan.layer_order", lambda c, costs: tuple(MERGED)),),
    (Choice("overlap.dp.prefetch", lambda c, costs: (0, 1, 2, 4)),),
)
"""Groups of settings that are searched together, the most important first. See Note: [How the search goes]."""
SEARCHED = tuple(dict.fromkeys(choice.setting for group in GROUPS for choice in group))
"""All settings that a search may change."""

_CHOSEN_ONCE = (
    "train.transport",
    "plan.graphs",
    STAGES,
    OFFLOAD,
    RECOMPUTE,
    "overlap.dp.strategy",
    "overlap.dp.update",
    "overlap.ep.splits",
    "overlap.pp.defer_layers",
    "overlap.pp.defer_head",
)
"""Settings that `auto` chooses by simulating steps, which is too slow for every plan of a search."""


# -- The search --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a search: the recipe, its limits and its costs."""

    config: Config
    """The configuration as the user gave it. Automatic settings are still open."""
    origins: Mapping[str, str]
    """Where settings were set. Settings from the command line stay fixed."""
    resolve: Callable[..., Settings]
    """From a configuration, origins, `price` and `memory` (0: the hardware's) to settings, or a ValueError."""
    cap: int = 0
    """Bytes that a rank may hold; 0 means no limit."""

    def settled(self, changes: Changes, price: Price = model_costs, memory: int = 0) -> Settings:
        """The settings of a plan. Raises ValueError if they are refused."""
        origins = {**self.origins, **dict.fromkeys(changes, "search")}
        return self.resolve(changed(self.config, changes), origins, price, memory=memory)

    @cached_property
    def start(self) -> Settings:
        """The settings of the plan that the search begins with."""
        return self.settled({})

    @cached_property
    def chosen_once(self) -> Task:
        """The same task, with the settings that `auto` would choose by simulation fixed as in the first plan."""
        chosen = {name: leaf(self.start, name) for name in _CHOSEN_ONCE}
        if self.start.overlap.ep.merge_ends == "off":  # "off" is always possible
            chosen["overlap.ep.merge_ends"] = "off"
        return replace(self, config=changed(self.config, chosen))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A plan and its simulation."""

    changes: Changes
    """Settings by dotted name in which it differs from the first plan of the search."""
    seconds: float
    """Seconds of one step."""
    exposed: Mapping[Kind, float] = field(default_factory=dict)
    """Seconds in which communication of a kind is exposed, mean over ranks."""
    idle: float = 0.0
    """Seconds in which nothing runs, mean over ranks."""
    nbytes: int
    """Peak bytes of the rank that holds most."""
    ops: int = 0
    """Operations that were simulated for it."""

    def fits(self, cap: int) -> bool:
        """Whether it keeps to a cap; 0 means no cap."""
        return not cap or self.nbytes <= cap


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a search, and its effort."""

    path: tuple[Trial, ...]
    """Plans from the first one to the winner. Each has one change more than the one before. All are simulated in
    full."""
    fits: bool
    """Whether the winner keeps to the cap. If not, no plan did, and the winner is one that needs the least memory."""
    tried: int
    """Different plans that were priced."""
    seconds: float
    """Seconds of the search; 0 leaves them out of reports."""


@without_collector()
def search(task: Task) -> Result:
    """Search. Raises ValueError if the configuration itself is refused."""
    begun = time.perf_counter()
    found = Search(task)
    path = found.path()
    assert_valid(program_of(task.chosen_once.settled(path[-1].changes)))
    return Result(path=path, fits=path[-1].fits(task.cap), tried=found.tried, seconds=time.perf_counter() - begun)


class Search:
    """One search that starts from the settings of a run. It simulates equal plans once."""

    def __init__(self, task: Task) -> None:
        self._cap, self._task = task.cap, task.chosen_once
        self.start = task.start
        self._price = Trials().costs
        self.costs = self._price(self.start)
        self._hardware = hardware_of(self.start)
        self._order, *self._groups = (
            [choice for choice in group if choice.setting not in task.origins] for group in GROUPS
        )
        self._settings: dict[tuple[Any, ...], Settings | None] = {}
        self._trials: dict[tuple[Any, bool], Trial] = {}
        self._spent = 0

    @property
    def tried(self) -> int:
        """Different plans that were priced."""
        return len({plan for plan, _ in self._trials})

    def path(self) -> tuple[Trial, ...]:
        """Search. Returns the path to the winner, one change at a time. Dependent changes come together."""
        winner = self._pruned(self._best([self._improved(lead) for lead in self._leads()]))
        path, changes = [self._tried({}, whole=True)], dict[str, Any]()
        for name in (name for name in SEARCHED if name in winner.changes):
            changes[name] = winner.changes[name]
            if step := self.trial(changes, whole=True):
                path.append(step)
        return tuple(path[: path.index(self._best(path)) + 1])

    def _best(self, trials: Sequence[Trial], worth: float = WORTH) -> Trial:
        return trials[best(trials, self._cap, worth, near=1.0)[0]]

    def _leads(self) -> list[Trial]:
        """The best plans of the best orders."""
        tried = [self._tried({})]
        for changes in self._combined({}, self._order):
            relieved = self._as_auto(changes, [choice.setting for choice in RELIEF])
            tried += filter(None, [self.trial(changes), relieved])
        leads: dict[tuple[Any, ...], Trial] = {}
        lacks = {id(trial): max(0, trial.nbytes - self._cap) if self._cap else 0 for trial in tried}
        for trial in sorted(tried, key=lambda trial: (lacks[id(trial)], trial.seconds, trial.nbytes)):
            plan = changed(self.start, trial.changes)
            leads.setdefault((plan.plan.order, plan.overlap.ep.merge, plan.plan.chunks), trial)
        return list(leads.values())[:BEAM]

    def _improved(self, trial: Trial) -> Trial:
        """A plan improved by every group in turn. A group is tried again as long as it helps."""
        for group in self._groups:
            while (found := self._best([trial, self._best([trial, *self._around(trial, group)], 0.0)])) is not trial:
                trial = found
        return trial

    def _around(self, trial: Trial, group: Sequence[Choice]) -> Iterator[Trial]:
        """The plans with every combination of a group's values in place of its own, or as `auto` chooses them."""
        names = [choice.setting for choice in group]
        if OFFLOAD in names and (found := self._as_auto(trial.changes, names)):
            yield found
        for changes in self._combined(trial.changes, group):
            if found := self.trial(changes):
                yield found
                shorter, smaller = found.seconds < trial.seconds, found.nbytes < trial.nbytes
                if (not found.fits(self._cap) if shorter else smaller) and (
                    relieved := self._as_auto(changes, [RECOMPUTE])
                ):
                    yield relieved

    def _combined(self, changes: Changes, group: Sequence[Choice]) -> Iterator[Changes]:
        """Changes with each combination of values. The values of a setting may depend on the settings before it."""
        if not group:
            yield changes
            return
        choice, *others = group
        given = choice.values(changed(self.start, changes), self.costs)
        there = leaf(self.start, choice.setting)
        rest = {name: value for name, value in changes.items() if name != choice.setting}
        kept = () if choice.instead and given else (there, changes.get(choice.setting, there))
        for value in dict.fromkeys((*kept, *given)):
            yield from self._combined(rest if value == there else {**rest, choice.setting: value}, others)

    def _pruned(self, trial: Trial) -> Trial:
        """A plan without the changes that gain nothing."""
        for name in sorted(trial.changes, key=SEARCHED.index):
            without = self.trial({other: value for other, value in trial.changes.items() if other != name})
            trial = self._best([without, trial]) if without else trial
        return trial

    def _as_auto(self, changes: Changes, names: Collection[str]) -> Trial | None:
        """A plan with some settings as `auto` chooses them under the cap. None if the rules refuse that."""
        names = [name for name in names if name not in self._task.origins]
        if not self._cap or not names:
            return None
        left = {name: value for name, value in changes.items() if name not in names}
        open_ = {name: ("auto",) if name in (OFFLOAD, RECOMPUTE) else "auto" for name in names}
        settings = self._settled({**left, **open_}, int(self._cap / USABLE))
        if settings is None:
            return None
        found = {name: leaf(settings, name) for name in names}
        return self.trial(left | {name: value for name, value in found.items() if value != leaf(self.start, name)})

    def _tried(self, changes: Changes, whole: bool = False) -> Trial:
        """The trial of a plan that is known to be possible."""
        trial = self.trial(changes, whole)
        assert trial is not None, f"refused after all: {changes}"
        return trial

    def trial(self, changes: Changes, whole: bool = False) -> Trial | None:
        """The simulation of a plan. None if rules refuse it, if a setting has no effect, or if the budget is spent.

        Without `whole` a long step may be priced by its period: see Note: [Long steps are priced by their period].
        """
        settings = self._settled(changes)
        if settings is None:
            return None
        key = ((settings.plan, settings.overlap), whole or not repeats(settings))
        if key not in self._trials:
            if not whole and self._spent > SPEND:
                return None
            self._trials[key] = found = self._simulated(settings) if key[1] else self._estimated(settings)
            self._spent += 0 if whole else found.ops
        return replace(self._trials[key], changes=dict(changes))

    def _settled(self, changes: Changes, memory: int = 0) -> Settings | None:
        """The settings of a plan; None if they are refused."""
        key = (memory, *sorted(changes.items()))
        if key not in self._settings:
            try:
                self._settings[key] = self._task.settled(changes, self._price, memory)
            except ValueError:
                self._settings[key] = None
        return self._settings[key]

    def _estimated(self, settings: Settings) -> Trial:
        """See Note: [Long steps are priced by their period]."""
        few, more = steady(settings)
        steps = (replace(settings, train=replace(settings.train, microbatches=n)) for n in (few, more))
        short, long = (self._simulated(step) for step in steps)
        periods = (settings.train.microbatches - few) / (more - few)
        return replace(long, seconds=continued(short.seconds, long.seconds, periods), ops=short.ops + long.ops)

    def _simulated(self, settings: Settings) -> Trial:
        program = program_of(settings)
        timeline = predict(settings, program, self._hardware)
        ranks = timeline.ranks
        return Trial(
            changes={},
            seconds=float(timeline.makespan),
            exposed={kind: sum(float(use.exposed[kind]) for use in ranks) / len(ranks) for kind in ranks[0].exposed},
            idle=sum(float(use.idle) for use in ranks) / len(ranks),
            nbytes=max(use.peak_bytes for use in ranks) + arrival_bytes(settings),
            ops=len(program),
        )


# -- Reports -----------------------------------------------------------------------------------------------------------


def report(task: Task, result: Result) -> str:
    """The result of a search as text for a terminal."""
    cap = f"; at most {_gib(task.cap)} on a rank" if task.cap else ""
    settings = task.start
    return "\n".join(
        [
            f"SEARCH  {settings.run.name} on {hardware_of(task.start).name}, {settings.precision.compute}{cap}",
            f"{result.tried} plans tried" + (f" in {result.seconds:.1f} s" if result.seconds else ""),
            "",
            *_table(result.path, task.cap),
            "",
            *_verdict(task, result),
            *(f"note: {note}" for note in _notes(task, result, 1 - result.path[-1].seconds / result.path[0].seconds)),
        ]
    )


def _table(path: tuple[Trial, ...], cap: int) -> Iterator[str]:
    """A row for each trial. Gains are relative to the first trial."""
    rows = []
    for n, trial in enumerate(path):
        added = [name for name in trial.changes if n and name not in path[n - 1].changes]
        name = ", ".join(f"{setting} = {show(trial.changes[setting])}" for setting in added) or "as given"
        times = [trial.seconds, *trial.exposed.values(), trial.idle]
        over = " (over)" if cap and trial.nbytes > cap else ""
        cells = [duration(times[0]), f"{1 - trial.seconds / path[0].seconds:.1%}", *(duration(t) for t in times[1:])]
        rows.append([("+ " if n > 1 else "") + name, *cells, _gib(trial.nbytes) + over])
    head = ["", "step", "gain", *(f"exp. {kind}" for kind in path[0].exposed), "idle", "peak memory"]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()


def _verdict(task: Task, result: Result) -> Iterator[str]:
    command = shlex.join(words(task, result.path[-1].changes))
    if not result.fits:
        yield (
            f"NOTHING FITS: a rank may hold {_gib(task.cap)}, and the smallest need found is "
            f"{_gib(result.path[-1].nbytes)}, with {command}"
        )
        yield "shorter sequences, fewer train.sequences or more ranks need less"
    elif len(result.path) == 1:
        yield f"Nothing tried is shorter than the step as given by {WORTH:.1%} or more."
    else:
        yield f"hocket train {command}"


def _notes(task: Task, result: Result, gain: float) -> Iterator[str]:
    if 0 < gain < DOUBT:
        yield f"predicted gains have been off by up to {DOUBT:.0%}: time both plans before relying on this one"
    settings = task.start
    if chose_copies(settings, settings.decisions):
        yield next(str(decision) for decision in settings.decisions if decision.setting == TRANSPORT)
    if wide := network(settings):
        yield wide


def words(task: Task, changes: Changes) -> list[str]:
    """Words for `hocket train` that give a plan: recipe or file, the user's settings, and what the search changed.

    Also settings that `auto` would now choose differently: the search fixed some as chosen for its first plan.
    """
    settings, names = task.chosen_once.settled(changes), set(changes)
    while True:
        there = task.settled({name: leaf(settings, name) for name in names})
        otherwise = {name for name in types() if leaf(settings, name) != leaf(there, name)} - names
        otherwise = {name for name in otherwise if _works(task, settings, names | {name})}
        if not otherwise:
            return command_words(settings, task.origins, names)
        names |= otherwise


def _works(task: Task, settings: Settings, names: set[str]) -> bool:
    """Whether the rules accept these values from a user: some have no effect with the others."""
    try:
        task.settled({name: leaf(settings, name) for name in names})
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
            "peak_bytes": trial.nbytes,
        }
        for trial in result.path
    ]
    return {
        "recipe": task.config.run.name,
        "hardware": hardware_of(task.start).name,
        "cap_bytes": task.cap,
        "fits": result.fits,
        "plans": result.tried,
        "seconds": result.seconds,
        "path": rows,
        "words": words(task, result.path[-1].changes),
    }


def _gib(size: int) -> str:
    """A size in GiB, or in a smaller unit if GiB would show 0."""
    if size >= 2**30 // 100:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 // 100 else f"{size} bytes"
