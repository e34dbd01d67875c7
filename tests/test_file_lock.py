"""Locks: another process is refused at once, a holder's end frees the file, and what cannot be locked is told."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_ray.file_lock import take_lock

ROOT = Path(__file__).parents[1]
HOLD = (
    "import sys; from pathlib import Path; from dflash_ray.file_lock import take_lock; lock = take_lock(Path(sys.argv[1]), required=True); "
)


@pytest.fixture
def start():
    """Starts a process that takes the lock of a file and then does `and_then`; returns once it has said a line."""
    started = []

    def begin(path, and_then="print('held', flush=True); input()"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD + and_then, str(path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield begin
    for process in started:
        process.kill()
        process.wait(timeout=30)


@pytest.mark.parametrize("required", [True, False])
def test_another_process_is_refused_at_once_and_a_killed_holder_frees_the_file(start, tmp_path, required):
    path = tmp_path / "lock"
    holder, said = start(path)
    assert said == "held"
    assert take_lock(path, required=required) is None
    holder.send_signal(signal.SIGKILL)
    holder.wait(timeout=30)
    lock = take_lock(path, required=required)
    assert lock is not None
    _, said = start(path, "print(lock)")
    assert said == "None"
    lock.release()
    _, said = start(path)
    assert said == "held"


@pytest.mark.parametrize("required", [True, False])
def test_a_link_is_the_file_that_it_leads_to(start, tmp_path, required):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    holder, said = start(tmp_path / "file")
    assert said == "held" and take_lock(link, required=required) is None
    holder.kill()
    holder.wait(timeout=30)
    assert take_lock(link, required=required).is_locked and take_lock(tmp_path / "file", required=required) is None


def test_one_lock_in_one_process_too(tmp_path):
    lock = take_lock(tmp_path / "lock", required=True)
    assert take_lock(tmp_path / "lock", required=True) is None
    lock.release()
    assert take_lock(tmp_path / "lock", required=True) is not None


@pytest.mark.parametrize(
    "and_then",
    [
        "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); input()",
        "import subprocess; print(subprocess.Popen(['sleep', '60'], close_fds=False).pid, flush=True); input()",
        "import os, time; os.fork() and input(); print(os.getpid(), flush=True); time.sleep(60)",
    ],
    ids=["subprocess", "subprocess-with-all-files", "fork"],
)
def test_a_child_does_not_keep_its_parents_lock(start, tmp_path, and_then):
    holder, child = start(tmp_path / "lock", and_then)
    try:
        holder.kill()
        holder.wait(timeout=30)
        os.kill(int(child), 0)  # it lives
        assert take_lock(tmp_path / "lock", required=True) is not None
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_the_file_stays_as_it_is(tmp_path):
    path = tmp_path / "results"
    path.write_text("a line\n")
    take_lock(path, required=True).release()
    assert path.read_text() == "a line\n"


def test_a_file_that_its_holder_removed_is_locked_anew(start, tmp_path):
    path = tmp_path / "lock"
    lock = take_lock(path, required=True)
    path.unlink()
    assert take_lock(path, required=True) is not None
    lock.release()
    assert path.exists()


def test_what_is_wrong_with_the_file_is_told(tmp_path):
    for required in (True, False):
        with pytest.raises(FileNotFoundError):
            take_lock(tmp_path / "nowhere" / "lock", required=required)
        with pytest.raises(IsADirectoryError):
            take_lock(tmp_path, required=required)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("required", [True, False])
def test_a_folder_without_write_permission(tmp_path, required):
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write everywhere
    try:
        with pytest.raises(PermissionError):
            take_lock(tmp_path / "lock", required=required)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("why", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(monkeypatch, tmp_path, why):
    def flock(*_):
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match=os.strerror(why)):
        take_lock(tmp_path / "lock", required=True)
    first, second = (take_lock(tmp_path / "lock", required=False) for _ in range(2))
    assert first is not None and second is not None
    first.release()
    second.release()
