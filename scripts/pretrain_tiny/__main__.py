"""Make the weights of a tiny pipeline again, from a seed.

    python -m scripts.pretrain_tiny --work build/tiny-sd3 --output flowrl/assets/tiny-sd3
    python -m scripts.pretrain_tiny --backbone flux --teacher flowrl/assets/tiny-sd3 \\
        --batch 32 --flow-steps 5000 --work build/tiny-flux --output flowrl/assets/tiny-flux
    python -m scripts.pretrain_tiny --backbone sana --batch 32 --vae-steps 2550 --flow-steps 4150 \\
        --work build/tiny-sana --output flowrl/assets/tiny-sana

These made the pipelines that are installed. The first takes some two hours on two CPU cores with
--compile (estimated from the time of its steps); the others took about an hour each, on one thread
with other work beside. It can be stopped at any time; the same command goes on from the last save
(every two minutes) in the `--work` folder. At the end it scores the pipeline on held-out prompts
and writes the model card.
"""

import argparse
import copy
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from rich.progress import track as progress

from flowrl.backbones.loading import load_pipeline
from flowrl.utils.files import write_text
from scripts.pretrain_tiny import flux, latents, pretrain, sana, sd3
from scripts.pretrain_tiny.score import write_card

HISTORY = (
    f"In the last {pretrain.FLOW_DECAY:.0%} of the flow's steps, while the learning rate fell, "
    f"{pretrain.MISLABELLED:.0%} of the\ncaptions were those of other images, so that alignment "
    "has something to mend.\n"
)
TAUGHT = (
    "It has the autoencoder of {teacher} and learned from its guided velocity at guidances from 1\n"
    f"to {pretrain.GUIDANCE:g}, as FLUX.1-dev was distilled for guidance.\n"
)
MODELS = {
    "sd3": (sd3.autoencoder, sd3.TinySD3),
    "flux": (sd3.autoencoder, flux.TinyFlux),
    "sana": (sana.autoencoder, sana.TinySana),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", choices=MODELS, default="sd3")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for images and unfinished weights"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the finished pipeline"
    )
    parser.add_argument(
        "--teacher",
        type=Path,
        help="finished tiny SD3: take its autoencoder, and learn from its guided velocity",
    )
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--vae-steps", type=int, default=3_500)
    parser.add_argument("--flow-steps", type=int, default=16_500)
    parser.add_argument("--batch", type=int, default=64, help="images in a step of the flow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action="store_true", help="compile the transformer (needs a C++ compiler)"
    )
    return parser.parse_args()


def track(steps: Iterable[int], name: str) -> Iterable[int]:
    return progress(steps, description=name)


def save_half(pipeline, folder: Path) -> None:
    """Store a pipeline in fp16 such that a plain `from_pretrained` computes in fp32 throughout.

    diffusers' own models load in fp32 whatever the file holds; those of transformers follow the
    dtype in their configuration, and half of a pipeline in fp16 cannot run.
    """
    pipeline.to(torch.float16).save_pretrained(folder)
    for path in folder.glob("text_encoder*/config.json"):
        config = json.loads(path.read_text())
        config["dtype"] = "float32"
        write_text(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def autoencoder(args: argparse.Namespace, vae, images: np.ndarray):
    """That of a finished pipeline, or one that is learned here; its latents are normalised."""
    if args.teacher is not None:
        vae = type(vae).from_pretrained(args.teacher, subfolder="vae").to(args.device)
        return vae.eval().requires_grad_(False)
    vae.to(args.device)
    latents.fit_autoencoder(
        vae, images, steps=args.vae_steps, seed=args.seed, folder=args.work, track=track
    )
    vae.eval().requires_grad_(False)
    latents.normalise_latents(vae, images)
    return vae


def teacher_of(args: argparse.Namespace) -> sd3.TinySD3 | None:
    """The tiny SD3 to learn from, if any, with the weights of its pipeline."""
    if args.teacher is None:
        return None
    teacher = sd3.TinySD3(args.work / "teacher")
    pipeline = load_pipeline(str(args.teacher), dtype="fp32", device=args.device)
    for name in teacher.module:
        teacher.module[name].load_state_dict(getattr(pipeline, name).state_dict())
    teacher.module.requires_grad_(False).eval().to(args.device)
    return teacher


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    images, captions = pretrain.images(args.work, args.images, args.seed, args.threads)

    make_vae, make_model = MODELS[args.backbone]
    torch.manual_seed(args.seed)
    vae = autoencoder(args, make_vae(), images)
    encoded = latents.encode_all(vae, images, args.work / "latents.safetensors")

    torch.manual_seed(args.seed + 1)
    model = make_model(args.work / "tokenizers", compile=args.compile)
    model.module.to(args.device)
    teacher = teacher_of(args)
    ema = copy.deepcopy(model.module).requires_grad_(False)
    pretrain.fit_flow(
        model,
        ema,
        encoded,
        captions,
        steps=args.flow_steps,
        seed=args.seed,
        folder=args.work,
        batch=args.batch,
        teacher=teacher,
        track=track,
    )
    save_half(model.pipeline(ema.cpu(), vae.cpu()), args.output)
    taught = TAUGHT.format(teacher=args.teacher.name) if args.teacher is not None else ""
    write_card(args.output, history=HISTORY + taught)
    print(f"The pipeline lies in {args.output}.")


if __name__ == "__main__":
    main()
