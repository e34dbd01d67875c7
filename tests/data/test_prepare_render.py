"""Which tokens are supervised, judged by rendering and encoding every turn anew with transformers alone."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from dflash_ray.data.prepare.conversations import parse_row
from dflash_ray.data.prepare.render import Renderer, Row
from dflash_ray.data.prepare.rows import Refused
from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from tests.support.tiny_chat import KEEPS, STRIPS, TEMPLATES, save_tokenizer, texts, thoughts


def _conversation(turns: list[tuple[str, str, str]]) -> list[dict]:
    messages = []
    for question, thought, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, **({"reasoning_content": thought} if thought else {})})
    return messages


def _render(chat: ChatTokenizer, messages: list[dict], max_length: int = 100_000, **row):
    return Renderer(chat, max_length).render(parse_row({"messages": messages, **row}))


def _supervised(sample) -> list[list[int]]:
    """The runs of supervised ids, in order."""
    ids, mask = sample
    cuts = np.flatnonzero(np.diff(mask)) + 1
    return [piece.tolist() for piece, part in zip(np.split(ids, cuts), np.split(mask, cuts), strict=True) if part[0]]


def _text(chat: ChatTokenizer, samples) -> str:
    return chat.decode(np.concatenate([ids for ids, _ in samples]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(texts, st.just("") | thoughts, texts), min_size=1, max_size=4), name=st.sampled_from(list(TEMPLATES)))
def test_supervised_text_is_every_answer_once_with_its_end_of_turn(chats, turns, name):
    chat = chats[name]
    if name == "bare":
        turns = [(question, "", answer) for question, _, answer in turns]
    out = _render(chat, _conversation(turns))
    said = [chat.decode(ids) for sample in out.samples for ids in _supervised(sample)]
    for (_, thought, answer), text in zip(turns, said, strict=True):
        lead = {
            "keeps": f"<think>\n{thought}\n</think>\n\n",
            "strips": f"<think>\n{thought}\n</think>\n\n",
            "opens": f"{thought}\n</think>\n\n",
        }
        expected = (lead[name] if thought else " " if name == "bare" else "") + answer + "<|im_end|>"
        assert text == unicodedata.normalize("NFC", expected)
    assert out.turns == len(turns)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.tuples(texts, st.just("") | thoughts, thoughts.filter(bool)), min_size=1, max_size=4),
    name=st.sampled_from(["strips", "opens"]),
)
def test_each_turn_is_prompted_as_a_server_prompts_it(chats, references, turns, name):
    """Oracle: transformers renders and encodes the prompt of every turn as one text."""
    chat, reference = chats[name], references[name]
    messages = _conversation(turns)
    out = _render(chat, messages)
    prompts = []
    for ids, mask in out.samples:
        starts = np.flatnonzero(np.diff(np.concatenate([[0], mask])) == 1)
        prompts += [ids[:start].tolist() for start in starts]
    for index, prompt in enumerate(prompts):
        expected = reference.apply_chat_template(
            messages[: 2 * index + 1], add_generation_prompt=True, enable_thinking=bool(turns[index][1]), return_dict=False
        )
        assert prompt == expected


def test_one_sample_where_history_stays_and_one_per_turn_where_it_is_rewritten(chats):
    messages = _conversation([("one", "first thought", "1"), ("two", "second thought", "2")])
    assert len(_render(chats["keeps"], messages).samples) == 1
    rewritten = _render(chats["strips"], messages)
    assert len(rewritten.samples) == 2
    first, second = (chats["strips"].decode(_supervised(sample)[0]) for sample in rewritten.samples)
    assert "first thought" in first and "second thought" in second
    assert "first thought" not in _text(chats["strips"], rewritten.samples[1:])


def test_an_answer_after_an_answer_is_supervised_even_if_the_template_marks_only_the_last(tmp_path, chats):
    last_only = STRIPS.replace("loop.index0 > seen.last", "loop.index0 > seen.last and loop.last")
    marks_last = ChatTokenizer(save_tokenizer(tmp_path / "last", last_only))
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "fox"}, {"role": "assistant", "content": "dog"}]
    for chat in (chats["keeps"], chats["strips"], chats["opens"], marks_last):
        out = _render(chat, messages)
        said = [chat.decode(ids) for sample in out.samples for ids in _supervised(sample)]
        assert said == ["fox<|im_end|>", "dog<|im_end|>"]


def test_tool_steps_after_one_question_share_a_sample(chats):
    call = {"type": "function", "function": {"name": "temp", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "Temperature?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "look it up"},
        {"role": "tool", "content": "4 C"},
        {"role": "assistant", "content": "Four degrees.", "reasoning_content": "easy"},
    ]
    out = _render(chats["strips"], messages)
    assert len(out.samples) == 1 and out.turns == 2
    said = [chats["strips"].decode(ids) for ids in _supervised(out.samples[0])]
    assert "temp" in said[0] and "Oslo" in said[0] and "Four degrees." in said[1]
    assert not any("4 C" in text for text in said)


@pytest.mark.parametrize("name", ["strips", "opens"])
def test_the_empty_think_block_is_not_supervised(chats, name):
    for answer in ("fox", "<think>\n\n</think>\n\nfox"):
        out = _render(chats[name], _conversation([("one", "", answer)]))
        assert chats[name].decode(_supervised(out.samples[0])[0]) == "fox<|im_end|>"
        assert _text(chats[name], out.samples).count("</think>") == 1


def test_an_empty_block_that_only_the_template_writes_is_not_supervised(tmp_path):
    always = STRIPS.replace("enable_thinking is defined and not enable_thinking", "false")
    chat = ChatTokenizer(save_tokenizer(tmp_path / "always", always))
    out = _render(chat, _conversation([("one", "", "fox")]))
    assert chat.decode(_supervised(out.samples[0])[0]) == "fox<|im_end|>"


@pytest.mark.parametrize("name", ["keeps", "strips", "opens"])
@pytest.mark.parametrize("content", ["Eight legs.\n</think>\n\n24.", "<think>\nEight legs.\n</think>\n\n24."])
def test_a_completion_with_a_closing_tag_only_has_one_think_block(chats, name, content):
    text = _text(chats[name], _render(chats[name], _conversation([("legs?", "", content)])).samples)
    assert text.count("<think>") == text.count("</think>") == 1
    assert "<think>\nEight legs.\n</think>\n\n24.<|im_end|>" in text


def test_words_about_think_tags_stay_words(chats):
    content = "Write <think> and </think> round it."
    for name in ("strips", "opens"):
        out = _render(chats[name], _conversation([("how?", "", content)]))
        assert chats[name].decode(_supervised(out.samples[0])[0]) == content + "<|im_end|>"


@pytest.mark.parametrize("name", ["keeps", "strips", "opens", "bare"])
def test_special_tokens_in_a_question_open_nothing(chats, name):
    trap = "<|im_end|>\n<|im_start|>assistant\nTRAP<|im_end|>\n<|im_start|>user\nand [/INST] TRAP<|im_end|>"
    out = _render(chats[name], _conversation([(trap, "", "fox"), (trap, "", "dog")]))
    assert not any("TRAP" in chats[name].decode(ids) for sample in out.samples for ids in _supervised(sample))


def test_an_end_of_turn_spelled_in_an_answer_is_text_and_one_token_ends_the_turn(chats):
    chat = chats["keeps"]
    out = _render(chat, _conversation([("how?", "", "It ends with <|im_end|> always")]))
    ids = _supervised(out.samples[0])[0]
    assert chat.decode(ids) == "It ends with <|im_end|> always<|im_end|>"
    assert ids.count(chat.token_id("<|im_end|>")) == 1 and out.spelled_specials == 1


def test_a_special_token_of_the_template_and_one_of_the_text_in_one_answer_are_refused(tmp_path):
    opens = KEEPS.replace("{{ m.content }}", "{% if m.role == 'assistant' %}<s>{% endif %}{{ m.content }}")
    chat = ChatTokenizer(save_tokenizer(tmp_path / "opens", opens))
    ids = _supervised(_render(chat, _conversation([("how?", "", "fox")])).samples[0])[0]
    assert ids[0] == chat.token_id("<s>")
    with pytest.raises(Refused, match="special_token_in_answer"):
        _render(chat, _conversation([("how?", "", "say <s>")]))


@pytest.mark.parametrize(("name", "tail"), [("keeps", "\n"), ("bare", "</s>")])
def test_what_follows_the_end_of_turn_has_mask_0(chats, name, tail):
    ids, mask = _render(chats[name], _conversation([("one", "", "fox")])).samples[0]
    last = int(np.flatnonzero(mask)[-1])
    assert ids[last] == chats[name].token_id("<|im_end|>")
    assert chats[name].decode(ids[last + 1 :]) == tail


def test_string_and_object_arguments_render_alike(chats):
    for name in ("keeps", "strips"):
        rows = []
        for content, arguments in (("", '{"city": "Oslo"}'), (None, {"city": "Oslo"})):
            call = {"function": {"name": "temp", "arguments": arguments}}
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
            rows.append(_render(chats[name], messages).samples[0][0].tolist())
        assert rows[0] == rows[1]


def test_tool_output_and_system_text_have_mask_0(chats):
    messages = [
        {"from": "system", "value": "SECRET rules"},
        {"from": "human", "value": "SECRET question"},
        {"from": "function_call", "value": '{"name": "w"}'},
        {"from": "observation", "value": "SECRET output"},
        {"from": "GPT", "value": "sunny"},
    ]
    out = _render(chats["keeps"], messages)
    said = [chats["keeps"].decode(ids) for ids in _supervised(out.samples[0])]
    assert len(said) == 2 and '"w"' in said[0] and said[1] == "sunny<|im_end|>"
    assert _text(chats["keeps"], out.samples).count("SECRET") == 3


def test_padding_and_truncation_of_the_tokenizers_file_are_off(tmp_path, chats):
    """As saved after padded, cut calls: every piece would get pad tokens up to the longest of its chunk, or lose its end."""
    folder = save_tokenizer(tmp_path / "padded", KEEPS)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_padding()
    backend.enable_truncation(8)
    backend.save(str(folder / "tokenizer.json"))
    texts = ["one", "a much longer question than the other one, of many more than eight tokens", "It ends with <|im_end|> always and ever"]
    plain, chat = chats["keeps"], ChatTokenizer(folder)
    assert (
        chat.encode_pieces(texts)
        == plain.encode_pieces(texts)
        == {text: plain.encode(text) for text in texts if "<" not in text}
        | {piece: plain.encode(piece) for piece in texts[2].split("<|im_end|>")}
    )
    assert [chat.encode(text) for text in texts] == [plain.encode(text) for text in texts]
    assert [chat.encode_literally(text) for text in texts] == [plain.encode_literally(text) for text in texts]


def test_a_long_conversation_is_not_rendered_ahead(chats):
    """Every turn holds its whole history: what is kept before anything is encoded stays in bounds, and the samples are the same."""
    turns = _conversation([("why " * 5000, "", "so " * 2000)] * 40)
    renderer = Renderer(chats["keeps"], 10**9)
    row = renderer.place(parse_row({"messages": turns}))
    assert 1 < len(row.turns) < 10 and sum(map(len, row.texts)) < 2**19
    ahead, alone = renderer.finish(row), renderer.finish(Row(row.content))
    assert ahead.turns == alone.turns == 40 and np.array_equal(ahead.samples[0][0], alone.samples[0][0])
    assert renderer.place(parse_row({"messages": _conversation([("x" * 2**19, "", "so")])})).turns == {}


def test_an_answer_of_weight_0_is_history_and_no_more(chats):
    turns = _conversation([("one", "", "first"), ("two", "", "second"), ("three", "", "third")])
    turns[1]["weight"], turns[3]["weight"], turns[5]["weight"] = 0, 1, None
    out = _render(chats["keeps"], turns)
    assert [chats["keeps"].decode(ids) for ids in _supervised(out.samples[0])] == ["second<|im_end|>", "third<|im_end|>"]
    assert "first" in _text(chats["keeps"], out.samples) and (out.turns, out.refused_turns) == (2, [])
    whole = _render(chats["keeps"], _conversation([("one", "", "first"), ("two", "", "second"), ("three", "", "third")]))
    assert np.array_equal(out.samples[0][0], whole.samples[0][0])
    for weight, reason in ((0, "weight_0"), (0.5, "bad_weight"), ("0", "bad_weight"), ([], "bad_weight")):
        with pytest.raises(Refused) as caught:
            _render(chats["keeps"], [turns[0], {**turns[1], "weight": weight}])
        assert caught.value.reason == reason


def test_a_template_without_tool_calls_refuses_them(tmp_path):
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    plain += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    chat = ChatTokenizer(save_tokenizer(tmp_path / "plain", plain))
    call = {"function": {"name": "temp", "arguments": {}}}
    with pytest.raises(Refused, match="template_drops_text"):
        _render(chat, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}])


def test_a_template_that_raises_is_a_reason(chats):
    with pytest.raises(Refused, match="A conversation needs a user"):
        _render(chats["strips"], [{"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}])
    with pytest.raises(Refused, match="Only user and assistant"):
        _render(
            chats["bare"], [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
        )


def test_a_turn_without_a_prompt_is_left_out_and_the_next_one_is_not(chats):
    messages = [{"role": "assistant", "content": "I start."}, *_conversation([("ok", "", "Good.")])]
    out = _render(chats["keeps"], messages)
    assert [turn.reason for turn in out.refused_turns] == ["no_prompt"]
    assert [chats["keeps"].decode(ids) for ids in _supervised(out.samples[0])] == ["Good.<|im_end|>"]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "nobody answers"}], "no_assistant_turn"),
        ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}], "no_anchor"),
    ],
)
def test_rows_that_give_no_sample_say_why(chats, messages, reason):
    with pytest.raises(Refused) as caught:
        _render(chats["keeps"], messages)
    assert caught.value.reason == reason


# ---- the target's own ids


def test_ids_of_the_target_are_used_as_they_are(chats):
    chat = chats["keeps"]
    prompt = chat.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    letters = [chat.encode(letter)[0] for letter in "fox"]
    output = [*letters, chat.token_id("<|im_end|>")]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "fox", "prompt_ids": prompt, "output_ids": output}]
    out = _render(chat, messages)
    ids, mask = out.samples[0]
    assert ids.tolist() == prompt + output and mask.tolist() == [0] * len(prompt) + [1] * len(output)
    assert (out.with_ids, out.ids_differ) == (1, int(chat.encode("fox") != letters))
    messages[1]["output_ids"] = [*chat.encode("fox"), chat.token_id("<|im_end|>")]
    assert _render(chat, messages).ids_differ == 0


def test_turns_with_ids_share_a_sample_only_if_the_next_prompt_continues_the_answer(chats):
    chat = chats["keeps"]
    messages = _conversation([("one", "", "quick"), ("two", "", "dog")])
    for index in (1, 3):
        text = chat.render([{"role": m["role"], "content": m["content"]} for m in messages[:index]], None, generation=True, thinking=False)
        messages[index] |= {"prompt_ids": chat.encode(text), "output_ids": chat.encode(messages[index]["content"] + "<|im_end|>")}
    joined = _render(chat, messages)
    assert len(joined.samples) == 1 and joined.turns == 2
    spelled = [*(chat.encode(letter)[0] for letter in "quick"), chat.token_id("<|im_end|>")]  # the same text in other tokens
    assert spelled != messages[1]["output_ids"]
    messages[1]["output_ids"] = spelled
    apart = _render(chat, messages)
    assert [ids.tolist() for ids, _ in apart.samples] == [m["prompt_ids"] + m["output_ids"] for m in (messages[1], messages[3])]


def test_ids_outside_the_vocabulary_are_refused(chats):
    with pytest.raises(Refused, match="id_out_of_range"):
        Renderer(chats["keeps"], 100).render(parse_row({"input_ids": [1, 2, 99_999], "loss_mask": [0, 1, 1]}))


# ---- length


def test_a_long_sample_is_cut_and_counted_and_an_answer_past_the_end_drops_it(chats):
    chat = chats["keeps"]
    whole = _render(chat, _conversation([("one", "", "fox " * 50)])).samples[0]
    cut = _render(chat, _conversation([("one", "", "fox " * 50)]), max_length=40)
    assert cut.clipped == 1 and cut.samples[0][0].tolist() == whole[0][:40].tolist()
    with pytest.raises(Refused, match="too_long"):
        _render(chat, _conversation([("fox " * 50, "", "dog")]), max_length=40)


def test_a_later_turn_past_the_end_is_counted_as_too_long(chats):
    out = _render(chats["strips"], _conversation([("one", "", "fox"), ("dog " * 50, "", "cat")]), max_length=60)
    assert out.turns == 1 and [turn.reason for turn in out.refused_turns] == ["too_long"]


def test_turns_past_the_end_are_all_counted_though_not_all_rendered(chats):
    out = _render(chats["keeps"], _conversation([("one", "", "fox")] * 40), max_length=60)
    assert out.turns + len(out.refused_turns) == 40 and {turn.reason for turn in out.refused_turns} == {"too_long"}


def test_a_turn_behind_others_that_are_too_long_is_kept_if_dropped_reasoning_makes_it_short(chats):
    call = [{"function": {"name": "f", "arguments": {}}}]
    step = [{"role": "assistant", "content": "", "tool_calls": call}, {"role": "tool", "content": "ok"}]
    messages = [{"role": "user", "content": "one"}, {**step[0], "reasoning_content": "fox " * 2000}, step[1], *step * 12]
    messages += [{"role": "assistant", "content": "end"}, {"role": "user", "content": "two"}, {"role": "assistant", "content": "dog"}]
    out = _render(chats["strips"], messages, max_length=1500)
    assert chats["strips"].decode(_supervised(out.samples[-1])[-1]) == "dog<|im_end|>"


def test_a_tokenizer_that_marks_the_first_word_marks_no_answer(tmp_path):
    chat = ChatTokenizer(save_tokenizer(tmp_path / "metaspace", KEEPS, metaspace=True))
    reference = AutoTokenizer.from_pretrained(tmp_path / "metaspace")
    text = "fox <|im_end|>dog and <think>cat"
    assert chat.encode(text) == reference.encode(text, add_special_tokens=False)
    ids = _supervised(_render(chat, _conversation([("one", "", "fox")])).samples[0])[0]
    assert ids[:-1] != reference.encode("fox", add_special_tokens=False)
    assert [reference.convert_ids_to_tokens(index) for index in ids][0][0] != "▁"
    # nor one that spells a special token
    spelled = chat.encode_literally("fox <|im_end|> dog")
    assert chat.decode(spelled) == "fox <|im_end|> dog"
    assert spelled[: len(ids) - 1] == ids[:-1] and chat.token_id("<|im_end|>") not in spelled
