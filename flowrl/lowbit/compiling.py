"""torch.compile for networks whose weights change in place, and whether that compiled anew."""

from torch import nn


def compile_network(network: nn.Module, backend: str = "inductor") -> nn.Module:
    """The same module, compiled at its first call for each shape it is given (dynamic=False).

    Names, attributes and addresses stay, so that weights can be written in place afterwards.
    backend: of torch.compile; "aot_eager" traces and guards alike but generates no code.
    """
    network.compile(dynamic=False, backend=backend)
    return network


def recompilations() -> int:
    """Graphs compiled in this process so far.

    Two equal readings, the first after the network has seen each of its shapes: nothing was
    compiled in between.
    """
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
