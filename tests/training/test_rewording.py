"""Training with a refiner: which words are encoded, scored and learned from."""

import pytest
import torch
from crashes import SMALLEST

from flowrl.backbones.policy import POLICY
from flowrl.prompts.refiner import RefinerOptions, Wording
from flowrl.prompts.templates import TemplateRefiner
from flowrl.sampling.rewording import Rewording
from flowrl.training.loop import train
from flowrl.training.tracking import read_metrics
from flowrl.utils.distributed import Runtime

SMALL = SMALLEST | {"prompts_per_iteration": 2, "group_size": 3, "tree": {"kind": "flow_grpo"}}


@pytest.fixture
def learner_with(make_learner):
    def make(refiner, **changes):
        prompts = {"train": "tiny:color_attr:train", "refiner": refiner}
        return make_learner(rollout=SMALL, prompts=prompts, **changes)

    return make


def test_where_all_trees_have_their_own_words_no_bit_of_a_run_changes(learner_with):
    weights, kept = [], []
    for refiner in (None, {"own_words": 3}, {"own_words": 0}):
        learner = learner_with(refiner)
        metrics = [learner.iterate(iteration)[1] for iteration in range(2)]
        weights.append(learner.policy.weights(POLICY))
        kept.append("refiner/distinct" in metrics[1])
        if refiner == {"own_words": 3}:
            start = TemplateRefiner(RefinerOptions())
            state, at_start = learner.rewording.state_dict(), start.state_dict()
            assert all(map(torch.equal, state["logits"], at_start["logits"]))
            assert not state["optimizer"]["state"]
    assert all(map(torch.equal, weights[0], weights[1])) and kept == [False, False, True]
    assert not all(map(torch.equal, weights[0], weights[2]))


def test_each_tree_is_learned_from_with_the_words_it_was_sampled_with(learner_with):
    scored = []

    def reward(images, prompts, metadata):
        scored.extend(prompts)
        return images.mean((1, 2, 3)).tolist()

    learner = learner_with({"own_words": 1}, rewards={"bright": reward})
    request = learner.source.request(0, learner.source.plan(0))
    records = learner.source.prompts.at(0)
    rollout = learner.iterate(0)[0]
    assert set(scored) == {record.text for record in records}  # never a wording
    texts = [request.prompts[i].encoded for i in request.prompt.tolist()]
    uids = [request.prompts[i].uid for i in request.prompt.tolist()]
    assert uids == [record.uid for record in records for _ in range(3)]
    assert texts[::3] == [record.text for record in records]
    assert len(set(texts)) > 2
    encoded = learner.source.generator.text_cache([request.prompts[i] for i in request.prompt])
    for name, tensor in rollout.cond.take(rollout.tree.prompt).tensors.items():
        assert torch.equal(tensor, encoded.tensors[name])
    # The ratio's first pass sees the velocities that sampled, so that any other words raise.
    assert learner.iterate(1)[1]["policy/ratio_error_max"] < 1e-3


class Fixed(TemplateRefiner):
    """Draws what it was given, and remembers what it was told."""

    def propose(self, records, count, key):
        forms = [1.0, 0.0, 1.0][:count]
        return [
            [Wording(text=str(i), format=f, draw=(0, 0, i)) for i, f in enumerate(forms)]
            for _ in records
        ]

    def learn(self, wordings, advantages):
        self.advantages = advantages
        return {}


def test_advantages_are_the_z_scores_of_the_seed_means_with_the_form_over_all_trees(learner_with):
    sampler = learner_with(None).source
    request = sampler.request(0, sampler.plan(0))
    refiner = Fixed(RefinerOptions())
    rewording = Rewording(refiner=refiner, own_words=1, seed=0, runtime=Runtime(device="cpu"))
    rewording.reword(request, 3)
    nan = float("nan")
    reward = torch.tensor([[[1.0, 3.0], [0.0, 2.0], [5.0, nan]], [[nan, nan], [1.0, 1.0], [2, 2]]])
    rewording.learn(reward.flatten())
    # Two wordings, one with its form: the prompt's own words count as half.
    first = torch.tensor([2.5, 2.0, 5.0], dtype=torch.float64)
    second = torch.tensor([2.0, 2.0], dtype=torch.float64)
    wanted = [
        (x - x.mean()) / (x.std(correction=0) + 1e-4) for x in (first, second)
    ]  # fmt: skip
    torch.testing.assert_close(
        torch.tensor(refiner.advantages, dtype=torch.float64), torch.cat([wanted[0][1:], wanted[1]])
    )


def test_a_run_learns_the_words_that_its_reward_likes(learner_with):
    learner = learner_with({"own_words": 1, "lr": 0.3}, optim={"lr": 1e-9})
    sampler, refiner = learner.source, learner.rewording.refiner
    for iteration in range(25):
        request = sampler.request(iteration, sampler.plan(iteration))
        texts = [request.prompts[i].encoded for i in request.prompt.tolist()]
        learner.rewording.learn(torch.tensor([float("exactly" in text) for text in texts]))
    record = sampler.prompts.at(0)[0]
    assert (
        refiner.chances()[0][3] > 0.9 and "exactly" in learner.rewording.best([record])[0].encoded
    )


def test_an_evaluation_measures_the_refiners_words_without_and_with_the_lora(make_run):
    _, learner, run = make_run(
        rollout=SMALL, prompts={"train": "tiny:color_attr:train", "refiner": {}},
        run={"iterations": 2},
        evaluation={"prompts": "tiny:colors:test", "num_images": 2, "every": 1},
    )  # fmt: skip
    with run.session():
        train(learner, run, iterations=2)
    names = {name for row in read_metrics(run.folder) for name in row}
    assert {"eval/refiner/brightness", "eval/both/brightness"} <= names
