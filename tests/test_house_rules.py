"""The house rules of docs/design/architecture.md, each as a small test over the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = sorted((ROOT / "hocket").rglob("*.py"))
TRACE = sorted((ROOT / "hocket_trace").rglob("*.py"))
"""The other distribution of this repository."""
SOURCES = [*PACKAGE, *TRACE]
SOURCES += [path for folder in ("tests", "benchmarks", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
DOCS = sorted(path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

STREAMS = {"Stream", "ExternalStream", "Event", "stream", "current_stream", "set_stream"}
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "send", "recv",
    "isend", "irecv", "batch_isend_irecv", "P2POp", "gather", "scatter", "barrier", "new_group", "init_process_group",
    "all_gather_single", "reduce_scatter_single",
}  # fmt: skip
HOOKS = re.compile(
    r"\.register_(module_)?(full_)?(forward|backward|state_dict|load_state_dict|post_accumulate)\w*hook\("
)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of attributes of a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def aliases(module: ast.Module) -> dict[str, str]:
    """What imported names stand for: `dist` for `torch.distributed`, `barrier` for `torch.distributed.barrier`."""
    found: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for item in node.names:
                found[item.asname or item.name.split(".")[0]] = item.name if item.asname else item.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for item in node.names:
                found[item.asname or item.name] = f"{node.module}.{item.name}"
    return found


@cache
def full_names(path: Path) -> list[tuple[str, int]]:
    """(full dotted name, line) of every imported name and every attribute of one that a file mentions."""
    known, found = aliases(tree(path)), []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute | ast.Name):
            first, _, rest = dotted(node).partition(".")
            if first in known:
                found.append((".".join(filter(None, [known[first], rest])), node.lineno))
    return found


def mentions(path: Path, prefix: str, names: set[str]) -> list[str]:
    """Places in a file that mention `prefix.name`, however it was imported."""
    found = [(line, full) for full, line in full_names(path) if full.startswith(f"{prefix}.")]
    return [f"{path.name}:{line} {full}" for line, full in found if full.rsplit(".", 1)[1] in names]


def offenders(allowed: set[str], prefix: str, names: set[str]) -> list[str]:
    """Places of the package, outside the allowed files, that mention `prefix.name`."""
    return [place for path in PACKAGE if name(path) not in allowed for place in mentions(path, prefix, names)]


def test_mentions_see_through_imports(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(
        "import torch\nimport torch.distributed as dist\nfrom torch.distributed import barrier as wait\n"
        "torch.distributed.send(x, 1)\ndist.all_reduce(x)\nwait()\nself.barrier()\ndist.get_rank()\n"
    )
    found = mentions(path, "torch.distributed", COLLECTIVES)
    assert [place.split(":")[1].split()[0] for place in sorted(found)] == ["4", "5", "6"]


@cache
def layers() -> list[list[set[str]]]:
    """The layers that the architecture names, from the top: each of parts that do not know each other."""
    text = (ROOT / "docs" / "design" / "architecture.md").read_text()
    lines = text.split("\n## Layers\n")[1].split("```")[1].strip().splitlines()
    return [[set(part.split()) for part in line.split("  ")[0].split("|")] for line in lines]


def place(path: str) -> tuple[int, int]:
    """(layer, part) of a file of the package. There is one for each."""
    folder, _, rest = path.removeprefix("hocket/").partition("/")
    known = f"{folder}/" if rest else folder
    found = [(i, j) for i, parts in enumerate(layers()) for j, part in enumerate(parts) if known in part]
    assert len(found) == 1, f"{known} stands in {len(found)} layers of the architecture"
    return found[0]


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """(file, line) of what a file imports from the package."""
    for node in ast.walk(tree(path)):
        full: list[str] = []
        if isinstance(node, ast.Import):
            full = [item.name for item in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{item.name}" for item in node.names]
        for words in (one.split(".") for one in full if one.startswith("hocket.")):
            files = [f"{'/'.join(some)}{end}" for some in (words, words[:-1]) for end in (".py", "/__init__.py")]
            yield next((file, getattr(node, "lineno", 0)) for file in files if (ROOT / file).exists())


def test_layers_import_downwards() -> None:
    known = {item for parts in layers() for part in parts for item in part}
    assert all((ROOT / "hocket" / item).exists() for item in known)
    for path in PACKAGE:
        here = place(name(path))
        for file, line in imported(path):
            there = place(file)
            assert here == there or here[0] < there[0], f"{name(path)}:{line} imports {file}, which is not below it"


def circles(imports: Mapping[str, set[str]]) -> list[str]:
    """One circle among files for each file that closes one, as the way around it."""
    over: set[str] = set()
    found = []

    def follow(file: str, way: tuple[str, ...]) -> None:
        if file in way:
            found.append(" -> ".join((*way[way.index(file) :], file)))
        elif file not in over:
            for other in sorted(imports.get(file, ())):
                follow(other, (*way, file))
            over.add(file)

    for file in imports:
        follow(file, ())
    return found


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == ["a -> b -> c -> a"]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_no_circles_among_files() -> None:
    """Imports inside of functions and for types alone count too: a reader of one file has to read the other."""
    imports = {name(path): {file for file, _ in imported(path)} - {name(path)} for path in PACKAGE}
    assert not circles(imports)


def test_values_do_not_import_torch() -> None:
    kernels = place("hocket/kernels/__init__.py")
    paths = [path for path in PACKAGE if place(name(path)) > kernels]
    modules = [name(path)[: -len(".py")].replace("/", ".") for path in paths]
    imports = "; ".join(f"import {module.removesuffix('.__init__')}" for module in modules)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert modules
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_streams_and_events_only_in_lanes() -> None:
    """Queues are the lanes of code that has no plan. `Scratch` asks which stream is in use, and makes none."""
    allowed = {"hocket/runtime/lanes.py", "hocket/runtime/queue.py", "hocket/runtime/transports.py"}
    assert not offenders(allowed, "torch.cuda", STREAMS)


def test_no_file_records_streams() -> None:
    """Memory is handed between lanes by the plan's frees, so `Tensor.record_stream` has no place."""
    attributes = [(path, node) for path in PACKAGE for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)]
    assert not [f"{name(path)}:{node.lineno}" for path, node in attributes if node.attr == "record_stream"]


IN_A_STEP = tuple(f"hocket/{folder}/" for folder in ("runtime", "fsdp", "layers", "model"))


def test_a_step_does_not_synchronize_the_device() -> None:
    outside = {name(path) for path in PACKAGE if not name(path).startswith(IN_A_STEP)}
    assert not offenders(outside, "torch.cuda", {"synchronize"})


def test_collectives_only_behind_comm() -> None:
    allowed = {
        "hocket/runtime/comm.py",
        "hocket/runtime/world.py",
        "hocket/runtime/transports.py",
    }
    assert not offenders(allowed, "torch.distributed", COLLECTIVES)


def test_module_hooks_only_in_hooks() -> None:
    # The second one has users' hooks refused, and refuses gradients by one itself. The third cuts what a whole model of
    # others is called with, sharded or not.
    allowed = "hocket/fsdp/hooks.py", "hocket/fsdp/sharded_parameter.py", "hocket/adapters/context_parallel.py"
    assert not [name(p) for p in PACKAGE if name(p) not in allowed and HOOKS.search(p.read_text())]


def test_environment_is_read_only_at_the_edges() -> None:
    allowed = {
        f"hocket/{file}.py" for file in ("cli", "environment", "launching/launch", "launching/worker", "runtime/world")
    }
    allowed |= {"hocket/commands/doctor.py", "hocket/commands/explain.py", "hocket/runtime/shared_memory.py"}
    assert not offenders(allowed, "os", {"environ", "getenv"})


def test_modules_have_a_docstring() -> None:
    assert not [name(path) for path in (*PACKAGE, *TRACE) if tree(path).body and not ast.get_docstring(tree(path))]


def test_automatic_settings_are_switches() -> None:
    """Never None or a bare bool for what can be automatic: no setting is optional."""
    files = (ROOT / "hocket" / "config").glob("*.py")
    for node in (node for file in files for node in ast.walk(tree(file))):
        if isinstance(node, ast.AnnAssign):
            assert "None" not in ast.unparse(node.annotation), ast.unparse(node)


def test_named_notes_exist() -> None:
    """A note's title stands alone on its line; every other `Note: [Title]` points to one."""
    text = "\n".join(path.read_text() for path in (*PACKAGE, *TRACE))
    titles = re.findall(r"^[ #]*Note: \[(.+?)\]$", text, flags=re.MULTILINE)
    assert len(titles) == len(set(titles)), "two notes of one name"
    assert set(re.findall(r"Note: \[(.+?)\]", text)) <= set(titles)


def test_run_time_dependencies_stay_few() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=]", requirement)[0] for requirement in project["dependencies"]}
    assert names == {"hocket-trace", "torch", "numpy", "tyro", "rich", "safetensors"}
    trace = tomllib.loads((ROOT / "hocket_trace" / "pyproject.toml").read_text())["project"]
    assert trace["dependencies"] == ["numpy>=1.26"]


def test_reading_traces_needs_numpy_alone() -> None:
    """hocket_trace imports the standard library, numpy and itself."""
    found: set[str] = set()
    for path in TRACE:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                found |= {item.name.partition(".")[0] for item in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    assert found - set(sys.stdlib_module_names) == {"numpy", "hocket_trace"}


def test_text_names_no_machine() -> None:
    """Paths of one machine, and marks of unfinished work, do not belong into a project."""
    home, unfinished = re.compile(r"(?<![\w.])/(home|root|work|Users)/\w"), re.compile(r"\b(TODO|FIXME|XXX)\b")
    found = [(path, match) for path in [*SOURCES, *DOCS] for match in home.findall(path.read_text())]
    others = [path for path in [*SOURCES, *DOCS] if path != Path(__file__)]
    assert not found + [(path, match) for path in others for match in unfinished.findall(path.read_text())]
