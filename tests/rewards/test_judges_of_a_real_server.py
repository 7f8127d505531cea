"""The judges against `transformers serve` with a vision-language model, its weights random.

Such a model judges nothing, but images and questions pass through a real processor, and what
comes back is an answer to them.
"""

import math

import pytest
import torch
from flowrl_rewards.chat.client import Chat
from flowrl_rewards.chat.messages import Question
from flowrl_rewards.fixtures import noise, square
from flowrl_rewards.images import pngs
from flowrl_rewards.pairwise import PairwiseWinRate
from flowrl_rewards.unified_reward import UnifiedReward
from flowrl_rewards.vlm_judge import VLMJudge
from tiny_vlm import served, write_vlm

pytestmark = pytest.mark.slow  # the same facts are told of scripted servers in a moment
IMAGES = torch.stack([square("red", 64), square("blue", 64), noise(64, 1), noise(64, 2)])
PROMPTS = ["a red square"] * 4


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("transformers.cli.serve", reason="transformers before 5 serves otherwise")
    folder = tmp_path_factory.mktemp("vlm")
    write_vlm(folder, says="012345")
    with served(folder) as url:
        yield {"model": str(folder), "base_url": url, "timeout": 30.0, "rounds": 1}


def test_answers_depend_on_the_images_and_the_text_and_are_repeatable(server):
    red, blue, noisy, _ = pngs(IMAGES, 64)
    several = [
        ((red,), "?"),
        ((blue,), "?"),
        ((noisy,), "?"),
        ((red,), "rate it"),
        ((red, blue), "?"),
    ]
    questions = [Question(images=p, text=text, max_tokens=32) for p, text in several]
    replies = Chat(**server).ask(questions)
    assert not any(reply.missing for reply in replies)
    assert all(reply.text and set(reply.text) <= set("012345") for reply in replies)
    assert len({reply.text for reply in replies}) == len(several)
    assert Chat(**server).ask(questions[::-1]) == replies[::-1]


def test_a_text_judge_reads_scores_from_its_answers(server):
    judge = VLMJudge(server, "text", template="{prompt}", pattern=r"^\d{3}(\d)", max_tokens=32)
    scores, reasons = judge(IMAGES, PROMPTS, [{}] * 4)
    assert not reasons
    assert {5 * score for score in scores} <= set(range(6))
    assert len(set(scores)) > 1
    assert judge(IMAGES, PROMPTS, [{}] * 4) == (scores, reasons)


def test_an_answer_of_another_form_is_missing_and_nothing_breaks(server):
    for judge in (
        VLMJudge(server, "text"),
        UnifiedReward(server, "1.5", max_tokens=32),
        UnifiedReward(server, max_tokens=32),
        PairwiseWinRate(server, "text", max_tokens=32),
    ):
        scores, reasons = judge(IMAGES, PROMPTS, [{}] * 4)
        assert all(map(math.isnan, scores)) and set(reasons) == {0, 1, 2, 3}, judge


def test_that_this_server_gives_no_log_probabilities_or_cuts_an_answer_is_said(server):
    for judge, says in (
        (VLMJudge(server, "expectation"), "log-probabilities"),
        (VLMJudge(server, "yes_no"), "log-probabilities"),
        (
            VLMJudge(server, "text", template="{prompt}", pattern=r"(\d)", max_tokens=3),
            "max_tokens",
        ),
    ):
        scores, reasons = judge(IMAGES, PROMPTS, [{}] * 4)
        assert all(map(math.isnan, scores))
        for reason in reasons.values():
            assert reason.startswith(server["base_url"]) and says in reason


def test_another_model_than_the_served_one_is_refused_with_a_hint(server):
    (reply,) = Chat("other", server["base_url"]).ask([Question(images=(), text="?")])
    assert "answered 400" in reply.missing and "one that the server lists" in reply.missing
