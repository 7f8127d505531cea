"""Two-stage rollouts of Sol-RL (2604.06916): preview many candidates cheaply, keep a few.

A candidate is the root of a tree, hence a name of noise: the second stage samples trees from the
very same noise, or goes on where those stopped that the same network sampled. Only their images and
scores are learned from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.config.rollout import SelectRule
from flowrl.functional.noise import noise_seed
from flowrl.sampling.rollout import RolloutGenerator, RolloutRequest, Timer
from flowrl.trajectory import Explored, Tree
from flowrl.trees.plan import TreePlan, count


@dataclass(frozen=True, slots=True, kw_only=True)
class Explorer:
    """The first stage: scores the candidates of each group and selects some of them."""

    # (iteration, its candidates) -> the generator of previews, whose rewards are those that are
    # learned from, and the metrics of an audit of its ranking, by name; none if none was due.
    preview: Callable[[int, RolloutRequest], tuple[RolloutGenerator, Mapping[str, float]]]
    plan: Callable[[int], TreePlan]  # of an iteration; as many roots as a group has candidates
    select: SelectRule

    def explore(
        self, iteration: int, candidates: RolloutRequest, keep: int, timer: Timer
    ) -> tuple[RolloutRequest, Explored, Tree | None]:
        """Select `keep` candidates of each group.

        candidates: as many trees of each group as the plan has roots, side by side.

        Returns the request for the selected ones in their order, the scores, and this process's
        selected trees where they stopped, if they go on from there.
        """
        plan = self.plan(iteration)
        generator, audit = self.preview(iteration, candidates)
        timer.lap("time/audit")
        samples = generator.sample(candidates, plan, timer, keep=False)
        scores = generator.score(samples, timer)
        proxy = candidate_scores(scores.reward, candidates, plan, self.select)
        # A seed of its own, apart from those of images and learning.
        seed = noise_seed(
            seed=candidates.seed, iteration=iteration, prompt="", root=0, step=0, role="select"
        )
        rng = torch.Generator().manual_seed(seed)
        chosen = torch.stack([fill_selection(row, keep, self.select, rng) for row in proxy])
        rows = chosen + torch.arange(len(proxy))[:, None] * proxy.shape[1]
        forwards = count(plan).times(len(proxy)).forwards
        explored = Explored(proxy=proxy, chosen=chosen, forwards=forwards, audit=audit)
        stopped = None
        if plan.continuation is not None:
            trees = [tree for tree, _ in scores.images]
            places = torch.isin(samples.trees, rows).split([len(tree) for tree in trees])
            parts = zip(trees, places, strict=True)
            stopped = Tree.cat([tree.take(place.nonzero().squeeze(1)) for tree, place in parts])
        return candidates.only(rows.flatten()), explored, stopped


def score_candidates(
    generator: RolloutGenerator,
    candidates: RolloutRequest,
    plan: TreePlan,
    timer: Timer,
    select: SelectRule,
) -> Tensor:
    """Sample N candidates of each of P groups and return their scores, see `candidate_scores`."""
    samples = generator.sample(candidates, replace(plan, continuation=None), timer, keep=False)
    return candidate_scores(generator.score(samples, timer).reward, candidates, plan, select)


def candidate_scores(
    reward: Tensor, candidates: RolloutRequest, plan: TreePlan, select: SelectRule
) -> Tensor:
    """Return the scores of N candidates of each of P groups: (P, N) fp32, NaN without a reward.

    reward: (G,), of their leaves.

    The score of a candidate with several leaves is their mean reward, or its variance with
    most_mixed: of rewards 0 and 1 this is p (1 - p), whose order is that of 1 - p^k - (1 - p)^k,
    TRACE's chance (2606.11119) that k more leaves are mixed, for every k.
    """
    reward = reward.view(-1, plan.roots, len(reward) // len(candidates.prompt))
    if select == "most_mixed":  # in float64: equal shares of successes are equal scores
        reward = (reward.double() - reward.double().nanmean(-1, keepdim=True)).square()
    return reward.nanmean(-1).float()


def fill_selection(proxy: Tensor, keep: int, select: SelectRule, rng: torch.Generator) -> Tensor:
    """Select `keep` candidates of a group as `select_candidates` does: (keep,) long, ascending.

    Where fewer have a proxy score, the first of those without one are added.
    """
    chosen = select_candidates(proxy, keep, select, rng)
    unscored = (~proxy.isfinite()).nonzero().squeeze(1)
    return torch.cat([chosen, unscored[: keep - len(chosen)]]).sort().values


def select_candidates(proxy: Tensor, keep: int, select: SelectRule, rng: torch.Generator) -> Tensor:
    """Return the selected candidates' indices: (keep,) long, ascending; fewer if fewer have scores.

    Args:
        proxy: (N,) scores of previews; candidates with NaN or infinity are not selected. Equal
            scores are ranked by index.
        select: best_worst: the floor(K/2) highest and the K - floor(K/2) lowest (Sol-RL);
            max_variance: those whose scores have the largest variance, which are some of the
            highest and some of the lowest;
            mean_deviation: those furthest from the mean; extremes_random: the highest, the lowest
            and others at random; most_mixed: the highest; random: any.
    """
    finite = proxy.isfinite().nonzero().squeeze(1)
    if len(finite) <= keep:
        return finite
    ranked = finite[proxy[finite].argsort(descending=True, stable=True)]
    if select == "best_worst":
        chosen = both_ends(ranked, keep, keep // 2)
    elif select == "most_mixed":
        chosen = ranked[:keep]
    elif select == "max_variance":
        equal = proxy[ranked[0]] == proxy[ranked[-1]]  # then any choice varies as little
        order = ranked[torch.randperm(len(ranked), generator=rng)] if equal else ranked
        chosen = most_varied(order, proxy, keep)
    elif select == "mean_deviation":
        score = proxy[finite].double()
        order = (score - score.mean()).abs().argsort(descending=True, stable=True)
        chosen = finite[order[:keep]]
    else:
        extremes = select == "extremes_random"
        ends = ranked[[0, -1]][:keep] if extremes else ranked[:0]
        middle = (ranked[1:-1] if extremes else ranked).sort().values  # whatever their scores
        random = torch.randperm(len(middle), generator=rng)[: keep - len(ends)]
        chosen = torch.cat([ends, middle[random]])
    return chosen.sort().values


def both_ends(ranked: Tensor, keep: int, best: int) -> Tensor:
    """Return the `best` first and the last of the ranked candidates, `keep` in all. (keep,)"""
    return torch.cat([ranked[:best], ranked[len(ranked) - (keep - best) :]])


def most_varied(ranked: Tensor, proxy: Tensor, keep: int) -> Tensor:
    """Return `keep` candidates whose scores have the largest variance. (keep,) long

    The variance is convex in each score, so that the largest has candidates from both ends alone:
    h highest and keep - h lowest, for the best h.

    ranked: (N,) long, candidates by falling score.
    """
    ends = [both_ends(ranked, keep, h) for h in range(keep + 1)]
    spread = torch.stack([proxy[rows].double().var(correction=0) for rows in ends])
    return ends[int(spread.argmax())]
