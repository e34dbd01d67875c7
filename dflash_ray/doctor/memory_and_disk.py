"""Whether there is room: on disk for checkpoints, in /dev/shm for features in flight, on GPUs for what actors hold."""

from __future__ import annotations

import shutil
from pathlib import Path

from dflash_ray.doctor.finding import Finding
from dflash_ray.draft.dflash.memory import memory_estimate
from dflash_ray.planning.memory import GIB, SHM_SHARE, RunMemory, refuse_what_cannot_fit
from dflash_ray.run.spec import RunSpec

STORE_OF_RAM = 0.3  # what Ray gives its object store by default, and never more than /dev/shm has
FULL = 0.95  # of a file system: from here on Ray puts no more objects there


def disk(folder: Path, state_bytes: int, keep: int, free: int | None = None) -> Finding:
    """Room for the checkpoints in `folder`: `keep`, the best, and the one that is written. `free` bytes: as the file system says."""
    name = "disk for checkpoints"
    existing = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(existing).free if free is None else free
    wanted = (keep + 2) * state_bytes
    room = f"{existing} has {free / 1e9:,.1f} GB free, a checkpoint takes {state_bytes / 1e9:,.2f} GB"
    if free < 2 * state_bytes:
        return Finding(name, "blocker", f"{room}: not even two fit", "free space, or set run.dir to a larger file system")
    if free < wanted:
        what = f"{room} x (checkpoint.keep {keep} + best + the one being written) = {wanted / 1e9:,.1f} GB"
        return Finding(name, "warning", what, "free space, lower checkpoint.keep, or set run.dir to a larger file system")
    return Finding(name, "ok", f"{room}, {keep + 2} at most")


def temporary_disk(folder: Path) -> Finding:
    """Ray keeps logs, uploaded folders and spilled objects in its temporary folder."""
    name = "Ray's temporary folder"
    usage = shutil.disk_usage(folder)
    full = usage.used / usage.total
    if full > FULL:
        return Finding(
            name,
            "warning",
            f"{folder} is {full:.0%} full; Ray warns and stops spilling at {FULL:.0%}",
            "free space there, or `ray start --temp-dir`",
        )
    return Finding(name, "ok", f"{folder} is {full:.0%} full")


def shared_memory(memory: RunMemory, shm_bytes: int, ram_bytes: int) -> Finding:
    """Features in flight live in /dev/shm, where Ray's object store is."""
    name = "/dev/shm"
    message, window, room = memory.message, memory.window, SHM_SHARE * shm_bytes
    larger = "enlarge /dev/shm (`mount -o remount,size=...`; in a container --shm-size), or lower batching.token_budget"
    if message.bytes > room:
        size = f"{message.arithmetic} = {message.bytes / GIB:.2f} GiB"
        what = f"one batch's features are {size}, over {SHM_SHARE:g} of {shm_bytes / GIB:.2f} GiB"
        return Finding(name, "blocker", what, larger)
    sizes = f"the window is {window.arithmetic} = {window.bytes / GIB:.2f} GiB"
    if window.bytes > room:
        return Finding(name, "warning", f"{sizes}, over {SHM_SHARE:g} of {shm_bytes / GIB:.2f} GiB: less will be in flight", larger)
    store = min(STORE_OF_RAM * ram_bytes, shm_bytes)
    if window.bytes > SHM_SHARE * store:
        what = f"{sizes}; Ray's store is {store / GIB:.2f} GiB by default, and {SHM_SHARE:g} of it is used"
        least = int(window.bytes / SHM_SHARE) + 1
        return Finding(name, "warning", what, f"ray start --object-store-memory={min(least, shm_bytes)}")
    return Finding(name, "ok", f"{sizes} of {shm_bytes / GIB:.1f} GiB")


def gpu_memory(spec: RunSpec, memory: RunMemory, gpu_bytes: int | None) -> Finding:
    """What every actor will hold against what its GPU has."""
    name = "GPU memory"
    if gpu_bytes is None:
        return Finding(name, "n/a", "no GPU")
    try:
        refuse_what_cannot_fit(spec, memory, gpu_bytes, None)
    except ValueError as error:
        what, _, do = str(error).rpartition("; ")
        return Finding(name, "blocker", what, do)
    target, drafter = (sum(part.bytes for part in parts.values()) / GIB for parts in (memory.target, memory.drafter))
    return Finding(name, "ok", f"a target holds {target:.1f} GiB, the drafter {drafter:.1f}, a GPU {gpu_bytes / GIB:.1f}")


def checkpoint_bytes(spec: RunSpec) -> int:
    """Of one checkpoint: master weights and the optimizer's state, whatever the size of batches."""
    parts = memory_estimate(spec.shape, spec.config, 1, 1)
    return parts["master weights"].bytes + parts["optimizer"].bytes


def total_bytes(folder: Path) -> int:
    """Of the file system under `folder`."""
    return shutil.disk_usage(folder).total
