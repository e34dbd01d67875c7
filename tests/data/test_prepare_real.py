"""The tokenizers and templates of Qwen3.5, Qwen3 and SmolLM2 on reference conversations, judged by transformers' own rendering.

Needs the folder of reference data and, in DFLASH_TOKENIZERS, a folder with the tokenizers as qwen3.5, qwen3 and smollm2.
"""

from __future__ import annotations

import gzip
import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from dflash_ray.data.prepare.prepare import ChunkWorker, PrepareSettings
from dflash_ray.data.prepare.rows import find_files, read_chunks
from dflash_ray.data.prepare.tokenizer import ChatTokenizer

pytestmark = pytest.mark.slow
NAMES = ("qwen3.5", "qwen3", "smollm2")


@pytest.fixture(scope="module", params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name) -> Path:
    root = os.environ.get("DFLASH_TOKENIZERS")
    if root is None or not (Path(root) / name / "tokenizer.json").is_file():
        pytest.skip(f"no {name} tokenizer: set DFLASH_TOKENIZERS to a folder that holds {', '.join(NAMES)}")
    return Path(root) / name


@pytest.fixture(scope="module")
def worker(folder) -> ChunkWorker:
    settings = PrepareSettings(inputs=(), tokenizer=folder, output=Path("unused"))
    return ChunkWorker(settings, ChatTokenizer(folder))


@pytest.fixture(scope="module")
def reference(folder):
    return AutoTokenizer.from_pretrained(folder)


def _prepared(worker, path):
    """(skipped reasons, per sample: line, ids, mask)"""
    skipped, samples = {}, []
    for chunk in read_chunks(find_files([path])):
        done = worker(chunk)
        skipped |= done.counts.skipped
        ends = np.cumsum(done.lengths)
        for source, start, stop in zip(done.sources, ends - done.lengths, ends, strict=True):
            samples.append((int(source.rpartition(":")[2]), done.input_ids[start:stop], done.loss_mask[start:stop]))
    return skipped, samples


def _said(reference, samples, line=None) -> list[str]:
    """Supervised texts in order."""
    out = []
    for number, ids, mask in samples:
        if line in (None, number):
            cuts = np.flatnonzero(np.diff(mask)) + 1
            out += [reference.decode(piece) for piece, part in zip(np.split(ids, cuts), np.split(mask, cuts), strict=True) if part[0]]
    return out


@pytest.mark.parametrize("file", ["openassistant_threads.jsonl", "glaive_tools.jsonl", "gsm8k_train.jsonl.gz"])
def test_every_answer_is_supervised_once_behind_the_prompt_of_a_server(worker, reference, shared, tmp_path, name, file):
    opened = gzip.open if file.endswith(".gz") else open
    with opened(shared / "data" / file, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line)["conversations"] for line, _ in zip(lines, range(60), strict=False)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    skipped, samples = _prepared(worker, tmp_path / "rows.jsonl")
    assert not skipped
    for number, row in enumerate(rows, start=1):
        mine = [(ids, mask) for line, ids, mask in samples if line == number]
        answers = [index for index, message in enumerate(row) if message["role"] == "assistant"]
        text = [row[index]["content"] if name == "smollm2" else row[index]["content"].strip() for index in answers]
        assert _said(reference, samples, number) == [unicodedata.normalize("NFC", words) + "<|im_end|>" for words in text]
        prompts = [ids[:start].tolist() for ids, mask in mine for start in np.flatnonzero(np.diff(mask) == 1) + 1]
        for index, prompt in zip(answers, prompts, strict=True):
            expected = reference.apply_chat_template(row[:index], add_generation_prompt=True, enable_thinking=False, tokenize=False)
            assert reference.decode(prompt) == unicodedata.normalize("NFC", expected)
            if len(mine) == len(answers):
                assert prompt == reference.encode(expected, add_special_tokens=False)


def test_one_think_block_each(worker, reference, shared):
    skipped, samples = _prepared(worker, shared / "cases" / "d01_closing_think_only.jsonl")
    assert not skipped and len(samples) == 2
    for _, ids, _ in samples:
        text = reference.decode(ids)
        assert text.count("<think>") == text.count("</think>") == 1
        assert text.split("<think>")[1].split("</think>")[0].strip()


def test_reasoning_beside_the_content(worker, reference, shared, name):
    skipped, samples = _prepared(worker, shared / "cases" / "d02_reasoning_content_multiturn.jsonl")
    assert not skipped and len(samples) == (1 if name == "smollm2" else 2)
    said = _said(reference, samples)
    assert "10 is even, 11 has no divisor." in said[0] and "12 is even." in said[1]
    if name != "smollm2":
        assert "10 is even" not in reference.decode(samples[1][1])


def test_no_user(worker, reference, shared, name):
    skipped, samples = _prepared(worker, shared / "cases" / "d04_no_user.jsonl")
    if name == "qwen3.5":
        assert skipped == {"template_refused: No user query found in messages.": 1}
    assert _said(reference, samples, 2) == ["Good.<|im_end|>"]


def test_tool_arguments_as_string_and_object(worker, reference, shared, name):
    skipped, samples = _prepared(worker, shared / "cases" / "d05_tool_args_string_and_dict.jsonl")
    rows = [[ids.tolist() for line, ids, _ in samples if line == number] for number in (1, 2)]
    assert not skipped and rows[0] == rows[1] != []
    assert not any("4 C" in text for text in _said(reference, samples))
    assert ("Oslo" in "".join(_said(reference, samples))) == (name != "smollm2")


def test_sharegpt_roles(worker, reference, shared, name):
    skipped, samples = _prepared(worker, shared / "cases" / "d06_sharegpt_roles.jsonl")
    said = "".join(_said(reference, samples))
    assert not skipped and "TOOL OUTPUT" not in said and "Sunny." in said and "fine" in said
    assert ('"w"' in said or "function=w" in said) == (name != "smollm2")


def test_an_answer_after_an_answer(worker, reference, shared):
    _, samples = _prepared(worker, shared / "cases" / "d08_non_alternating.jsonl")
    assert _said(reference, samples) == ["reply<|im_end|>", "second reply in a row<|im_end|>"]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("d08_non_alternating.jsonl", {"no_assistant_turn": 1}),
        ("d10_shorter_than_block.jsonl", {}),
        ("d11_unicode.jsonl", {}),
        ("d13_content_parts.jsonl", {"not_text": 1}),
        ("d15_tiny_good.jsonl", {}),
        ("d16_all_supervised_pretokenized.jsonl", {"length_mismatch": 1}),
    ],
)
def test_odd_files(worker, shared, file, expected):
    skipped, samples = _prepared(worker, shared / "cases" / file)
    assert skipped == expected and samples
