"""The target's own answers: who is asked what, in which order, and what survives failures and interruptions."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace

import pytest

from dflash_ray.data.prepare.conversations import parse_row
from dflash_ray.data.prepare.render import Renderer
from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from dflash_ray.file_lock import take_lock
from dflash_ray.generation.generate import Failure, GenerateSettings, generate
from dflash_ray.target.shape import read_target_shape
from tests.support.tiny_chat import KEEPS, OPENS, save_tokenizer
from tests.support.tiny_targets import save_target


@pytest.fixture
def chat(tmp_path):
    return ChatTokenizer(save_tokenizer(tmp_path / "chat", KEEPS))


class Echo:
    """A crew without a model: it answers `answer N` to the prompt of N tokens, and fails or stops where it is told to."""

    def __init__(self, chat: ChatTokenizer, fail=lambda prompts: False, free: int = 2, words: str = "answer {}"):
        self.chat, self.fail, self.slots, self.words = chat, fail, free, words
        self.calls: deque = deque()
        self.asked: list[list[str]] = []
        self.streams: list[int] = []

    @property
    def free(self) -> int:
        return self.slots - len(self.calls)

    def ask(self, group) -> None:
        self.calls.append(group)

    def wait(self):
        group = self.calls.pop()  # the last one first: answers come in any order
        texts = [self.chat.decode(asked.prompt) for asked in group]
        self.asked.append(texts)
        self.streams += [asked.stream for asked in group]
        if self.fail(texts):
            return group, Failure("out of memory")
        return group, [self.chat.encode(self.words.format(len(asked.prompt)) + "<|im_end|>") for asked in group]


def _settings(tmp_path, *prompts, **more) -> GenerateSettings:
    given = {"thinking": (False,), "max_new_tokens": 50, "temperature": 0.0, "seed": 0, "group": 3}
    if not (tmp_path / "target").exists():
        save_target("qwen3", tmp_path / "target")
    return GenerateSettings(prompts, tmp_path / "target", tmp_path / "out.jsonl", **(given | more))


def _generate(settings, chat, crew, target_shape):
    return generate(settings, chat, target_shape, (chat.token_id("<|im_end|>"),), crew)


@pytest.fixture
def target_shape(folder):
    return read_target_shape(folder)


def _rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _questions(path, count: int, first: int = 0):
    path.write_text("".join(json.dumps({"id": i, "messages": [{"role": "user", "content": f"q{i}"}]}) + "\n" for i in range(first, count)))
    return path


def test_every_turn_is_asked_with_the_answers_given_so_far(tmp_path, chat, target_shape):
    old = [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "OLD"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "OLD"},
        {"role": "user", "content": "three"},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": old}))
    crew = Echo(chat)
    report = _generate(_settings(tmp_path, tmp_path / "a.jsonl"), chat, crew, target_shape)
    assert report["turns"] == 3 and report["written"] == 1
    messages = _rows(tmp_path / "out.jsonl")[0]["conversations"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert not any("OLD" in text for texts in crew.asked for text in texts)
    for index in (2, 4, 6):
        expected = chat.render(
            [{"role": m["role"], "content": m["content"]} for m in messages[:index]], None, generation=True, thinking=False
        )
        assert messages[index]["prompt_ids"] == chat.encode(expected)
        assert chat.decode(messages[index]["output_ids"]) == messages[index]["content"] + "<|im_end|>"


def test_an_answer_of_weight_0_is_kept_and_not_asked_for(tmp_path, chat, target_shape):
    old = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "KEPT", "weight": 0},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "OLD"},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"conversations": old}))
    crew = Echo(chat)
    report = _generate(_settings(tmp_path, tmp_path / "a.jsonl"), chat, crew, target_shape)
    assert report["turns"] == 1 and len(crew.asked) == 1 and "KEPT" in crew.asked[0][0]
    messages = _rows(tmp_path / "out.jsonl")[0]["conversations"]
    assert messages[1] == {"role": "assistant", "content": "KEPT", "weight": 0}
    assert messages[3]["content"] != "OLD" and "weight" not in messages[3]


def test_rows_keep_their_order_whatever_ends_first(tmp_path, chat, target_shape):
    report = _generate(_settings(tmp_path, _questions(tmp_path / "a.jsonl", 20)), chat, Echo(chat, free=4), target_shape)
    assert [row["id"] for row in _rows(tmp_path / "out.jsonl")] == list(range(20)) and report["answered"] == 20
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_a_failed_group_is_asked_again_one_by_one_and_one_that_always_fails_is_left_out(tmp_path, chat, target_shape):
    crew = Echo(chat, fail=lambda texts: any("q4" in text for text in texts))
    report = _generate(_settings(tmp_path, _questions(tmp_path / "a.jsonl", 8)), chat, crew, target_shape)
    assert [row["id"] for row in _rows(tmp_path / "out.jsonl")] == [0, 1, 2, 3, 5, 6, 7]
    assert report["failed"] == 1 and report["failed_calls"] == {"out of memory": 3}
    assert [len(texts) for texts in crew.asked if any("q4" in text for text in texts)] == [3, 1, 1]


class _Stop(Exception):
    pass


def test_an_interrupted_run_asks_only_for_what_is_missing(tmp_path, chat, target_shape):
    """Interrupted twice; the first time in the middle of writing a row, as a kill may do it."""
    settings = _settings(tmp_path, _questions(tmp_path / "a.jsonl", 16))
    for torn in (b'{"key": "torn', b""):
        done = []

        def stop(tally, done=done):
            done.append(tally.answered)
            if len(done) == 2:
                raise _Stop

        with pytest.raises(_Stop):
            generate(settings, chat, target_shape, (chat.token_id("<|im_end|>"),), Echo(chat), stop)
        with open(tmp_path / "out.jsonl.partial", "ab") as file:
            file.write(torn)
    crew = Echo(chat)
    report = _generate(settings, chat, crew, target_shape)
    assert report["reused"] == 12 and sum(map(len, crew.asked)) == 4
    assert [row["id"] for row in _rows(tmp_path / "out.jsonl")] == list(range(16))


def test_two_calls_never_write_one_output_and_the_second_touches_nothing(tmp_path, chat, target_shape):
    settings = _settings(tmp_path, _questions(tmp_path / "a.jsonl", 2))
    (tmp_path / "out.jsonl.partial").write_bytes(half := b'{"key": "half a row of the call at work')
    lock = take_lock(tmp_path / "out.jsonl.partial", required=True)
    with pytest.raises(ValueError, match="out.jsonl: another process is writing to it"):
        _generate(settings, chat, Echo(chat), target_shape)
    assert (tmp_path / "out.jsonl.partial").read_bytes() == half
    lock.release()
    assert _generate(settings, chat, Echo(chat), target_shape)["answered"] == 2


def test_a_file_that_is_not_from_this_job_is_never_overwritten(tmp_path, chat, target_shape):
    settings = _settings(tmp_path, _questions(tmp_path / "a.jsonl", 2))
    (tmp_path / "out.jsonl").write_text(notes := '{"my": "notes"}\n')
    for _ in range(2):  # a refusal keeps no lock
        with pytest.raises(ValueError, match="holds a row that is not from this job"):
            _generate(settings, chat, Echo(chat), target_shape)
    assert (tmp_path / "out.jsonl").read_text() == notes and not (tmp_path / "out.jsonl.partial").exists()
    with pytest.raises(ValueError, match="cannot be written: No such file or directory"):
        _generate(replace(settings, output=tmp_path / "nowhere" / "out.jsonl"), chat, Echo(chat), target_shape)
    assert not (tmp_path / "nowhere").exists()


def test_a_longer_input_asks_for_the_new_rows_and_other_settings_for_all(tmp_path, chat, target_shape):
    _generate(_settings(tmp_path, _questions(tmp_path / "a.jsonl", 5)), chat, Echo(chat), target_shape)
    crew = Echo(chat)
    longer = _settings(tmp_path, _questions(tmp_path / "a.jsonl", 8))
    assert _generate(longer, chat, crew, target_shape)["reused"] == 5 and sum(map(len, crew.asked)) == 3
    report = _generate(replace(longer, max_new_tokens=49), chat, Echo(chat), target_shape)
    assert report["reused"] == 0 and report["written"] == 8
    assert len(_rows(tmp_path / "out.jsonl.before")) == 8  # the earlier answers are not lost
    touched = replace(longer, max_new_tokens=49)
    (tmp_path / "target" / "model.safetensors").touch()
    assert _generate(touched, chat, Echo(chat), target_shape)["reused"] == 8
    save_target("qwen3", tmp_path / "target", seed=1)
    assert _generate(touched, chat, Echo(chat), target_shape)["reused"] == 0


def test_rows_that_cannot_be_asked_are_counted(tmp_path, chat, target_shape):
    rows = [
        "{",
        json.dumps({"input_ids": [1, 2], "loss_mask": [0, 1]}),
        json.dumps({"messages": [{"role": "narrator", "content": "x"}]}),
        json.dumps({"messages": [{"role": "assistant", "content": "I start."}]}),
        json.dumps({"messages": [{"role": "user", "content": "fox " * 3000}]}),
        "",
        json.dumps({"messages": [{"role": "user", "content": "q"}]}),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    report = _generate(_settings(tmp_path, tmp_path / "a.jsonl"), chat, Echo(chat), target_shape)
    assert report["rows_read"] == 6 and report["written"] == 1
    assert report["skipped"] == {"not_json": 1, "no_conversation": 1, "unknown_role": 1, "no_prompt": 1, "too_long": 1}
    assert report["examples"]["not_json"].startswith(f"{tmp_path / 'a.jsonl'}:1")


def test_an_answer_without_an_end_closes_its_conversation(tmp_path, chat, target_shape):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "two"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    crew = Echo(chat)
    report = generate(_settings(tmp_path, tmp_path / "a.jsonl"), chat, target_shape, (99_999,), crew)
    assert report["ended_early"] == {"token_limit": 1}
    assert [message["role"] for message in _rows(tmp_path / "out.jsonl")[0]["conversations"]] == ["user", "assistant"]


def test_both_ways_of_thinking_give_a_row_each_and_reasoning_stands_apart(tmp_path, target_shape):
    chat = ChatTokenizer(save_tokenizer(tmp_path / "opens", OPENS))
    crew = Echo(chat, words="why\n</think>\n\nanswer {}")
    settings = _settings(tmp_path, _questions(tmp_path / "a.jsonl", 2), thinking=(False, True))
    _generate(settings, chat, crew, target_shape)
    rows = _rows(tmp_path / "out.jsonl")
    assert [(row["id"], row["thinking"]) for row in rows] == [(0, False), (0, True), (1, False), (1, True)]
    prompts = [chat.decode(row["conversations"][-1]["prompt_ids"]) for row in rows[:2]]
    assert prompts[0].endswith("<think>\n\n</think>\n\n") and prompts[1].endswith("assistant\n<think>\n")
    answer = rows[1]["conversations"][-1]
    assert answer["reasoning_content"] == "why" and answer["content"].startswith("answer")
    rendered = Renderer(chat, 1000).render(parse_row(rows[1]))
    ids, mask = rendered.samples[0]
    assert ids.tolist() == answer["prompt_ids"] + answer["output_ids"] and rendered.ids_differ == 0
    assert chat.decode(ids[mask == 1]) == "why\n</think>\n\n" + answer["content"] + "<|im_end|>"


def test_equal_questions_are_asked_once_when_greedy_and_each_time_when_sampled(tmp_path, chat, target_shape):
    row = json.dumps({"messages": [{"role": "user", "content": "q"}]})
    (tmp_path / "a.jsonl").write_text(f"{row}\n{row}\n{row}\n")
    greedy, named, sampled = Echo(chat), Echo(chat), Echo(chat)
    assert _generate(_settings(tmp_path, tmp_path / "a.jsonl"), chat, greedy, target_shape)["written"] == 3
    assert sum(map(len, greedy.asked)) == 1
    messages = json.loads(row)["messages"]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"id": name, "messages": messages}) + "\n" for name in "xy"))
    _generate(replace(_settings(tmp_path, tmp_path / "b.jsonl"), output=tmp_path / "named.jsonl"), chat, named, target_shape)
    assert [row["id"] for row in _rows(tmp_path / "named.jsonl")] == ["x", "y"]
    assert _generate(_settings(tmp_path, tmp_path / "a.jsonl", temperature=1.0), chat, sampled, target_shape)["written"] == 3
    assert sum(map(len, sampled.asked)) == 3 and len(set(sampled.streams)) == 3
