"""What goes wrong between here and the Hub, each as a sentence that says what to do."""

import errno
from collections.abc import Iterator

NETWORK = {
    "ConnectError", "ConnectionError", "NetworkError", "TimeoutException", "TimeoutError",
    "LocalEntryNotFoundError", "CachedRepoTreeNotFoundError", "RevisionResolutionError",
}  # fmt: skip


def is_offline() -> bool:
    """Whether the environment forbids to ask the Hub (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def sentence(error: BaseException, name: str, revision: str | None = None) -> str:
    """Why `name` cannot be had from the Hub and what to do; "" when it is nothing of these.

    Libraries wrap what the Hub said, and fall back to files that are not there: all errors along
    the chain of causes are looked at, and the most telling kind counts, in the order below.
    Classes are known by their names, since they have moved between modules, and HTTP libraries,
    from version to version.
    """
    chain = list(_chain(error))
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    if "GatedRepoError" in kinds:
        return (
            f"{name} is gated: open https://huggingface.co/{name}, accept its licence, and set "
            "HF_TOKEN to a token of that account, or log in with hf auth login"
        )
    if "RevisionNotFoundError" in kinds:
        return (
            f"{name} has no revision {revision!r}: give a branch, tag or commit of "
            f"https://huggingface.co/{name}/commits/main as pipeline.revision"
        )
    if "RepositoryNotFoundError" in kinds:
        return (
            f"the Hub shows no repository {name}: check the name, or if it is private set HF_TOKEN "
            "to a token that may read it"
        )
    if any(isinstance(link, OSError) and link.errno == errno.ENOSPC for link in chain):
        return (
            f"no space is left on the disk that {name} is kept on: free some, or set HF_HOME to a "
            "folder on a larger one"
        )
    # Without the network it is the same files that are missing: first whether it was forbidden.
    if "OfflineModeIsEnabled" in kinds or (is_offline() and kinds & NETWORK):
        return (
            f"{name} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it: unset it, or "
            f"download it first with hf download {name}{_of(revision)}"
        )
    if kinds & NETWORK:
        return (
            f"{name} is not on this machine, and the Hub cannot be reached: check the network, or "
            f"download it where there is one with hf download {name}{_of(revision)} and copy it"
        )
    return ""


def _of(revision: str | None) -> str:
    return f" --revision {revision}" if revision else ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
