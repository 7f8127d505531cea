"""The data that all parts pass on: conditioning, trees, rollouts and denoising steps.

A node holds one latent; an edge has the number of its child. All trees of a rollout have one shape,
so that the shape is stored once and everything else has an axis of trees. A plain group is a set of
chains, which are trees too: nothing after the sampler knows whether it branched.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flowrl.utils.devices import send


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """What a backbone's `encode` made of P prompts; only the backbone reads inside."""

    tensors: Mapping[str, Tensor]  # name -> (P, ...)

    def take(self, rows: Tensor) -> "Conditioning":
        """Return the rows (N,) long."""
        return Conditioning(tensors={k: t[rows] for k, t in self.tensors.items()})

    def to(self, device: torch.device | str) -> "Conditioning":
        return Conditioning(tensors={k: send(t, device) for k, t in self.tensors.items()})

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    @staticmethod
    def cat(parts: list["Conditioning"]) -> "Conditioning":
        """Join rows; tensors of different shapes are padded with zeros at their ends."""
        columns = {name: [part.tensors[name] for part in parts] for name in parts[0].tensors}
        return Conditioning(tensors={k: torch.cat(_padded(ts)) for k, ts in columns.items()})


def _padded(tensors: list[Tensor]) -> list[Tensor]:
    """Pad tensors (N, ...) with zeros to one shape but for N."""
    largest = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]
    if all(list(t.shape[1:]) == largest for t in tensors):
        return tensors
    padded = [t.new_zeros(len(t), *largest) for t in tensors]
    for whole, tensor in zip(padded, tensors, strict=True):
        whole[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """R trees of one shape with n nodes each, the root first and parents before children."""

    x: Tensor  # (R, n, *latent), in the dtype that is stored and scored
    prompt: Tensor  # (R,) long, index into the rollout's prompts
    log_prob: Tensor  # (R, n), log-density of the step into a node, a mean over the latent; 0: ODE
    mean_old: Tensor  # (R, e, *latent) fp32, mean of the step of each trained edge
    # The shape, the same for every tree, on the CPU.
    step: Tensor  # (n,) long, index of the node's sigma
    parent: Tensor  # (n,) long, -1 at the root
    move: Tensor  # (n,) long, number of the plan's move that made it
    leaf: Tensor  # (l,) long, nodes, in the order of the images
    noisy: Tensor  # nodes at the end of stochastic edges
    edge: Tensor  # (e,) long, nodes at the end of trained edges
    # The same for every tree, on the latents' device.
    g: Tensor  # (n,), noise of the step into a node
    sigmas: Tensor  # (T+1,)
    forwards: int  # velocities that were computed, of all trees
    rows: int = 0  # of each call of the network that computed them; 0: none was
    # (R, n) long, on the CPU: the node that each equals, itself unless a sibling stands for it or
    # for a node above it; None where no siblings were compared.
    twin: Tensor | None = None
    velocity: Tensor | None = None  # (R, w, *latent), of the w nodes where a plan stopped

    def __len__(self) -> int:
        """R."""
        return len(self.x)

    def leaves(self) -> Tensor:
        """Return the clean latents, tree by tree. (R * l, *latent)"""
        return self.x[:, send(self.leaf, self.x.device)].flatten(0, 1)

    def prompt_of_leaves(self) -> Tensor:
        """Return the prompt of each leaf. (R * l,) long"""
        return self.prompt.repeat_interleave(len(self.leaf))

    @property
    def by_tree(self) -> dict[str, Tensor]:
        """The tensors with a row for each tree, by their names."""
        names = ("x", "prompt", "log_prob", "mean_old", "twin", "velocity")
        tensors = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def take(self, rows: Tensor) -> "Tree":
        """Return some of the trees; `forwards` stays that of all.

        rows: (N,) long, on the CPU.
        """
        taken = {name: t[send(rows, t.device)] for name, t in self.by_tree.items()}
        return replace(self, **taken)

    def to(self, device: torch.device | str) -> "Tree":
        """Return the tree with its latents on a device; the shape stays on the CPU."""
        tensors = self.by_tree | {"g": self.g, "sigmas": self.sigmas}
        tensors.pop("twin", None)
        return replace(self, **{name: t.to(device) for name, t in tensors.items()})

    @staticmethod
    def cat(parts: list["Tree"]) -> "Tree":
        """Join trees of one plan."""
        if len(parts) == 1:
            return parts[0]
        joined = {n: torch.cat([getattr(part, n) for part in parts]) for n in parts[0].by_tree}
        return replace(parts[0], **joined, forwards=sum(part.forwards for part in parts))


def leaves_below(parent: Tensor, leaf: Tensor) -> Tensor:
    """Mark for each node the leaves below it. (n, l) bool"""
    below = torch.zeros(len(parent), len(leaf), dtype=torch.bool)
    column, node = torch.arange(len(leaf)), leaf
    while len(node):
        below[node, column] = True
        node = parent[node]
        node, column = node[node >= 0], column[node >= 0]
    return below


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """The first of two stages: N candidates for each of all processes' P groups."""

    proxy: Tensor  # (P, N) fp32, scores of the candidates, NaN where there is none
    chosen: Tensor  # (P, K) long, ascending: the candidates in the rollout
    forwards: int  # velocities computed for them
    audit: Mapping[str, float]  # numbers of an audit before it, by name; {} where none was due


Metrics = dict[str, Tensor]  # 0-d


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One iteration's trees, prompts, images and scores.

    `tree`, `images` and `trees` are this process's; everything else is known to every process, of
    all N trees with G = N * l leaves, tree by tree, and K rewards.
    """

    tree: Tree  # R <= N trees
    cond: Conditioning  # P rows, this process's prompts
    prompts: tuple[str, ...]  # P
    metadata: tuple[dict, ...]  # P
    images: Tensor  # (R * l, 3, H, W) fp32 in [0, 1]; none from an offline data set
    trees: Tensor  # (R,) long, places among the N trees
    scores: Tensor  # (G, K), NaN: missing or not applicable
    applicable: Tensor  # (G, K) bool
    names: tuple[str, ...]  # K
    weights: Tensor  # (K,)
    reward: Tensor  # (G,), the scores' weighted sum, NaN where invalid
    valid: Tensor  # (G,) bool
    group: Tensor  # (G,) long
    log_prob: Tensor  # (N, n)
    seed: int  # of random numbers in training
    explored: Explored | None = None  # of a first stage; nothing of it is learned from
    # By prompts.book before this rollout, of each image's prompt; None without a book.
    expected_reward: Tensor | None = None  # (G,) float64
    expected_failures: Tensor | None = None  # (G,) float64, the share of its images that fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Transitions:
    """Denoising steps to learn from: N parents, each seen by the network once, and E edges.

    Latents and means stay in the rollout's trees; a batch holds indices into them, on the CPU.
    `part` sends indices and numbers of a micro-batch to the latents' device, where `x`, `x_next`
    and `mean_old` are gathered at each access.
    """

    latents: Tensor  # (M, *latent), of the rollout's nodes
    means: Tensor  # (L, *latent), of the rollout's trained edges
    node: Tensor  # (N,) long, index into the M
    sigma: Tensor  # (N,)
    prompt: Tensor  # (N,) long, index into `cond`
    group: Tensor  # (N,) long, the same numbers on every process
    parent: Tensor  # (E,) long, ascending, index into the N
    child: Tensor  # (E,) long, index into the M
    edge: Tensor  # (E,) long, index into the L
    sigma_next: Tensor  # (E,)
    g: Tensor  # (E,)
    advantage: Tensor  # (E,)
    weight: Tensor  # (E,), of the edge in the loss
    pull: Tensor  # (E,), of the edge in the KL penalty
    step: Tensor  # (E,) long, index of the parent's sigma
    cond: Conditioning  # P rows
    no_advantage: float  # share of the rollout's trained edges whose advantage is 0
    rows: int = 0  # of each call of the network in the rollout
    at_once: int = 0

    @property
    def x(self) -> Tensor:
        """(N, *latent)."""
        return self.latents[send(self.node, self.latents.device)]

    @property
    def x_next(self) -> Tensor:
        """(E, *latent)."""
        return self.latents[send(self.child, self.latents.device)]

    @property
    def mean_old(self) -> Tensor:
        """(E, *latent), of the step by the policy that sampled."""
        return self.means[send(self.edge, self.means.device)]

    def __len__(self) -> int:
        """E, the number of edges: what losses average over."""
        return len(self.parent)

    def take(self, rows: Tensor) -> "Transitions":
        """Return parents `rows` (N',) long, ascending, with all their edges."""
        place = torch.full((len(self.node),), -1)
        place[rows] = torch.arange(len(rows))
        parent = place[self.parent]
        edges = parent >= 0
        per_edge = ("child", "edge", "sigma_next", "g", "advantage", "weight", "pull", "step")
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in ("node", "sigma", "prompt", "group")},
            **{name: getattr(self, name)[edges] for name in per_edge},
            parent=parent[edges],
        )

    def metrics(self) -> Metrics:
        """Return the cost of one pass over the rows, and the share of edges without advantage."""
        return {
            "tree/train_forwards": torch.tensor(float(len(self.node))),
            "tree/no_advantage": torch.tensor(self.no_advantage),
        }

    def updates(self, count: int) -> list["Transitions"]:
        """Deal whole groups in turn to `count` parts, for as many optimizer steps."""
        return [self.take((self.group % count == i).nonzero().squeeze(1)) for i in range(count)]

    def units(self) -> list[int]:
        """Return a forward for each parent, whose edges stay together."""
        return [1] * len(self.node)

    def part(self, first: int, last: int) -> "Transitions":
        """Return the parents from `first` to before `last`, on the latents' device.

        `group` and `step` stay on the CPU.
        """
        part, device = self.take(torch.arange(first, last)), self.latents.device
        names = (
            "node", "sigma", "prompt", "parent", "child", "edge", "sigma_next", "g", "advantage",
            "weight", "pull",
        )  # fmt: skip
        return replace(part, **{name: send(getattr(part, name), device) for name in names})


def transitions(
    tree: Tree,
    advantage: Tensor,
    keep: Tensor,
    group: Tensor,
    cond: Conditioning,
    weight: Tensor | None = None,
    pull: Tensor | None = None,
) -> Transitions:
    """Gather the trained edges that are kept under their parents, in the tree's order.

    Parents come level by level, tree by tree, as the sampler batched them: a micro-batch of the
    rollout's size sees the same rows.

    Args:
        advantage, keep: (R, e) on the CPU; keep is bool.
        group: (R,) long.
        weight: (e,), None for ones.
        pull: (R, e), None for ones.
    """
    trees, nodes = tree.x.shape[:2]
    g, sigmas, prompt = tree.g.cpu(), tree.sigmas.cpu(), tree.prompt.cpu()
    owner, column = keep.nonzero(as_tuple=True)
    child = tree.edge[column]
    parent = tree.parent[child]
    if tree.twin is not None:  # the network sees equal parents once, with the edges of all
        parent = tree.twin[owner, parent]
    key = ((tree.move[parent] + 1) * trees + owner) * nodes + parent
    unique, inverse = key.unique(return_inverse=True)
    order = inverse.argsort(stable=True)
    owner, column, child, parent = (t[order] for t in (owner, column, child, parent))
    of, node = unique // nodes % trees, unique % nodes
    return Transitions(
        latents=tree.x.flatten(0, 1),
        means=tree.mean_old.flatten(0, 1),
        node=of * nodes + node,
        sigma=sigmas[tree.step[node]],
        prompt=prompt[of],
        group=group[of],
        parent=inverse[order],
        child=owner * nodes + child,
        edge=owner * len(tree.edge) + column,
        sigma_next=sigmas[tree.step[child]],
        g=g[child],
        advantage=advantage[owner, column],
        weight=(torch.ones_like(g[tree.edge]) if weight is None else weight)[column],
        pull=(torch.ones_like(advantage) if pull is None else pull)[owner, column],
        step=tree.step[parent],
        cond=cond,
        no_advantage=(advantage == 0).double().mean().item() if advantage.numel() else 0.0,
        rows=tree.rows,
    )
