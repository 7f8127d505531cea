"""What the Hub says becomes one sentence with what to do, however deep it is wrapped."""

import errno

import pytest

from flowrl.backbones.loading import hub_error_message, load_pipeline, pipeline_path
from flowrl.errors import UserError

NAME = "black-forest-labs/FLUX.1-dev"
GATED = (
    f"{NAME} is gated: open https://huggingface.co/{NAME}, accept its licence, and set HF_TOKEN to "
    "a token of that account, or log in with hf auth login"
)


def from_the_hub(kind: str, status: int) -> Exception:
    from huggingface_hub import errors

    http = pytest.importorskip(
        "httpx2" if "httpx2" in errors.HfHubHTTPError.__init__.__globals__.get("Response", int).
        __module__ else "httpx"
    )  # fmt: skip
    request = http.Request("GET", f"https://huggingface.co/api/models/{NAME}")
    response = http.Response(status, request=request)
    return getattr(errors, kind)(f"{status} Client Error.", response=response)


def wrapped(cause: Exception) -> OSError:
    error = OSError(f"Cannot load model {NAME}: the model is not fully cached locally")
    error.__cause__ = cause
    return error


def test_errors_of_the_hub_become_sentences_with_what_to_do():
    for status in [401, 403]:
        for wrap in [wrapped, lambda error: error]:
            assert hub_error_message(wrap(from_the_hub("GatedRepoError", status)), NAME) == GATED
    unknown = hub_error_message(wrapped(from_the_hub("RepositoryNotFoundError", 401)), "me/nothing")
    assert unknown.startswith("the Hub shows no repository me/nothing: check the name, or if it is")
    revision = hub_error_message(wrapped(from_the_hub("RevisionNotFoundError", 404)), NAME, "v9")
    assert revision == (
        f"{NAME} has no revision 'v9': give a branch, tag or commit of "
        f"https://huggingface.co/{NAME}/commits/main as pipeline.revision"
    )
    full = OSError(errno.ENOSPC, "No space left on device")
    assert "no space is left on the disk" in hub_error_message(wrapped(full), NAME)
    assert "HF_HOME" in hub_error_message(full, NAME)
    assert hub_error_message(OSError(errno.EACCES, "Permission denied"), NAME) == ""
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
    loading(monkeypatch, ConnectionError("what"))
    with pytest.raises(UserError, match="what; give a folder"):
        load_pipeline(str(tmp_path), dtype="fp32", device="cpu")
    loading(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        load_pipeline(NAME, dtype="fp32", device="cpu")


def test_a_revision_of_what_is_not_from_the_hub_is_refused():
    for path in ["tiny-sd3", pipeline_path("tiny-flux")]:
        with pytest.raises(UserError, match="'v1' is given for .* set pipeline.revision to"):
            load_pipeline(path, dtype="fp32", device="cpu", revision="v1")
