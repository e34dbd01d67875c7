"""Preparation spread over Ray tasks: at most two chunks per worker in flight, results in the order of the chunks.

A task is a pure function of its chunk, so one that dies with its process is simply run again. Each worker process keeps its tokenizer.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache

import ray
from ray.exceptions import GetTimeoutError, RayTaskError

from dflash_ray.data.prepare.prepare import ChunkWorker, Prepared, PrepareSettings, Spread
from dflash_ray.data.prepare.rows import Chunk
from dflash_ray.data.prepare.tokenizer import ChatTokenizer
from jobs.support.local_ray import connect

_CHUNK_SECONDS = 600.0


def spread_over_tasks(settings: PrepareSettings, workers: int) -> Spread:
    """A `spread` for `prepare` that keeps `workers` tasks busy, on the running Ray cluster or on one it starts and stops."""

    def spread(chunks: Iterable[Chunk]) -> Iterator[Prepared]:
        found, on_term = ray.is_initialized(), signal.getsignal(signal.SIGTERM)
        connect()
        signal.signal(signal.SIGTERM, on_term)  # ray.init puts its own in place
        try:
            shared = ray.put(settings)
            pending: deque[ray.ObjectRef] = deque()
            for chunk in chunks:
                pending.append(_prepare_chunk.remote(shared, chunk))
                if len(pending) >= 2 * workers:
                    yield _result(pending.popleft())
            while pending:
                yield _result(pending.popleft())
        finally:
            if not found:
                ray.shutdown()

    return spread


@ray.remote(num_cpus=1, max_retries=3)
def _prepare_chunk(settings: PrepareSettings, chunk: Chunk) -> Prepared:
    return _worker(settings)(chunk)


@lru_cache(maxsize=1)
def _worker(settings: PrepareSettings) -> ChunkWorker:
    return ChunkWorker(settings, ChatTokenizer(settings.tokenizer, settings.chat_template))


def _result(ref: ray.ObjectRef) -> Prepared:
    try:
        return ray.get(ref, timeout=_CHUNK_SECONDS)
    except RayTaskError as error:
        if isinstance(error.cause, ValueError):  # the user's mistake, found in a worker
            raise ValueError(str(error.cause)) from None
        raise
    except GetTimeoutError:
        raise RuntimeError(f"a chunk was not prepared within {_CHUNK_SECONDS:.0f} s; are there free CPUs in the Ray cluster?") from None
