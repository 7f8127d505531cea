r"""Align SANA with reinforcement learning, on one GPU or many.

One GPU, with the family's default recipe (sana-1.6b-grpo-fast-24gb) and prompts of your own:

    python scripts/train_sana.py prompts.train=my_prompts.txt

Eight GPUs of one machine, with another recipe:

    accelerate launch --num_processes 8 scripts/train_sana.py sana-1.6b-solrl-48gb

Two machines of eight: the same line on both, but for the rank; --num_processes is that of all.

    accelerate launch --num_machines 2 --num_processes 16 --machine_rank 0 \
        --main_process_ip HOST --main_process_port 29500 \
        scripts/train_sana.py sana-1.6b-solrl-48gb --output_dir runs/two-machines

Takes a recipe and the same changes as `flowrl train`: KEY=VALUE, or the names of diffusers' own
training scripts (--learning_rate, --rank, --seed, --resume_from_checkpoint latest, ...).
--dry-run rehearses a recipe on the tiny pipeline of the family, --print-config shows every option,
and `flowrl plan RECIPE --gpus 8` tells before whether it fits. It trains diffusers' stock SANA; the
LoRA loads in `SanaPipeline`.
"""

import sys
from collections.abc import Sequence

from flowrl.cli import report_errors
from flowrl.cli.train import launch

RECIPE = "sana-1.6b-grpo-fast-24gb"  # where the command line names none


def main(words: Sequence[str]) -> None:
    launch(words, family="sana", recipe=RECIPE)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--debug"]
    report_errors(lambda: main(words), debug="--debug" in sys.argv)
