"""jobs.evaluate: the numbers it writes are those of the answers it gave, and every mistake is one line before anything runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch

from dflash_ray.config.schema import Config
from dflash_ray.data.prepare.prompts import read_prompts
from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from dflash_ray.draft.dflash.card import model_card
from dflash_ray.draft.dflash.export import export_drafter, read_shape, read_tensors
from dflash_ray.draft.dflash.model import DraftModel, initialise
from dflash_ray.draft.dflash.shape import DraftShape
from dflash_ray.linear import FrozenLinear
from dflash_ray.serve.evaluate import undecided
from dflash_ray.serve.plain import plain_greedy
from dflash_ray.target.load import load_target
from dflash_ray.target.weights import WeightFiles
from jobs.evaluate import main
from tests.support.tiny_targets import VOCAB, save_target, save_tokenizer

BLOCK = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(target folder, drafter folder): a random drafter, so some proposals match by chance and most do not."""
    root = tmp_path_factory.mktemp("pair")
    target, drafter = root / "target", root / "drafter"
    save_target("qwen3_5", target, layers=4, varied=True)
    save_tokenizer(target)
    shape = DraftShape(
        hidden=32,
        vocab=VOCAB,
        intermediate=40,
        num_layers=1,
        heads=2,
        kv_heads=1,
        head_dim=16,
        layer_types=("full_attention",),
        sliding_window=None,
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        max_position_embeddings=2048,
    )
    model = DraftModel(shape)
    initialise(model, 0, std=0.3)
    export_drafter(model.state_dict(), shape, drafter, target=WeightFiles(target).fingerprint())
    return target, drafter


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talk(*words, **answer):
    messages = [{"role": "user", "content": " ".join(words)}]
    return {"conversations": messages + ([{"role": "assistant", **answer}] if answer else [])}


def run_job(pair, prompts, tmp_path, *flags):
    target, drafter = pair
    out = tmp_path / "out.json"
    assert main(["--drafter", str(drafter), "--target", str(target), "--prompts", str(prompts), "--json", str(out), *flags]) == 0
    return json.loads(out.read_text())


def test_numbers_are_those_of_the_answers(pair, tmp_path):
    prompts = write_rows(tmp_path / "p.jsonl", *(talk(f"w{n}", "w9", "w40") for n in range(10, 18)))
    trace = tmp_path / "trace.jsonl"
    result = run_job(pair, prompts, tmp_path, "--max-new-tokens", "30", "--trace", str(trace))
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    target, tokenizer = load_target(pair[0], taps=None, device="cpu", with_head=True), ChatTokenizer(pair[0])
    for row, prompt in zip(rows, read_prompts(prompts, tokenizer)[0], strict=True):
        assert row["answer"] == tokenizer.decode(plain_greedy(target, prompt.ids, 30, [1]))
    passes = [step for row in rows for step in row["passes"]]
    produced = [len(step["produced"].split()) for step in passes]
    assert result["tau"] == sum(produced) / len(passes)
    assert result["passes"] == len(passes) and result["prompts"] == 8
    assert result["tokens"] == sum(len(row["answer"].split()) for row in rows) == sum(produced) + 8
    assert result["lossless"] is True and result["divergences"] == 0
    agreed = [min(step["accepted"], count) for step, count in zip(passes, produced, strict=True)]
    assert result["per_slot_acceptance"] == [sum(a >= k for a in agreed) / len(agreed) for k in range(1, BLOCK)]
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["plain_tokens_per_second"])
    assert result["sets"]["p"]["tau"] == result["tau"]


def test_a_drafter_of_another_target_serves_with_a_warning(pair, tmp_path, capsys):
    prompts = write_rows(tmp_path / "p.jsonl", talk("w10", "w9"))
    assert run_job(pair, prompts, tmp_path, "--max-new-tokens", "4")["other_target"] is False
    assert "warning" not in capsys.readouterr().err
    other = tmp_path / "other"
    save_target("qwen3_5", other, seed=1, layers=4, varied=True)
    save_tokenizer(other)
    result = run_job((other, pair[1]), prompts, tmp_path, "--max-new-tokens", "4")
    assert result["other_target"] is True and result["lossless"]
    assert f"was trained for other weights than those of --target {other}" in capsys.readouterr().err
    silent = tmp_path / "silent"
    shape = read_shape(pair[1])
    export_drafter(read_tensors(pair[1], shape), shape, silent)
    assert run_job((other, silent), prompts, tmp_path, "--max-new-tokens", "4")["other_target"] is None


def test_prompts_are_what_a_server_would_feed(pair, tmp_path):
    tokenizer = ChatTokenizer(pair[0])
    path = write_rows(
        tmp_path / "p.jsonl",
        talk("w50", "w51"),
        talk("w50", "w51", content="w99"),
        talk("w50", content="w99", prompt_ids=[7, 8, 9], output_ids=[10]),
        {"input_ids": [20, 21, 22, 23], "loss_mask": [0, 0, 1, 1]},
        talk("w50", content=None),
        {"conversations": [{"role": "assistant", "content": "w9"}]},
        {"conversations": [{"role": "stranger", "content": "w9"}]},
    )
    path.write_text(path.read_text() + "\n{broken\n")
    prompts, skipped = read_prompts(path, tokenizer)
    chat = [2, 3, 50, 51, 1, 2, 4]
    assert [prompt.ids for prompt in prompts] == [chat, chat, [7, 8, 9], [20, 21]]
    assert dict(skipped) == {"null_content": 1, "no_prompt": 1, "unknown_role": 1, "not_json": 1}
    assert [prompt.ids for prompt in read_prompts(path, tokenizer, thinking=True, limit=1)[0]] == [[*chat, 5]]
    with pytest.raises(ValueError, match="too_long"):
        read_prompts(path, tokenizer, longest=1)


def test_sets_thinking_and_batches_are_reported_apart(pair, tmp_path):
    first = write_rows(tmp_path / "first.jsonl", *(talk(f"w{n}") for n in range(60, 65)))
    second = write_rows(tmp_path / "second.jsonl", talk("w70", "w71"), {"nothing": 1})
    flags = ["--max-new-tokens", "12", "--thinking", "both"]
    alone = run_job(pair, first, tmp_path, "--prompts", str(second), *flags)
    batched = run_job(pair, first, tmp_path, "--prompts", str(second), "--batch-size", "3", *flags)
    assert list(batched["sets"]) == ["first", "first (thinking)", "second", "second (thinking)"]
    assert batched["sets"]["second"]["skipped"] == {"no_conversation": 1}
    assert [one["tau"] for one in batched["sets"].values()] == [one["tau"] for one in alone["sets"].values()]
    assert batched["prompts"] == 12 and batched["tokens"] == alone["tokens"]


def test_what_was_measured_goes_into_the_drafters_card(pair, tmp_path):
    prompts = write_rows(tmp_path / "p.jsonl", talk("w60"), talk("w61"))
    with pytest.raises(ValueError, match="--card .*README.md: no such file"):
        run_job(pair, prompts, tmp_path, "--card")
    drafter = tmp_path / "drafter"
    shutil.copytree(pair[1], drafter)
    shape = read_shape(drafter)
    (drafter / "README.md").write_text(model_card(shape, Config(), "demo", {}, {}))
    result = run_job((pair[0], drafter), prompts, tmp_path, "--card", "--max-new-tokens", "9")
    card = (drafter / "README.md").read_text()
    assert f"| p, 2 prompts served greedily, at most 9 tokens, float32 | {result['tau']:.2f} |\n\n## Recipe" in card
    result = run_job((pair[0], drafter), prompts, tmp_path, "--card", "--max-new-tokens", "9", "--temperature", "0.5")
    more = (drafter / "README.md").read_text()
    assert f"| p, 2 prompts served at temperature 0.5, at most 9 tokens, float32 | {result['tau']:.2f} |" in more and len(more) > len(card)
    before = (drafter / "README.md").stat().st_mtime_ns
    with pytest.raises(ValueError, match="--temperature -1"):
        run_job((pair[0], drafter), prompts, tmp_path, "--card", "--temperature", "-1")
    assert (drafter / "README.md").stat().st_mtime_ns == before  # what is refused writes nothing
    (drafter / "README.md").write_text("# another")
    with pytest.raises(ValueError, match="--card .*README.md: no section 'Acceptance length'"):
        run_job((pair[0], drafter), prompts, tmp_path, "--card")


def test_both_ways_of_a_template_that_knows_one_are_refused(pair, tmp_path):
    prompts = write_rows(tmp_path / "p.jsonl", talk("w60"))
    template = tmp_path / "plain.jinja"
    template.write_text(ChatTokenizer(pair[0]).template.replace("enable_thinking", "never_given"))
    flags = ["--max-new-tokens", "4", "--chat-template", str(template)]
    with pytest.raises(ValueError, match="--thinking both: the chat template of .* has no thinking switch"):
        run_job(pair, prompts, tmp_path, *flags, "--thinking", "both")
    assert list(run_job(pair, prompts, tmp_path, *flags, "--thinking", "on")["sets"]) == ["p"]


def test_sampling_says_so_and_is_repeatable(pair, tmp_path):
    prompts = write_rows(tmp_path / "p.jsonl", talk("w50"), talk("w52"))
    flags = ["--max-new-tokens", "16", "--temperature", "0.8"]
    first, again = (run_job(pair, prompts, tmp_path, *flags) for _ in range(2))
    assert first["lossless"] is None and first["divergences"] is None
    assert first["tau"] == again["tau"] and first["tokens"] == again["tokens"]


def test_a_divergence_in_bf16_is_excused_only_where_the_target_was_undecided(pair):
    target = load_target(pair[0], taps=[0, 2], device="cpu", precision="bf16", with_head=True)
    prompts = [2, 3, 50, 51, 1, 2, 4], [2, 3, 50, 51, 52, 53, 54, 55, 1, 2, 4]

    def rows(other: int):
        """Two prompts whose answers part late and at once, and one answer that only ends earlier."""
        for prompt, at in zip(prompts, (12, 0), strict=True):
            expected = plain_greedy(target, prompt, 20, [])
            yield prompt, expected, [*expected[:at], other if expected[at] != other else other + 1, *expected[at + 1 :]]
        yield prompt, expected, expected[:12]

    assert undecided(target, list(rows(30))) == [False, False, False]
    expected = plain_greedy(target, prompts[0], 20, [])[12]
    target.logits = FrozenLinear(target.head.clone())
    target.logits.weight[30] = target.head[expected]  # now both score the same, and the lower id wins
    assert plain_greedy(target, prompts[0], 20, [])[12] in (30, expected)
    first, *others = rows(30)
    assert undecided(target, [first, *others]) == [True, False, False]
    assert undecided(target, []) == []
    worst = int(target.logits(target.head[expected]).argmin())
    part = first[1].index(first[2][12]) if first[1] == first[2] else 12
    wrong = (first[0], first[1], [*first[1][:part], worst, *first[1][part + 1 :]])
    assert undecided(target, [wrong]) == [False]  # two tokens tie, but the answer has neither


def test_bf16_reports_how_many_prompts_differ(pair, tmp_path):
    prompts = write_rows(tmp_path / "p.jsonl", *(talk(f"w{n}", "w9") for n in range(10, 14)))
    result = run_job(pair, prompts, tmp_path, "--max-new-tokens", "20", "--precision", "bf16")
    assert result["precision"] == "bf16"
    assert 0 <= result["divergences"] <= 4 and (result["lossless"] or result["divergences"])


def change(folder, name, tmp_path, **values):
    """A copy of `folder` whose JSON file `name` has other values."""
    copy = tmp_path / "changed"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    data = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps({**data, **values}))
    return str(copy)


def test_mistakes_are_named_before_anything_runs(pair, tmp_path):
    target, drafter = map(str, pair)
    good = str(write_rows(tmp_path / "p.jsonl", talk("w50")))
    empty = str(write_rows(tmp_path / "empty.jsonl"))
    same = str(tmp_path / "same.json")
    other = change(pair[1], "config.json", tmp_path, num_target_layers=9)
    cases = [
        ([], "--drafter"),
        (["--drafter", str(tmp_path), "--target", target, "--prompts", good], "config.json"),
        (["--drafter", drafter, "--target", str(tmp_path / "no"), "--prompts", good], "no"),
        (["--drafter", drafter, "--target", target, "--prompts", str(tmp_path / "missing")], "missing: no such file"),
        (["--drafter", drafter, "--target", target, "--prompts", empty], "no row is a prompt"),
        (["--drafter", other, "--target", target, "--prompts", good], "number of target layers"),
        (["--drafter", drafter, "--target", target, "--prompts", good, "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--drafter", drafter, "--target", target, "--prompts", good, "--limit", "-1"], "--limit -1"),
        (["--drafter", drafter, "--target", target, "--prompts", good, "--temperature", "-1"], "--temperature"),
        (["--drafter", drafter, "--target", target, "--prompts", good, "--seed", "-1"], "--seed -1: must be at least 0"),
        (["--drafter", drafter, "--target", target, "--prompts", good, "--json", same, "--trace", same], "--trace .*: is what --json"),
        (["--drafter", drafter, "--target", target, "--prompts", good, "--unknown", "1"], "--unknown"),
        (["--drafter", drafter, "--target", target, "--prompts", good, "--json", str(tmp_path / "no" / "o.json")], "--json"),
    ]
    if not torch.cuda.is_available():
        cases.append((["--drafter", drafter, "--target", target, "--prompts", good, "--device", "cuda"], "no CUDA device"))
    for argv, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            main(argv)
        assert "\n" not in str(caught.value)


def test_the_job_exits_with_2_and_one_line(pair, tmp_path):
    command = [sys.executable, "-m", "jobs.evaluate", "--drafter", str(pair[1]), "--target", str(pair[0]), "--prompts", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
