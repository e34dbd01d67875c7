"""From YAML files and flags to one checked tree of settings.

An unknown key, a wrong type or an impossible value is a ValueError whose message names the key, the value and what would be right. YAML
files are merged left to right, then dotted flags (`--optimizer.lr 1e-3`) win. Nothing is read from the environment.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from dflash_ray.config.schema import Config

MOST_YAML_BYTES = 2**20
MOST_YAML_VALUES = 100_000


def merge(base: dict, extra: dict) -> dict:
    """`extra` over `base`, section by section; neither is changed."""
    out = dict(base)
    for key, value in extra.items():
        out[key] = merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def load_config(
    files: list[Path] | tuple[Path, ...] = (), flags: list[str] | tuple[str, ...] = (), overrides: dict | None = None
) -> Config:
    """Files left to right, then `flags` (`["--a.b", "value", ...]`), then `overrides`. ValueError otherwise."""
    tree: dict = {}
    for path in files:
        tree = merge(tree, read_yaml(Path(path)))
    tree = merge(tree, _tree(read_flags(list(flags))))
    return validate(merge(tree, overrides or {}))


def validate(tree: dict) -> Config:
    try:
        return Config(**tree)
    except ValidationError as error:
        raise ValueError(_one_line(error)) from None


def read_yaml(path: Path, flag: str = "--config") -> dict:
    """The mapping in a YAML file that `flag` named; ValueError where it holds none."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("is no regular file")  # a pipe would block for ever
        if path.exists() and path.stat().st_size > MOST_YAML_BYTES:
            raise ValueError(f"has more than {MOST_YAML_BYTES:,} bytes")
        data = _yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{flag} {path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag} {path}: cannot be read as YAML: {str(error).splitlines()[0]}") from None
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ValueError(f"{flag} {path}: the top of a config file must be a mapping of names")
    return data


def _yaml(text: str) -> Any:
    """Plain values; ValueError for what is no YAML, or refers to itself so that it would be endless or enormous."""
    try:
        data = yaml.safe_load(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # of a value that its tag does not fit (`!!int x`), the parser raises whatever its conversion raised
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError((str(error).strip() or type(error).__name__).splitlines()[0]) from None
    todo, seen = [data], 0
    while todo:
        value = todo.pop()
        seen += 1
        if seen > MOST_YAML_VALUES:
            raise ValueError(f"more than {MOST_YAML_VALUES:,} values, or an alias that refers to itself")
        if isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | set | tuple):
            todo += value
    return data


def read_flags(flags: list[str]) -> list[tuple[str, Any]]:
    """(dotted name, value) of each setting in `["--a.b", "value", "--c.d=value", ...]`, which is what a job's own flags have left.

    Only the names are judged here; values are judged with the rest of the tree. Whatever follows a name is its value, -1 too.
    """
    known = [name for name, _ in _settings(Config)]
    found = []
    left = iter(flags)
    for flag in left:
        if not flag.startswith("--"):
            raise ValueError(f"{flag!r} is not a flag; flags look like --optimizer.lr 1e-3")
        name, has_equals, value = flag[2:].partition("=")
        if name not in known:
            raise ValueError(f"--{name}: no such setting{_suggest(name, known)}")
        if not has_equals and (value := next(left, None)) is None:
            raise ValueError(f"--{name}: a value is missing after it")
        found.append((name, _flag_value(value)))
    return found


def _tree(settings: list[tuple[str, Any]]) -> dict:
    """Sections of settings; of one that is named twice the last value."""
    tree: dict = {}
    for name, value in settings:
        *sections, leaf = name.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = value
    return tree


def _flag_value(text: str) -> Any:
    try:
        value = _yaml(text)
    except ValueError:
        return text
    # numbers stay text: pydantic turns them into numbers where one is wanted, and a run named 7 stays "7"
    return value if isinstance(value, (bool, list, dict, type(None))) else text


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting by its dotted name."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _settings(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def describe_settings() -> list[tuple[str, str, str]]:
    """(dotted name, default, description) of every setting, for --help and the README's table."""
    return [(name, str(field.get_default(call_default_factory=True)), field.description or "") for name, field in _settings(Config)]


def _suggest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _one_line(error: ValidationError) -> str:
    known = [name for name, _ in _settings(Config)]
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"] if not str(part).startswith(("function-", "literal[", "list["))) or "config"
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: no such setting{_suggest(where, known)}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            shown = "" if item["type"] == "value_error" else f" (got {_shorten(item['input'])})"
            lines.append(f"{where}: {message}{shown}")
    return "; ".join(dict.fromkeys(lines))


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
