"""The tokenizers of the tiny pipelines know every word of the world, and spell the others."""

import pytest

from flowrl.backbones.sana import stock_instruction
from flowrl.tiny.vocab import (
    CLIP_TOKENS,
    clip_tokenizer,
    corpus,
    gemma_tokenizer,
    t5_tokenizer,
)
from scripts.pretrain_tiny.sana import SHORT


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return clip_tokenizer(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return t5_tokenizer(tmp_path_factory.mktemp("t5"), 256)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return gemma_tokenizer(tmp_path_factory.mktemp("gemma"), "\n".join(stock_instruction()))


def test_every_word_of_the_world_is_one_clip_token(clip):
    words = {w.strip('"').lower() for text in corpus() for w in text.split()}
    assert [w for w in words if len(clip.tokenize(w)) != 1] == []


def test_clip_reads_every_caption_whole(clip):
    longest = max(len(ids) for ids in clip(corpus()).input_ids)
    assert longest <= CLIP_TOKENS


def test_t5_spells_quoted_words_letter_by_letter(t5):
    pieces = t5.tokenize('the word "CAT"')
    assert pieces[-5:] == ['▁"', "C", "A", "T", '"']
    assert pieces[:2] == ["▁the", "▁word"]


def test_gemma_reads_words_whole_and_spells_what_is_quoted(gemma):
    """In lower case, as SANA's pipeline hands it over."""
    pieces = gemma.convert_ids_to_tokens(gemma.encode('the word "dog"'))
    assert pieces == ["<bos>", "the", "word", '"', "d", "o", "g", '"']


def test_every_caption_fits_sanas_short_length(gemma):
    assert max(len(ids) for ids in gemma([t.lower() for t in corpus()]).input_ids) <= SHORT


def test_gemma_reads_the_words_of_sanas_instruction_whole(gemma):
    instruction = "\n".join(stock_instruction())
    assert len(gemma.encode(instruction)) < len(instruction) / 4
    prompt = gemma.encode(instruction + "a red circle")[-3:]
    assert prompt == gemma.encode("a red circle")[1:]


def test_captions_differ_in_every_tokenizer(clip, t5, gemma):
    texts = corpus()
    for tokenizer in (clip, t5, gemma):
        assert len({tuple(ids) for ids in tokenizer(texts).input_ids}) == len(set(texts))


def test_captions_of_the_presets_fit_sixteen_t5_tokens(t5):
    # Longer captions are cut by the pipeline at `max_sequence_length`.
    assert max(len(ids) for ids in t5(corpus()).input_ids) <= 16


def test_any_text_can_be_typed(clip, t5, gemma):
    assert len(clip("Zebra-Straße 42!").input_ids) > 2
    assert len(t5("Zebra-Straße 42!").input_ids) > 1
    assert gemma.unk_token_id not in gemma("zebra-straße 42!").input_ids


def test_the_files_load_as_ordinary_tokenizers(clip, t5, gemma, tmp_path):
    from transformers import AutoTokenizer

    text = ['a red circle left of a "ZOO"']
    for name, tokenizer in (("clip", clip), ("t5", t5), ("gemma", gemma)):
        tokenizer.save_pretrained(tmp_path / name)
        again = AutoTokenizer.from_pretrained(tmp_path / name)
        assert again(text).input_ids == tokenizer(text).input_ids
