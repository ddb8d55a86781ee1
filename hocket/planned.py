"""`hocket.plan` and its companions: a training step as a value that can be checked, simulated, drawn and run.

    import hocket

    step = hocket.plan("moe_8gpu", {"mesh.dp": 4, "mesh.ep": 4})
    hocket.check(step)                                   # [], or every broken rule with the ops involved
    print(hocket.simulate(step).makespan)                # predicted seconds
    print(hocket.draw(step))                             # the timeline as text; kind="svg" and "html" draw it

Nothing here imports torch, unless settings have patterns of parameter names. `step.start()` does: it makes this rank's
part of the step, ready to train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hocket.config import Config
from hocket.config.load import begin
from hocket.config.optimizer import unmatched
from hocket.config.schema import changed, flat, ill_typed, impossible, meant_setting, types
from hocket.environment import driver_names
from hocket.machine import host_for_plan
from hocket.planning import page_head, predict, program_of
from hocket.predict.hardware import Hardware, hardware_of
from hocket.predict.simulate import Timeline
from hocket.problems import stop_if
from hocket.program.check import Violation
from hocket.program.check import check as check_program
from hocket.program.documents import lengths_of
from hocket.program.ops import Program
from hocket.resolve import Settings, resolve
from hocket.timeline import html_timeline, svg_timeline, text_timeline
from hocket.typed import is_a

if TYPE_CHECKING:
    from hocket.step import PlannedStep


@dataclass(frozen=True)
class Plan:
    """A step before it runs."""

    settings: Settings
    """All settings, with a `Decision` for each automatic one: value, source, reasons, effect."""
    program: Program
    """The ops of the step: a list for each pipeline rank."""

    def __repr__(self) -> str:
        """One line: `settings` and `program` would be thousands of words, and `hocket.draw` shows them."""
        mesh, ops = self.settings.mesh, sum(map(len, self.program.ranks))
        axes = f"pp {mesh.pp} x dp {mesh.dp}{f' x cp {mesh.cp}' if mesh.cp > 1 else ''} x tp {mesh.tp}, ep {mesh.ep}"
        return f"Plan({self.settings.run.name}: {axes}, {ops} ops)"

    @property
    def hardware(self) -> Hardware:
        """The hardware that predictions assume, as `hardware.gpu` names it."""
        return hardware_of(self.settings)

    def start(self) -> PlannedStep:
        """Make this rank's part of the step, for hocket's own transformer. Several ranks need a process group before.

        Raises ValueError if the number of ranks differs from the plan's.
        """
        from hocket.step import start

        return start(self.settings)


def plan(recipe: str | Config = "tiny", settings: Mapping[str, Any] | None = None, *, preset: str = "") -> Plan:
    """Plan a step of hocket's own transformer: resolve all settings and build the program. Needs no GPU.

    `recipe` is a recipe's name, a TOML file, `module:function`, or a `Config`; `settings` are values by dotted name,
    `{"mesh.dp": 8}`. Raises one ValueError for all mistakes, each with its fix.
    """
    if isinstance(recipe, Config):
        if preset:
            raise ValueError(f"preset = {preset} (plan): a Config has all settings already; fix: leave preset out")
        stop_if(ill_typed(recipe, {"": "plan"}))
        config, origins = recipe, {"": "plan"}
    else:
        for name, value in (("recipe", recipe), ("preset", preset)):
            if not isinstance(value, str) or not (value or name == "preset"):
                fix = "a recipe's name, a TOML file, module:function or a Config" if name == "recipe" else "its name"
                raise ValueError(f"{name} = {value!r:.40} (plan): no name; fix: {fix}")
        start = begin(recipe, preset_flag=preset)
        stop_if(start.problems)
        config, origins = start.config, dict(start.origins)
    config, given = with_settings(config, settings, "plan")
    host = replace(host_for_plan(config, driver_names()), tokenizer_vocab=0)  # the caller's token ids may be any
    resolved = resolve(config, host, {**origins, **given})
    check_patterns(resolved)
    return Plan(resolved, program_of(resolved))


def check_patterns(settings: Settings) -> None:
    """Raise ValueError for patterns that match no parameter of hocket's own transformer."""
    if any(settings.optimizer.patterns.values()):
        from hocket.model.source import parameter_shapes  # imports torch

        stop_if(unmatched(settings.optimizer, ((name,) for name in parameter_shapes(settings.model)), settings.origins))


def with_settings(config: Config, settings: Mapping[str, Any] | None, where: str) -> tuple[Config, dict[str, str]]:
    """A configuration with values changed by dotted name, and their origins. Raises ValueError for unknown names."""
    settings = {} if settings is None else settings
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"settings = {settings!r:.40} ({where}): no values by dotted name; fix: such as {{'mesh.dp': 2}}"
        )
    unknown = [name for name in settings if name not in types()]
    fixes = {name: meant_setting(str(name), types()) or "see docs/settings.md" for name in unknown}
    fixes |= {name: str(flat({name: settings[name]})) for name in unknown if isinstance(settings[name], Mapping)}
    stop_if([f"{name} = {settings[name]} ({where}): no such setting; fix: {fixes[name]}" for name in unknown])
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    origins = dict.fromkeys(settings, where)
    wrong = [name for name, value in given.items() if not is_a(value, types()[name])]
    if wrong:
        found = impossible(changed(config, given), origins)
        stop_if([found[name] for name in wrong])
    return changed(config, given), origins


def check(step: Plan | Program) -> list[Violation]:
    """Every rule that a step breaks, with the ops involved: deadlocks, races, values dropped early. [] if none.

    Raises ValueError for what is neither a `Plan` nor a `Program`.
    """
    program = step.program if isinstance(step, Plan) else step
    if not isinstance(program, Program):
        raise ValueError(
            f"step = {type(step).__name__}: no plan; fix: what hocket.plan returns, or the `program` of what trains"
        )
    return check_program(program)


def simulate(step: Plan, documents: Sequence[Sequence[int]] = ()) -> Timeline:
    """Predict the step: `makespan` in seconds, when each op runs, and how each rank spends its time and memory.

    `documents` are the lengths in tokens of the documents of each sequence of a step, in stream order, if documents
    share sequences. Without them each sequence counts as one document.

    Raises ValueError for anything but a `Plan` (a program alone has no costs), and for documents that do not fill the
    sequences of a step.
    """
    if not isinstance(step, Plan):
        raise ValueError(
            f"step = {type(step).__name__}: no plan, so nothing says what its ops cost; fix: what hocket.plan returns; "
            "what trains has simulate() and draw() of its own"
        )
    settings = step.settings
    if documents:
        count, length = settings.batch, settings.data.sequence_length
        _check_documents(documents, count, length, settings.data.packing)
        host = replace(settings.host, documents=tuple(map(lengths_of, documents)))
        settings = replace(settings, host=host)
    return predict(settings, step.program, step.hardware)


def _check_documents(documents: Sequence[Sequence[int]], count: int, length: int, packing: str) -> None:
    """Raise ValueError for documents that do not fill the sequences of a step, or if packing is off."""
    if packing == "off":
        raise ValueError("documents: data.packing = off, so each sequence is one; fix: data.packing = on or best_fit")
    if len(documents) != count:
        raise ValueError(f"documents: of {len(documents)} sequences, and a step has {count}; fix: those of each")
    for number, each in enumerate(documents):
        if sum(each) != length or min(each) < 1:
            reason = f"those of sequence {number} have {sum(each)} tokens, {min(each, default=0)} the shortest"
            raise ValueError(f"documents: {reason}; fix: 1 or more each, {length} together")


def draw(step: Plan, kind: Literal["text", "svg", "html"] = "text", width: int = 120) -> str:
    """Draw the predicted timeline: as text `width` characters wide, as an SVG picture, or as an HTML page."""
    if kind not in ("text", "svg", "html"):
        raise ValueError(f"kind = {kind}: draw makes text, svg or html")
    timeline = simulate(step)
    if kind == "text":
        return text_timeline(timeline, step.program, width)
    if kind == "svg":
        return svg_timeline(timeline, step.program)
    return html_timeline(timeline, step.program, *page_head(step.settings, step.program, step.hardware))
