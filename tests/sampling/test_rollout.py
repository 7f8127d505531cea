from dataclasses import replace

import pytest
import torch
from policies import disturb

from flowrl.functional.sde import KERNELS
from flowrl.prompts.records import load_prompts
from flowrl.sampling.rollout import (
    Timer,
    decode,
    group_request,
    occurrences,
    sample_request,
    submit_images,
)
from flowrl.sampling.sampler import Schedule
from flowrl.scoring.scorer import Scoring
from flowrl.scoring.spec import RewardSpec
from flowrl.trees.plan import Step, TreePlan

RECORDS = load_prompts("tiny:all:train", limit=3)
SHAPE = (16, 8, 8)


PLAN = TreePlan(2, (Step(noise=True, train=True),) * 2 + (Step(),))


def request_of(records=RECORDS, plan=PLAN, **options):
    return group_request(records, plan, **({"seed": 0, "iteration": 4} | options))


# fp32 rounding of a pixel after some steps and the decoder; other noise moves it by about 1.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def sample(make_learner):
    learner = make_learner()
    schedule = Schedule(
        sigmas=learner.policy.backbone.sigmas(3), kernel=KERNELS["flow_sde"], noise_level=0.7
    )
    disturb(learner.policy, 0.05)  # away from the fresh adapter, which changes nothing

    @torch.no_grad()
    def images(request, batch_size=6, plan=PLAN):
        backbone, policy = learner.policy.backbone, learner.policy
        cond = learner.source.generator.text_cache(request.prompts)
        tree = sample_request(backbone, policy.velocity, cond, request, plan, schedule, batch_size)
        return tree, torch.cat(list(decode(backbone, tree.leaves(), batch_size)))

    return images


def test_images_do_not_depend_on_order_batch_or_share(sample):
    tree, images = sample(request_of())
    assert not torch.allclose(images[0], images[1], atol=1e-3)
    for size in [1, 4]:
        small_tree, small = sample(request_of(), size)
        torch.testing.assert_close(small, images, rtol=0, atol=ROUNDING)
        assert torch.equal(small_tree.parent, tree.parent)
        assert torch.equal(small_tree.edge, tree.edge)
    for rows in [[4, 0, 5, 2, 1, 3], [0, 1, 2], [3, 4, 5], [5]]:
        _, share = sample(request_of().take(torch.tensor(rows)))
        torch.testing.assert_close(share, images[rows], rtol=0, atol=ROUNDING)


def test_noise_is_a_function_of_the_names_of_an_image():
    # Noise is that of its prompt whatever stands beside it.
    alone = request_of(RECORDS[1:2]).noise((), 2, "step", SHAPE)
    among = request_of().noise((), 2, "step", SHAPE)
    assert torch.equal(among[2:4], alone)
    other = [
        request_of(seed=1).noise((), 2, "step", SHAPE),
        request_of(iteration=5).noise((), 2, "step", SHAPE),
        request_of().noise((1,), 2, "step", SHAPE),
        request_of().noise((), 1, "step", SHAPE),
        request_of().noise((), 2, "init", SHAPE),
    ]
    rows = torch.cat([among, *other])
    assert len(rows.flatten(1).unique(dim=0)) == len(rows)
    # Siblings share their first noise when asked and only that.
    request = request_of(plan=replace(PLAN, same_noise=True))
    first, later = (request.noise((), 0, role, SHAPE) for role in ("init", "step"))
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    assert not torch.equal(later[0], later[1])
    # A prompt that stands there twice is two groups with noise of their own.
    request = request_of([RECORDS[0], RECORDS[1], RECORDS[0]])
    assert request.root.tolist() == [0, 1, 0, 1, 2, 3]
    assert occurrences([RECORDS[0], RECORDS[1], RECORDS[0]]) == [0, 0, 1]
    noise = request.noise((), 0, "init", SHAPE)
    assert len(noise.flatten(1).unique(dim=0)) == 6
    # Merged, it is one group of the very same trees.
    merged = request_of([RECORDS[0], RECORDS[1], RECORDS[0]], merge=True)
    assert request.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert merged.group.tolist() == [0, 0, 1, 1, 0, 0]
    assert torch.equal(merged.noise((), 0, "init", SHAPE), noise)
    # Taking rows keeps only the prompts they use.
    part = request_of().take(torch.tensor([5, 1]))
    assert [part.prompts[i].uid for i in part.prompt] == [RECORDS[2].uid, RECORDS[0].uid]
    assert len(part.prompts) == 2 and part.root.tolist() == [1, 1]


def test_rewards_are_given_the_prompts_own_words():
    # Every image is judged with its own prompt.
    def length(images, prompts, metadata):
        return [float(len(p)) for p in prompts]

    request = request_of().take(torch.tensor([5, 0]))
    scoring = Scoring(specs=[RewardSpec(name="length", reward=length)])
    assert len(submit_images(scoring, torch.zeros(4, 3, 4, 4).split(1), request, 2)) == 4
    lengths = [len(RECORDS[2].text), len(RECORDS[0].text)]
    expected = [lengths[0]] * 2 + [lengths[1]] * 2
    assert scoring.result().scores[:, 0].tolist() == expected


def test_a_reward_that_is_only_measured_is_asked_in_rollouts_on_request(make_learner):
    measured = {"name": "compressibility", "held_out": True}
    for change, names in (
        ({}, ("brightness",)),
        ({"when": "both"}, ("brightness", "compressibility")),
        ({"when": "both", "held_out": False, "weight": 0.0}, ("brightness", "compressibility")),
        ({"held_out": False, "weight": 0.0}, ("brightness",)),
        ({"name": "diversity"}, ("brightness", "diversity")),  # evaluations have no groups
    ):
        learner = make_learner(specs=[{"name": "brightness"}, measured | change])
        assert learner.source.collect(0, Timer()).names == names, change
        assert [spec.name for spec in learner.specs][1] in ("compressibility", "diversity")


def test_a_held_out_reward_teaches_nothing(make_learner):
    trained = {"name": "brightness"}
    held_out = {"name": "compressibility", "held_out": True, "when": "both"}
    alone, beside = (make_learner(specs=specs) for specs in ([trained], [trained, held_out]))
    (plain, _), (rollout, metrics) = alone.iterate(0), beside.iterate(0)
    column = rollout.scores[:, rollout.names.index("compressibility")]
    assert metrics["reward/compressibility"] == pytest.approx(column.mean().item())
    assert torch.equal(rollout.reward, plain.reward)
    assert rollout.weights.tolist() == [1, 0]
    for ours, theirs in zip(beside.policy.parameters(), alone.policy.parameters(), strict=True):
        assert torch.equal(ours, theirs)
