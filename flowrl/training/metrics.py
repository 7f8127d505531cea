"""What an iteration is measured by: its rewards, pictures and trees, and means over its rows."""

import torch

from flowrl.objectives.advantage_maths import group_stats
from flowrl.sampling.ranking import regenerated_rank
from flowrl.training.diversity import common_ancestor, pairwise_distance_by_ancestor
from flowrl.trajectory import Metrics, Rollout


class RowMeans:
    """Means of metrics over micro-batches of unequal size; names ending in _max are maxima."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[torch.Tensor, int]]] = {}

    def add(self, metrics: Metrics, rows: int) -> None:
        for name, value in metrics.items():
            self._values.setdefault(name, []).append((value, rows))

    def result(self) -> dict[str, float]:
        found = {}
        for name, pairs in self._values.items():
            values = torch.stack([value.cpu().double() for value, _ in pairs])
            weights = torch.tensor([rows for _, rows in pairs]).double()
            mean = (values * weights).sum() / weights.sum()
            found[name] = (values.max() if name.endswith("_max") else mean).item()
        return found


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Rewards and groups of all processes; latents, pictures (if any) and trees of this one."""
    stats = group_stats(rollout.reward, rollout.valid, rollout.group)
    x0, images = rollout.tree.leaves().float(), rollout.images
    metrics = {
        "reward/mean": rollout.reward.nanmean().item(),
        "reward/std_in_group": stats.spread,
        "reward/invalid": stats.invalid,
        "groups/no_signal": stats.no_signal,
        "latent/norm": x0.square().mean().sqrt().item(),
    }
    if len(images):  # a store holds none
        metrics["image/brightness"] = images.mean().item()
        metrics["image/contrast"] = images.flatten(1).std(1).mean().item()
    means = rollout.scores.nanmean(0).tolist()
    scores = {f"reward/{n}": m for n, m in zip(rollout.names, means, strict=True)}
    explored = explore_metrics(rollout) if rollout.explored is not None else {}
    return metrics | scores | _missing(rollout) | tree_metrics(rollout) | explored


def _missing(rollout: Rollout) -> dict[str, float]:
    """How often rewards had no score where they apply, and numbers stood in for them."""
    missing = rollout.applicable & ~rollout.scores.isfinite()
    shares = (missing.sum(0) / rollout.applicable.sum(0).clamp(min=1)).tolist()
    stood_in = missing & rollout.terms.isfinite()
    found = {f"reward/missing/{n}": s for n, s in zip(rollout.names, shares, strict=True)}
    return found | {"reward/stand_in": stood_in.any(1).double().mean().item()}


def explore_metrics(rollout: Rollout) -> dict[str, float]:
    """What the first stage cost and found, of all processes; needs `rollout.explored`."""
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
    """Standard deviation within a row, averaged over rows (P, N)."""
    row = torch.arange(len(score)).repeat_interleave(score.shape[1])
    return group_stats(score.flatten(), score.isfinite().flatten(), row).spread


def tree_metrics(rollout: Rollout) -> dict[str, float]:
    """What the forest cost, and how different its pictures are by where they parted."""
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
