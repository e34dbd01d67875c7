"""The step's line says what the record says, advice holds when it is followed, and a jump of the loss is told with its lengths."""

from __future__ import annotations

import re

import pytest

from dflash_ray.pipeline.flow import Flow
from dflash_ray.watch.console import balance_advice, console_line
from dflash_ray.watch.meter import Meter
from tests.pipeline.test_flow import simulate
from tests.support.records import step_record

RECORD = {
    "step": 58,
    "loss": 1.5234,
    "loss_smooth": 1.601,
    "accuracy": 0.21,
    "tau": 2.31,
    "lr": 1.2e-5,
    "noise_std": 0.01,
    "real_tokens_per_second": 25_170.0,
    "padded_tokens_per_second": 29_000.0,
    "real_tokens": 868,
    "padded_tokens": 1000,
    "mean_document_tokens": 2026.3,
    "buckets": [3],
    "q_pre": [1, 1, 1],
    "ahead": 50,
    "q_hs": 1,
    "drafter_wait": 0.02,
    "target_wait": 0.0,
    "watts": 1893.0,
    "tokens_per_joule": 13.3,
    "parked": 0,
    "spike": None,
    "eta_seconds": 5.1 * 86400,
}


def test_the_line_of_a_step():
    assert console_line(step_record(**RECORD), 89_950) == (
        "step 58/89,950 | loss 1.523 smooth 1.601 acc .21 tau 2.31 | lr 1.2e-05 noise .010 | 25.2 Ktok/s real 29.0 padded (eff 86.8%) | "
        "len 2026 bucket 3 | q_pre=[1 1 1] ahead=50 q_hs=[1] wait: drafter 2% targets 0% | 1.89 kW 13.3 tok/J | ETA 5.1d"
    )
    more = console_line(step_record(**RECORD | {"parked": 2, "spike": 2.4, "buckets": []}), 89_950)
    assert "len 2026 |" in more and "13.3 tok/J 2 parked | SPIKE 2.4 x the rolling median | ETA" in more
    assert "kW" not in console_line(step_record(**RECORD | {"watts": None, "tokens_per_joule": None}), 89_950)


def idle_share(targets: int, drafter_seconds: float, batches: int = 600) -> float:
    """Of a drafter behind `targets` targets of one second a batch."""
    flow = Flow(batches, window=2 * targets + 2, window_bytes=10**9, prefetch=50)
    clock, _ = simulate(flow, {f"t{number}": 1.0 for number in range(targets)}, drafter_seconds)
    return 1 - batches * drafter_seconds / clock


@pytest.mark.parametrize("targets, drafter_seconds", [(2, 0.25), (4, 0.1), (6, 0.115)])
def test_the_targets_that_the_advice_asks_for_do_balance(targets, drafter_seconds):
    before = idle_share(targets, drafter_seconds)
    advice = balance_advice(before, 0.0, targets)
    more = int(re.search(r"(\d+) more targets? would balance", advice)[1])
    assert f"drafter idle {100 * before:.0f}%" in advice and f"{targets} / (1 - {before:.2f})" in advice
    assert idle_share(targets + more, drafter_seconds) < 0.1 < idle_share(targets + max(more - 2, 0), drafter_seconds)


def test_no_advice_where_there_is_balance_and_none_against_the_budget():
    assert balance_advice(0.05, 0.08, 6) is None
    assert balance_advice(0.0, 0.3, 1) is None
    assert "2 fewer targets would do (6 x (1 - 0.30) = 4.2)" in balance_advice(0.0, 0.3, 6)
    assert "1 parked target must wait for power.budget_watts" in balance_advice(0.4, 0.0, 5, parked=1)


def test_a_spike_is_told_with_the_lengths():
    meter = Meter(1000)
    assert all(meter.spike(5.0, 2000) is None for _ in range(20))
    assert meter.spike(10.5, 64) == {"factor": pytest.approx(2.1), "usual_tokens": 2000}
    assert meter.spike(9.0, 2000) is None


def test_a_skipped_step_leaves_the_smoothed_loss_a_number():
    meter = Meter(1000)
    before = meter.smooth(4.0, 100)
    assert meter.smooth(float("nan"), 50) == pytest.approx(before)
    assert 2.0 < meter.smooth(2.0, 100) < 4.0


def test_a_resume_goes_on_smoothing_where_it_was():
    steps = [{"loss": 9.0 - n / 7, "supervised_tokens": 100 + 13 * n, "mean_document_tokens": 50.0 + n} for n in range(60)]
    whole, resumed = Meter(1000), Meter(1000)
    resumed.smooth(99.0, 1000)  # what is counted twice after a rewind, or was never kept
    for record in steps[:40]:
        whole.spike(record["loss"], record["mean_document_tokens"])
        whole.smooth(record["loss"], record["supervised_tokens"])
    resumed.remember([step_record(**record) for record in steps[:40]])
    for record in steps[40:]:
        assert resumed.smooth(record["loss"], record["supervised_tokens"]) == whole.smooth(record["loss"], record["supervised_tokens"])
    assert resumed.spike(90.0, 60.0) == whole.spike(90.0, 60.0) is not None


def test_rates_leave_the_first_steps_out_and_slide():
    meter = Meter(10**6, window_seconds=10.0)
    meter.start(0.0)
    meter.step(100.0, 50, 50)  # kernels are compiled
    assert meter.step(101.0, 50, 50)["real_tokens_per_second"] == 0
    assert meter.step(102.0, 80, 100)["real_tokens_per_second"] == pytest.approx(80)
    for second in range(103, 130):
        rates = meter.step(float(second), 40, 50)
    assert (rates["real_tokens_per_second"], rates["padded_tokens_per_second"]) == pytest.approx((40, 50))
