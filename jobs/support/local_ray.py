"""The Ray that a job works on: the cluster it was started in, or a local one for this job alone."""

from __future__ import annotations

import os
import time

import ray

from actors.answers import first_line
from jobs.support.cli import Failed
from jobs.support.paths import under_job_submit

RAY_ATTEMPTS = 3


def connect() -> None:
    """Joins the cluster of `ray start` or of the job, or starts a local Ray for this job alone. Failed where there is none to be had."""
    if ray.is_initialized():
        return
    joins = under_job_submit() or bool(os.environ.get("RAY_ADDRESS"))
    attempts = 1 if joins else RAY_ATTEMPTS
    for attempt in range(attempts):
        try:
            if joins:
                ray.init(logging_level="warning")
            else:
                ray.init(address="local", include_dashboard=False, logging_level="warning")
            return
        except ValueError:  # an address that is none
            raise
        except Exception as error:  # Ray has no type of its own for a daemon that did not start in time, as on an overloaded machine
            ray.shutdown()
            if attempt + 1 == attempts:
                raise Failed(f"no Ray: {first_line(error)}") from None
            time.sleep(1)
