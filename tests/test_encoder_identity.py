"""What tells one pipeline's text encoders from another's."""

import copy
import os

import pytest
import torch

from flowrl.backbones.loading import pipeline_path
from flowrl.backbones.text_cache import by_files, by_weights, encoder_names, index_file


@pytest.fixture
def folder(tmp_path):
    """The index and the text encoders of a pipeline, as far as files go."""
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "X", "text_encoder": ["a", "B"], "text_encoder_2": ["a", "B"], "vae": []}'
    )
    for name in ("text_encoder", "text_encoder_2", "tokenizer", "transformer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("1")
    return tmp_path


def test_the_encoders_are_those_of_the_index(folder):
    index = index_file(str(folder), None)
    assert index is not None and encoder_names(index) == ["text_encoder", "text_encoder_2"]
    index = index_file(pipeline_path("tiny-sd3"), None)
    assert index is not None and len(encoder_names(index)) == 3


@pytest.mark.parametrize("name", ["nothing/here", "/no/such/folder/at/all", "a name of nothing"])
def test_what_is_not_on_this_machine_has_no_index(name):
    assert index_file(name, None) is None


def test_a_change_of_an_encoder_or_tokenizer_is_seen_and_of_other_parts_is_not(folder):
    index = folder / "model_index.json"
    before = by_files(index)
    (folder / "transformer" / "weights").write_text("more")
    assert by_files(index) == before
    (folder / "tokenizer" / "weights").write_text("more")
    longer = by_files(index)
    assert longer != before
    os.utime(folder / "text_encoder_2" / "weights", ns=(1, 1))
    assert by_files(index) != longer


def test_of_the_hub_it_is_the_commit(tmp_path):
    index = tmp_path / "models--a--b" / "snapshots" / "0123abcd" / "model_index.json"
    assert by_files(index) == {"commit": "0123abcd"}


def test_weights_in_memory_are_told_apart_by_their_values(load_tiny):
    pipeline = load_tiny()
    before = by_weights(pipeline)
    assert by_weights(load_tiny()) == before
    pipeline.text_encoder = copy.deepcopy(pipeline.text_encoder)  # shared by all tests
    with torch.no_grad():
        next(pipeline.text_encoder.parameters()).mul_(1.5)
    assert by_weights(pipeline) != before
