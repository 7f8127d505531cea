"""Asking a vision-language model behind any OpenAI-compatible server, many questions at a time.

For vLLM, SGLang, `transformers serve` and hosted ones alike. Whatever goes wrong becomes the reason
why a reply is missing, and all replies are there by the deadline.
"""

import asyncio
import hashlib
import os
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from .messages import Question, Reply, failure, read_reply, request

REPLIES_KEPT = 4096  # with a cache
CONNECT = 5.0  # seconds until a server must have picked up
PAUSE = 0.5  # seconds before the second round over the servers, doubled for each further one
T = TypeVar("T")


class Chat:
    """A model on one or several OpenAI-compatible servers.

    base_url: of each server, up to and with "/v1"; questions go round, and one that fails goes on
    to the next. api_key_env: the environment variable that holds the key, if one is needed.
    timeout: seconds for one try; deadline: for all questions asked together; rounds: how often
    each server is tried. thinking: False switches it off as vLLM and SGLang understand it; None
    does not mention it, for servers that refuse fields they do not know; either way an answer with
    thoughts counts as missing. True lets the model think, and cuts the thoughts off.
    cache: whether replies are kept, and the same question about the same images is not asked
    again; off by default, so that it shows when a model changes its mind.
    """

    def __init__(
        self,
        model: str,
        base_url: str | Sequence[str] = "http://127.0.0.1:8000/v1",
        *,
        api_key_env: str | None = None,
        timeout: float = 60.0,
        deadline: float = 300.0,
        in_flight: int = 16,
        rounds: int = 3,
        thinking: bool | None = False,
        cache: bool = False,
    ):
        self.urls = [base_url] if isinstance(base_url, str) else list(base_url)
        if not self.urls or not all(u.startswith(("http://", "https://")) for u in self.urls):
            raise ValueError(f"base_url is http://... or a list of such, not {base_url!r}")
        if min(timeout, deadline, in_flight, rounds) <= 0:
            raise ValueError("timeout, deadline, in_flight and rounds must be positive")
        self.model, self.api_key_env, self.thinking = model, api_key_env, thinking
        self.timeout, self.deadline = timeout, deadline
        self.in_flight, self.rounds, self.cache = in_flight, rounds, cache
        self.version = f"{model}/thinking-{thinking}"
        self._kept: dict[str, Reply] = {}

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """A reply to each question, in order. Raises ImportError without the package `openai`,
        ValueError when the environment variable for the key is not set."""
        openai = import_openai()
        keys = [self._key(question) for question in questions]
        known = {key: self._kept[key] for key in keys if key in self._kept}
        new = {k: q for k, q in zip(keys, questions, strict=True) if k not in known}
        if new:
            key = self._api_key()
            asked = _run(self._ask_all(openai, key, list(new.values())))
            known |= dict(zip(new, asked, strict=True))
        if self.cache:
            self._kept |= {key: known[key] for key in new if not known[key].missing}
            while len(self._kept) > REPLIES_KEPT:
                self._kept.pop(next(iter(self._kept)))
        return [known[key] for key in keys]

    def _key(self, question: Question) -> str:
        said = (self.version, question.text, question.max_tokens, question.alternatives)
        images = [hashlib.sha256(image).hexdigest() for image in question.images]
        return hashlib.sha256(repr((said, images)).encode()).hexdigest()

    def _api_key(self) -> str:
        if self.api_key_env is None:
            return "none"  # the package insists on one, and would look for another service's
        if not os.environ.get(self.api_key_env):
            raise ValueError(f"the environment variable {self.api_key_env} holds no key: set it")
        return os.environ[self.api_key_env]

    async def _ask_all(self, openai: Any, key: str, questions: list[Question]) -> list[Reply]:
        free = asyncio.Semaphore(self.in_flight)
        clients = [
            openai.AsyncOpenAI(
                base_url=url,
                api_key=key,
                max_retries=0,
                timeout=openai.Timeout(self.timeout + 1, connect=CONNECT),
                # Proxies from the environment answer for local servers, and wrongly.
                http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
            )
            for url in self.urls
        ]

        async def one(number: int, question: Question) -> Reply:
            async with free:
                return await self._answer(openai, clients, number, question)

        tasks = [asyncio.create_task(one(*numbered)) for numbered in enumerate(questions)]
        _, late = await asyncio.wait(tasks, timeout=self.deadline)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)
        return [self._late() if task in late else task.result() for task in tasks]

    def _late(self) -> Reply:
        return Reply(
            missing=f"{' and '.join(self.urls)} gave no answer within the deadline of "
            f"{self.deadline:g} s: raise deadline, or start more servers and list them in base_url"
        )

    async def _answer(
        self, openai: Any, clients: Sequence[Any], number: int, question: Question
    ) -> Reply:
        said = request(question, self.model, self.thinking)
        why, pause = "", PAUSE
        for attempt in range(self.rounds * len(clients)):
            if attempt and attempt % len(clients) == 0:
                await asyncio.sleep(pause)
                pause *= 2
            at = (number + attempt) % len(clients)
            try:
                async with asyncio.timeout(self.timeout):
                    completion = await clients[at].chat.completions.create(**said)
                return read_reply(completion, question, self.thinking)
            except Exception as error:
                why, wait = failure(openai, error, self.timeout)
                why = f"{self.urls[at]} {why}"
            if wait is None or wait > self.deadline:
                break
            pause = max(pause, wait)
        return Reply(missing=why)


def connected(server: Chat | Mapping[str, Any] | None) -> Chat:
    """The client itself, or one made of its arguments. Raises ValueError when there are none."""
    if isinstance(server, Chat):
        return server
    if not server or "model" not in server:
        raise ValueError(
            "a judge needs the server that it asks, at least the model there: "
            "server: {model: NAME, base_url: http://127.0.0.1:8000/v1}, see docs/judges.md"
        )
    return Chat(**server)


def import_openai() -> Any:
    """The package `openai`. Raises ImportError that says how to install it."""
    try:
        import openai
    except Exception as error:
        raise ImportError(
            "judging with a vision-language model needs the package openai: pip install openai"
        ) from error
    return openai


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Its result; in a thread of its own where, as in a notebook, a loop already runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "chat") as thread:
        return thread.submit(asyncio.run, work).result()
