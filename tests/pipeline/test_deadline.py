"""Deadlines and restarts follow from what was measured; sketches tell replicas from deviants."""

from __future__ import annotations

import math

import torch

from dflash_ray.pipeline.deadline import Deadline
from dflash_ray.pipeline.restarts import LONGEST_WAIT, RestartBudget
from dflash_ray.transport.sketch import TOLERANCE, difference, sketch


def test_a_deadline_grows_with_the_size_and_forgets_one_slow_answer():
    deadline = Deadline(first=1800, least=1, factor=20)
    assert deadline.limit(100) == 1800
    for seconds in (1.0, 1.0, 300.0):
        deadline.took(seconds, size=100)
    assert deadline.limit(100) == 20 and deadline.limit(1000) == 200
    assert deadline.limit(1) == 1  # never under the least


def test_restarts_come_later_and_later_and_end_with_the_hour_s_budget():
    budget = RestartBudget(per_hour=12)
    delays = [budget.next_delay(now=10.0) for _ in range(13)]
    assert delays[0] == 0 and delays[-1] is None and budget.total == 12
    assert delays[1:12] == sorted(delays[1:12]) and max(delays[:12]) <= LONGEST_WAIT
    assert budget.next_delay(now=10.0 + 3601) == 0


def test_a_sketch_tells_rounding_from_another_result():
    features = torch.randn(300, 3 * 64, generator=torch.Generator().manual_seed(0))
    same, rounded = sketch(features, 3), sketch(features.bfloat16(), 3)
    assert difference(same, sketch(features.clone(), 3)) == 0
    assert 0 < difference(same, rounded) < TOLERANCE["bf16"]
    wrong = features.clone()
    wrong[:, 64:128] *= 1.2  # one tap only
    assert difference(same, sketch(wrong, 3)) > TOLERANCE["bf16"]
    swapped = torch.cat([features[:, 64:], features[:, :64]], dim=1)
    assert difference(same, sketch(swapped, 3)) > 0.5
    wrong[5, 70] = math.nan
    assert difference(same, sketch(wrong, 3)) == math.inf
    assert difference(same, sketch(features[:20], 3)) == math.inf
