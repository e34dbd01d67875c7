"""Checks of a machine: compiler, kernels, driver, GPUs, packages. `gpu` says whether the run will use GPUs of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from dflash_ray.doctor.finding import Finding
from dflash_ray.machine.environment import version

GIB = 2**30
BUSY_BYTES = 2 * GIB  # in use on a GPU that nobody trains on: a driver's and a desktop's own are far below
LEAST = {"torch": "2.11", "transformers": "5.17", "ray": "2.60", "pyarrow": "20", "numpy": "2", "safetensors": "0.6", "pydantic": "2.10"}
LEAST_WANDB = "0.27"
_SOURCE = "#include <Python.h>\nint one(void) { return PY_VERSION_HEX > 0; }\n"


def compiler(gpu: bool, environment: Mapping[str, str] = os.environ) -> Finding:
    """Triton compiles a launcher per kernel with the system's C compiler and Python's headers."""
    name = "C compiler"
    chosen = environment.get("CC") or next((found for one in ("gcc", "clang", "cc") if (found := shutil.which(one))), None)
    if not gpu:
        return Finding(name, "n/a", "no GPU, so no kernel is compiled")
    if chosen is None:
        return Finding(name, "blocker", "none found (gcc, clang, $CC)", "install one, for instance `apt-get install gcc`")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "one.c"
        source.write_text(_SOURCE)
        command = [chosen, "-shared", "-fPIC", f"-I{sysconfig.get_paths()['include']}", str(source), "-o", str(source.with_suffix(".so"))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Finding(name, "blocker", f"{chosen} does not run: {error}", "set CC to a C compiler that works")
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip() or "no message")
        if "Python.h" in done.stderr:
            return Finding(name, "blocker", f"{chosen} finds no Python.h", "install Python's headers (`apt-get install python3-dev`)")
        return Finding(name, "blocker", f"{chosen} cannot compile a line of C: {first}", "repair the compiler, or set CC to another")
    return Finding(name, "ok", f"{chosen} compiles against {sysconfig.get_paths()['include']}")


def triton_version(gpu: bool, installed: str | None, requirements: list[str] | None) -> Finding:
    """torch's CUDA build names one triton in its `requirements` (as importlib.metadata lists them) and works with no other."""
    name = "Triton"
    if not gpu:
        return Finding(name, "n/a", "no GPU, so no Triton kernel runs")
    if installed is None:
        return Finding(name, "blocker", "not installed", "pip install the triton that your torch names")
    named = [Requirement(text) for text in requirements or []]
    wanted = [one.specifier for one in named if one.name == "triton" and (one.marker is None or one.marker.evaluate({"extra": ""}))]
    if wanted and not wanted[0].contains(installed, prereleases=True):
        return Finding(name, "blocker", f"{installed} is installed, torch wants {wanted[0]}", f"pip install 'triton{wanted[0]}'")
    return Finding(name, "ok", f"{installed}" + (f", as torch wants ({wanted[0]})" if wanted else ""))


def triton_kernel(gpu: bool) -> Finding:
    """Compiles and runs a kernel of one line on the first GPU."""
    name = "Triton backend"
    if not gpu:
        return Finding(name, "n/a", "no GPU")
    try:
        from dflash_ray.doctor.kernel import add_one

        wrong = add_one()
    except Exception as error:  # a backend may fail in any way, and each is what the check is for
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Finding(name, "blocker", f"a kernel of one line fails: {first}", "repair driver, compiler or triton; see the other findings")
    if wrong:
        return Finding(name, "blocker", "a kernel of one line computes something else", "reinstall triton and the driver")
    return Finding(name, "ok", "a kernel of one line compiles and runs")


def fla_path(gpu: bool, needed: bool, required: bool) -> Finding:
    """flash-linear-attention's kernels; without them a target with gated-delta-net layers runs documents apart and slower."""
    name = "FLA fast path"
    if not needed:
        return Finding(name, "n/a", "the target has no gated-delta-net layers, or is not known")
    if not gpu:
        return Finding(name, "n/a", "no GPU: documents run apart through plain torch")
    try:
        import fla.ops.gated_delta_rule  # noqa: F401 - that it loads is the question
    except Exception as error:  # a mismatch of versions shows as whatever error its import happens to raise
        what = f"flash-linear-attention does not load: {(str(error) or type(error).__name__).splitlines()[0]}"
        return Finding(name, "blocker" if required else "warning", what, "pip install -r requirements.txt; without it targets are slower")
    return Finding(name, "ok", f"flash-linear-attention {version('flash-linear-attention')} loads; targets test it again at their start")


def driver(gpus: int, built_for: str | None, supports: str | None, available: bool, torch_version: str) -> Finding:
    """`built_for`: torch's CUDA version, `supports`: the newest the driver can run, `available`: whether torch sees a GPU."""
    name = "torch, CUDA, driver"
    if not gpus:
        return Finding(name, "n/a", f"no NVIDIA GPU; torch {torch_version} trains on the CPU")
    if built_for is None:
        what = f"torch {torch_version} is a CPU build and {gpus} GPUs are here"
        return Finding(name, "blocker", what, "install torch's CUDA build (pip install torch==2.13.0 from the public registry)")
    if not available:
        what = f"torch {torch_version} was built for CUDA {built_for}, the driver runs {supports or 'an unknown one'}: no GPU is seen"
        return Finding(
            name, "blocker", what, "update the NVIDIA driver, or install a torch built for an older CUDA; look at CUDA_VISIBLE_DEVICES"
        )
    return Finding(name, "ok", f"torch {torch_version}, CUDA {built_for}, driver up to {supports}")


@dataclass(frozen=True)
class GpuUse:
    index: int
    name: str
    used_bytes: int
    total_bytes: int
    pids: tuple[int, ...] = ()


def gpus_free(gpus: list[GpuUse], wanted: float, topology: str) -> Finding:
    """`wanted`: GPUs that the topology takes."""
    name = "GPUs free"
    if not gpus:
        return Finding(name, "n/a", "no NVIDIA GPU")
    busy = [one for one in gpus if one.used_bytes > BUSY_BYTES]
    free = len(gpus) - len(busy)
    if len(gpus) < wanted:
        what = f"topology {topology} takes {wanted:g} GPUs, this host has {len(gpus)}"
        return Finding(name, "warning", what, f"use --topology {max(1, len(gpus) - 1)}-1, or add hosts (ray_cluster.yaml)")
    if free < wanted:
        held = "; ".join(
            f"GPU {one.index} holds {one.used_bytes / GIB:.1f} of {one.total_bytes / GIB:.0f} GiB"
            + (f" by pid {', '.join(map(str, one.pids))}" if one.pids else "")
            for one in busy
        )
        return Finding(
            name, "blocker", f"{free} of {len(gpus)} are free, {topology} takes {wanted:g}: {held}", "end what holds them, or use less"
        )
    return Finding(name, "ok", f"{free} of {len(gpus)} ({gpus[0].name}), {topology} takes {wanted:g}")


def packages(installed: Mapping[str, str | None] | None = None) -> Finding:
    """What every run needs, in versions that work."""
    found = installed if installed is not None else {name: version(name) for name in LEAST}
    wrong = [
        f"{name} {found.get(name) or 'missing'} (needs {least} or newer)"
        for name, least in LEAST.items()
        if found.get(name) is None or Version(found[name]) < Version(least)
    ]
    if wrong:
        return Finding("packages", "blocker", ", ".join(wrong), "bash jobs/install.sh, or pip install -r requirements.txt")
    return Finding("packages", "ok", ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers", "ray")))


def tracking(kind: str, installed: str | None, environment: Mapping[str, str], netrc: bool) -> Finding:
    """W&B can never stop a run, so nothing here is a blocker."""
    if kind != "wandb":
        return Finding("wandb", "n/a", f"tracking.kind is {kind}")
    if installed is None or Version(installed) < Version(LEAST_WANDB):
        what = f"wandb {installed or 'is not'} installed; today's API keys need {LEAST_WANDB} or newer"
        return Finding("wandb", "warning", what, f"pip install 'wandb>={LEAST_WANDB}', or --tracking.kind none")
    if not environment.get("WANDB_API_KEY") and not netrc:
        return Finding("wandb", "warning", "no API key: the run is kept offline in its folder", "wandb login, or `wandb sync` afterwards")
    return Finding("wandb", "ok", f"wandb {installed} with a key")


def torch_requirements() -> list[str] | None:
    return metadata.requires("torch")
