"""Whether a rollout's latents fit into memory, told before anything is drawn."""

import torch

from flowrl.errors import UserError
from flowrl.trees.plan import TreePlan, count

STEP_COPIES = 5  # of the frontier in fp32 within a step: latent, velocity, mean, noise, result


def rollout_bytes(plan: TreePlan, prompts: int, latent: int, itemsize: int) -> int:
    """What the trees of `prompts` prompts hold at most, for latents of so many elements.

    Every node is kept in the storage dtype of `itemsize` bytes, and once more as it is joined with
    the others; every trained edge has its mean in fp32, once more when it is learned from, where
    parents and children are gathered too; and a step works on the whole frontier in fp32.
    """
    c = count(plan).times(prompts)
    kept = 2 * c.nodes * itemsize
    learned = c.trained_edges * (8 + itemsize) + c.train_forwards * itemsize
    return latent * (kept + learned + STEP_COPIES * c.peak_frontier * 4)


def free_bytes(device: torch.device) -> int | None:
    """Memory of the device that new tensors can have, None where nobody can tell."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type == "cpu":
        import psutil

        return psutil.virtual_memory().available
    return None


def check_memory(
    plan: TreePlan, prompts: int, latent: int, itemsize: int, free: int | None
) -> None:
    """Raises UserError, with the nearest number of prompts that fits, for a rollout that does not.

    prompts: those of one process.
    """
    needed = rollout_bytes(plan, prompts, latent, itemsize)
    if free is None or needed <= free:
        return
    c = count(plan).times(prompts)
    fitting = free // rollout_bytes(plan, 1, latent, itemsize)
    remedy = (
        f"the nearest rollout.prompts_per_iteration that fits is {fitting} a process"
        if fitting
        else "not even one prompt fits: lower rollout.group_size or rollout.num_inference_steps, or use a "
        "rollout.tree with fewer trained steps"
    )
    raise UserError(
        f"the rollout holds {c.nodes:,} latents and {c.trained_edges:,} trained edges, with up to "
        f"{c.peak_frontier:,} latents at once, which takes {_gib(needed)}, but {_gib(free)} are "
        f"free: {remedy}"
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
