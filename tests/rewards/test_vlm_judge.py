import math

import pytest
import torch
from chat_servers import Scripted, completion, images_of, redness, text_of
from flowrl_rewards.fixtures import square
from flowrl_rewards.rubrics import RUBRICS
from flowrl_rewards.vlm_judge import VLMJudge

IMAGES = torch.stack([square("red", 32), square("blue", 32)])
PROMPTS = ["a red square", "a red square"]


def judged(script, rubric="expectation", images=IMAGES, prompts=PROMPTS, **args):
    """Return a judge's scores and reasons, and the requests that it sent."""
    answer = script if callable(script) else (lambda body: script)
    with Scripted(answer) as server:
        judge = VLMJudge({"model": "m", "base_url": server.url}, rubric, **args)
        scores, reasons = judge(images, prompts, [{}] * len(images))
    return scores, reasons, server.asked


def by_colour(body):
    likes = 0.1 + 0.8 * redness(images_of(body)[0])
    return completion("5", {"5": likes, "0": 1 - likes})


def test_each_image_is_judged_by_what_it_shows_with_one_token_of_twenty_alternatives():
    (red, blue), _, sent = judged(by_colour)
    assert red > blue
    for body in sent:
        assert (body["max_tokens"], body["top_logprobs"]) == (1, 20)
        assert "a red square" in text_of(body) and "0, 1, 2, 3, 4, 5" in text_of(body)
    prompt = "{prompt} {answers} 100%"  # sent as it is
    assert prompt in text_of(judged(by_colour, images=IMAGES[:1], prompts=[prompt])[2][0])


@pytest.mark.parametrize(
    "rubric, said, expected",  # what is said: tokens' probabilities, or a text
    [
        *(("expectation", {f" {answer}": 1.0}, answer / 5) for answer in range(6)),
        ("yes_no", {"Yes": 0.45, "yes": 0.15, "No": 0.2}, 0.75),
        ({"base": "expectation", "tokens": {"A": 4, "B": 2, "C": 1}}, {"b": 0.5, "A": 0.5}, 0.75),
        ("deqa", {" excellent": 0.5, " Good": 0.25, " bad": 0.25}, 0.75),
        ("expectation", {"The": 0.6, "0": 0.4}, None),
        ("text", "I see <Score>1</Score> no, <Score> 4 </Score>", 0.8),
        ({"base": "text", "highest": 10, "patterns": {"score": r"(\d+)/10"}}, "7/10", 0.7),
        ("qwenvl", "<Thought>a cat</Thought><Score>4</Score>", 0.8),
        *(("text", text, None) for text in (
            "", "4", "<Score>four</Score>", "<Score>9</Score>", "<Score>-1</Score>",
            "<Score>4/10</Score>", "<Score>4</Score>, I mean <Score>4,5</Score>",
        )),
        ("wise", "Consistency: 2", None),
    ],
)  # fmt: skip
def test_a_score_is_the_mean_over_most_of_the_answer_tokens_or_what_the_rubrics_patterns_find(
    rubric, said, expected
):
    reply = completion("", said) if isinstance(said, dict) else completion(said)
    scores, reasons, _ = judged(reply, rubric)
    if expected is None:
        assert all(map(math.isnan, scores)) and set(reasons) == {0, 1}
    else:
        assert scores == [pytest.approx(expected)] * 2 and not reasons


def test_a_text_that_was_cut_is_missing_but_one_token_counts():
    cut = completion("as a draft <Score>1</Score> but it is", {"5": 1.0})
    cut["choices"][0]["finish_reason"] = "length"
    scores, reasons, sent = judged(cut, "text", max_tokens=99)
    assert all(map(math.isnan, scores)) and "max_tokens" in reasons[0]
    assert sent[0]["max_tokens"] == 99 and "logprobs" not in sent[0]
    assert judged(cut)[0] == [1.0, 1.0]


@pytest.mark.parametrize(
    "args, names",
    [
        ({"rubric": "maybe"}, "rubric"),
        ({"rubric": {"base": "text", "questions": "good?"}}, "questions"),
        ({"rubric": {"base": "expectation", "tokens": {"1": 1.0}}}, "tokens"),
        ({"rubric": {"base": "expectation", "tokens": {"a": 1.0, "A": 2.0}}}, "tokens"),
        ({"rubric": {"base": "expectation", "tokens": {"a": 0.0, "b": -1.0}}}, "highest"),
        ({"rubric": {"base": "expectation", "tokens": {str(n): n for n in range(1, 11)}}}, "'10'"),
        ({"server": None}, "server"),
        ({"server": {"base_url": "http://127.0.0.1/v1"}}, "model"),
    ],
)
def test_settings_that_cannot_work_are_refused(args, names):
    with pytest.raises((ValueError, TypeError), match=names):
        VLMJudge(**{"server": {"model": "m"}} | args)


def test_a_version_has_no_address_that_differs_in_every_process():
    assert all(" at 0x" not in repr(rubric) for rubric in RUBRICS.values())
