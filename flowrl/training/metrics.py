"""Compute the metrics of an iteration from its rollout; docs/metrics.md says what each means."""

import json
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from flowrl.objectives.advantage import group_stats
from flowrl.trajectory import Metrics, Rollout, Tree
from flowrl.utils.distributed import Runtime

COUNTS = {
    "tree/forwards", "tree/nodes", "tree/edges", "tree/leaves", "tree/trained_edges",
    "tree/train_forwards", "endpoints/images", "path/chains",
}  # fmt: skip
ROOT_MEAN_SQUARES = {"latent/norm"}


class RowMeans:
    """Averages metrics over micro-batches of unequal size; names ending in _max are maxima."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[Tensor, int]]] = {}
        self._weights: dict[str, float] = {}

    def add(self, metrics: Metrics, rows: int, *, weight: float | None = None) -> None:
        """Add metrics of `rows` rows; weight: against other processes', None for the rows."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append((value.detach(), rows))
            more = rows if weight is None else weight
            self._weights[name] = self._weights.get(name, 0.0) + more

    def of_all(self, runtime: Runtime) -> dict[str, float]:
        """Return the result over the rows of all processes."""
        return over_processes(self.result(), self._weights, runtime)

    def result(self) -> dict[str, float]:
        results = {}
        self._fetch()
        for name, pairs in self._values.items():
            values = torch.stack([value.double() for value, _ in pairs])
            weights = torch.tensor([rows for _, rows in pairs]).double()
            mean = (values * weights).sum() / weights.sum()
            results[name] = (values.max() if name.endswith("_max") else mean).item()
        return results

    def _fetch(self) -> None:
        """Copy what is still on a device to the CPU, in one copy."""
        pending: dict[tuple, list[Tensor]] = defaultdict(list)
        for value, _ in (pair for pairs in self._values.values() for pair in pairs):
            if value.device != torch.device("cpu"):
                pending[value.device, value.dtype].append(value)
        copies = {
            id(value): copy
            for values in pending.values()
            for value, copy in zip(values, torch.stack(values).cpu().unbind(), strict=True)
        }
        for name, pairs in self._values.items():
            self._values[name] = [(copies.get(id(value), value), rows) for value, rows in pairs]


def over_processes(
    metrics: dict[str, float], weights: Mapping[str, float], runtime: Runtime
) -> dict[str, float]:
    """Join every process's metrics, each with its weight: all call it, and all get the result.

    Means are weighted, COUNTS are summed, names ending in _max are maxima. A process may lack some.
    """
    if runtime.world_size == 1:
        return metrics
    metrics_here = {name: (value, weights[name]) for name, value in metrics.items()}
    texts = runtime.merge({f"{runtime.rank:06d}": json.dumps(metrics_here)})
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
    local = _image_metrics(rollout) | _tree_metrics(rollout)
    means = rollout.scores.nanmean(0).tolist()
    scores = {f"reward/{n}": m for n, m in zip(rollout.names, means, strict=True)}
    explored = _explore_metrics(rollout) if rollout.explored is not None else {}
    shared = over_processes(local, dict.fromkeys(local, len(rollout.tree)), runtime)
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
    """Return how often rewards had no score where they apply."""
    missing = rollout.applicable & ~rollout.scores.isfinite()
    shares = (missing.sum(0) / rollout.applicable.sum(0).clamp(min=1)).tolist()
    return {f"reward/missing/{n}": s for n, s in zip(rollout.names, shares, strict=True)}


def _explore_metrics(rollout: Rollout) -> dict[str, float]:
    """Return metrics of all processes' candidates; needs `rollout.explored`."""
    explored = rollout.explored
    assert explored is not None
    proxy, chosen = explored.proxy, explored.proxy.gather(1, explored.chosen)
    return {
        "explore/forwards": float(explored.forwards),
        "explore/candidates": float(proxy.numel()),
        "explore/missing": (~proxy.isfinite()).double().mean().item(),
        "explore/unranked": (~chosen.isfinite()).double().mean().item(),
        "explore/mean": proxy.nanmean().item(),
        "explore/spread": _spread(proxy),
        "explore/spread_kept": _spread(chosen),
    } | {f"explore/audit/{name}": value for name, value in explored.audit.items()}


def _spread(score: torch.Tensor) -> float:
    """Return the standard deviation within a row, averaged over rows (P, N)."""
    row = torch.arange(len(score)).repeat_interleave(score.shape[1])
    return group_stats(score.flatten(), score.isfinite().flatten(), row).spread


def _tree_metrics(rollout: Rollout) -> dict[str, float]:
    """Return what the trees cost."""
    tree = rollout.tree
    trees, nodes = tree.x.shape[:2]
    return {
        "tree/forwards": float(tree.forwards),
        "tree/nodes": float(trees * nodes),
        "tree/edges": float(trees * (nodes - 1)),
        "tree/leaves": float(trees * len(tree.leaf)),
        "tree/rows": float(tree.rows),
        "tree/trained_edges": float(trees * len(tree.edge)),
        **_dropped(tree),
    }


def _dropped(tree: Tree) -> dict[str, float]:
    """Return the share of images that are copies, which a look-ahead dropped."""
    if tree.twin is None:
        return {}
    copies = tree.twin != torch.arange(tree.twin.shape[1])
    return {"tree/dropped": copies[:, tree.leaf].double().mean().item()}
