"""Make a gallery entry of each finished run: what can be looked at, without weights.

    python scripts/make_gallery.py runs/quickstart
    python scripts/make_gallery.py runs/a runs/b --output gallery --name ocr geneval

Writes gallery/NAME with the run's card (README.md), its configuration, metrics, curves and images
before and after. PNG images above 500 kB become WebP, and the card names them so; a comparison
page above 2 MB is left out. An entry that is there already is replaced.
"""

import argparse
import io
import shutil
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from flowrl.cli import report_errors
from flowrl.errors import UserError
from flowrl.utils.files import write_bytes, write_text

CARD, TEXTS = "README.md", ("config.yaml", "metrics.jsonl")
IMAGES = ("card", "gallery")  # folders of a run
NEEDED = (CARD, *TEXTS, "gallery/grid.png")
LARGE, LARGE_PAGE = 500_000, 2_000_000  # bytes
QUALITY = 90


def main(words: Sequence[str] | None = None) -> list[Path]:
    """-> the folders that were written. Raises UserError for a run that is not finished."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    parser.add_argument("--output", type=Path, default=Path("gallery"), help="the gallery's folder")
    parser.add_argument("--name", nargs="*", help="of each entry; else the run folder's")
    options = parser.parse_args(words)
    names = options.name or [run.resolve().name for run in options.runs]
    if len(names) != len(options.runs) or len(set(names)) != len(names):
        raise UserError(
            f"got {len(options.runs)} runs and the names {', '.join(names)}, expected a name of "
            "its own for each: give them with --name"
        )
    for run in options.runs:
        check(run)
    return [
        make_entry(run, options.output / name)
        for run, name in zip(options.runs, names, strict=True)
    ]


def check(run: Path) -> None:
    """Raises UserError unless the run has ended and left all that an entry shows."""
    missing = [name for name in NEEDED if not (run / name).is_file()]
    if missing:
        raise UserError(
            f"{run} has no {', '.join(missing)}, expected the folder of a finished run with "
            "held-out prompts: train it to its end"
        )


def make_entry(run: Path, folder: Path) -> Path:
    """Copy card, configuration, metrics and images of a run -> the entry's folder."""
    for name in IMAGES:
        shutil.rmtree(folder / name, ignore_errors=True)  # of an earlier run
    card = (run / CARD).read_text(encoding="utf-8")
    for source in sorted(path for name in IMAGES for path in (run / name).glob("*.*")):
        place = source.relative_to(run)
        if source.suffix == ".png":
            data, suffix = smaller(source.read_bytes())
            write_bytes(folder / place.with_suffix(suffix), data)
            card = card.replace(place.as_posix(), place.with_suffix(suffix).as_posix())
        elif source.stat().st_size <= LARGE_PAGE:
            write_bytes(folder / place, source.read_bytes())
    for name in TEXTS:
        write_bytes(folder / name, (run / name).read_bytes())
    write_text(folder / CARD, card)
    return folder


def smaller(png: bytes) -> tuple[bytes, str]:
    """An image's file as it is, or as WebP where it is large -> its bytes and its suffix."""
    if len(png) <= LARGE:
        return png, ".png"
    file = io.BytesIO()
    Image.open(io.BytesIO(png)).save(file, "WEBP", quality=QUALITY)
    return file.getvalue(), ".webp"


if __name__ == "__main__":
    report_errors(lambda: print("\n".join(map(str, main()))), debug=False)
