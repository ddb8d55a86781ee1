"""Names and values of another system -> hocket's settings, with a word on every one that was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hocket.foreign.entry import Answer, Entry, Given, State
from hocket.foreign.read import Pairs, Stray
from hocket.problems import stop_if
from hocket.settings.schema import beyond, types
from hocket.settings.suggest import meant, meant_elsewhere
from hocket.settings.tomlfile import MOST_KEYS
from hocket.typed import describe, is_a

Default = tuple[str, Callable[[Given], Answer | None]]
"""A default of a system that differs from hocket's: words for it, and the settings that it becomes."""

RANKS, STARTED = "(--gpus)", "(started by torchrun)"
"""Words for the source of the number of ranks: hocket's own flag, or what was given."""

Assumed = tuple[str, tuple[str, ...]]
"""One of hocket's settings that is 1 unless the user gave it, and the other system's names for it.

So a mesh is translated completely. A part that is left out would come from the recipe that the file builds on.
"""


@dataclass(frozen=True)
class System:
    """Another system: its name, its table, and its defaults."""

    name: str
    entries: Sequence[Entry]
    defaults: Sequence[Default] = ()
    spelled: Callable[[str], str] = field(default=lambda name: name)
    """How the table spells a name that was given."""
    assumed: Sequence[Assumed] = ()
    started: Callable[[Given], int] = field(default=lambda given: 0)
    """Number of ranks that the given settings start; 0 if they do not say."""
    filled: str = ""
    """A value that some other program fills in."""
    sizes: tuple[str, ...] = ()
    """hocket's settings that make a whole model together with the system's defaults. None: they never do."""

    def find(self, name: str) -> Entry | None:
        """The row of a name."""
        return next((row for row in self.entries if self.spelled(name) in row.names), None)

    def known(self) -> list[str]:
        """All names of the table."""
        return [name for row in self.entries for name in row.names]


@dataclass(frozen=True)
class Row:
    """One setting that was given, or one of the system's defaults."""

    name: str
    value: Any
    answer: Answer
    given: bool = True
    """False for a default."""

    @property
    def written(self) -> str:
        """As it was given."""
        if not self.given or self.value is True or isinstance(self.value, Stray):
            return self.name
        value = " ".join(map(str, self.value)) if isinstance(self.value, list) else str(self.value)
        return f"{self.name} {value}"


@dataclass(frozen=True)
class Translation:
    """Everything that was given, and hocket's settings."""

    system: str
    rows: tuple[Row, ...]
    settings: Mapping[str, Any]
    sources: Mapping[str, str]
    """Where each of hocket's settings comes from, as it was given."""

    lacking: tuple[str, ...] = ()
    """hocket's settings without which the model is not known; empty if it is."""

    def of(self, state: State) -> list[Row]:
        """The rows of one kind."""
        return [row for row in self.rows if row.answer.state == state]

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for is met."""
        return not self.of("not there") and not self.of("not known")


def translate(system: System, pairs: Pairs, gpus: int = 0, recipe: str = "") -> Translation:
    """Look every pair up. `gpus` is the number of ranks, 0 if it is not known; `recipe` one of hocket's, to stand on.

    Raises ValueError, with a line for each, for values that cannot be, and for names that contradict each other.
    """
    if len(pairs) > MOST_KEYS:
        raise ValueError(f"{len(pairs)} settings ({system.name}): more than {MOST_KEYS}; fix: those of one run")
    problems: list[str] = []
    values: dict[str, Any] = {}
    for name, value in pairs:
        row = None if isinstance(value, Stray) or _open(system, value) else system.find(name)
        if row is not None:
            problems += _wrong(system, row, name, value)
            spelled = system.spelled(name)
            before = values.setdefault(name if spelled.endswith("*") else spelled, value)
            if before is not value and before != value:
                problems.append(f"{name} = {value} ({system.name}): it is {before}, too; fix: leave one of them out")
    stop_if(problems)
    given = Given(values, gpus or system.started(Given(values)))
    rows: list[Row] = []
    for name, value in pairs:
        rows.append(Row(name, value, _answer(system, name, value, given)))
    for words, make in system.defaults:
        answer = make(given)
        source = STARTED if words == RANKS and given.gpus > gpus else words
        rows += [Row(source, None, answer, given=False)] if answer is not None else []
    rows += _assumed(system, given, rows)
    settings: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for one in rows:
        for setting, value in one.answer.settings.items():
            if settings.get(setting, value) != value:
                problems.append(
                    f"{one.written} ({system.name}): becomes {setting} = {value}, and {sources[setting]} makes it "
                    f"{settings[setting]}; fix: leave one of them out"
                )
            settings[setting], sources[setting] = value, one.written
    stop_if(problems)
    if recipe:
        settings["recipe"], sources["recipe"] = recipe, "--recipe"
    lacking = tuple(name for name in system.sizes if name not in settings) if system.sizes else ("recipe",)
    return Translation(system.name, tuple(rows), settings, sources, () if "recipe" in settings else lacking)


def _open(system: System, value: Any) -> str:
    """Why a value is not known yet; empty if it is."""
    if system.filled and value == system.filled:
        return f"the program that starts {system.name} fills it in: give its value"
    texts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str)]
    return "it is set outside of what was given: give its value" if any("$" in each for each in texts) else ""


def _answer(system: System, name: str, value: Any, given: Given) -> Answer:
    """What a pair is in hocket."""
    if isinstance(value, Stray):
        return Answer("not known", words=value)
    row = system.find(name)
    if row is None:
        return _unknown(system, name)
    answer = row.rule(value, given) if not (open_ := _open(system, value)) else row.rule(1, given)
    if not open_:
        return fitting(answer)
    if answer.state == "not needed" and answer == row.rule(0, given):  # what has no use has none for any value
        return answer
    return Answer("not there", words=open_)


def _assumed(system: System, given: Given, rows: Sequence[Row]) -> list[Row]:
    """A row for what nothing was said about, if there is any."""
    said = {setting for row in rows for setting in row.answer.settings}
    open_ = {name: 1 for name, names in system.assumed if name not in said and not given.values.keys() & set(names)}
    words = f"assumed: {system.name} is told nothing else, and what a recipe has would change the number of ranks"
    return [Row("(not given)", None, Answer("becomes", open_, words), given=False)] if open_ else []


_WANTED: Mapping[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a word",
    list: "words",
}


def _wrong(system: System, row: Entry, name: str, value: Any) -> list[str]:
    """A line if the value is of another type than the setting's."""
    if row.takes is object or value is None:
        fits = True
    elif row.takes in (str, list):
        fits = value is not True
    elif row.takes is bool:
        fits = isinstance(value, bool) or value in (0, 1)
    else:
        fits = isinstance(value, (int, float) if row.takes is float else int) and not isinstance(value, bool)
    if fits:
        return []
    if row.takes is bool and name.startswith("--"):
        return [f"{name} = {value} ({system.name}): takes no value; fix: leave out {value}"]
    shown, wanted = "(nothing)" if value is True else value, _WANTED[row.takes]
    return [f"{name} = {shown} ({system.name}): not {wanted}; fix: give {wanted}"]


def fitting(answer: Answer) -> Answer:
    """The answer, unless it gives a setting of hocket's a value that it cannot have."""
    for setting, value in answer.settings.items():
        if setting == "recipe":
            continue
        hint = types()[setting]
        if not is_a(value, hint):
            return Answer("not there", words=f"{setting} is {describe(hint)}, not {value}")
        if bounds := beyond(setting, value):
            return Answer("not there", words=f"{setting} is {bounds}, not {value}")
    return answer


def _unknown(system: System, name: str) -> Answer:
    known = system.known()
    guess = meant_elsewhere(name, known) or meant(system.spelled(name), known)
    words = f"did you mean {guess}?" if guess else "nothing about parallelism, overlap, precision or recomputation"
    return Answer("not known", words=words)
