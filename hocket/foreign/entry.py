"""What a table says of one foreign setting: what it becomes, why it is not needed, or that it is not there.

Tables are TOML files; most of their rules are here.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

State = Literal["becomes", "not needed", "not there", "not known"]


@dataclass(frozen=True)
class Answer:
    """What one foreign setting is in hocket."""

    state: State
    settings: Mapping[str, Any] = field(default_factory=dict)
    """hocket's settings by dotted name; only what `becomes` something has any."""
    words: str = ""
    """Why, in words."""


@dataclass(frozen=True)
class Given:
    """Everything that was given, for entries that mean something only together with others."""

    values: Mapping[str, Any]
    """By the name that the table has it under."""
    gpus: int = 0
    """Number of ranks; 0 is not known."""

    def product(self, names: tuple[str, ...]) -> int:
        """The product of settings; those that were not given count as 1."""
        return math.prod(self.number(name) for name in names)

    def number(self, *names: str, default: int = 1) -> int:
        """The first of these settings that was given, as a whole number."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default


Rule = Callable[[Any, Given], Answer]


@dataclass(frozen=True)
class Entry:
    """One row of a table: names of one setting, the type of its value, and what it is in hocket."""

    names: tuple[str, ...]
    takes: type
    """`object` is anything."""
    rule: Rule


def same(setting: str) -> Rule:
    """The same thing under another name."""
    return lambda value, given: Answer("becomes", {setting: value})


def floats(setting: str, factor: float = 1.0, words: str = "") -> Rule:
    """The same number, or a multiple of it, where hocket wants one with a point."""
    return lambda value, given: Answer("becomes", {setting: factor * value}, words)


def expert_ranks(data_ranks: Callable[[Given], int], others: tuple[str, ...]) -> Rule:
    """Expert ranks, which are data ranks and those of `others`, names of other axes. 0 data ranks: not known."""

    def rule(value: Any, given: Given) -> Answer:
        ranks = data_ranks(given) * given.product(others)
        if ranks and value > 0 and ranks % value:
            words = f"{value} does not divide the {ranks} data and tensor ranks of a pipeline rank"
            return Answer("not there", words=words)
        return Answer("becomes", {"mesh.ep": value})

    return rule


def switch(setting: str, words: str = "") -> Rule:
    """True is `on`, False `off`."""
    return lambda value, given: Answer("becomes", {setting: "on" if value else "off"}, words)


def when(settings: Mapping[str, Any], words: str = "", otherwise: str = "that is how it is without it") -> Rule:
    """These settings if it is true; not needed if it is false."""

    def rule(value: Any, given: Given) -> Answer:
        return Answer("becomes", settings, words) if value else Answer("not needed", words=otherwise)

    return rule


def either(settings: Mapping[str, Any], others: Mapping[str, Any]) -> Rule:
    """These settings if it is true, the others if it is false."""
    return lambda value, given: Answer("becomes", settings if value else others)


def always(words: str) -> Rule:
    """It is always done, so it need not be asked for, and cannot be turned off."""

    def rule(value: Any, given: Given) -> Answer:
        if value is False:
            return Answer("not there", words=f"it cannot be turned off: {words}")
        return Answer("not needed", words=words)

    return rule


def never(words: str) -> Rule:
    """It is not there; nothing is missing where it is off."""

    def rule(value: Any, given: Given) -> Answer:
        if value in (False, None, 0, "none", "None", "disabled", []):
            return Answer("not needed", words="it is off, and hocket has none")
        return Answer("not there", words=words)

    return rule


def no_use(words: str) -> Rule:
    """Whatever its value: there is nothing that it could change."""
    return lambda value, given: Answer("not needed", words=words)


def only(accepted: Any, words: str, as_it_is: str) -> Rule:
    """One value is how hocket does it; every other is not there."""

    def rule(value: Any, given: Given) -> Answer:
        return Answer("not needed", words=as_it_is) if value == accepted else Answer("not there", words=words)

    return rule


def choice(instead: str, *answers: tuple[Any, Mapping[str, Any]]) -> Rule:
    """An answer for each value, `null` for None; `instead` are the words for any other."""
    table = {None if value == "null" else value: _answer(said) for value, said in answers}

    def rule(value: Any, given: Given) -> Answer:
        found = None if isinstance(value, list) else table.get(value)
        return found or Answer("not there", words=instead)

    return rule


def _answer(said: Mapping[str, Any]) -> Answer:
    """Settings, and `words` if there are any; or only words, as `needless` or as `missing`."""
    if "needless" in said:
        return Answer("not needed", words=said["needless"])
    if "missing" in said:
        return Answer("not there", words=said["missing"])
    return Answer("becomes", {name: value for name, value in said.items() if name != "words"}, said.get("words", ""))


def tensor(settings: Mapping[str, Any], degree: str, negative: bool = False) -> Rule:
    """Settings of tensor-parallel layers where it is true (`negative`: false); without tensor ranks they have no use.

    `degree` is the name under which the number of tensor ranks is given.
    """

    def rule(value: Any, given: Given) -> Answer:
        if given.number(degree) == 1:
            return Answer("not needed", words="there are no tensor ranks")
        if bool(value) == negative:
            return Answer("not needed", words="a rule chooses for each product and direction")
        return Answer("becomes", settings)

    return rule


def started(a_host: tuple[str, ...], hosts: tuple[str, ...]) -> Callable[[Given], int]:
    """Ranks that the words in front of a script start, by names of those of one host and of hosts; 0 if none say."""
    return lambda given: given.number(*a_host, default=0) * given.number(*hosts)


def ranks(given: Given, sizes: tuple[str, ...]) -> Answer:
    """Data ranks: those that the other axes leave, whose sizes have these names."""
    if not given.gpus:
        return Answer("not there", words="without --gpus the number of data ranks, mesh.dp, is not known")
    other = given.product(sizes)
    if other < 1 or given.gpus % other:
        words = f"{given.gpus} ranks cannot be split into {other}, the product of the other axes"
        return Answer("not there", words=words)
    return Answer("becomes", {"mesh.dp": given.gpus // other}, f"{given.gpus} ranks, {other} for every data rank")


_TYPES: Mapping[str, type] = {one.__name__: one for one in (bool, int, float, str, list, object)}
_RULES: Mapping[str, Callable[..., Rule]] = {
    one.__name__: one for one in (same, floats, switch, when, either, always, never, no_use, only, choice, tensor)
}


def file_of(name: str) -> dict[str, Any]:
    """The tables of a file of this folder, by their titles. Lists are tuples, as in settings."""
    return _tuples(tomllib.loads((files("hocket.foreign") / f"{name}.toml").read_text("utf-8")))


def entries(name: str, own: Mapping[str, Rule]) -> tuple[Entry, ...]:
    """The rows of a file of this folder: `names = [type, rule, what the rule needs]`. `own` are rules of its system."""
    return tuple(
        Entry(tuple(names.split()), _TYPES[takes], own[rule] if rule in own else _RULES[rule](*needs))
        for title, table in file_of(name).items()
        if title not in (ALIASES, RECIPES)
        for names, (takes, rule, *needs) in table.items()
    )


ALIASES, RECIPES = "aliases", "recipes"
"""Titles of tables of names that stand for others: settings, and models of which hocket has a recipe."""


def model_of(name: str, recipes: Mapping[str, Any], words: str) -> Answer:
    """A recipe with the model of this name; or that there is none. `words` say what differs in all of them.

    Neither capitals matter nor what stands between the name's parts.
    """
    same = {re.sub(r"[ _-]", "_", each).lower(): each for each in recipes}
    each = same.get(re.sub(r"[ _-]", "_", name).lower())
    if each is None:
        return Answer("not there", words="no recipe has this model; --recipe names one to stand on")
    found = recipes[each]
    settings = found if isinstance(found, Mapping) else {"recipe": found}
    return Answer("becomes", settings, words)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tuples(one) for name, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
