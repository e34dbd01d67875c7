"""What a file holds comes back as it was, an older one through its named upgrades; whatever else stands there is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from dflash_ray.records import COUNT, NUMBER, TEXT, Record, key, optional_key, or_null, other_keys
from dflash_ray.run.folder import RunFolder
from dflash_ray.run.metric_records import FILES, read_steps
from tests.support.records import checkpoint_meta, step_record


def _pounds_to_kilos(values):
    pounds = values.pop("pounds")
    return {**values, "kilos": pounds / 2}


def _name_is_a_text(values):
    return {**values, "name": str(values["name"])}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parcel(Record):
    VERSION = 2
    UPGRADES = (_pounds_to_kilos, _name_is_a_text)

    name: str = key(TEXT)
    kilos: float = key(NUMBER)
    stamp: str | None = key(or_null(TEXT))
    floor: int | None = optional_key(COUNT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note(Record):
    said: str = key(TEXT)
    more: dict = other_keys()


def test_a_record_comes_back_as_it_was():
    for parcel in (Parcel(name="a", kilos=1.5, stamp=None), Parcel(name="b", kilos=math.inf, stamp="x", floor=3)):
        written = json.loads(json.dumps(parcel.as_json()))
        assert written["version"] == 2 and ("floor" in written) == (parcel.floor is not None) and "stamp" in written
        assert Parcel.from_json(written, "here") == parcel
    note = Note(said="hello", more={"batch": 4, "why": "because"})
    assert note.as_json() == {"said": "hello", "batch": 4, "why": "because", "version": 1}
    assert Note.from_json(note.as_json(), "here") == note


def test_older_records_are_upgraded_version_by_version():
    assert Parcel.from_json({"name": 7, "pounds": 3}, "here") == Parcel(name="7", kilos=1.5, stamp=None)
    assert Parcel.from_json({"name": 7, "kilos": 3, "stamp": None, "version": 1}, "here") == Parcel(name="7", kilos=3, stamp=None)


@pytest.mark.parametrize(
    "written, says",
    [
        ({"name": "a", "stamp": None, "version": 2}, "kilos of parcel 3 is not a number"),
        ({"name": "a", "kilos": 1, "stamp": None, "colour": "red", "version": 2}, "parcel 3 has the unknown key 'colour'"),
        ({"name": "a", "kilos": 1, "version": 2}, "stamp of parcel 3 is not a text or null"),
        ({"name": "a", "kilos": True, "stamp": None, "version": 2}, "kilos of parcel 3 is not a number"),
        ({"name": "a", "kilos": 1, "stamp": 4, "version": 2}, "stamp of parcel 3 is not a text or null"),
        ({"name": "a", "kilos": 1, "stamp": None, "floor": -1, "version": 2}, "floor of parcel 3 is not a count"),
        ({"name": "a", "kilos": 1, "stamp": None, "version": 3}, "version of parcel 3 is '3'; this dflash-ray reads versions up to 2"),
        ({"name": "a", "kilos": 1, "stamp": None, "version": "x"}, "version of parcel 3 is 'x'"),
        ({"name": "a", "kilos": 1, "stamp": None, "version": True}, "version of parcel 3 is 'True'"),
    ],
)
def test_what_is_missing_unknown_or_wrong_is_named(written, says):
    with pytest.raises(ValueError, match=says):
        Parcel.from_json(written, "parcel 3")


def test_before_versions_only_what_is_needed_must_be_there():
    assert Note.from_json({}, "here").said is None
    with pytest.raises(ValueError, match="said of note 1 is not a text"):
        Note.from_json({}, "note 1", "said")


def test_a_records_version_cannot_be_changed_by_a_key_of_its_own():
    with pytest.raises(dataclasses.FrozenInstanceError):
        step_record().step = 2
    for kind in (*FILES.values(), type(checkpoint_meta(1))):
        assert "version" not in {field.name for field in dataclasses.fields(kind)} and len(kind.UPGRADES) <= kind.VERSION


def test_lines_of_a_newer_version_are_refused_with_their_file(tmp_path):
    run = RunFolder(tmp_path)
    run.append("metrics.jsonl", step_record(1).as_json(), step_record(2).as_json() | {"version": 99})
    with pytest.raises(ValueError, match=r"metrics.jsonl: version of record 2 is '99'"):
        read_steps(run)
