"""Steps of earlier iterations that are learned from again, while they still tell good from bad."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from flowrl.trajectory import Conditioning, Transitions
from flowrl.utils.distributed import Runtime
from flowrl.utils.files import parse_state, state_bytes


@dataclass(slots=True, kw_only=True)
class Replay:
    """Keeps the steps that have an advantage, each process those that it sampled.

    A step keeps its advantage and the mean of the policy that sampled it, hence the ratio of
    today's policy to that one.
    """

    iterations: int  # that steps are kept for
    runtime: Runtime
    # On the CPU, by iteration, the last one last; of several processes after a resume with fewer.
    _steps: list[list[Transitions]] = field(init=False, default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether nothing was kept yet, on any process."""
        return not self._steps

    def join(self, steps: Transitions) -> Transitions:
        """Return the steps of an iteration, and after them those that are kept."""
        earlier = [part for parts in self._steps for part in parts if len(part)]
        return Transitions.cat([steps, *earlier])

    def keep(self, steps: Transitions) -> None:
        """Keep the steps of an iteration that have an advantage, and forget the oldest."""
        self._steps = [*self._steps, [steps.telling()]][-self.iterations :]

    # --- a checkpoint has the steps of all processes, those of each as the bytes of a file --------

    def state_dict(self) -> dict[str, Any]:
        """Return what all processes keep. All call it together."""
        states = [[_state_of(Transitions.cat(parts))] if parts else [] for parts in self._steps]
        data = torch.frombuffer(bytearray(state_bytes(states)), dtype=torch.uint8)
        sizes = self.runtime.gather(torch.tensor([len(data)])).tolist()
        return {"processes": list(self.runtime.gather(data).split(sizes))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a process's part; of other numbers of processes, all parts in turn."""
        files = [data.numpy().tobytes() for data in state["processes"]]
        states = [parse_state(data, Path("replay")) for data in files]
        here = states[self.runtime.rank :: self.runtime.world_size]
        self._steps = [
            [_steps_of(part) for process in here for part in process[number]]
            for number in range(len(states[0]))
        ]


def _state_of(steps: Transitions) -> dict[str, Any]:
    state = {f.name: getattr(steps, f.name) for f in fields(steps)}
    return state | {"cond": dict(steps.cond.tensors)}


def _steps_of(state: dict[str, Any]) -> Transitions:
    cond = Conditioning(tensors=state.pop("cond"))
    return Transitions(**state, cond=cond)
