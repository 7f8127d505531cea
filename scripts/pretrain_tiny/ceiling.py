"""Train a shipped pipeline further, on images without defects: a lower bound of its ceiling.

    python -m scripts.pretrain_tiny.ceiling tiny-flux --work build/flux-further
    python -m scripts.pretrain_tiny.score flowrl/assets/tiny-flux --images 60 \\
        --ceiling build/flux-further/without-defects --lower-bound

Pretraining makes a ceiling of its own, by a decay without defects (`__main__.py`). But FLUX learns
its teacher's guided velocity there, at every guidance at once. Here it learns the plain flow of the
images, at guidance 1 alone, as the quickstart samples it. The pipeline is saved as
`without-defects` in the `--work` folder; the shipped one stays as it is. It can be stopped at any
time; the same command goes on.
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import torch

from flowrl.backbones.loading import TINY, load_pipeline
from scripts.pretrain_tiny.families import MODELS, save_half, track
from scripts.pretrain_tiny.flow import Stage, Texts, TinyModel, fit_flow
from scripts.pretrain_tiny.images import clean, images
from scripts.pretrain_tiny.latents import encode_all


def with_weights_of(pipeline: Any, family: str, folder: Path) -> TinyModel:
    """Return the `TinyModel` of a family with a pipeline's weights, its text encoders frozen.

    It is on the pipeline's device. `folder` receives the tokenizers' files.
    """
    model = MODELS[family][1](folder)
    model.transformer.load_state_dict(pipeline.transformer.state_dict())
    for name, encoder in model.encoders.items():
        encoder.load_state_dict(getattr(pipeline, name).state_dict())
    model.encoders.to(pipeline.device).requires_grad_(False).eval()
    model.transformer.to(pipeline.device)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pipeline", choices=TINY)
    parser.add_argument("--work", type=Path, required=True, help="folder for unfinished weights")
    parser.add_argument("--images", type=int, default=80_000)
    parser.add_argument("--steps", type=int, default=8_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)

    pipeline = load_pipeline(args.pipeline, dtype="fp32", device=args.device)
    model = with_weights_of(pipeline, args.pipeline.removeprefix("tiny-"), args.work / "tokenizers")
    drawn, captions = images(args.work, "clean", clean, args.images, args.seed, args.threads)
    latents = encode_all(pipeline.vae, drawn, args.work / f"latents-clean-{args.seed}.safetensors")
    texts = Texts(model, captions, args.device)
    ema = copy.deepcopy(model.transformer).requires_grad_(False)
    fit_flow(
        Stage(name="clean", steps=args.steps, seed=args.seed + 13),
        model, ema, texts.examples(captions, latents), texts,
        folder=args.work, batch=args.batch, track=track,
    )  # fmt: skip
    folder = args.work / "without-defects"
    save_half(model.pipeline(ema.cpu(), pipeline.vae.cpu()), folder)
    print(f"The pipeline lies in {folder}.")


if __name__ == "__main__":
    main()
