"""Real processes for tests: jobs as a user starts them, a head node of their own, and a look at what is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600.0  # seconds; a loaded machine is slow, and nothing depends on how long a wait is


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, outside the range that Ray gives to workers."""
    held: list[socket.socket] = []
    ports: list[int] = []
    while len(ports) < count:
        candidate = socket.socket()
        candidate.bind(("127.0.0.1", 0))
        held.append(candidate)
        if not 10002 <= candidate.getsockname()[1] <= 19999:
            ports.append(candidate.getsockname()[1])
    for one in held:
        one.close()
    return ports


def environment(**extra: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return env | {"RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | extra


def start_job(*argv: str, log: Path, cwd: Path = ROOT, **env: str) -> subprocess.Popen:
    """`python -m ...` in a process session of its own, so that a signal to the test does not reach it."""
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", *argv], cwd=cwd, env=environment(**env), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait_until(condition: Callable[[], bool], what: str, limit: float = PATIENCE) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit:.0f} s for {what}"
        time.sleep(0.05)  # between two looks at another process; nothing depends on how long it is


def family(pid: int) -> list[int]:
    """`pid` and all its living descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parent, state = int(stat.rsplit(")", 1)[1].split()[1]), stat.rsplit(")", 1)[1].split()[0]
            if state != "Z":
                parents.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        todo += parents.get(one, [])
    return found


def alive(pids: list[int]) -> list[int]:
    out = []
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                out.append(pid)
        except OSError:
            pass
    return out


def end(process: subprocess.Popen) -> None:
    """Ends a process and everything it started."""
    pids = family(process.pid)
    for pid in pids[::-1]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait(timeout=30)


def ray_start(command: list[str], log: Path, cwd: Path = ROOT, **env: str) -> subprocess.Popen:
    """`ray start --block` that is up. Ray itself gives up after 30 s, which an overloaded machine needs for other things: tried thrice."""
    for _ in range(3):
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=cwd, env=environment(**env), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        wait_until(lambda: b"Ray runtime started" in log.read_bytes() or process.poll() is not None, "ray start")  # noqa: B023
        if process.poll() is None:
            return process
        if b"timed out during startup" not in log.read_bytes():
            break
    raise AssertionError(log.read_text())


@contextmanager
def head_node(folder: Path, resources: str = "{}", **env: str) -> Iterator[dict[str, str]]:
    """A real `ray start --head` on ports of its own and, because a submitted job finds its Ray through the temporary folder, with a
    temporary folder of its own. Yields what a user would put into the environment, and the addresses."""
    folder.mkdir(parents=True, exist_ok=True)
    gcs, dashboard, client, agent, metrics = free_ports(5)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--port={gcs}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}"]
    temporary = tempfile.mkdtemp(prefix="ray-")  # short: sockets lie below it, and their paths have at most 107 bytes
    command += [f"--temp-dir={temporary}", "--num-cpus=4", "--num-gpus=0", f"--object-store-memory={300 * 2**20}"]
    command += ["--resources", resources]
    process = ray_start(command, folder / "head.log", cwd=folder, **env)
    try:
        yield {
            "gcs": f"127.0.0.1:{gcs}",
            "dashboard": f"http://127.0.0.1:{dashboard}",
            "metrics_port": str(metrics),
            "pid": str(process.pid),
        }
    finally:
        end(process)
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def node(head: dict[str, str], folder: Path, **resources: int) -> Iterator[subprocess.Popen]:
    """A second raylet on this machine, with what belongs to it."""
    agent, metrics = free_ports(2)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={head['gcs']}", "--disable-usage-stats"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}", "--num-cpus=2", "--num-gpus=0"]
    command += [f"--object-store-memory={200 * 2**20}", "--resources", str(resources).replace("'", '"')]
    process = ray_start(command, folder / f"node-{metrics}.log")
    try:
        yield process
    finally:
        end(process)


@contextmanager
def pause(pid: int) -> Iterator[None]:
    """A process that hangs for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
