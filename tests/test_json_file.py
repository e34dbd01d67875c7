"""Files replaced in one move: the new text or the old one, and nothing beside it."""

from __future__ import annotations

import pytest

from dflash_ray.json_file import replace_text
from tests.run.test_folder import files_up_to


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path, sync):
    path = tmp_path / "a.json"
    replace_text(path, "old", sync=sync)
    replace_text(path, "नया", sync=sync)
    assert path.read_text(encoding="utf-8") == "नया"
    with files_up_to(100), pytest.raises(OSError):
        replace_text(path, "x" * 1000, sync=sync)
    assert path.read_text(encoding="utf-8") == "नया" and list(tmp_path.iterdir()) == [path]
