"""JSON objects from files that others wrote: one clear reason when they are none, never a hang and never a full memory.

And text written so that nobody ever reads half of it.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 256 * 2**20
MOST_NESTING = 100  # of brackets; writing what was read, or hashing it, recurses once per level


def read_regular_file(path: Path, most: int = MOST_BYTES) -> bytes:
    """All of the regular file `path`. FileNotFoundError where there is none; ValueError says what is wrong, without the path."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block for ever
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)  # before it is opened as a file: that raises for a folder
        raise ValueError("is no regular file")
    with os.fdopen(handle, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"has {max(status.st_size, len(data)):,} bytes; more than {most:,} are not read")
    return data


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the regular file `path`. FileNotFoundError where there is none; ValueError says what is wrong, without the path."""
    data = read_regular_file(path)
    try:
        value = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("cannot be read as JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"cannot be read as JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds {type(value).__name__}, not a JSON object")
    if _too_deep(value):
        raise ValueError("cannot be read as JSON: nested too deeply")
    return value


def replace_text(path: Path, text: str, *, sync: bool = False) -> None:
    """Writes `path` anew in one move; where that fails the old file stays. `sync`: the text is on the disk before the move."""
    temporary = path.parent / f".{path.name}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_NESTING):
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one) if isinstance(child, dict | list)]
        if not level:
            return False
    return True
