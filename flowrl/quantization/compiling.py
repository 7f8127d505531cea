"""torch.compile for networks whose weights change in place, and whether that compiled anew."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from flowrl.errors import UserError

GRAPHS = 64  # of one class of networks, at least; torch's own limit is 8
# By the names of torch's older versions too.
LIMIT = ("recompile_limit", "cache_size_limit")
FAIL = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")
ERRORS = ("FailOnRecompileLimitHit", "FailOnCacheLimitHit")


def compile_network(network: nn.Module, backend: str = "inductor") -> nn.Module:
    """The same module, compiled at its first call for each shape it is given (dynamic=False).

    Names, attributes and addresses stay, so that weights can be written in place afterwards.
    backend: of torch.compile; "aot_eager" traces and guards alike but generates no code.
    Sets torch's limit of graphs in this process to GRAPHS at least, and has it stop there.
    """
    _limit_graphs()
    network.compile(dynamic=False, backend=backend)
    return network


def recompilations() -> int:
    """Graphs compiled in this process so far.

    Two equal readings, the first after the network has seen each of its shapes: nothing was
    compiled in between. What torch would not compile any more for its limit of graphs, and computes
    without, is not among them; that raises an error, see `within_limit`.
    """
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


@contextmanager
def within_limit() -> Iterator[None]:
    """Where compiled networks are called: more graphs than torch's limit are a UserError."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ not in ERRORS:
            raise
        raise UserError(
            "the network was compiled for as many shapes of batches as torch allows: choose a "
            "rollout.batch_size that all numbers of pictures are multiples of, or set "
            "rollout.compile to false"
        ) from error


def _limit_graphs() -> None:
    """All networks of a class share the limit, twins of one policy too. Beyond it torch computes
    without compiling and only logs that, unless it is told to fail."""
    from torch._dynamo import config

    limit = next(name for name in LIMIT if hasattr(config, name))
    setattr(config, limit, max(GRAPHS, getattr(config, limit)))
    fail = next((name for name in FAIL if hasattr(config, name)), None)
    if fail is not None and not config.suppress_errors:  # torch refuses both at once
        setattr(config, fail, True)
