"""Data sets: what is written is what is read, foreign folders are read too, and a broken one is one clear line."""

import ctypes
import json
import mmap
import os
import shutil
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ray.data.store.dataset import Sample, dataset_splits, open_dataset
from dflash_ray.data.store.writer import SCHEMA, DatasetWriter, write_dataset


def sample(number, tokens=None):
    rng = np.random.default_rng(number)
    tokens = tokens or int(rng.integers(2, 60))
    mask = (rng.random(tokens) < 0.7).astype(np.uint8)
    mask[-2:] = 1
    return Sample(number, rng.integers(0, 2**31 - 1, tokens, dtype=np.int32), mask)


def slow_candidates(mask):
    return sum(1 for i in range(len(mask) - 1) if mask[i] and mask[i + 1])


@pytest.fixture
def folder(tmp_path):
    write_dataset(tmp_path / "data", {"train": map(sample, range(40)), "validation": [sample(99)]}, {"tokenizer": "abc"})
    return tmp_path / "data"


def same(read, written):
    return read.input_ids.tolist() == written.input_ids.tolist() and read.loss_mask.tolist() == written.loss_mask.tolist()


def test_round_trip(folder):
    data = open_dataset(folder)
    written = [sample(number) for number in range(40)]
    assert data.lengths.tolist() == [len(s.input_ids) for s in written]
    assert data.anchor_candidates.tolist() == [slow_candidates(s.loss_mask) for s in written]
    assert data.sample_ids.tolist() == list(range(40))
    order = np.random.default_rng(0).permutation(40)
    for read, number in zip(data.read(order), order, strict=True):
        assert read.sample_id == number and same(read, written[number])
        assert read.input_ids.dtype == np.int32 and read.loss_mask.dtype == np.uint8
        read.input_ids[:] = 0  # what is read is the caller's own
    assert same(data.read([5])[0], written[5])
    assert dataset_splits(folder) == ["train", "validation"]
    assert same(open_dataset(folder, "validation").read([0])[0], sample(99))
    assert data.manifest["tokenizer"] == "abc" and data.manifest["splits"]["train"]["samples"] == 40


def test_the_format_is_the_published_one(folder):
    with pa.memory_map(str(folder / "train" / "00000.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
    assert table.schema == SCHEMA
    assert [str(field.type) for field in SCHEMA] == ["int64", "list<item: int32>", "list<item: uint8>", "int32", "int32", "string"]
    assert table["input_ids"][3].as_py() == sample(3).input_ids.tolist()


def test_many_shards_read_as_one(tmp_path):
    with DatasetWriter(tmp_path / "data", shard_bytes=1) as writer:
        for number in range(2100):
            assert writer.add("train", sample(number, 6).input_ids, sample(number, 6).loss_mask) == number
        writer.finish({})
    assert len(list((tmp_path / "data" / "train").iterdir())) == 3
    data = open_dataset(tmp_path / "data")
    order = np.random.default_rng(0).permutation(2100)
    assert all(same(read, sample(number, 6)) for number, read in zip(order, data.read(order), strict=True))
    (tmp_path / "data" / "train" / "00001.arrow").unlink()
    with pytest.raises(ValueError, match="its manifest says 2100"):
        open_dataset(tmp_path / "data")


def test_fingerprint_follows_content_not_place(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert open_dataset(tmp_path / "elsewhere").fingerprint == open_dataset(folder).fingerprint
    others = [
        ({"train": map(sample, range(1, 41)), "validation": [sample(99)]}, {"tokenizer": "abc"}),
        ({"train": map(sample, range(40)), "validation": [sample(99)]}, {"tokenizer": "xyz"}),
    ]
    for number, (splits, manifest) in enumerate(others):
        write_dataset(tmp_path / f"{number}", splits, manifest)
        assert open_dataset(tmp_path / f"{number}").fingerprint != open_dataset(folder).fingerprint


def overwrite(folder, *columns):
    """Fills the buffers of these columns of the only training shard with 0xff."""
    path = folder / "train" / "00000.arrow"
    content = bytearray(path.read_bytes())
    buffer = pa.py_buffer(bytes(content))
    batch = pa.ipc.open_file(pa.BufferReader(buffer)).get_batch(0)
    for name in columns:
        for piece in batch.column(name).buffers():
            if piece is not None:
                start = piece.address - buffer.address
                content[start : start + piece.size] = b"\xff" * piece.size
    path.write_bytes(content)


def test_lengths_need_no_other_column(folder):
    """Every other column's bytes are destroyed; lengths and candidates are as before, and only reading samples notices."""
    before = open_dataset(folder)
    lengths, candidates = before.lengths, before.anchor_candidates
    overwrite(folder, "sample_id", "input_ids", "loss_mask", "source")
    after = open_dataset(folder)
    assert after.lengths.tolist() == lengths.tolist() and after.anchor_candidates.tolist() == candidates.tolist()
    with pytest.raises(ValueError, match="00000.arrow"):
        after.read([0])


def resident_kib(shard):
    """Pages of this file that our own mappings hold."""
    with open("/proc/self/smaps") as maps:
        lines = iter(maps)
        return sum(int(next(rest for rest in lines if rest.startswith("Rss:")).split()[1]) for line in lines if str(shard) in line)


def cached_share(shard):
    """Share of this file's pages that the system has read from disk (mincore of a fresh mapping)."""
    with open(shard, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(mapped)), pages) == 0
        return sum(page & 1 for page in pages) / len(pages)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and mincore")
def test_opening_reads_next_to_nothing_and_no_pages_stay(tmp_path):
    """20 MB of tokens on disk: opening touches a hundredth of it, reading what it returns, and neither leaves pages in the process."""
    write_dataset(tmp_path / "data", {"train": (sample(number, 4000) for number in range(1000))}, {})
    shard = tmp_path / "data" / "train" / "00000.arrow"
    with open(shard, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    evicted = cached_share(shard) == 0  # not on a file system in memory
    data = open_dataset(tmp_path / "data")
    assert resident_kib(shard) == 0
    assert not evicted or cached_share(shard) < 0.05
    data.read(range(0, 1000, 10))
    assert resident_kib(shard) == 0
    assert not evicted or cached_share(shard) < 0.25


def save_to_disk(folder, columns, batch_rows=7, name="data-00000-of-00001.arrow", end=True):
    """A folder as Hugging Face `datasets` lays it out: an Arrow stream and two JSON files."""
    folder.mkdir(parents=True)
    table = pa.table(columns)
    with pa.OSFile(str(folder / name), "wb") as sink:
        writer = pa.ipc.new_stream(sink, table.schema)
        writer.write_table(table, max_chunksize=batch_rows)
        if end:
            writer.close()
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_fingerprint": "f00", "_split": "train"}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {name: {} for name in columns}}))


def hugging_face_columns(count=30, mask="int64", kind=pa.list_):
    samples = [sample(number) for number in range(count)]
    return {
        "tokens": pa.array([s.input_ids.tolist() for s in samples], kind(pa.int64())),
        "mask": pa.array([s.loss_mask.astype(mask).tolist() for s in samples], kind(pa.from_numpy_dtype(mask))),
    }


NAMES = {"input_ids": "tokens", "loss_mask": "mask"}


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
@pytest.mark.parametrize("mask", ["int64", "bool", "int8"])
def test_a_hugging_face_folder(tmp_path, kind, mask):
    save_to_disk(tmp_path / "hf", hugging_face_columns(mask=mask, kind=kind))
    data = open_dataset(tmp_path / "hf", columns=NAMES)
    assert data.lengths.tolist() == [len(sample(number).input_ids) for number in range(30)]
    assert data.anchor_candidates.tolist() == [slow_candidates(sample(number).loss_mask) for number in range(30)]
    assert [read.sample_id for read in data.read([4, 29])] == [4, 29]
    assert all(same(read, sample(number)) for number, read in enumerate(data.read(range(30))))
    assert dataset_splits(tmp_path / "hf") == ["train"]


def test_a_hugging_face_folder_of_splits(tmp_path):
    for split in ("train", "validation"):
        save_to_disk(tmp_path / "hf" / split, hugging_face_columns())
    (tmp_path / "hf" / "dataset_dict.json").write_text(json.dumps({"splits": ["validation", "train"]}))
    assert dataset_splits(tmp_path / "hf") == ["train", "validation"]
    assert len(open_dataset(tmp_path / "hf", "validation", NAMES)) == 30
    with pytest.raises(ValueError, match="no split 'test'; it has train, validation"):
        open_dataset(tmp_path / "hf", "test", NAMES)


def test_hugging_face_mistakes(tmp_path):
    save_to_disk(tmp_path / "hf", hugging_face_columns())
    with pytest.raises(ValueError, match=r"no column 'input_ids' among \['tokens', 'mask'\].*data.columns"):
        open_dataset(tmp_path / "hf")
    with pytest.raises(ValueError, match="'ids' is no column of ours"):
        open_dataset(tmp_path / "hf", columns={"ids": "tokens"})
    with pytest.raises(ValueError, match="no column 'lengths'"):
        open_dataset(tmp_path / "hf", columns={**NAMES, "seq_len": "lengths"})
    (tmp_path / "hf" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../../etc/passwd"}]}))
    with pytest.raises(ValueError, match="not the name of a file in this folder"):
        open_dataset(tmp_path / "hf", columns=NAMES)
    save_to_disk(tmp_path / "cut", hugging_face_columns(), end=False)
    with pytest.raises(ValueError, match="cut off"):
        open_dataset(tmp_path / "cut", columns=NAMES)


@pytest.mark.parametrize(
    "columns, words",
    [
        ({"input_ids": pa.array([["a"], ["b"]])}, "holds list<item: string>"),
        ({"input_ids": pa.array([1, 2])}, "not lists"),
        ({"input_ids": pa.array([[1.5, 2], [3, 4]])}, "holds list<item: double>"),
        ({"input_ids": pa.array([[1, 2, 3], None])}, "null"),
        ({"input_ids": pa.array([[1, 2, 3], [1, None]])}, "null"),
        ({"loss_mask": pa.array([[0, 1, 0], [1, 0]])}, "nothing can be trained"),
        ({"loss_mask": pa.array([[1, 1], [1, 1]])}, "row 0: 3 tokens, 2 mask entries"),
        ({"loss_mask": pa.array([[1, 1, -100], [1, 1]])}, r"holds -100..1"),
        ({"input_ids": pa.array([[1, 2, -3], [1, 2]])}, "token ids from -3 to 2"),
        ({"input_ids": pa.array([[1, 2, 2**31], [1, 2]])}, "fit in 32 bits"),
        ({"seq_len": pa.array([3, 3])}, "row 1: 2 tokens, 2 mask entries, seq_len 3"),
        ({"seq_len": pa.array([3.0, 2.0])}, "holds double"),
        ({"seq_len": pa.array([3, 0])}, "row 1 of split 'train' has 0 tokens"),
        ({"seq_len": pa.array([3, -2])}, "row 1 of split 'train' has -2 tokens"),
        ({"anchor_candidates": pa.array([1, 1])}, "anchor_candidates is 1, the mask has 2"),
        ({"anchor_candidates": pa.array([3, 1])}, "fewer candidates than tokens"),
        ({"anchor_candidates": pa.array([0, 0])}, "nothing can be trained"),
        ({"input_ids": pa.array([[1, 2, 3], []], pa.list_(pa.int32())), "loss_mask": pa.array([[1, 1, 1], []])}, "has 0 tokens"),
    ],
)
def test_impossible_contents(tmp_path, columns, words):
    good = {"input_ids": pa.array([[1, 2, 3], [4, 5]]), "loss_mask": pa.array([[1, 1, 1], [1, 1]])}
    save_to_disk(tmp_path / "hf", {**good, **columns})
    with pytest.raises(ValueError, match=words) as error:
        open_dataset(tmp_path / "hf").read([0, 1])
    assert "\n" not in str(error.value)


def test_compressed_shards_are_refused(tmp_path):
    (tmp_path / "data" / "train").mkdir(parents=True)
    table = pa.table({"input_ids": [list(range(1000))] * 9, "loss_mask": [[1] * 1000] * 9})
    with pa.OSFile(str(tmp_path / "data" / "train" / "00000.arrow"), "wb") as sink:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table)
    with pytest.raises(ValueError, match="compressed or damaged"):
        open_dataset(tmp_path / "data")


def test_folders_that_are_no_data_set(tmp_path):
    with pytest.raises(ValueError, match="no such data set folder"):
        open_dataset(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no data set"):
        open_dataset(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0.arrow").write_bytes(b"")
    with pytest.raises(ValueError, match="0.arrow: cannot be read"):
        open_dataset(tmp_path)
    (tmp_path / "train" / "0.arrow").write_bytes(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(ValueError, match="not a whole Arrow file"):
        open_dataset(tmp_path)
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        open_dataset(tmp_path)


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def broken():
        yield from map(sample, range(2000))
        raise OSError("source went away")

    with pytest.raises(OSError, match="source went away"):
        write_dataset(tmp_path / "data", {"train": broken()}, {})
    assert list(tmp_path.iterdir()) == []
    write_dataset(tmp_path / "data", {"train": [sample(0)]}, {})
    with pytest.raises(ValueError, match="exists already"):
        write_dataset(tmp_path / "data", {"train": [sample(1)]}, {})
    assert len(open_dataset(tmp_path / "data")) == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "ids, mask, words",
    [
        ([1], [1], "at least 2"),
        ([1, 2], [1], "equal lists"),
        ([1, -2], [1, 1], "0 or more"),
        ([1, 2**31], [1, 1], "0 or more"),
        ([1.0, 2.0], [1, 1], "equal lists"),
        ([1, 2], [1, 2], "0 and 1 only"),
        ([1, 2, 3], [1, 0, 1], "no anchor"),
    ],
)
def test_the_writer_refuses_what_cannot_be_trained(tmp_path, ids, mask, words):
    with DatasetWriter(tmp_path / "data") as writer, pytest.raises(ValueError, match=words):
        writer.add("train", ids, mask)


FUZZED = {}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_shards_are_one_line_or_harmless(tmp_path_factory, data):
    fuzz_one(tmp_path_factory, data)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=20_000, deadline=None)
@given(st.data())
def test_damaged_shards_are_one_line_or_harmless_20_000_times(tmp_path_factory, data):
    fuzz_one(tmp_path_factory, data)


def fuzz_one(tmp_path_factory, data):
    """Flipped bytes, cuts and foreign tails: either every sample is read whole or a ValueError of one line is raised."""
    if not FUZZED:
        base = tmp_path_factory.mktemp("fuzz")
        write_dataset(base / "file", {"train": map(sample, range(5))}, {})
        save_to_disk(base / "stream", hugging_face_columns(5), batch_rows=2)
        for kind, shard, names in (("file", "train/00000.arrow", {}), ("stream", "data-00000-of-00001.arrow", NAMES)):
            FUZZED[kind] = (base / kind, base / kind / shard, (base / kind / shard).read_bytes(), names)
    folder, shard, content, names = FUZZED[data.draw(st.sampled_from(["file", "stream"]))]
    damaged = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    if data.draw(st.integers(0, 3)) == 0:
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    shard.unlink()
    shard.write_bytes(damaged)
    try:
        opened = open_dataset(folder, columns=names)
        for read, length in zip(opened.read(range(len(opened))), opened.lengths, strict=True):
            assert len(read.input_ids) == len(read.loss_mask) == length
        opened.sample_ids  # noqa: B018
    except ValueError as error:
        assert "\n" not in str(error)


def test_files_beside_the_manifest_appear_with_it_or_not_at_all(tmp_path):
    def broken(_manifest):
        raise RuntimeError("killed here")

    with pytest.raises(RuntimeError), DatasetWriter(tmp_path / "data") as writer:
        writer.add("train", [1, 2, 3], [0, 1, 1])
        writer.finish({}, broken)
    assert list(tmp_path.iterdir()) == []
    with DatasetWriter(tmp_path / "data") as writer:
        writer.add("train", [1, 2, 3], [0, 1, 1])
        writer.finish({}, lambda manifest: {"report.json": {"samples": manifest["splits"]["train"]["samples"]}})
    assert json.loads((tmp_path / "data" / "report.json").read_text()) == {"samples": 1}
