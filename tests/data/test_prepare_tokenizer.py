"""Encoding by pieces is the tokenizer's own, and a tokenizer or template that cannot be used is refused with what to do."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AddedToken, AutoTokenizer

from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from tests.support.tiny_chat import BARE, KEEPS, OPENS, save_tokenizer, texts


def test_a_limit_never_cuts_a_token_in_two(chats, references):
    whole = references["keeps"].encode("=" * 4000, add_special_tokens=False)
    assert len(whole) < 100
    for limit in range(1, len(whole)):
        assert chats["keeps"].encode("=" * 4000, limit)[:limit] == whole[:limit]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts, repeats=st.integers(1, 200), limit=st.integers(1, 300))
def test_a_limited_encoding_begins_as_the_whole_one(chats, references, text, repeats, limit):
    whole = references["keeps"].encode(text * repeats, add_special_tokens=False)
    part = chats["keeps"].encode(text * repeats, limit)
    assert part[:limit] == whole[:limit]
    assert len(part) >= min(limit, len(whole))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_encoding_by_pieces_is_the_tokenizers_own(chats, references, text):
    assert chats["keeps"].encode(text) == references["keeps"].encode(text, add_special_tokens=False)


@pytest.mark.parametrize("flags", [{"rstrip": True}, {"lstrip": True}, {"single_word": True}, {"normalized": True}])
def test_tokens_that_touch_their_neighbours_are_no_borders(tmp_path, flags):
    folder = save_tokenizer(tmp_path / "strip", KEEPS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken("<|pad|>", **{"special": True, "normalized": False, **flags})])
    tokenizer.save_pretrained(folder)
    chat, reference = ChatTokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("fox <|pad|> dog", "fox<|pad|>\n\ndog<|im_end|> <|pad|>", "\n<|pad|><|pad|>  fox", "a<|pad|>b"):
        assert chat.encode(text) == reference.encode(text, add_special_tokens=False)


def test_templates_that_cannot_be_used_are_refused_with_what_to_pass(tmp_path):
    without = ChatTokenizer(save_tokenizer(tmp_path / "without", None))
    with pytest.raises(ValueError, match="no chat template; pass --chat-template FILE"):
        without.require_template()
    endless = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match="no end-of-turn token"):
        ChatTokenizer(save_tokenizer(tmp_path / "endless", endless)).require_template()
    with pytest.raises(ValueError, match="fails on a question and an answer: no"):
        ChatTokenizer(save_tokenizer(tmp_path / "raises", "{{ raise_exception('no') }}")).require_template()
    (tmp_path / "keeps.jinja").write_text(KEEPS)
    ChatTokenizer(tmp_path / "without", tmp_path / "keeps.jinja").require_template()


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        ChatTokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="no tokenizer can be loaded"):
        ChatTokenizer(tmp_path)


def test_the_fingerprint_is_that_of_the_behaviour(tmp_path, chats, folders):
    copy = AutoTokenizer.from_pretrained(folders["keeps"])
    copy.save_pretrained(tmp_path / "copy")
    assert ChatTokenizer(tmp_path / "copy").fingerprint() == chats["keeps"].fingerprint()
    strips = chats["strips"].fingerprint()
    assert strips["tokenizer"] == chats["keeps"].fingerprint()["tokenizer"]
    assert strips["chat_template"] != chats["keeps"].fingerprint()["chat_template"]
    copy.add_tokens(["<|one more|>"])
    copy.save_pretrained(tmp_path / "more")
    assert ChatTokenizer(tmp_path / "more").fingerprint()["tokenizer"] != chats["keeps"].fingerprint()["tokenizer"]
    other = ChatTokenizer(save_tokenizer(tmp_path / "other", KEEPS, vocabulary=330))
    assert other.fingerprint()["tokenizer"] != chats["keeps"].fingerprint()["tokenizer"]


def test_end_of_turn_is_read_from_the_template(tmp_path):
    assert ChatTokenizer(save_tokenizer(tmp_path / "bare", BARE)).end_of_turn == "<|im_end|>"
    ends = KEEPS.replace("<|im_end|>", "</s>")
    assert ChatTokenizer(save_tokenizer(tmp_path / "ends", ends)).end_of_turn == "</s>"
    assert ChatTokenizer(save_tokenizer(tmp_path / "opens", OPENS)).tail == "<|im_end|>\n"
