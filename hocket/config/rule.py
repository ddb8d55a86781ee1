"""What a section of settings is made of: bounds, forms and needs of its fields, rules between them, and the host.

Numbers that set the size of tables and plans have a largest value. So a mistyped number is an error at once, instead of
a process that is silent for minutes. All are far above the largest known models.
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
"""Largest number of things that have a row in a layer."""
MOST_RANKS = 10**6
"""Largest number of ranks of a mesh, and of each of its axes."""


@dataclass(frozen=True)
class Between:
    """Smallest and largest value of a number. In a tuple they hold for each member."""

    low: float
    """The smallest."""
    high: float = ANY
    """The largest; no infinity, even without one."""


@dataclass(frozen=True)
class Form:
    """The form of a text, or of each text of a tuple."""

    read: Callable[[str], object]
    """Raises ValueError, with the reason, for a text of another form."""
    example: str
    """A text of this form, for messages."""
    auto: bool = True
    """Whether it may be `auto`, too, which is not read."""

    @property
    def words(self) -> str:
        """What to give, for messages."""
        return f"auto, or such as {self.example}" if self.auto else f"such as {self.example}"


@dataclass(frozen=True)
class OnlyWith:
    """What a setting needs to have an effect: without it, one that the user set is refused (`hocket/rules.py`)."""

    what: str
    """Such as `mesh.pp above 1 and overlap.defer_wgrad = on`, or a key of `rules.FACTS`. It is the fix, too."""
    idle: tuple[object, ...] = ()
    """Values that ask for nothing, which may be set anywhere."""
    remark: bool = False
    """Whether a setting without effect is a remark and no error: scripts for all kinds of runs set it."""


FILLED = "filled"
"""Marks a text, or texts, that must not be empty."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """The surroundings of a run, as plain values. `hocket.environment.probe` fills them in."""

    gpus: int = 0
    """GPUs of this host that torch can use."""
    gpu: str = ""
    """Name of the first of them."""
    kinds: tuple[str, ...] = ()
    """Names of the different GPUs of this host, in the driver's words; empty if there are none, or if the driver was
    not asked."""
    processors: int = 0
    """Processors of the first of them; 0 means not known."""
    capability: tuple[int, int] = (0, 0)
    """Its compute capability; 0.0 means not known."""
    memory: int = 0
    """Bytes of its memory; 0 means not known."""
    cores: int = 0
    """CPU cores this process may use; 0 means not known."""
    workers: int = 0
    """Processes that torchrun or Slurm started, over all hosts; 0 means that hocket starts them itself."""
    local_workers: int = 0
    """Workers on this host."""
    tokenizer_vocab: int = 0
    """Number of tokens of the configured tokenizer; 0 means not known."""
    tokenizer_begin: str = ""
    """Tokens before each document, as text; empty if there are none, or if the tokenizer was not looked for."""
    no_copy_engine: str = ""
    """Why the GPUs' copy engines cannot serve collectives; empty if they can, or if this was not checked."""
    no_peer_memory: str = ""
    """Why GPUs of this host cannot store into each other's memory; empty if they can, or if this was not checked."""
    no_delta_kernels: str = ""
    """Why no kernels compute gated delta nets here; empty if they do, or if this was not checked."""
    documents: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Documents of each sequence of the first step, as they are read; empty: not known. Predictions alone use them."""
    variables: tuple[Finding, ...] = ()
    """Findings about the variables that decide about overlap, before hocket set any."""


Test = Callable[[Any, Host], bool]
"""Whether a configuration breaks a rule. It is a `Config`, which files of sections cannot name: it is made of them."""

Words = Mapping[str, Callable[[Any, Host], object]]
"""Words in braces that reasons and fixes have beside values of settings, and what they mean."""

NO_EFFECT = "no effect"
"""How the reason begins for which a setting changes nothing."""


@dataclass(frozen=True)
class Rule:
    """Something that must not be.

    `settings` are the dotted names involved, the most likely culprit first. `reason` and `fix` are texts in which
    `{name}` stands for the value of a setting, of `host.gpus` and the like, or for a word of its file. A rule about a
    setting without effect applies only if the user set it: `only_if_set`; one about a default that few mean, only if
    the user did not: `unless_set`. A `remark` is no error even then.
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
        """Whether it is about a setting that changes nothing."""
        return self.reason.startswith(NO_EFFECT)

    def each(self) -> Iterator[Rule]:
        """The rule itself."""
        yield self


@dataclass(frozen=True)
class Each:
    """One rule about each of several settings: setting -> what `{what}` stands for. `{it}` stands for its name."""

    about: Mapping[str, str]
    settings: tuple[str, ...]
    broken: Callable[[Any, Host, str], bool]
    reason: str
    fix: str
    only_if_set: bool = False
    remark: bool = False

    def each(self) -> Iterator[Rule]:
        """The rule about every single setting."""
        for it, what in self.about.items():
            texts = (*self.settings, self.reason, self.fix)
            *names, reason, fix = (text.replace("{what}", what).replace("{it}", it) for text in texts)
            broken = partial(_broken, self.broken, it)
            yield Rule(tuple(names), broken, reason, fix, only_if_set=self.only_if_set, remark=self.remark)


def _broken(broken: Callable[[Any, Host, str], bool], it: str, c: Any, h: Host) -> bool:
    return broken(c, h, it)


# -- How a setting is read, and how a problem with one is reported -----------------------------------------------------

UNSEEN = ("Cc", "Cs")
"""Kinds of characters: controls, and the halves of pairs, for which Python takes bytes that are no text."""


def leaf(config: Any, setting: str) -> Any:
    """Value of one setting or section, named like `overlap.ep.merge`."""
    return reduce(getattr, setting.split("."), config)


def problem(setting: str, value: object, origins: Mapping[str, str], reason: str, fix: str) -> str:
    """One problem as a line: setting, value, where the value came from, what is wrong with it, and a fix."""
    origin = origins.get(setting) or origins.get("", "configuration")
    return f"{setting} = {show(value)} ({origin}): {reason}; fix: {fix}"


def show(value: object) -> str:
    """A value as one would type it after a flag."""
    if isinstance(value, tuple):
        return " ".join(map(show, value)) or "(none)"
    text = str(value) if value != "" else "(empty)"
    return "".join(ascii(x)[1:-1] if unicodedata.category(x) in UNSEEN else x for x in text)
