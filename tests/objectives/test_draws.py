from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_images import OBJECTIVES, SIGMAS, compared, images, noising
from toy_policy import Toy

from flowrl.objectives.base import Models
from flowrl.objectives.dpo import DPO
from flowrl.objectives.noising import Noising, ScheduleTimes
from flowrl.trajectory import ReferenceErrors


def batch(name: str = "gdro", **known):
    return OBJECTIVES[name]().prepare(images(**known))


@settings(max_examples=30)
@given(
    share=st.sampled_from(["group", "image"]),
    rows=st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
)
def test_an_image_has_the_same_points_in_any_batch(share, rows):
    whole = noising(3, share)(batch())
    part = noising(3, share)(batch().take(torch.tensor(rows)))
    for name in ("x", "target", "sigma"):
        expected = getattr(whole.take(torch.tensor(rows)), name)
        assert torch.equal(getattr(part, name), expected)


def test_images_of_a_group_share_time_and_noise_and_others_do_not():
    points = noising(3)(batch())
    sigma, noise = points.by_image(points.sigma), points.target + points.x0
    assert torch.equal(sigma[:4], sigma[:1].expand(4, -1)) and not torch.equal(sigma[0], sigma[4])
    torch.testing.assert_close(noise[:3], noise[3:6])
    own = noising(3, "image")(batch())
    assert len(own.sigma.unique()) == 24


def test_every_point_of_an_image_has_noise_of_its_own():
    points = noising(3)(batch())
    first, second, third = (points.target + points.x0)[:3]  # of one image
    for a, b in ((first, second), (first, third), (second, third)):
        assert (a - b).abs().min() > 1e-3


def test_a_point_lies_between_image_and_noise():
    points = noising(3, "image")(batch())
    sigma = points.sigma[:, None]
    noise = points.target + points.x0
    torch.testing.assert_close(points.x, (1 - sigma) * points.x0 + sigma * noise)
    assert points.x.dtype == torch.float32 and abs(noise.std() - 1) < 0.2


def test_another_rollout_or_update_has_other_points():
    first, second = (noising()(batch(seed=seed)).sigma for seed in (5, 6))
    assert not torch.equal(first, second)
    parts = batch().updates(2)
    assert not torch.equal(noising()(parts[0]).sigma, noising()(parts[1]).sigma[: len(parts[0])])


def test_the_rollouts_own_sigmas_are_taken_without_repeating():
    own = Noising(times=ScheduleTimes(), count=8)
    points = own(batch())
    expected = SIGMAS[:-1].sort().values.expand(8, -1)
    assert torch.equal(points.by_image(points.sigma).sort(1).values, expected)


def known_batch(pool: int, seed: int = 5):
    rollout = images(seed=seed)
    table = ReferenceErrors.empty(10, pool, "key")
    numbers = torch.arange(8) + 2  # of the store, which has two more images
    return OBJECTIVES["gdro"]().prepare(
        replace(rollout, known=table.view(numbers, numbers // 5))
    ), table.table


def test_points_of_a_pool_are_the_same_in_every_iteration():
    pools = [noising(2)(known_batch(3, seed)[0]) for seed in range(6)]
    by_place: dict[tuple[int, int], float] = {}
    for points in pools:
        sigma = points.by_image(points.sigma)
        for image in range(8):
            for place, value in zip(points.place[image], sigma[image], strict=True):
                known = by_place.setdefault((image, int(place)), float(value))
                assert known == float(value)
    assert len(by_place) == 8 * 3  # and all of the pool is used


def test_kept_errors_are_those_of_the_reference_and_are_computed_once():
    batch, table = known_batch(2)
    toy, calls = Toy(), []

    def reference(x, sigma, cond):
        calls.append(len(x))
        return toy(x, sigma, cond)

    models = Models(policy=toy, reference=reference)
    first, again = (DPO(**compared()).errors(models, batch) for _ in range(2))
    assert calls == [16] and torch.equal(first.anchor, again.anchor)
    torch.testing.assert_close(first.anchor, first.policy.detach())  # the reference is the policy
    assert not table[2:].isnan().any() and table[:2].isnan().all()


def test_kept_errors_serve_no_other_anchor():
    batch, _ = known_batch(2)
    with pytest.raises(ValueError, match="cached errors"):
        DPO(**compared(kl_coef=0.1)).errors(Models(policy=Toy(), reference=Toy()), batch)
