"""Where ranks meet, and what to say if they can't."""

from __future__ import annotations

from collections.abc import Mapping

from hocket.environment import Worker, find_port
from hocket.resolve import Settings
from hocket.settings.schema import problem


def free_port(wanted: int, origins: Mapping[str, str]) -> int:
    """The port that `run.port` wants, or any free one without a wish. Raises ValueError if it is not to be had."""
    port = find_port(wanted)
    if not port:
        reason = "another process listens on that port" if wanted else "there is no free port on this host"
        fix = "run.port = 0 picks a free one, or name another" if wanted else "name one, or end what listens here"
        raise ValueError(problem("run.port", wanted, origins, reason, fix))
    return port


def port_in_use(settings: Settings, worker: Worker) -> str:
    """The message of rank 0, which cannot listen where the ranks are to meet."""
    reason = "another process listens on that port"
    if worker.port_from == "run.port" and not settings.run.port:
        reason = f"port {worker.port} was free, and another process has taken it since"
        return problem("run.port", 0, settings.origins, reason, "start again")
    fixes = {
        "run.port": "name another, on all hosts the same",
        "MASTER_PORT": "name another: --master-port of torchrun, or the variable, on all hosts the same",
        "SLURM_JOB_ID": "name a free one with run.port, on all hosts the same",
    }
    return f"{_port(settings, worker)}: {reason}; fix: {fixes[worker.port_from]}"


def nobody_met(settings: Settings, worker: Worker) -> str:
    """The message of a rank that did not find the others."""
    at = {"": "this host", "MASTER_ADDR": f"MASTER_ADDR = {worker.address} (environment)"}
    address = at.get(worker.address_from, f"{worker.address} (the first of {worker.address_from})")
    return (
        f"{address}, {_port(settings, worker)}: rank {worker.rank} of {worker.world} did not meet the others within "
        f"{settings.train.hang_timeout:g} s; fix: start all of them, with an address that all can reach"
    )


def _port(settings: Settings, worker: Worker) -> str:
    """A port, under the name of what said so."""
    if worker.port_from == "run.port":
        origin = settings.origins.get("run.port") or settings.origins.get("", "configuration")
        return f"run.port = {worker.port} ({origin})"
    if worker.port_from == "MASTER_PORT":
        return f"MASTER_PORT = {worker.port} (environment)"
    return f"port {worker.port} (from {worker.port_from})"
