"""Turn a checkpoint of a run into a drafter that servers load: `python -m jobs.export --run DIR --output DIR [--checkpoint WHICH]`.

WHICH is best (of the validations, by replay_tau or else tau), latest, or a checkpoint folder; by default best where a validation was run,
else latest. Averaged weights are exported where `train.ema` was set. The files are read back and compared before the job says that it is
done."""

from __future__ import annotations

from pathlib import Path

from dflash_ray.json_file import read_json_object
from jobs.support.cli import Arguments, run


def main(argv: list[str]) -> int:
    parser = Arguments(prog="python -m jobs.export", description=__doc__)
    parser.add_argument("--run", required=True, type=Path, metavar="DIR", help="run folder")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder to write; an export in it is replaced")
    parser.add_argument("--checkpoint", metavar="best|latest|DIR", help="default best, or latest without a validation")
    args = parser.parse_args(argv)
    if args.output.exists() and not args.output.is_dir():
        raise ValueError(f"--output {args.output}: is a file; give a folder")

    from dflash_ray.draft.dflash.card import model_card
    from dflash_ray.draft.dflash.export import CARD, CONFIG, WEIGHTS, export_drafter
    from dflash_ray.draft.trainer import serving_weights
    from dflash_ray.run.exports import card_of_run, choose_checkpoint, run_config, shape_of

    _refuse_a_model(args.output / CONFIG)
    if not (args.output / CONFIG).exists():
        _refuse_other_files(args.output, {WEIGHTS, CARD})
    config = run_config(args.run)
    checkpoint = choose_checkpoint(args.run, args.checkpoint)
    shape = shape_of(checkpoint)
    recipe, tau = card_of_run(args.run, config, checkpoint)
    card, weights = model_card(shape, config, config.run.name, recipe, tau), serving_weights(checkpoint.tensors())
    try:
        (args.output / CONFIG).unlink(missing_ok=True)  # written last, so a folder that has it is whole
        difference = export_drafter(weights, shape, args.output, card, checkpoint.meta.weights or "")
    except OSError as error:
        raise ValueError(f"--output {args.output}: cannot be written: {error.strerror or error}") from None
    print(
        f"{args.output}: {len(shape.tensor_shapes())} tensors, {shape.parameters / 1e6:.1f} M parameters from {checkpoint.path}; "
        f"read back bit for bit, rounding to bf16 moves outputs by {difference:.1e} of the largest"
    )
    return 0


def _refuse_other_files(folder: Path, ours: set[str]) -> None:
    """ValueError where a folder without a drafter holds more than what an export that was killed leaves: its files would lie among ours."""
    names = {path.name for path in folder.iterdir()} - ours if folder.is_dir() else set()
    if names:
        raise ValueError(f"--output {folder}: holds {min(names)!r} and no drafter; give a new or an empty folder")


def _refuse_a_model(config: Path) -> None:
    """ValueError where the folder holds another model, the target for instance, which an export would overwrite."""
    try:
        if config.exists() and "dflash_config" not in read_json_object(config):
            raise ValueError("holds another model; give a folder of its own")
    except (OSError, ValueError) as error:
        raise ValueError(f"--output {config.parent}: {getattr(error, 'strerror', None) or error}") from None


if __name__ == "__main__":
    run(main)
