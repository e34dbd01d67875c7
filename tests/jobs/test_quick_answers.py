"""What a command does not need it does not import: `--help`, a mistake and a dry run answer at once.

What is imported is looked at, never a clock. Each command runs in a fork of a process that has loaded nothing but what all of them need.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from jobs.bench import PARTS
from tests.support.processes import ROOT

HEAVY = ("torch", "ray", "transformers", "pyarrow", "matplotlib", "triton", "fla", "tokenizers", "wandb", "numpy", "pandas", "safetensors")
ENTRIES = sorted(path.stem for path in (ROOT / "jobs").glob("*.py") if path.stem != "__init__")
ENTRIES += ["quickstart.run", "quickstart.make_target"]
HELP = {name: [name, "--help"] for name in ENTRIES} | {f"bench {part}": ["bench", part, "--help"] for part in PARTS}
DRY_RUN = ["train", "--config", "jobs/configs/qwen3.6-27b.yaml", "--dry-run"]
COMMANDS = HELP | {"dry run": DRY_RUN, "mistake": ["train", "--optimzer.lr", "1"], "settings": []}

IN_A_FORK = """
import json, os, runpy, sys
import pydantic, yaml
heavy, commands = json.loads(sys.argv[1])
found = {}
for name, command in commands.items():
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        code = 0
        try:
            if command:
                sys.argv = command
                runpy.run_module("jobs." + command[0], run_name="__main__", alter_sys=True)
            else:
                import dflash_ray.config.loading, dflash_ray.config.schema
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
        os.write(write, json.dumps([code, [one for one in heavy if one in sys.modules]]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        found[name] = json.loads(answer.read())
    os.wait()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, tuple[int, list[str]]]:
    """Of every command its exit code and the heavy modules that it has loaded at its end."""
    command = [sys.executable, "-c", IN_A_FORK, json.dumps([HEAVY, COMMANDS])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", HELP)
def test_help_loads_nothing_heavy(name, loaded):
    assert loaded[name] == [0, []]


def test_a_dry_run_needs_neither_ray_nor_torch(loaded):
    code, modules = loaded["dry run"]
    assert code == 0 and set(modules) <= {"numpy"}


def test_a_mistake_is_answered_before_anything_is_loaded(loaded):
    assert loaded["mistake"] == [2, []]


def test_settings_are_checked_without_torch_and_ray(loaded):
    assert loaded["settings"] == [0, []]
