"""From files to a data set: counts add up, splits do not leak, and an interruption or a mistake leaves nothing half written."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_ray.data.prepare.counts import Counts
from dflash_ray.data.prepare.parts import Parts
from dflash_ray.data.prepare.prepare import ChunkWorker, PrepareSettings, prepare, validation_groups
from dflash_ray.data.prepare.rows import Chunk, find_files, read_chunks
from dflash_ray.data.prepare.tokenizer import ChatTokenizer, check_same_tokenizer
from dflash_ray.data.store.dataset import dataset_splits, open_dataset
from jobs import prepare_data
from jobs.support.paths import JOB_MARK
from tests.support.tiny_chat import KEEPS, STRIPS, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer") / "keeps", KEEPS)


@pytest.fixture(scope="module")
def chat(folder):
    return ChatTokenizer(folder)


def _row(question: str, answer: str = "fox and dog", **more) -> str:
    return json.dumps({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more})


def _settings(tmp_path, folder, *inputs, **more) -> PrepareSettings:
    return PrepareSettings(inputs=inputs, tokenizer=folder, output=tmp_path / "out", **more)


def _samples(path) -> dict[str, list[tuple[list[int], list[int]]]]:
    out = {}
    for split in dataset_splits(path):
        data = open_dataset(path, split)
        out[split] = [(sample.input_ids.tolist(), sample.loss_mask.tolist()) for sample in data.read(np.arange(len(data)))]
    return out


def _lines(path, count: int) -> None:
    path.write_text("".join(_row(f"question {index}", f"answer {index}") + "\n" for index in range(count)))


def test_a_data_set_and_its_report(tmp_path, folder, chat):
    (tmp_path / "a.jsonl").write_text("\n".join([_row("one"), "{", "", _row("two"), _row("three", "fox " * 40)]) + "\n")
    report = prepare(_settings(tmp_path, folder, tmp_path / "a.jsonl", max_length=50, validation=0.4), chat)
    assert report["lines_read"] == 5 and report["kept"] == 3 and report["skipped"] == {"not_json": 1, "blank": 1}
    assert report["examples"]["not_json"][0].startswith(f"{tmp_path / 'a.jsonl'}:2: ")
    samples = _samples(tmp_path / "out")
    assert {split: len(rows) for split, rows in samples.items()} == {"train": 2, "validation": 1}
    everything = [row for rows in samples.values() for row in rows]
    assert report["samples"] == 3 and report["clipped"] == 1
    assert report["tokens"] == sum(len(ids) for ids, _ in everything)
    assert report["supervised_tokens"] == sum(sum(mask) for _, mask in everything)
    assert sum(report["length_histogram"].values()) == 3
    assert json.loads((tmp_path / "out" / "report.json").read_text())["report"] == report


def test_the_manifest_knows_the_tokenizer_and_training_can_check_it(tmp_path, folder, chat):
    _lines(tmp_path / "a.jsonl", 4)
    prepare(_settings(tmp_path, folder, tmp_path / "a.jsonl"), chat)
    manifest = open_dataset(tmp_path / "out").manifest
    check_same_tokenizer(manifest, save_tokenizer(tmp_path / "same", STRIPS))
    with pytest.raises(ValueError, match="another tokenizer"):
        check_same_tokenizer(manifest, save_tokenizer(tmp_path / "other", KEEPS, vocabulary=330))


def test_added_tokens_in_the_data_are_counted(tmp_path, folder, chat):
    (tmp_path / "a.jsonl").write_text(_row("say <|mask|> twice: <|mask|>"))
    report = prepare(_settings(tmp_path, folder, tmp_path / "a.jsonl"), chat)
    assert report["added_tokens"][str(chat.token_id("<|mask|>"))] == 2


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(st.binary(max_size=30) | st.sampled_from([_row("one").encode(), b'{"messages": []}', b" "]), max_size=6).map(b"\n".join)
)
def test_counts_add_up_for_any_bytes(tmp_path_factory, folder, chat, data):
    path = tmp_path_factory.mktemp("bytes") / "a.jsonl"
    path.write_bytes(data)
    counts = Counts()
    worker = ChunkWorker(_settings(path.parent, folder, path), chat)
    for chunk in read_chunks(find_files([path])):
        counts.add(worker(chunk).counts)
    lines = data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
    assert counts.lines_read == lines == counts.kept + sum(counts.skipped.values())


def test_a_template_that_writes_data_into_its_message_makes_a_bounded_number_of_reasons(tmp_path):
    template = KEEPS + "{% if messages|length > 1 and messages[0].content != 'Hi' %}{{ raise_exception(messages[0].content) }}{% endif %}"
    chat = ChatTokenizer(save_tokenizer(tmp_path / "raises", template))
    worker = ChunkWorker(_settings(tmp_path, tmp_path / "raises"), chat)
    counts = worker(Chunk("a", list(range(1, 301)), [_row(f"question {index}").encode() for index in range(300)])).counts
    assert sum(counts.skipped.values()) == 300 and len(counts.skipped) <= 65


# ---- splits


def test_rows_that_ask_the_same_are_on_one_side(tmp_path, folder, chat):
    rows = [_row(f"question {index % 40}", f"answer {index}") for index in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    prepare(_settings(tmp_path, folder, tmp_path / "a.jsonl", validation=0.2), chat)
    questions = {}
    for split, samples in _samples(tmp_path / "out").items():
        questions[split] = {chat.decode(ids).split("<|im_end|>")[0] for ids, _ in samples}
    assert not questions["train"] & questions["validation"]
    assert len(questions["validation"]) == 8


def test_all_samples_of_a_conversation_are_on_one_side(tmp_path):
    folder = save_tokenizer(tmp_path / "strips", STRIPS)
    rows = []
    for index in range(30):
        turn = [{"role": "user", "content": f"question {index}"}, {"role": "assistant", "content": "fox", "reasoning_content": "why"}]
        rows.append(json.dumps({"messages": turn * 2}))
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    prepare(_settings(tmp_path, folder, tmp_path / "a.jsonl", validation=0.2), ChatTokenizer(folder))
    assert {split: len(rows) for split, rows in _samples(tmp_path / "out").items()} == {"train": 48, "validation": 12}


@given(groups=st.lists(st.integers(0, 12), min_size=1, max_size=80), share=st.floats(0, 0.99))
def test_held_out_groups_are_whole_and_about_the_share(groups, share):
    groups = np.array(groups, np.uint64)
    held_out = validation_groups(groups, share)
    taken = int(np.isin(groups, np.array(sorted(held_out), np.uint64)).sum())
    assert taken < len(groups)
    if round(share * len(groups)) and len(set(groups.tolist())) > 1:
        assert held_out
    if len(held_out) > 1:
        assert taken <= round(share * len(groups))


def test_validation_0_makes_no_validation_split(tmp_path, folder, chat):
    _lines(tmp_path / "a.jsonl", 50)
    prepare(_settings(tmp_path, folder, tmp_path / "a.jsonl", validation=0.0), chat)
    assert dataset_splits(tmp_path / "out") == ["train"]


# ---- interruptions and mistakes


class _Interrupt:
    """Progress that presses Ctrl-C at the n-th chunk."""

    def __init__(self, at: int):
        self.left = at

    def __call__(self, done, total, counts):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_an_interrupted_preparation_goes_on_and_ends_as_an_unbroken_one(tmp_path, folder, chat):
    for name in "abcdef":  # every file is a chunk of its own
        _lines(tmp_path / f"{name}.jsonl", 3)
    inputs = [tmp_path / f"{name}.jsonl" for name in "abcdef"]
    with pytest.raises(KeyboardInterrupt):
        prepare(_settings(tmp_path, folder, *inputs), chat, progress=_Interrupt(2))
    assert not (tmp_path / "out").exists()
    seen = []

    def spread(chunks):
        for chunk in chunks:
            seen.append(chunk.file)
            yield ChunkWorker(_settings(tmp_path, folder, *inputs), chat)(chunk)

    report = prepare(_settings(tmp_path, folder, *inputs), chat, spread)
    assert seen == [str(path) for path in inputs[2:]] and report["resumed_after_chunks"] == 2
    (tmp_path / "whole").mkdir()
    whole = prepare(_settings(tmp_path / "whole", folder, *inputs), chat)
    assert _samples(tmp_path / "out") == _samples(tmp_path / "whole" / "out")
    effort = ("seconds", "tokens_per_second", "resumed_after_chunks", "peak_memory_bytes")
    assert {k: v for k, v in report.items() if k not in effort} == {k: v for k, v in whole.items() if k not in effort}
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out"]


def test_a_killed_preparation_keeps_its_whole_parts(tmp_path, folder, chat):
    """What a kill leaves: parts that were made, a part without its counts, a temporary file."""
    paths = []
    for name in "abc":
        paths.append(tmp_path / f"{name}.jsonl")
        _lines(paths[-1], 3)
    worker = ChunkWorker(_settings(tmp_path, folder, *paths), chat)
    results = [worker(chunk) for chunk in read_chunks(find_files(paths))]
    with Parts(tmp_path / "out", {"id": 1}) as parts:
        for result in results[:2]:
            parts.add(result)
            parts.flush()
    (parts.folder / "part-00001.json").unlink()
    (parts.folder / ".part-00002.json.77").write_text('{"chunks": 99')
    with Parts(tmp_path / "out", {"id": 1}) as again:
        assert again.chunks == 1 and again.counts() == results[0].counts
        for result in results[1:]:
            again.add(result)
        again.flush()
        ids = np.concatenate([ids for ids, _, _, _ in again.samples()])
    assert ids.tolist() == np.concatenate([result.input_ids for result in results]).tolist()


def test_parts_for_something_else_are_not_continued(tmp_path, folder, chat):
    for name in "ab":
        _lines(tmp_path / f"{name}.jsonl", 3)
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with pytest.raises(KeyboardInterrupt):
        prepare(_settings(tmp_path, folder, *inputs), chat, progress=_Interrupt(1))
    report = prepare(_settings(tmp_path, folder, *inputs, max_length=25), chat)
    assert report["resumed_after_chunks"] == 0
    assert max(len(ids) for ids, _ in _samples(tmp_path / "out")["train"]) == 25


def test_two_preparations_of_one_output_do_not_mix(tmp_path):
    with Parts(tmp_path / "out", {}):
        with pytest.raises(ValueError, match="another preparation"):
            Parts(tmp_path / "out", {}).__enter__()


def test_a_finished_output_is_not_made_again_and_never_overwritten(tmp_path, folder, chat):
    _lines(tmp_path / "a.jsonl", 5)
    first = prepare(_settings(tmp_path, folder, tmp_path / "a.jsonl"), chat)
    again = prepare(_settings(tmp_path, folder, tmp_path / "a.jsonl"), chat)
    assert again == {**first, "already_prepared": True}
    _lines(tmp_path / "a.jsonl", 6)
    before = _samples(tmp_path / "out")
    with pytest.raises(ValueError, match="remove it or choose another"):
        prepare(_settings(tmp_path, folder, tmp_path / "a.jsonl"), chat)
    assert _samples(tmp_path / "out") == before


# ---- the job


def _job(tmp_path, folder, path, *flags) -> int:
    return prepare_data.main(["--input", str(path), "--tokenizer", str(folder), "--output", str(tmp_path / "out"), *flags])


def test_strict_stops_at_the_first_bad_row_and_leaves_nothing(tmp_path, folder):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{_row('one')}\n\n{_row('two')}\n" + json.dumps({"messages": [{"role": "narrator", "content": "x"}]}) + "\n{\n")
    with pytest.raises(ValueError, match="a.jsonl:4: unknown_role"):
        _job(tmp_path, folder, path, "--strict")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


def test_strict_counts_a_turn_that_cannot_be_placed_as_bad(tmp_path, folder):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "I start."}, *json.loads(_row("one"))["messages"]]}))
    with pytest.raises(ValueError, match="a.jsonl:1: no_prompt"):
        _job(tmp_path, folder, path, "--strict")


def test_an_input_of_which_nothing_can_be_kept_writes_the_report_and_no_data_set(tmp_path, folder):
    (tmp_path / "a.jsonl").write_text("{\n[]\n")
    with pytest.raises(ValueError, match="none of 2 rows"):
        _job(tmp_path, folder, tmp_path / "a.jsonl", "--json", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lines_read"] == 2 == sum(report["skipped"].values())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "report.json"]


def test_the_job_shows_what_is_supervised(tmp_path, folder, capsys):
    (tmp_path / "a.jsonl").write_text(_row("what jumps?", "the quick fox") + "\n")
    assert _job(tmp_path, folder, tmp_path / "a.jsonl", "--json", str(tmp_path / "report.json")) == 0
    shown = capsys.readouterr().out
    assert "1 rows read, 1 kept, 0 skipped" in shown
    assert "what jumps?" in shown and "[[the quick fox<|im_end|>]]" in shown
    assert json.loads((tmp_path / "report.json").read_text())["samples"] == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-length", "1"], "--max-length 1"),
        (["--validation", "1"], "--validation 1"),
        (["--num-workers", "0"], "--num-workers 0"),
        (["--columns", "tokens"], "--columns tokens"),
        (["--columns", "ids=tokens"], "ids is no column of ours"),
        (["--json", "/nowhere/report.json"], "--json /nowhere/report.json"),
        (["--json", "/"], "--json /: cannot be written: Is a directory"),
        (["--chat-template", "/nowhere.jinja"], "--chat-template /nowhere.jinja"),
    ],
)
def test_impossible_flags_are_one_line(tmp_path, folder, flags, message):
    _lines(tmp_path / "a.jsonl", 2)
    with pytest.raises(ValueError, match=message):
        _job(tmp_path, folder, tmp_path / "a.jsonl", *flags)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


def test_relative_paths_are_refused_under_job_submit(tmp_path, folder, monkeypatch):
    _lines(tmp_path / "a.jsonl", 2)
    monkeypatch.setenv(JOB_MARK, "{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--output out: is relative"):
        prepare_data.main(["--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(folder), "--output", "out"])


def test_conversations_need_a_template_and_ids_do_not(tmp_path):
    folder = save_tokenizer(tmp_path / "without", None)
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}))
    assert _job(tmp_path, folder, tmp_path / "a.jsonl") == 0
    (tmp_path / "b.jsonl").write_text(_row("one"))
    with pytest.raises(ValueError, match="pass --chat-template FILE"):
        prepare_data.main(["--input", str(tmp_path / "b.jsonl"), "--tokenizer", str(folder), "--output", str(tmp_path / "other")])
    assert not (tmp_path / "other.partial").exists()


@pytest.mark.ray
def test_two_workers_make_the_same_data_set_as_one(tmp_path, folder, local_ray):
    for name in "abcde":
        _lines(tmp_path / f"{name}.jsonl", 20)
    (tmp_path / "c.jsonl").write_text(_row("one") + "\nnonsense\n")
    flags = ["--tokenizer", str(folder), "--validation", "0.1", "--input", *(str(tmp_path / f"{name}.jsonl") for name in "abcde")]
    assert prepare_data.main([*flags, "--output", str(tmp_path / "one")]) == 0
    assert prepare_data.main([*flags, "--output", str(tmp_path / "two"), "--num-workers", "2"]) == 0
    assert _samples(tmp_path / "one") == _samples(tmp_path / "two")
    assert (tmp_path / "one" / "manifest.json").read_text() == (tmp_path / "two" / "manifest.json").read_text()
    with pytest.raises(ValueError, match="c.jsonl:2: not_json"):
        prepare_data.main([*flags, "--output", str(tmp_path / "strict"), "--num-workers", "2", "--strict"])


def test_chunks_are_cut_the_same_way_every_time(tmp_path):
    _lines(tmp_path / "a.jsonl", 5000)
    first, again = ([chunk.lines for chunk in islice(read_chunks(find_files([tmp_path])), 10)] for _ in range(2))
    assert first == again and len(first) > 2


@pytest.mark.slow
def test_memory_does_not_grow_with_the_input(tmp_path, folder):
    """Four times the tokens, both more than one part holds."""
    peaks = []
    ids, mask = list(range(2, 102)) * 10, [0] * 500 + [1] * 500
    for size in (10_000, 40_000):
        table = pa.table({"input_ids": [ids] * 100, "loss_mask": [mask] * 100})
        with pa.ipc.new_stream(tmp_path / f"{size}.arrow", table.schema) as writer:
            for _ in range(size // 100):
                writer.write_table(table)
        command = [sys.executable, "-m", "jobs.prepare_data", "--input", str(tmp_path / f"{size}.arrow"), "--tokenizer", str(folder)]
        command += ["--output", str(tmp_path / f"out{size}"), "--json", str(tmp_path / f"{size}.json")]
        subprocess.run(command, check=True, capture_output=True, timeout=280)
        report = json.loads((tmp_path / f"{size}.json").read_text())
        assert report["tokens"] == size * 1000
        peaks.append(report["peak_memory_bytes"])
    assert peaks[1] - peaks[0] < 32 << 20
