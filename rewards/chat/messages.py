"""Requests to a model on a chat server, and what its answers and refusals mean."""

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LEAST_SECRET = 8  # characters of a key that are never shown in a row
MESSAGE = 200  # characters of a server's message that are shown
LONGEST_REST_S = 120.0  # whatever Retry-After a server sends
FILTERED = "content_filter"  # how an answer ends that the server withholds
T = TypeVar("T")


# --- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request: images (PNG files), then a text."""

    images: tuple[bytes, ...]
    text: str
    max_tokens: int = 1  # of the answer
    alternatives: int = 0  # likeliest first tokens whose probabilities are returned, at most 20
    begins: str = ""  # start of the answer, which the model continues


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, or the reason why it is missing."""

    text: str = ""
    first: tuple[tuple[str, float], ...] = ()  # spelling and probability of likely first tokens
    missing: str = ""  # the reason, "" where there is an answer

    def answer(self) -> "Reply":
        """Return itself. Raises ValueError with the reason when it is missing."""
        if self.missing:
            raise ValueError(self.missing)
        return self


def check_template(template: str, field: str = "prompt") -> None:
    """Raise ValueError unless a judge's question holds {field}."""
    if f"{{{field}}}" not in template:
        raise ValueError(f"template must hold {{{field}}} where the {field} goes")


def digest(*settings: Any) -> str:
    """Return eight hex digits for a judge's version: of its question and how answers are read."""
    return hashlib.sha256(repr(settings).encode()).hexdigest()[:8]


def request(
    question: Question, model: str, thinking: bool | None, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON of a chat completion; parameters: others, None for one to leave out."""
    urls = (base64.b64encode(image).decode() for image in question.images)
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}} for url in urls
    ]
    content.append({"type": "text", "text": question.text})
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    arguments: dict[str, Any] = {"model": model, "messages": messages}
    arguments |= {"temperature": 0.0, "max_tokens": question.max_tokens}
    if question.begins:  # vLLM and SGLang continue an unfinished turn of the assistant
        messages.append({"role": "assistant", "content": question.begins})
        arguments |= {"add_generation_prompt": False, "continue_final_message": True}
    if question.alternatives:
        arguments |= {"logprobs": True, "top_logprobs": question.alternatives}
    if thinking is not None:
        arguments["chat_template_kwargs"] = {"enable_thinking": thinking}
    arguments |= parameters
    return {name: value for name, value in arguments.items() if value is not None}


# --- answers --------------------------------------------------------------------------------------


class Failure(Exception):
    """Why a try failed, in words that follow the server's address, and what may be done.

    Args:
        retry: "again" until the deadline, "few" times, or "never" for this question.
        retry_after: seconds, None where the server does not say.
        limited: the server had too many questions.
        no_quota: no question of this account will be answered.
    """

    def __init__(
        self, words: str, retry: Literal["again", "few", "never"], *,
        retry_after: float | None = None, limited: bool = False, no_quota: bool = False,
    ):  # fmt: skip
        super().__init__(words)
        self.retry: Literal["again", "few", "never"] = retry
        self.retry_after, self.limited, self.no_quota = retry_after, limited, no_quota


def read_reply(answer: Any, question: Question, thinking: bool | None) -> Reply:
    """Return the reply in the JSON of a chat completion.

    Raises Failure for anything else, for a text that was cut (it may hold a score that was only
    considered), for unwanted thoughts and for missing log-probabilities.
    """
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        text = message.get("content") or ""
        if not isinstance(text, str):
            raise TypeError
    except (AttributeError, IndexError, KeyError, TypeError):
        raise no_completion(answer) from None
    thoughts = (message.get(name) for name in ("reasoning_content", "reasoning"))
    opened, closed = text.lstrip().startswith("<think>"), "</think>" in text
    if not thinking and (opened or closed or any(thoughts)):
        raise Failure(
            "thinks before it answers: switch that off where the server is started, or take a "
            "model that does not think", "never",
        )  # fmt: skip
    if opened and not closed:
        raise Failure("thinks up to the end of its answer: raise max_tokens", "never")
    if not question.alternatives and choice.get("finish_reason") == "length":
        words = f"did not complete its answer in {question.max_tokens} tokens: raise max_tokens"
        raise Failure(words, "never")
    if not text.strip() and (message.get("refusal") or choice.get("finish_reason") == FILTERED):
        words = _quote(message.get("refusal") or choice)
        raise Failure(f"refuses to answer ({words}): look at the prompt and the image", "never")
    first: tuple[tuple[str, float], ...] = ()
    if question.alternatives:
        try:
            tokens = (choice.get("logprobs") or {}).get("content")
            likeliest = tokens[0]["top_logprobs"] if tokens else ()
            first = tuple((top["token"], math.exp(top["logprob"])) for top in likeliest)
        except (ArithmeticError, AttributeError, LookupError, TypeError):
            raise no_completion(answer) from None
        if not tokens:
            raise Failure(
                "gives no log-probabilities: take a rubric or mode that reads text, or a server "
                "that gives them, such as vLLM, or SGLang without a reasoning parser", "never",
            )  # fmt: skip
    return Reply(text=text.rpartition("</think>")[2].strip(), first=first)


def no_completion(answer: Any) -> Failure:
    """Return the failure of an answer with status 200 that is no chat completion."""
    words = f"answered 200 without a chat completion ({_quote(answer)}): {_ADVICE[200]}"
    return Failure(words, "few")


def _quote(answer: Any) -> str:
    """Return the words of an answer that is no completion: those of its error, if it has one."""
    if isinstance(answer, Mapping) and answer.get("error"):
        answer = answer["error"]
        answer = answer.get("message", answer) if isinstance(answer, Mapping) else answer
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return " ".join(text.split())[:MESSAGE] or "nothing"


# --- refusals -------------------------------------------------------------------------------------

_ADVICE = {  # by status
    200: "see its log, and that base_url ends in /v1",
    400: "see that the server lists this model and that it takes images, or set parameters",
    401: "it does not take the key: see the variable that api_key_env names",
    402: "the account has to be paid: no retry mends that",
    403: "the key may not use this model: see the account, and api_key_env",
    404: "no such model, or no chat at this address: base_url ends in /v1, model is one that the "
    "server lists",
    408: "raise timeout, or lower in_flight",
    413: "the images are too large: lower longest",
    422: "see that the server lists this model and that it takes images, or set parameters",
    429: "lower in_flight",
    503: "it is loading or overloaded: wait, or lower in_flight",
    504: "a proxy gave up waiting: lower in_flight, or raise its timeout",
}
_SERVER_ADVICE = "see its log"


def refusal(code: int, headers: Mapping[str, str], answer: Any) -> Failure:
    """Return what another status than 200 says."""
    whole = answer if isinstance(answer, str) else json.dumps(answer)
    words = f"answered {code} ({_quote(answer)})"
    if "insufficient_quota" in whole:
        words = f"{words}: the account's quota is used up, and no retry mends that"
        return Failure(words, "never", no_quota=True)
    advice = _ADVICE.get(code, _SERVER_ADVICE if code >= 500 else _ADVICE[404])
    if code >= 500 or code in (408, 409, 425, 429):
        after = _retry_after(headers.get("retry-after"))
        return Failure(f"{words}: {advice}", "again", retry_after=after, limited=code == 429)
    return Failure(f"{words}: {advice}", "never")


def _retry_after(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header, at most `LONGEST_REST_S`.

    None without one, and for a date.
    """
    try:
        seconds = float(text or "nan")
    except ValueError:
        return None
    return None if math.isnan(seconds) else min(max(0.0, seconds), LONGEST_REST_S)


def redacted(text: str, secret: str) -> str:
    """Return the text without any `LEAST_SECRET` characters in a row of a secret."""
    starts = range(max(1, len(secret) - LEAST_SECRET + 1)) if secret else ()
    pieces = [secret, *(secret[start : start + LEAST_SECRET] for start in starts)]
    pieces = [re.escape(piece) for piece in pieces if piece]  # the whole one first
    return re.sub("|".join(pieces), "***", text) if pieces else text


# --- scores ---------------------------------------------------------------------------------------


def scored(judge: Callable[[T], float], answers: Sequence[T]) -> tuple[list[float], dict[int, str]]:
    """Return judge(answer) of each, and why scores are missing: the ValueErrors it raised."""
    scores: list[float] = []
    reasons: dict[int, str] = {}
    for row, answer in enumerate(answers):
        try:
            scores.append(judge(answer))
        except ValueError as error:
            scores.append(math.nan)
            reasons[row] = str(error)
    return scores, reasons


def text_score(text: str, pattern: str, lowest: float, highest: float) -> float:
    """Return the number that `pattern`'s group matches last in `text`.

    Raises ValueError when nothing matches, and when the last match is no number ("4/10", "1-5") or
    lies outside [lowest, highest]; earlier matches do not count.
    """
    matches = re.findall(pattern, text)
    if not matches:
        raise ValueError(
            f"the answer has no score as {pattern} (it ends in {text[-80:]!r}): see the rubric's "
            "question, and max_tokens"
        )
    number = matches[-1].rstrip(".,")  # of the sentence around it
    if not _NUMBER.fullmatch(number) or not lowest <= float(number) <= highest:
        raise ValueError(
            f"the answer's score is {matches[-1]!r}, expected a number from {lowest:g} to "
            f"{highest:g}"
        )
    return float(number)
