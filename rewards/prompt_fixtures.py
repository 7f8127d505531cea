"""Fixtures for rewards that compare a picture with its prompt."""


def red_and_blue() -> list[dict]:
    """Each of two colours above the other when the prompt asks for it: no fixed liking passes."""
    from rewards.fixtures import fixture, square

    return [
        fixture(f"a {asked} square scores above a {other} one when {asked} is asked for",
                square(asked), square(other), f"a {asked} square")
        for asked, other in (("red", "blue"), ("blue", "red"))
    ]  # fmt: skip
