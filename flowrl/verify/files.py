"""Are a LoRA, a checkpoint, an evaluation and an offline data set whole, finite and consistent?"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError

from flowrl.backbones.lora_formats import FILE, open_lora
from flowrl.backbones.original_layers import layers_of
from flowrl.config.sections import LoRAOptions
from flowrl.errors import CheckResult, UserError
from flowrl.offline.format import OfflineDataset, open_dataset
from flowrl.training.checkpoint import read_checkpoint, step_of
from flowrl.training.evaluate import Evaluation
from flowrl.verify.figures import failed, judged, passed, unsure

BROKEN = (OSError, ValueError, KeyError, TypeError, SafetensorError, UserError)


def check_lora(source: Path, trained: LoRAOptions | None = None) -> Iterator[CheckResult]:
    """Check header, pairs of factors and numbers of a LoRA file.

    trained: rank and alpha that it was trained with, where a run says so.
    """
    topic = "lora"
    try:
        lora = open_lora(source)
        layers = layers_of(lora.state)
    except BROKEN as error:
        yield failed(topic, _told(error), "Export the run again: flowrl export RUN.")
        return
    wrong = [f"{layer}: {tuple(a.shape)} and {tuple(b.shape)}"
             for layer, (a, b) in layers.items()
             if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]]  # fmt: skip
    ranks = sorted({len(down) for down, _ in layers.values()})
    strengths = sorted(set(lora.strengths.values()))
    detail = (
        f"{lora.path.name} of {lora.make}: {len(layers)} layers of rank {_listed(ranks)}, strength "
        f"{_listed(strengths)}"
    )
    remedy = f"Factors that do not fit each other: {'; '.join(wrong[:3])}."
    yield judged(topic, not wrong, detail, remedy)
    if not any(bool(up.any()) for _, up in layers.values()):
        yield unsure(topic, "every second factor is 0: it changes nothing")
    if trained is not None:
        expected = trained.alpha / trained.rank
        yield judged(
            topic, strengths == [expected] and ranks == [trained.rank],
            f"rank {_listed(ranks)} and strength {_listed(strengths)}; the recipe has "
            f"{trained.rank} and {expected:g}",
            "Its header was changed, or it is another run's: export the run again.",
        )  # fmt: skip


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def check_checkpoint(folder: Path, trained: LoRAOptions | None = None) -> Iterator[CheckResult]:
    """Check the state to resume from and the LoRA beside it."""
    try:
        state = read_checkpoint(folder)
        step = int(state["iteration"])
        numbers = sum(t.numel() for ts in state["policy"]["adapters"].values() for t in ts)
    except BROKEN as error:
        yield failed(folder.name, _told(error), "Resume from another checkpoint.")
        return
    yield judged(
        folder.name, step_of(folder) in (step, None),
        f"iteration {step}, {numbers:,} finite numbers of adapters",
        "It lies in the folder of another iteration.",
    )  # fmt: skip
    if (folder / FILE).exists():
        yield from check_lora(folder, trained)


def check_evaluation(path: Path) -> Iterator[CheckResult]:
    try:
        found = Evaluation.load(path)
    except BROKEN as error:
        yield failed("evaluation", f"{path.name}: {_told(error)}", "Delete it: it is made again.")
        return
    rows, kinds = found.scores.shape
    fits = kinds == len(found.names) and len(found.images) == len(found.prompts)
    missing = int(found.scores.isnan().sum())
    yield judged(
        "evaluation", fits and not bool(found.scores.isinf().any()),
        f"{path.name}: {rows} images, {kinds} rewards, {missing} scores missing",
        "Names, scores and images do not fit each other: delete it, and it is made again.",
    )  # fmt: skip


def check_store(folder: Path) -> Iterator[CheckResult]:
    """Check rows, latents and scores of an offline data set."""
    try:
        store = open_dataset(folder)
    except BROKEN as error:
        yield failed("store", _told(error), "")
        return
    images, groups = len(store), len(store.groups)
    yield passed("store", f"{groups} groups, {images} images, {', '.join(store.metadata.names)}")
    scores = store.scores
    yield judged("scores", not bool(scores.isinf().any()),
                 f"{int(scores.isfinite().sum())} of {scores.numel()} are there",
                 "Infinite scores teach nothing: collect again.")  # fmt: skip
    yield from _check_latents(store)


def _check_latents(store: OfflineDataset) -> Iterator[CheckResult]:
    wrong, spread = [], []
    for shard in store.shard.unique().tolist():
        try:
            x0 = store.latents((store.shard == shard).nonzero().flatten()).float()
        except BROKEN as error:
            wrong.append(f"shard {shard}: {_told(error)}")
            continue
        bad = (~x0.flatten(1).isfinite().all(1)).nonzero().flatten().tolist()
        wrong += [f"shard {shard}, latent {row} is not finite" for row in bad[:3]]
        same = (x0.flatten(1).std(1) == 0).nonzero().flatten().tolist()
        wrong += [f"shard {shard}, latent {row} is constant" for row in same[:3]]
        spread.append(x0.std().item())
    detail = "; ".join(wrong[:3]) or (
        f"finite, standard deviation {min(spread):.2f} to {max(spread):.2f} by shard"
    )
    yield judged("latents", not wrong, detail, "Delete the rows of that shard and collect again.")


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, UserError) else f"cannot be read ({text})"
