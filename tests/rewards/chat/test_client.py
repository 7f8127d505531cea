"""Questions to a judge: what is sent, what is read, and what becomes of faults."""

import pytest
import torch
from chat_servers import Scripted, completion, free_port, refusal, text_of
from chat_servers import within as no_longer_than
from flowrl_rewards.chat import client as chat_module
from flowrl_rewards.chat.client import Chat
from flowrl_rewards.chat.messages import Question, Reply
from flowrl_rewards.images import pngs

RED = pngs(torch.tensor([1.0, 0, 0])[None, :, None, None].expand(1, 3, 8, 8), 8)[0]
BLUE = pngs(torch.tensor([0, 0, 1.0])[None, :, None, None].expand(1, 3, 8, 8), 8)[0]
SLACK = 1.5  # seconds, for a busy machine


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(chat_module, "PAUSE_S", 0.01)


def question(text="?", *images, **more) -> Question:
    return Question(images=images or (RED,), text=text, **more)


def echo(body: dict) -> dict:
    return completion(f"{text_of(body)} by {body['model']} in {body['max_tokens']}")


def ask(server: Scripted | str, *questions: Question, **args) -> list[Reply]:
    url = server if isinstance(server, str) else server.url
    settings = {"timeout": 5.0, "deadline": 10.0} | args
    return Chat("m", url, **settings).ask(questions or (question(),))


def test_answers_are_greedy_in_order_and_thinking_is_switched_off_where_the_server_knows_of_it():
    with Scripted(echo) as server:
        replies = ask(server, *(question(f"q{n}", max_tokens=n) for n in range(1, 30)))
        assert [r.text for r in replies] == [f"q{n} by m in {n}" for n in range(1, 30)]
        for body in server.asked:
            assert body["temperature"] == 0 and "logprobs" not in body
            assert body["chat_template_kwargs"] == {"enable_thinking": False}
        ask(server, thinking=None)
        assert "chat_template_kwargs" not in server.asked[-1]


def test_probabilities_of_the_first_token_are_asked_for_and_read_and_told_when_absent():
    with Scripted(lambda body: completion("4", {"4": 0.75, " 5": 0.25})) as server:
        (reply,) = ask(server, question(alternatives=20))
    assert server.asked[0]["logprobs"] is True and server.asked[0]["top_logprobs"] == 20
    assert dict(reply.first) == {"4": pytest.approx(0.75), " 5": pytest.approx(0.25)}
    with Scripted(lambda body: completion("5")) as server:
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
        with Scripted(lambda body, answer=answer: answer) as server:
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
        with Scripted(lambda body, cut=cut: cut) as server:
            assert "max_tokens" in ask(server, thinking=True)[0].missing, message
            assert len(server.asked) == 1, message


NO_PROBABILITY = completion("5")
NO_PROBABILITY["choices"][0]["logprobs"] = {
    "content": [{"top_logprobs": [{"token": "5", "logprob": None}]}]
}
WITHHELD = completion("")
WITHHELD["choices"][0]["finish_reason"] = "content_filter"
FAULTS = (  # what the server answers, or a function of it; the words of the reason
    (None, "cannot be reached"),
    (lambda server: server.hang, "0.3 s"),
    (lambda server: server.drip, "0.3 s"),
    (lambda server: server.truncated, "broke off"),
    ({"choices": []}, "without a chat completion"),
    (b"[" * 100_000, "without a chat completion"),
    (NO_PROBABILITY, "without a chat completion"),
    (completion("", refusal="I cannot judge people"), "I cannot judge people"),
    (WITHHELD, "content_filter"),
    ({"error": {"message": "model is loading", "code": 503}}, r"\(model is loading\)"),
    ({"object": "error", "message": "no such adapter"}, "no such adapter"),
    ((401, {}, b'{"error": {"message": "Incorrect key"}}'), "Incorrect.*does not take the key"),
    (refusal(404), "404.*/v1"),
    ((413, {}, b"too big"), "too big.*longest"),
    ((500, {}, b'{"error": {"message": "CUDA"}}'), "CUDA.*its log"),
    ((503, {}, b""), "loading"),
)


@pytest.mark.parametrize("fault, says", FAULTS)
def test_a_fault_is_a_missing_reply_in_time_that_quotes_the_server_with_advice(fault, says):
    several = [question(f"q{n}", alternatives=20) for n in range(3)]
    with Scripted(lambda body: fault(server) if callable(fault) else fault) as server:
        url = server.url if fault else f"http://127.0.0.1:{free_port()}/v1"
        with no_longer_than(1 + SLACK):
            replies = ask(url, *several, timeout=0.3, deadline=1)
    for reply in replies:
        with pytest.raises(ValueError, match=says):
            reply.answer()
        assert reply.missing.startswith(url) and "Error" not in reply.missing
        assert not reply.text and not reply.first
    if isinstance(fault, tuple) and fault[0] < 500:
        assert len(server.asked) == len(several)  # a mistake of ours is not sent again


def test_replies_that_came_before_the_deadline_are_kept():
    def script(body):
        return server.hang if text_of(body) == "slow" else completion("here")

    with Scripted(script) as server, no_longer_than(0.5 + SLACK):
        slow, fast = ask(server, question("slow"), question("fast"), deadline=0.5, in_flight=2)
    assert fast.text == "here"
    assert "deadline of 0.5 s" in slow.missing and server.url in slow.missing


def test_a_damaged_file_of_replies_is_named(tmp_path):
    (tmp_path / "judge.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(ValueError, match=r"judge\.sqlite"):
        Chat("m", cache=str(tmp_path)).ask([question("a")])


def test_with_a_cache_a_question_is_never_asked_again_and_other_ones_are(tmp_path):
    different = [
        *(question("a", *images) for images in ((), (BLUE,), (RED, BLUE), (BLUE, RED))),
        *(question("b"), question("a", max_tokens=9), question("a", alternatives=5)),
        question("a", begins="It is"),
    ]
    cache = str(tmp_path)
    with Scripted(lambda body: completion("5", {"5": 0.75, "4": 0.25})) as server:
        chat = Chat("m", server.url, cache=cache)
        first = chat.ask([*different, *different])
        assert first[: len(different)] == first[len(different) :]
        again = Chat("m", server.url, cache=cache)
        assert again.ask(different) == first[: len(different)]
        assert len(server.asked) == len(different)
        Chat("other", server.url, cache=cache).ask(different[:1])
        Chat("m", server.url).ask(different[:1])
        assert len(server.asked) == len(different) + 2


def test_the_key_comes_from_the_named_variable_only(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of another service")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with Scripted(echo) as server:
        ask(server)
        ask(server, api_key_env="JUDGE_KEY")
        assert server.keys == ["Bearer none", "Bearer secret"]
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(ValueError, match="variable JUDGE_KEY holds no key"):
            ask(server, api_key_env="JUDGE_KEY")
