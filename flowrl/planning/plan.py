"""A recipe before it is run: who does what, how much work it is, and whether it fits.

Nothing is loaded, downloaded or allocated: networks are built on the meta device.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowrl.build.objective import build_objective
from flowrl.build.work_split import Geometry, solve
from flowrl.config import Config
from flowrl.errors import UserError
from flowrl.functional.sde import KERNELS
from flowrl.objectives.base import Needs
from flowrl.planning.memory import Footprint, footprints, peak
from flowrl.planning.model_specs import Size
from flowrl.planning.plan_counts import Kind, RunWork, count_run
from flowrl.planning.plan_rewards import compares_groups, reward_bytes
from flowrl.planning.plan_setup import build_setup
from flowrl.planning.plan_size import size_for
from flowrl.planning.suggestions import Remedies, find_remedies
from flowrl.planning.weights import AUTO

UNITS = {"M": 10**6, "G": 10**9, "T": 10**12}
BINARY = {"MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """geometry: of the first iteration. transitions: it learns from nodes of trees, not from
    pictures. phases: of the GPU that has most to do, in the iterations that need most; none where
    the pipeline's shapes are not known, and then `unknown` says why. memory: bytes of a GPU, None
    where nobody named any. remedies: where it does not fit. notes: what was assumed or left out.
    """

    geometry: Geometry
    transitions: bool
    work: RunWork
    phases: tuple[Footprint, ...]
    unknown: str
    memory: int | None
    remedies: Remedies | None
    notes: tuple[str, ...]

    @property
    def peak(self) -> Footprint | None:
        """The phase that needs most."""
        return peak(list(self.phases)) if self.phases else None

    @property
    def fits(self) -> bool | None:
        """None where it is not known, or nobody asked."""
        if self.peak is None or self.memory is None:
            return None
        return self.peak.total <= self.memory


def make_plan(config: Config, *, gpus: int = 1, memory: int | None = None) -> Plan:
    """memory: bytes of each GPU. Raises UserError where an iteration cannot be dealt to so many."""
    needs = build_objective(config.objective, KERNELS[config.rollout.kernel]).needs
    work = count_work(config, needs)
    shares = [solve(load, gpus) for load in work.loads]
    geometry = shares[0]
    size, unknown = _size(config)
    phases: tuple[Footprint, ...] = ()
    remedies = None
    if size is not None:
        phases = _phases(config, size, needs, work.kinds, gpus)
        if memory is not None and peak(list(phases)).total > memory:
            remedies = find_remedies(
                config, lambda c: peak(list(_phases(c, size, needs, work.kinds, gpus))), memory
            )
    return Plan(
        geometry=geometry,
        transitions=needs.states == "transitions",
        work=work,
        phases=phases,
        unknown=unknown,
        memory=memory,
        remedies=remedies,
        notes=tuple(_notes(config, needs)),
    )


def count_work(config: Config, needs: Needs) -> RunWork:
    """See `flowrl.planning.plan_counts`."""
    groups = [(entry, compares_groups(entry)) for entry in config.rewards]
    return count_run(
        config,
        needs,
        whole_groups=any(group for _, group in groups),
        whole_trained=any(group and entry.weight and not entry.held_out for entry, group in groups),
    )


def _phases(
    config: Config, size: Size, needs: Needs, kinds: Sequence[Kind], gpus: int
) -> tuple[Footprint, ...]:
    """Of each phase, the iteration that needs most. kinds: of this recipe, or of one that differs
    in nothing that changes them but optim.micro_batch."""
    found: dict[str, Footprint] = {}
    for kind in kinds:
        geometry = solve(replace(kind.load, micro_batch=config.optim.micro_batch), gpus)
        setup = build_setup(config, size, needs, geometry, kind.plan, kind.candidates)
        for one in footprints(size, setup):
            found[one.phase] = peak([found.get(one.phase, one), one])
    return tuple(found.values())


def _size(config: Config) -> tuple[Size | None, str]:
    """The pipeline's shapes, or why nobody knows them. Raises UserError for another family's."""
    path, family = config.pipeline.path, config.pipeline.backbone
    try:
        size = size_for(path)
    except UserError as error:
        return None, str(error)
    if ":" not in family and size.family != family:
        raise UserError(
            f"pipeline.path is {path}, of the family {size.family}, but pipeline.backbone is "
            f"{family}: set both alike"
        )
    return size, ""


def _notes(config: Config, needs: Needs) -> Sequence[str]:
    found = []
    unknown = [e.label or e.name for e in config.rewards if reward_bytes(e) is None]
    if unknown:
        found.append(f"The weights of {', '.join(unknown)} are not counted: nobody knows them.")
    explore = config.rollout.explore
    if "auto" in (config.pipeline.precision, explore and explore.precision):
        found.append(f"precision auto is counted as the larger of {' and '.join(AUTO)}.")
    if needs.reward_grad:
        found.append("The gradient through the decoder and the reward is not counted.")
    store = config.rollout.store
    if store is not None and store.path is not None:
        found.append("Groups come from a store; the rollout's memory is that of drawing them.")
    return found


def parse_memory(text: str) -> int:
    """ "24GB", "80G" (10^9 bytes) or "24GiB" (2^30) -> bytes. Raises UserError for other text.

    GPUs sold with 24 GB have some more than 24 * 10^9 bytes, of which their driver keeps a part.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper().removesuffix("B") if match else None
    if match is None or unit is None or unit not in UNITS | BINARY or not float(match[1]):
        raise UserError(f"--memory is {text!r}, expected a size such as 24GB, 80G or 24GiB")
    return int(float(match[1]) * (UNITS | BINARY)[unit])


def memory_class(name: str) -> int | None:
    """Of the GPUs that a recipe says in its name it is for: "...-24gb"; None where it does not."""
    match = re.search(r"-([0-9]+)gb$", name.removesuffix(".yaml").lower())
    return int(match[1]) * UNITS["G"] if match else None
