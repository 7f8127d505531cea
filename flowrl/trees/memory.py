"""Check before sampling whether a rollout's latents fit into memory."""

import torch

from flowrl.errors import UserError
from flowrl.trees.plan import TreePlan, count

STEP_COPIES = 5  # of the frontier in fp32 within a step: latent, velocity, mean, noise, result


def rollout_bytes(plan: TreePlan, prompts: int, latent: int, itemsize: int) -> int:
    """Return the peak bytes of the trees of `prompts` prompts.

    Nodes take `itemsize` bytes per element twice: stored, and concatenated. Trained edges take
    their fp32 mean twice, stored and batched for training, and their batched parents and children.
    A step computes the whole frontier in fp32.
    latent: elements of one latent.
    """
    c = count(plan).times(prompts)
    stored = 2 * c.nodes * itemsize
    learned = c.trained_edges * (8 + itemsize) + c.train_forwards * itemsize
    return latent * (stored + learned + STEP_COPIES * c.peak_frontier * 4)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that new tensors can have on a device, None where it is unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "cpu":
        import psutil

        return psutil.virtual_memory().available
    return None


def check_memory(
    plan: TreePlan, prompts: int, latent: int, itemsize: int, free: int | None
) -> None:
    """Raise UserError for a rollout of `prompts` prompts in one process that does not fit."""
    needed = rollout_bytes(plan, prompts, latent, itemsize)
    if free is None or needed <= free:
        return
    c = count(plan).times(prompts)
    fitting = free // rollout_bytes(plan, 1, latent, itemsize)
    remedy = (
        f"the nearest rollout.prompts_per_iteration that fits is {fitting} a process"
        if fitting
        else "not even one prompt fits: lower rollout.group_size or rollout.num_inference_steps, "
        "or use a rollout.tree with fewer trained steps"
    )
    raise UserError(
        f"the rollout holds {c.nodes:,} latents and {c.trained_edges:,} trained edges, with up to "
        f"{c.peak_frontier:,} latents at once, which takes {_gib(needed)}, but {_gib(free)} are "
        f"free: {remedy}"
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
