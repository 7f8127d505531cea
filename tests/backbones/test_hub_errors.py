"""What the Hub says becomes one sentence with what to do, however deep it is wrapped."""

import errno
import re
from unittest.mock import Mock

import pytest

from flowrl.backbones.loading import hub_error_message, load_pipeline, pipeline_path
from flowrl.errors import UserError

NAME = "black-forest-labs/FLUX.1-dev"


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


def test_errors_of_the_hub_become_sentences_with_what_to_do(monkeypatch):
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    full = OSError(errno.ENOSPC, "No space left on device")
    for error, words in (
        (from_the_hub("GatedRepoError", 403), f"{NAME} is gated.*/{NAME}.*HF_TOKEN"),
        (from_the_hub("RepositoryNotFoundError", 401), f"no repository {NAME}"),
        (from_the_hub("RevisionNotFoundError", 404), "no revision 'v9'.*pipeline.revision"),
        (full, "HF_HOME"),
        (LocalEntryNotFoundError("not here"), f"cannot be reached.*{NAME} --revision v9"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (ValueError("a strange file"), "^$"),
    ):
        for wrap in (wrapped, lambda error: error):
            assert re.search(words, hub_error_message(wrap(error), NAME, "v9")), error
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in hub_error_message(LocalEntryNotFoundError("not here"), NAME)


def test_loading_tells_what_the_hub_said_and_hides_no_fault(monkeypatch, tmp_path):
    from diffusers import DiffusionPipeline

    for error, kind, words in (
        (from_the_hub("GatedRepoError", 403), UserError, f"{NAME} is gated"),
        (ZeroDivisionError("a bug"), ZeroDivisionError, "a bug"),
    ):
        fail = Mock(side_effect=error)
        monkeypatch.setattr(DiffusionPipeline, "from_pretrained", fail)
        with pytest.raises(kind, match=words):
            load_pipeline(NAME, dtype="bf16", device="cpu", revision="refs/pr/1")
        assert fail.call_args.args == (NAME,)
        assert fail.call_args.kwargs["revision"] == "refs/pr/1"
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", Mock(side_effect=OSError("what")))
    with pytest.raises(UserError, match=tmp_path.name):
        load_pipeline(str(tmp_path), dtype="fp32", device="cpu")


def test_a_revision_of_what_is_not_from_the_hub_is_refused():
    for path in ["tiny-sd3", pipeline_path("tiny-flux")]:
        with pytest.raises(UserError, match="'v1' is given for .* set pipeline.revision to"):
            load_pipeline(path, dtype="fp32", device="cpu", revision="v1")
