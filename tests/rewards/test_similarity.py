import base64
import io
import os
import struct
import zlib

import pytest
import torch
from flowrl_rewards.fixtures import blank, square
from flowrl_rewards.images import to_uint8
from flowrl_rewards.similarity import MAX_PIXELS, Similarity
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

RED, BLUE = square("red", 32), square("blue", 32)
MAX_SIDE = int(MAX_PIXELS**0.5)


@pytest.fixture
def red_file(tmp_path):
    path = tmp_path / "red.png"
    Image.fromarray(to_uint8(RED[None])[0]).save(path)
    return path


def scores(reference, *images, folder=None, **args):
    made = Similarity(folder=folder and str(folder), **args)
    return made(torch.stack(images), [""] * len(images), [{"reference": reference}] * len(images))


def scored(reference, *images, **args):
    numbers, reasons = scores(reference, *images, **args)
    assert not reasons
    return numbers


def data_url(blob: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(blob).decode()}"


def huge_png(side: int) -> bytes:
    """A file that says it has side x side pixels, and does not."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_the_reference_itself_scores_1_and_another_image_less(red_file):
    for measure in ["ssim", "pixels"]:
        same, other = scored("red.png", RED, BLUE, folder=red_file.parent, measure=measure)
        assert same == pytest.approx(1) and other < 0.95


def test_each_image_is_compared_with_its_own_reference(red_file, tmp_path):
    blue_file = tmp_path / "blue.png"
    Image.fromarray(to_uint8(BLUE[None])[0]).save(blue_file)
    both = [{"reference": "red.png"}, {"reference": str(blue_file)}]
    made = Similarity(folder=str(tmp_path))
    right, _ = made(torch.stack([RED, BLUE]), ["", ""], both)
    wrong, _ = made(torch.stack([RED, BLUE]), ["", ""], both[::-1])
    assert torch.allclose(right, torch.ones(2)) and wrong.max() < 0.95


def test_a_reference_may_have_another_size_and_be_a_data_url(red_file):
    large, empty = scored("red.png", square("red", 64), blank(64), folder=red_file.parent)
    assert large > 0.9 > empty
    assert scored(data_url(red_file.read_bytes()), RED).item() == pytest.approx(1)


def test_a_reference_that_cannot_be_opened_is_found_at_the_start(tmp_path):
    broken = ("data:image/png;base64,%%%", "data:image/png;base64,AAAA")
    for reference in ("missing.png", *broken, "", "a\0b", 7, None):
        with pytest.raises(ValueError, match=r'metadata\["reference"\].*cannot be opened'):
            Similarity(folder=str(tmp_path)).check("", {"reference": reference})


def test_no_file_is_opened_without_a_folder(red_file, monkeypatch):
    monkeypatch.chdir(red_file.parent)
    for name in (str(red_file), "red.png"):
        with pytest.raises(ValueError, match="without folder.*data URL"):
            Similarity().check("", {"reference": name})
        numbers, reasons = scores(name, RED)
        assert numbers.isnan().all() and "without folder" in reasons[0]


def test_relative_paths_start_in_the_folder_and_none_leaves_it(red_file, tmp_path):
    made = Similarity(folder=str(tmp_path))
    made.check("", {"reference": "red.png"})
    made.check("", {"reference": str(red_file)})
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "link.png").symlink_to(red_file)
    inner = Similarity(folder=str(tmp_path / "inner"))
    for outside in ("../red.png", str(red_file), "link.png"):
        with pytest.raises(ValueError, match="outside the reward's folder"):
            inner.check("", {"reference": outside})


@pytest.mark.timeout(10)
def test_only_plain_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")  # which would be waited for until someone writes
    (tmp_path / "folder.png").mkdir()
    for name in ("pipe.png", "folder.png"):
        with pytest.raises(ValueError, match="no plain file|directory"):
            Similarity(folder=str(tmp_path)).check("", {"reference": name})
    devices = Similarity(folder=os.path.dirname(os.devnull))
    with pytest.raises(ValueError, match="no plain file"):
        devices.check("", {"reference": "zero"})


def test_an_image_that_says_it_is_huge_is_not_unpacked(tmp_path):
    for side in [MAX_SIDE + 1, 30_000]:
        (tmp_path / "huge.png").write_bytes(huge_png(side))
        for name in ("huge.png", data_url(huge_png(side))):
            with pytest.raises(
                ValueError, match=f"({side} x {side} pixels, at most|{side**2} pixels. exceeds)"
            ):
                Similarity(folder=str(tmp_path)).check("", {"reference": name})
            numbers, reasons = scores(name, RED, folder=tmp_path)
            assert numbers.isnan().all() and "pixels" in reasons[0]


def test_only_common_formats_are_read(tmp_path):
    """Others have run programs of the machine, or are none that a browser would show."""
    Image.fromarray(to_uint8(RED[None])[0]).save(tmp_path / "red.eps")
    (tmp_path / "text.png").write_text("no image")
    for name in ("red.eps", "text.png"):
        with pytest.raises(ValueError, match="cannot be opened"):
            Similarity(folder=str(tmp_path)).check("", {"reference": name})
    for kind in ("jpeg", "webp"):
        Image.fromarray(to_uint8(RED[None])[0]).save(tmp_path / f"red.{kind}")
        Similarity(folder=str(tmp_path)).check("", {"reference": f"red.{kind}"})


def test_a_broken_reference_costs_its_own_image_only(red_file, tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(square("red", 256)[None])[0]).save(buffer, "JPEG")
    (tmp_path / "cut.jpg").write_bytes(buffer.getvalue()[:-300])
    names = ["red.png", "cut.jpg", "red.png"]
    numbers, reasons = Similarity(folder=str(tmp_path))(
        torch.stack([RED, RED, BLUE]), [""] * 3, [{"reference": name} for name in names]
    )
    assert numbers.isnan().tolist() == [False, True, False]
    assert numbers[0] == pytest.approx(1) and list(reasons) == [1] and "cut.jpg" in reasons[1]


def test_every_reference_is_unpacked_once(red_file, monkeypatch):
    made, unpacked = Similarity(folder=str(red_file.parent)), []
    prepare = PngImageFile.load_prepare
    monkeypatch.setattr(
        PngImageFile, "load_prepare", lambda self: unpacked.append(1) or prepare(self)
    )
    made.check("", {"reference": "red.png"})
    assert not unpacked
    made(torch.stack([RED, BLUE]), ["", ""], [{"reference": "red.png"}] * 2)
    assert len(unpacked) == 1


def test_its_fixtures_are_in_order():
    for case in Similarity().fixtures():
        images = torch.stack([case["better"], case["worse"]])
        (better, worse), _ = Similarity()(images, [""] * 2, [case["metadata"]] * 2)
        assert better > worse
