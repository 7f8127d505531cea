"""What holds for every built-in reward, with small random networks in place of published ones."""

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from chat_servers import Scripted, completion, images_of, redness
from flowrl_rewards.aesthetic import FILE as AESTHETIC_FILE
from flowrl_rewards.taste import WIDTHS
from torch import Tensor

from flowrl.scoring.executors.base import Answer, InlineExecutor
from flowrl.scoring.spec import BUILT_IN, load_reward
from flowrl.voting.taste import save_taste

OBJECT = {"tag": "colors", "include": [{"class": "square", "count": 1, "color": "red"}]}
SIZES = ((32, 32), (40, 56))
OFFLINE = (
    "geneval ocr diversity agreement compressibility incompressibility brightness tiny_colors "
    "tiny_quality tiny_judge tiny_proxy"
).split()
NETWORKS = ("pickscore", "clipscore", "hpsv2", "aesthetic", "hpsv3")
LEARNED = ("taste",)
JUDGES = ("vlm_judge", "vlm_questions", "pairwise")
METADATA = {"vqa_list": [["Is it red?", "yes"]], "ocr_text": "CAT"} | OBJECT


@dataclass(frozen=True, kw_only=True)
class Case:
    """A reward with arguments that make it run on this machine."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-4

    def load(self, **more: Any) -> Any:
        return load_reward(self.name, self.args | more)

    @property
    def prompts(self) -> list[str]:
        same = getattr(self.load(), "scope", "sample") == "group"
        return ["a red circle"] * 3 if same else ["a red circle", "two blue stars", "a red ring"]

    def score(self, reward: Any, images: Tensor, rows: Any = slice(None)) -> Answer:
        prompts = list(np.array(self.prompts)[rows])
        metadata = [METADATA] * len(prompts)
        answer = InlineExecutor(reward, self.name).submit(images[rows], prompts, metadata).result()
        assert answer.scores.dtype == torch.float32 and len(answer.scores) == len(prompts)
        assert set(answer.reasons) == set(answer.scores.isnan().nonzero().flatten().tolist())
        return answer


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    def answer(body: dict) -> dict:
        likes = 0.1 + 0.8 * redness(images_of(body)[0])
        if "first picture" in body["messages"][0]["content"][-1]["text"]:
            tokens = {"1": likes, "2": 1 - likes}
        elif "Is it red" in body["messages"][0]["content"][-1]["text"]:
            tokens = {"yes": likes, "no": 1 - likes}
        else:
            tokens = {"5": likes, "0": 1 - likes}
        return completion("", tokens)

    with Scripted(answer) as server:
        yield server


@pytest.fixture(scope="module")
def taste(tmp_path_factory) -> str:
    """The file of a taste for red images."""
    weights = torch.zeros(sum(WIDTHS))
    weights[: WIDTHS[0] // 3] = 1.0
    return str(save_taste(tmp_path_factory.mktemp("taste"), torch.zeros_like(weights), weights))


@pytest.fixture(scope="module")
def cases(server, tiny_clip, tiny_hps, tiny_hpsv3, tiny_aesthetic, taste) -> Callable[[str], Case]:
    clip = {"model": tiny_clip, "device": "cpu"}
    args = {
        "pickscore": clip | {"tokenizer": tiny_clip},
        "clipscore": clip,
        "aesthetic": clip | {"head": tiny_aesthetic},
        "taste": {"path": taste},
        "hpsv2": {"architecture": tiny_hps[0], "model": tiny_hps[1], "device": "cpu"},
        "hpsv3": {
            "model": tiny_hpsv3, "base": tiny_hpsv3, "device": "cpu", "dtype": "fp32",
            "question": f"{tiny_hpsv3}/data_collator_qwen.py",
        },
    } | dict.fromkeys(JUDGES, {"server": {"model": "m", "base_url": server.url}})  # fmt: skip
    return lambda name: Case(
        name=name, args=args.get(name, {}), tolerance=1e-3 if name == "hpsv3" else 1e-4
    )


def test_the_contract_covers_every_built_in_reward():
    assert {*OFFLINE, *NETWORKS, *LEARNED, *JUDGES, "preference"} == set(BUILT_IN)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*OFFLINE, *NETWORKS, *LEARNED, *JUDGES])
def test_scores_do_not_depend_on_the_batch_the_order_or_seeds(cases, random_images, name, size):
    case = cases(name)
    reward, images, prompts = case.load(), random_images(3, *size), case.prompts
    before = _generators()
    reward(images.clone(), prompts, [METADATA] * 3)
    used = _generators() != before
    assert not used or name in JUDGES  # a judge's pauses between retries are random
    whole = case.score(reward, images).scores
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    equal = functools.partial(
        torch.testing.assert_close, rtol=case.tolerance, atol=case.tolerance, equal_nan=True
    )
    order = [2, 0, 1]
    equal(case.score(reward, images, order).scores, whole[order])
    if getattr(reward, "scope", "sample") == "sample":
        equal(torch.cat([case.score(reward, images, [row]).scores for row in range(3)]), whole)
    assert case.score(reward, images, []).scores.shape == (0,)
    low, high = getattr(reward, "bounds", None) or (None, None)
    for score in whole[whole.isfinite()].tolist():
        assert (low is None or score >= low - 1e-6) and (high is None or score <= high + 1e-6)


def _generators() -> tuple[Any, ...]:
    numpy = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numpy[1].tolist(), numpy[2]


@pytest.mark.parametrize("name", ["geneval", "ocr", "vlm_questions"])
def test_an_unscorable_item_is_missing_with_a_reason_and_never_0(cases, random_images, name):
    case = cases(name)
    reward = case.load()
    wrong: dict[str, Any] = {"include": "x", "tag": 3, "ocr_text": [None], "vqa_list": 4}
    with pytest.raises(ValueError):
        reward.check("a circle", wrong)
    answer = InlineExecutor(reward, name).submit(random_images(1), ["a circle"], [wrong]).result()
    assert answer.scores.isnan().all() and answer.reasons[0]


@pytest.mark.parametrize("name", ["brightness", "tiny_colors", *NETWORKS[:4]])
def test_gradients_of_differentiable_rewards_are_the_slopes_of_their_scores(
    cases, random_images, name
):
    """The gradient of the summed scores agrees with differences: along itself, and at pixels."""
    case, images = cases(name), random_images(3, 40, 56)
    reward = case.load()
    assert reward.differentiable is True

    def score(images: torch.Tensor) -> torch.Tensor:
        return reward(images, case.prompts, [METADATA] * 3)

    leaf = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(leaf).sum(), leaf)
    generator = torch.Generator().manual_seed(0)
    spots = torch.randint(images.numel(), (6,), generator=generator)
    single = F.one_hot(spots, images.numel()).float().view(-1, *images.shape)
    directions = [(gradient / gradient.norm(), 4e-3), *((spot, 0.05) for spot in single)]

    def difference(direction: torch.Tensor, by: float) -> float:
        with torch.no_grad():
            change = score(images + by * direction) - score(images - by * direction)
        return change.double().sum().item() / (2 * by)

    # Two steps cancel the cubic term: with so large weights it is not small.
    slopes = [(4 * difference(d, h / 2) - difference(d, h)) / 3 for d, h in directions]
    expected = [(gradient * d).sum().item() for d, _ in directions]
    # Scores are fp32: 16 units in their last place, over the step, are what rounding alone does.
    rounding = 16 * torch.finfo(torch.float32).eps * score(images).abs().max().item()
    assert expected[0] > 0.01
    for slope, wanted, (_, h) in zip(slopes, expected, directions, strict=True):
        assert slope == pytest.approx(wanted, rel=2e-3, abs=max(2e-5, rounding / h))


@pytest.mark.parametrize("name", NETWORKS)
def test_bf16_stays_near_and_every_argument_is_in_the_version(cases, random_images, name):
    case = cases(name)
    full, half = case.load(), case.load(dtype="bf16")
    scores, near = (case.score(reward, random_images(3)).scores for reward in (full, half))
    torch.testing.assert_close(near, scores, rtol=0.06, atol=0.05)
    versions = {case.load(**more).version for more in ({}, {"dtype": "bf16"}, {"revision": "x"})}
    assert len(versions) == 3
    with pytest.raises(Exception, match="fp32, bf16, not 'fp8'"):
        case.load(dtype="fp8")


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_that_are_missing_or_could_run_code_are_refused_in_one_sentence(
    cases, random_images, tmp_path, name
):
    case, field = cases(name), "head" if name == "aesthetic" else "model"
    for path in ("nobody/no-such-model", str(tmp_path)):
        reward = case.load(**{field: path})
        with pytest.raises(FileNotFoundError) as caught:
            reward(random_images(1), ["a"], [{}])
        assert "\n" not in str(caught.value)
    if name in ("pickscore", "clipscore", "hpsv3"):
        return  # read by transformers, or from safetensors
    names = {"hpsv2": "HPS_v2.1_compressed.pt", "aesthetic": AESTHETIC_FILE}
    file = tmp_path / names[name]
    torch.save({"state_dict": torch.nn.Linear(1, 1), "layers": torch.nn.Linear(1, 1)}, file)
    with pytest.raises(ValueError, match=f"{names[name]} is not read as plain weights"):
        case.load(**{field: str(tmp_path)})(random_images(1), ["a"], [{}])


@pytest.mark.weights
@pytest.mark.parametrize("name", NETWORKS)
def test_published_weights_order_the_fixtures(name):
    reward = load_reward(name)
    for case in getattr(reward, "fixtures", list)():
        better, worse = reward(case["images"][:2], [case["prompt"]] * 2, [{}] * 2)
        assert better > worse, case["says"]
