"""Environment variables: what is set and when, what is kept, what is too late, and that all of it is said."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.variables import HARMFUL, WANTED, Moment, apply, passed, survey
from tests.helpers.command import environment

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
MUST = {variable.name for variable in WANTED if variable.must}
MOMENTS: tuple[Moment, ...] = get_args(Moment)


def test_what_is_missing_is_set_and_nothing_is_said() -> None:
    env: dict[str, str] = {}
    assert apply(env) == []
    assert env == {variable.name: variable.value for variable in WANTED}
    assert apply(env, MOMENTS) == [], "set before is not too late"


def test_a_value_of_the_users_is_kept_and_said() -> None:
    env = {CONNECTIONS: "1"}
    [remark] = apply(env)
    assert env[CONNECTIONS] == "1"
    assert remark.startswith(f"{CONNECTIONS} = 1 (environment): is kept; streams share that many queues")
    assert remark.endswith(f"fix: {CONNECTIONS}=32, or unset it")


@pytest.mark.parametrize("name", sorted(MUST))
def test_multicast_that_is_on_is_refused(name: str) -> None:
    wrong = "1" if name == "NCCL_NVLS_ENABLE" else "0"
    with pytest.raises(ValueError, match=rf"{name} = {wrong} \(environment\): NVLink multicast must be off; .*; fix: "):
        apply({name: wrong})


def test_set_too_late_is_said_at_the_moment_that_counts() -> None:
    for moment in MOMENTS:
        for finding in survey({}, (moment,)):
            read = next(variable.read for variable in WANTED if variable.name == finding.name)
            assert finding.state == ("late" if read == moment else "set")
    [remark] = apply({}, ("CUDA starts",))
    assert remark.startswith(f"{CONNECTIONS} = (not set) (environment): set too late: its reader has started before;")
    with pytest.raises(ValueError, match="too late"):
        apply({}, ("groups are made",))


def test_what_harms_is_said_once_with_a_way_out() -> None:
    env = {harm.name: harm.values[0] if harm.values else "7" for harm in HARMFUL}
    remarks = apply(dict(env))
    assert [remark.split(" = ")[0] for remark in remarks] == [harm.name for harm in HARMFUL]
    assert all("(environment): is kept; " in remark and "; fix: " in remark for remark in remarks)


NAMES = [variable.name for variable in (*WANTED, *HARMFUL)]
VALUES = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["", "0", "1", "32", "detail"]))


@given(VALUES, st.sets(st.sampled_from(MOMENTS)))
def test_no_value_is_overwritten_and_none_that_differs_goes_unsaid(env: dict[str, str], now: set[Moment]) -> None:
    before = {name: value for name, value in env.items() if value}
    late = {v.name for v in WANTED if not before.get(v.name) and v.read in now}
    wrong = {v.name for v in WANTED if before.get(v.name, v.value) != v.value}
    if (late | wrong) & MUST:
        with pytest.raises(ValueError, match="environment"):
            apply(env, now)
        return
    remarks = apply(env, now)
    assert {name: env[name] for name in before} == before
    said = {remark.split(" = ")[0] for remark in remarks}
    unset = {v.name for v in WANTED if env.get(v.name) != v.value}
    assert said & {v.name for v in WANTED} == late | wrong | unset


def test_moments_are_seen_in_the_modules_of_a_process() -> None:
    assert passed({}) == frozenset()
    assert passed(sys.modules) >= {"threads start"}
    code = (
        "import sys, torch.distributed as dist\n"
        "from hocket.variables import apply, passed\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "sys.stdout.write(' '.join(sorted(passed(sys.modules))) + '|')\n"
        "try: apply({}, passed(sys.modules))\n"
        "except ValueError as error: sys.stdout.write(str(error))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    moments, _, error = ended.stdout.partition("|3 variables cannot work:\n  ")
    assert moments == "groups are made threads start"
    assert error.startswith("NCCL_NVLS_ENABLE = (not set) (environment): set too late")


# A process as it starts


ARRIVE = (
    "import os, sys\n"
    "from hocket.commands.options import parse\n"
    "from hocket.commands.train import Train\n"
    "from hocket.launching.launch import prepare_and_resolve\n"
    "options, origins = parse(Train, 'train', ['tiny', *sys.argv[1:]])\n"
    "prepare_and_resolve(options.config, origins)\n"
    "assert 'torch' not in sys.modules\n"
    f"print(os.environ.get('{CONNECTIONS}'), os.environ.get('NCCL_NVLS_ENABLE'))"
)


def prepare_and_resolve(*words: str, **variables: str) -> tuple[str, str]:
    """What a process that is about to train has in its environment, and what it says."""
    env = {name: value for name, value in environment().items() if name not in {v.name for v in WANTED}}
    ended = subprocess.run(
        [sys.executable, "-c", ARRIVE, *words],
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ended.stdout.strip(), ended.stderr


def place(rank: int) -> dict[str, str]:
    """Variables of one worker of torchrun."""
    names = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29"}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), **names}


def test_a_parent_sets_variables_for_its_workers_before_torch_is_imported() -> None:
    assert prepare_and_resolve() == ("32 0", "")


def test_a_parent_keeps_the_users_value_and_says_so() -> None:
    found, said = prepare_and_resolve(**{CONNECTIONS: "1"})
    assert found == "1 0"
    assert said.startswith(f"hocket: {CONNECTIONS} = 1 (environment): is kept;")


@pytest.mark.parametrize("rank", [0, 3])
def test_a_worker_of_torchrun_does_the_same_and_only_the_first_says_so(rank: int) -> None:
    found, said = prepare_and_resolve(**place(rank), **{CONNECTIONS: "8"})
    assert found == "8 0"
    assert said.startswith(f"hocket: {CONNECTIONS} = 8") if rank == 0 else not said
