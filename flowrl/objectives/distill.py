"""On-policy distillation: LoRAs as teachers of one student, on the student's own images."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl.config.objectives import DistillOptions
from flowrl.errors import UserError
from flowrl.functional.sde import squared_distance
from flowrl.objectives.base import Models, Needs
from flowrl.objectives.batches import Endpoints
from flowrl.objectives.noising import noise_images
from flowrl.trajectory import Metrics, Rollout


@dataclass(frozen=True)
class Distill:
    """Learn the velocity of each prompt's teacher at the student's images, noised again.

    The squared distance of two velocities is, up to a factor of the noise level, the KL divergence
    of the two policies' steps. Rewards are measured and teach nothing.
    """

    options: DistillOptions

    @property
    def needs(self) -> Needs:
        """Declare the states that `prepare` reads, and the teachers that `loss` calls."""
        loras = tuple(teacher.lora for teacher in self.options.teachers)
        return Needs(states="endpoints", teachers=loras)

    def prepare(self, rollout: Rollout) -> Endpoints:
        """Return the images; the signal is the number of their prompt's teacher."""
        images = torch.ones(len(rollout.reward), dtype=torch.bool)  # rewards or none
        batch = Endpoints.from_rollout(
            rollout, images.float(), images, forwards=self.options.noising.count, compared="image"
        )
        of_prompt = torch.tensor([teacher_of(m, self.options) for m in rollout.metadata])
        return replace(batch, signal=of_prompt[batch.prompt].float())

    def loss(self, models: Models, batch: Endpoints) -> tuple[Tensor, Metrics]:
        """Return the mean squared distance of the student's velocities from the teachers'."""
        points = noise_images(batch, self.options.noising)
        with torch.no_grad():  # of all teachers, as sharded processes must call alike
            taught = torch.stack([points.velocity(teacher) for teacher in models.teachers])
            number = batch.signal.long().repeat_interleave(points.count)
            target = taught[number, torch.arange(len(number), device=number.device)]
        distance = squared_distance(points.velocity(models.policy), target)
        return distance.mean(), {"policy/teacher_distance": distance.detach().mean()}


def teacher_of(metadata: Mapping[str, Any], options: DistillOptions) -> int:
    """Return the number of the first teacher whose `where` matches a prompt's metadata.

    Raises UserError where none does; it is asked of all prompts before the run.
    """
    for number, teacher in enumerate(options.teachers):
        if teacher.where.items() <= metadata.items():
            return number
    raise UserError(
        f"no teacher for a prompt with the metadata {dict(metadata)}: add {{lora: null}} as the "
        "last of objective.teachers, or leave such prompts out"
    )
