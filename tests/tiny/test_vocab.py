"""The tokenizers of the tiny pipelines know every word of the world, and spell the others."""

import pytest

from flowrl.backbones.sana import stock_instruction
from scripts.pretrain_tiny.vocab import CLIP_TOKENS, clip_tokenizer, corpus, gemma_tokenizer, t5_tokenizer
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


def test_every_tokenizer_reads_captions_whole_and_apart(clip, gemma, t5):
    # Every word of the world is one clip token.
    words = {w.strip('"').lower() for text in corpus() for w in text.split()}
    assert [w for w in words if len(clip.tokenize(w)) != 1] == []
    # Clip reads every caption whole.
    longest = max(len(ids) for ids in clip(corpus()).input_ids)
    assert longest <= CLIP_TOKENS
    # Every caption fits sanas short length.
    assert max(len(ids) for ids in gemma([t.lower() for t in corpus()]).input_ids) <= SHORT
    # Captions of the presets fit sixteen t5 tokens.
    # Longer captions are cut by the pipeline at `max_sequence_length`.
    assert max(len(ids) for ids in t5(corpus()).input_ids) <= 16
    # Captions differ in every tokenizer.
    texts = corpus()
    for tokenizer in (clip, t5, gemma):
        assert len({tuple(ids) for ids in tokenizer(texts).input_ids}) == len(set(texts))


def test_tokenizers_spell_what_is_quoted_and_load_as_ordinary_ones(t5, gemma, clip, tmp_path):
    # Quoted words are spelt and others read whole.
    # T5 spells quoted words letter by letter.
    pieces = t5.tokenize('the word "CAT"')
    assert pieces[-5:] == ['▁"', "C", "A", "T", '"']
    assert pieces[:2] == ["▁the", "▁word"]
    # Gemma reads words whole and spells what is quoted. In lower case, as SANA's pipeline hands
    # it over.
    pieces = gemma.convert_ids_to_tokens(gemma.encode('the word "dog"'))
    assert pieces == ["<bos>", "the", "word", '"', "d", "o", "g", '"']
    # Gemma reads the words of sanas instruction whole.
    instruction = "\n".join(stock_instruction())
    assert len(gemma.encode(instruction)) < len(instruction) / 4
    prompt = gemma.encode(instruction + "a red circle")[-3:]
    assert prompt == gemma.encode("a red circle")[1:]
    # Any text can be typed.
    assert len(clip("Zebra-Straße 42!").input_ids) > 2
    assert len(t5("Zebra-Straße 42!").input_ids) > 1
    assert gemma.unk_token_id not in gemma("zebra-straße 42!").input_ids
    # The files load as ordinary tokenizers.
    from transformers import AutoTokenizer

    text = ['a red circle left of a "ZOO"']
    for name, tokenizer in (("clip", clip), ("t5", t5), ("gemma", gemma)):
        tokenizer.save_pretrained(tmp_path / name)
        again = AutoTokenizer.from_pretrained(tmp_path / name)
        assert again(text).input_ids == tokenizer(text).input_ids
