"""One local Ray for all tests that need it, with names and ports of its own; one torch thread everywhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Reference data that is not part of the project; tests that use it skip where it is absent."""
    folder = Path(os.environ.get("DFLASH_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip("no folder of reference data: set DFLASH_SHARED, or put it beside the repository as ../shared")
    return folder


@pytest.fixture(scope="session")
def local_ray():
    """A Ray of this test session's own, ended with it."""
    import ray

    os.environ.pop("RAY_ADDRESS", None)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options = {"num_cpus": 4, "num_gpus": 0, "object_store_memory": 512 * 2**20, "include_dashboard": False, "logging_level": "warning"}
    for attempt in range(3):
        try:
            ray.init(address="local", **options)
            break
        except Exception as error:  # Ray has no type of its own for "not up within 30 s", which an overloaded machine needs
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == 2:
                raise
    yield ray
    ray.shutdown()
