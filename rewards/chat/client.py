"""Ask a vision-language model behind any OpenAI-compatible server, many questions at a time.

For vLLM, SGLang, `transformers serve` and hosted servers. A failure becomes the reason of a missing
reply, and all replies are complete by the deadline. A server that has too many questions (429)
rests for as long as it says, and gets fewer at a time then.
"""

import asyncio
import hashlib
import ipaddress
import os
import random
import time
import warnings
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .account import Account, BudgetSpent, now
from .messages import (
    LONGEST_REST_S,
    MAX_ANSWER,
    Failure,
    Question,
    Reply,
    TooLong,
    failure,
    read_reply,
    redacted,
    request,
)

REPLIES_STORED = 4096  # with a cache in memory
CONNECT_S = 5.0
PAUSE_S = 0.5  # before the first retry, doubled for each further one
LONGEST_PAUSE_S = 8.0
FEW_CUTS = 4  # answers cut before any other was complete: then max_tokens is too small
T = TypeVar("T")


# --- the model ------------------------------------------------------------------------------------


class Chat:
    """A model on one or several OpenAI-compatible servers.

    Parameters that a server refuses are left out, with a warning.

    Args:
        model: as the servers list it.
        base_url: of each server, up to and with "/v1"; questions take the servers in turn, and one
            that fails goes to the next.
        api_key_env: environment variable that holds the key, if one is needed.
        timeout: seconds for one try.
        deadline: seconds for all questions of one call; 429, 5xx and answers that break off are
            retried until then.
        in_flight: most questions at a time.
        rounds: tries per server of what may never mend, such as no connection.
        requests_per_minute: of all processes that share a cache folder.
        max_requests: budget, retries included, of all that share a cache folder since it was made;
            beyond it the run ends.
        max_tokens_total: budget of tokens as the servers count them, as max_requests.
        thinking: False switches it off as vLLM and SGLang understand it, None does not mention it;
            either way an answer with thoughts counts as missing. True cuts the thoughts off.
        cache: a folder that stores replies for all processes and later runs; True stores them in
            memory. The same question about the same images is then not sent again; off by default,
            so that it shows when a model changes its mind.
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
        requests_per_minute: float | None = None,
        max_requests: int | None = None,
        max_tokens_total: int | None = None,
        thinking: bool | None = False,
        cache: bool | str = False,
    ):
        self.urls = [base_url] if isinstance(base_url, str) else list(base_url)
        if not self.urls or not all(u.startswith(("http://", "https://")) for u in self.urls):
            raise ValueError(f"base_url is http://... or a list of such, not {base_url!r}")
        limits = {"timeout": timeout, "deadline": deadline, "in_flight": in_flight}
        limits |= {"rounds": rounds, "requests_per_minute": requests_per_minute}
        limits |= {"max_requests": max_requests, "max_tokens_total": max_tokens_total}
        for name, value in limits.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}, expected more than 0")
        self.model, self.api_key_env, self.thinking = model, api_key_env, thinking
        self.timeout, self.deadline = timeout, deadline
        self.in_flight, self.rounds, self.cache = in_flight, rounds, cache
        self.requests_per_minute = requests_per_minute
        self.max_requests, self.max_tokens_total = max_requests, max_tokens_total
        self.version = f"{model}/thinking-{thinking}"
        self._stored: dict[str, Reply] = {}
        self._opened: Account | None = None
        self.servers = [_Server(url=url, limit=in_flight) for url in self.urls]

    @property
    def account(self) -> Account:
        if self._opened is None:
            self._opened = Account(self.cache if isinstance(self.cache, str) else None)
        return self._opened

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """Return a reply to each question, in order.

        Raises ImportError without the package `openai`, ValueError when the environment variable
        for the key is not set, and BudgetSpent when budget or quota are used up; replies that
        arrived before are stored in a cache folder.
        """
        openai = import_openai()
        keys = [self._key(question) for question in questions]
        replies = self._look_up(keys)
        new = {k: q for k, q in zip(keys, questions, strict=True) if k not in replies}
        if new:
            replies |= _run(_Batch(self, openai, self._api_key(), new).replies())
        if self.cache is True:
            self._stored |= {key: replies[key] for key in new if not replies[key].missing}
            while len(self._stored) > REPLIES_STORED:
                self._stored.pop(next(iter(self._stored)))
        return [replies[key] for key in keys]

    def _look_up(self, keys: Sequence[str]) -> dict[str, Reply]:
        if not isinstance(self.cache, str):
            return {key: self._stored[key] for key in keys if key in self._stored}
        replies = {key: self.account.reply(key) for key in dict.fromkeys(keys)}
        return {key: reply for key, reply in replies.items() if reply is not None}

    def _key(self, question: Question) -> str:
        fields = (question.text, question.max_tokens, question.alternatives, question.begins)
        images = [hashlib.sha256(image).hexdigest() for image in question.images]
        return hashlib.sha256(repr((self.version, fields, images)).encode()).hexdigest()

    def _api_key(self) -> str:
        if self.api_key_env is None:
            return "none"  # the package insists on one, and would look for another service's
        if not os.environ.get(self.api_key_env):
            raise ValueError(f"the environment variable {self.api_key_env} holds no key: set it")
        return os.environ[self.api_key_env]


# --- servers and retries --------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Server:
    """The state of a server: what it refuses, and how many questions it takes at a time."""

    url: str
    limit: int  # questions at a time, halved when it has too many, one more after as many answers
    open: int = 0  # questions
    answers: int = 0  # since `limit` changed
    accepted: int = 0  # answers since it last had too many questions
    refused_at: float = -1.0  # when it last had too many
    completes: bool = False  # it has completed an answer
    cuts: int = 0  # answers that it cut
    left_out: set[str] = field(default_factory=set)  # parameters

    def note_answer(self, most: int) -> None:
        self.answers, self.accepted = self.answers + 1, self.accepted + 1
        self.completes = True
        if self.answers >= self.limit and self.limit < most:
            self.limit, self.answers = self.limit + 1, 0

    def note_refusal(self, sent_at: float) -> None:
        """Lower the limit; refusals of questions that were open together count once."""
        if sent_at > self.refused_at:
            # As many as it accepted since it last refused one may come together again, and one
            # more, whose refusal says at once when the next may come.
            self.limit = max(1, self.limit // 2, min(self.accepted + 1, self.limit))
            self.answers, self.accepted, self.refused_at = 0, 0, now()


class _Batch:
    """Questions of one call, by their keys."""

    def __init__(self, chat: Chat, openai: Any, secret: str, questions: Mapping[str, Question]):
        self.chat, self.openai, self.secret, self.questions = chat, openai, secret, questions
        self.ends = now() + chat.deadline
        self.trouble: dict[str, str] = {}  # the last of each question
        self.stopped = ""  # why no further question is sent

    async def replies(self) -> dict[str, Reply]:
        chat = self.chat
        clients = [self._client(server.url) for server in chat.servers]
        slots = asyncio.Semaphore(chat.in_flight)

        async def answer(number: int, key: str) -> Reply:
            async with slots:
                return await self._answer(clients, number, key)

        tasks = {k: asyncio.create_task(answer(n, k)) for n, k in enumerate(self.questions)}
        _, late = await asyncio.wait(tasks.values(), timeout=chat.deadline)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)
        if self.stopped:
            raise BudgetSpent(self.stopped)
        return {k: self._late(k) if t in late else t.result() for k, t in tasks.items()}

    def _client(self, url: str) -> Any:
        chat = self.chat
        return self.openai.AsyncOpenAI(
            base_url=url,
            api_key=self.secret,
            max_retries=0,
            timeout=self.openai.Timeout(chat.timeout + 1, connect=CONNECT_S),
            http_client=self.openai.DefaultAsyncHttpxClient(
                # Proxies from the environment answer for servers next door, and wrongly.
                trust_env=not is_loopback(url),
                event_hooks={"response": [_limit_body]},
            ),
        )

    def _late(self, key: str) -> Reply:
        reason = f" ({self.trouble[key]})" if key in self.trouble else ""
        return Reply(
            missing=f"{' and '.join(self.chat.urls)} gave no answer within the deadline of "
            f"{self.chat.deadline:g} s{reason}: raise deadline, or start more servers and list "
            "them in base_url"
        )

    async def _answer(self, clients: Sequence[Any], number: int, key: str) -> Reply:
        """Return the reply to a question, after retries at each server in turn."""
        few_left, pause, turn = self.chat.rounds * len(clients), PAUSE_S, number
        while not self.stopped:
            at = self._next(turn)
            server = self.chat.servers[at]
            if now() + self._rest(server) > self.ends:
                return self._resting(key)
            reply, failed = await self._try(clients[at], server, key)
            if reply is not None:
                return reply
            if self.stopped or failed is None:
                break
            self.trouble[key] = f"{server.url} {failed.words}"
            few_left -= failed.kind == "few"
            turn += 1
            if failed.kind == "final" or not few_left:
                break
            if failed.refuses or (failed.kind == "few" and (turn - number) % len(clients)):
                continue  # without that parameter, or at another server, at once
            if failed.retry_after is None:  # else the server rests for all questions
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return Reply(missing=self.trouble.get(key, self.stopped))

    def _resting(self, key: str) -> Reply:
        """Return the reply to a question whose servers all rest beyond the deadline."""
        rests = "; ".join(
            f"{server.url} asked for a rest until "
            + time.strftime("%H:%M:%S", time.localtime(time.time() + self._rest(server)))
            for server in self.chat.servers
        )
        reason = f"{self.trouble[key]}; " if key in self.trouble else ""
        return Reply(
            missing=f"{reason}{rests}, which is after the deadline of {self.chat.deadline:g} s"
        )

    def _next(self, turn: int) -> int:
        """Return the number of the server whose turn it is, or of one that rests less long."""
        count = len(self.chat.servers)
        turns = [(turn + ahead) % count for ahead in range(count)]
        rests = {at: self._rest(self.chat.servers[at]) for at in turns}
        return min(turns, key=lambda at: (rests[at], turns.index(at)))

    def _rest(self, server: _Server) -> float:
        """Return the seconds that a server still rests, whatever an older version has stored."""
        until = self.chat.account.number(f"rest {server.url}")
        return min(max(0.0, until - now()), LONGEST_REST_S)

    async def _try(
        self, client: Any, server: _Server, key: str
    ) -> tuple[Reply | None, Failure | None]:
        """Return a reply, or why there is none; neither when nothing more may be sent."""
        await self._wait_for_room(server)
        if not self._pay():
            return None, None
        chat, question, sent_at = self.chat, self.questions[key], now()
        arguments = request(question, chat.model, chat.thinking, server.left_out)
        server.open += 1
        try:
            async with asyncio.timeout(chat.timeout):
                completion = await client.chat.completions.create(**arguments)
            self._count_tokens(completion)
            reply = read_reply(completion, question, chat.thinking)
            reply = replace(reply, text=redacted(reply.text, self._redacted_secret))
        except Exception as error:
            failed = failure(self.openai, error, chat.timeout, arguments)
            return None, self._note(server, failed, sent_at)
        finally:
            server.open -= 1
        server.note_answer(chat.in_flight)
        if isinstance(chat.cache, str):
            chat.account.store(key, reply)
        return reply, None

    async def _wait_for_room(self, server: _Server) -> None:
        """Wait until the server does not rest, has room, and the rate allows one more."""
        while (rest := self._rest(server)) or server.open >= server.limit:
            await asyncio.sleep(rest + random.uniform(0.001, 0.01))
        if self.chat.requests_per_minute is not None:
            interval = 60 / self.chat.requests_per_minute
            await asyncio.sleep(self.chat.account.take_turn(f"turn {self.chat.model}", interval))

    def _pay(self) -> bool:
        """Count a request against the budget; return False when that is spent."""
        if self.stopped:
            return False
        chat, account, spent = self.chat, self.chat.account, ""
        tokens, limit = account.number("tokens"), chat.max_tokens_total
        if limit is not None and tokens >= limit:
            spent = f"used {tokens:.0f} tokens, of max_tokens_total: {limit}"
        elif not account.add("requests", 1, limit=chat.max_requests):
            spent = f"got {account.number('requests'):.0f} of max_requests: {chat.max_requests}"
        if spent:
            where = f" (all that share {chat.cache} count)" if isinstance(chat.cache, str) else ""
            self.stopped = f"the judge {chat.model} has {spent}{where}; raise that to continue"
        return not self.stopped

    def _count_tokens(self, completion: Any) -> None:
        used = getattr(getattr(completion, "usage", None), "total_tokens", None)
        if isinstance(used, int) and used > 0:
            self.chat.account.add("tokens", used)

    @property
    def _redacted_secret(self) -> str:
        return "" if self.chat.api_key_env is None else self.secret

    def _note(self, server: _Server, failed: Failure, sent_at: float) -> Failure:
        """Record what a failure says about the server; return the failure without the key."""
        chat = self.chat
        failed = replace(failed, words=redacted(failed.words, self._redacted_secret))
        if failed.kind == "cut":
            server.cuts += 1
            chance = server.completes or (len(self.questions) > 1 and server.cuts < FEW_CUTS)
            failed = replace(failed, kind="few" if chance else "final")
        if failed.limited:
            server.note_refusal(sent_at)
            chat.account.add("requests", -1)  # nobody charges for these
        if failed.retry_after is not None:
            chat.account.raise_to(f"rest {server.url}", now() + failed.retry_after)
        if failed.refuses and failed.refuses not in server.left_out:
            server.left_out.add(failed.refuses)
            text = f"{server.url} {failed.words}: sent without {failed.refuses}"
            warnings.warn(text, stacklevel=2)
        if failed.kind == "quota" and not self.stopped:
            self.stopped = f"the judge {chat.model} at {server.url} {failed.words}"
        return failed


# --- connections ----------------------------------------------------------------------------------


async def _limit_body(response: Any) -> None:
    """End an answer after `MAX_ANSWER` bytes: its JSON would be parsed beyond the deadline."""
    read = response.aiter_bytes

    async def limited(*args: Any, **options: Any) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in read(*args, **options):
            size += len(chunk)
            if size > MAX_ANSWER:
                raise TooLong(f"answered with more than {MAX_ANSWER} bytes")
            yield chunk

    response.aiter_bytes = limited


def is_loopback(url: str) -> bool:
    """Return whether a server runs on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


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


def import_openai() -> Any:
    """Return the package `openai`. Raises ImportError that says how to install it."""
    try:
        import openai
    except Exception as error:
        raise ImportError(
            "judging with a vision-language model needs the package openai: pip install openai"
        ) from error
    return openai


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Return its result; in another thread where, as in a notebook, a loop already runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1, "chat") as thread:
        return thread.submit(asyncio.run, work).result()
