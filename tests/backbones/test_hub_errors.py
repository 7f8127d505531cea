"""What the Hub says becomes one sentence with what to do, however deep it is wrapped."""

import errno

import pytest

from flowrl.backbones.loading import hub_error_message, load_pipeline
from flowrl.errors import UserError

NAME = "black-forest-labs/FLUX.1-dev"
GATED = (
    f"{NAME} is gated: open https://huggingface.co/{NAME}, accept its licence, and set HF_TOKEN to "
    "a token of that account, or log in with hf auth login"
)


def from_the_hub(kind: str, status: int) -> Exception:
    """An error of huggingface_hub as its own code makes it, of either HTTP library."""
    from huggingface_hub import errors

    http = pytest.importorskip(
        "httpx2" if "httpx2" in errors.HfHubHTTPError.__init__.__globals__.get("Response", int).
        __module__ else "httpx"
    )  # fmt: skip
    request = http.Request("GET", f"https://huggingface.co/api/models/{NAME}")
    response = http.Response(status, request=request)
    return getattr(errors, kind)(f"{status} Client Error.", response=response)


def wrapped(cause: Exception) -> OSError:
    """As diffusers raises it: it looks for local files, and tells why it did as the cause."""
    error = OSError(f"Cannot load model {NAME}: the model is not fully cached locally")
    error.__cause__ = cause
    return error


def test_errors_of_the_hub_become_sentences_with_what_to_do():
    # A gated model says how to be let in.
    for status in [401, 403]:
        for wrap in [wrapped, lambda error: error]:
            assert hub_error_message(wrap(from_the_hub("GatedRepoError", status)), NAME) == GATED
    # An unknown repository and an unknown revision are told apart.
    unknown = hub_error_message(wrapped(from_the_hub("RepositoryNotFoundError", 401)), "me/nothing")
    assert unknown.startswith("the Hub shows no repository me/nothing: check the name, or if it is")
    revision = hub_error_message(wrapped(from_the_hub("RevisionNotFoundError", 404)), NAME, "v9")
    assert revision == (
        f"{NAME} has no revision 'v9': give a branch, tag or commit of "
        f"https://huggingface.co/{NAME}/commits/main as pipeline.revision"
    )
    # A full disk is a full disk.
    full = OSError(errno.ENOSPC, "No space left on device")
    assert "no space is left on the disk" in hub_error_message(wrapped(full), NAME)
    assert "HF_HOME" in hub_error_message(full, NAME)
    assert hub_error_message(OSError(errno.EACCES, "Permission denied"), NAME) == ""
    # What is nobodys fault there has no sentence.
    assert hub_error_message(ValueError("a strange file"), NAME) == ""
    loop = ValueError("a")
    loop.__cause__ = loop
    assert hub_error_message(loop, NAME) == ""


def test_no_network_is_told_from_a_network_that_is_forbidden(monkeypatch):
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for error in (ConnectionError("refused"), LocalEntryNotFoundError("not here")):
        told = hub_error_message(wrapped(error), NAME, "v1")
        assert "the Hub cannot be reached: check the network" in told
        assert f"hf download {NAME} --revision v1" in told
    offline = hub_error_message(wrapped(OfflineModeIsEnabled("offline")), NAME)
    assert (
        "HF_HUB_OFFLINE forbids to fetch it: unset it, or download it first with hf download"
        in (offline)
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_error_message(LocalEntryNotFoundError("not here"), NAME) == offline


def test_a_model_that_is_not_here_is_one_sentence_offline():
    """A real call: the tests run with HF_HUB_OFFLINE."""
    with pytest.raises(UserError) as told:
        load_pipeline("nobody/has-this", dtype="fp32", device="cpu", revision="v1")
    assert str(told.value) == (
        "cannot load the pipeline: nobody/has-this is not on this machine, and HF_HUB_OFFLINE "
        "forbids to fetch it: unset it, or download it first with hf download nobody/has-this "
        "--revision v1"
    )


def loading(monkeypatch, error: Exception) -> list:
    from diffusers import DiffusionPipeline

    asked = []

    def fail(name, **how):
        asked.append((name, how["revision"]))
        raise error

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", fail)
    return asked


def test_loading_tells_what_the_hub_said_and_hides_no_fault(monkeypatch, tmp_path):
    asked = loading(monkeypatch, from_the_hub("GatedRepoError", 403))
    with pytest.raises(UserError, match="is gated: open https://huggingface.co"):
        load_pipeline(NAME, dtype="bf16", device="cpu", revision="refs/pr/1")
    assert asked == [(NAME, "refs/pr/1")]
    # A folder is not told as the hubs and a fault of code is not hidden.
    loading(monkeypatch, ConnectionError("what"))
    with pytest.raises(UserError, match="what; give a folder"):
        load_pipeline(str(tmp_path), dtype="fp32", device="cpu")
    loading(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        load_pipeline(NAME, dtype="fp32", device="cpu")
