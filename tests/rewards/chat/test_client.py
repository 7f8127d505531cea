import pytest
import torch
from chat_servers import Scripted, completion, free_port, refusal, scripted, text_of
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
    chat_module.import_openai()  # slow the first time, and time counts here
    monkeypatch.setattr(chat_module, "PAUSE_S", 0.01)


def question(text="?", *images, **more) -> Question:
    return Question(images=images or (RED,), text=text, **more)


def echo(body: dict) -> dict:
    return completion(f"{text_of(body)} by {body['model']} in {body['max_tokens']}")


def ask(server: Scripted | str, *questions: Question, **args) -> list[Reply]:
    url = server if isinstance(server, str) else server.url
    settings = {"timeout": 5.0, "deadline": 10.0, "rounds": 2} | args
    return Chat("m", url, **settings).ask(questions or (question(),))


def test_answers_are_greedy_in_order_and_thinking_is_switched_off_where_the_server_knows_of_it():
    with scripted(echo) as server:
        replies = ask(server, *(question(f"q{n}", max_tokens=n) for n in range(1, 30)))
        assert [r.text for r in replies] == [f"q{n} by m in {n}" for n in range(1, 30)]
        for body in server.asked:
            assert body["temperature"] == 0 and "logprobs" not in body
            assert body["chat_template_kwargs"] == {"enable_thinking": False}
        ask(server, thinking=None)
        assert "chat_template_kwargs" not in server.asked[-1]


NO_PROBABILITY = completion("5")
NO_PROBABILITY["choices"][0]["logprobs"] = {
    "content": [{"top_logprobs": [{"token": "5", "logprob": None}]}]
}
FAULTS = (  # what the server answers, given itself; the words of the reason
    (None, "cannot be reached"),
    (lambda server: refusal(500), "500"),
    (lambda server: refusal(404), "404.*/v1"),
    (lambda server: server.hang, "0.3 s"),
    (lambda server: server.drip, "0.3 s"),
    (lambda server: server.truncated, "broke off"),
    (lambda server: b"<html>", "without a chat completion"),
    (lambda server: (200, {"Content-Type": "text/plain"}, b"hi"), "without a chat completion"),
    (lambda server: {"choices": []}, "without a chat completion"),
    (lambda server: b"null", "without a chat completion"),
    (lambda server: completion({"a": 1}), "without a chat completion"),
    (lambda server: NO_PROBABILITY, "without a chat completion"),
)


def test_a_fault_is_a_missing_reply_that_names_the_server_in_time():
    several = [question(f"q{n}", alternatives=20) for n in range(3)]
    for fault, says in FAULTS:
        with scripted(lambda body, fault=fault: fault(server)) as server:
            url = server.url if fault else f"http://127.0.0.1:{free_port()}/v1"
            with no_longer_than(2 + SLACK):
                replies = ask(url, *several, timeout=0.3, deadline=2)
        for reply in replies:
            with pytest.raises(ValueError, match=says):
                reply.answer()
            assert reply.missing.startswith(url), says
            assert not reply.text and not reply.first, says


def test_what_another_try_mends_is_tried_again_and_a_mistake_of_ours_is_not():
    answers = [refusal(503), b"garbage", completion("at last")]
    with scripted(lambda body: answers.pop(0)) as server:
        assert ask(server, rounds=3)[0].text == "at last"
    with scripted(lambda body: refusal(401)) as server:
        assert "401" in ask(server, rounds=5)[0].missing
        assert len(server.asked) == 1


def test_replies_that_came_before_the_deadline_are_kept():
    def script(body):
        return server.hang if text_of(body) == "slow" else completion("here")

    with scripted(script) as server, no_longer_than(0.5 + SLACK):
        slow, fast = ask(server, question("slow"), question("fast"), deadline=0.5, in_flight=2)
    assert fast.text == "here"
    assert "deadline of 0.5 s" in slow.missing and server.url in slow.missing


def test_two_servers_share_the_questions_and_a_dead_one_leaves_its_own_to_the_other():
    several = [question(f"q{n}") for n in range(8)]
    with scripted(echo) as one, scripted(echo) as two:
        replies = Chat("m", [one.url, two.url]).ask(several)
        assert [r.text[:2] for r in replies] == [f"q{n}" for n in range(8)]
        assert len(one.asked) == len(two.asked) == 4
        dead = f"http://127.0.0.1:{free_port()}/v1"
        with no_longer_than(SLACK):
            assert all(reply.text for reply in Chat("m", [dead, one.url]).ask(several))


def test_the_same_question_is_asked_once_in_a_batch_and_with_a_cache_never_again():
    with scripted(echo) as server:
        forgets, keeps = Chat("m", server.url), Chat("m", server.url, cache=True)
        for chat, asked in ((forgets, (1, 2)), (keeps, (3, 3))):
            for total in asked:
                first, second = chat.ask([question(), question()])
                assert first == second and first.text
                assert len(server.asked) == total


def test_the_cache_separates_texts_images_lengths_and_probabilities():
    different = [
        *(question("a", *images) for images in ((), (BLUE,), (RED, BLUE), (BLUE, RED))),
        *(question("b"), question("a", max_tokens=9), question("a", alternatives=5)),
    ]
    with scripted(lambda body: completion("5", {"5": 1.0})) as server:
        chat = Chat("m", server.url, cache=True)
        chat.ask(different)
        chat.ask(different)
    assert len(server.asked) == len(different)


def test_the_key_comes_from_the_named_variable_only(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of another service")
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with scripted(echo) as server:
        ask(server)
        ask(server, api_key_env="JUDGE_KEY")
        assert server.keys == ["Bearer none", "Bearer secret"]
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(ValueError, match="variable JUDGE_KEY holds no key"):
            ask(server, api_key_env="JUDGE_KEY")
