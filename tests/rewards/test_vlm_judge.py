import math

import pytest
import torch
from chat_servers import completion, images_of, redness, refusal, scripted, text_of
from flowrl_rewards.fixtures import square
from flowrl_rewards.vlm_judge import VLMJudge

IMAGES = torch.stack([square("red", 32), square("blue", 32)])
PROMPTS = ["a red square", "a red square"]


def judged(script, mode="expectation", images=IMAGES, prompts=PROMPTS, **args):
    with scripted(script) as server:
        made = VLMJudge({"model": "m", "base_url": server.url, "rounds": 1}, mode, **args)
        scores, reasons = made(images, prompts, [{}] * len(images))
    return made, server, scores, reasons


def by_colour(body):
    likes = 0.1 + 0.8 * redness(images_of(body)[0])
    return completion("5", {"5": likes, "0": 1 - likes})


def test_all_mass_on_one_score_is_its_share_of_the_best():
    for answer in range(6):
        said = completion("", {f" {answer}": 1.0})
        _, _, scores, reasons = judged(lambda body, said=said: said)
        assert scores == [pytest.approx(answer / 5)] * 2 and not reasons


def test_each_image_is_judged_by_what_it_shows_with_one_token_of_twenty_alternatives():
    _, server, (red, blue), _ = judged(by_colour)
    assert red > blue
    for body in server.asked:
        assert (body["max_tokens"], body["top_logprobs"]) == (1, 20)
        assert "a red square" in text_of(body) and "0, 1, 2, 3, 4, 5" in text_of(body)
    prompt = "{prompt} {answers} {lowest} 100%"  # which arrives as it is
    _, server, _, _ = judged(by_colour, images=IMAGES[:1], prompts=[prompt])
    assert prompt in text_of(server.asked[0])


def test_letters_may_stand_for_scores():
    letters = {"A": 4, "B": 2, "C": 1}
    made, server, scores, _ = judged(
        lambda body: completion("", {"b": 0.5, "A": 0.5}), scores=letters
    )
    assert scores == [pytest.approx(0.75)] * 2
    assert made.bounds == (0.25, 1.0)
    assert "one of C, B, A" in text_of(server.asked[0])


def test_yes_or_no():
    _, _, scores, _ = judged(
        lambda b: completion("", {"Yes": 0.45, "yes": 0.15, "No": 0.2}), "yes_no"
    )
    assert scores == [pytest.approx(0.75)] * 2


def test_a_text_is_read_by_its_last_score_or_by_a_pattern_of_ones_own():
    text = "I see <Score>1</Score> no, <Score> 4 </Score>"
    _, server, scores, _ = judged(lambda body: completion(text), "text", max_tokens=99)
    assert scores == [0.8, 0.8]
    assert server.asked[0]["max_tokens"] == 99 and "logprobs" not in server.asked[0]
    ten = {str(n): n for n in range(11)}
    for said, args, expected in (
        ("<Score>10</Score>", {}, 1.0),
        ("rated 7/10", {"pattern": r"(\d+)/10"}, 0.7),
    ):
        answer = completion(said)
        found = judged(lambda body, answer=answer: answer, "text", scores=ten, **args)[2]
        assert found == [expected] * 2


def test_a_text_without_a_score_is_missing_not_0():
    four = "<Score>4</Score>"
    for text in ("", "4", "<Score>four</Score>", "<Score>9</Score>", "<Score>-1</Score>",
                 "<Score>4/10</Score>", f"{four}, I mean <Score>4,5</Score>"):  # fmt: skip
        answer = completion(text)
        _, _, scores, reasons = judged(lambda body, answer=answer: answer, "text")
        assert all(map(math.isnan, scores)) and set(reasons) == {0, 1}, text
        assert "score" in reasons[0], text


def test_a_text_that_was_cut_is_missing_but_one_token_counts():
    cut = completion("as a draft <Score>1</Score> but it is", {"5": 1.0})
    cut["choices"][0]["finish_reason"] = "length"
    _, _, scores, reasons = judged(lambda body: cut, "text")
    assert all(map(math.isnan, scores)) and "max_tokens" in reasons[0]
    assert judged(lambda body: cut)[2] == [1.0, 1.0]


def test_answers_beside_the_point_are_missing_not_0():
    _, _, scores, reasons = judged(lambda body: completion("", {"The": 0.6, "0": 0.4}))
    assert all(map(math.isnan, scores))
    assert "only 0.40 of the probability lies on 0, 1" in reasons[0]


def test_a_failed_question_spoils_no_other_score():
    def script(body):
        return refusal(400) if redness(images_of(body)[0]) < 0.5 else by_colour(body)

    _, _, (red, blue), reasons = judged(script)
    assert red > 0.5 and math.isnan(blue)
    assert list(reasons) == [1] and "answered 400" in reasons[1]


def test_the_version_tells_judges_apart_whose_numbers_differ():
    server = {"model": "m"}
    judges = [VLMJudge(server), VLMJudge({"model": "n"}), VLMJudge(server, "yes_no")]
    changes = ({"template": "{prompt}?"}, {"scores": {"1": 1, "2": 2}}, {"longest": 256})
    versions = {judge.version for judge in (*judges, *(VLMJudge(server, **c) for c in changes))}
    assert len(versions) == 6


def test_settings_that_cannot_work_are_refused():
    for args, says in (
        ({"mode": "maybe"}, "mode"),
        ({"template": "good?"}, "{prompt}"),
        ({"scores": {"1": 1.0}}, "two or more"),
        ({"scores": {"a": 1.0, "A": 2.0}}, "two or more"),
        ({"scores": {"a": 0.0, "b": -1.0}}, "above 0"),
        ({"scores": {str(n): n for n in range(1, 11)}}, "'1' .*'10'"),
        ({"scores": {"Good": 1, "goodish": 0.5}}, "'Good' .*'goodish'"),
        ({"mode": "text", "pattern": "("}, "pattern"),
        ({"mode": "text", "pattern": r"\d+"}, "one group"),
        ({"server": None}, "needs the server"),
        ({"server": {"base_url": "http://127.0.0.1/v1"}}, "model"),
        ({"server": {"model": "m", "url": "http://127.0.0.1/v1"}}, "'url'"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            VLMJudge(**{"server": {"model": "m"}} | args)


def test_its_fixtures_ask_for_what_the_better_image_shows():
    for case in VLMJudge({"model": "m"}).fixtures():
        better, worse = (
            redness(case[k].permute(1, 2, 0).numpy() * 255) for k in ("better", "worse")
        )
        assert (better > worse) == ("red" in case["prompt"])
