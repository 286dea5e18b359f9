"""``python -m models``: train the demo pair from nothing and write it."""

from __future__ import annotations

import argparse
from pathlib import Path

from safetensors import SafetensorError

from models.pipeline import STAGES, Pipeline
from models.settings import SMOKE, Settings

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "build/models"


def main() -> None:
    """Read the command line and run the stages."""
    parser = argparse.ArgumentParser(prog="python -m models", description=__doc__)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path.home() / ".cache" / "arborist" / "models",
        help="checkpoints and generated data (default: %(default)s); a stopped training goes on from here",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        help="where demo/, prompts.json, README.md and SHA256SUMS are written (default: %(default)s)",
    )
    parser.add_argument(
        "--stage",
        nargs="+",
        choices=STAGES,
        default=STAGES,
        metavar="NAME",
        help=f"some of: {', '.join(STAGES)}",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps of everything, worth nothing; needs --out"
    )
    options = parser.parse_args()
    if options.smoke and options.out.resolve() in (DEFAULT_OUT, Path(__file__).resolve().parent):
        parser.error("--smoke would overwrite a trained pair: give another folder with --out")
    settings = SMOKE if options.smoke else Settings()
    try:
        Pipeline(settings, options.work, options.out).run(tuple(options.stage))
    except (OSError, ValueError, SafetensorError) as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
