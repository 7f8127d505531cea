"""A student learns the velocity of each prompt's teacher, and of no other."""

from dataclasses import replace

import pytest
import torch
from policies import disturb
from toy_chains import gradient
from toy_images import PER_IMAGE, images, moved
from toy_policy import Toy

from flowrl.backbones.lora_files import save_lora
from flowrl.backbones.policy import POLICY
from flowrl.config.objectives import DistillOptions
from flowrl.errors import UserError
from flowrl.objectives.base import Models
from flowrl.objectives.noising import noise_images


def distill(*wheres):
    teachers = [{"lora": f"teacher-{i}", "where": where} for i, where in enumerate(wheres)]
    return DistillOptions.model_validate({"teachers": teachers, "noising": PER_IMAGE}).build()


def rollout(*metadata):
    return replace(images(), metadata=metadata)


COUNTING, COLORS = {"tag": "counting", "n": 3}, {"tag": "colors"}


def test_each_prompt_learns_from_the_first_teacher_that_it_matches():
    toy, teachers = Toy(), [moved(Toy(), 0.05), moved(Toy(), 0.3)]
    objective = distill({"tag": "colors"}, {})
    batch = objective.prepare(rollout(COUNTING, COLORS))
    loss, _ = objective.loss(Models(policy=toy, teachers=teachers), batch)
    points = noise_images(batch, PER_IMAGE)
    v, (first, second) = points.velocity(toy), map(points.velocity, teachers)
    half = len(v) // 2  # of the prompt about counting, which no teacher of colours has
    expected = torch.cat(((v - second)[:half], (v - first)[half:])).square().mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, toy), gradient(expected, toy))


def test_a_prompt_without_a_teacher_is_refused_before_the_run(make_learner):
    teachers = [{"lora": None, "where": {"tag": "none of them"}}]
    with pytest.raises(UserError, match=r"no teacher .*'tag'.*objective.teachers"):
        make_learner(
            rollout={"tree": {"kind": "ode"}}, objective={"kind": "distill", "teachers": teachers}
        )


def test_a_student_comes_to_its_teacher_on_its_own_images(make_learner, tmp_path):
    taught = make_learner().policy
    disturb(taught)
    lora = save_lora(taught.backbone.pipeline, tmp_path, adapter=POLICY)
    learner = make_learner(
        rollout={"tree": {"kind": "ode"}},
        objective={"kind": "distill", "teachers": [{"lora": str(lora)}]},
        optim={"lr": 1e-2},
    )
    distances = [learner.iterate(i)[1]["policy/teacher_distance"] for i in range(20)]
    assert distances[-1] < 0.5 * distances[0]
