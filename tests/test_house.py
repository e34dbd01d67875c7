"""The house: which room may import which, and how large rooms and files may become. The rooms' own `__init__` say what they may import."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.processes import ROOT

TOPS = ("dflash_ray", "actors", "jobs")
ALLOWED = {"dflash_ray": {"dflash_ray"}, "actors": {"actors", "dflash_ray"}, "jobs": {"jobs", "actors", "dflash_ray"}}
MOST_LINES, MOST_FILES, MOST_BASE_FILES = 400, 14, 8
MAY_IMPORT = "May import: "
DOCS = ROOT / "docs" / "architecture.md"


class House:
    """The modules below `root`, read as text; imports inside functions and for types count like any other."""

    def __init__(self, root: Path):
        self.files: dict[str, Path] = {}
        for top in TOPS:
            for path in sorted((root / top).rglob("*.py")):
                self.files[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = path
        self.trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in self.files.items()}
        self.imports = {name: set(self._imports(name)) for name in self.files}

    def _imports(self, name: str) -> Iterator[str]:
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: imports relatively; say the whole name"
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    yield whole if whole in self.files else node.module

    def room(self, name: str) -> str:
        """The folder that `name` lies in, as a dotted name."""
        return name if self.files[name].name == "__init__.py" else name.rpartition(".")[0]

    def rooms(self) -> dict[str, str]:
        """Room -> the docstring of its `__init__`."""
        return {name: ast.get_docstring(tree) or "" for name, tree in self.trees.items() if self.files[name].name == "__init__.py"}

    def between_rooms(self) -> dict[str, set[str]]:
        edges: dict[str, set[str]] = {room: set() for room in self.rooms()}
        for name, imported in self.imports.items():
            edges[self.room(name)] |= {self.room(one) for one in imported if one in self.files} - {self.room(name)}
        return edges


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """One list of names per circle that the search comes upon; empty if there is none."""
    done: set[str] = set()
    found: list[list[str]] = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for one in sorted(edges.get(name, ())):
                visit(one, [*path, name])
            done.add(name)

    for name in sorted(edges):
        visit(name, [])
    return found


def declared(docstring: str) -> set[str] | None:
    """The rooms after `May import:`; None where the docstring does not say."""
    _, said, rest = docstring.partition(MAY_IMPORT)
    if not said:
        return None
    names = " ".join(rest.split("\n\n")[0].split()).rstrip(".")
    return set() if names == "nothing" else set(names.split(", "))


# ---- the rules: each gives one line per breach ---------------------------------------------------------------------------------


def wrong_way(house: House) -> list[str]:
    """jobs -> actors -> dflash_ray, and nothing of tests anywhere."""
    ours = {*TOPS, "tests"}
    return [
        f"{name} imports {one}"
        for name, imported in house.imports.items()
        for one in imported
        if (top := one.partition(".")[0]) in ours and top not in ALLOWED[name.partition(".")[0]]
    ]


def ray_in_the_library(house: House) -> list[str]:
    return [
        f"{name} imports {one}"
        for name, imported in house.imports.items()
        for one in imported
        if name.partition(".")[0] == "dflash_ray" and one.partition(".")[0] == "ray"
    ]


def undeclared(house: House) -> list[str]:
    """A room imports what its `__init__` does not name, or names what it does not import."""
    out = []
    edges = house.between_rooms()
    for room, docstring in house.rooms().items():
        said = declared(docstring)
        if said is None:
            out.append(f"{room}/__init__.py does not say `{MAY_IMPORT}...`")
            continue
        out += [f"{room} imports {one}, which its __init__ does not name" for one in sorted(edges[room] - said)]
        out += [f"{room} names {one}, which it does not import" for one in sorted(said - edges[room])]
    return out


def circles_of_files(house: House) -> list[str]:
    return [" -> ".join(one) for one in circles({name: imported & house.files.keys() for name, imported in house.imports.items()})]


def circles_of_rooms(house: House) -> list[str]:
    return [" -> ".join(one) for one in circles(house.between_rooms())]


def too_large(house: House) -> list[str]:
    out = [
        f"{name} has {lines} lines"
        for name, path in house.files.items()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES
    ]
    for room in house.rooms():
        folder = house.files[room].parent
        files = sum(path.is_file() and path.name != "__init__.py" for path in folder.iterdir())
        most = MOST_BASE_FILES if room == "dflash_ray" else MOST_FILES
        if files > most and room != "jobs":  # which shows one entry point a file
            out.append(f"{room} has {files} files, more than {most}")
    return out


RULES = {rule.__name__: rule for rule in (wrong_way, ray_in_the_library, undeclared, circles_of_files, circles_of_rooms, too_large)}


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_its_rules(house, rule):
    assert RULES[rule](house) == []


def test_the_docs_show_the_rooms_in_the_order_in_which_they_may_import_each_other(house):
    """A room that shares its row with its parts (`plain/`, `kernels/`) stands for them."""
    rows = [line.split("`")[1].strip("/").replace("/", ".") for line in DOCS.read_text().splitlines() if re.match(r"\| `\w[\w/]*/`", line)]
    place = {room: next((row for row in reversed(rows) if room == row or room.startswith(f"{row}.")), None) for room in house.rooms()}
    assert None not in place.values(), place
    backwards = [
        f"{room} imports {one}, which docs/architecture.md shows below it"
        for room, imported in house.between_rooms().items()
        for one in imported
        if rows.index(place[one]) > rows.index(place[room])
    ]
    assert backwards == []


def test_settings_load_neither_torch_nor_ray():
    code = (
        "import sys, dflash_ray.config.loading, dflash_ray.config.schema\n"
        "assert not {'torch', 'ray', 'transformers', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# ---- each rule is seen to fail -------------------------------------------------------------------------------------------------

SOUND = {
    "dflash_ray/__init__.py": '"""Base.\n\nMay import: nothing."""',
    "dflash_ray/json_file.py": "",
    "dflash_ray/low/__init__.py": '"""Low.\n\nMay import: dflash_ray."""',
    "dflash_ray/low/a.py": "from dflash_ray.json_file import read",
    "dflash_ray/low/b.py": "from dflash_ray.low import a",
    "actors/__init__.py": '"""Actors.\n\nMay import: dflash_ray.low."""',
    "actors/one.py": "import ray\nfrom dflash_ray.low.a import x",
    "jobs/__init__.py": '"""Jobs.\n\nMay import: actors."""',
    "jobs/job.py": "from actors.one import y",
}
BREACHES = {
    "wrong_way": [
        {"dflash_ray/low/a.py": "def f():\n    from actors.one import y"},
        {"actors/one.py": "from jobs.job import main"},
        {"jobs/job.py": "from tests.support import tiny_runs"},
    ],
    "ray_in_the_library": [{"dflash_ray/low/a.py": "def f():\n    import ray.util"}],
    "undeclared": [
        {"dflash_ray/low/__init__.py": '"""Low."""'},
        {"dflash_ray/low/__init__.py": '"""Low.\n\nMay import: nothing."""'},
        {"dflash_ray/low/__init__.py": '"""Low.\n\nMay import: dflash_ray, jobs."""'},
    ],
    "circles_of_files": [
        {"dflash_ray/low/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dflash_ray.low.b import B"}
    ],
    "circles_of_rooms": [{"dflash_ray/json_file.py": "def f():\n    from dflash_ray.low.b import x"}],
    "too_large": [{"dflash_ray/low/a.py": "x = 1\n" * 401}, {f"dflash_ray/f{number}.py": "" for number in range(8)}],
}


def write(root: Path, files: Mapping[str, str]) -> House:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(root)


def test_a_sound_house_breaks_no_rule(tmp_path):
    house = write(tmp_path, SOUND)
    assert {name: rule(house) for name, rule in RULES.items()} == dict.fromkeys(RULES, [])


@pytest.mark.parametrize("rule, breach", [(rule, breach) for rule, breaches in BREACHES.items() for breach in breaches])
def test_each_rule_sees_its_breach(tmp_path, rule, breach):
    assert RULES[rule](write(tmp_path, SOUND | breach))
