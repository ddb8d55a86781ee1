"""Defines a rule between settings, and what a rule may know about the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from hocket.config import Config
from hocket.program.documents import Lengths
from hocket.variables import Finding


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
    documents: tuple[Lengths, ...] = ()
    """Documents of each sequence of the first step, as they are read; empty: not known. Predictions alone use them."""
    variables: tuple[Finding, ...] = ()
    """Findings about the variables that decide about overlap, before hocket set any."""


Words = Mapping[str, Callable[[Config, Host], object]]
"""Words in braces that reasons and fixes have beside values of settings, and what they stand for."""

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
    broken: Callable[[Config, Host], bool]
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
    broken: Callable[[Config, Host, str], bool]
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


def _broken(broken: Callable[[Config, Host, str], bool], it: str, c: Config, h: Host) -> bool:
    return broken(c, h, it)
