import math

import pytest
import torch
from chat_servers import completion, scripted, text_of
from flowrl_rewards.unified_reward import UnifiedReward, axes_score, final_score

AXES = "Alignment Score (1-5): {}\nCoherence Score (1-5): {}\nStyle Score (1-5): {}"


def judged(text, form, **args):
    with scripted(lambda body: completion(text)) as server:
        made = UnifiedReward({"model": "m", "base_url": server.url}, form, **args)
        (score,), reasons = made(torch.rand(1, 3, 8, 8), ["a cat"], [{}])
    assert made.bounds[0] <= score <= made.bounds[1] or math.isnan(score)
    return score, reasons, text_of(server.asked[0])


def test_the_final_score_is_a_share_of_5_and_the_axes_are_averaged_and_brought_to_0_to_1():
    for text, expected in (
        ("Final Score: 5", 1.0),
        ("cat (object): 1\nFinal Score: **3.5**", 0.7),
        ("Final Score:1", 0.2),
        ("Final Score: 4.", 0.8),
        ("Final Score: 4, as the cat is there.", 0.8),
    ):
        assert final_score(text) == pytest.approx(expected), text
    assert judged(text, "1.5")[0] == pytest.approx(expected)
    for scores, expected in (((1, 1, 1), 0), ((5, 5, 5), 1), ((4, 2.5, 2.5), 0.5)):
        assert axes_score(AXES.format(*scores)) == pytest.approx(expected), scores
        assert judged(AXES.format(*scores), "2.0")[0] == pytest.approx(expected), scores


def test_a_text_of_another_form_is_missing_not_0():
    wrong = ("0", "7", "4/10", "**4** / 10", "4 out of 10", "4,5", "1-5", "1\u20135", "4.5.2")
    for form, text in [
        *(("1.5", f"Final Score: {score}") for score in (*wrong, "4\nFinal Score: 2/10")),
        ("1.5", "a nice cat"),
        ("2.0", AXES.format("1-5", 4, 4)),
        ("2.0", "Final Score: 5"),
        ("2.0", AXES.format(4, 4, "good")),
        ("2.0", AXES.format(4, 40, 4)),
    ]:
        score, reasons, _ = judged(text, form)
        assert math.isnan(score) and "score" in reasons[0]


def test_the_caption_stands_where_the_models_look_for_it_and_their_question_can_be_given():
    for form in ("1.5", "2.0"):
        assert judged("", form)[2].endswith("Text Caption: [a cat]")
    assert judged("", "2.0", template="As trained: {prompt}")[2] == "As trained: a cat"
    for args in ({"form": "3"}, {"template": "rate it"}):
        with pytest.raises(ValueError):
            UnifiedReward({"model": "m"}, **args)


def test_the_version_tells_apart_what_changes_the_numbers():
    changes = ({}, {"form": "1.5"}, {"template": "{prompt}?"}, {"max_tokens": 9}, {"longest": 64})
    versions = [UnifiedReward({"model": "m"}, **change).version for change in changes]
    assert len(set(versions)) == len(versions)
