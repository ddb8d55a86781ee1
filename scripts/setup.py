"""Prepare everything that `make` needs: called by the Makefile once, and again when a pinned version changes.

Leaves `.venv/python`, a command that runs Python with hocket and its tools. It stands for one of two things:

* a Python that is already there and whose torch sees a GPU, or the one that HOCKET_PYTHON names. It is used as it
  is: packages that it lacks are put beside it, in `.venv/extra`, and without a network some may stay missing;
* otherwise a virtual environment, `.venv/env`, with exactly the versions in `requirements/`.

With `--check` it only says whether hocket can train. It uses the standard library alone, and syntax that an older
Python can read, far enough to be told that it is too old.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
ENV = VENV / "env"
EXTRA = VENV / "extra"
LAUNCHER = VENV / "python"
LOCK = ROOT / "requirements" / "lock.txt"
DOCS = ROOT / "requirements" / "docs.txt"
TORCH = ROOT / "requirements" / "torch.txt"
NEEDED = ("torch", "numpy", "tyro", "rich", "safetensors")
TOOLS = {
    "pytest": "pytest",
    "iniconfig": "iniconfig",
    "pluggy": "pluggy",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
    "execnet": "execnet",
    "hypothesis": "hypothesis",
    "sortedcontainers": "sortedcontainers",
    "pyarrow": "pyarrow",
    "ruff": "ruff",
    "pyrefly": "pyrefly",
    "triton": "triton",
}
"""What only tests and checks need: the names of packages, and those to import."""
MODELS = frozenset({
    "transformers", "accelerate", "peft", "psutil", "annotated-doc", "annotated-types", "anyio", "click", "h11",
    "hf-xet", "httpcore2", "httpx2",
    "httpx2-jsfetch", "huggingface-hub", "idna", "pydantic", "pydantic-core", "pyyaml", "regex", "shellingham",
    "tokenizers", "tqdm", "truststore", "typer", "typing-inspection",
})  # fmt: skip
"""What tests of models of transformers need, which are skipped without: it, its companions and what they import."""
EVENTS = frozenset({
    "tensorboard", "tensorboard-data-server", "absl-py", "grpcio", "markdown", "pillow", "protobuf", "werkzeug",
})  # fmt: skip
"""What tests of TensorBoard's files need, which are skipped without: it and what it alone imports."""
FASTER = frozenset({"zlib-ng"})
"""What hocket also runs without, slower."""

SEES_A_GPU = """
import torch
major, minor = torch.__version__.split(".")[:2]
assert (int(major), int(minor)) >= (2, 11) and torch.cuda.is_available()
"""
INSTALLED = """
from importlib.metadata import distributions
print(*{d.metadata["Name"].lower().replace("_", "-") for d in distributions() if d.metadata["Name"]})
"""
NOT_FOUND = """
import importlib.util, sys
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])
"""


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036  (the reader may have an older one)
        version = ".".join(map(str, sys.version_info[:3]))
        stop(
            f"hocket needs Python 3.11 or newer, {sys.executable} is {version}",
            "name a newer one, as in make PYTHON=python3.12",
        )
    if sys.argv[1:] == ["--check"]:
        check(to_train=True)
        return
    VENV.mkdir(exist_ok=True)
    forget()
    if os.environ.get("HOCKET_PYTHON") or succeeds(sys.executable, "-c", SEES_A_GPU, quiet=True):
        adopt(sys.executable)
    else:
        create(sys.executable)
    check(to_train=False)


def forget() -> None:
    """Make the next `make` set up anew."""
    for stamp in VENV.glob("ready*"):
        stamp.unlink()


def adopt(python: str) -> None:
    """Use an existing Python as it is, with what it lacks beside it."""
    say(f"using {python} and the torch it has")
    shutil.rmtree(EXTRA, ignore_errors=True)
    write_launcher(python, path=[ROOT, EXTRA])
    installed = output(python, "-c", INSTALLED).split()
    missing = {name: pin for name, pin in pins(LOCK.read_text()).items() if name not in installed}
    tools, models, events = (set(missing) & names for names in (set(TOOLS), MODELS, EVENTS))
    # Tools apart, so that a folder with a few wheels (PIP_FIND_LINKS) is enough to train without a network.
    faster = set(missing) & FASTER
    for names in map(sorted, (set(missing) - tools - models - events - faster, faster, tools, models, events)):
        if names:
            say(f"it lacks {', '.join(names)}: installing in {EXTRA.relative_to(ROOT)}")
            wanted = VENV / "missing.txt"
            wanted.write_text("\n".join(missing[name] for name in names))
            pip = (python, "-m", "pip", "install", "--quiet", "--no-deps", "--retries=0", "--timeout=10")
            if not succeeds(*pip, f"--target={EXTRA}", "--upgrade", "--require-hashes", "-r", str(wanted), quiet=True):
                say("pip could not install them; going on without")


def create(python: str) -> None:
    """Make a virtual environment with the pinned versions."""
    if not succeeds(python, "-c", "import ensurepip, venv", quiet=True):
        fix = "apt-get install python3-venv, or set HOCKET_PYTHON to a Python that has torch"
        stop(f"{python} cannot make virtual environments", fix)
    say("making a virtual environment in .venv/env; torch is large, so this takes a few minutes")
    run(python, "-m", "venv", "--clear", str(ENV))
    pip = (str(ENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    # torch is not in the lock: the build of its version depends on the machine, so it has no fixed hash.
    parts = (("-r", str(TORCH)), ("--require-hashes", "-r", str(LOCK), "-r", str(DOCS)))
    with ThreadPoolExecutor() as both:
        list(both.map(lambda part: run(*pip, "--no-deps", *part), parts))
    run(*pip, "-r", str(TORCH))  # what this build of torch needs beyond the lock
    own = ("--editable", str(ROOT / "hocket_trace"), "--editable", str(ROOT))
    run(*pip, "--no-deps", "--no-build-isolation", *own)
    # An editable package is found last: a script beside a clone called hocket would import that folder.
    write_launcher(str(ENV / "bin" / "python"), path=[ROOT])


def check(*, to_train: bool) -> None:
    """Stop if nothing can run, or if hocket itself cannot and is about to; say so if only tools are missing."""
    missing = output(str(LAUNCHER), "-c", NOT_FOUND, *NEEDED, *TOOLS.values(), "transformers", "tensorboard").split()
    fatal = [name for name in missing if name == "torch" or (to_train and name in NEEDED)]
    if fatal:
        forget()
        fix = "install them there, or set PIP_FIND_LINKS to a folder that holds their wheels"
        stop(f"the chosen Python lacks {', '.join(fatal)}", fix)
    if missing and not to_train:
        say(f"without {', '.join(missing)}: what needs them fails or is skipped")


def pins(lock: str) -> dict[str, str]:
    """The requirement of every package in a lock file, with its hashes, by name."""
    blocks = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)
    found: dict[str, str] = {}
    for block in blocks:
        match = re.match(r"([a-z0-9._-]+)==", block)
        if match:
            found[match[1]] = found.get(match[1], "") + block
    return found


def write_launcher(python: str, path: list[Path]) -> None:
    """Write the command `.venv/python`, which adds folders to what PYTHONPATH holds when it is run."""
    folders = ":".join(map(str, path))
    lines = ("#!/bin/sh", f'export PYTHONPATH="{folders}${{PYTHONPATH:+:$PYTHONPATH}}"', f'exec "{python}" "$@"')
    LAUNCHER.write_text("\n".join(lines) + "\n")
    LAUNCHER.chmod(LAUNCHER.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def run(*command: str) -> None:
    if not succeeds(*command):
        stop(f"this command failed: {' '.join(command)}", "read its messages above, then run make again")


def succeeds(*command: str, quiet: bool = False) -> bool:
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, check=False).returncode == 0


def output(*command: str) -> str:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def stop(problem: str, fix: str) -> None:
    sys.exit(f"setup: {problem}.\n       Fix: {fix}.")


if __name__ == "__main__":
    main()
