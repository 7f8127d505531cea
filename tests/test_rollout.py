"""A picture depends on its name alone: not on its batch, its neighbours or its process."""

from dataclasses import replace

import pytest
import torch

from flowrl.functional.sde import KERNELS
from flowrl.prompts import load_prompts
from flowrl.reward import RewardSpec, score
from flowrl.rollout import (
    Stopwatch,
    decode,
    draw,
    gather_result,
    group_request,
    judge,
    occurrences,
)
from flowrl.samplers.schedule import Schedule
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
    schedule = Schedule(sigmas=learner.backbone.sigmas(3), kernel=KERNELS["flow_sde"], level=0.7)
    generator = torch.Generator().manual_seed(0)
    for p in learner.policy.parameters():  # away from the fresh adapter, which changes nothing
        p.data += 0.05 * torch.randn(p.shape, generator=generator)

    @torch.no_grad()
    def images(request, batch_size=6, plan=PLAN):
        backbone, policy = learner.backbone, learner.policy
        tree, _ = draw(
            backbone, policy.velocity, learner.encode, request, plan, schedule, batch_size
        )
        return tree, decode(backbone, tree.leaves(), batch_size)

    return images


def test_pictures_do_not_depend_on_their_order(sample):
    request = request_of()
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    _, images = sample(request)
    tree, moved = sample(request.take(order))
    torch.testing.assert_close(moved, images[order], rtol=0, atol=ROUNDING)
    assert not torch.allclose(images[0], images[1], atol=1e-3)


@pytest.mark.parametrize("size", [1, 4])
def test_pictures_do_not_depend_on_the_batch_size(sample, size):
    (tree, images), (small_tree, small) = sample(request_of()), sample(request_of(), size)
    torch.testing.assert_close(small, images, rtol=0, atol=ROUNDING)
    assert torch.equal(small_tree.parent, tree.parent)
    assert torch.equal(small_tree.edge, tree.edge)


@pytest.mark.parametrize("rows", [[0, 1, 2], [3, 4, 5], [5]])
def test_a_share_holds_the_pictures_of_the_whole(sample, rows):
    _, images = sample(request_of())
    _, share = sample(request_of().take(torch.tensor(rows)))
    torch.testing.assert_close(share, images[rows], rtol=0, atol=ROUNDING)


def test_noise_is_that_of_its_prompt_whatever_stands_beside_it():
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


def test_siblings_share_their_first_noise_when_asked_and_only_that():
    request = request_of(plan=replace(PLAN, same_noise=True))
    first, later = (request.noise((), 0, role, SHAPE) for role in ("init", "step"))
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])
    assert not torch.equal(later[0], later[1])


def test_a_prompt_that_stands_there_twice_is_two_groups_with_noise_of_their_own():
    request = request_of([RECORDS[0], RECORDS[1], RECORDS[0]])
    assert request.root.tolist() == [0, 1, 0, 1, 2, 3]
    assert occurrences([RECORDS[0], RECORDS[1], RECORDS[0]]) == [0, 0, 1]
    noise = request.noise((), 0, "init", SHAPE)
    assert len(noise.flatten(1).unique(dim=0)) == 6


def test_taking_rows_keeps_only_the_prompts_they_use():
    part = request_of().take(torch.tensor([5, 1]))
    assert [part.prompts[i].uid for i in part.prompt] == [RECORDS[2].uid, RECORDS[0].uid]
    assert len(part.prompts) == 2 and part.root.tolist() == [1, 1]


def test_every_picture_is_judged_with_its_own_prompt():
    def length(images, prompts, metadata):
        return [float(len(p)) for p in prompts]

    request = request_of().take(torch.tensor([5, 0]))
    result = judge([RewardSpec(name="length", reward=length)], torch.zeros(2, 3, 4, 4), request)
    assert result.scores[:, 0].tolist() == [len(RECORDS[2].text), len(RECORDS[0].text)]


def test_one_process_keeps_its_scores_as_they_are():
    from flowrl.runtime import Runtime

    spec = RewardSpec(name="mean", reward=lambda images, *_: images.mean((1, 2, 3)))
    result = score([spec], torch.zeros(2, 3, 4, 4), ["a", "b"], [{}, {}])
    assert gather_result(replace(result), Runtime(device="cpu")).scores.tolist() == [[0.0], [0.0]]


def test_a_stopwatch_adds_laps_of_one_name():
    watch = Stopwatch()
    for name in ("a", "b", "a"):
        watch.lap(name)
    assert list(watch.seconds) == ["a", "b"] and min(watch.seconds.values()) >= 0
