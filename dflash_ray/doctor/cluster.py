"""Checks of how Ray is set up: authentication, and how long `ray job stop` waits for the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dflash_ray.doctor.finding import Finding

LEAST_STOP_SECONDS = 30.0


def running_heads() -> list[dict[str, str]]:
    """Environments of the heads that `ray start` left on this machine, as far as this user may look. A Ray that a process started for
    itself is none: its parent lives, and is no `ray start`."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if Path((folder / "cmdline").read_bytes().split(b"\0")[0].decode()).name != "gcs_server":
                continue
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if parent != "1" and b"start" not in Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0"):
                continue
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended, or is another user's
        found.append(dict(entry.split("=", 1) for entry in entries if "=" in entry))
    return found


def authentication(environment: Mapping[str, str], heads: list[dict[str, str]], token_file: Path) -> Finding:
    """Whether this shell speaks to Ray as the head on this machine wants it."""
    name = "Ray authentication"
    mode = environment.get("RAY_AUTH_MODE", "")
    others = sorted({head.get("RAY_AUTH_MODE", "") or "unset" for head in heads} - {mode or "unset"})
    if others:
        what = f"RAY_AUTH_MODE is {mode or 'unset'} here and {others[0]} at a head on this machine: `ray job submit` to it will be refused"
        wanted = "unset RAY_AUTH_MODE" if others[0] == "unset" else f"export RAY_AUTH_MODE={others[0]}"
        return Finding(name, "warning", what, f"{wanted} in this shell, or start the head again with the mode of this one")
    if mode != "token":
        what = "RAY_AUTH_MODE is not token: whoever reaches Ray's ports can run code as you"
        return Finding(name, "warning", what, "export RAY_AUTH_MODE=token in every shell, before `ray start`")
    given = environment.get("RAY_AUTH_TOKEN"), environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(given[1]).expanduser() if given[1] else token_file
    if not given[0] and not path.is_file():
        return Finding(
            name, "warning", f"RAY_AUTH_MODE=token and there is no token in {path}", "ray get-auth-token --generate, the same on every host"
        )
    return Finding(name, "ok", "token, from " + ("RAY_AUTH_TOKEN" if given[0] else str(path)))


def stop_wait(heads: list[dict[str, str]]) -> Finding:
    """`ray job stop` kills after 3 s unless the head was started with a longer wait."""
    name = "ray job stop"
    if not heads:
        return Finding(name, "n/a", "no Ray head of yours on this machine")
    try:
        waits = [float(head.get("RAY_JOB_STOP_WAIT_TIME_S", 3)) for head in heads]
    except ValueError:
        waits = [0.0]
    if min(waits) < LEAST_STOP_SECONDS:
        what = f"the head kills a job {min(waits):g} s after `ray job stop`, maybe before its last checkpoint is written"
        return Finding(name, "warning", what, "start the head with RAY_JOB_STOP_WAIT_TIME_S=120 ray start --head ...")
    return Finding(name, "ok", f"waits {min(waits):g} s for the last checkpoint")
