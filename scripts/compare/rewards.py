"""Align the tiny pipeline to four kinds of reward, and show what each did to all that is measured.

    python -m scripts.compare.rewards

Trains the presets of RUNS on one thread, one after the other, then writes gallery/rewards: a table,
curves and images of each, and their data. Some 20 minutes on one core of a 2-core CPU. Stopped,
it goes on where it was; --page writes the page of what is there.
"""

import argparse
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

import flowrl
from flowrl.api import table
from flowrl.config import Config
from flowrl.training.evaluate import Evaluation, compare
from flowrl.training.tracking import read_metrics
from flowrl.utils.files import write_bytes, write_text
from flowrl.utils.plots import draw_curves
from scripts.compare.runs import Run, finished, markdown, points, train, write_table

SHARED = ["run.threads=1", "run.trackers=[]", "run.sample_every=0"]


@dataclass(frozen=True)
class Shown:
    """A preset, and what people should know of its result."""

    preset: str
    title: str
    text: str


RUNS = (
    Shown(
        "tiny-sd3-nft-ocr",
        "OCR",
        "Words that its pretraining never showed, read back by RapidOCR. Each word is trained in "
        "three wordings and measured in the fourth. The strict rule, which charges for further "
        "text, is watched and agrees: nothing else is written. The images show what is learned "
        "in 80 iterations: to draw cleanly, of the words that the pipeline knows, the one nearest "
        "to the asked one (CAT for COAT, BOX for BOW). 2 of the base's 272 images are right in "
        "full, and none afterwards.",
    ),
    Shown(
        "tiny-sd3-nft-geneval",
        "GenEval",
        "Trained on the partial score, the share of a prompt's demands that an image meets; "
        "`geneval_strict` asks for all of them and is only watched.",
    ),
    Shown(
        "tiny-sd3-nft-compressibility",
        "JPEG compressibility",
        "Minus the size of the JPEG file in 500 kB. Nothing in this reward asks for an image, and "
        "the two measures that are only watched show what it costs to follow it; a pull to the "
        "base (`kl_coef: 0.5`) slows the fall. Without it, 24 iterations ended at 0.8 kB a "
        "image, with blank paper: quality 1.1, strict score 0.",
    ),
    Shown(
        "tiny-sd3-nft-composite",
        "OCR and GenEval, normalised each (GDPO)",
        "Two rewards on prompts of seven kinds; each applies to its own, and is compared within "
        "its prompt's images before the two are added.",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/rewards"))
    parser.add_argument("--output", type=Path, default=Path("gallery/rewards"))
    parser.add_argument("--machine", default="one thread of a 2-core CPU", help="for the page")
    parser.add_argument("--page", action="store_true", help="train nothing")
    options = parser.parse_args()
    for shown in () if options.page else RUNS:
        train(configuration(shown, options.runs))
    write_page(options.runs, options.output, options.machine)


def configuration(shown: Shown, runs: Path) -> Config:
    return flowrl.load_config(shown.preset, [*SHARED, f"run.output_dir={runs / shown.preset}"])


def write_page(runs: Path, output: Path, machine: str) -> None:
    """Write the page of all presets whose runs have ended."""
    done = [s for s in RUNS if finished(runs / s.preset, configuration(s, runs).run.iterations)]
    parts = [INTRODUCTION.format(machine=machine)]
    every = []
    for shown in done:
        run = Run(method=shown.preset, seed=0, metrics=read_metrics(runs / shown.preset))
        parts.append(section(shown, run, runs / shown.preset, output))
        every.append(run)
    write_table(output / "curves.csv", every)
    write_text(output / "README.md", "\n".join(parts))


def section(shown: Shown, run: Run, folder: Path, output: Path) -> str:
    """The part of the page for one preset; its images go beside the page."""
    curve = points(run)
    last = curve[-1]
    names = list(curve[0].scores)
    lines = {n: [(float(p.step), p.scores[n]) for p in curve] for n in names}
    write_bytes(output / f"{shown.preset}.png", draw_curves(lines))
    shutil.copyfile(folder / "gallery" / "grid.png", output / f"{shown.preset}-images.png")
    ends = [
        Evaluation.load(folder / "evaluations" / f"step-{step:06d}.safetensors")
        for step in (0, last.step)
    ]
    rows = [
        {
            "reward": row["reward"],
            "base": f"{row['base']:.4g}",
            "aligned": f"{row['aligned']:.4g}",
            "change": f"{row['change']:+.4g} [{row['95% low']:.4g}, {row['95% high']:.4g}]",
            "held-out images": f"{row['images']}",
        }
        for row in table(compare(*ends))
    ]
    summary = (
        f"`flowrl train {shown.preset}`: {last.step} iterations, {last.images:.0f} images "
        f"sampled to learn from, {last.seconds:.0f} seconds. {shown.text}"
    )
    return SECTION.format(
        preset=shown.preset, title=shown.title, text=wrapped(summary), table=markdown(rows)
    )


def wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)


INTRODUCTION = """# Rewards

`python -m scripts.compare.rewards`, on {machine}.

The built-in pipeline learns four kinds of reward with DiffusionNFT, from its base weights, one seed
each. Scores are those of held-out prompts before and after; a change is paired image by image,
with its 95 % bootstrap interval. Seconds are those of iterations, without evaluations. `curves.csv`
has every evaluation.
"""
SECTION = """## {title}

{text}

{table}

![Held-out scores against iterations]({preset}.png)
![Base and aligned images of the same prompts and noise]({preset}-images.png)
"""


if __name__ == "__main__":
    main()
