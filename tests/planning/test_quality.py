"""jobs.quality: the recipes that come with the project, the arithmetic of a fixed time, and the job itself on a tiny target."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from dflash_ray.planning.quality import Recipe, is_result, lanes, nearest_epochs, rate_of, read_recipes, recipe_config, result_of, summarise
from dflash_ray.run.folder import RunFolder
from jobs.quality import main
from jobs.support.quality_crew import Lane, Task
from tests.support.processes import PATIENCE, ROOT, alive, end, family, start_job, wait_until
from tests.support.tiny_runs import tiny_config
from tests.support.tiny_targets import save_target, save_tokenizer

CONFIG = ROOT / "jobs" / "configs" / "smollm2-quality.yaml"
RECIPES = CONFIG.with_name("smollm2-quality-recipes.yaml")


def test_every_recipe_of_the_project_is_a_run_of_its_own():
    recipes = read_recipes(RECIPES)
    trees = {name: recipe_config([CONFIG], recipe, []).as_dict() for name, recipe in recipes.items()}
    assert list(trees)[:3] == ["base", "best", "plain"] and len(trees) >= 15
    assert len({json.dumps(tree) for tree in trees.values()}) == len(trees)
    plain, base, best = trees["plain"], trees["base"], trees["best"]
    assert (plain["loss"]["ce"], plain["loss"]["dpace"], plain["optimizer"]["name"], plain["train"]["ema"]) == (1.0, 0.0, "adamw", None)
    assert [plain[key] for key in ("data", "anchors", "batching", "draft")] == [
        base[key] for key in ("data", "anchors", "batching", "draft")
    ]
    assert [best[key] for key in ("data", "anchors", "batching", "optimizer")] == [
        base[key] for key in ("data", "anchors", "batching", "optimizer")
    ]
    for tree in trees.values():
        assert tree["placement"]["gpus_per_target"] + tree["placement"]["gpus_per_drafter"] == 1.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no recipe"),
        ("[1, 2]", "must be a mapping"),
        ("a: 5", "a must hold dotted settings"),
        ("a: {loss: {ce: 1}}", "a must hold dotted settings"),
        ("a: {run.seed: 1}", "a sets run.seed, which jobs.quality chooses"),
        ("a: {train.epochs: 3}", "a sets train.epochs"),
        ("../a: {}", "names a folder too"),
    ],
)
def test_a_file_that_is_no_recipes_is_one_clear_line(tmp_path, text, says):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_recipes(path)


def test_flags_of_a_recipe_give_the_values_of_its_file():
    changes = {"train.ema": None, "draft.target_layer_ids": [1, 3], "loss.kl": 0.5, "optimizer.name": "muon", "run.fresh": True}
    config = recipe_config([], Recipe("r", changes), ["--loss.kl", "0.25"])
    assert config.train.ema is None and config.draft.target_layer_ids == [1, 3] and config.run.fresh
    assert (config.loss.kl, config.optimizer.name) == (0.25, "muon")  # the command line wins
    with pytest.raises(ValueError, match="recipe r: loss.cee: no such setting|recipe r: --loss.cee: no such setting"):
        recipe_config([], Recipe("r", {"loss.cee": 1}), [])


@pytest.mark.parametrize(("seconds", "rate", "per_epoch", "epochs"), [(150, 10, 229, 7), (150, 10, 100, 15), (1, 1, 50, 1), (60, 3, 50, 4)])
def test_epochs_are_those_that_take_closest_to_the_time(seconds, rate, per_epoch, epochs):
    assert nearest_epochs(seconds, rate, per_epoch) == epochs
    missed = [abs(count * per_epoch / rate - seconds) for count in range(1, 40)]
    assert missed[epochs - 1] == min(missed)


@pytest.mark.parametrize("names", [["plain", "best"], ["a", "b", "c"]])
def test_every_gpu_gets_the_same_mix_and_recipes_take_turns(names):
    shared = lanes(names, [0, 1, 2, 3], 2)
    assert sorted(shared[0] + shared[1]) == sorted((name, seed) for name in names for seed in range(4))
    for lane in shared:
        assert {name: sum(one == name for one, _ in lane) for name in names} == dict.fromkeys(names, 2)
    assert lanes(names, [3, 5], 1) == [[(name, seed) for seed in (3, 5) for name in names]]


def fake_run(folder: Path, *, steps: int, apart: float, tau: float) -> RunFolder:
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    for step in range(1, steps + 1):
        at = 1000 + (step - 1) * apart + (50 if step > 1 else 0)  # the first step compiles for 50 s
        waits = {"drafter_wait": 0.25, "target_wait": 0.0}
        run.append("metrics.jsonl", {"step": step, "time": at, "real_tokens": 100, "loss_smooth": 9 - step / 10, "tau": 1.5, **waits})
    run.append("validation.jsonl", {"step": steps, "tau": tau, "replay_tau": tau - 0.1, "loss": 3.0})
    return run


def test_what_is_told_of_a_run_and_of_a_recipe(tmp_path):
    runs = []
    for seed, apart in enumerate((0.5, 1.0)):
        run = fake_run(tmp_path / str(seed), steps=21, apart=apart, tau=2.0 + seed)
        assert rate_of(run, 1) == pytest.approx(1 / apart)
        result = result_of(run, seconds=61)
        assert result["training_seconds"] == pytest.approx(50 + 20 * apart) and result["off_budget"] == (seed == 1)
        assert (result["steps"], result["tokens"], result["loss"], result["validation_tau"]) == (21, 2100, 6.9, 2.0 + seed)
        assert result["curve"][-1] == [21, pytest.approx(50 + 20 * apart), 6.9, 1.5]
        served = {"tau": 1.9 + seed, "per_slot_acceptance": [0.5, 0.2 * seed], "tokens_per_second": 30.0, "plain_tokens_per_second": 20.0}
        runs.append({"recipe": "r", "seed": seed, **result, **served, "lossless": seed == 0})
    [row] = summarise(runs)
    assert (row["seeds"], row["off_budget"], row["lossless"]) == (2, 1, False)
    assert row["tau"] == {"mean": pytest.approx(2.4), "min": 1.9, "max": 2.9}
    assert row["per_slot_acceptance"] == [0.5, 0.1] and row["replay_tau"]["max"] == pytest.approx(2.9)
    with pytest.raises(ValueError, match="21 steps after the first 30; a rate needs two|steps after the first 30"):
        rate_of(run, 30)


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> dict[str, Path]:
    """A base config over a tiny target with a tokenizer, its recipes, and prompts."""
    folder = tmp_path_factory.mktemp("quality")
    save_target("qwen3", folder / "target")
    save_tokenizer(folder / "target")
    tree = tiny_config(
        folder,
        folder / "unused",
        train={"epochs": 1, "batches_per_step": 2},
        validation={"every_steps": 1000, "batches": 2, "tokens_per_anchor": 1},
    )
    del tree["run"]
    (folder / "base.yaml").write_text(yaml.safe_dump(tree))
    recipes = {
        "plain": {"loss.ce": 1.0, "loss.dpace": 0.0},
        "best": {"optimizer.name": "muon", "train.ema": 0.9},
        "dies": {"debug.bad_batches": [0], "flow.deaths_per_batch": 1, "flow.max_set_aside_in_a_row": 1},
        "slow": {"debug.target_delay_seconds": 1.0},
    }
    (folder / "base-recipes.yaml").write_text(yaml.safe_dump(recipes, sort_keys=False))
    rows = [{"conversations": [{"role": "user", "content": f"w{number}"}]} for number in range(50, 54)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"config": folder / "base.yaml", "prompts": folder / "prompts.jsonl"}


def command(material: dict[str, Path], output: Path, *more: str) -> list[str]:
    flags = ["--config", str(material["config"]), "--prompts", str(material["prompts"]), "--output", str(output), "--limit", "2"]
    return [*flags, "--max-new-tokens", "12", *more]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--recipe", "other"], "--recipe other: no such recipe; there are plain, best"),
        (["--seconds", "0"], "--seconds 0: too little"),
        (["--seeds", "1", "1"], "each seed once"),
        (["--rate", "best=fast"], "--rate best=fast: write RECIPE=STEPS_PER_SECOND"),
        (["--rate", "dies=3"], "--rate dies=3"),
        (["--gpus", "0,0"], "--gpus 0,0"),
        (["--rate", "plain=1e308"], "recipe plain: train.epochs: .* less than or equal to 1000"),
        (["--seeds", "0", "-1"], "recipe plain: run.seed: .* greater than or equal to 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: must be at least 1"),
        (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["--limit", "-1"], "--limit -1: must be at least 1"),
        (["--run.max_steps", "3"], "--run.max_steps: jobs.quality chooses it"),
        (["--run.seed=3"], "--run.seed: jobs.quality chooses it"),
        (["--train.epochs", "3"], "--train.epochs: jobs.quality chooses it"),
        (["--loss.cee", "1"], "--loss.cee: no such setting"),
        (["--batching.token_budget", "20"], "recipe plain: sample .* over batching.token_budget 20"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(material, tmp_path, flags, says):
    with pytest.raises(ValueError, match=says):
        main(command(material, tmp_path / "out", *flags))
    assert not (tmp_path / "out").exists()


def test_prompts_that_are_none_are_refused_before_anything_is_trained(material, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"conversations": []}\n')
    with pytest.raises(ValueError, match="empty.jsonl: no row is a prompt"):
        main(command({**material, "prompts": tmp_path / "empty.jsonl"}, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["[1]", '{"runs": [{"recipe": "plain"}]}', '{"runs": 5}', "{"])
def test_another_file_than_results_is_refused(material, tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="--json .*results.json"):
        main(command(material, tmp_path / "out", "--json", str(path)))
    assert path.read_text() == text


@pytest.mark.parametrize(
    "damage",
    [{"total_seconds": None}, {"tau": "3"}, {"per_slot_acceptance": [0.5, "x"]}, {"recipe": ["plain"]}, {"seed": None}, {"lossless": 3}],
)
def test_damaged_results_are_one_clear_line(material, tmp_path, damage):
    numbers = dict.fromkeys(("training_seconds", "total_seconds", "planned_steps_per_second", "loss", "validation_tau", "replay_tau"), 1.0)
    served = {"tau": 1.5, "per_slot_acceptance": [0.5], "tokens_per_second": 2.0, "plain_tokens_per_second": 1.0, "speedup": 2.0}
    fine = {"recipe": "other", "seed": 0, "key": "k", "steps": 3, "tokens": 9, "off_budget": False, **numbers, **served}
    fine |= {"lossless": True, "divergences": 0, "prompts": 2}
    assert is_result(fine) and is_result(fine | {"tau": None, "validation_tau": None, "replay_tau": None})
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"runs": [fine | damage]}))
    with pytest.raises(ValueError, match="results.json: is no file of results"):
        main(command(material, tmp_path / "out", "--json", str(path), "--recipe", "plain"))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (["--output", "out"], "--output .*out: another jobs.quality writes there"),
        (["--output", "out", "--json", "other.json"], "--output .*out: another jobs.quality writes there"),
        (["--output", "elsewhere", "--json", "out/quality.json"], "--json .*quality.json: another jobs.quality writes there"),
    ],
)
def test_two_calls_do_not_work_in_one_place(material, tmp_path, monkeypatch, other, says):
    """The second one would drop the results that the first adds, and train over its runs."""
    from jobs import quality

    tried = []
    monkeypatch.chdir(tmp_path)

    async def work(task, todo, *_):
        if not tried:
            tried.append(True)
            with pytest.raises(ValueError, match=says):
                main(command(material, tmp_path / "out", "--recipe", "best", *other))
        return []

    monkeypatch.setattr(quality, "work_all", work)
    for _ in range(2):  # and a call that has ended holds nothing back
        assert main(command(material, tmp_path / "out", "--recipe", "plain")) == 0
    assert tried


def test_results_are_replaced_in_one_move(material, tmp_path, monkeypatch):
    from jobs import quality

    async def work(task, todo, done, failed, say):
        failed("plain", 0, "why")
        whole = (tmp_path / "out" / "quality.json").open()  # who reads now sees one state whatever is written meanwhile
        failed("plain", 1, "why")
        assert [row["seed"] for row in json.load(whole)["failed"]] == [0]
        return []

    monkeypatch.setattr(quality, "work_all", work)
    assert main(command(material, tmp_path / "out", "--recipe", "plain")) == 1


def trained(material: dict[str, Path], output: Path, monkeypatch, capsys, *flags: str, **fields) -> str:
    """What the job says, with a file of a finished training in place, up to where it would start jobs. `fields` are changed in it."""
    from jobs import quality

    keys = {}

    async def work(task, todo, *_):
        keys.update(task.training_keys)
        return [pair for lane in todo.values() for pair in lane]

    monkeypatch.setattr(quality, "work_all", work)
    assert main(command(material, output, "--recipe", "plain")) == 0
    fine = {"key": keys["plain"], "epochs": 1, "rate": 2.0, "command": "python -m jobs.train", "seconds": 3.0}
    path = output / "plain-seed0" / "quality-training.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fine | fields))
    assert main(command(material, output, "--recipe", "plain", *flags)) == 0
    return capsys.readouterr().out


def test_what_was_trained_with_other_settings_is_not_overwritten(material, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="plain seed 0 was trained with other settings"):
        trained(material, tmp_path / "out", monkeypatch, capsys, "--optimizer.lr", "1e-3")
    with pytest.raises(ValueError, match="plain seed 0 was trained with other settings"):
        trained(material, tmp_path / "out", monkeypatch, capsys, "--seconds", "2")


def test_results_of_other_weights_are_refused(material, tmp_path, monkeypatch, capsys):
    target = tmp_path / "target"
    shutil.copytree(material["config"].parent / "target", target)
    flags = ("--target.path", str(target))
    trained(material, tmp_path / "out", monkeypatch, capsys, *flags)
    save_target("qwen3", target, seed=1)
    with pytest.raises(ValueError, match="plain seed 0 was trained with other settings, data, weights"):
        main(command(material, tmp_path / "out", "--recipe", "plain", *flags))


def test_how_it_is_served_does_not_change_a_training(material, tmp_path, monkeypatch, capsys):
    trained(material, tmp_path / "out", monkeypatch, capsys, "--batch-size", "2")
    row = {"conversations": [{"role": "user", "content": "w60"}]}
    (tmp_path / "other.jsonl").write_text(json.dumps(row) + "\n")
    trained({**material, "prompts": tmp_path / "other.jsonl"}, tmp_path / "out", monkeypatch, capsys)


@pytest.mark.parametrize("fields", [{"command": None}, {"seconds": "x"}, {"epochs": 1.5}, {"rate": True}, {"key": 5}])
def test_a_damaged_file_of_a_training_is_one_clear_line(material, tmp_path, monkeypatch, capsys, fields):
    with pytest.raises(ValueError, match="quality-training.json: .* is damaged; remove the file"):
        trained(material, tmp_path / "out", monkeypatch, capsys, **fields)


def test_a_lane_goes_on_after_files_that_cannot_be_read(tmp_path):
    names = ("a", "b")
    task = Task([], [], dict.fromkeys(names), {}, {}, tmp_path, 1.0, 1, [], dict.fromkeys(names, 1.0), {}, {})
    for name in names:
        (tmp_path / f"{name}-seed0").mkdir()
        (tmp_path / f"{name}-seed0" / "quality-training.json").write_text("{}")
    failed: list[str] = []
    locks = {name: asyncio.Lock() for name in names}
    lane = Lane(task, None, print)
    asyncio.run(lane.work([(name, 0) for name in names], locks, print, lambda name, _seed, why: failed.append(f"{name}: {why}")))
    assert len(failed) == 2 and all("quality-training.json: key is damaged" in why for why in failed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recipes_are_trained_served_and_not_run_again(material, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--recipe", "plain", "best", "--seconds", "1", "--pilot-steps", "4", "--rate", "plain=10"]
    assert main(command(material, out, *flags)) == 0
    record = json.loads((out / "quality.json").read_text())
    assert [(run["recipe"], run["seed"]) for run in record["runs"]] == [("plain", 0), ("best", 0)]
    for run in record["runs"]:
        config = yaml.safe_load((out / f"{run['recipe']}-seed0" / "config.yaml").read_text())
        assert config["train"]["epochs"] == run["epochs"] and run["steps"] == len(
            RunFolder(out / f"{run['recipe']}-seed0").read("metrics.jsonl")
        )
        assert run["lossless"] and run["tau"] >= 1 and run["validation_tau"] >= 1 <= run["replay_tau"] and run["prompts"] == 2
        assert run["commands"][0].startswith("python -m jobs.train --config") and len(run["commands"]) == 3
    assert [row["recipe"] for row in record["summary"]] == ["plain", "best"]
    assert not (out / "pilot-best").exists()
    shown = capsys.readouterr().out
    assert "best: measuring its rate over 4 steps" in shown and "plain: measuring" not in shown

    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    assert main(command(material, out, *flags)) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before
    assert "2 runs are finished already" in capsys.readouterr().out
    assert json.loads((out / "quality.json").read_text())["runs"] == record["runs"]
    with pytest.raises(ValueError, match="plain seed 0 was trained with other settings"):
        main(command(material, out, *flags, "--optimizer.lr", "1e-3"))
    other = tmp_path / "other.jsonl"
    other.write_text(material["prompts"].read_text().replace("w5", "w6"))
    with pytest.raises(ValueError, match="plain seed 0 was trained or served with other settings, data, prompts"):
        main(command({**material, "prompts": other}, out, *flags))
    # as if serving had failed: the run is not in the file, its training stays
    (out / "quality.json").write_text(json.dumps(record | {"runs": record["runs"][1:]}))
    before = {path: path.stat().st_mtime_ns for path in (out / "plain-seed0" / "checkpoints").rglob("*.safetensors")}
    assert before and main(command(material, out, *flags)) == 0
    assert "plain-seed0: trained by an earlier call, whose serving failed" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (out / "plain-seed0" / "checkpoints").rglob("*.safetensors")} == before
    again = json.loads((out / "quality.json").read_text())["runs"]
    assert [(run["recipe"], run["tau"]) for run in again] == [(run["recipe"], run["tau"]) for run in record["runs"][::-1]]
    assert main(command(material, out, *flags, "--seeds", "0", "1", "--stop-after", "1")) == 0
    assert "not run, --stop-after: best seed 1" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_fails_is_told_and_the_others_go_on(material, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--recipe", "dies", "plain", "--seconds", "1", "--rate", "dies=10", "plain=10"]
    assert main(command(material, out, *flags, "--gpus", "0,1")) == 1  # at the same time, each with a Ray of its own
    record = json.loads((out / "quality.json").read_text())
    assert [(run["recipe"], run["gpu"]) for run in record["runs"]] == [("plain", "1")]
    [row] = record["failed"]
    assert (row["recipe"], row["seed"]) == ("dies", 0)
    assert "jobs.train ended with code 1" in row["why"] and "features hold NaN" in row["why"]
    assert "failed: dies seed 0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_it_leaves_no_process(material, tmp_path, how):
    out, log = tmp_path / "out", tmp_path / "log"
    flags = ["--recipe", "slow", "--seconds", "60", "--rate", "slow=50"]
    job = start_job("jobs.quality", *command(material, out, *flags), log=log)
    try:
        metrics = out / "slow-seed0" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() or job.poll() is not None, "a step")
        assert job.poll() is None, log.read_text()
        processes = family(job.pid)
        assert len(processes) > 4
        job.send_signal(how)
        assert job.wait(timeout=PATIENCE) == (143 if how == signal.SIGTERM else -how), log.read_text()
        wait_until(lambda: not alive(processes), "the processes of the job to end")
    finally:
        end(job)
    assert "Traceback" not in log.read_text(), log.read_text()
