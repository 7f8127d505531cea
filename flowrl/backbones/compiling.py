"""`torch.compile` of a transformer's repeated blocks, for sampling and learning.

Blocks of one class share their graphs, so that compiling takes the time of a few blocks and not of
the whole network. There is a graph for each kind of block, shape of a batch, adapter in use, and
with and without gradients.
"""

import torch
from torch import nn

GRAPHS = 64  # of one class of blocks, at least; torch's own limit is 8
# By the names of torch's older versions too.
LIMIT_NAMES = ("recompile_limit", "cache_size_limit")
FAIL_NAMES = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")


def compile_blocks(network: nn.Module, backend: str = "inductor", *, graphs: bool = False) -> None:
    """Compile the blocks that a network holds in lists, in place, or all of it where it has none.

    Each is compiled at its first call for each shape (dynamic=False). Weights can still be written
    in place, and adapters switched. Raises torch's limit of graphs in this process to at least
    GRAPHS; beyond it torch raises an error.

    Args:
        backend: of torch.compile; "aot_eager" traces and guards alike but generates no code.
        graphs: replay each block as a CUDA graph on a GPU; not a network without such lists, whose
            velocity would lie in memory that the next step writes over. See `begin_step`.
    """
    _limit_graphs()
    lists = (child for child in network.children() if isinstance(child, nn.ModuleList))
    blocks = [block for blocks in lists for block in blocks]
    mode = "reduce-overhead" if graphs and blocks else None
    for block in blocks or [network]:
        block.compile(dynamic=False, backend=backend, mode=mode)
    if mode:
        begin_step()  # from the first mark on, steps end at marks and not at each block


def begin_step() -> None:
    """Let CUDA graphs write over what blocks computed before, activations for backwards too."""
    torch.compiler.cudagraph_mark_step_begin()


def compiled_graphs() -> int:
    """Return the number of graphs compiled in this process so far.

    Graphs beyond torch's limit are not compiled, but raise, see `flowrl.errors.as_failure`.
    """
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _limit_graphs() -> None:
    """Raise torch's limit of graphs, which all networks of a class share, copies too.

    Beyond it torch computes without compiling and only logs that, unless it is set to fail.
    """
    from torch._dynamo import config

    limit = next(name for name in LIMIT_NAMES if hasattr(config, name))
    setattr(config, limit, max(GRAPHS, getattr(config, limit)))
    fail = next((name for name in FAIL_NAMES if hasattr(config, name)), None)
    if fail is not None and not config.suppress_errors:  # torch refuses both at once
        setattr(config, fail, True)
