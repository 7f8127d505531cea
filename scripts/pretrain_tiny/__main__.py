"""Make the weights of a tiny pipeline again, from a seed.

    python -m scripts.pretrain_tiny --backbone sana --work build/sana --output build/tiny-sana
    python -m scripts.pretrain_tiny --backbone sd3 --work build/sd3 --output build/tiny-sd3
    python -m scripts.pretrain_tiny --backbone flux --teacher build/sd3 \\
        --work build/flux --output build/tiny-flux

The stages: images, autoencoder, text encoders, the flow at a constant learning rate, and from
there two decays: one on images without defects, whose score is the ceiling, and one on images with
them, whose result is the pipeline. It can be stopped at any time; the same command goes on from
the last save (every two minutes) in the `--work` folder. `--plateau` may grow from call to call
until a decay has begun.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowrl.errors import UserError
from flowrl.utils.files import load_state
from scripts.pretrain_tiny import latents
from scripts.pretrain_tiny.families import MODELS, save_half, track
from scripts.pretrain_tiny.flow import Stage, Texts, TinyModel, fit_flow
from scripts.pretrain_tiny.images import clean, defects, images
from scripts.pretrain_tiny.text import fit_text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", choices=MODELS, default="sana")
    parser.add_argument("--work", type=Path, required=True, help="folder for unfinished weights")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for the finished pipeline"
    )
    parser.add_argument(
        "--teacher",
        type=Path,
        help="work folder of a finished tiny SD3: take its autoencoder, learn its guided velocity",
    )
    parser.add_argument("--images", type=int, default=80_000, help="of each kind: clean, defects")
    parser.add_argument("--vae-steps", type=int, default=3_000)
    parser.add_argument("--text-steps", type=int, default=3_000)
    parser.add_argument("--plateau", type=int, default=24_000, help="steps")
    parser.add_argument("--decay", type=int, default=8_000, help="steps of each of the two decays")
    parser.add_argument("--batch", type=int, default=64, help="images in a step of the flow")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action="store_true", help="compile the transformers (needs a C++ compiler)"
    )
    parser.add_argument("--bf16", action="store_true", help="velocities of the flow in bf16")
    return parser.parse_args()


def autoencoder(args: argparse.Namespace, drawn: np.ndarray) -> Any:
    """Train that of a backbone, or load the finished one; its latents are normalised.

    A student has its teacher's.
    """
    make, _ = MODELS[args.backbone]
    torch.manual_seed(args.seed)
    vae = make().to(args.device)
    latents.fit_autoencoder(
        vae, drawn, steps=args.vae_steps, seed=args.seed, folder=args.teacher or args.work,
        track=track,
    )  # fmt: skip
    vae.eval().requires_grad_(False)
    latents.normalise_latents(vae, drawn)
    return vae


def model_with_text(args: argparse.Namespace, backbone: str, folder: Path) -> TinyModel:
    """Make a model whose text encoders are trained, in `folder`, and frozen."""
    torch.manual_seed(args.seed + 1)
    model = MODELS[backbone][1](folder / "tokenizers")
    model.encoders.to(args.device)
    fit_text(model, steps=args.text_steps, seed=args.seed + 2, folder=folder, track=track)
    return model


def teacher_at(args: argparse.Namespace, stage: str) -> TinyModel | None:
    """Return the tiny SD3 of `--teacher` as it was after a decay; None without a teacher."""
    if args.teacher is None:
        return None
    path = args.teacher / f"{stage}.safetensors"
    if not path.is_file():
        raise UserError(f"--teacher: there is no {path}; finish the tiny SD3 first")
    teacher = model_with_text(args, "sd3", args.teacher)
    teacher.transformer.load_state_dict(load_state(path)["ema"])
    teacher.transformer.to(args.device).eval().requires_grad_(False)
    if args.compile:
        teacher.transformer = torch.compile(teacher.transformer)
    return teacher


def stages_of(args: argparse.Namespace) -> list[tuple[Stage, str]]:
    """Return the stages of the flow, each with the kind of images that it learns from."""
    seed, decay = args.seed, args.decay
    return [
        (Stage(name="plateau", steps=args.plateau, seed=seed + 10, decays=False), "clean"),
        (Stage(name="base", steps=decay, seed=seed + 12, begin_at="plateau"), "defects"),
        (Stage(name="ceiling", steps=decay, seed=seed + 11, begin_at="plateau"), "clean"),
    ]


def main() -> None:
    args = arguments()
    if (args.backbone == "flux") != (args.teacher is not None):
        raise UserError(
            "--teacher is needed for flux, which learns guidance from it, and for no other"
        )
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    sets = {
        sample.__name__: images(
            args.work, sample.__name__, sample, args.images, args.seed + i, args.threads
        )
        for i, sample in enumerate((clean, defects))
    }
    vae = autoencoder(args, sets["clean"][0])
    model = model_with_text(args, args.backbone, args.work)
    texts = Texts(model, [c for _, captions in sets.values() for c in captions], args.device)
    learn = {
        name: texts.examples(
            captions, latents.encode_all(vae, drawn, args.work / f"latents-{name}.safetensors")
        )
        for name, (drawn, captions) in sets.items()
    }

    torch.manual_seed(args.seed + 3)
    network = model.transformer.to(args.device)
    ema = copy.deepcopy(network).requires_grad_(False)
    for stage, kind in stages_of(args):
        fit_flow(
            stage, model, ema, learn[kind], texts,
            folder=args.work, batch=args.batch,
            teacher=teacher_at(args, "ceiling" if kind == "clean" else "base"),
            network=torch.compile(network) if args.compile else None, bf16=args.bf16, track=track,
        )  # fmt: skip
        if stage.begin_at:
            folder = args.output if stage.name == "base" else args.work / "ceiling"
            save_half(model.pipeline(copy.deepcopy(ema).cpu(), copy.deepcopy(vae).cpu()), folder)
            print(f"The {stage.name} lies in {folder}.")


if __name__ == "__main__":
    main()
