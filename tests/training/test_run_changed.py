"""A run that goes on under a changed recipe, one that a reward stops, and what is left after."""

import pytest

from flowrl.training.evaluate import Evaluation
from flowrl.training.loop import train

SMALL = {
    "rollout": {
        "prompts_per_iteration": 2,
        "group_size": 2,
        "num_inference_steps": 3,
        "batch_size": 4,
    },
    "evaluation": {"prompts": "tiny:colors:test", "num_images": 2, "num_inference_steps": 2},
}


@pytest.fixture
def small(make_run):
    return lambda resume=None, **changes: make_run(resume, **SMALL | changes)[1:]


def trained(learner, run, iterations: int) -> dict:
    """The state that the run leaves."""
    with run.session():
        train(learner, run, iterations=iterations)
    return run.checkpoints.newest()[1]


def test_it_steps_as_its_recipe_now_says(small):
    state = trained(*small(), iterations=2)
    learner, run = small(state, optim={"lr": 1e-7, "weight_decay": 0.0})
    with run.session():
        run.begin(learner.policy, learner.optimizer)
    (group,) = learner.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (1e-7, 0.0)
    assert learner.optimizer.state_dict()["state"]  # the moments are the checkpoint's


def test_the_base_is_drawn_anew_when_it_is_evaluated_otherwise(small):
    state = trained(*small(), iterations=1)
    learner, run = small(state)
    first = run.evaluation_path(0).stat().st_mtime_ns
    trained(learner, run, iterations=1)
    assert run.evaluation_path(0).stat().st_mtime_ns == first
    changed = SMALL["evaluation"] | {"num_images": 3}
    learner, run = small(state, evaluation=changed)
    trained(learner, run, iterations=1)
    base = Evaluation.load(run.evaluation_path(0))
    assert len(base.scores) == 3 and base.key == run.evaluator.key


def test_a_warmed_up_learning_rate_rises_evenly_and_then_falls(small):
    learner, _ = small(optim={"lr": 1.0, "warmup": 3})
    assert [learner.optim.lr_at(i, learner.iterations) for i in range(5)] == [0.25, 0.5, 0.75, 1, 1]
    falling, _ = small(optim={"lr": 1.0, "schedule": "linear", "warmup": 1})
    rates = [falling.optim.lr_at(i, falling.iterations) for i in (0, 1, 3, 4)]
    assert rates == [0.5, 0.75, 0.25, 0.0]
