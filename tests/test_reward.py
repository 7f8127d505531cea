import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import UserError
from flowrl.prompts import PromptRecord, load_prompts
from flowrl.reward import (
    BUILT_IN,
    RewardFailure,
    RewardResult,
    RewardSpec,
    SamplerFailure,
    check_evaluation,
    check_invalid,
    check_prompts,
    load_reward,
    score,
    train_weights,
    weighted_sum,
)

GREY = torch.full((4, 3, 8, 8), 0.5)
PROMPTS = ["a", "b", "c", "d"]
PLAIN: list[dict] = [{}, {}, {}, {}]


def scored(*rewards, images=GREY, metadata=PLAIN) -> RewardResult:
    specs = [RewardSpec(name=f"r{i}", reward=r) for i, r in enumerate(rewards)]
    return score(specs, images, PROMPTS, metadata)


def result(scores, applicable=None) -> RewardResult:
    scores = torch.tensor(scores)
    fits = torch.ones_like(scores, dtype=torch.bool) if applicable is None else applicable
    names = tuple(f"r{i}" for i in range(scores.shape[1]))
    return RewardResult(
        scores=scores, valid=scores.isfinite(), applicable=torch.as_tensor(fits), names=names
    )


def constant(images, prompts, metadata):
    return [0.25] * len(images)


def raises(images, prompts, metadata):
    raise RuntimeError("engine died")


class Tagged:
    """Speaks of prompts with a tag only, and remembers what it was shown."""

    required_metadata = ("tag",)

    def __init__(self):
        self.seen: list[str] = []

    def __call__(self, images, prompts, metadata):
        self.seen += prompts
        return [1.0] * len(images)


def test_pictures_are_rounded_to_8_bits_once_before_any_reward():
    seen = []

    def look(images, prompts, metadata):
        seen.append(images)
        return images.mean((1, 2, 3))

    scored(look, images=GREY + 0.001)
    assert torch.equal(seen[0], torch.full_like(GREY, 128 / 255))
    scored(look, images=GREY + 7)
    assert torch.equal(seen[1], torch.ones_like(GREY))


def test_broken_pictures_are_the_samplers_failure():
    images = GREY.clone()
    images[1, 0, 0, 0] = torch.nan
    with pytest.raises(SamplerFailure, match="sampler failure: 1 of 4"):
        scored(constant, images=images)


def test_a_reward_that_raises_is_missing_and_says_why():
    found = scored(constant, raises)
    assert found.scores[:, 0].tolist() == [0.25] * 4
    assert found.scores[:, 1].isnan().all() and not found.valid[:, 1].any()
    assert found.errors == {"r1": "RuntimeError: engine died"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_missing(bad):
    found = scored(lambda images, prompts, metadata: torch.tensor([0.0, bad, 1.0, 0.5]))
    assert found.valid[:, 0].tolist() == [True, False, True, True]
    assert found.scores[1, 0].isnan() and found.scores.dtype == torch.float32


def test_an_answer_of_the_wrong_length_stops():
    with pytest.raises(RewardFailure, match=r"\(1,\) for 4 pictures"):
        scored(lambda images, prompts, metadata: [1.0])


def test_a_missing_package_stops_with_its_name():
    def needs_more(images, prompts, metadata):
        import a_package_that_is_not_there  # noqa: F401  # pyright: ignore

    with pytest.raises(UserError, match="a_package_that_is_not_there"):
        scored(needs_more)


def test_a_reward_sees_only_pictures_it_applies_to():
    tagged = Tagged()
    found = scored(constant, tagged, metadata=[{"tag": "x"}, {}, {}, {"tag": "y"}])
    assert tagged.seen == ["a", "d"]
    assert found.applicable[:, 1].tolist() == [True, False, False, True]
    assert found.valid[:, 1].tolist() == [True, False, False, True]


def test_the_weighted_sum_is_the_sum():
    reward, valid = weighted_sum(result([[1.0, 2.0], [3.0, 4.0]]), [0.5, -1.0])
    assert reward.tolist() == [-1.5, -2.5] and valid.all()


def test_a_missing_score_makes_the_picture_invalid_unless_its_weight_is_0():
    scores = result([[1.0, math.nan], [1.0, 1.0]])
    reward, valid = weighted_sum(scores, [1.0, 1.0])
    assert valid.tolist() == [False, True] and reward[0].isnan()
    reward, valid = weighted_sum(scores, [1.0, 0.0])
    assert valid.all() and reward.tolist() == [1.0, 1.0]


@given(st.floats(0.25, 4), st.floats(0.25, 4), st.floats(-2, 2))
def test_equal_scores_weigh_the_same_wherever_rewards_do_not_apply(first, second, value):
    applicable = torch.tensor([[True, True], [True, False], [False, True], [False, False]])
    scores = torch.where(applicable, value, math.nan).tolist()
    reward, valid = weighted_sum(result(scores, applicable), [first, second])
    assert valid.tolist() == [True, True, True, False]
    expected = torch.full((3,), (first + second) * value)
    torch.testing.assert_close(reward[:3], expected, rtol=1e-5, atol=1e-6)


def test_held_out_rewards_are_not_trained_on():
    specs = [
        RewardSpec(name="a", reward=constant, weight=2.0),
        RewardSpec(name="b", reward=constant, held_out=True),
    ]
    assert train_weights(specs) == [2.0, 0.0]


def test_too_many_missing_rewards_stop_with_the_reasons():
    valid = torch.tensor([True] * 9 + [False])
    check_invalid(valid, max_fraction=0.1)
    with pytest.raises(RewardFailure, match="1 of 10 .*ocr: engine died"):
        check_invalid(valid, max_fraction=0.09, errors={"ocr": "engine died"})


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_loads_by_name(name):
    assert callable(load_reward(name))


def test_loading_passes_arguments_and_finds_functions_and_classes_by_path():
    assert load_reward("geneval", {"mode": "strict"}).mode == "strict"  # pyright: ignore
    assert load_reward(f"{__name__}:constant") is constant
    bound = load_reward(f"{__name__}:scaled", {"factor": 2.0})
    assert bound(GREY, PROMPTS, PLAIN) == [2.0] * 4
    assert isinstance(load_reward(f"{__name__}:Tagged"), Tagged)


def scaled(images, prompts, metadata, factor=1.0):
    return [factor] * len(images)


@pytest.mark.parametrize(
    "name, args, message",
    [
        ("genevall", {}, "unknown reward 'genevall': use one of geneval"),
        ("no_such_package:Thing", {}, "no such package was found"),
        ("rewards.ocr:Missing", {}, "the package found lies at"),
        ("rewards.nothing:Thing", {}, "the package found lies at"),
        ("math:pi", {}, "expected a class or a function"),
        ("geneval", {"mode": "lenient"}, "does not accept"),
        ("geneval", {"moed": "strict"}, "does not accept"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_a_sentence(name, args, message):
    with pytest.raises(UserError) as error:
        load_reward(name, args)
    assert message in str(error.value)


def test_prompts_and_rewards_that_do_not_fit_are_found_before_training():
    geneval = RewardSpec(name="geneval", reward=load_reward("geneval"))
    ocr = RewardSpec(name="ocr", reward=load_reward("ocr"))
    mixed = load_prompts("tiny:all:test", limit=14)
    check_prompts([geneval, ocr], mixed)
    with pytest.raises(UserError, match="no reward applies to the prompt"):
        check_prompts([geneval], mixed)
    with pytest.raises(UserError, match="'ocr' applies to none"):
        check_prompts([geneval, ocr], [p for p in mixed if p.metadata["tag"] != "ocr"])
    plain = [PromptRecord(uid="0", text="a cat")]
    check_prompts([RewardSpec(name="any", reward=constant)], plain)


def test_a_prompt_that_the_detector_cannot_judge_is_found_before_training():
    geneval = RewardSpec(name="geneval", reward=load_reward("geneval"))
    bench = {"tag": "single_object", "include": [{"class": "bench", "count": 1}]}
    photo = [PromptRecord(uid="0", text="a photo of a bench", metadata=bench)]
    for check in (check_prompts, check_evaluation):
        with pytest.raises(UserError, match="'tiny' does not know 'bench'"):
            check([geneval], photo)


def test_held_out_prompts_that_nothing_can_score_are_found_before_training():
    geneval = RewardSpec(name="geneval", reward=load_reward("geneval"))
    plain = [PromptRecord(uid="0", text="a cat")]
    with pytest.raises(UserError, match="any of the 1 evaluation.prompts"):
        check_evaluation([geneval], plain)
    check_evaluation([geneval], plain + load_prompts("tiny:colors:test", limit=1))
    check_evaluation([geneval], [])


def test_loading_a_reward_starts_no_engine():
    code = (
        "import sys; from flowrl.reward import load_reward; load_reward('ocr'); "
        "load_reward('geneval'); sys.exit('rapidocr' in sys.modules or 'cv2' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
