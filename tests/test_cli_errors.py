"""What the command line answers to what cannot be: all of it in one file, to be read as a user would.

After a change that is meant: `pytest --renew-golden tests/test_cli_errors.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hocket import cli
from tests.helpers.golden import assert_golden

FILES = {
    "twice.toml": "[train]\nsteps = 5\n\n[mesh]\ndp = 2\n\n[train]\nsteps = 6\n",
    "keys.toml": 'recipe = "tiny"\n[overlap.ep]\nmrge = "on"\n[plan]\nmerge = "on"\n[train]\nsteps = "many"\n',
    "broken.toml": "[train\nsteps = 5\n",
    "preset.toml": 'recipe = "tiny"\npreset = "thruput"\n',
}
COMMANDS = """
explain
explain tinny
explain nobody:config
explain missing.toml
explain runs/nothing
explain twice.toml
explain keys.toml
explain broken.toml
explain preset.toml
explain tiny --preset fast
explain tiny --overlap.ep.mrge on
explain tiny --overlap.ep.merge yes
explain tiny --plan.merge off
explain tiny --train.dtype bf16
explain tiny --train.steps
explain tiny --mesh.dp 2 --gpus 8
explain tiny --gpus 7
explain tiny --gpus 100000000
explain tiny --train.steps 0 --model.heads 5 --train.lr fast
explain tiny --model.heads 5 --mesh.ep 3 --train.microbatches 1
explain tiny --overlap.ep.merge off --overlap.ep.merge_ends on
explain tiny --overlap.ep.merge on --plan.order sequential
explain tiny --overlap.ep.copies per_rank --overlap.ep.splits device
explain tiny --overlap.pp.batch on
explain tiny --overlap.dp.align on
explain tiny --precision.gather fp8
explain tiny --precision.compute fp6
explain tiny --overlap.tp.method ring
explain llama3_8b --mesh.dp 1 --mesh.tp 4 --train.transport copy_engine --overlap.tp.method qkv_forward:pipeline
explain tiny --plan.layer_order "fwd then bwd"
explain tiny --train.transport slow --train.slow a2a:1s a2a:2s
explain --from-megatron "--tensor-model-parallel-size two"
explain --from-megatron "--use-distributed-optimizer --use-torch-fsdp2"
explain --from-fairscale x
plan tiny --train.microbatches 60000
plan tiny --ops 3 --json
plan tiny --search --ops=40
plan tiny --svg p.svg --ops -1
doctor --fast
recipes all
fly tiny
""".strip().splitlines()


def answer(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """Exit code and standard error of a command."""
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return f"{capsys.readouterr().err}exit code {end.value.code}\n"


def test_every_message_of_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("NCCL_NVLS_ENABLE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    answers = {command: answer(capsys, shlex.split(command)) for command in COMMANDS}
    for command, text in answers.items():
        assert re.search(r"exit code [12]\n", text), command
        problems = [line for line in text.splitlines()[:-1] if not line.endswith("settings cannot work:")]
        assert problems, command
        assert all("fix: " in line for line in problems), text
    text = "\n".join(f"$ hocket {command}\n{text}" for command, text in answers.items())
    assert_golden("cli_errors.txt", text, pytestconfig)


def test_a_reader_that_has_seen_enough_is_no_mistake():
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "hocket", "recipes"]
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # what fits into the buffer is written at the end
    ended = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=env)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")
