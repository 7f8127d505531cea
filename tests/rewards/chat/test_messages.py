import numpy as np
import pytest
import torch
from chat_servers import completion, images_of, scripted
from flowrl_rewards.chat.client import Chat
from flowrl_rewards.chat.messages import Question, Reply
from flowrl_rewards.images import pngs, to_uint8


def question(text="?", *images, **more) -> Question:
    return Question(images=images, text=text, **more)


def ask(server, *questions: Question, **args) -> list[Reply]:
    return Chat("m", server.url, **args).ask(questions or (question(),))


def test_images_arrive_without_loss_and_before_the_text():
    images = torch.randint(0, 256, (2, 3, 5, 9), generator=torch.Generator().manual_seed(0)) / 255
    with scripted(lambda body: completion("ok")) as server:
        ask(server, question("what?", *pngs(images, 64)))
    assert np.array_equal(np.stack(images_of(server.asked[0])), to_uint8(images))
    parts = server.asked[0]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]


def test_probabilities_of_the_first_token_are_asked_for_and_read_and_told_when_absent():
    with scripted(lambda body: completion("4", {"4": 0.75, " 5": 0.25})) as server:
        (reply,) = ask(server, question(alternatives=20))
    assert server.asked[0]["logprobs"] is True and server.asked[0]["top_logprobs"] == 20
    assert dict(reply.first) == {"4": pytest.approx(0.75), " 5": pytest.approx(0.25)}
    with scripted(lambda body: completion("5")) as server:
        assert "no log-probabilities" in ask(server, question(alternatives=20))[0].missing
        assert len(server.asked) == 1


def test_thoughts_that_were_not_asked_for_make_a_reply_useless():
    for message in (
        {"text": "<think>hm</think>5"},
        {"text": "hm</think>5"},
        {"text": "5", "reasoning_content": "hm"},
        {"text": "5", "reasoning": "hm"},
    ):
        answer = completion(**message)
        with scripted(lambda body, answer=answer: answer) as server:
            assert f"{server.url} thinks" in ask(server)[0].missing, message
            assert len(server.asked) == 1
            assert ask(server, thinking=True)[0].text == "5", message
            assert server.asked[-1]["chat_template_kwargs"] == {"enable_thinking": True}


def test_an_answer_that_was_cut_asks_for_more_tokens_with_and_without_thoughts():
    for message, reason in (
        ({"text": "a score of 4"}, "length"),
        ({"text": "", "reasoning": "4? 3?"}, "length"),
        ({"text": "<think>well, 5"}, "stop"),
    ):
        cut = completion(**message)
        cut["choices"][0]["finish_reason"] = reason
        with scripted(lambda body, cut=cut: cut) as server:
            assert "max_tokens" in ask(server, thinking=True)[0].missing, message
            assert len(server.asked) == 1, message
