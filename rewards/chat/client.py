"""Ask a vision-language model behind any OpenAI-compatible server, many questions at a time.

For vLLM, SGLang, `transformers serve` and hosted servers. A failure becomes the reason of a missing
reply, and all replies are complete by the deadline. A server that asks for a rest gets no question
for so long.
"""

import asyncio
import functools
import hashlib
import json
import os
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import httpx

from .account import Account, BudgetSpent
from .messages import (
    Failure,
    Question,
    Reply,
    digest,
    no_completion,
    read_reply,
    redacted,
    refusal,
    request,
)

CONNECT_S = 5.0
PAUSE_S = 0.5  # before the first retry, doubled for each further one
LONGEST_PAUSE_S = 8.0
HERE = (
    "all://127.0.0.1",
    "all://localhost",
    "all://*.localhost",
    "all://[::1]",
)  # servers that no proxy is asked for
TRIES = 3  # of what may never mend, such as no connection
T = TypeVar("T")
now = time.monotonic


# --- the model ------------------------------------------------------------------------------------


class Chat:
    """A model on an OpenAI-compatible server.

    Args:
        model: as the servers list it.
        base_url: of the server, up to and with "/v1".
        api_key_env: environment variable that holds the key, if one is needed.
        timeout: seconds for one try.
        deadline: seconds for all questions of one call; 429, 5xx and answers that break off are
            retried until then.
        in_flight: most questions at a time.
        max_requests: budget, retries included, of all that share a cache folder since it was made;
            beyond it the run ends.
        thinking: False switches it off as vLLM and SGLang understand it, None does not mention it;
            either way an answer with thoughts counts as missing. True cuts the thoughts off.
        cache: a folder that stores replies for all processes and later runs. The same question
            about the same images is then not sent again; off by default, so that it shows when a
            model changes its mind.
        parameters: of each request, such as {top_p: 1.0}; null leaves one of flowrl's out, as
            {temperature: null, max_tokens: null, max_completion_tokens: 512} for a server that
            refuses these two.
    """

    def __init__(
        self,
        model: str,
        base_url: str = "http://127.0.0.1:8000/v1",
        *,
        api_key_env: str | None = None,
        timeout: float = 60.0,
        deadline: float = 300.0,
        in_flight: int = 16,
        max_requests: int | None = None,
        thinking: bool | None = False,
        cache: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ):
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is http://..., not {base_url!r}")
        limits = {"timeout": timeout, "deadline": deadline, "in_flight": in_flight}
        limits |= {"max_requests": max_requests}
        for name, value in limits.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}, expected more than 0")
        self.model, self.api_key_env, self.thinking = model, api_key_env, thinking
        self.url, self.timeout, self.deadline = base_url.rstrip("/"), timeout, deadline
        self.in_flight, self.cache = in_flight, cache
        self.max_requests, self.parameters = max_requests, dict(parameters or {})
        said = f"/{digest(self.parameters)}" if self.parameters else ""
        self.version = f"{model}/thinking-{thinking}{said}"
        self.rests_until = 0.0  # of `now`

    @functools.cached_property
    def account(self) -> Account:
        """Return the replies and budgets, opened at first use."""
        return Account(self.cache)

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """Return a reply to each question, in order.

        Raises ValueError when the environment variable for the key is not set, and BudgetSpent when
        budget or quota are used up; replies that arrived before are stored in a cache folder.
        """
        keys = [self._key(question) for question in questions]
        stored = {k: self.account.reply(k) for k in dict.fromkeys(keys)} if self.cache else {}
        replies = {key: reply for key, reply in stored.items() if reply is not None}
        new = {k: q for k, q in zip(keys, questions, strict=True) if k not in replies}
        if new:
            replies |= _run(_Batch(self, new).replies())
        return [replies[key] for key in keys]

    def api_key(self) -> str:
        """Return the key, "" where none is needed. Raises ValueError when it is not set."""
        key = "" if self.api_key_env is None else os.environ.get(self.api_key_env, "")
        if self.api_key_env is not None and not key:
            raise ValueError(f"the environment variable {self.api_key_env} holds no key: set it")
        return key

    def _key(self, question: Question) -> str:
        fields = (question.text, question.max_tokens, question.alternatives, question.begins)
        images = [hashlib.sha256(image).hexdigest() for image in question.images]
        return hashlib.sha256(repr((self.version, fields, images)).encode()).hexdigest()


def connected(server: Chat | Mapping[str, Any] | None) -> Chat:
    """Return the client, made of its arguments. Raises ValueError when there are none."""
    if isinstance(server, Chat):
        return server
    if not server or "model" not in server:
        raise ValueError(
            "a judge needs the server of its model, at least the model: "
            "server: {model: NAME, base_url: http://127.0.0.1:8000/v1}, see docs/judges.md"
        )
    if "api_key" in server:
        raise ValueError(
            "the server of a judge has an api_key, which would be written into the run's files: "
            "put it into an environment variable, and name that as api_key_env"
        )
    return Chat(**server)


# --- questions and retries ------------------------------------------------------------------------


class _Batch:
    """Questions of one call, by their keys."""

    def __init__(self, chat: Chat, questions: Mapping[str, Question]):
        self.chat, self.questions, self.secret = chat, questions, chat.api_key()
        self.trouble: dict[str, str] = {}  # the last of each question
        self.stopped = ""  # why no further question is sent
        self.ends = now() + chat.deadline

    async def replies(self) -> dict[str, Reply]:
        chat, slots = self.chat, asyncio.Semaphore(self.chat.in_flight)

        async def answer(client: httpx.AsyncClient, key: str) -> Reply:
            try:
                async with asyncio.timeout(chat.deadline), slots:
                    return await self._answer(client, key)
            except TimeoutError:
                return self._late(key)

        async with connect(self.secret) as client:
            replies = await asyncio.gather(*(answer(client, key) for key in self.questions))
        if self.stopped:
            raise BudgetSpent(self.stopped)
        return dict(zip(self.questions, replies, strict=True))

    async def _answer(self, client: httpx.AsyncClient, key: str) -> Reply:
        """Return the reply to a question, after retries."""
        chat, few_left, pause = self.chat, TRIES, PAUSE_S
        while few_left and not self.stopped:
            while (rest := chat.rests_until - now()) > 0:
                if chat.rests_until > self.ends:
                    return self._late(key)
                await asyncio.sleep(rest + random.uniform(0.001, 0.01))
            if not self._pay():
                break
            try:
                return await self._try(client, key)
            except Failure as failure:
                self.trouble[key] = f"{chat.url} {redacted(str(failure), self.secret)}"
                self._note(failure, self.trouble[key])
                if failure.retry == "never":
                    break
                few_left -= failure.retry == "few"
                if failure.retry_after is not None:
                    continue  # after the rest
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        return Reply(missing=self.trouble.get(key, self.stopped))

    async def _try(self, client: httpx.AsyncClient, key: str) -> Reply:
        """Return a reply. Raises Failure that says why there is none."""
        chat, question = self.chat, self.questions[key]
        arguments = request(question, chat.model, chat.thinking, chat.parameters)
        try:
            async with asyncio.timeout(chat.timeout):
                answer = await post(client, f"{chat.url}/chat/completions", arguments)
        except TimeoutError:
            words = f"did not answer within {chat.timeout:g} s: raise timeout, or lower in_flight"
            raise Failure(words, "few") from None
        reply = read_reply(answer, question, chat.thinking)
        reply = replace(reply, text=redacted(reply.text, self.secret))
        if chat.cache:
            chat.account.store(key, reply)
        return reply

    def _note(self, failure: Failure, trouble: str) -> None:
        """Record what a failure, in words `trouble`, says about the server."""
        chat = self.chat
        if failure.limited:
            chat.account.add_requests(-1)  # nobody charges for these
        if failure.retry_after is not None:
            chat.rests_until = max(chat.rests_until, now() + failure.retry_after)
        if failure.no_quota and not self.stopped:
            self.stopped = f"the judge {chat.model} at {trouble}"

    # --- rests and budgets

    def _pay(self) -> bool:
        """Count a request against the budget; return False when that is spent."""
        if self.stopped:
            return False
        chat, account = self.chat, self.chat.account
        if not account.add_requests(1, limit=chat.max_requests):
            where = f" (all that share {chat.cache} count)" if chat.cache else ""
            self.stopped = (
                f"the judge {chat.model} has got all of max_requests, {chat.max_requests}{where}: "
                "raise that to continue"
            )
        return not self.stopped

    # --- replies that did not come

    def _late(self, key: str) -> Reply:
        """Return the reply to a question without an answer by the deadline."""
        chat, rest = self.chat, self.chat.rests_until - now()
        resting = f"; it asked for a rest of {rest:.0f} s more" if rest > 0 else ""
        reason = f" ({self.trouble[key]})" if key in self.trouble else ""
        return Reply(
            missing=f"{chat.url} gave no answer within the deadline of {chat.deadline:g} s"
            f"{resting}{reason}: raise deadline, or give the server more GPUs"
        )


# --- connections ----------------------------------------------------------------------------------


def connect(key: str) -> httpx.AsyncClient:
    """Return a client; `_Batch` has the time limits."""
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key or 'none'}", "Accept-Encoding": "identity"},
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=None),  # `_Batch` has the limit
        follow_redirects=True,
        mounts=dict.fromkeys(HERE),  # proxies of the environment would answer for them, wrongly
    )


async def post(client: httpx.AsyncClient, url: str, content: Mapping[str, Any]) -> Any:
    """Return the JSON of a server's answer. Raises Failure for anything else."""
    try:
        response = await client.post(url, json=dict(content))
    except (httpx.RemoteProtocolError, httpx.ReadError) as error:
        raise Failure(f"broke off its answer ({error})", "again") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        words = f"cannot be reached ({why}): is it running, is base_url right?"
        raise Failure(words, "few") from error
    try:
        answer = json.loads(response.text)
    except (ValueError, RecursionError):
        answer = response.text
    if response.status_code != 200:
        raise refusal(response.status_code, response.headers, answer)
    if isinstance(answer, str):
        raise no_completion(answer)
    return answer


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Return its result; in another thread where, as in a notebook, a loop already runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "chat") as thread:
        return thread.submit(asyncio.run, work).result()
