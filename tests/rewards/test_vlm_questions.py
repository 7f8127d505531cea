import math

import pytest
import torch
from chat_servers import Scripted, completion, text_of
from flowrl_rewards.vlm_questions import VLMQuestions

ANSWERS = {
    "How many?": {"Two": 0.5, "2": 0.3, "three": 0.2},
    "Red?": {"Yes": 0.4, "No": 0.6},
    "Why?": {"the": 0.2, "a": 0.1},
}


def script(body):
    return completion("", ANSWERS[text_of(body).removesuffix(" Answer in one word.")])


def asked(*lists, **args):
    with Scripted(script) as server:
        made = VLMQuestions({"model": "m", "base_url": server.url}, **args)
        images = torch.rand(len(lists), 3, 8, 8)
        return made(images, ["p"] * len(lists), [{"vqa_list": pairs} for pairs in lists])


def test_the_score_is_the_mean_probability_of_the_right_answers():
    both = [["How many?", "two"], ["Red?", "yes"]]
    # Numbers may be written in letters and digits.
    scores, reasons = asked(both, both[1:], [["Red?", ["no", "yes"]]], [["How many?", "2"]])
    assert scores == pytest.approx([0.6, 0.4, 1.0, 0.8]) and not reasons
    scores, _ = asked(both, mean="geometric")
    assert scores == [pytest.approx(math.sqrt(0.8 * 0.4))]


def test_an_answer_the_model_does_not_think_of_scores_0_and_one_it_does_not_give_is_missing():
    scores, reasons = asked([["Red?", "blue"]], [["Red?", "yes"], ["Why?", "because"]])
    assert scores[0] == 0 and math.isnan(scores[1])
    assert list(reasons) == [1] and "0.30 of the probability" in reasons[1]


def test_question_lists_that_cannot_be_scored_are_refused_before_anything_is_sampled():
    reward = VLMQuestions({"model": "m"})
    reward.check("p", {"vqa_list": [["Red?", "yes"], ["How many?", ["2"]]]})
    several = [["What?", ["lamp", "traffic light"]]]  # only the first of its words would be seen
    forms = ([], [["Red?"]], [["Red?", 1]], [["Red?", []]], [["Red?", " "]], [[1, "yes"]])
    for pairs in (*forms, several, None):
        with pytest.raises(ValueError, match="question, answer|'traffic light'"):
            reward.check("p", {"vqa_list": pairs})
