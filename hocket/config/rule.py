"""Elements of a section of settings: bounds, forms and needs of fields, rules between them, and the host.

Numbers that set the size of tables and plans have a largest value, far above the largest known models. So a mistyped
number is an error at once, instead of a process that is silent for minutes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal

from hocket.variables import Finding

Switch = Literal["auto", "on", "off"]

ANY = float("inf")
WIDE = 2**20
"""Largest width of a layer."""
MANY = 2**16
"""Largest number of parts and passes."""
LONG = 2**27
"""Largest number of things with a row in a layer, such as tokens."""
MOST_RANKS = 10**6
"""Largest number of ranks of a mesh, and of each of its axes."""


@dataclass(frozen=True)
class Between:
    """Smallest and largest value of a number. In a tuple they hold for each member."""

    low: float
    """The smallest value."""
    high: float = ANY
    """The largest value; infinity is excluded even without one."""


@dataclass(frozen=True)
class Form:
    """The form of a text, or of each text of a tuple."""

    read: Callable[[str], object]
    """Raises ValueError, with the reason, for a text of another form."""
    example: str
    """A text of this form, for messages."""
    auto: bool = True
    """Whether `auto` is allowed too, without a call of `read`."""

    @property
    def words(self) -> str:
        """What to give, for messages."""
        return f"auto, or such as {self.example}" if self.auto else f"such as {self.example}"


@dataclass(frozen=True)
class OnlyWith:
    """What a setting needs to have an effect: without it, a value set by the user is refused (`hocket/rules.py`)."""

    what: str
    """Such as `mesh.pp above 1 and overlap.defer_wgrad = on`, or a key of `rules.FACTS`. It is also the fix."""
    idle: tuple[object, ...] = ()
    """Values without effect, which may always be set."""
    remark: bool = False
    """Whether a setting without effect gives a remark instead of an error: scripts for all kinds of runs set it."""


FILLED = "filled"
"""Marks a text, or texts, that must not be empty."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """The environment of a run, as plain values. `hocket.environment.probe` fills them in."""

    gpus: int = 0
    """GPUs of this host that torch can use."""
    gpu: str = ""
    """Name of the first of them."""
    kinds: tuple[str, ...] = ()
    """Distinct names of this host's GPUs, in the driver's words; empty if there are none, or if the driver was not
    asked."""
    processors: int = 0
    """SMs of the first GPU; 0 means unknown."""
    capability: tuple[int, int] = (0, 0)
    """Its compute capability; 0.0 means unknown."""
    memory: int = 0
    """Its memory in bytes; 0 means unknown."""
    cores: int = 0
    """CPU cores this process may use; 0 means unknown."""
    workers: int = 0
    """Processes that torchrun or Slurm started, over all hosts; 0 means that hocket starts them itself."""
    local_workers: int = 0
    """Workers on this host."""
    tokenizer_vocab: int = 0
    """Vocabulary size of the configured tokenizer; 0 means unknown."""
    tokenizer_begin: str = ""
    """Tokens before each document, as text; empty if there are none, or if the tokenizer was not read."""
    no_copy_engine: str = ""
    """Why the GPUs' copy engines cannot run collectives; empty if they can, or if this was not checked."""
    no_peer_memory: str = ""
    """Why GPUs of this host cannot store into each other's memory; empty if they can, or if this was not checked."""
    no_delta_kernels: str = ""
    """Why no kernels compute gated delta nets here; empty if they do, or if this was not checked."""
    documents: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Documents of each sequence of the first step, in stream order; empty: unknown. Only predictions use them."""
    variables: tuple[Finding, ...] = ()
    """Findings about the variables that decide about overlap, before hocket set any."""


Test = Callable[[Any, Host], bool]
"""Whether a configuration breaks a rule. The first argument is a `Config`, which section files cannot import."""

Words = Mapping[str, Callable[[Any, Host], object]]
"""Words in braces in reasons and fixes, besides values of settings, and the functions that give their values."""

NO_EFFECT = "no effect"
"""Prefix of the reason that a setting changes nothing."""


@dataclass(frozen=True)
class Rule:
    """A forbidden combination of settings.

    `settings` are the dotted names involved, the most likely culprit first. In `reason` and `fix`, `{name}` stands for
    the value of a setting, for `host.gpus` and the like, or for a word of its file. A rule about a setting without
    effect applies only if the user set it: `only_if_set`. A rule about a default that few want applies only if the user
    did not set it: `unless_set`. A `remark` is never an error.
    """

    settings: tuple[str, ...]
    broken: Test
    reason: str
    fix: str
    only_if_set: bool = False
    unless_set: bool = False
    remark: bool = False

    @property
    def without_effect(self) -> bool:
        """Whether the rule is about a setting that changes nothing."""
        return self.reason.startswith(NO_EFFECT)

    def each(self) -> Iterator[Rule]:
        """The rule itself."""
        yield self


@dataclass(frozen=True)
class Each:
    """The same rule for several settings: setting -> the text for `{what}`. `{it}` stands for its name."""

    about: Mapping[str, str]
    settings: tuple[str, ...]
    broken: Callable[[Any, Host, str], bool]
    reason: str
    fix: str
    only_if_set: bool = False
    remark: bool = False

    def each(self) -> Iterator[Rule]:
        """The rule for each setting."""
        for it, what in self.about.items():
            texts = (*self.settings, self.reason, self.fix)
            *names, reason, fix = (text.replace("{what}", what).replace("{it}", it) for text in texts)
            broken = partial(_broken, self.broken, it)
            yield Rule(tuple(names), broken, reason, fix, only_if_set=self.only_if_set, remark=self.remark)


def _broken(broken: Callable[[Any, Host, str], bool], it: str, c: Any, h: Host) -> bool:
    return broken(c, h, it)


# -- How a setting is read, and how a problem with one is reported -----------------------------------------------------

UNPRINTABLE = ("Cc", "Cs")
"""Unicode categories: control characters, and surrogates, by which Python represents bytes that are not text."""


def leaf(config: Any, setting: str) -> Any:
    """Value of one setting or section, named like `overlap.ep.merge`."""
    return reduce(getattr, setting.split("."), config)


def problem(setting: str, value: object, origins: Mapping[str, str], reason: str, fix: str) -> str:
    """One problem as a line: setting, value, where the value was set, the reason, and a fix."""
    origin = origins.get(setting) or origins.get("", "configuration")
    return f"{setting} = {show(value)} ({origin}): {reason}; fix: {fix}"


def show(value: object) -> str:
    """A value as one would type it after a flag."""
    if isinstance(value, tuple):
        return " ".join(map(show, value)) or "(none)"
    text = str(value) if value != "" else "(empty)"
    return "".join(ascii(x)[1:-1] if unicodedata.category(x) in UNPRINTABLE else x for x in text)
