"""The comparison page stands alone, escapes what it shows, and holds every image."""

import base64
import io
import math
import re
import tempfile
from html.parser import HTMLParser
from typing import Any

import numpy as np
from PIL import Image

from flowrl.export.gallery import GalleryRow, change_of, write_gallery
from flowrl.functional.contrasts import Contrast
from flowrl.training.evaluate import EvaluationComparison

HOSTILE = [
    '<script>alert("x")</script>',
    '" onload="alert(1)',
    "'><img src=http://example.com/x.png>",
    "</title></script><!-- {{ 7*7 }} {% raw %}",
    "javascript:alert(1) & <b>bold</b>\n\nnew line",
]


class Page(HTMLParser):
    """The tags with their attributes, and the text outside of style and script."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data):
        if not self.tags or self.tags[-1][0] not in ("style", "script"):
            self.text += data


def gallery_page(rows: list[GalleryRow], **texts: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return write_gallery(folder, rows, **texts)[0].read_text()


def noise(seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))


def pair(prompt: str = "a red circle", number: int = 0, **scores: Any) -> GalleryRow:
    images = noise(2 * number), noise(2 * number + 1)
    return GalleryRow(prompt=prompt, number=number, images=images, scores=scores)


def row(name: str = "geneval") -> EvaluationComparison:
    change = Contrast(mean=0.142, low=0.101, high=0.183, p=0.01, images=9, prompts=9)
    return EvaluationComparison(name=name, before=0.481, after=0.623, change=change)


def test_text_from_outside_stays_text_wherever_it_is_shown():
    for text in HOSTILE:
        plain = Page(gallery_page([pair(geneval=(0, 1))], title="t", summary=[row()], caption="c"))
        page = Page(
            gallery_page(
                [pair(text, 0, **{text: (0, 1)})], title=text, summary=[row(text)], caption=text
            )
        )
        assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
        assert [set(attrs) for _, attrs in page.tags] == [set(attrs) for _, attrs in plain.tags]
        assert page.text.count(text) >= 5  # title, heading, caption, table, prompt, reward


def test_the_page_holds_all_images_without_loss_and_nothing_from_outside():
    html = gallery_page([pair(number=i) for i in range(3)], title="t", summary=[row()])
    tags = Page(html).tags
    links = [v for _, attrs in tags for k, v in attrs.items() if k in ("src", "href", "srcset")]
    assert links and all(link.startswith("data:image/") for link in links)
    assert not re.search(r"url\(|@import|fetch\(|https?://", html)
    assert not {"link", "iframe", "object", "embed", "base"} & {tag for tag, _ in tags}
    policy = next(a["content"] for t, a in tags if a.get("http-equiv"))
    assert "default-src 'none'" in policy
    # Both images of every pair are in the page without loss.
    pairs = [pair(number=i) for i in range(3)]
    images = [
        a for t, a in Page(gallery_page(pairs, title="t")).tags if t == "img" and a.get("src")
    ]
    found = [Image.open(io.BytesIO(base64.b64decode(a["src"].split(",")[1]))) for a in images]
    expected = [image for p in pairs for image in p.images]
    assert len(found) == len(expected)
    for image, original in zip(found, expected, strict=True):
        assert np.array_equal(np.asarray(image.convert("RGB")), np.asarray(original))


def test_only_scores_that_are_missing_are_not_available():
    # A missing score is neither zero nor a change.
    for missing in (None, math.nan):
        assert change_of((missing, 1.0)) is change_of((1.0, missing)) is None
        page = Page(gallery_page([pair(geneval=(missing, 1.0))], title="t"))
        card = next(a for _, a in page.tags if a.get("class") == "card")
        assert card["data-changes"] == "[null]"
        assert "geneval n/a → 1.000 n/a" in page.text
    # A reward that says nothing about a pair is left out of it.
    page = Page(gallery_page([pair(ocr=(None, None), geneval=(0.0, 1.0))], title="t"))
    assert "geneval 0.000 → 1.000 +1.000" in page.text
    assert "n/a" not in page.text
