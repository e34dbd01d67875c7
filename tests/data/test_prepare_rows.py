"""Reading: every line of any file is a row or a reason, and nothing a file can hold stops the reading."""

from __future__ import annotations

import gzip
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ray.data.prepare.conversations import Conversation, Tokenised, parse_row
from dflash_ray.data.prepare.json_values import Broken, json_values
from dflash_ray.data.prepare.rows import MAX_ROW_BYTES, Refused, decode_json, find_files, read_chunks

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]}


def _rows(*paths) -> list[tuple[int, object]]:
    """(line, row or the reason it is none) of every row."""
    rows = []
    for chunk in read_chunks(find_files(list(paths))):
        for line, row in chunk:
            try:
                rows.append((line, decode_json(row) if isinstance(row, bytes) else row))
            except Refused as refusal:
                rows.append((line, refusal))
    return [(line, row.reason if isinstance(row, Refused) else row) for line, row in rows]


def _reason(row) -> str:
    with pytest.raises(Refused) as caught:
        parse_row(row)
    return caught.value.reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not_json"),
        (b'{"a": NaN}', "not_json"),
        (b'{"a": 1} trailing', "not_json"),
        (b'{"a": "\x00"}', "not_json"),
        (b'{"a": "\xff\xfe"}', "not_utf8"),
        (json.dumps(GOOD).encode("utf-16"), "not_utf8"),
        (b'{"role": "user", "role": "assistant"}', "duplicate_key"),
        (b'{"a": {"b": 1, "b": 2}}', "duplicate_key"),
        (b"[" * 100_000 + b"]" * 100_000, "nested_too_deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not_json"),
    ],
)
def test_a_line_that_is_no_json_has_a_reason_and_its_neighbours_are_read(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n" + line.replace(b"\n", b"") + b"\n" + json.dumps(GOOD).encode())
    assert _rows(path) == [(1, GOOD), (2, reason), (3, GOOD)]


def test_a_line_longer_than_the_limit_is_one_row_and_not_kept_in_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(json.dumps(GOOD).encode() + b"\n")
        for _ in range(2 * MAX_ROW_BYTES // (1 << 20) + 1):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + json.dumps(GOOD).encode())
    assert _rows(path) == [(1, GOOD), (2, "row_too_long"), (3, GOOD)]


def test_only_line_feeds_end_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    row = {"messages": [{"role": "user", "content": "a\u2028b\u0085c"}]}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert _rows(path) == [(1, row)]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([GOOD, GOOD]),
        json.dumps([GOOD, GOOD], indent=2),
        "\ufeff \n[\n" + json.dumps(GOOD) + "\n,\n" + json.dumps(GOOD) + "\n]\n",
        json.dumps(GOOD) + "\n" + json.dumps(GOOD) + "\n",
        json.dumps(GOOD, indent=1) + "\n" + json.dumps(GOOD, indent=1),
    ],
)
def test_json_files_of_every_layout_hold_the_same_rows(tmp_path, text):
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    assert [row for _, row in _rows(tmp_path / "a.json")] == [GOOD, GOOD]


def test_lines_of_json_files_are_where_a_value_starts(tmp_path):
    (tmp_path / "a.json").write_text("[\n\n" + json.dumps(GOOD, indent=1) + ",\n" + json.dumps(GOOD) + "]")
    assert [line for line, _ in _rows(tmp_path / "a.json")] == [3, 4 + json.dumps(GOOD, indent=1).count("\n")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", []),
        ("", []),
        ("[1, 2", [1, 2, "not_json"]),
        ("[1 2]", [1, "not_json"]),
        ("[1, {]", [1, "not_json"]),
        ("[1] 2", [1, "not_json"]),
        ('{"a": 1}\nnonsense\n{"a": 2}\n', [{"a": 1}, "not_json", {"a": 2}]),
        ('{"a": 1}\n{"a": "unfinished\n{"a": 2}\n', [{"a": 1}, "not_json", {"a": 2}]),
        ('[{"a": 1, "a": 2}, 3]', ["duplicate_key", 3]),
    ],
)
def test_broken_json_files(tmp_path, text, expected):
    (tmp_path / "a.json").write_text(text)
    assert [row for _, row in _rows(tmp_path / "a.json")] == expected


class _Trickle(io.RawIOBase):
    """Gives a few bytes at a time, as a slow pipe does."""

    def __init__(self, data: bytes, step: int):
        self._data, self._step = io.BytesIO(data), step

    def read(self, size: int = -1) -> bytes:
        return self._data.read(min(size, self._step) if size >= 0 else self._step)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(values=st.lists(_json, max_size=5), step=st.integers(1, 40), indent=st.none() | st.integers(0, 2), ascii_only=st.booleans())
def test_a_streamed_array_equals_the_array_however_it_arrives(values, step, indent, ascii_only):
    data = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    streamed = [value for _, value in json_values(_Trickle(data, step), MAX_ROW_BYTES)]
    assert not any(isinstance(value, Broken) for value in streamed) or b"\xed" in data
    assert len(streamed) == len(values)
    for value, expected in zip(streamed, values, strict=True):
        assert json.loads(value.decode("utf-8", "surrogatepass")) == expected


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60) | st.text(alphabet='[]{},:"a1 \n', max_size=40).map(str.encode), step=st.integers(1, 9))
def test_any_bytes_can_be_streamed(data, step):
    for line, value in json_values(_Trickle(data, step), 1000):
        assert 1 <= line <= data.count(b"\n") + 1
        assert isinstance(value, (bytes, Broken))


def test_an_oversized_array_element_ends_the_array_with_a_reason(tmp_path):
    text = json.dumps(["x" * 500, "y"]).encode()
    assert isinstance([value for _, value in json_values(io.BytesIO(text), 10**6)][0], bytes)
    values = [value for _, value in json_values(_Trickle(text, 50), 100)]
    assert len(values) == 1 and isinstance(values[0], Broken)


def test_compressed_files_and_one_that_is_cut_off(tmp_path):
    lines = (json.dumps(GOOD) + "\n").encode() * 3000
    whole = gzip.compress(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(whole)
    (tmp_path / "b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "c.jsonl.gz").write_bytes(b"no gzip at all")
    assert _rows(tmp_path / "a.jsonl.gz") == [(line, GOOD) for line in range(1, 3001)]
    cut = _rows(tmp_path / "b.jsonl.gz")
    assert 0 < len(cut) < 3001 and cut[-1] == (len(cut), "unreadable_file") and all(row == GOOD for _, row in cut[:-1])
    assert _rows(tmp_path / "c.jsonl.gz") == [(1, "unreadable_file")]


def test_a_folder_with_broken_files_is_read_round_them(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but no more")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "e.json").write_text(json.dumps([GOOD]))
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.jsonl").write_text("not data")
    assert [row for _, row in _rows(tmp_path)] == [GOOD, "unreadable_file", "unreadable_file", GOOD]


def test_inputs_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no .jsonl"):
        find_files([tmp_path])


def test_parquet_rows_are_what_was_written_without_the_nulls_of_the_table(tmp_path):
    call = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "tool_calls": [{"name": "f"}]}]}
    pq.write_table(pa.Table.from_pylist([GOOD, call]), tmp_path / "a.parquet")
    assert _rows(tmp_path / "a.parquet") == [(1, GOOD), (2, call)]


def test_a_table_with_values_python_cannot_hold_gives_its_other_rows(tmp_path):
    """Broken text is one row's reason; a column of dates or durations is none of ours, whatever it holds."""
    path, odd = tmp_path / "a.parquet", {"messages": [{"role": "user", "content": "QUESTION"}, *GOOD["messages"][1:]]}
    table = pa.Table.from_pylist([GOOD, odd, GOOD]).append_column("took", pa.array([5, 6, 7], pa.duration("ns")))
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    assert _rows(path) == [(1, GOOD), (2, odd), (3, GOOD)]
    path.write_bytes(path.read_bytes().replace(b"QUESTION", b"QUEST\xffON"))
    assert _rows(path) == [(1, GOOD), (2, "not_utf8"), (3, GOOD)]


def test_two_columns_of_one_name_are_not_guessed_between(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["messages", "messages"]), tmp_path / "a.parquet")
    assert _rows(tmp_path / "a.parquet") == [(1, "unreadable_file")]


def test_a_parquet_file_is_read_in_pieces_though_it_is_one_row_group(tmp_path):
    """Read by row groups, as pyarrow does by itself, the memory is that of the file."""
    text = np.random.default_rng(0).integers(97, 123, 10_000, dtype=np.uint8).tobytes().decode()
    table = pa.table({"messages": [[{"role": "user", "content": text[i:] + text[:i]}] for i in range(6400)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="none", use_dictionary=False)
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    del table
    before, most, rows = pa.total_allocated_bytes(), 0, 0
    for chunk in read_chunks(find_files([tmp_path / "a.parquet"])):
        most, rows = max(most, pa.total_allocated_bytes() - before), rows + len(chunk.lines)
    assert rows == 6400 and most < 40 << 20


@pytest.mark.parametrize("container", ["stream", "file"])
def test_folders_saved_by_hugging_face_datasets(tmp_path, container):
    table = pa.table({"tokens": [[1, 2, 3], [4, 5]], "mask": [[0, 1, 1], [1, 1]]})
    for split in ("train", "test"):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        new = pa.ipc.new_stream if container == "stream" else pa.ipc.new_file
        for name in ("data-00000-of-00001.arrow", "cache-0123.arrow"):
            with new(folder / name, table.schema) as writer:
                writer.write_table(table)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    rows = [row for _, row in _rows(tmp_path / "saved")]
    assert len(rows) == 4
    assert parse_row(rows[0], {"input_ids": "tokens", "loss_mask": "mask"}) == Tokenised([1, 2, 3], [0, 1, 1])
    (tmp_path / "saved" / "test" / "data-00000-of-00001.arrow").unlink()
    assert [row for _, row in _rows(tmp_path / "saved")][:1] == ["unreadable_file"], "a shard that is listed and missing is counted"


# ---- what a row means


def _message(**message) -> list[dict]:
    return [{"role": "user", "content": "hi"}, message]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (None, "not_an_object"),
        ([GOOD], "not_an_object"),
        ({}, "no_conversation"),
        ({"conversations": None, "messages": None}, "no_conversation"),
        ({"messages": []}, "empty_conversation"),
        ({"messages": {"role": "user"}}, "bad_conversation"),
        ({"messages": "not json"}, "bad_conversations"),
        ({"messages": [None]}, "bad_message"),
        ({"messages": [["user", "hi"]]}, "bad_message"),
        ({"messages": _message(content="x")}, "missing_role"),
        ({"messages": _message(role=None, content="x")}, "missing_role"),
        ({"messages": _message(role="narrator", content="x")}, "unknown_role"),
        ({"messages": _message(role=["assistant"], content="x")}, "unknown_role"),
        ({"messages": _message(role="", content="x")}, "unknown_role"),
        ({"messages": _message(role="user")}, "null_content"),
        ({"messages": _message(role="tool", content=None)}, "null_content"),
        ({"messages": _message(role="assistant", content=None)}, "null_content"),
        ({"messages": _message(role="assistant", content=3)}, "bad_content"),
        ({"messages": _message(role="user", content={"text": "x"})}, "bad_content"),
        ({"messages": _message(role="user", content=[["nested"]])}, "bad_content"),
        ({"messages": _message(role="user", content=[None])}, "bad_content"),
        ({"messages": _message(role="user", content=[{"type": "image_url", "image_url": {}}])}, "not_text"),
        ({"messages": _message(role="user", content=[{"type": "text", "text": None}])}, "not_text"),
        ({"messages": _message(role="assistant", content="\ud800")}, "lone_surrogate"),
        ({"messages": _message(role="assistant", content="", tool_calls=[{"name": "\udfff"}])}, "lone_surrogate"),
        ({"messages": _message(role="assistant", content="", tool_calls=[{}])}, "bad_tool_call"),
        ({"messages": _message(role="assistant", content="", tool_calls=[None])}, "bad_tool_call"),
        ({"messages": _message(role="assistant", content="", tool_calls=[{"name": "f", "arguments": [1]}])}, "bad_tool_call"),
        ({"messages": _message(role="assistant", content="", tool_calls=[{"name": "f", "arguments": "{"}])}, "bad_arguments"),
        ({"messages": _message(role="assistant", content="", tool_calls=[{"name": "f", "arguments": '{"a":1,"a":2}'}])}, "bad_arguments"),
        ({"messages": _message(**{"from": "function_call", "value": "call it"})}, "bad_function_call"),
        ({"messages": _message(**{"from": "function_call", "value": None})}, "bad_tool_call"),
        ({"messages": _message(role="assistant", content="a", prompt_ids=[1], output_ids=["x"])}, "bad_ids"),
        ({"messages": _message(role="assistant", content="a", output_ids=[1])}, "bad_ids"),
        ({"messages": _message(role="assistant", content="<think>\na\n</think>\n\nb", reasoning_content="c")}, "reasoning_twice"),
        ({"messages": _message(role="assistant", content="<think>\nso the answer must")}, "reasoning_not_closed"),
        ({"messages": _message(role="assistant", content="an answer", **{"from": "human"})}, "two_roles"),
        ({**GOOD, "tools": [3]}, "bad_tools"),
        ({**GOOD, "tools": "["}, "bad_tools"),
        ({**GOOD, "system": 3}, "bad_content"),
        ({"input_ids": [1, 2]}, "no_loss_mask"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "length_mismatch"),
        ({"input_ids": [1, 2.0], "loss_mask": [0, 1]}, "bad_ids"),
        ({"input_ids": [1, True], "loss_mask": [0, 1]}, "bad_ids"),
        ({"input_ids": "12", "loss_mask": [0, 1]}, "bad_ids"),
        ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "bad_loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [0, None]}, "bad_loss_mask"),
    ],
)
def test_rows_that_must_not_be_trained_on(row, reason):
    assert _reason(row) == reason


@pytest.mark.parametrize("field", ["conversations", "messages"])
def test_the_spellings_of_one_conversation_are_one_conversation(field):
    openai = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    sharegpt = [{"from": "System", "value": "s"}, {"from": " human ", "value": "u"}, {"from": "GPT", "value": "a"}]
    parts = [
        {"role": "developer", "content": "s"},
        {"role": "USER", "content": [{"type": "text", "text": "u"}]},
        {"role": "model", "content": ["a"]},
    ]
    expected = parse_row({"messages": openai})
    for messages in (openai, sharegpt, parts, json.dumps(openai)):
        assert parse_row({field: messages}) == expected
    assert parse_row({field: openai[1:], "system": "s"}) == expected


def test_tool_calls_in_every_spelling():
    function = {"name": "f", "arguments": {"a": 1}}
    spellings = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]},
        {"role": "assistant", "content": "", "function_call": function},
        {"from": "function_call", "value": json.dumps(function)},
        {"from": "function_call", "value": json.dumps([{"name": "f", "parameters": {"a": 1}}])},
    ]
    for message in spellings:
        conversation = parse_row({"messages": _message(**message)})
        assert [call["function"] for call in conversation.messages[1].tool_calls] == [function]


@settings(max_examples=300, deadline=None)
@given(
    row=_json,
    names=st.lists(st.sampled_from(["messages", "role", "content", "tool_calls", "from", "value", "input_ids", "tools"]), max_size=3),
)
def test_any_json_is_a_conversation_or_a_reason(row, names):
    for name in names:
        row = (
            {name: row}
            if name not in ("role", "content", "from", "value", "tool_calls")
            else {"messages": [{"role": "assistant", name: row}]}
        )
    try:
        assert isinstance(parse_row(row), (Conversation, Tokenised))
    except Refused as refusal:
        assert refusal.reason
