"""What is added touches one file: an objective, a reward, a recipe; and one line of a table."""

import ast
from pathlib import Path
from typing import get_args

import torch

import flowrl
from flowrl.assembly.learner import ProvidedObjects, build_learner
from flowrl.config import load_config
from flowrl.config.objectives import Objective
from flowrl.trees.presets import PRESETS
from flowrl.utils.distributed import Runtime

PACKAGE = Path(flowrl.__file__).parent


def test_a_kind_of_objective_or_tree_is_named_in_its_options_alone():
    """So that a new one is its file and its options, and no table elsewhere knows it."""
    kinds = {section.model_fields["kind"].default for section in get_args(get_args(Objective)[0])}
    kinds |= PRESETS.keys()
    kinds -= {"custom", "grpo", "ode", "dpo", "kto"}  # defaults; votes are learned by the last two
    assert len(kinds) > 25
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name + "/" + path.name in ("config/objectives.py", "trees/presets.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            assert not (isinstance(node, ast.Constant) and node.value in kinds), (path, node.value)


OBJECTIVE = """
from flowrl.config.objectives import AdvantageOptions, NoisingOptions
from flowrl.objectives.advantage import image_advantages
from flowrl.objectives.base import Needs
from flowrl.objectives.batches import Endpoints
from flowrl.objectives.noising import noise_images


class Toy:
    needs = Needs(states="endpoints")

    def __init__(self, count):
        self.noising = NoisingOptions(count=count)

    def prepare(self, rollout):
        signal, valid = image_advantages(rollout, AdvantageOptions())
        return Endpoints.from_rollout(
            rollout, signal, valid, forwards=self.noising.count, compared="image"
        )

    def loss(self, models, batch):
        points = noise_images(batch, self.noising)
        error = points.error(points.velocity(models.policy)).mean(1)
        return (batch.signal * error).mean(), {}
"""


REWARD = """
def redness(images, prompts, metadata):
    return images[:, 0].mean((1, 2))
"""


RECIPE = """
pipeline: {device: cpu, max_sequence_length: 12}
lora: {rank: 2, alpha: 2}
prompts: {train: "tiny:colors:train"}
rollout:
  {tree: {kind: ode}, prompts_per_iteration: 2, group_size: 2, num_inference_steps: 2}
objective: {kind: custom, target: "toy_objective:Toy", args: {count: 2}}
rewards: [{name: "toy_reward:redness"}]
"""


def test_a_toy_objective_reward_and_recipe_are_one_file_each_and_train(
    load_tiny, tmp_path, monkeypatch
):
    files = {"toy_objective.py": OBJECTIVE, "toy_reward.py": REWARD, "toy.yaml": RECIPE}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(tmp_path / "toy.yaml")
    learner = build_learner(config, Runtime(device="cpu"), ProvidedObjects(pipeline=load_tiny()))
    before = [p.clone() for p in learner.policy.parameters()]
    rollout, _ = learner.iterate(0)
    after = learner.policy.parameters()
    assert rollout.names == ("toy_reward:redness",) and rollout.scores.isfinite().all()
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
