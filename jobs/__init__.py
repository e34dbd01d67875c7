"""Entry points: `python -m jobs.NAME`, alone or under `ray job submit`."""
