"""What is said to a model on a chat server, and what its answers and failures mean."""

import base64
import contextlib
import hashlib
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Literal, TypeVar

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LEAST_SECRET = 8  # characters of a key that are never shown in a row
MESSAGE = 200  # characters of what a server says that are shown
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request: images (PNG files), then a text.

    max_tokens: how long the answer may be. alternatives: of how many spellings of its first token
    the probability is wanted, at most 20 on most servers; 0 for none. begins: the words that the
    answer goes on from.
    """

    images: tuple[bytes, ...]
    text: str
    max_tokens: int = 1
    alternatives: int = 0
    begins: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, or why there is none.

    first: (spelling, probability) of the likeliest first tokens; missing: "" when it is there.
    """

    text: str = ""
    first: tuple[tuple[str, float], ...] = ()
    missing: str = ""

    def heard(self) -> "Reply":
        """Itself. Raises ValueError with the reason when it is missing."""
        if self.missing:
            raise ValueError(self.missing)
        return self


def check_template(template: str, field: str = "prompt") -> None:
    """Raises ValueError unless the question that a judge asks holds {field}."""
    if f"{{{field}}}" not in template:
        raise ValueError(f"template must hold {{{field}}} where the {field} goes")


def digest(*said: Any) -> str:
    """Eight hex digits, for a judge's version: of its question and what reads the answer."""
    return hashlib.sha256(repr(said).encode()).hexdigest()[:8]


def request(
    question: Question, model: str, thinking: bool | None, left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Arguments of a chat completion; left_out: parameters that the server refuses."""
    urls = (base64.b64encode(image).decode() for image in question.images)
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}} for url in urls
    ]
    content.append({"type": "text", "text": question.text})
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    extra: dict[str, Any] = {}
    if question.begins:  # vLLM and SGLang go on with a turn of the assistant that is not ended
        messages.append({"role": "assistant", "content": question.begins})
        extra = {"add_generation_prompt": False, "continue_final_message": True}
    said: dict[str, Any] = {"model": model, "messages": messages}
    said |= {"temperature": 0.0, "max_tokens": question.max_tokens}
    if question.alternatives:
        said |= {"logprobs": True, "top_logprobs": question.alternatives}
    if thinking is not None:
        extra["chat_template_kwargs"] = {"enable_thinking": thinking}
    if "max_tokens" in left_out:  # OpenAI's newer models have another name for it
        said["max_completion_tokens"] = said.pop("max_tokens")
    extra = {name: value for name, value in extra.items() if name not in left_out}
    said = {name: value for name, value in said.items() if name not in left_out}
    return said | ({"extra_body": extra} if extra else {})


class Unusable(ValueError):
    """An answer that asking again cannot mend."""


class Cut(Unusable):
    """An answer that did not come to its end."""


def read_reply(completion: Any, question: Question, thinking: bool | None) -> Reply:
    """What a chat completion says.

    Raises Unusable for one with thoughts that were not asked for, for a text that was cut (it may
    hold a score that was only thought of), and for one without log-probabilities that were asked
    for; TypeError, AttributeError and the like for anything that is no chat completion.
    """
    choice = completion.choices[0]
    text = choice.message.content or ""
    if not isinstance(text, str):
        raise TypeError("the answer is no text")
    extra = (getattr(choice.message, n, None) for n in ("reasoning_content", "reasoning"))
    opened, closed = text.lstrip().startswith("<think>"), "</think>" in text
    if not thinking and (opened or closed or any(extra)):
        raise Unusable(
            "thinks before it answers: switch that off where the server is started, or take a "
            "model that does not think"
        )
    if opened and not closed:
        raise Unusable("thinks up to the end of its answer: raise max_tokens")
    if not question.alternatives and getattr(choice, "finish_reason", None) == "length":
        raise Cut(
            f"did not come to the end of its answer in {question.max_tokens} tokens: raise "
            "max_tokens"
        )
    first: tuple[tuple[str, float], ...] = ()
    if question.alternatives:
        places = choice.logprobs and choice.logprobs.content
        if not places:
            raise Unusable(
                "gives no log-probabilities: take a mode that reads text, or a server that gives "
                "them, such as vLLM, or SGLang without a reasoning parser"
            )
        first = tuple((at.token, math.exp(at.logprob)) for at in places[0].top_logprobs)
    return Reply(text=text.rpartition("</think>")[2].strip(), first=first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a try brought no answer, and what may be done.

    kind: "again" mends with time alone and is tried until the deadline; "few" is tried a few times,
    "cut" where the server ends other answers; "final" never mends for this question, "quota" for
    none. after: seconds that the server asks
    everybody to wait, None where it does not say. refuses: a parameter that it does not take.
    limited: the server had too many questions.
    """

    words: str
    kind: Literal["again", "few", "cut", "final", "quota"]
    after: float | None = None
    refuses: str = ""
    limited: bool = False


def failure(openai: Any, error: Any, timeout: float, sent: Mapping[str, Any]) -> Failure:
    """What happened in a try that sent these arguments."""
    if isinstance(error, Cut):
        return Failure(words=str(error), kind="cut")
    if isinstance(error, Unusable):
        return Failure(words=str(error), kind="final")
    if isinstance(error, TimeoutError):
        words = f"did not answer within {timeout:g} s: raise timeout, or lower in_flight"
        return Failure(words=words, kind="few")
    if isinstance(error, openai.APIConnectionError):
        cause = error.__cause__ or error
        if type(cause).__name__ in ("RemoteProtocolError", "ReadError"):
            return Failure(words=f"broke off its answer ({cause})", kind="again")
        words = f"cannot be reached ({cause}): is it running, is base_url right?"
        return Failure(words=words, kind="few")
    if isinstance(error, openai.APIStatusError):
        return _refusal(error, sent)
    words = f"answered with no chat completion ({type(error).__name__}: {str(error)[:100]})"
    return Failure(words=words, kind="few")


def _refusal(error: Any, sent: Mapping[str, Any]) -> Failure:
    code, after = error.status_code, _wait(error)
    said = str(error).removeprefix(f"Error code: {code} - ")[:MESSAGE]
    told = f"answered {code} ({said})"
    if "insufficient_quota" in f"{error} {error.body}":
        words = f"{told}: the account's quota is used up, which no waiting mends: pay, or lower use"
        return Failure(words=words, kind="quota")
    if code == 429:
        return Failure(words=told, kind="again", after=after, limited=True)
    if code >= 500 or code in (408, 409, 425):
        return Failure(words=told, kind="again", after=after)
    if refused := _refused_parameter(error, sent):
        return Failure(words=told, kind="again", refuses=refused)
    return Failure(words=f"{told}{_HINTS.get(code, _HINTS[400])}", kind="final")


_HINTS = {
    400: "; base_url ends in /v1, model is one that the server lists",
    401: ": it does not take the key: look at the variable that api_key_env names",
    403: ": the key may not use this model: look at the account, and at api_key_env",
    404: ": there is no such model, or nothing that chats at this address: base_url ends in /v1, "
    "model is one that the server lists",
}
_UNKNOWN = re.compile(
    r"unsupported|not support|unknown|unrecognized|unexpected|not permitted|extra (inputs|fields)"
    r"|only the default",
    re.IGNORECASE,
)
# Without probabilities, which are not among them, there is no score.
_OPTIONAL = ("chat_template_kwargs", "enable_thinking", "temperature", "max_tokens")


def _refused_parameter(error: Any, sent: Mapping[str, Any]) -> str:
    """The parameter that a server does not know, "" for none that can be left out."""
    said = f"{error} {error.body}"
    if error.status_code not in (400, 422) or not _UNKNOWN.search(said):
        return ""
    there = {*sent, *sent.get("extra_body", {})}
    for name in _OPTIONAL:
        if re.search(rf"\b{name}\b", said):
            known = "chat_template_kwargs" if name == "enable_thinking" else name
            return known if known in there else ""
    return ""


def _wait(error: Any) -> float | None:
    """Seconds that a refusal asks to wait, None when it does not say."""
    text = error.response.headers.get("retry-after")
    if text is None:
        return None
    try:
        return max(0.0, float(text))
    except ValueError:  # a date
        with contextlib.suppress(ValueError, TypeError):
            return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    return None


def redacted(text: str, secret: str) -> str:
    """The text without any part of a secret that has `LEAST_SECRET` characters or more."""
    if len(secret) < LEAST_SECRET:
        return text.replace(secret, "***") if secret else text
    kept, at = [], 0
    while at < len(text):
        end = at + LEAST_SECRET
        if text[at:end] not in secret or end > len(text):
            kept.append(text[at])
            at += 1
            continue
        while end < len(text) and text[at : end + 1] in secret:
            end += 1
        kept.append("***")
        at = end
    return "".join(kept)


def scored(judge: Callable[[T], float], answers: Sequence[T]) -> tuple[list[float], dict[int, str]]:
    """judge(answer) of each, a float; a ValueError it raises is why that score is missing."""
    scores, reasons = [], {}
    for row, answer in enumerate(answers):
        try:
            scores.append(judge(answer))
        except ValueError as error:
            scores.append(math.nan)
            reasons[row] = str(error)
    return scores, reasons


def scored_parts(
    judge: Callable[[T], Mapping[str, float]], answers: Sequence[T], components: Sequence[str]
) -> tuple[dict[str, list[float]], dict[int, str]]:
    """judge(answer) of each, floats by component, as lists by component; see `scored`."""
    found: list[Mapping[str, float]] = []
    reasons: dict[int, str] = {}
    for row, answer in enumerate(answers):
        try:
            found.append(judge(answer))
        except ValueError as error:
            found.append({})
            reasons[row] = str(error)
    return {name: [one.get(name, math.nan) for one in found] for name in components}, reasons


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
