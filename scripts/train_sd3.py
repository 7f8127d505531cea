"""Align a Stable Diffusion 3 pipeline with Flow-GRPO, on one process or many.

    python scripts/train_sd3.py configs/quickstart.yaml --output_dir runs/quickstart
    accelerate launch --num_processes 8 scripts/train_sd3.py configs/sd3.5-medium-grpo-24gb.yaml

Without GPUs, accelerate starts several processes only with `--multi_gpu` beside `--num_processes`.
Takes a recipe and the same changes as `flowrl train`: KEY=VALUE, or the names of diffusers' own
training scripts (--learning_rate, --rank, --seed, --resume_from_checkpoint latest, ...).
"""

import sys

from flowrl.actions import align, table
from flowrl.aliases import sort_arguments
from flowrl.commands.show import print_table
from flowrl.config import load_config


def main() -> None:
    request = sort_arguments(sys.argv[1:])
    config = load_config(request.recipe, request.overrides)
    print_table(table(align(config, resume=request.resume)))


if __name__ == "__main__":
    main()
