"""Requests to a model on a chat server, and the meaning of its answers and failures."""

import base64
import contextlib
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LEAST_SECRET = 8  # characters of a key that are never shown in a row
MESSAGE = 200  # characters of a server's message that are shown
MAX_ANSWER = 4 * 2**20  # bytes
LONGEST_REST_S = 120.0  # whatever Retry-After a server sends
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
    question: Question, model: str, thinking: bool | None, left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Return arguments of a chat completion; left_out: parameters that the server refuses."""
    urls = (base64.b64encode(image).decode() for image in question.images)
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}} for url in urls
    ]
    content.append({"type": "text", "text": question.text})
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    extra: dict[str, Any] = {}
    if question.begins:  # vLLM and SGLang continue an unfinished turn of the assistant
        messages.append({"role": "assistant", "content": question.begins})
        extra = {"add_generation_prompt": False, "continue_final_message": True}
    arguments: dict[str, Any] = {"model": model, "messages": messages}
    arguments |= {"temperature": 0.0, "max_tokens": question.max_tokens}
    if question.alternatives:
        arguments |= {"logprobs": True, "top_logprobs": question.alternatives}
    if thinking is not None:
        extra["chat_template_kwargs"] = {"enable_thinking": thinking}
    if "max_tokens" in left_out:  # OpenAI's newer models have another name for it
        arguments["max_completion_tokens"] = arguments.pop("max_tokens")
    extra = {name: value for name, value in extra.items() if name not in left_out}
    arguments = {name: value for name, value in arguments.items() if name not in left_out}
    return arguments | ({"extra_body": extra} if extra else {})


# --- answers --------------------------------------------------------------------------------------


class Unusable(ValueError):
    """An answer that a retry cannot mend."""


class Cut(Unusable):
    """An answer that was cut at max_tokens."""


class NoCompletion(ValueError):
    """An answer with status 200 that is no chat completion; the message quotes it."""


class TooLong(ValueError):
    """An answer of more than `MAX_ANSWER` bytes."""


def read_reply(completion: Any, question: Question, thinking: bool | None) -> Reply:
    """Return the reply in a chat completion.

    Raises NoCompletion for anything else, Cut for a text that was cut (it may hold a score that was
    only considered), and Unusable for unwanted thoughts and for missing log-probabilities.
    """
    try:
        choice = completion.choices[0]
        text = choice.message.content or ""
        if not isinstance(text, str):
            raise TypeError
    except (AttributeError, IndexError, TypeError):
        raise NoCompletion(_quote(completion)) from None
    thoughts = (getattr(choice.message, n, None) for n in ("reasoning_content", "reasoning"))
    opened, closed = text.lstrip().startswith("<think>"), "</think>" in text
    if not thinking and (opened or closed or any(thoughts)):
        raise Unusable(
            "thinks before it answers: switch that off where the server is started, or take a "
            "model that does not think"
        )
    if opened and not closed:
        raise Unusable("thinks up to the end of its answer: raise max_tokens")
    if not question.alternatives and getattr(choice, "finish_reason", None) == "length":
        raise Cut(f"did not complete its answer in {question.max_tokens} tokens: raise max_tokens")
    first: tuple[tuple[str, float], ...] = ()
    if question.alternatives:
        tokens = choice.logprobs and choice.logprobs.content
        if not tokens:
            raise Unusable(
                "gives no log-probabilities: take a rubric or mode that reads text, or a server "
                "that gives them, such as vLLM, or SGLang without a reasoning parser"
            )
        try:
            first = tuple((top.token, math.exp(top.logprob)) for top in tokens[0].top_logprobs)
        except (AttributeError, IndexError, TypeError):
            raise NoCompletion(_quote(completion)) from None
    return Reply(text=text.rpartition("</think>")[2].strip(), first=first)


def _quote(answer: Any) -> str:
    """Return the words of an answer that is no completion: those of its error, if it has one."""
    if hasattr(answer, "model_dump"):
        answer = {k: v for k, v in answer.model_dump(warnings=False).items() if v is not None}
    if isinstance(answer, Mapping) and answer.get("error"):
        answer = answer["error"]
        answer = answer.get("message", answer) if isinstance(answer, Mapping) else answer
    text = answer if isinstance(answer, str) else json.dumps(answer, default=str)
    return " ".join(text.split())[:MESSAGE] or "nothing"


# --- failures -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a try failed, and what may be done.

    kind: "again" is retried until the deadline, "few" a few times, "cut" where the server completes
    other answers; "final" never mends for this question, "quota" for none.
    """

    words: str
    kind: Literal["again", "few", "cut", "final", "quota"]
    retry_after: float | None = None  # seconds, None where the server does not say
    refuses: str = ""  # a parameter that the server does not take
    limited: bool = False  # the server had too many questions


def failure(openai: Any, error: Any, timeout: float, arguments: Mapping[str, Any]) -> Failure:
    """Return what happened in a try that sent these arguments."""
    if isinstance(error, Cut):
        return Failure(words=str(error), kind="cut")
    if isinstance(error, Unusable):
        return Failure(words=str(error), kind="final")
    if isinstance(error, TimeoutError):
        words = f"did not answer within {timeout:g} s: raise timeout, or lower in_flight"
        return Failure(words=words, kind="few")
    if isinstance(error, openai.APIStatusError):
        return _refusal(error, arguments)
    cause = error.__cause__ or error
    if isinstance(cause, TooLong):
        return Failure(words=str(cause), kind="few")
    if isinstance(error, openai.APIConnectionError):
        if type(cause).__name__ in ("RemoteProtocolError", "ReadError"):
            return Failure(words=f"broke off its answer ({cause})", kind="again")
        words = f"cannot be reached ({cause}): is it running, is base_url right?"
        return Failure(words=words, kind="few")
    said = str(error) if isinstance(error, NoCompletion) else f"{type(error).__name__}: {error}"
    words = f"answered 200 without a chat completion ({said[:MESSAGE]}): {_HINTS[200]}"
    return Failure(words=words, kind="few")


_HINTS = {  # advice by status
    200: "see its log, and that base_url ends in /v1",
    400: "see that model is one that the server lists, and that it takes images",
    401: "it does not take the key: see the variable that api_key_env names",
    402: "the account has to be paid: no retry mends that",
    403: "the key may not use this model: see the account, and api_key_env",
    404: "no such model, or no chat at this address: base_url ends in /v1, model is one that the "
    "server lists",
    408: "raise timeout, or lower in_flight",
    413: "the images are too large: lower longest",
    422: "see that model is one that the server lists, and that it takes images",
    429: "lower in_flight, or set requests_per_minute",
    503: "it is loading or overloaded: wait, or lower in_flight",
    504: "a proxy gave up waiting: lower in_flight, or raise its timeout",
}
_SERVER_HINT = "see its log"
_UNKNOWN = re.compile(
    r"unsupported|not support|unknown|unrecognized|unexpected|not permitted|extra (inputs|fields)"
    r"|only the default",
    re.IGNORECASE,
)
# Without probabilities, which are not among them, there is no score.
_OPTIONAL = ("chat_template_kwargs", "enable_thinking", "temperature", "max_tokens")


def _refusal(error: Any, arguments: Mapping[str, Any]) -> Failure:
    code = error.status_code
    text = _quote(_body(error.response))
    hint = _HINTS.get(code, _SERVER_HINT if code >= 500 else _HINTS[404])
    words = f"answered {code} ({text}): {hint}"
    if "insufficient_quota" in f"{error} {error.body}":
        words = f"answered {code} ({text}): the account's quota is used up, and no retry mends that"
        return Failure(words=words, kind="quota")
    after = _retry_after(error.response.headers.get("retry-after"))
    if code == 429 or code >= 500 or code in (408, 409, 425):
        return Failure(words=words, kind="again", retry_after=after, limited=code == 429)
    if parameter := _refused_parameter(error, arguments):
        return Failure(words=f"answered {code} ({text})", kind="again", refuses=parameter)
    return Failure(words=words, kind="final")


def _body(response: Any) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(response.text)
    return response.text


def _refused_parameter(error: Any, arguments: Mapping[str, Any]) -> str:
    """Return the parameter that a server does not know, "" for none that can be left out."""
    text = f"{error} {error.body}"
    if error.status_code not in (400, 422) or not _UNKNOWN.search(text):
        return ""
    sent = {*arguments, *arguments.get("extra_body", {})}
    for name in _OPTIONAL:
        if re.search(rf"\b{name}\b", text):
            parameter = "chat_template_kwargs" if name == "enable_thinking" else name
            return parameter if parameter in sent else ""
    return ""


def _retry_after(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header, at most `LONGEST_REST_S`; None without one."""
    if text is None:
        return None
    seconds = math.nan
    with contextlib.suppress(ValueError):
        seconds = float(text)
    if math.isnan(seconds):  # a date
        with contextlib.suppress(ValueError, TypeError, OverflowError):
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
    return None if math.isnan(seconds) else min(max(0.0, seconds), LONGEST_REST_S)


# --- scores ---------------------------------------------------------------------------------------


def redacted(text: str, secret: str) -> str:
    """Return the text without any part of a secret of `LEAST_SECRET` characters or more."""
    if len(secret) < LEAST_SECRET:
        return text.replace(secret, "***") if secret else text
    parts, at = [], 0
    while at < len(text):
        end = at + LEAST_SECRET
        if text[at:end] not in secret or end > len(text):
            parts.append(text[at])
            at += 1
            continue
        while end < len(text) and text[at : end + 1] in secret:
            end += 1
        parts.append("***")
        at = end
    return "".join(parts)


def scored(judge: Callable[[T], float], answers: Sequence[T]) -> tuple[list[float], dict[int, str]]:
    """Return judge(answer) of each, and why scores are missing: the ValueErrors it raised."""
    parts, reasons = scored_parts(lambda answer: {"": judge(answer)}, answers, [""])
    return parts[""], reasons


def scored_parts(
    judge: Callable[[T], Mapping[str, float]], answers: Sequence[T], components: Sequence[str]
) -> tuple[dict[str, list[float]], dict[int, str]]:
    """Return judge(answer) of each as lists by component; see `scored`."""
    rows: list[Mapping[str, float]] = []
    reasons: dict[int, str] = {}
    for row, answer in enumerate(answers):
        try:
            rows.append(judge(answer))
        except ValueError as error:
            rows.append({})
            reasons[row] = str(error)
    return {name: [row.get(name, math.nan) for row in rows] for name in components}, reasons


def text_score(
    text: str, pattern: str, lowest: float, highest: float, *, optional: bool = False
) -> float | None:
    """Return the number that `pattern`'s group matches last in `text`, None for an optional "N/A".

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
    if optional and number.upper() == "N/A":
        return None
    if not _NUMBER.fullmatch(number) or not lowest <= float(number) <= highest:
        raise ValueError(
            f"the answer's score is {matches[-1]!r}, expected a number from {lowest:g} to "
            f"{highest:g}"
        )
    return float(number)
