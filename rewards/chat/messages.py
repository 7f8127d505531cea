"""What is said to a model on a chat server, and what its answers and failures mean."""

import base64
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
AGAIN = {408, 409, 425, 429}  # answers that another try may mend, beside 5xx
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request: images (PNG files), then a text.

    max_tokens: how long the answer may be. alternatives: of how many spellings of its first token
    the probability is wanted, at most 20 on most servers; 0 for none.
    """

    images: tuple[bytes, ...]
    text: str
    max_tokens: int = 1
    alternatives: int = 0


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


def request(question: Question, model: str, thinking: bool | None) -> dict[str, Any]:
    """Arguments of a chat completion."""
    urls = (base64.b64encode(image).decode() for image in question.images)
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{url}"}} for url in urls
    ]
    content.append({"type": "text", "text": question.text})
    said: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.0,
        "max_tokens": question.max_tokens,
    }
    if question.alternatives:
        said |= {"logprobs": True, "top_logprobs": question.alternatives}
    if thinking is not None:
        wanted = {"enable_thinking": thinking}
        said["extra_body"] = {"chat_template_kwargs": wanted}
    return said


class Unusable(ValueError):
    """An answer that asking again cannot mend."""


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
        raise Unusable(
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


def failure(openai: Any, error: Any, timeout: float) -> tuple[str, float | None]:
    """What happened, for people, and how many seconds to wait at least; None: do not ask again."""
    if isinstance(error, Unusable):
        return str(error), None
    if isinstance(error, TimeoutError):
        return f"did not answer within {timeout:g} s: raise timeout, or lower in_flight", 0.0
    if isinstance(error, openai.APIConnectionError):
        cause = error.__cause__ or error
        return f"cannot be reached ({cause}): is it running, is base_url right?", 0.0
    if isinstance(error, openai.APIStatusError):
        code = error.status_code
        hint = "" if code >= 500 else "; base_url ends in /v1, model is one that the server lists"
        said = str(error).removeprefix(f"Error code: {code} - ")[:200]
        told = f"answered {code} ({said}){hint}"
        return told, _wait(error) if code >= 500 or code in AGAIN else None
    return f"answered with no chat completion ({type(error).__name__}: {str(error)[:100]})", 0.0


def _wait(error: Any) -> float:
    """Seconds that a refusal asks to wait, 0 when it does not say."""
    try:
        return float(error.response.headers.get("retry-after", 0))
    except ValueError:
        return 0.0  # a date: rare, and the pause grows anyway


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


def text_score(text: str, pattern: str, lowest: float, highest: float) -> float:
    """The number in what `pattern`'s group finds last in `text`.

    Raises ValueError when it finds nothing, and when the last find is no number ("4/10", "1-5") or
    lies outside [lowest, highest]: what was said before it does not count.
    """
    found = re.findall(pattern, text)
    if not found:
        raise ValueError(
            f"the answer has no score as {pattern} (it ends in {text[-80:]!r}): see template and "
            "max_tokens"
        )
    number = found[-1].rstrip(".,")  # of the sentence around it
    if not _NUMBER.fullmatch(number) or not lowest <= float(number) <= highest:
        raise ValueError(
            f"the answer's score is {found[-1]!r}, expected a number from {lowest:g} to {highest:g}"
        )
    return float(number)
