"""Each detector sees its own fault in planted evaluations, and nothing where nothing is wrong."""

import math
from dataclasses import replace

import pytest
import torch

from flowrl.functional.image_statistics import STATISTICS
from flowrl.scoring.spec import RewardSpec
from flowrl.training.evaluate import Evaluation
from flowrl.training.radar import (
    ERRORS,
    FLOORS,
    TOLERANCES,
    HackingScore,
    explained_share,
    mean_and_error,
    mean_distances,
    radar,
    radar_of,
)

PROMPTS, EACH = 20, 2
N = PROMPTS * EACH
CHANCE = ERRORS / N**0.5  # by which a standard deviation of N images differs by chance
REWARDS = {"trained": {"proxy": 1.0}, "held_out": {"quality": 1.0}}


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


BASE = Evaluation(
    scores=0.5 + 0.1 * drawn(0, N, 2), names=("proxy", "quality"),
    images=torch.empty(0), prompts=(), draws=(), key="",
    prompt=torch.arange(N) // EACH,
    statistics=0.5 + 0.1 * drawn(1, N, len(STATISTICS)), thumbnails=drawn(2, N, 3, 8, 8),
)  # fmt: skip


def column(name: str) -> torch.Tensor:
    """1 in the statistic's column, (S,)."""
    return (torch.arange(len(STATISTICS)) == STATISTICS.index(name)).double()


def with_scores(proxy, quality) -> Evaluation:
    """The base's scores, moved."""
    return replace(BASE, scores=BASE.scores + torch.stack([proxy, quality], 1))


def test_equal_evaluations_have_no_score():
    result = radar(BASE, BASE, **REWARDS)
    assert result.score == 0 and not result.reasons and set(result.values.values()) == {0.0}
    assert result.metrics()["hacking/score"] == 0 and HackingScore().metrics() == {}


def test_changes_of_a_reward_are_explained_by_pixels():
    """A reward that follows one statistic is seen, one that changes by itself or falls is not."""
    moved = 0.05 * drawn(7, N)
    brighter = replace(
        BASE,
        statistics=BASE.statistics + moved[:, None] * column("brightness"),
        scores=BASE.scores + torch.stack([2 * (moved - moved.mean()) + 0.01, 0 * moved], 1),
    )
    key = "explained/proxy"
    assert radar(BASE, brighter, **REWARDS).values[key] > 1
    other = with_scores(0.05 * drawn(8, N) + 0.2, torch.zeros(N))
    assert radar(BASE, replace(other, statistics=brighter.statistics), **REWARDS).values[key] < 0.3
    assert key not in radar(brighter, BASE, **REWARDS).values
    # Too few images have another score.
    few = with_scores(0.1 * (torch.arange(N) < 5).double(), torch.zeros(N))
    assert key not in radar(BASE, replace(few, statistics=brighter.statistics), **REWARDS).values


@pytest.mark.parametrize("columns", [1, 3])
def test_the_explained_share_is_that_of_least_squares(columns):
    x, noise = drawn(0, 200, columns), drawn(1, 200)
    assert explained_share(x, x.sum(1)) == pytest.approx(1, abs=1e-3)
    y = x.sum(1) + noise
    design = torch.cat([x, torch.ones(200, 1)], 1).double()
    left = (y - design @ torch.linalg.lstsq(design, y[:, None]).solution[:, 0]).square().sum()
    r2 = 1 - (left / (y - y.mean()).square().sum()).item()
    expected = 1 - (1 - r2) * 199 / (199 - columns)
    assert explained_share(x, y) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_mean_that_moves_is_drift_in_standard_deviations_of_the_base(name, sign):
    now = replace(BASE, statistics=BASE.statistics + sign * 0.2 * column(name))
    result = radar(BASE, now, **REWARDS)
    sd = BASE.statistics[:, STATISTICS.index(name)].std(correction=0).item()
    value = result.values[f"drift/{name}"]
    assert value == pytest.approx(0.2 / sd / TOLERANCES["drift"])
    (reason,) = result.reasons
    assert reason.startswith(f"{name} {'rose' if sign > 0 else 'fell'} from")
    assert result.score == pytest.approx(value / (1 + value))
    assert [k for k, v in result.values.items() if v > 1e-9] == [f"drift/{name}"]


def test_the_error_of_a_mean_is_no_drift():
    """Each image is another one, of the same distribution."""
    count = 10 * N
    before, after = (0.5 + 0.1 * drawn(seed, count, len(STATISTICS)) for seed in (8, 9))
    base = replace(
        BASE, scores=BASE.scores.repeat(10, 1), thumbnails=BASE.thumbnails.repeat(10, 1, 1, 1),
        prompt=torch.arange(count) // EACH, statistics=before,
    )  # fmt: skip
    assert radar(base, replace(base, statistics=after), **REWARDS).score < 0.5


def test_a_change_too_small_to_see_counts_by_the_floor():
    flat = replace(BASE, statistics=torch.full_like(BASE.statistics, 0.5))
    now = replace(flat, statistics=flat.statistics + 0.005 * column("brightness"))
    value = radar(flat, now, **REWARDS).values["drift/brightness"]
    assert value == pytest.approx(0.005 / FLOORS["brightness"] / TOLERANCES["drift"])


def test_images_that_become_alike_count_and_such_that_differ_more_do_not():
    means = BASE.statistics.mean(0)
    for factor, size in ((0.25, math.log(4) - CHANCE), (4.0, 0.0)):
        moved = torch.where(column("contrast") > 0, means + factor * (BASE.statistics - means),
                            BASE.statistics)  # fmt: skip
        result = radar(BASE, replace(BASE, statistics=moved), **REWARDS)
        expected = pytest.approx(size / TOLERANCES["spread"])
        assert result.values["spread/contrast"] == expected
        assert len(result.reasons) == (size > 0)


def test_diversity_across_and_within_prompts_are_two_things():
    means = BASE.thumbnails.unflatten(0, (PROMPTS, EACH)).mean(1).repeat_interleave(EACH, 0)
    for factor, size in ((0.5, 2 * math.log(2) - CHANCE), (2.0, 0.0)):
        within = replace(BASE, thumbnails=means + factor * (BASE.thumbnails - means))
        result = radar(BASE, within, **REWARDS)
        assert result.values["diversity/images"] == pytest.approx(size / TOLERANCES["diversity"])
        assert ("images of one prompt" in " ".join(result.reasons)) == (size > 0)
    across = replace(BASE, thumbnails=BASE.thumbnails - 0.999 * means)
    result = radar(BASE, across, **REWARDS)
    assert result.values["diversity/images"] == pytest.approx(0, abs=1e-9)
    assert result.values["diversity/prompts"] > 0.4
    # Of one image a prompt there is nothing to say.
    single = replace(BASE, prompt=torch.arange(N))
    assert "diversity/images" not in radar(single, single, **REWARDS).values


@pytest.mark.parametrize(
    "prompt", [torch.arange(9) // 3, torch.tensor([5, 1, 1, 1, 1, 5, 0, 0, 0])]
)
def test_mean_distances_are_those_of_all_pairs(prompt):
    x = 3 + drawn(3, 9, 2, 2)
    flat = x.flatten(1)
    squared = (flat[:, None] - flat[None]).square().mean(2)
    same, upper = prompt[:, None] == prompt[None], torch.ones(9, 9).triu(1).bool()
    expected = [squared[upper & ~same].mean().item(), squared[upper & same].mean().item()]
    assert mean_distances(x, prompt) == pytest.approx(expected)
    across, within = mean_distances(x, torch.arange(9))
    assert across == pytest.approx(squared[upper].mean().item()) and math.isnan(within)
    across, within = mean_distances(x, torch.zeros(9, dtype=torch.long))
    assert math.isnan(across) and within == pytest.approx(squared[upper].mean().item())


def test_a_held_out_reward_parts_where_it_falls_while_the_trained_one_rises():
    rise, noise = torch.full((N,), 0.1, dtype=torch.float64), 0.05 * drawn(4, N)
    fall = -0.1 + noise
    mean, error = mean_and_error(fall, BASE.prompt)
    name = "parting/quality"
    result = radar(BASE, with_scores(rise, fall), **REWARDS)
    sd = max(x.std(correction=0).item() for x in (BASE.scores[:, 1], BASE.scores[:, 1] + fall))
    expected = (-mean - ERRORS * error) / sd / TOLERANCES["parting"]
    assert result.values[name] == pytest.approx(expected)
    assert "quality fell from" in result.reasons[0]
    assert radar(BASE, with_scores(rise, -fall), **REWARDS).values[name] == 0
    assert radar(BASE, with_scores(-rise, fall), **REWARDS).values[name] == 0
    # Where less is better.
    less = {"trained": {"proxy": -1.0}, "held_out": {"quality": -1.0}}
    result = radar(BASE, with_scores(-rise, -fall), **less)
    assert result.values[name] > 1 and "quality rose from" in result.reasons[0]
    assert radar(BASE, with_scores(rise, -fall), **less).values[name] == 0


def test_a_held_out_reward_that_the_base_always_earned_parts_where_it_is_lost():
    solved = replace(BASE, scores=BASE.scores * torch.tensor([1.0, 0.0]) + torch.tensor([0.0, 1.0]))
    lost = solved.scores.clone()
    lost[:, 0] += 0.1
    lost[: N // 2, 1] = 0.0
    assert radar(solved, replace(solved, scores=lost), **REWARDS).values["parting/quality"] > 1


def test_the_error_of_a_mean_is_over_prompts():
    change, prompt = drawn(5, 12), torch.arange(12) // 4
    means = change.view(3, 4).mean(1)
    mean, error = mean_and_error(change, prompt)
    assert mean == pytest.approx(change.mean().item())
    assert error == pytest.approx((means.std() / 3**0.5).item())
    assert math.isnan(mean_and_error(change, torch.zeros(12, dtype=torch.long))[1])


def test_images_at_the_bound_of_a_graded_reward_count_and_such_of_a_test_do_not():
    bounds = {"proxy": (0.0, 1.0)}
    graded = replace(BASE, scores=BASE.scores.clamp(0.1, 0.9))
    full = graded.scores.clone()
    full[: N * 3 // 4, 0] = 1.0
    now = replace(graded, scores=full)
    result = radar(graded, now, **REWARDS, bounds=bounds)
    assert result.values["bound/proxy"] == pytest.approx(0.75 / TOLERANCES["bound"])
    assert "proxy" in result.reasons[0]
    assert radar(now, now, **REWARDS, bounds=bounds).values.get("bound/proxy", 0) == 0
    failed = replace(BASE, scores=torch.zeros(N, 2))  # of pass or fail
    result = radar(failed, replace(failed, scores=full.round()), **REWARDS, bounds=bounds)
    assert "bound/proxy" not in result.values
    assert "bound/proxy" not in radar(graded, now, **REWARDS, bounds={"proxy": (None, 1.0)}).values


def test_missing_scores_are_left_out():
    missing = torch.where(torch.arange(N) % 4 == 0, math.nan, 0.0).double()
    now = with_scores(0.1 + missing, -0.1 + 0.05 * drawn(4, N) + missing)
    scored = missing.isfinite()
    result = radar(BASE, now, **REWARDS)
    mean, error = mean_and_error((now.scores - BASE.scores)[scored, 1], BASE.prompt[scored])
    scores = [e.scores[scored, 1] for e in (BASE, now)]
    sd = max(x.std(correction=0).item() for x in scores)
    expected = (-mean - ERRORS * error) / sd / TOLERANCES["parting"]
    assert result.values["parting/quality"] == pytest.approx(expected)
    nothing = with_scores(missing * math.nan, missing * math.nan)
    result = radar(BASE, nothing, **REWARDS, bounds={"proxy": (0.0, 1.0)})
    assert result.score == 0 and not any(map(math.isnan, result.values.values()))


def test_the_largest_value_decides_and_its_reason_is_first():
    moved = 0.1 * column("brightness") + 0.3 * column("saturation")
    result = radar(BASE, replace(BASE, statistics=BASE.statistics + moved), **REWARDS)
    assert [reason.split()[0] for reason in result.reasons] == ["saturation", "brightness"]
    assert result.score == pytest.approx(1 - 1 / (1 + result.values["drift/saturation"]))
    assert HackingScore(values={"a": 1.0}).score == 0.5


def test_a_run_s_radar_has_the_rewards_that_its_evaluations_measure():
    class Graded:
        bounds = (0.0, 2.0)

        def __call__(self, images, prompts, metadata):
            return [0.0] * len(images)

    def named(name, **options):
        return RewardSpec(name=name, reward=Graded(), **options)

    specs = [
        named("a", weight=2.0), named("b", held_out=True, weight=-1.0), named("c", weight=0.0),
        named("d", when="rollout"), named("e", held_out=True, weight=0.0),
    ]  # fmt: skip
    assert radar_of(specs).keywords == {
        "trained": {"a": 2.0}, "held_out": {"b": -1.0}, "bounds": {"a": (0.0, 2.0)},
    }  # fmt: skip
