"""The end of a run: compare the trained model with the base, write gallery and model card."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.assembly.backbone import call_settings
from flowrl.backbones.families import family_of
from flowrl.backbones.loading import TINY
from flowrl.backbones.lora_files import FILE as LORA
from flowrl.backbones.policy import EMA
from flowrl.config import Config, config_yaml
from flowrl.config.methods import method_name
from flowrl.errors import DamagedFile, phase
from flowrl.export.gallery import GalleryRow, write_gallery
from flowrl.export.hub import NAME, licence_of, public, public_config
from flowrl.export.model_card import Card, loader_of, write_card
from flowrl.tiny.world import planted
from flowrl.training.evaluate import Evaluation, EvaluationComparison, compare
from flowrl.training.loop import Learner
from flowrl.training.run import Run
from flowrl.training.tracking import read_metrics
from flowrl.utils.images import to_pil
from flowrl.utils.templates import finite_or_none

LOG = logging.getLogger(__name__)
NOT_REWARDS = ("reward/std_in_group", "reward/invalid", "reward/missing/")
TINY_LOADING = "from flowrl import pipeline_path"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """A run after its training, or an earlier one that had finished."""

    folder: Path  # of everything, with the LoRA and the model card
    comparisons: list[EvaluationComparison]  # with the base; none on other processes
    stopped: str = ""  # a sentence: why it ended before its last iteration

    @property
    def lora(self) -> Path | None:
        """Return the file of the LoRA, None where the run ended before it had one."""
        return _optional(self.folder / LORA)

    @property
    def gallery(self) -> Path | None:
        """Return the page of images, None where nothing was evaluated."""
        return _optional(self.folder / "gallery" / "index.html")

    @property
    def card(self) -> Path | None:
        """Return the model card."""
        return _optional(self.folder / "README.md")


def _optional(path: Path) -> Path | None:
    return path if path.is_file() else None


def saved_comparisons(folder: Path) -> list[EvaluationComparison]:
    """Return the comparison with the base of a run that has ended, from its files.

    Empty where nothing was evaluated, or a file is damaged.
    """
    paths = sorted((folder / "evaluations").glob("step-*.safetensors"))
    if len(paths) < 2:
        return []
    try:
        before, after = Evaluation.load(paths[0]), Evaluation.load(paths[-1])
    except DamagedFile as error:
        LOG.warning("%s: base and LoRA are not compared", error)
        return []
    return compare(before, after) if before.key == after.key else []


def finish_run(config: Config, learner: Learner, run: Run) -> list[EvaluationComparison]:
    """Evaluate the final weights, compare them with the base, write gallery and card."""
    # A user who pressed Ctrl-C does not want to wait for an evaluation.
    after = None if run.interrupted else run.evaluate_policy(whole=True)
    with phase("gallery"):
        return write_summary(config, learner, run, after) if run.runtime.is_main else []


def write_summary(
    config: Config, learner: Learner, run: Run, after: Evaluation | None
) -> list[EvaluationComparison]:
    """Write gallery and card of a run; return the comparison with the base."""
    before = run.evaluation(0)
    summary = compare(before, after) if before and after else []
    rows = gallery_rows(before, after) if before and after else []
    hacking = str(run.radar(before, after)) if summary and before and after else ""
    if rows:
        name = config.pipeline.path
        how = f"{run.done} iterations of {method_name(config)}, seed {config.run.seed}"
        write_gallery(
            run.folder / "gallery", rows, title=f"{name}: base and aligned", summary=summary,
            caption=f"{name}, {how}. {hacking} {run.stopped}".strip(),
        )  # fmt: skip
    write_card(run.folder, card(config, learner, run, summary, rows, hacking=hacking))
    return summary


def gallery_rows(base: Evaluation, aligned: Evaluation) -> list[GalleryRow]:
    """Return the saved images of both evaluations side by side, with their scores.

    With several numbers of steps, each image's rows at all of them follow each other.
    """
    if base.at_steps and aligned.at_steps:
        at_each = [(replace(base, at_steps=()), replace(aligned, at_steps=()))]
        at_each += zip(base.at_steps, aligned.at_steps, strict=True)
        rows = [
            [replace(row, note=f"{before.steps} steps") for row in gallery_rows(before, after)]
            for before, after in at_each
        ]
        return [row for same_image in zip(*rows, strict=True) for row in same_image]
    before, after = (to_pil(e.images.float() / 255) for e in (base, aligned))

    def score(evaluation: Evaluation, row: int, name: str) -> float | None:
        return finite_or_none(float(evaluation.scores[row, evaluation.names.index(name)]))

    return [
        GalleryRow(
            prompt=prompt,
            number=base.draws[row],
            images=(before[row], after[row]),
            scores={n: (score(base, row, n), score(aligned, row, n)) for n in base.names},
        )
        for row, prompt in enumerate(base.prompts)
    ]


def card(
    config: Config,
    learner: Learner,
    run: Run,
    summary: list[EvaluationComparison],
    rows: list[GalleryRow],
    *,
    hacking: str = "",
) -> Card:
    """Return what the model card of a run says."""
    p, e = config.pipeline, config.evaluation
    built_in = p.path in TINY
    on_hub = not built_in and bool(NAME.fullmatch(p.path)) and not Path(p.path).exists()
    options = f", revision={p.revision!r}" if on_hub and p.revision else ""
    family = family_of(type(learner.policy.backbone.pipeline).__name__)
    options += "".join(f", {name}=None" for name in family.without)
    change = summary[0].change if summary else None
    measured = ""
    if change is not None:
        measured = f"{change.images} images of {change.prompts} prompts "
        measured += f"({public(config.held_out)}), seed {e.seed}, {e.step_counts[0]} steps"
        measured += ", generated by the pipeline's own call" * e.as_deployed
    return Card(
        base_model=public(p.path),
        on_hub=on_hub,
        load_from=f"pipeline_path({p.path!r})" if built_in else f"{p.path!r}{options}",
        imports=TINY_LOADING if built_in else "",
        dtype=p.dtype,
        loader=loader_of(learner.policy.backbone.pipeline),
        output=family.output,
        call=call_settings(config, learner.policy.backbone.pipeline),
        license={"license": "apache-2.0"} if built_in else licence_of(p.path) if on_hub else {},
        method=method_name(config),
        weights="EMA" if learner.policy.export_adapter == EMA else "policy",
        step=run.done,
        stopped=run.stopped,
        command="flowrl train config.yaml run.output_dir=runs/again",
        config=public_config(config_yaml(config)),
        evaluation=measured,
        planted=planted() if built_in else "",
        hacking=hacking,
        summary=summary,
        curves=reward_curves(
            read_metrics(run.folder), [spec.name for spec in learner.specs if spec.held_out]
        ),
        rows=rows,
    )


def reward_curves(
    metrics: Sequence[Mapping[str, Any]], held_out: Sequence[str] = ()
) -> dict[str, list[tuple[float, float]]]:
    """Return the (iteration, score) points of a run's rewards without missing values.

    First those of held-out rewards at evaluations, then the weighted mean of the trained ones.
    """
    names = dict.fromkeys(name for row in metrics for name in row if name.startswith("reward/"))
    wanted = [name for name in names if not name.startswith(NOT_REWARDS)]
    wanted = sorted(wanted, key=lambda name: name != "reward/mean")
    curves = {
        name: [(row["step"], row[name]) for row in metrics if row.get(name) is not None]
        for name in [*(f"eval/{name}" for name in held_out), *wanted]
    }
    return {name: points for name, points in curves.items() if points}
