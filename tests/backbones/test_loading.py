"""Loading a pipeline: what is refused before, what the Hub says, its attention and autoencoder."""

import copy
import errno
import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from flowrl.api import align
from flowrl.backbones.loading import (
    check_pipeline,
    hub_error_message,
    load_pipeline,
    pipeline_path,
    set_attention,
)
from flowrl.config import load_config
from flowrl.errors import UserError
from flowrl.planning.dry_run import rehearse
from flowrl.planning.plan import make_plan


def test_autoencoders_of_videos_load_and_keep_their_weights(monkeypatch):
    from diffusers import AutoencoderKLQwenImage, DiffusionPipeline

    vae = AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    before = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    whole = SimpleNamespace(vae=vae, set_progress_bar_config=lambda **_: None, to=lambda _: whole)
    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *_, **__: whole)
    loaded = load_pipeline("tiny-sd3", dtype="fp32", device="cpu").vae
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())
    axes = {tensor.ndim for tensor in loaded.parameters()}
    assert {4, 5} <= axes
    for tensor in loaded.parameters():
        if tensor.ndim == 4:
            assert tensor.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("FluxKontextPipeline", "edits images"), ("FluxFillPipeline", "edits images"),
     ("ZImageImg2ImgPipeline", "edits images"), ("StableDiffusionXLPipeline", "removes noise"),
     ("FooBarPipeline", "has no FooBarPipeline")],
)  # fmt: skip
def test_what_cannot_train_is_refused_before_anything_is_loaded(tmp_path, kind, reason):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    config = load_config("quickstart", [f"pipeline.path={tmp_path}"])
    for start in (align, make_plan, lambda c: rehearse(c, tmp_path / "rehearsal")):
        with pytest.raises(UserError, match=reason):
            start(config)
    check_pipeline("tiny-sd3")


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


def test_loading_tells_what_the_hub_said_and_hides_no_fault(monkeypatch):
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


def test_a_revision_of_what_is_not_from_the_hub_is_refused():
    for path in ["tiny-sd3", pipeline_path("tiny-flux")]:
        with pytest.raises(UserError, match="'v1' is given for .* set pipeline.revision to"):
            load_pipeline(path, dtype="fp32", device="cpu", revision="v1")


@pytest.fixture(autouse=True)
def as_before():
    """diffusers also keeps the last choice for all networks of the process."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    before, _ = _AttentionBackendRegistry.get_active_backend()
    yield
    _AttentionBackendRegistry.set_active_backend(before)


def chosen(network):
    processors = (getattr(module, "processor", None) for module in network.modules())
    return {getattr(p, "_attention_backend", None) for p in processors if p is not None}


def test_native_attention_is_taken_by_every_family_and_kept_by_copies_and_others_are_refused(
    load_tiny,
):
    for family, wrong in (("sd3", "flash"), ("flux", "flush"), ("sana", "flash")):
        network = load_tiny(family=family).transformer
        with pytest.raises(UserError, match="native or null"):
            set_attention(network, wrong)
        set_attention(network, "native")
        assert chosen(network) <= {"native", None}
    network = load_tiny(family="flux").transformer
    set_attention(network, "_Native_Math")
    assert chosen(network) == chosen(copy.deepcopy(network)) == {"_native_math"}
