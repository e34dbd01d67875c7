"""The arithmetic of a topology, where its rates come from, and the job that shows both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dflash_ray.config.loading import validate
from dflash_ray.planning.balance import DrafterCost, Power, Rates, point, rates_behind, recommend
from dflash_ray.planning.stage_rates import Known, fitted_cost, of_bench, of_run
from dflash_ray.run.folder import METRICS, RunFolder
from jobs import bench
from jobs.plan_topology import main
from tests.support.tiny_runs import tiny_config

QWEN = ["--config", "jobs/configs/qwen3.6-27b.yaml"]


def planned(tmp_path: Path, *flags: str) -> dict:
    out = tmp_path / "plan.json"
    assert main([*flags, "--json", str(out)]) == 0
    return json.loads(out.read_text())


def test_the_slower_side_decides_and_the_other_waits():
    rates = Rates(target=1000.0, drafter=2500.0, power=Power(target=500, drafter=600, waiting=100, host=200))
    few, many = point(rates, 2, 1, 8.64e7), point(rates, 4, 1, 8.64e7)
    assert (few.tokens_per_second, few.waits, few.target_wait) == (2000, "drafter 20%", 0)
    assert (many.tokens_per_second, many.waits) == (2500, "targets 38%")
    assert few.watts == 200 + 2 * 500 + 100 + 500 * 0.8 and few.tokens_per_joule == pytest.approx(2000 / few.watts)
    assert few.days == pytest.approx(0.5) and few.gpu_hours == pytest.approx(36)
    assert point(rates, 4, 2).tokens_per_second == 4000


def test_recommended_is_the_smallest_of_the_fastest():
    rates = Rates(target=1000.0, drafter=5500.0)
    points = [point(rates, n, 1) for n in range(1, 20)]
    assert recommend(points).targets == 6
    assert recommend(points, gpus=4).targets == 3
    assert recommend(points, gpus=1) is None


def test_seven_targets_are_no_faster_than_six_once_the_drafter_is_full(tmp_path, capsys):
    """Inputs of the source run: about 30 thousand tokens/s with 6-1, 27 with 7-1 (docs/planning.md); its 10% drop has another cause."""
    plan = planned(tmp_path, "--measured", "6-1=30000", "--measured", "7-1=27000", "--tokens", "1.866e9")
    rate = {row["targets"]: row["tokens_per_second"] for row in plan["topologies"] if row["drafters"] == 1}
    assert len(rate) == 32 and rate[5] < rate[6] == rate[7] == rate[32] == 30000
    assert plan["recommended"] == {"targets": 6, "drafters": 1}
    said = capsys.readouterr().out
    assert "7 targets are no faster than 6" in said
    assert "7-1 was measured at 27,000 tokens/s, 10% under" in said and "does not explain it" in said
    assert "arithmetic only" in said


def test_one_measured_run_gives_bounds_only():
    assert "at least 18,000" in rates_behind({6: 18000.0})[1] and "a run with more targets" in rates_behind({6: 18000.0})[1]


def test_arithmetic_says_seven_targets_at_one_anchor_per_43_tokens_and_one_per_5(tmp_path):
    """What the drafter's and the target's FLOPs say about the balance (docs/planning.md)."""
    even = ("--target-share", "0.9", "--drafter-share", "0.9", "--drafters", "1")
    plan = planned(tmp_path, *QWEN, *even)
    assert plan["recommended"]["targets"] in (7, 8)
    anchors = {row["targets"]: row["balancing_tokens_per_anchor"] for row in plan["topologies"]}
    assert 4.5 < anchors[1] < 5.5 and 38 < anchors[7] < 46 and anchors[6] < anchors[7]
    again = planned(tmp_path, *QWEN, *even, "--tokens-per-anchor", str(anchors[6]))
    six = next(row for row in again["topologies"] if row["targets"] == 6)
    assert six["waits"] == "nobody" and six["tokens_per_second"] == pytest.approx(6 * again["target_tokens_per_second"])
    assert all(row["days"] and row["gpu_hours"] for row in plan["topologies"])


def test_so_many_targets_that_no_anchor_could_be_trained():
    cost = DrafterCost(context=1e-4, anchor=1e-3)
    assert cost.balancing_tokens_per_anchor(20_000) is None
    assert cost.seconds_per_token(cost.balancing_tokens_per_anchor(5_000)) == pytest.approx(1 / 5_000)


def bench_row(name: str, tokens: int, anchors: int, seconds: float) -> dict:
    return {"name": name, "tokens": tokens, "timing": {"median": seconds}, "facts": {"anchors": anchors}}


def test_context_and_anchors_are_told_apart_in_a_drafters_record():
    def seconds(tokens: int, anchors: int) -> float:
        return 2e-6 * tokens + 4e-4 * anchors

    rows = [bench_row(f"{t}: forward+backward", t, a, seconds(t, a)) for t, a in ((4096, 512), (8192, 512), (16384, 381))]
    rows += [bench_row("4096: step", 4096, 512, seconds(4096, 512) + 0.004096)]
    cost = fitted_cost(rows)
    assert (cost.context, cost.anchor, cost.optimizer) == pytest.approx((2e-6, 4e-4, 1e-6))
    with pytest.raises(ValueError, match="two forward"):
        fitted_cost(rows[:1])


def write_run(folder: Path, material: Path, *, watts: float | None = None, ended: bool = False) -> Path:
    """Files of a run with three targets in which the drafter waits a quarter of the time."""
    run = RunFolder(folder)
    run.create(validate(tiny_config(material, folder, topology="3-1")), {})
    rates = {"real_tokens_per_second": 900.0, "drafter_wait": 0.25, "target_wait": 0.0, "targets": 3}
    run.append(METRICS, *({"step": step, **rates, **({"watts": watts} if watts else {})} for step in range(1, 12)))
    if ended:
        run.write_json("summary.json", {"target_tokens_per_second": 310.0, "drafter_tokens_per_second": 1240.0})
    return folder


def test_rates_of_a_run(tmp_path):
    known = of_run(write_run(tmp_path / "run", tmp_path / "material", watts=760.0))
    rates = known.rates()
    assert rates.target == pytest.approx(300) and rates.drafter == pytest.approx(1200)
    assert point(rates, 3, 1).watts == pytest.approx(760)
    assert known.tokens > 0 and known.tokens_per_anchor == 5
    denser = Known(tokens_per_anchor=2.0).over(known).rates()
    assert denser.drafter < rates.drafter
    assert of_run(write_run(tmp_path / "ended", tmp_path / "material", ended=True)).rates().target == pytest.approx(310)


def test_a_run_without_its_target_still_plans_but_does_not_guess_anchors(tmp_path, capsys):
    folder = write_run(tmp_path / "run", tmp_path / "material")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["target"]["path"] = str(tmp_path / "gone")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    plan = planned(tmp_path, "--run", str(folder))
    assert plan["drafter_cost"] is None and plan["recommended"]["targets"] == 4
    assert "how the drafter's time splits is not known" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--tokens-per-anchor"):
        main(["--run", str(folder), "--tokens-per-anchor", "3"])


def test_benchmark_records_and_what_was_given_go_over_the_rest(tmp_path, capsys):
    target, drafter = tmp_path / "target.json", tmp_path / "drafter.json"
    bench.main(["target", "--shape", "tiny-hybrid", "--repeats", "1", "--json", str(target)])
    bench.main(["drafter", "--shape", "tiny-hybrid", "--repeats", "1", "--json", str(drafter)])
    capsys.readouterr()
    plan = planned(
        tmp_path, "--bench", str(target), "--bench", str(drafter), "--tokens-per-anchor", "20", "--plot", str(tmp_path / "p.png")
    )
    measured = next(row for row in json.loads(target.read_text())["rows"] if "packed 16k" in row["name"])
    assert plan["target_tokens_per_second"] == measured["tokens_per_second"]
    assert plan["drafter_tokens_per_second"] > 0 and (tmp_path / "p.png").stat().st_size > 10_000
    assert "tiny-hybrid" in capsys.readouterr().out
    assert planned(tmp_path, "--bench", str(target), "--drafter-rate", "777")["drafter_tokens_per_second"] == 777


def test_a_pipeline_record_tells_both_stages_and_how_the_drafters_time_splits(tmp_path):
    def run(per_anchor: float) -> dict:
        alone = {"target": 13_000.0, "drafter": 1 / (2e-6 + 4e-4 / per_anchor)}
        ran = {"drafter_wait": 0.5, "target_wait": 0.0, "watts": 960.0}
        return {"tokens_per_anchor": per_anchor, "alone": alone, "run": ran}

    def written(*runs: dict) -> Path:
        path = tmp_path / "pipeline.json"
        path.write_text(json.dumps({"job": "pipeline", "shape": "qwen3.6-27b", "topology": "1-1", "device": "H200", "runs": runs}))
        return path

    both = of_bench(written(run(43.0), run(5.0)))
    assert (both.cost.context, both.cost.anchor) == pytest.approx((2e-6, 4e-4)) and both.target == 13_000
    assert both.power.target == pytest.approx(960 / 1.6)
    alone = of_bench(written(run(43.0)))
    assert alone.cost is None and alone.rates().drafter == pytest.approx(run(43.0)["alone"]["drafter"])


@pytest.mark.parametrize(
    "flags, named",
    [
        ([], "target's rate is not known"),
        (["--target-rate", "5"], "drafter's rate is not known"),
        (["--target-rate", "-5"], "not above 0"),
        (["--measured", "6-2=30000"], "--measured 6-2=30000"),
        (["--measured", "6-1=inf"], "--measured 6-1=inf"),
        (["--target-rate", "5", "--drafter-rate", "5", "--target-watts", "9", "--host-watts", "nan"], "not above 0"),
        (["--bench", "/dev/zero"], "/dev/zero: is no regular file"),
        (["--run", "/no/such/run"], "/no/such/run"),
        (["--bench", "/no/such.json"], "/no/such.json"),
        (["--target-rate", "5", "--drafter-rate", "5", "--gpus", "1"], "a target and a drafter need 2"),
        (["--target-rate", "5", "--drafter-rate", "5", "--nonsense", "1"], "nonsense"),
        (["--target-rate", "5", "--drafter-rate", "5", "--plot", "/no/such/folder/p.png"], "--plot"),
    ],
)
def test_a_mistake_is_one_line(flags, named):
    with pytest.raises(ValueError, match=named):
        main(flags)
