"""One process at a time: a lock on a file that ends with its holder, however the process ends.

The lock is `flock`, taken through `filelock`. A child that the holder starts does not keep it. The file stays in place and nothing is
written to it, so any file can carry the lock. A file that was removed while its lock was awaited does not count as locked.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock


# what a file system without locks answers
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


def take_lock(path: Path, *, required: bool) -> BaseFileLock | None:
    """The lock of the file `path`, made if missing, held until its `release()` or the end of the process. None while another one has it.

    OSError if the file cannot be written. On a file system without locks: OSError if `required`, else an answer as if it were taken.
    """
    from filelock import FileLock, Timeout  # imported late: most commands take no lock

    open(path, "ab").close()  # what is wrong with the file is told here; filelock would make missing folders
    # filelock follows no link, and its versions before 4.2.1 empty the file
    lock = FileLock(path.resolve(), blocking=False, thread_local=False, preserve_lock_file=True)
    try:
        lock.acquire()
    except Timeout:
        return None
    except OSError as error:
        if required or error.errno not in NO_LOCKS:
            raise
    return lock
