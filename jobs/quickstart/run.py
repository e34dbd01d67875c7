"""The quickstart: prepares conversations, trains a drafter with two targets, exports it, and serves it on prompts it never saw.

`bash jobs/quickstart.sh` installs what is needed and runs this. What is done already is skipped; `--fresh` starts over. Everything lands
in runs/quickstart/.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from dflash_ray.config.loading import load_config
from dflash_ray.config.schema import Config
from dflash_ray.json_file import read_json_object
from dflash_ray.run.folder import RunFolder
from jobs.support.cli import Arguments, run

HERE = Path(__file__).resolve().parent
SERVED_PROMPTS = 32
console = Console(highlight=False)


def main(argv: list[str]) -> int:
    parser = Arguments(prog="bash jobs/quickstart.sh", description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="start over")
    parser.add_argument("--target", choices=("quickstart", "smollm2"), default="quickstart", help="default %(default)s")
    parser.add_argument("--run", type=Path, metavar="DIR", help="default runs/quickstart")
    args = parser.parse_args(argv)
    name = "quickstart" if args.target == "quickstart" else "quickstart-smollm2"
    folder = (args.run or Path("runs") / name).absolute()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--run {folder}: is a file; give a folder")
    if args.fresh and folder.exists():
        _clear(RunFolder(folder))
    config_file = HERE.parent / "configs" / f"{name}.yaml"
    began = time.monotonic()
    target, prompts = _material(args.target, folder)
    paths = ["--run.dir", str(folder), "--data.path", str(folder / "data"), "--target.path", str(target)]
    config = load_config([config_file], paths)
    _prepare(target, prompts, folder)
    _train(config, folder)
    seconds = {"training": time.monotonic() - began}
    _export(folder)
    served = _evaluate(target, prompts, folder, threads=1 if args.target == "quickstart" else os.cpu_count())
    seconds["all"] = time.monotonic() - began
    _report(folder, served, seconds)
    return 0


def _clear(run_folder: RunFolder) -> None:
    if not run_folder.lock():
        raise ValueError(f"--fresh: another run writes to {run_folder.path}; stop it first")
    for part in ("data", "evaluation.json", "training.png"):
        path = run_folder.path / part
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    run_folder.clear()
    run_folder.unlock()


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; --fresh starts over") from None


def _material(kind: str, folder: Path) -> tuple[Path, dict[str, Path]]:
    """The target's folder and its own answers, for training and held out."""
    if kind == "quickstart":
        return HERE / "target", {split: HERE / f"{split}.jsonl" for split in ("train", "heldout")}
    from jobs.quickstart.smollm2 import answers, target_folder

    target = target_folder()
    return target, answers(target, folder)


def _skip(what: str) -> None:
    console.print(f"[dim]{what}: done already, skipped (--fresh starts over)[/dim]")


def _prepare(target: Path, prompts: dict[str, Path], folder: Path) -> None:
    data = folder / "data"
    if (data / "manifest.json").exists():
        return _skip("preparing the data")
    from jobs.prepare_data import main as prepare_data

    console.rule("conversations to tokens", align="left")
    # so much is held out because the rest is enough, and every step less is half a second on two cores
    flags = ["--input", str(prompts["train"]), "--tokenizer", str(target), "--output", str(data), "--validation", "0.15"]
    if code := prepare_data(flags):
        raise SystemExit(code)


def _train(config: Config, folder: Path) -> None:
    summary = folder / "summary.json"
    if summary.exists() and _read(summary).get("finished"):
        return _skip("training")
    import ray

    from jobs.support.run_driver import drive, prepare

    console.rule("training", align="left")
    continuing = RunFolder(folder).holds_a_run()
    plan = prepare(config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})}) if continuing else config)
    try:
        _, code = drive(plan)
    finally:
        ray.shutdown()
    if code:
        console.print("the same command continues")
        raise SystemExit(code)


def _export(folder: Path) -> None:
    if (folder / "export" / "config.json").exists():
        return _skip("export")
    from jobs.export import main as export

    if code := export(["--run", str(folder), "--output", str(folder / "export")]):
        raise SystemExit(code)


def _evaluate(target: Path, prompts: dict[str, Path], folder: Path, threads: int) -> dict[str, Any]:
    out = folder / "evaluation.json"
    if out.exists():
        _skip("evaluation")
        return _read(out)
    from jobs.evaluate import main as evaluate

    console.rule("serving: block-wise speculative decoding against plain greedy decoding", align="left")
    flags = ["--drafter", str(folder / "export"), "--target", str(target), "--prompts", str(prompts["heldout"])]
    if code := evaluate([*flags, "--threads", str(threads), "--limit", str(SERVED_PROMPTS), "--json", str(out)]):
        raise SystemExit(code)
    return _read(out)


def _report(folder: Path, served: dict[str, Any], seconds: dict[str, float]) -> None:
    from dflash_ray.run.metric_records import read_steps, read_validations
    from dflash_ray.watch.plots import plot_training

    run_folder = RunFolder(folder)
    picture = folder / "training.png"
    plot_training(read_steps(run_folder), read_validations(run_folder), served["tau"], picture)
    summary = _read(folder / "summary.json")
    summary |= {
        "tau": served["tau"],
        "lossless": served["lossless"],
        "divergences": served["divergences"],
        "speedup": served["speedup"],
        "per_slot_acceptance": served["per_slot_acceptance"],
        "tokens_per_second": served["tokens_per_second"],
        "plain_tokens_per_second": served["plain_tokens_per_second"],
        "export_dir": str(folder / "export"),
        "picture": str(picture),
    }
    run_folder.write_json("summary.json", summary)
    slots = " ".join(f"{share:.2f}" for share in served["per_slot_acceptance"])
    rows = {
        "served tau (tokens per target pass)": f"{served['tau']:.2f}",
        "accepted up to slot 1, 2, ...": slots,
        "tokens/s without, with the drafter": f"{served['plain_tokens_per_second']:.0f}, {served['tokens_per_second']:.0f}"
        f" ({served['speedup']:.2f}x)",
        "equal to plain greedy decoding": f"{'yes' if served['lossless'] else 'NO'}, token by token, on {served['prompts']} prompts "
        f"({served['divergences']} differ)",
        "one target alone, tokens/s": f"{summary['target_tokens_per_second']:,.0f}",
        "drafter alone, tokens/s": f"{summary['drafter_tokens_per_second']:,.0f}",
        "whole run, tokens/s": f"{summary['real_tokens_per_second']:,.0f} with {summary['topology']}",
        "padding efficiency": f"{100 * summary['padding_efficiency']:.1f}%",
        "checkpoints": os.path.relpath(run_folder.checkpoints),
        "exported drafter": os.path.relpath(folder / "export"),
        "picture of loss and tau": os.path.relpath(picture),
        "this call took": f"training {seconds['training']:.0f} s, with export and evaluation {seconds['all']:.0f} s",
    }
    console.rule("result", align="left")
    for name, value in rows.items():
        console.print(f"{name:<37} {value}", soft_wrap=True)


if __name__ == "__main__":
    run(main)
