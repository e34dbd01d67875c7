"""Several micro-steps in one call do what one call for each does."""

from __future__ import annotations

import pytest
import ray

from actors.drafter import DrafterActor
from actors.target import TargetActor
from dflash_ray.config.loading import validate
from dflash_ray.run.build import open_batches
from dflash_ray.run.spec import resolve
from tests.support.tiny_runs import dense_material, tiny_config

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_group_of_micro_steps(local_ray, tmp_path):
    tree = tiny_config(dense_material(tmp_path / "material"), tmp_path / "run", debug={"bad_batches": [2]})
    spec = resolve(validate(tree), device="cpu", run_dir=tmp_path / "run", namespace="train-group")
    batches = [open_batches(spec).batch("train", number) for number in range(4)]
    target = TargetActor.options(num_cpus=0).remote("target-0", spec)
    made = [target.compute.remote(position, "train", batch, False) for position, batch in enumerate(batches)]
    told = [ray.get(info, timeout=120).layer_ids for info, _ in made]
    payloads = [payload for _, payload in made]

    one_by_one, at_once = (DrafterActor.options(num_cpus=0).remote(spec, 10) for _ in range(2))
    for position in (0, 1, 3):
        problem = ray.get(one_by_one.stage.remote(position, told[position], batches[position], payloads[position]), timeout=120)
        assert problem is None
        ray.get(one_by_one.train.remote(position), timeout=120)

    def train(*positions: int) -> tuple[list[float], str | None]:
        objects = [part for p in positions for part in (batches[p], payloads[p])]
        return ray.get(at_once.train_group.remote([(p, told[p]) for p in positions], *objects), timeout=120)

    seconds, problem = train(0, 1, 2, 3)
    assert len(seconds) == 2 and min(seconds) > 0 and "NaN" in problem, "stops at features that are not what was asked for"
    seconds, problem = train(2)
    assert seconds == [] and problem
    seconds, problem = train(3)
    assert len(seconds) == 1 and problem is None
    assert ray.get(at_once.step.remote(0), timeout=120) == ray.get(one_by_one.step.remote(0), timeout=120)
    for actor in (target, one_by_one, at_once):
        ray.kill(actor)
