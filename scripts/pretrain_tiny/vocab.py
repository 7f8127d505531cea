"""Tokenizers of the tiny pipelines, made for the world's own prompts.

Both are ordinary tokenizers that diffusers loads: byte-level BPE with end-of-word marks for CLIP,
Unigram for T5. Unknown words fall back to pieces or `<unk>`, so any prompt can be typed.
"""

import json
import re
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flowrl.tiny.world import TAGS, all_prompts

CLIP_TOKENS = 14  # what the CLIP encoders read; longer prompts are cut, as in any CLIP


def corpus() -> list[str]:
    """Every text of the world."""
    return [p["prompt"] for tag in TAGS for p in all_prompts(tag)]


def _spell(words: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A BPE vocabulary and merges under which every word of `words` is one token.

    Merges grow each word from its left end. They are written down rather than trained: BPE
    training breaks ties by hash order, and the vocabulary must be the same every time.
    """
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(a + "</w>" for a in alphabet)]
    merges: list[tuple[str, str]] = []
    for word in words:
        parts = [*word[:-1], word[-1] + "</w>"]
        for i in range(1, len(parts)):
            pair = ("".join(parts[:i]), parts[i])
            if pair not in merges:
                merges.append(pair)
                tokens.append("".join(pair))
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}, merges


def clip_tokenizer(folder: Path, words: Iterable[str] | None = None):
    """A CLIPTokenizer (lower-case, 14 tokens) whose files are written to `folder`.

    words: each of which is one token; by default those of the world.
    """
    from transformers import CLIPTokenizer

    if words is None:
        words = {w.strip('"').lower() for text in corpus() for w in text.split()}
    words = sorted(words, key=lambda w: (-len(w), w))
    vocab, merges = _spell(words)
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "vocab.json", folder / "merges.txt"
    files[0].write_text(json.dumps(vocab, ensure_ascii=False))
    files[1].write_text("#version: 0.2\n" + "\n".join(map(" ".join, merges)) + "\n")
    tokenizer = CLIPTokenizer(*map(str, files), model_max_length=CLIP_TOKENS)
    tokenizer.save_pretrained(folder)
    return tokenizer


def t5_tokenizer(folder: Path, length: int):
    """A T5 tokenizer (Unigram, case kept, `length` tokens) whose files are written to `folder`.

    Plain words are one piece, anything else is spelt letter by letter: so a quoted word reaches
    the model as its letters here, and as a whole through CLIP.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import T5TokenizerFast  # type: ignore[attr-defined]

    words = sorted({w for text in corpus() for w in text.split() if w.isalpha() and w.islower()})
    letters = [c for c in string.printable if not c.isspace()]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = (
        [(f"▁{w}", -1.0) for w in words]
        + [('▁"', -2.0), ("▁", -3.0)]
        + [(c, -3.0) for c in letters]
    )
    unigram = Tokenizer(models.Unigram(special + pieces, unk_id=2))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    unigram.decoder = decoders.Metaspace()  # type: ignore[assignment]
    unigram.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = T5TokenizerFast(tokenizer_object=unigram, extra_ids=0, model_max_length=length)
    tokenizer.save_pretrained(folder)
    return tokenizer


def gemma_tokenizer(folder: Path, instruction: str):
    """A GemmaTokenizer whose files are written to `folder`.

    Words of the world and of SANA's `instruction` are one token, with the space before them;
    anything else is spelt letter by letter, and what is no ASCII, byte by byte.
    """
    from tokenizers import AddedToken
    from transformers import GemmaTokenizer

    known = {w for text in corpus() for w in text.split() if w.isalpha() and w.islower()}
    known |= set(re.findall("[A-Za-z]+", instruction))
    letters = [c for c in string.printable if not c.isspace()]
    plain = [
        "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "\n", "▁", *letters,
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]  # fmt: skip
    vocabulary = {piece: i for i, piece in enumerate(plain)}
    tokenizer = GemmaTokenizer(vocabulary, [], add_bos_token=True)
    added: Any = [
        *(AddedToken(w, single_word=True, lstrip=True, normalized=False) for w in sorted(known)),
        AddedToken('"', lstrip=True, normalized=False),
    ]
    tokenizer.add_tokens(added)
    tokenizer.save_pretrained(folder)
    return tokenizer
