"""Which checks belong together: all of them for `jobs.doctor`, the quick ones for the start of every run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dflash_ray.doctor import cluster, machine, memory_and_disk, target_and_data
from dflash_ray.doctor.finding import Finding, blockers
from dflash_ray.machine.environment import version
from dflash_ray.machine.nvml import nvml
from dflash_ray.planning.memory import run_memory
from dflash_ray.run.spec import RunSpec


def machine_findings(spec: RunSpec | None, kind: str, topology: str, wanted: float) -> list[Finding]:
    """Everything about this machine. `spec`: of the run if its target is known; `kind`: of tracking; `wanted`: GPUs of the topology."""
    import torch

    uses, supports = gpu_uses()
    gpu = bool(uses)
    delta = spec is not None and spec.target_shape.has_linear_attention
    required = spec is not None and spec.config.target.require_fast_path
    heads = cluster.running_heads()
    return [
        machine.packages(),
        machine.driver(len(uses), torch.version.cuda, supports, torch.cuda.is_available(), torch.__version__),
        machine.gpus_free(uses, wanted, topology),
        machine.compiler(gpu),
        machine.triton_version(gpu, version("triton"), machine.torch_requirements()),
        machine.triton_kernel(gpu),
        machine.fla_path(gpu, delta, required),
        cluster.authentication(os.environ, heads, Path.home() / ".ray" / "auth_token"),
        cluster.stop_wait(heads),
        _tracking(kind),
        memory_and_disk.temporary_disk(Path(os.environ.get("RAY_TMPDIR", "/tmp"))),
    ]


def run_findings(spec: RunSpec, sizes: dict[str, Any]) -> list[Finding]:
    """Everything about one run. `sizes`: most_tokens and most_anchors of its largest batch."""
    uses, _ = gpu_uses()
    memory = run_memory(spec, sizes["most_tokens"], sizes["most_anchors"])
    shm = Path("/dev/shm")
    hardware = spec.config.hardware
    gpu_bytes = (
        hardware.gpu_memory_gib * memory_and_disk.GIB if hardware.gpu_memory_gib else min((one.total_bytes for one in uses), default=None)
    )
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        target_and_data.target_folder(spec),
        target_and_data.data(spec),
        memory_and_disk.disk(spec.run_dir, memory_and_disk.checkpoint_bytes(spec), spec.config.checkpoint.keep),
        memory_and_disk.shared_memory(memory, memory_and_disk.total_bytes(shm), ram)
        if shm.is_dir()
        else Finding("/dev/shm", "n/a", "this system has none; Ray's object store lies in a file"),
        memory_and_disk.gpu_memory(spec, memory, gpu_bytes),
    ]


def quick_findings(spec: RunSpec, gpus: bool) -> list[Finding]:
    """What a run looks at by itself before Ray starts: under a second, and no CUDA in the driver."""
    return [
        target_and_data.target_folder(spec),
        memory_and_disk.disk(spec.run_dir, memory_and_disk.checkpoint_bytes(spec), spec.config.checkpoint.keep),
        machine.packages(),
        machine.compiler(gpus),
        machine.triton_version(gpus, version("triton"), machine.torch_requirements()),
        _tracking(spec.config.tracking.kind),
    ]


def refuse_blockers(findings: list[Finding]) -> list[Finding]:
    """The warnings among them; ValueError with the first blocker."""
    for finding in blockers(findings):
        raise ValueError(f"{finding.check}: {finding.what}; {finding.do}")
    return [finding for finding in findings if finding.level == "warning"]


def _tracking(kind: str) -> Finding:
    return machine.tracking(kind, version("wandb"), os.environ, (Path.home() / ".netrc").exists())


def gpu_uses() -> tuple[list[machine.GpuUse], str | None]:
    """Every GPU with its use, and the newest CUDA the driver runs; nothing where there is no NVIDIA driver."""
    library = nvml()
    if library is None:
        return [], None
    found = []
    for index in range(library.nvmlDeviceGetCount()):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        try:
            pids = tuple(one.pid for one in library.nvmlDeviceGetComputeRunningProcesses(handle))
        except library.NVMLError:
            pids = ()
        found.append(machine.GpuUse(index, library.nvmlDeviceGetName(handle), memory.used, memory.total, pids))
    cuda = library.nvmlSystemGetCudaDriverVersion_v2()
    return found, f"{cuda // 1000}.{cuda % 1000 // 10}"
