"""Does the image carry the asked text? Read by RapidOCR, judged by edit distance.

The rule "flow_grpo" is the one Flow-GRPO trains on (arXiv 2505.05470); "strict" also asks that
nothing else is written. The engine needs no download: its models come with the package.
"""

import importlib.metadata
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .fixtures import blank, fixture, word
from .images import to_uint8

MODES = ("flow_grpo", "strict")
# Lines the engine is less sure of do not count. Flow-GRPO's code asks for more than 0, of lines of
# an engine (PaddleOCR 2.9) that has itself dropped those below 0.5.
CONFIDENCE = 0.5
MARKS = '"\u201c\u201d\u201e'  # straight, curly high ones, and the low one that opens in German
_QUOTED = re.compile(
    '"([^"]*)"?|\u201e([^"\u201c\u201d]*)["\u201c\u201d]?|\u201c([^"\u201d]*)["\u201d]?'
)

Reader = Callable[[np.ndarray], list[str]]  # (H, W, 3) uint8 BGR -> lines in reading order


def quoted(prompt: str) -> list[str]:
    """Return the spans between double quotes; an open quote runs to the end.

    Straight, "so", or curly, “so” or „so“; no others.
    """
    spans = ("".join(groups) for groups in _QUOTED.findall(prompt))
    return [span for span in spans if span.strip()]


def distance_score(recognised: str, target: str) -> float:
    """Return 1 - d / len(target), with d the edit distance, at most len(target)."""
    from rapidfuzz.distance import Levenshtein

    return 1 - min(Levenshtein.distance(recognised, target), len(target)) / len(target)


def flow_grpo_score(lines: Sequence[str], target: str) -> float:
    """Score by Flow-GRPO's rule: lower case, no U+0020; 1 if the target is in the lines."""
    recognised, target = (t.replace(" ", "").lower() for t in ("".join(lines), target))
    return 1.0 if target in recognised else distance_score(recognised, target)


class OCR:
    """How much of the asked text can be read: 1 = all of it, 0 = none, NaN = the engine failed.

    The target is metadata["ocr_text"] (a text or a list of texts), else what the prompt quotes:
    one text for "flow_grpo", all of them for "strict". The reward does not apply to a prompt with
    neither. A prompt with a quote that is not closed, and for "flow_grpo" one that quotes several
    texts, is ambiguous and gets no score.
    first: take what follows the first quote instead, as Flow-GRPO's code does.
    mode "strict": Unicode NFKC and case folding, no white space, and further text costs.
    """

    differentiable = False
    bounds = (0.0, 1.0)

    def __init__(self, mode: str = "flow_grpo", *, first: bool = False):
        if mode not in MODES:
            raise ValueError(f"OCR mode is one of {', '.join(MODES)}, not {mode!r}")
        self.mode = mode
        self.first = first
        self.name = "ocr" if mode == "flow_grpo" else "ocr_strict"
        engine = importlib.metadata.version("rapidocr")
        self.version = f"ocr-2/{mode}/rapidocr-{engine}/{CONFIDENCE}"
        self._read: Reader | None = None

    def targets(self, prompt: str, metadata: dict) -> list[str]:
        """Return the texts that the prompt wants; empty when there are none."""
        text = metadata.get("ocr_text")
        if text is None:
            first = prompt.split('"')[1:2] if self.mode == "flow_grpo" else []
            texts = [*first, *quoted(prompt)]
        else:
            texts = text if isinstance(text, list | tuple) else [text]
        texts = [str(text) for text in texts if _is_text(text) and str(text).strip()]
        return texts if self.mode == "strict" else texts[:1]

    def ambiguity(self, prompt: str, metadata: dict) -> str | None:
        """Return why the text to draw does not follow from the prompt; None where it does."""
        if self.first or metadata.get("ocr_text") is not None:
            return None
        texts, remedy = list(dict.fromkeys(quoted(prompt))), "write the text to draw in ocr_text"
        if prompt.count('"') % 2 and texts:
            return f"a double quote of the prompt is not closed: close it, or {remedy}"
        if self.mode == "flow_grpo" and len(texts) > 1:
            named = " and ".join(repr(text) for text in texts[:3])
            return f"the prompt quotes several texts, {named}: {remedy}, or take all (mode: strict)"
        return None

    def applies(self, prompt: str, metadata: dict) -> bool:
        """Return whether the prompt wants text, or seems to: `check` tells."""
        quotes = any(mark in prompt for mark in MARKS)
        return quotes or metadata.get("ocr_text") is not None

    def check(self, prompt: str, metadata: dict) -> None:
        """Raise ValueError for quotes or an ocr_text with nothing in them, an ocr_text that is
        neither a text nor a list of texts, and for an ambiguous prompt.
        """
        text = metadata.get("ocr_text")
        if not all(map(_is_text, text if isinstance(text, list | tuple) else [text or ""])):
            raise ValueError(f"ocr_text is {text!r}, expected a text or a list of texts")
        if not self.targets(prompt, metadata):
            raise ValueError(
                "there is nothing to read in its ocr_text or between its quotes: fill them, or "
                "remove the quotes"
            )
        if reason := self.ambiguity(prompt, metadata):
            raise ValueError(reason)

    def __call__(
        self, images: Tensor, prompts: list[str], metadata: list[dict]
    ) -> tuple[Tensor, dict[int, str]]:
        """Score images (B, 3, H, W) in [0, 1]: scores (B,) float32 and why some are NaN, by row."""
        self._read = self._read or rapidocr_reader()
        scores, reasons = torch.full((len(prompts),), math.nan), {}
        pairs = zip(to_uint8(images), prompts, metadata, strict=True)
        for row, (image, prompt, data) in enumerate(pairs):
            targets = self.targets(prompt, data)
            if not targets:
                reasons[row] = "the prompt asks for no text: put it in quotes or in ocr_text"
                continue
            if reason := self.ambiguity(prompt, data):
                reasons[row] = reason
                continue
            try:
                lines = self._read(np.ascontiguousarray(image[..., ::-1]))
                scores[row] = self.judge(lines, targets)
            except ImportError:
                raise
            except Exception as error:
                reasons[row] = f"the engine failed: {type(error).__name__}: {error}"
        return scores, reasons

    def judge(self, lines: Sequence[str], targets: Sequence[str]) -> float:
        """Return the score of recognised lines for the wanted texts."""
        if self.mode == "flow_grpo":
            return flow_grpo_score(lines, targets[0])
        return distance_score(_folded(lines), _folded(targets))

    def fixtures(self) -> list[dict]:
        prompt, data = 'a sign that says "COFFEE"', {"ocr_text": "COFFEE"}
        right, wrong, typo = word("COFFEE"), word("GARDEN"), word("COFFIN")
        return [
            fixture("the right word scores above the wrong one", right, wrong, prompt, data),
            fixture("the right word scores above a misspelled one", right, typo, prompt, data),
            fixture("a misspelled word scores above an empty page", typo, blank(128), prompt, data),
        ]


def _folded(texts: Sequence[str]) -> str:
    return "".join(unicodedata.normalize("NFKC", " ".join(texts)).casefold().split())


def _is_text(value: Any) -> bool:
    """Return a text, or a number, which may be written too."""
    return isinstance(value, str | int | float) and not isinstance(value, bool)


# --- the engine -----------------------------------------------------------------------------------


def rapidocr_reader() -> Reader:
    """Return RapidOCR on one thread; images down to 64x64 pixels need no enlarging.

    Not for several threads at once: the engine keeps state while it reads.
    """
    from rapidocr import RapidOCR

    engine = RapidOCR(
        params={
            "Global.log_level": "critical",
            "Global.text_score": CONFIDENCE,
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            # Look at small images as they are, and pad short words little: half the time.
            "Det.limit_type": "max",
            "Det.limit_side_len": 512,
            "Rec.rec_img_shape": [3, 48, 48],
        }
    )

    def read(image: np.ndarray) -> list[str]:
        # The engine remembers flags from call to call: all three are said every time.
        result = engine(image, use_det=True, use_cls=False, use_rec=True)
        return list(getattr(result, "txts", None) or ())

    return read
