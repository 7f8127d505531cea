"""Align a Stable Diffusion 3 pipeline with Flow-GRPO, on one process or many.

    python scripts/train_sd3.py configs/quickstart.yaml --output_dir runs/quickstart
    accelerate launch --num_processes 8 scripts/train_sd3.py configs/sd3.5-medium-grpo-24gb.yaml

Without GPUs, accelerate starts several processes only with `--multi_gpu` beside `--num_processes`.
Takes a recipe and the same changes as `flowrl train`: KEY=VALUE, or the names of diffusers' own
training scripts (--learning_rate, --rank, --seed, --resume_from_checkpoint latest, ...).
"""

import sys
from collections.abc import Sequence

from flowrl.actions import align, table
from flowrl.aliases import sort_arguments
from flowrl.cli import explained
from flowrl.commands.show import print_table
from flowrl.config import load_config


def main(words: Sequence[str]) -> None:
    request = sort_arguments(words)
    config = load_config(request.recipe, request.overrides)
    if rows := table(align(config, resume=request.resume)):  # of the main process
        print_table(rows)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--debug"]
    explained(lambda: main(words), debug="--debug" in sys.argv)
