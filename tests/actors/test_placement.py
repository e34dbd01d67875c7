"""What GPUs an actor sees, on a Ray that is told of GPUs which are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from actors.placement import actor_options, hide_gpus
from dflash_ray.config.schema import Config
from dflash_ray.run.spec import RunSpec
from tests.support.processes import ROOT, environment

pytestmark = pytest.mark.ray


@ray.remote
class Child:
    def sees(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@ray.remote
class Parent:
    """Makes actors as the coordinator does."""

    def __init__(self) -> None:
        hide_gpus()

    def children(self, spec: RunSpec) -> dict[str, str | None]:
        made = {role: Child.options(**actor_options(role, role, spec)).remote() for role in ("target", "drafter", "batcher")}
        seen = {role: ray.get(child.sees.remote(), timeout=60) for role, child in made.items()}
        return {"coordinator": os.environ["CUDA_VISIBLE_DEVICES"], **seen}


def main() -> None:
    spec = RunSpec(Config(), "cuda", None, None, "packed", "", Path("unused"), "placement-test")
    ray.init(address="local", num_gpus=2, include_dashboard=False, log_to_driver=False)
    parent = Parent.options(**actor_options("coordinator", "coordinator", spec)).remote()
    print(json.dumps(ray.get(parent.children.remote(spec), timeout=120)))


def test_each_actor_sees_its_own_gpu_and_no_other():
    command = [sys.executable, "-m", "tests.actors.test_placement"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["coordinator"] == seen["batcher"] == ""
    assert {seen["target"], seen["drafter"]} == {"0", "1"}


if __name__ == "__main__":
    main()
