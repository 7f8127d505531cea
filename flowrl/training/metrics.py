"""The metrics of an iteration: what each means, and how they are computed from a rollout."""

import json
import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from flowrl.objectives.advantage import group_stats
from flowrl.objectives.tree_credit import leaves_below
from flowrl.sampling.rank_audit import regenerated_rank
from flowrl.trajectory import Metrics, Rollout
from flowrl.utils.distributed import Runtime

METRICS: dict[str, str] = {
    "reward/mean": "Mean weighted reward of the rollout's valid images: what training raises.",
    "reward/<name>": (
        "Mean raw score of one reward, held-out ones included, before its weight, over the "
        "images it could score."
    ),
    "reward/std_in_group": (
        "Mean over groups of the reward's standard deviation among the images of one prompt. "
        "Without spread there is nothing to learn from."
    ),
    "reward/invalid": (
        "Share of images that lack a score of a trained reward; they are left out, under gdpo "
        "only of what that reward says."
    ),
    "reward/missing/<name>": "Share of the images a reward applies to that it did not score.",
    "reward/stand_in": (
        "Share of images with a number of `on_failure` in the place of a missing score."
    ),
    "groups/no_signal": (
        "Share of groups whose images all got the same reward, or fewer than two a valid one: "
        "their advantages are 0."
    ),
    "explore/candidates": (
        "Candidate trees, with `rollout.explore`: nothing is learned from them."
    ),
    "explore/forwards": "Velocities computed for them; those of audits are not counted.",
    "explore/missing": "Share of them without a score: they are kept only to make up the number.",
    "explore/unranked": "Share of those kept that were kept without a score.",
    "explore/mean": "Mean score of the candidates, over the rewards that are trained.",
    "explore/spread": (
        "Standard deviation of the candidates' scores of a prompt, the mean over prompts."
    ),
    "explore/spread_kept": (
        "The same of those that are kept, by their candidates' scores; `reward/std_in_group` is "
        "that of their exact ones."
    ),
    "explore/rho_kept": (
        "Spearman's rank correlation of candidates' and exact scores within a prompt, over those "
        "that are kept, mean over prompts. Only extremes were kept, so that it is not that of all "
        "candidates: watch how it drifts, and decide by `explore/audit/rho`."
    ),
    "explore/audit/rho": (
        "At audits, the same over all candidates of some prompts, which are drawn exactly for it. "
        "`rollout.explore.audit.min_rho` is compared with it."
    ),
    "explore/audit/tau": "At audits, Kendall's tau-b instead of Spearman's rho.",
    "explore/audit/pooled_rho": (
        "At audits, Spearman's over the candidates of all prompts together. It also sees that some "
        "prompts score higher, which no choice within a prompt can use."
    ),
    "explore/audit/contrast": (
        "At audits, the difference of exact scores between the best and the worst half of the "
        "choice, as a share of that of a choice by exact scores."
    ),
    "tree/forwards": "Velocities computed for the rollout, one a node that has children.",
    "tree/nodes": "Latents of the rollout's trees, the initial noise included.",
    "tree/edges": "Denoising steps between them, stochastic or not.",
    "tree/leaves": "Images of the rollout.",
    "tree/trained_edges": "Stochastic steps that the plan trains, before any is dropped.",
    "tree/train_forwards": (
        "Forwards, each with a backward, of one pass over what is learned from: steps from one "
        "latent share it."
    ),
    "tree/no_advantage": (
        "Share of the trained steps whose advantage is 0: they teach nothing, and are dropped "
        "unless a pull to the base model needs them."
    ),
    "tree/distance/step_<i>": (
        "Mean distance, per latent element, of images whose ways parted at denoising step i."
    ),
    "tree/distance/roots": "The same for images of one prompt from different roots.",
    "endpoints/images": "Clean images that are learned from.",
    "endpoints/<reason>": (
        "Share of the rollout's images that nobody learns from, by reason: `invalid` (no "
        "reward), `alone` (the only one of its prompt with a reward), `tied` (all of the prompt's "
        "rewards equal) or `unused` (not chosen by the objective, as between best and worst)."
    ),
    "path/chains": "Chains without noise whose gradient is followed.",
    "path/invalid": "Share of the rollout's images without a reward, which are left out.",
    "path/dropped": (
        "Share of chains whose reward or gradient is not finite: they count 0 in the mean."
    ),
    "path/satisfied": "Share of images at or past `objective.hinge`, which have no gradient.",
    "path/reward": (
        "Mean reward where the loss takes it: at the image, or at the estimate of it that the "
        "objective makes."
    ),
    "path/gradient_norm": "Root mean square of the reward's gradient at the clean latents.",
    "path/leap_distance": "Mean distance of the leaps' ends from the states of the rollout.",
    "path/leap_weight": "Mean weight of an image's loss, one over that distance.",
    "path/word_gap": "Reward with SRPO's positive words minus that with its negative ones.",
    "policy/error": (
        "Mean squared distance of the policy's velocity from the images' own, where they are "
        "looked at in training, with the objective's weighting."
    ),
    "policy/error_best": (
        "The same of each prompt's best image. It should not rise: a policy can rank it first "
        "and yet draw it less often."
    ),
    "policy/error_worst": "The same of each prompt's worst image, where pairs are compared.",
    "policy/ranked_right": (
        "Share of pairs whose better image (or step) has gained more on the anchor than the "
        "worse one. 0 at the anchor itself."
    ),
    "policy/log_ratio_best": (
        "Mean log-ratio to the base, in nats, of the steps that SPO prefers."
    ),
    "policy/log_ratio_worst": (
        "The same of those it rejects. Both falling together means that good steps become rarer, "
        "too."
    ),
    "policy/implicit_reward_std": (
        "Standard deviation of the implicit rewards -implicit_beta (error - anchor's error). Far "
        "above that of what they learn (rewards / tau, advantages), the objective saturates."
    ),
    "policy/liked": "Share of images that are liked, for objectives on likes and dislikes.",
    "policy/weight_max": "Largest weight of an image, for weighted regression.",
    "policy/moved": (
        "Mean squared distance of the policy's velocity from the old policy's, before the update."
    ),
    "policy/ratio_mean": (
        "Mean of the probability ratio between the policy and the one that drew the rollout. "
        "1 in the first pass over a rollout."
    ),
    "policy/ratio_std": "Standard deviation of that ratio: how far the update moved the policy.",
    "policy/ratio_std/step_<i>": "The same, for denoising step i alone.",
    "policy/ratio_error_max": (
        "Largest distance from 0 of a log-ratio summed over the latent, in nats, in the "
        "iteration. In the first pass it is 0 up to rounding: beyond `optim.ratio_tolerance` "
        "training stops."
    ),
    "policy/clip_share": (
        "Share of transitions whose ratio left the clip range, so that they pull no further. "
        "0 with one update a rollout. SPO measures it from the base."
    ),
    "policy/clip_share/step_<i>": "The same, for denoising step i alone.",
    "policy/kl": (
        "Distance of the policy from the base pipeline, in the form that `objective.kl_form` "
        "names, before its coefficient."
    ),
    "loss": "Mean of the objective's loss. Near 0 by construction: watch the rewards instead.",
    "grad/norm": "Norm of the gradient of all LoRA weights, before `optim.max_grad_norm` cuts it.",
    "latent/norm": (
        "Root mean square of the clean latents. It drifts away from its first value when "
        "images lose their natural range, often before the eye sees it."
    ),
    "image/brightness": "Mean of the images' values, 0 black to 1 white.",
    "image/contrast": "Mean over images of the standard deviation of their values.",
    "eval/<name>": "Mean score of one reward over the held-out images, at steps that evaluate.",
    "eval/<n>_steps/<name>": (
        "Any of the measures under `eval/` at another number of denoising steps, where "
        "`evaluation.num_inference_steps` is a list; at the start and the end of a run."
    ),
    "eval/corrected/<name>": (
        "Mean over held-out images of score * (quality - 3) + 0.2, with the reward that "
        "`evaluation.quality` names: it falls when a score is bought with quality. Its constants "
        "are a convention: read it beside `eval/<name>` of both."
    ),
    "eval/paraphrase/<name>": (
        "Mean score of held-out images drawn from a paraphrase of the prompt, from the same "
        "noise; rewards are given the prompt's own words."
    ),
    "eval/paraphrase_gap/<name>": (
        "Score with the prompt's own words minus score with a paraphrase, over prompts that have "
        "one. It grows when the policy learns wordings."
    ),
    "time/audit": (
        "Seconds of an audit, where one was due, and of making the network that explores, where it "
        "is a new one."
    ),
    "time/explore": "Seconds to draw the candidates.",
    "time/explore_reward": "Seconds after drawing them until all their scores are there.",
    "time/rollout": "Seconds to draw the images, rewards left out.",
    "time/reward": (
        "Seconds after drawing until all scores are there: pools, servers and background rewards "
        "work during `time/rollout` already."
    ),
    "time/reward/<name>": (
        "Seconds from asking one reward to its answers, added up over all that it was asked; "
        "questions that wait for each other overlap."
    ),
    "time/train": "Seconds for all updates on them.",
    "workers/joined": "With `rollout.workers`: how many work now.",
    "workers/waited": "Seconds that the trainer waited for workers in this iteration.",
    "workers/restarts": "How often a worker was lost and replaced.",
}

_PAGE = """# Metrics

Every run writes them to `metrics.jsonl`, one line an iteration, and to the trackers that
`run.trackers` names. `null` stands for a value that is missing, not a number or infinite.
[troubleshooting.md](troubleshooting.md) says what to look at when something goes wrong.

With several processes all are over the images of all of them, but `time/*`, which is the main
one's, `tree/distance/*`, which compares images that lie on one process, and
`policy/implicit_reward_std`, which compares those of a micro-batch.

This page is made by `python -m flowrl.training.metrics > docs/metrics.md`.

| metric | meaning |
|---|---|
"""


def meaning(name: str) -> str | None:
    """Return the meaning of a logged metric, None when it is not documented; plain names win."""
    if name in METRICS:
        return METRICS[name]
    return next((text for form, text in METRICS.items() if _pattern(form).fullmatch(name)), None)


def page() -> str:
    """Return the text of docs/metrics.md."""
    return _PAGE + "".join(f"| `{name}` | {text} |\n" for name, text in METRICS.items())


def _pattern(form: str) -> re.Pattern[str]:
    """`<i>` is a whole number, any other name in angle brackets whatever a reward is called."""
    text = re.escape(form).replace("<i>", r"\d+")
    return re.compile(re.sub(r"<\w+>", r"[^/]+", text))


COUNTS = {
    "tree/forwards", "tree/nodes", "tree/edges", "tree/leaves", "tree/trained_edges",
    "tree/train_forwards", "endpoints/images", "path/chains",
}  # fmt: skip
ROOT_MEAN_SQUARES = {"latent/norm"}


class RowMeans:
    """Averages metrics over micro-batches of unequal size; names ending in _max are maxima."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[torch.Tensor, int]]] = {}
        self._weights: dict[str, float] = {}

    def add(self, metrics: Metrics, rows: int, *, weight: float | None = None) -> None:
        """Add metrics of `rows` rows; weight: against other processes', None for the rows."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append((value, rows))
            more = rows if weight is None else weight
            self._weights[name] = self._weights.get(name, 0.0) + more

    def of_all(self, runtime: Runtime) -> dict[str, float]:
        """Return the result over the rows of all processes."""
        return over_processes(self.result(), self._weights, runtime)

    def result(self) -> dict[str, float]:
        found = {}
        for name, pairs in self._values.items():
            values = torch.stack([value.cpu().double() for value, _ in pairs])
            weights = torch.tensor([rows for _, rows in pairs]).double()
            mean = (values * weights).sum() / weights.sum()
            found[name] = (values.max() if name.endswith("_max") else mean).item()
        return found


def over_processes(
    metrics: dict[str, float], weights: Mapping[str, float], runtime: Runtime
) -> dict[str, float]:
    """Join every process's metrics, each with its weight: all call it, and all get the result.

    Means are weighted, COUNTS are summed, names ending in _max are maxima. A process may lack some.
    """
    if runtime.world_size == 1:
        return metrics
    own = {name: (value, weights[name]) for name, value in metrics.items()}
    texts = runtime.merge({f"{runtime.rank:06d}": json.dumps(own)})
    parts = [json.loads(texts[rank]) for rank in sorted(texts)]
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _joined(name, [part[name] for part in parts if name in part]) for name in names}


def _joined(name: str, pairs: list[tuple[float, float]]) -> float:
    values, weights = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    if name.endswith("_max"):
        return values.max().item()
    if name in COUNTS:
        return values.sum().item()
    power = 2 if name in ROOT_MEAN_SQUARES else 1
    mean = (values**power * weights).sum() / weights.sum()
    return (mean ** (1 / power)).item()


def rollout_metrics(rollout: Rollout, runtime: Runtime) -> dict[str, float]:
    """Return metrics of all processes' rewards, latents, images and trees."""
    stats = group_stats(rollout.reward, rollout.valid, rollout.group)
    metrics = {
        "reward/mean": rollout.reward.nanmean().item(),
        "reward/std_in_group": stats.spread,
        "reward/invalid": stats.invalid,
        "groups/no_signal": stats.no_signal,
    }
    own = _image_metrics(rollout) | _tree_metrics(rollout)
    means = rollout.scores.nanmean(0).tolist()
    scores = {f"reward/{n}": m for n, m in zip(rollout.names, means, strict=True)}
    explored = _explore_metrics(rollout) if rollout.explored is not None else {}
    shared = over_processes(own, dict.fromkeys(own, len(rollout.tree)), runtime)
    return metrics | shared | scores | _missing(rollout) | explored


def _image_metrics(rollout: Rollout) -> dict[str, float]:
    """Return metrics of this process's latents and images."""
    x0, images = rollout.tree.leaves().float(), rollout.images
    metrics = {"latent/norm": x0.square().mean().sqrt().item()}
    if len(images):  # none, where latents are read from disk
        metrics["image/brightness"] = images.mean().item()
        metrics["image/contrast"] = images.flatten(1).std(1).mean().item()
    return metrics


def _missing(rollout: Rollout) -> dict[str, float]:
    """Return how often rewards had no score where they apply, and numbers stood in for them."""
    missing = rollout.applicable & ~rollout.scores.isfinite()
    shares = (missing.sum(0) / rollout.applicable.sum(0).clamp(min=1)).tolist()
    stood_in = missing & rollout.terms.isfinite()
    found = {f"reward/missing/{n}": s for n, s in zip(rollout.names, shares, strict=True)}
    return found | {"reward/stand_in": stood_in.any(1).double().mean().item()}


def _explore_metrics(rollout: Rollout) -> dict[str, float]:
    """Return metrics of all processes' candidates; needs `rollout.explored`."""
    explored = rollout.explored
    assert explored is not None
    proxy, kept = explored.proxy, explored.proxy.gather(1, explored.chosen)
    exact = rollout.reward.view(*kept.shape, -1).nanmean(-1)
    return {
        "explore/forwards": float(explored.forwards),
        "explore/candidates": float(proxy.numel()),
        "explore/missing": (~proxy.isfinite()).double().mean().item(),
        "explore/unranked": (~kept.isfinite()).double().mean().item(),
        "explore/mean": proxy.nanmean().item(),
        "explore/spread": _spread(proxy),
        "explore/spread_kept": _spread(kept),
        "explore/rho_kept": regenerated_rank(kept, exact),
    } | {f"explore/audit/{name}": value for name, value in explored.audit.items()}


def _spread(score: torch.Tensor) -> float:
    """Return the standard deviation within a row, averaged over rows (P, N)."""
    row = torch.arange(len(score)).repeat_interleave(score.shape[1])
    return group_stats(score.flatten(), score.isfinite().flatten(), row).spread


def _tree_metrics(rollout: Rollout) -> dict[str, float]:
    """Return what the trees cost, and how different their images are by where they parted."""
    tree = rollout.tree
    trees, nodes = tree.x.shape[:2]
    ancestor = common_ancestor(tree.parent.cpu(), tree.step.cpu(), tree.leaf.cpu())
    leaves = tree.x[:, tree.leaf].cpu()
    group = rollout.group.cpu().view(-1, len(tree.leaf))[rollout.trees.cpu(), 0]
    distances = pairwise_distance_by_ancestor(leaves, ancestor, group)
    return {
        "tree/forwards": float(tree.forwards),
        "tree/nodes": float(trees * nodes),
        "tree/edges": float(trees * (nodes - 1)),
        "tree/leaves": float(trees * len(tree.leaf)),
        "tree/trained_edges": float(trees * len(tree.edge)),
    } | {
        "tree/distance/roots" if step < 0 else f"tree/distance/step_{step}": distance
        for step, distance in distances.items()
    }


def common_ancestor(parent: Tensor, step: Tensor, leaf: Tensor) -> Tensor:
    """Return (l, l) long: the step at which two leaves were last one node; a leaf's own on the
    diagonal.

    Args:
        parent, step: (n,) long, parents before children
        leaf: (l,) long
    """
    below = leaves_below(parent, leaf)
    above_both = below[:, :, None] & below[:, None, :]
    # Steps grow along a path, so that of all common ancestors the last has the largest.
    return torch.where(above_both, step[:, None, None], -1).amax(0)


def pairwise_distance_by_ancestor(x0: Tensor, ancestor: Tensor, group: Tensor) -> dict[int, float]:
    """Return the mean root mean squared distance of pairs of leaves by the step where they parted.

    Steps ascend; -1 is for leaves of different trees of one prompt. Steps without a pair are left
    out.

    Args:
        x0: (R, l, *latent), the leaves of R trees of one shape
        ancestor: (l, l) long, from `common_ancestor`
        group: (R,) long, each tree's prompt
    """
    sums: dict[int, float] = defaultdict(float)
    pairs: dict[int, int] = defaultdict(int)
    for name in group.unique():
        rows = x0[group == name]
        trees, leaves = rows.shape[:2]
        parted = torch.full((trees, leaves, trees, leaves), -1)
        own = torch.arange(trees)
        parted[own, :, own] = ancestor.cpu()
        each = torch.triu_indices(trees * leaves, trees * leaves, offset=1)
        distance = _distances(rows.reshape(trees * leaves, -1))[each[0], each[1]]
        parted = parted.view(trees * leaves, -1)[each[0], each[1]]
        for key in parted.unique().tolist():
            sums[key] += distance[parted == key].sum().item()
            pairs[key] += int((parted == key).sum())
    return {key: sums[key] / pairs[key] for key in sorted(sums)}


def _distances(x: Tensor) -> Tensor:
    """Return root mean squared differences of rows. (m, D) -> (m, m) float64"""
    exact = x.detach().cpu().double()
    exact = exact - exact.mean(0)  # or what all have in common would be cancelled, and its digits
    gram = exact @ exact.T
    square = gram.diagonal()
    return ((square[:, None] + square - 2 * gram).clamp(min=0) / x.shape[1]).sqrt()


if __name__ == "__main__":
    print(page(), end="")
