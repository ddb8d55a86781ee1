"""Does the fix that a message offers help? Every rule is broken, each fix is read, applied, and the message must go.

Configurations are the mistakes of `test_config.py`, and drawn ones: values for the settings of a rule and for some
others, on several recipes and hosts. `make parity` draws more. A fix is one or more ways, such as `mesh.dp = 2 or more`
and `leave overlap.dp.prefetch out`. A way leaves a choice ("fewer plan.chunks"), and one choice must help. Words that
say nothing that can be typed are in `SPOKEN`.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import ge, gt, le, lt, ne, or_
from typing import Any, Literal, get_args, get_origin

import pytest

from hocket.config import Config, Purpose
from hocket.config.rule import Host, Rule, leaf, show
from hocket.config.schema import DEFAULTS, asked, bounds_of, changed, form_of, impossible, types
from hocket.recipes import recipe
from hocket.resolve import _settled
from hocket.rules import CHECKS, rule_text
from tests.test_config import REFUSED, WITH_HOST, full

RECIPES = (
    "tiny",
    "tiny",
    "moe_8gpu",
    "llama3_8b",
    "qwen3_30b_a3b",
    "deepseek_v2_lite",
    "gpt_oss_20b",
    "qwen3_next_80b_a3b",
)
HOSTS = (
    Host(), Host(gpus=8, gpu="NVIDIA H100", capability=(9, 0)), Host(gpus=8, gpu="NVIDIA A100", capability=(8, 0)),
    Host(gpus=8, no_copy_engine="NCCL is old", no_peer_memory="GPU 0 is far", no_delta_kernels="fla-core is missing"),
    Host(gpus=4, workers=8, local_workers=4), Host(gpus=8, workers=6, local_workers=4), Host(cores=1),
    Host(workers=2, local_workers=2), Host(tokenizer_vocab=300), Host(gpus=2, workers=4, local_workers=4),
)  # fmt: skip

LEFT_OUT = object()
Values = dict[str, Any]
"""Setting -> what a fix makes of it."""


@dataclass(frozen=True)
class Case:
    """A configuration, the host, where settings were set, and the recipe below them."""

    config: Config
    host: Host
    origins: Mapping[str, str]
    base: Config

    @functools.cached_property
    def settled(self) -> Config:
        """With all choices that need no costs, as the rules see it."""
        return _settled(self.config, self.host, self.origins)[0]

    def breaks(self, rule: Rule) -> bool:
        name = rule.settings[0]
        set_ = asked(self.origins, name) and leaf(self.config, name) != "auto"
        spoken = not rule.unless_set if set_ else not (rule.only_if_set or rule.remark)
        return spoken and rule.broken(self.settled, self.host)

    def reported(self, rule: Rule) -> str:
        """The setting that the message is about."""
        named = () if rule.remark else rule.settings
        return next((name for name in named if asked(self.origins, name)), rule.settings[0])

    def after(self, values: Values) -> Case:
        """What one has who does what a fix says."""
        host = replace(self.host, workers=values["workers"], local_workers=0) if "workers" in values else self.host
        values = {name: value for name, value in values.items() if name != "workers"}
        origins = {name: origin for name, origin in self.origins.items() if values.get(name) is not LEFT_OUT}
        origins |= {name: f"command line, --{name}" for name, value in values.items() if value is not LEFT_OUT}
        given = {}
        for name, value in values.items():
            below = self.base if name in self.origins else DEFAULTS
            given[name] = leaf(below, name) if value is LEFT_OUT else value
        return Case(changed(self.config, given), host, origins, self.base)


def values_of(name: str, value: Any) -> list[Any]:
    """Values that a setting may be given: all of a choice; of numbers small ones, and others about the present one."""
    found = [x for x in _values(name, types()[name], value) if x != value]
    bounds = bounds_of(name)
    low, high = (bounds.low, bounds.high) if bounds else (-math.inf, math.inf)

    def fits(x: Any) -> bool:
        numbers = (n for n in (x if isinstance(x, tuple) else (x,)) if isinstance(n, int | float))
        return all(low <= n <= high for n in numbers)

    return [x for x in found if fits(x)] or [value]


def _values(name: str, hint: Any, value: Any) -> list[Any]:
    if name in ("plan.recompute", "plan.offload"):
        parts = ("attn", "dispatch", "experts", "mlp", "kv", "attn:2", "mlp:99", "experts:1", "auto")
        parts = tuple(
            p for p in parts if name == "plan.recompute" or p.partition(":")[0] in ("attn", "experts", "mlp", "auto")
        )
        return [
            (),
            *((p,) for p in parts),
            *itertools.combinations(parts, 2),
            *itertools.combinations(parts[:5], 3),
            ("attn", "attn"),
        ]
    if name == "train.slow":
        named = tuple(f"{purpose}:1ms" for purpose in get_args(Purpose))
        return [(), ("1ms",), *((item,) for item in named), named[:2], ("a2a:1ms", "a2a:2ms"), ("1ms", "2ms")]
    if name == "overlap.tp.method":
        return [("auto",), ("ring",), ("off",), ("bulk",), ("pipeline",), ("ring", "fc1_forward:off")]
    if name == "plan.layers_per_stage":
        return [("auto",), (), (4, 4), (2, 2, 2, 2), (1, 2, 3, 2), (0,), (3, 0, 2, 3), ("auto", 2), (0, 4, 4, 0), (1,)]
    if name == "plan.layer_order":
        return ["auto", "literature", "early_release", "wgrad_last", "cB aF eB", "cB aF eB dF eW dB eF cF aB uB aW uF"]
    if name == "train.profile":
        return [(), (10, 2), (3,), (5, 0), (10**9, 2)]
    if name == "precision.fp8":
        return [
            (),
            ("forward",),
            ("forward", "dgrad"),
            ("but_first:1", "but_last:1"),
            ("but_last:8",),
            ("dgrad", "dgrad"),
        ]
    if name == "train.schedule":
        return ["cosine", "constant", "wsd", "wsd:5", "wsd:140"]
    if name == "train.keep":
        return [(0,), (1,), ("every:40",), (2, "every:50"), (0, "every:40"), (1, 2)]
    if name == "train.min_lr":
        return ["0%", "100%", 0.0, 1e-4, 1.0]
    if name == "train.betas":
        return [(0.9, 0.95), (0.9, 0.999)]
    if name and (form := form_of(name)):
        return ["auto", form.example] if form.auto else [form.example]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if hint is bool:
        return [False, True]
    if hint is str:
        return ["auto", "off", "some/path", " ", "bytes"]
    options = get_args(hint)
    if get_origin(hint) is tuple:
        items = [x for x in _values("", options[0], 0) if not isinstance(x, str)][:8]
        size = 2 if len(options) == 2 and options[1] is not Ellipsis else None
        texts = ["a.txt", "b.txt", " "] if options[0] is str else []
        many = [
            tuple(x) for n in ((size,) if size else (0, 1, 2, 3)) for x in itertools.combinations(texts or items, n)
        ]
        return [*many, *([tuple(range(leafs)) for leafs in (8, 32)] if options[0] is int else [])]
    whole = hint is int or int in options
    near = (
        [value - 1, value + 1, 2 * value, value // 2] if isinstance(value, int) and not isinstance(value, bool) else []
    )
    found = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 64, 128, 1024, -1, *near] if whole else []
    if hint is float or float in options:
        found = [0.0, 1e-3, 0.1, 0.5, 0.97, 1.0, 2.0, 2.5, 7.0, 1e4, -0.5, -1.0]
    return [*found, *(x for option in options for x in (get_args(option) if get_origin(option) is Literal else ()))]


def draw_case(draw: random.Random) -> Case:
    """A configuration with values for the settings of a rule, and for some others."""
    rule, base = draw.choice(CHECKS), load(draw.choice(RECIPES))
    names = [name for n, name in enumerate(rule.settings) if n == 0 or draw.random() < 0.85]
    names += [name for name in types() if name in f"{rule.fix} {rule.reason}" and draw.random() < 0.4]
    names += draw.sample(DRAWN, draw.choice((0, 0, 1, 2, 3)))
    if draw.random() < 0.5:  # a mesh of several ranks, or a small one
        names += draw.sample([f"mesh.{axis}" for axis in ("pp", "dp", "ep", "tp", "cp")], 2)
    given = {name: draw.choice(values_of(name, leaf(base, name))) for name in dict.fromkeys(names)}
    return Case(changed(base, given), draw.choice(HOSTS), {name: f"command line, --{name}" for name in given}, base)


SECTIONS = ("plan.", "overlap.", "mesh.", "train.", "precision.", "model.")
DRAWN = [name for name in types() if name.startswith(SECTIONS)]


@functools.cache
def load(name: str) -> Config:
    return recipe(name)


NAME = r"[a-z]+(?:\.[a-z0-9_]+)+"
Ways = list[Values]
READERS: list[tuple[re.Pattern[str], Callable[..., Ways]]] = []
"""Forms of a fix -> what one may do. Readers get the case, the setting that the message is about, and the groups."""


def form(pattern: str) -> Callable[[Callable[..., Ways]], Callable[..., Ways]]:
    def add(reader: Callable[..., Ways]) -> Callable[..., Ways]:
        READERS.append((re.compile(pattern.replace("NAME", f"({NAME})")), reader))
        return reader

    return add


def numbers(case: Case, name: str) -> list[Any]:
    """Numbers that a setting may be given, the nearest first."""
    now = leaf(case.settled, name)
    now = now if isinstance(now, int | float) else 0
    bounds = bounds_of(name)
    low, high = (bounds.low, bounds.high) if bounds else (0, 10**9)
    some = {*range(65), *(2**n for n in range(7, 30)), *(16 * n for n in range(64)), *(now * n for n in range(2, 17))}
    some |= {now // n for n in range(2, 17)} | {now - 1, now + 1}
    options = (types()[name], *get_args(types()[name]))
    if float in (*options, *(each for option in options for each in get_args(option))):
        some |= {n / 20 for n in range(20)} | {now + 0.5}
    return sorted((n for n in some if low <= n <= high and n != now), key=lambda n: abs(n - now))


def value_of(case: Case, text: str) -> Any:
    """A number, or what settings make: `mesh.dp x mesh.cp`, `model.heads / mesh.tp = 2`."""
    first, *rest = re.split(r" (?=[x/] )", text)
    found = leaf(case.settled, first) if re.fullmatch(NAME, first) else float(first) if "." in first else int(first)
    for sign, name in (each.partition(" = ")[0].split(" ") for each in rest):
        number = leaf(case.settled, name)
        found = max(1, found // number) if sign == "/" else found * number
    return found


def typed(name: str, text: str) -> Any:
    """A value as one types it; KeyError for none of the setting's."""
    hint, word = types()[name], text.strip("'")
    for option in (hint, *get_args(hint)):
        for value in get_args(option) if get_origin(option) is Literal else ():
            if str(value) == word:
                return value
    if hint is bool and word in ("True", "False"):
        return word == "True"
    options = (hint, *get_args(hint), *(each for option in get_args(hint) for each in get_args(option)))
    if (int in options or float in options) and re.fullmatch(r"-?\d+(\.\d+)?", word):
        number = float(word) if "." in word else int(word)
        return (number,) if get_origin(hint) is tuple else float(number) if int not in options else number
    if name in ("plan.layer_order",) or (form_of(name) and word != "auto") or (str in options and " " not in word):
        return (word,) if get_origin(hint) is tuple else word
    if word == "auto" and get_origin(hint) is tuple:
        return ("auto",)
    raise KeyError(text)


@form(r"NAME = (\S+) or more( in a model with experts)?")
def _(case: Case, it: str, name: str, least: str, experts: str | None) -> Ways:
    also = {"model.experts": 8, "model.dense_layers": ()} if experts and "moe" not in case.settled.model.kinds() else {}
    many = get_origin(types()[name]) is tuple
    return [{name: (n,) if many else n, **also} for n in numbers(case, name) if n >= int(least)]


@form(r"NAME = (\S+) or fewer")
def _(case: Case, it: str, name: str, most: str) -> Ways:
    return [{name: int(most)}]


@form(r"NAME = (\S+) without NAME")
def _(case: Case, it: str, name: str, value: str, other: str) -> Ways:
    return [{name: typed(name, value), other: LEFT_OUT}]


@form(r"NAME = ('.*'|\S+(?: or \S+)*)")
def _(case: Case, it: str, name: str, values: str) -> Ways:
    return [{name: typed(name, value)} for value in values.split(" or ")]


@form(r"NAME (above|below|at most|at least|not) (\S+)")
def _(case: Case, it: str, name: str, how: str, text: str) -> Ways:
    bound, several = value_of(case, text), get_origin(types()[name]) is tuple
    fits = {"above": gt, "below": lt, "at most": le, "at least": ge, "not": ne}[how]
    return [{name: (float(n),) if several else n} for n in numbers(case, name) if fits(n, bound)]


@form(r"leave (?:NAME|it) out")
def _(case: Case, it: str, name: str | None) -> Ways:
    return [{name or it: LEFT_OUT}]


@form(r"leave NAME or NAME out")
def _(case: Case, it: str, *names: str) -> Ways:
    return [{name: LEFT_OUT} for name in names]


@form(r"leave (NAME(?:, NAME)* and NAME) out")
def _(case: Case, it: str, text: str, *_: str) -> Ways:
    return [dict.fromkeys(re.findall(NAME, text), LEFT_OUT)]


@form(r"leave (\w+(?: and \w+)*) out(?: of NAME)?")
def _(case: Case, it: str, items: str, name: str | None) -> Ways:
    left = tuple(x for x in leaf(case.config, name or it) if x.partition(":")[0] not in items.split(" and "))
    return [{name or it: left}] if left != leaf(case.config, name or it) else []


@form(r"set NAME")
def _(case: Case, it: str, name: str) -> Ways:
    return [{name: n} for n in numbers(case, name) if n > 0] if leaf(case.settled, name) == 0 else []


@form(r"NAME other than (\S+)(?: or (\S+))?")
def _(case: Case, it: str, name: str, *others: str) -> Ways:
    return [{name: value} for value in values_of(name, leaf(case.config, name)) if show(value) not in others]


@form(r"another NAME")
def _(case: Case, it: str, name: str) -> Ways:
    return [{name: value} for value in values_of(name, leaf(case.config, name))]


@form(r"(more|fewer|a smaller|lower|smaller) NAME")
def _(case: Case, it: str, how: str, name: str) -> Ways:
    now = leaf(case.settled, name)
    if not isinstance(now, tuple):
        return [{name: n} for n in numbers(case, name) if (n > now) == (how == "more")]
    if how == "more":
        return [{name: tuple(range(n))} for n in range(1, 9)]
    some = [now[:n] for n in range(len(now))] if how == "fewer" else [tuple(x * s for x in now) for s in (0, 0.9)]
    return [{name: tuple(map(type(now[0]), x))} for x in some]


@form(r"(?:a|an) NAME that (divides|is a multiple of) (.*)")
def _(case: Case, it: str, name: str, how: str, of: str) -> Ways:
    bound = value_of(case, of)
    return [
        {name: n} for n in numbers(case, name) if n and bound and not (bound % n if how == "divides" else n % bound)
    ]


@form(r"make (NAME(?: x NAME)*)(?: / NAME = \d+)? a multiple of (\S+)")
def _(case: Case, it: str, product: str, *rest: str) -> Ways:
    bound, names, shares = (
        value_of(case, rest[-1]),
        product.split(" x "),
        leaf(case.settled, rest[-2]) if rest[-2] else 1,
    )

    def others(name: str) -> int:
        return math.prod(leaf(case.settled, other) for other in names if other != name)

    return [{name: n} for name in names for n in numbers(case, name) if n and n * others(name) // shares % bound == 0]


@form(r"make NAME x NAME at most NAME \+ (\d+)")
def _(case: Case, it: str, a: str, b: str, name: str, more: str) -> Ways:
    most = leaf(case.settled, name) + int(more)
    return [{a: n, b: m} for n in range(1, 9) for m in range(1, 9) if n * m <= most]


@form(r"make NAME \+ NAME at most NAME")
def _(case: Case, it: str, a: str, b: str, *_: str) -> Ways:
    return [{a: 0, b: 0.5}]


@form(r"a model with experts")
def _(case: Case, it: str) -> Ways:
    return [{"model.experts": 8, "model.dense_layers": ()}]


@form(r"an even NAME(?: up to NAME)?")
def _(case: Case, it: str, name: str, most: str | None) -> Ways:
    high = leaf(case.settled, most) if most else 10**9
    return [{name: n} for n in numbers(case, name) if n and n % 2 == 0 and n <= high]


@form(r"a whole NAME")
def _(case: Case, it: str, name: str) -> Ways:
    return [{name: float(int(leaf(case.settled, name)))}]


@form(r"NAME with (\w+) and (\w+)")
def _(case: Case, it: str, name: str, *items: str) -> Ways:
    return [{name: items}]


@form(r"NAME with smaller numbers")
def _(case: Case, it: str, name: str) -> Ways:
    return [
        {name: tuple(x for x in leaf(case.settled, name) if x < n)} for n in range(leaf(case.settled, name)[-1], 0, -1)
    ]


@form(r"NAME with files or folders")
def _(case: Case, it: str, name: str) -> Ways:
    return [{name: ("a.txt",)}]


@form(r"numbers that add up to (\d+)|give (\d+) numbers")
def _(case: Case, it: str, total: str | None, count: str | None) -> Ways:
    n = int(count) if count else len(leaf(case.config, it))
    even = divmod(int(total) if total else case.config.model.layers, n)
    return [{it: tuple(even[0] + (i < even[1]) for i in range(n))}]


@form(r"1 or more layers for all other stages")
def _(case: Case, it: str) -> Ways:
    return [{it: tuple(max(1, n) for n in leaf(case.config, it))}]


@form(r"a number for each stage")
def _(case: Case, it: str) -> Ways:
    return [{it: tuple(n for n in leaf(case.config, it) if n != "auto")}]


@form(r"at most (\d+) layers in NAME|no number in NAME")
def _(case: Case, it: str, most: str | None, *names: str) -> Ways:
    name = names[0] or names[1]
    items = [text.partition(":") for text in leaf(case.config, name)]
    capped = [
        f"{part}:{most}" if most and n and int(n) > int(most) else part + (sign + n if most else "")
        for part, sign, n in items
    ]
    return [{name: tuple(capped)}]


@form(r"(?:each part once in|each group of) NAME(?: once)?")
def _(case: Case, it: str, name: str) -> Ways:
    items = [text for text in leaf(case.config, name) if text != "auto"]
    return [{name: tuple({re.findall(r"^[a-z]\w*|^", str(text))[0]: text for text in items}.values())}]


@form(r"one NAME")
def _(case: Case, it: str, name: str) -> Ways:
    return [{name: leaf(case.config, name)[:1]}]


@form(r"one for each of NAME")
def _(case: Case, it: str, name: str) -> Ways:
    return [{it: (leaf(case.config, it)[0],) * len(leaf(case.config, name))}] if it != name else []


@form(r"two numbers in NAME")
def _(case: Case, it: str, name: str) -> Ways:
    return [{name: (0, 1)}]


@form(r"a NAME that ends by NAME = (\d+)")
def _(case: Case, it: str, name: str, *_: str) -> Ways:
    return [{name: (0, 1)}]


@form(r"a NAME without slashes")
def _(case: Case, it: str, name: str) -> Ways:
    return [{name: "plain"}]


@form(r"(?:another|a smaller) mesh(?: of .*)?")
def _(case: Case, it: str) -> Ways:
    axes = ("mesh.pp", "mesh.dp", "mesh.cp", "mesh.tp", "mesh.ep", "mesh.shard")
    sizes = itertools.product((1, 2, 4), (1, 2, 3, 4, 8), (1, 2), (1, 2, 4), (1, 2, 4), (0, 1, 2))
    alone = [dict.fromkeys(axes, 1) | {"mesh.dp": n, "mesh.shard": 0} for n in (1, 2, case.host.workers) if n]
    return [*alone, *(dict(zip(axes, each, strict=True)) for each in sizes)]


@form(r"start (\d+) processes")
def _(case: Case, it: str, number: str) -> Ways:
    return [{"workers": int(number)}]


SPOKEN = {
    "pip install hocket[linear], and what it needs here", "leave it as the model has it", "measure it: hocket bench",
    "install a torch with CUDA", "fewer processes on each host", "torchrun or srun on several hosts",
    "tensor-parallel ranks on GPUs of one host that reach each other, and no slow transport", "the path of a folder",
    "as many processes on every host", "network.ranks_per_host = a number that divides those of each",
    "the path of a tokenizers JSON file", "the folder or file of that tokenizer",
    "--master-port of torchrun", "the path of a checkpoint",
}  # fmt: skip
"""Ways that are no settings, or values that no list has."""
COMMENT = re.compile(r"(which|where|unless|such as) .*")


def read(case: Case, it: str, text: str) -> Ways | None:
    """What one may do who reads one way of a fix; None if it cannot be read."""
    for pattern, reader in READERS:
        match = pattern.fullmatch(text)
        if match:
            try:
                return reader(case, it, *match.groups())
            except (KeyError, TypeError):  # another form, or of another setting
                continue
    parts = re.split(r", (?:and )?| and ", text)
    found = [read(case, it, part) for part in parts] if len(parts) > 1 else [None]
    known = [some[:8] for some in found if some is not None]
    if len(known) < len(found):
        return None
    return [functools.reduce(or_, some) for some in itertools.islice(itertools.product(*known), 300)]


def ways_of(fix: str) -> list[str]:
    """The ways of a fix: `a, b, or c`, of which `b and c` is one. What is in parentheses, and comments, say no more."""
    ways = re.sub(r" \([^)]*\)", "", fix).split(", or ")
    split = [way for each in ways for way in ([each] if " and " in each else each.split(", "))]
    return [way for way in split if not COMMENT.fullmatch(way)]


def helps(case: Case, rule: Rule, values: Values) -> bool:
    """Whether a message goes where one does as it says: with what the recipe has, or with no recipe at all."""
    for below in (case.base, DEFAULTS):
        after = replace(case, base=below).after(values)
        if not impossible(after.config, {}) and not after.breaks(rule):
            return True
    return False


def wrong_ways(case: Case, rule: Rule) -> Iterator[str]:
    """What is wrong with each way of a fix: nobody can read it, or the message stays whatever one chooses."""
    it, fix = case.reported(rule), rule_text(rule.fix, case.settled, case.host)
    for way in ways_of(fix):
        choices = [] if way in SPOKEN else read(case, it, way)
        if choices is None:
            yield f"cannot be read: {way!r} of {fix!r}, for {it}"
            continue
        choices = [*choices[:10], *choices[:9:-1][:10], *random.Random(0).sample(choices, min(50, len(choices)))]
        if way not in SPOKEN and not any(helps(case, rule, values) for values in choices):
            asked = {name: leaf(case.config, name) for name in case.origins}
            yield f"does not help: {way!r} against {rule.reason!r} for {it}; asked: {asked}; tried {choices[:3]}"


def known_mistakes() -> Iterator[Case]:
    """The tables of `test_config.py`, where every rule that is no remark is broken once."""
    tables = [
        *((base, Host(), asked) for base, asked, *_ in REFUSED),
        *((b, h, asked) for b, h, asked, *_ in WITH_HOST),
    ]
    for base, host, settings in tables:
        asked = {full(name): value for name, value in settings.items()}
        yield Case(changed(base, asked), host, {name: f"command line, --{name}" for name in asked}, base)


def assert_fixes_help(cases: Iterable[Case], most: int) -> Counter[Rule]:
    """Each rule's fix is applied in as many cases; returns how often it was."""
    seen, wrong = Counter[Rule](), dict[str, str]()
    for case in cases:
        if impossible(case.config, {}):
            continue
        for rule in CHECKS:
            if seen[rule] < most and case.breaks(rule):
                seen[rule] += 1
                for text in wrong_ways(case, rule):
                    wrong.setdefault(text.partition(" against")[0], text)
    assert not wrong, "\n".join(wrong.values())
    return seen


def test_the_fixes_of_known_mistakes_help() -> None:
    seen = assert_fixes_help(known_mistakes(), most=1)
    assert {rule.reason for rule in CHECKS if not rule.remark} <= {rule.reason for rule in seen}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 25))])
def test_fixes_help_in_any_configuration(seed: int) -> None:
    draw = random.Random(seed)
    assert_fixes_help((draw_case(draw) for _ in range(250)), most=3)
