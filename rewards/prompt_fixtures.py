"""Fixtures for rewards that compare an image with its prompt: made when they are asked for."""


def red_and_blue() -> list[dict]:
    """Return each of two colours above the other when the prompt asks for it: no fixed liking
    passes.
    """
    from .fixtures import fixture, square

    return [
        fixture(f"a {right} square scores above a {other} one when {right} is asked for",
                square(right), square(other), f"a {right} square")
        for right, other in (("red", "blue"), ("blue", "red"))
    ]  # fmt: skip


def quality() -> list[dict]:
    """Return a clean image and a noisy one, for rewards that do not read the prompt."""
    from .fixtures import fixture, noise, square

    return [fixture("a clean square is of better quality than noise", square("red"), noise())]


def tiny_world() -> list[dict]:
    """Return prompts of the tiny world in GenEval's form."""
    from .fixtures import blank, fixture, shapes

    ball = {"class": "circle", "count": 1, "color": "red"}
    three = {"class": "star", "count": 3}
    return [
        fixture(
            "the right colour scores above the wrong one",
            shapes([("circle", "red")]), shapes([("circle", "blue")]),
            "a red circle", {"tag": "colors", "include": [ball]},
        ),
        fixture(
            "the right number scores above the wrong one",
            shapes([("star", "black")] * 3), shapes([("star", "black")] * 2),
            "three stars", {"tag": "counting", "include": [three]},
        ),
        fixture(
            "an object scores above an empty image",
            shapes([("circle", "red")]), blank(64), "a circle",
            {"tag": "single_object", "include": [{"class": "circle", "count": 1}]},
        ),
    ]  # fmt: skip


def cat_or_nothing(count: int = 1) -> list[dict]:
    """Return a photograph for detectors of photographs: Chelsea by Stefan van der Walt (CC0), which
    comes with scikit-image, and paper of its size, 300 by 451 pixels. count: of cats to ask for.
    """
    import torch
    from skimage.data import chelsea

    from .fixtures import blank, fixture

    cat = torch.from_numpy(chelsea()).permute(2, 0, 1).float().contiguous() / 255
    height, width = cat.shape[1:]
    paper = blank(max(height, width))[:, :height, :width].contiguous()
    wanted = {"tag": "single_object", "include": [{"class": "cat", "count": count}]}
    return [fixture("a cat scores above an empty image", cat, paper, "a photo of a cat", wanted)]
