"""DeQA, RationalRewards, VIEScore, Flow-GRPO's qwenvl: what is asked, what answers are worth."""

import math

import pytest
import torch
from chat_servers import completion, scripted, text_of
from flowrl_rewards.deqa import BEGINS, DeQA
from flowrl_rewards.rational_rewards import RationalRewards, aspect_scores
from flowrl_rewards.viescore import VIEScore, listed_scores
from flowrl_rewards.vlm_judge import VLMJudge

ONE = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ASPECTS = (
    "**1. Text Faithfulness**\n## Justification: fits.\n## Score: {}\n"
    "**2. Physical and Visual Quality**\n## Justification: fine.\n## Score: {}\n"
    "3. Text Rendering\nJustification: -\nScore: {}"
)


def judged(kind, script, **args):
    with scripted(script) as server:
        made = kind({"model": "m", "base_url": server.url, "rounds": 1}, **args)
        scores, reasons = made(ONE, ["a cat"], [{}])
    return scores, reasons, server.asked


def test_deqa_begins_the_answer_and_takes_the_mean_level_of_its_five_words():
    tokens = {" excellent": 0.5, " Good": 0.25, " bad": 0.25}
    (score,), reasons, asked = judged(DeQA, lambda body: completion("", tokens))
    assert score == pytest.approx((5 * 0.5 + 4 * 0.25 + 1 * 0.25) / 5) and not reasons
    assert asked[0]["messages"][1] == {"role": "assistant", "content": BEGINS}
    assert asked[0]["continue_final_message"] is True
    assert asked[0]["add_generation_prompt"] is False and asked[0]["max_tokens"] == 1
    (score,), reasons, _ = judged(DeQA, lambda body: completion("", {"the": 0.9, "good": 0.1}))
    assert math.isnan(score) and "0.10 of the probability" in reasons[0]


def test_rational_rewards_averages_the_aspects_that_apply_and_names_each():
    scores, reasons, asked = judged(
        RationalRewards, lambda body: completion(ASPECTS.format(4, 2.5, "N/A"))
    )
    assert scores["score"] == [pytest.approx((1 + 0.5) / 2)] and not reasons
    assert scores["text_faithfulness"] == [1.0] and math.isnan(scores["text_rendering"][0])
    assert "a cat" in text_of(asked[0])
    assert aspect_scores(ASPECTS.format(1, 3, 2))["text_rendering"] == 2
    again = "1. Text Faithfulness comes first.\n" + ASPECTS.format(2, 3, 2)
    assert aspect_scores(again)["text_faithfulness"] == 2
    for text, said in (
        ("it is good", "no score for Text Faithfulness"),
        (ASPECTS.format(5, 2, 2), "is 5, expected 1 to 4"),
        (ASPECTS.format("N/A", 2, 2), "always applies"),
        (ASPECTS.format(2, "", 2), "no score for Physical"),
    ):
        with pytest.raises(ValueError, match=said):
            aspect_scores(text)


def test_viescore_asks_twice_and_takes_the_geometric_mean_of_the_worst():
    def script(body: dict) -> dict:
        follows = "a cat" in text_of(body)
        return completion('{"score": [8], "reasoning": ""}' if follows else '{"score": [9, 2]}')

    scores, reasons, asked = judged(VIEScore, script)
    assert len(asked) == 2 == VIEScore.requests_per_image and not reasons
    expected = {"overall": math.sqrt(8 * 2) / 10, "semantic": 0.8, "perceptual": 0.2}
    assert {name: value[0] for name, value in scores.items()} == pytest.approx(expected)
    one = lambda body: completion('{"score": [8]}')  # noqa: E731
    scores, reasons, _ = judged(VIEScore, one)
    assert all(math.isnan(value[0]) for value in scores.values()) and "2 numbers" in reasons[0]
    assert listed_scores('```json\n{"score": 7, "reasoning": "x"}\n```', 1) == [7]
    for text in ('{"score": [11]}', '{"score": [true]}', "8", '{"score": ["8"]}'):
        with pytest.raises(ValueError, match="no JSON"):
            listed_scores(text, 1)


def test_qwenvl_reads_the_score_between_its_tags_as_a_share_of_5():
    says = "<Thought>a cat</Thought><Score>4</Score>"
    (score,), _, asked = judged(VLMJudge, lambda body: completion(says), mode="qwenvl")
    assert score == 0.8 and text_of(asked[0]).endswith("Text Caption: [a cat]")
    (score,), reasons, _ = judged(VLMJudge, lambda body: completion("4"), mode="qwenvl")
    assert math.isnan(score) and reasons
