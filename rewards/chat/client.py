"""Asking a vision-language model behind any OpenAI-compatible server, many questions at a time.

For vLLM, SGLang, `transformers serve` and hosted ones alike. Whatever goes wrong becomes the reason
why a reply is missing, and all replies are there by the deadline. A server that has too many
questions (429) is left alone by all for as long as it says, and asked by fewer at a time then.
"""

import asyncio
import hashlib
import ipaddress
import os
import random
import warnings
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .account import Account, BudgetSpent, now
from .messages import Failure, Question, Reply, failure, read_reply, redacted, request

REPLIES_KEPT = 4096  # with a cache in memory
CONNECT = 5.0  # seconds until a server must have picked up
PAUSE = 0.5  # seconds before a question is asked again, doubled for each further time
LONGEST_PAUSE = 8.0
FEW_CUTS = 4  # answers cut before any other came to its end: then max_tokens is too small
T = TypeVar("T")


class Chat:
    """A model on one or several OpenAI-compatible servers.

    base_url: of each server, up to and with "/v1"; questions go round, and one that fails goes on
    to the next. api_key_env: the environment variable that holds the key, if one is needed.
    timeout: seconds for one try; deadline: for all questions asked together, until which 429, 5xx
    and answers that break off are tried again; rounds: how often each server is tried for what may
    never mend, such as no connection. in_flight: most questions at a time; requests_per_minute:
    most that are sent, by all processes that share a cache folder. max_requests, max_tokens_total:
    what the judge may cost, tries included, tokens as the servers count them; beyond it nothing is
    asked and the run ends. Counted for all that share a cache folder, since it was made.
    thinking: False switches it off as vLLM and SGLang understand it; None does not mention it;
    either way an answer with thoughts counts as missing. True lets the model think, and cuts the
    thoughts off. Parameters that a server refuses are left out, with a warning.
    cache: a folder in which replies are kept for all processes and later runs; True keeps them in
    memory. Then the same question about the same images is not asked again; off by default, so that
    it shows when a model changes its mind.
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
        self._kept: dict[str, Reply] = {}
        self._opened: Account | None = None
        self._servers = [_Server(url=url, most=in_flight) for url in self.urls]

    @property
    def account(self) -> Account:
        if self._opened is None:
            self._opened = Account(self.cache if isinstance(self.cache, str) else None)
        return self._opened

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """A reply to each question, in order.

        Raises ImportError without the package `openai`, ValueError when the environment variable
        for the key is not set, and BudgetSpent when money or quota are used up; replies that came
        before are kept in a cache folder.
        """
        openai = import_openai()
        keys = [self._key(question) for question in questions]
        known = self._look_up(keys)
        new = {k: q for k, q in zip(keys, questions, strict=True) if k not in known}
        if new:
            asking = _Asking(self, openai, self._api_key(), new)
            known |= _run(asking.replies())
        if self.cache is True:
            self._kept |= {key: known[key] for key in new if not known[key].missing}
            while len(self._kept) > REPLIES_KEPT:
                self._kept.pop(next(iter(self._kept)))
        return [known[key] for key in keys]

    def _look_up(self, keys: Sequence[str]) -> dict[str, Reply]:
        if not isinstance(self.cache, str):
            return {key: self._kept[key] for key in keys if key in self._kept}
        found = {key: self.account.known(key) for key in dict.fromkeys(keys)}
        return {key: reply for key, reply in found.items() if reply is not None}

    def _key(self, question: Question) -> str:
        said = (self.version, question.text, question.max_tokens, question.alternatives)
        said = (*said, question.begins) if question.begins else said
        images = [hashlib.sha256(image).hexdigest() for image in question.images]
        return hashlib.sha256(repr((said, images)).encode()).hexdigest()

    def _api_key(self) -> str:
        if self.api_key_env is None:
            return "none"  # the package insists on one, and would look for another service's
        if not os.environ.get(self.api_key_env):
            raise ValueError(f"the environment variable {self.api_key_env} holds no key: set it")
        return os.environ[self.api_key_env]


@dataclass(slots=True, kw_only=True)
class _Server:
    """What is known of a server: what it refuses, and how many questions it takes at a time."""

    url: str
    most: int  # questions at a time, halved when it has too many, one more after as many answers
    flying: int = 0
    answers: int = 0  # since `most` changed
    taken: int = 0  # answers since it last had too many
    refused: float = -1.0  # when that was
    ended: bool = False  # it has ended an answer
    cuts: int = 0  # answers that it did not end
    left_out: set[str] = field(default_factory=set)

    def note_answer(self, limit: int) -> None:
        self.answers, self.taken, self.ended = self.answers + 1, self.taken + 1, True
        if self.answers >= self.most and self.most < limit:
            self.most, self.answers = self.most + 1, 0

    def note_refusal(self, sent: float) -> None:
        """Those that were under way together count once."""
        if sent > self.refused:
            # As many as it took since it last refused one may come together again, and one more,
            # whose refusal says at once when the next may come.
            self.most = max(1, self.most // 2, min(self.taken + 1, self.most))
            self.answers, self.taken, self.refused = 0, 0, now()


class _Asking:
    """Questions asked together, by their keys."""

    def __init__(self, chat: Chat, openai: Any, key: str, questions: Mapping[str, Question]):
        self.chat, self.openai, self.key, self.questions = chat, openai, key, questions
        self.ends = now() + chat.deadline
        self.trouble: dict[str, str] = {}  # the last of each question
        self.over = ""  # why no further question is asked

    async def replies(self) -> dict[str, Reply]:
        chat = self.chat
        clients = [self._client(server.url) for server in chat._servers]
        free = asyncio.Semaphore(chat.in_flight)

        async def one(number: int, key: str) -> Reply:
            async with free:
                return await self._answer(clients, number, key)

        tasks = {k: asyncio.create_task(one(n, k)) for n, k in enumerate(self.questions)}
        _, late = await asyncio.wait(tasks.values(), timeout=chat.deadline)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)
        if self.over:
            raise BudgetSpent(self.over)
        return {k: self._late(k) if t in late else t.result() for k, t in tasks.items()}

    def _client(self, url: str) -> Any:
        chat = self.chat
        return self.openai.AsyncOpenAI(
            base_url=url,
            api_key=self.key,
            max_retries=0,
            timeout=self.openai.Timeout(chat.timeout + 1, connect=CONNECT),
            # Proxies from the environment answer for servers next door, and wrongly.
            http_client=self.openai.DefaultAsyncHttpxClient(trust_env=not is_loopback(url)),
        )

    def _late(self, key: str) -> Reply:
        why = f" ({self.trouble[key]})" if key in self.trouble else ""
        return Reply(
            missing=f"{' and '.join(self.chat.urls)} gave no answer within the deadline of "
            f"{self.chat.deadline:g} s{why}: raise deadline, or start more servers and list them "
            "in base_url"
        )

    async def _answer(self, clients: Sequence[Any], number: int, key: str) -> Reply:
        few, pause, turn = self.chat.rounds * len(clients), PAUSE, number
        while not self.over:
            at = self._next(turn)
            reply, wrong = await self._try(clients[at], self.chat._servers[at], key)
            if reply is not None:
                return reply
            if self.over or wrong is None:
                break
            self.trouble[key] = f"{self.chat.urls[at]} {wrong.words}"
            few -= wrong.kind == "few"
            turn += 1
            beyond = wrong.after is not None and now() + wrong.after > self.ends
            if wrong.kind == "final" or not few or (beyond and len(clients) == 1):
                break
            if wrong.refuses or (wrong.kind == "few" and (turn - number) % len(clients)):
                continue  # with another request, or at another server, at once
            if wrong.after is None:  # else `_try` waits with all others
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(2 * pause, LONGEST_PAUSE)
        return Reply(missing=self.trouble.get(key, self.over))

    def _next(self, turn: int) -> int:
        """The number of the server whose turn it is, or of one that rests less long."""
        count = len(self.chat.urls)
        turns = [(turn + ahead) % count for ahead in range(count)]
        rests = {at: self._rest(self.chat._servers[at]) for at in turns}
        return min(turns, key=lambda at: (rests[at], turns.index(at)))

    def _rest(self, server: _Server) -> float:
        """Seconds that a server asked to be left alone."""
        return max(0.0, self.chat.account.number(f"rest {server.url}") - now())

    async def _try(
        self, client: Any, server: _Server, key: str
    ) -> tuple[Reply | None, Failure | None]:
        """A reply, or why there is none; neither when nothing more may be asked."""
        await self._ready(server)
        if not self._pay():
            return None, None
        chat, question, sent = self.chat, self.questions[key], now()
        said = request(question, chat.model, chat.thinking, server.left_out)
        server.flying += 1
        try:
            async with asyncio.timeout(chat.timeout):
                completion = await client.chat.completions.create(**said)
            self._count(completion)
            reply = self._clean(read_reply(completion, question, chat.thinking))
        except Exception as error:
            return None, self._note(server, failure(self.openai, error, chat.timeout, said), sent)
        finally:
            server.flying -= 1
        server.note_answer(chat.in_flight)
        if isinstance(chat.cache, str):
            chat.account.keep(key, reply)
        return reply, None

    async def _ready(self, server: _Server) -> None:
        """Wait until the server is not at rest, has room, and the rate allows one more."""
        while (rest := self._rest(server)) or server.flying >= server.most:
            await asyncio.sleep(rest + random.uniform(0.001, 0.01))
        if self.chat.requests_per_minute is not None:
            interval = 60 / self.chat.requests_per_minute
            await asyncio.sleep(self.chat.account.take_turn(f"turn {self.chat.model}", interval))

    def _pay(self) -> bool:
        """Count a request against the budget; False when it is spent."""
        if self.over:
            return False
        chat, account, spent = self.chat, self.chat.account, ""
        tokens, most = account.number("tokens"), chat.max_tokens_total
        if most is not None and tokens >= most:
            spent = f"used {tokens:.0f} tokens, of max_tokens_total: {most}"
        elif not account.add("requests", 1, most=chat.max_requests):
            spent = (
                f"been sent {account.number('requests'):.0f} of max_requests: {chat.max_requests}"
            )
        if spent:
            where = f" (all that share {chat.cache} count)" if isinstance(chat.cache, str) else ""
            self.over = f"the judge {chat.model} has {spent}{where}; raise that to go on"
        return not self.over

    def _count(self, completion: Any) -> None:
        used = getattr(getattr(completion, "usage", None), "total_tokens", None)
        if isinstance(used, int) and used > 0:
            self.chat.account.add("tokens", used)

    def _clean(self, reply: Reply) -> Reply:
        return Reply(text=redacted(reply.text, self._secret), first=reply.first)

    @property
    def _secret(self) -> str:
        return "" if self.chat.api_key_env is None else self.key

    def _note(self, server: _Server, wrong: Failure, sent: float) -> Failure:
        """Remember what a failure says of the server; the failure without the key."""
        chat = self.chat
        wrong = replace(wrong, words=redacted(wrong.words, self._secret))
        if wrong.kind == "cut":
            server.cuts += 1
            chance = server.ended or (len(self.questions) > 1 and server.cuts < FEW_CUTS)
            wrong = replace(wrong, kind="few" if chance else "final")
        if wrong.limited:
            server.note_refusal(sent)
            chat.account.add("requests", -1)  # nobody charges for these
        if wrong.after is not None:
            chat.account.raise_to(f"rest {server.url}", now() + wrong.after)
        if wrong.refuses and wrong.refuses not in server.left_out:
            server.left_out.add(wrong.refuses)
            told = f"{server.url} {wrong.words}: asked without {wrong.refuses}"
            warnings.warn(told, stacklevel=2)
        if wrong.kind == "quota" and not self.over:
            self.over = f"the judge {chat.model} at {server.url} {wrong.words}"
        return wrong


def is_loopback(url: str) -> bool:
    """Whether a server runs on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def connected(server: Chat | Mapping[str, Any] | None) -> Chat:
    """The client itself, or one made of its arguments. Raises ValueError when there are none."""
    if isinstance(server, Chat):
        return server
    if not server or "model" not in server:
        raise ValueError(
            "a judge needs the server that it asks, at least the model there: "
            "server: {model: NAME, base_url: http://127.0.0.1:8000/v1}, see docs/judges.md"
        )
    if "api_key" in server:
        raise ValueError(
            "the server of a judge has an api_key, which would be written into the run's files: "
            "put it into an environment variable, and name that as api_key_env"
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
