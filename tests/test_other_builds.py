"""hocket without NVIDIA's driver: torch built for CPUs or for ROCm."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import ctypes, importlib, pkgutil, sys

import torch

torch.version.cuda, torch.version.hip = None, {hip!r}
load = ctypes.CDLL.__init__


def refusing(self, name, *args, **kwargs):
    if name and any(word in str(name) for word in ("libcuda", "libnvidia", "libnccl")):
        raise OSError(str(name) + ": cannot open shared object file")
    load(self, name, *args, **kwargs)


ctypes.CDLL.__init__ = refusing
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    pass
else:
    raise AssertionError("the driver was loaded")

import hocket

count = 0
for module in pkgutil.walk_packages(hocket.__path__, "hocket."):
    if module.name.endswith("__main__") or ".peers." in module.name:
        continue
    importlib.import_module(module.name)
    count += 1
assert count > 200, count

from hocket.cli import main

sys.exit(main(["plan", "llama3_8b", "--train.microbatches", "2", "--ops", "0"]))
"""


@pytest.mark.parametrize("hip", [None, pytest.param("6.4.43482", marks=pytest.mark.full)])
def test_modules_are_imported_and_steps_planned_without_nvidias_driver(hip: str | None) -> None:
    ended = subprocess.run([sys.executable, "-c", CODE.format(hip=hip)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "PREDICTED STEP  on h200, bf16" in ended.stdout
