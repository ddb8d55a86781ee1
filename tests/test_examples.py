"""Examples: a newcomer's way from texts to a model that goes on, and files for clusters whose commands exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import hocket
from tests.test_docs import check_hocket

FOLDER = Path(__file__).resolve().parents[1] / "examples"
RUN = FOLDER / "own-text.toml"


def texts_in(folder: Path) -> None:
    """Lines of JSON, a table and a plain file, side by side."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow writes the table")
    arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    folder.mkdir()
    line = "one two three four five six seven eight nine ten. "
    with (folder / "lines.jsonl").open("w") as file:
        for n in range(40):
            file.write(json.dumps({"text": f"{n}: {line * 8}"}) + "\n")
    parquet.write_table(arrow.table({"text": [f"{n}: {line * 8}" for n in range(40)]}), folder / "table.parquet")
    (folder / "plain.txt").write_text(line * 300)


def records(run: Path, name: str) -> list[tuple[int, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line[name]) for line in lines if name in line]


def test_from_texts_to_a_model_that_goes_on_from_there(tmp_path: Path) -> None:
    """Train on two ranks, look, export, generate from both, and go on with one rank."""
    texts_in(tmp_path / "texts")

    def run(*words: str) -> str:
        done = hocket(tmp_path, *words)
        assert done.code == 0, (words, done)
        return done.out

    train = ["train", str(RUN), "--data.paths", "texts", "--run.name", "mine"]
    out = run(*train)
    assert "81 documents" in out, "all three kinds of files are read"
    folder = tmp_path / "runs/mine"
    losses = records(folder, "loss")
    assert [step for step, _ in losses] == list(range(1, 13))
    assert losses[-1][1] < losses[0][1] - 1
    assert [step for step, _ in records(folder, "validation_loss")] == [6, 12]
    assert "mine" in run("runs")
    run("export", "runs/mine", "model")
    assert {path.suffix for path in (tmp_path / "model").iterdir()} >= {".json", ".safetensors"}
    asked = ["--prompt", "one two", "--tokens", "8"]
    from_run, from_model = run("generate", "runs/mine", *asked), run("generate", "model", *asked)
    assert from_run == from_model
    assert from_run.startswith("one two")
    more = ["--mesh.dp", "1", "--train.microbatches", "4", "--train.steps", "14"]  # as many sequences a step
    run(*train, *more)
    after = records(folder, "loss")
    assert after[:12] == losses, "it did not begin again"
    assert [step for step, _ in after] == list(range(1, 15))


# Files for clusters


def commands_of(text: str) -> list[list[str]]:
    """What follows `-m hocket` in a file, with variables for numbers."""
    joined = re.sub(r"\$\(?\w+\)?|\"\$\w+\"", "16", text.replace("\\\n", " "))
    return [found.split() for found in re.findall(r"-m hocket ([^\n]+)", joined)]


def test_the_script_for_slurm_is_bash_and_its_command_exists() -> None:
    path = FOLDER / "slurm.sh"
    ended = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    (words,) = commands_of(path.read_text())
    check_hocket(words)
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.+)$", path.read_text(), flags=re.MULTILINE))
    assert int(asked["nodes"]) * int(asked["ntasks-per-node"]) == 16
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]


def loaded(name: str) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the file")
    return yaml.safe_load((FOLDER / name).read_text())


def test_the_file_for_skypilot_starts_as_many_ranks_as_it_asks_for() -> None:
    task = loaded("skypilot.yaml")
    assert task.keys() <= {"name", "num_nodes", "resources", "workdir", "file_mounts", "setup", "run"}
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n", "-c", script], capture_output=True).returncode == 0
    (words,) = commands_of(task["run"])
    check_hocket(words)
    gpus = task["num_nodes"] * int(task["resources"]["accelerators"].partition(":")[2])
    assert words[words.index("--gpus") + 1] == str(gpus)
    assert words[words.index("--run.folder") + 1].startswith(tuple(task["file_mounts"]))


def test_the_job_set_starts_as_many_ranks_as_it_asks_for() -> None:
    found = loaded("jobset.yaml")
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    words = container["command"]
    flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    ranks = int(flags["nnodes"]) * int(flags["nproc-per-node"])
    assert spec["completions"] == spec["parallelism"] == int(flags["nnodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(flags["nproc-per-node"])
    name = found["metadata"]["name"]
    assert flags["master-addr"] == f"{name}-{job['name']}-0-0.{name}"  # the first pod, as JobSet names it
    assert int(flags["master-port"]) == container["ports"][0]["containerPort"]
    assert words[words.index("--gpus") + 1] == str(ranks)
    check_hocket(words[words.index("hocket") + 1 :])
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_image_copies_what_is_there() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert {line.split()[0] for line in lines} <= {"ARG", "FROM", "COPY", "WORKDIR", "RUN", "ENTRYPOINT"}
    for line in lines:
        if line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert (FOLDER.parent / source).exists(), line
    (entry,) = re.findall(r"^ENTRYPOINT (.+)$", text, flags=re.MULTILINE)
    assert json.loads(entry) == [".venv/python", "-m", "hocket"]
