"""jobs.generate and jobs.prepare_data on what it wrote: actors that answer, one that is killed, mistakes told before Ray starts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from dflash_ray.generation.generate import GenerateSettings, generate
from dflash_ray.serve.plain import plain_greedy
from dflash_ray.target.load import load_target
from dflash_ray.target.shape import read_target_shape
from jobs import generate as job
from jobs import prepare_data


def _rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _word_questions(path, count: int):
    rows = [{"id": index, "messages": [{"role": "user", "content": f"w{10 + index} w{90 - index}"}]} for index in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.ray
def test_answers_made_by_actors_prepare_into_data_that_is_the_targets_own(tmp_path, folder, local_ray, capsys):
    prompts = _word_questions(tmp_path / "a.jsonl", 20)
    flags = ["--prompts", str(prompts), "--target", str(folder), "--output", str(tmp_path / "out.jsonl"), "--max-new-tokens", "16"]
    flags += ["--json", str(tmp_path / "report.json"), "--topology", "2-1", "--generation.batch_size", "2"]
    assert job.main(flags) == 0
    target, chat = load_target(folder, taps=None, device="cpu", with_head=True), ChatTokenizer(folder)
    rows = _rows(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == list(range(20))
    for row in rows:
        question, answer = row["conversations"]
        prompt = chat.encode(chat.render([question], None, generation=True, thinking=False))
        assert answer["prompt_ids"] == prompt
        assert answer["output_ids"] == plain_greedy(target, prompt, 16, (1,))
    capsys.readouterr()
    data = ["--input", str(tmp_path / "out.jsonl"), "--target", str(folder), "--output", str(tmp_path / "data")]
    assert prepare_data.main([*data, "--json", str(tmp_path / "prepared.json")]) == 0
    assert json.loads((tmp_path / "prepared.json").read_text())["on_policy"]["share"] == 1.0
    assert "without thinking: 1.00 of" in capsys.readouterr().out


def test_answers_by_another_author_are_warned_about(tmp_path, folder, capsys):
    rows = []
    for index in range(10, 40):
        words = " ".join(f"w{(7 * index + place) % 90 + 10}" for place in range(9))
        rows.append({"messages": [{"role": "user", "content": f"w{index}"}, {"role": "assistant", "content": words}]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prepare_data.main(["--input", str(tmp_path / "a.jsonl"), "--target", str(folder), "--output", str(tmp_path / "data")]) == 0
    assert "jobs.generate" in capsys.readouterr().out


@pytest.mark.ray
def test_a_killed_actor_costs_its_call_and_nothing_else(tmp_path, folder, answer_settings, local_ray):
    from actors.generator import ActorCrew

    chat = ChatTokenizer(folder)
    crew = ActorCrew(answer_settings(), count=2, gpus=0)
    try:
        local_ray.kill(crew._actors[0])
        settings = GenerateSettings(
            (_word_questions(tmp_path / "a.jsonl", 12),), folder, tmp_path / "out.jsonl", (False,), 12, 0.0, 0, group=3
        )
        report = generate(settings, chat, read_target_shape(folder), (1,), crew)
    finally:
        crew.close()
    assert [row["id"] for row in _rows(tmp_path / "out.jsonl")] == list(range(12))
    assert report["failed"] == 0 and sum(report["failed_calls"].values()) >= 1


def test_mistakes_are_told_before_ray_starts(tmp_path, folder):
    prompts = _word_questions(tmp_path / "a.jsonl", 1)
    (tmp_path / "a.jinja").write_text(ChatTokenizer(folder).template.replace("enable_thinking", "never_given"))
    for flags, message in (
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--temperature", "-1"], "--temperature -1"),
        (["--prompts", str(tmp_path / "no.jsonl")], "no.jsonl: no such file"),
        (["--generation.batchsize", "3"], "did you mean generation.batch_size"),
        (["--json", str(tmp_path / "no" / "report.json")], "its folder does not exist"),
        (["--thinking", "both", "--chat-template", str(tmp_path / "a.jinja")], "--thinking both: .* has no thinking switch"),
    ):
        with pytest.raises(ValueError, match=message):
            job.main(["--prompts", str(prompts), "--target", str(folder), "--output", str(tmp_path / "out.jsonl"), *flags])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jinja", "a.jsonl"]


def test_the_module_of_the_library_loads_no_ray():
    rooms = (
        "dflash_ray.data.prepare.prepare",
        "dflash_ray.generation.answers",
        "dflash_ray.generation.generate",
        "dflash_ray.generation.on_policy",
    )
    code = f"import sys, {', '.join(rooms)}; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
