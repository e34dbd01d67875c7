"""A run, or several overlaid on tokens, as one HTML file: `python -m jobs.report [--run DIR [DIR ...]] [--output FILE.html]`.

Reads the run folders only, so it also works while a run goes on. The file needs no network and nothing beside it.
"""

from __future__ import annotations

from pathlib import Path

from dflash_ray.run.place import newest_run
from jobs.support.cli import Arguments, run

MOST_RUNS = 8  # colours that can be told apart


def main(argv: list[str]) -> int:
    parser = Arguments(prog="python -m jobs.report", description=__doc__)
    parser.add_argument("--run", nargs="+", type=Path, action="extend", metavar="DIR", help="folders of runs; default: the newest run")
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="default: report.html in the first run's folder")
    args = parser.parse_args(argv)
    runs = args.run or [newest_run()]
    if len(runs) > MOST_RUNS:
        raise ValueError(f"--run: {len(runs)} runs; a page shows at most {MOST_RUNS}")
    output = args.output or runs[0] / "report.html"

    from dflash_ray.watch.report.page import report_html

    page = report_html(runs)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--output {output}: cannot be written: {error.strerror}") from None
    print(f"{output} ({len(page) / 1e6:.2f} MB)")
    return 0


if __name__ == "__main__":
    run(main)
