"""The end of a run: the proof that it got better, as table, gallery and model card."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flowrl.backbones.guidance import RLG
from flowrl.backbones.loading import TINY, own_call
from flowrl.backbones.policy import EMA
from flowrl.build.backbone import FILE as TRAINING
from flowrl.config import Config, config_yaml
from flowrl.export.gallery import GalleryPair, GallerySweep, SummaryRow, write_gallery
from flowrl.export.hub import Licence, is_hub_name, licence_of, public, public_config
from flowrl.export.model_card import Card, write_card
from flowrl.quantization.rollout_model import read_precision
from flowrl.sampling.rank_audit import AuditLog
from flowrl.sampling.two_stage import SelectRule
from flowrl.training.evaluate import Evaluation, EvaluationComparison, Evaluator, compare
from flowrl.training.loop import Learner
from flowrl.training.run import Run
from flowrl.training.tracking import read_metrics
from flowrl.utils.distributed import Runtime
from flowrl.utils.images import to_pil

NOT_REWARDS = ("reward/std_in_group", "reward/invalid")
TINY_LOADING = "from flowrl import pipeline_path"


METHODS = {  # the trees' names among people
    "ode": "GRPO",
    "flow_grpo": "Flow-GRPO",
    "flow_grpo_fast": "Flow-GRPO-Fast",
    "dance_grpo": "DanceGRPO",
    "mix_grpo": "MixGRPO",
    "branch_grpo": "BranchGRPO",
    "branch_grpo_mix": "BranchGRPO-Mix",
    "tree_grpo": "TreeGRPO",
    "dynamic_tree": "Dynamic-TreeRPO",
    "b2_diffurl": "B2-DiffuRL",
    "tempflow": "TempFlow-GRPO",
    "g2rpo": "G2RPO",
    "e_grpo": "E-GRPO",
    "custom": "GRPO",
}
OBJECTIVES = {  # names of those that are not told by their tree
    "spo": "SPO",
    "nft": "DiffusionNFT",
    "dpo": "Diffusion-DPO",
    "gdro": "GDRO",
    "sft": "SFT on the best images",
    "rwr": "RWR",
    "awm": "AWM",
    "kto": "Diffusion-KTO",
    "dgpo": "DGPO",
    "lair": "LAIR",
    "refl": "ReFL",
    "draft": "DRaFT",
    "draft_lv": "DRaFT-LV",
    "align_prop": "AlignProp",
    "srpo": "SRPO",
    "leap_align": "LeapAlign",
    "flowbp_sparse": "FlowBP-Sparse",
    "flowbp_bridge": "FlowBP-Bridge",
    "flowbp_lagrange": "FlowBP-Lagrange",
    "custom": "an objective of its own",
}


CHOSEN: dict[SelectRule, str] = {  # how candidates are, but for Sol-RL's best and worst
    "mean_deviation": "those furthest from the mean",
    "extremes_random": "the best, the worst and others at random",
    "random": "chosen at random",
}


def hand_over(config: Config, learner: Learner, run: Run) -> list[EvaluationComparison]:
    """Evaluate the weights at the root, compare them with the base, write gallery and card.

    A run that was interrupted only gets its card: who pressed Ctrl-C does not want to wait.
    """
    after = None if run.interrupted else run.evaluate_policy()
    if not run.runtime.is_main:
        return []
    before_path = run.evaluation_path(0)
    before = Evaluation.load(before_path) if before_path.exists() else None
    quality = run.evaluator.quality if run.evaluator else None
    rows = compare(before, after, quality) if before and after else []
    shown = pairs(before, after) if before and after else []
    if shown:
        how = f"{run.done} iterations of {method(config)}, seed {config.run.seed}"
        caption = f"{config.pipeline.path}, {how}"
        write_gallery(
            run.folder / "gallery", shown, title=f"{config.pipeline.path}: base and aligned",
            summary=summary(rows), caption=caption,
        )  # fmt: skip
    write_card(run.folder, card(config, learner, run, rows, shown))
    return rows


def method(config: Config) -> str:
    """What the recipe does, in the words of papers."""
    kind, explore = config.objective.kind, config.rollout.explore
    name = METHODS[config.rollout.tree.kind] if kind == "grpo" else OBJECTIVES[kind]
    if explore is None:
        return name
    kept = config.rollout.plan(0, config.run.seed).roots
    text = f"{name} on {kept} of {explore.candidates} candidates"
    if kept == explore.candidates:
        return text
    return (
        f"{text} (Sol-RL)"
        if explore.select == "best_worst"
        else f"{text}, {CHOSEN[explore.select]}"
    )


def precisions(config: Config, folder: Path, done: int) -> str:
    """What the run computed in where that was not only its dtype, by its files; "" if nowhere.

    done: iterations that it has behind it.
    """
    p, base = config.pipeline.precision, config.memory
    told = [] if p is None else [f"Rollouts and training: {read_precision(folder, TRAINING) or p}."]
    if base.base_bits is not None:
        told.append(f"Frozen weights: {base.base_bits} bits, by {base.base_library}.")
    if config.rollout.explore is not None:
        told.append(_of_candidates(config, folder, done))
    return " ".join(told)


def _of_candidates(config: Config, folder: Path, done: int) -> str:
    explore = config.rollout.explore
    assert explore is not None
    steps = explore.num_inference_steps or config.rollout.num_inference_steps
    events = [event for event in AuditLog(folder).before(done) if event.steps == steps]
    parts, now = [f"{steps} steps"], ""
    for event in events:
        # An audit before the first rollout says what that one was drawn in.
        moves = (
            [event.next] if event.next and not event.iteration else [event.precision, event.next]
        )
        for precision in moves:
            if precision not in (None, now):
                start = f"from iteration {event.iteration + 1} " if now else ""
                parts.append(start + ("not quantised" if precision == "bf16" else precision))
                now = precision
    if not events:
        parts.append(read_precision(folder) or explore.precision)
    text = f"Candidates: {parts[0]}, {'; '.join(parts[1:])}"
    rhos = [(event.iteration + 1, event.report.rho) for event in events]
    if rhos:
        text += f"; last audit before iteration {rhos[-1][0]}, rho {rhos[-1][1]:.2f}"
    return f"{text}."


def pairs(before: Evaluation, after: Evaluation) -> list[GalleryPair]:
    """The kept images of both evaluations side by side, with their scores."""
    base, aligned = (to_pil(e.images.float() / 255) for e in (before, after))
    return [
        GalleryPair(
            prompt=prompt,
            draw=before.draws[i],
            base=base[i],
            aligned=aligned[i],
            scores={
                name: (
                    _number(before.scores[i, c]),
                    _number(after.scores[i, after.names.index(name)]),
                )
                for c, name in enumerate(before.names)
            },
        )
        for i, prompt in enumerate(before.prompts)
    ]


def summary(rows: list[EvaluationComparison]) -> list[SummaryRow]:
    return [
        SummaryRow(
            name=row.name,
            base=row.before,
            aligned=row.after,
            change=row.change.mean,
            low=row.change.low,
            high=row.change.high,
        )
        for row in rows
    ]


def legend(rows: list[EvaluationComparison], quality: str | None) -> str:
    """What the rows are that are more than a reward's score, for people."""
    texts = {
        "corrected/": f"corrected/R is R ({quality} - 3) + 0.2, image by image.",
        "paraphrase/": "paraphrase/R is the score R of images drawn from other words of the "
        "prompt, and paraphrase_gap/R how far it lies below that of the prompt's own words.",
    }
    shown = [text for start, text in texts.items() if any(r.name.startswith(start) for r in rows)]
    return " ".join(shown)


def call_settings(config: Config) -> dict[str, int | float | str]:
    """The arguments of the pipeline's call that draw as the run's evaluation does."""
    p, e = config.pipeline, config.evaluation
    call: dict[str, int | float | str] = {
        "num_inference_steps": e.num_inference_steps,
        "guidance_scale": e.guidance_scale,
        "max_sequence_length": p.max_sequence_length,
    }
    if e.guidance_scale > 1 and config.rollout.negative_prompt:
        call["negative_prompt"] = config.rollout.negative_prompt
    return call | {k: v for k, v in (("height", p.height), ("width", p.width)) if v is not None}


def card(
    config: Config,
    learner: Learner,
    run: Run,
    rows: list[EvaluationComparison],
    shown: list[GalleryPair],
) -> Card:
    p, e = config.pipeline, config.evaluation
    built_in = p.path in TINY
    on_hub = not built_in and is_hub_name(p.path)
    of_revision = f", revision={p.revision!r}" if on_hub and p.revision else ""
    return Card(
        base_model=public(p.path),
        on_hub=on_hub,
        load_from=f"pipeline_path({p.path!r})" if built_in else f"{public(p.path)!r}{of_revision}",
        imports=TINY_LOADING if built_in else "",
        dtype=p.dtype,
        call=own_call(learner.policy.backbone.pipeline) | call_settings(config),
        license=Licence(id="apache-2.0") if built_in else licence_of(p.path) if on_hub else None,
        method=method(config),
        weights="EMA" if learner.policy.best_name == EMA else "policy",
        step=run.done,
        stopped=run.stopped,
        training=precisions(config, run.folder, run.done),
        command="flowrl train config.yaml run.output_dir=runs/again",
        config=public_config(config_yaml(config)),
        evaluation=f"{rows[0].pairs} images of {public(e.prompts)}, seed {e.seed}" if rows else "",
        summary=summary(rows),
        legend=legend(rows, config.evaluation.quality),
        curves=reward_curves(read_metrics(run.folder)),
        pairs=shown,
    )


def reward_curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return the (iteration, score) points of a run's rewards without missing values, the
    weighted mean first."""
    names = dict.fromkeys(name for row in metrics for name in row if name.startswith("reward/"))
    wanted = [name for name in names if name not in NOT_REWARDS]
    return {
        name: [(row["step"], row[name]) for row in metrics if row.get(name) is not None]
        for name in sorted(wanted, key=lambda name: name != "reward/mean")
    }


def _number(value: Tensor) -> float | None:
    return None if bool(value.isnan()) else float(value)


# --- One LoRA at several strengths -------------------------------------------------------------

NOTE = "RLG 0 is the base, 1 the LoRA as it was trained; other strengths are a heuristic."


def draw_sweep(
    evaluator: Evaluator, runtime: Runtime, strengths: Sequence[float]
) -> dict[float, Evaluation]:
    """What the evaluator's pipeline, with its LoRA loaded, draws at each strength of RLG.

    In the order given; a strength that is named twice is drawn once.
    """
    found = {}
    for strength in dict.fromkeys(strengths):
        with RLG(evaluator.backbone.pipeline, strength):
            found[strength] = evaluator(evaluator.backbone.velocity, runtime)
    return found


def write_sweep(
    folder: Path, base: Evaluation, at_each: dict[float, Evaluation], *, title: str, caption: str
) -> Path:
    """Write the gallery with a column for the base and for each strength -> its page.

    The table has a row for each reward and strength: both means and the paired change.
    """
    columns = [f"RLG {strength:g}" for strength in at_each]
    page, _ = write_gallery(
        folder,
        sweep_rows(base, list(at_each.values())),
        title=title,
        summary=sweep_summary(base, dict(zip(columns, at_each.values(), strict=True))),
        caption=f"{caption}. {NOTE}",
        columns=("base", *columns),
    )
    return page


def sweep_rows(base: Evaluation, others: Sequence[Evaluation]) -> list[GallerySweep]:
    """The kept images of all evaluations by prompt and noise, with their scores."""
    return [
        GallerySweep(
            prompt=same[0].prompt,
            draw=same[0].draw,
            images=(same[0].base, *(pair.aligned for pair in same)),
            scores={
                name: (first, *(pair.scores[name][1] for pair in same))
                for name, (first, _) in same[0].scores.items()
            },
        )
        for same in zip(*(pairs(base, other) for other in others), strict=True)
    ]


def sweep_summary(base: Evaluation, others: dict[str, Evaluation]) -> list[SummaryRow]:
    """Every reward at every strength, by reward. others: by the name of their column."""
    found = {column: summary(compare(base, other)) for column, other in others.items()}
    return [
        replace(row, name=f"{reward}, {column}")
        for reward in base.names
        for column, rows in found.items()
        for row in rows
        if row.name == reward
    ]
