"""All of an explanation, from settings and what was found of the environment."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hocket.explain.explanation import Explanation
from hocket.explain.overlaps import overlaps
from hocket.explain.parts import groups, memory, optimizer, units
from hocket.explain.predicted import simulated
from hocket.program.hardware import hosts_of
from hocket.program.mesh import described
from hocket.resolve import Settings
from hocket.settings.origins import command_words
from hocket.settings.schema import changed, digest
from hocket.variables import Finding


def explain(settings: Settings, environment: Sequence[Finding]) -> Explanation:
    """What was decided about a run, why, and what it will do. Pure; needs no GPU."""
    predicted, step = simulated(settings)
    return Explanation(
        name=settings.run.name,
        heading=heading(settings),
        digest=digest(settings),
        overlaps=overlaps(settings),
        predicted=predicted,
        decisions=settings.decisions,
        optimizer=optimizer(settings),
        units=units(settings),
        groups=groups(settings),
        memory=memory(settings, step),
        environment=tuple(environment),
        check=_check(settings),
    )


def heading(settings: Settings) -> str:
    """Ranks and what they are for."""
    t, ranks = settings.train, f"{settings.world} ranks = {described(settings.mesh)}"
    ranks += f", {settings.network.ranks_per_host} on each host" if hosts_of(settings) > 1 else ""
    return f"{ranks}, {t.device}, {settings.precision.compute}, {t.transport}"


def _check(settings: Settings) -> tuple[str, ...]:
    """How to measure it: the step against the same one without communication, and a trace of it, in another folder."""
    if settings.world == 1:
        return ()
    command = shlex.join(command_words(settings, settings.origins))
    traced = changed(settings, {"run.folder": f"{settings.run.folder}-traced"})
    train = shlex.join(command_words(traced, settings.origins, ["run.folder"]))
    traces = shlex.join(["hocket", "trace", traced.run.folder])
    return (f"hocket bench {command} --against hocket_null", f"hocket train {train} --profile && {traces}")
