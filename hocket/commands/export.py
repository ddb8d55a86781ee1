"""`hocket export`: a run's model as Hugging Face has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from hocket.commands.options import parse_plain


@dataclass(frozen=True)
class Export:
    """Write the newest checkpoint of a run, or one that is named, as config.json and safetensors."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run, or of a checkpoint."""
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """A new folder."""
    dtype: Literal["run", "fp32", "bf16"] = "run"
    """Format of the weights; run is the one that the run computed in."""


def run(words: list[str]) -> int:
    """Export a checkpoint. Returns the exit code."""
    options = parse_plain(Export, "export", "hocket export RUN FOLDER", words)
    from hocket.train.export import export  # imports torch
    from hocket.train.folders import newest_of

    checkpoint = newest_of(Path(options.run))
    try:
        family, remarks = export(
            checkpoint.resolve(), Path(options.folder), "" if options.dtype == "run" else options.dtype
        )
    except (OSError, ValueError) as error:
        fix = "; fix: a run with a whole checkpoint of a model that a family computes"
        fix = "" if "; fix: " in str(error) else fix
        raise ValueError(f"export {options.run} {options.folder} (command line): {error}{fix}") from None
    print(f"wrote {options.folder}: {family}, of {checkpoint}")
    for remark in remarks:
        print(f"note: {remark}")
    return 0
