"""Every check of a run that needs no Ray: its paths, what it continues, its target, its data and this machine.

What is wrong is answered at once, as a ValueError, before Ray starts and before anything is written.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from dflash_ray.config.loading import merge, validate
from dflash_ray.config.schema import Config
from dflash_ray.doctor.which_checks import gpu_uses, quick_findings, refuse_blockers
from dflash_ray.run.checkpoint import Checkpoint, list_checkpoints, newest_whole, read_checkpoint
from dflash_ray.run.checks import check_data
from dflash_ray.run.folder import RunFolder
from dflash_ray.run.spec import resolve, with_weights
from dflash_ray.watch.power import read_watts
from jobs.support.paths import refuse_relative_paths, run_dir


@dataclass(frozen=True)
class Checked:
    config: Config
    folder: RunFolder
    resume: Path | None  # the checkpoint to continue from
    weights: str  # fingerprint of the target's


def check(config: Config) -> Checked:
    refuse_relative_paths(config)
    folder = RunFolder(run_dir(config))
    _refuse_no_folder(folder.path)
    resume = _find_resume(config, folder)
    config = _check_power(config)
    spec = resolve(config, device="cpu", run_dir=folder.path)
    check_data(spec)
    for finding in refuse_blockers(quick_findings(spec, gpus=bool(gpu_uses()[0]))):
        print(f"warning: {finding.check}: {finding.what}; {finding.do}", file=sys.stderr)
    return Checked(config, folder, resume.path.absolute() if resume else None, with_weights(spec).weights)


def _refuse_no_folder(path: Path) -> None:
    """ValueError where no folder can be at `path`."""
    try:
        if path.exists():
            if not path.is_dir():
                raise ValueError(f"run.dir: {path} is a file; give a folder")
            there = path
        else:
            there = next(parent for parent in path.absolute().parents if parent.exists())
            if not there.is_dir():
                raise ValueError(f"run.dir: {path} cannot be made, {there} is a file")
    except OSError as error:
        raise ValueError(f"run.dir: {str(path)[:200]}: {error.strerror}") from None
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"run.dir: {there} cannot be written to; give another folder")


def _check_power(config: Config) -> Config:
    """With the file of watts readable, and found from whatever folder an actor runs in."""
    if config.power.file is None:
        return config
    try:
        read_watts(config.power.file)
    except OSError as error:
        raise ValueError(f"power.source: {config.power.file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"power.source: {error}") from None
    return validate(merge(config.as_dict(), {"power": {"source": f"file:{config.power.file.absolute()}"}}))


def _find_resume(config: Config, folder: RunFolder) -> Checkpoint | None:
    wanted = config.run.resume
    if config.run.fresh:
        if wanted != "never":
            raise ValueError(f"--fresh starts over and --resume {wanted} continues; give one of them")
        return None
    if wanted == "never":
        if folder.holds_a_run():
            raise ValueError(f"run.dir: {folder.path} holds a run already; continue it with --resume auto, or start over with --fresh")
        return None
    if wanted != "auto":
        return read_checkpoint(Path(wanted))
    checkpoint, refused = newest_whole(folder.checkpoints)
    for line in refused:
        print(f"refused: {line}", file=sys.stderr)
    if checkpoint is None and list_checkpoints(folder.checkpoints):
        raise ValueError(f"--resume auto: none of the checkpoints in {folder.checkpoints} is whole; start over with --fresh")
    if checkpoint is None and folder.holds_a_run():
        print(f"--resume auto: no checkpoint in {folder.checkpoints} yet, so the run begins again at its first step")
    return checkpoint
