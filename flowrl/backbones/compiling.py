"""`torch.compile` of a transformer's repeated blocks, for sampling and learning.

Blocks of one class share their graphs, so that compiling takes the time of a few blocks and not of
the whole network. There is a graph for each kind of block, shape of a batch, adapter in use, and
with and without gradients.
"""

import torch
from torch import nn

GRAPHS = 64  # of one class of blocks, at least; torch's own limit is 8


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


def _limit_graphs() -> None:
    """Raise torch's limit of graphs, which all networks of a class share, copies too.

    Beyond it torch computes without compiling and only logs that, unless it is set to fail: see
    `flowrl.errors.as_failure`.
    """
    from torch._dynamo import config

    # By their first names, which torch's older versions know too.
    config.cache_size_limit = max(GRAPHS, config.cache_size_limit)
    if not config.suppress_errors:  # torch refuses both at once
        config.fail_on_cache_limit_hit = True
