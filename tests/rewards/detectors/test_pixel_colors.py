import numpy as np
from flowrl_rewards.detectors.clip_colors import COLORS
from flowrl_rewards.detectors.pixel_colors import SHADES, PixelColors, color_of
from flowrl_rewards.geneval_rules import Detection
from hypothesis import given
from hypothesis import strategies as st

NAMED = {  # from CSS's colour names, whose levels are nobody's choice here
    "red": "red crimson firebrick darkred",
    "orange": "orange darkorange",
    "yellow": "yellow gold khaki",
    "green": "green lime limegreen forestgreen darkgreen seagreen",
    "blue": "blue royalblue navy mediumblue cornflowerblue dodgerblue steelblue",
    "purple": "purple indigo darkorchid blueviolet",
    "pink": "pink hotpink lightpink palevioletred",
    "brown": "saddlebrown sienna",  # CSS's own brown is a dark red
    "black": "black",
    "white": "white whitesmoke snow",
    None: "gray darkgray silver dimgray",
}


def flat(levels, count: int = 50) -> np.ndarray:
    return np.tile(np.array(levels, np.uint8), (count, 1))


def thing(box, mask=None) -> Detection:
    return Detection(box=box, score=0.9, name="cat", mask=mask)


def test_colours_are_called_as_people_call_them():
    from PIL import ImageColor

    assert set(PixelColors.colors) == set(COLORS) == set(SHADES) - {None}
    for name, many in NAMED.items():
        for css in many.split():
            assert color_of(flat(ImageColor.getrgb(css))) == name, css


@given(st.sampled_from([n for n in COLORS if n not in ("black", "white")]), st.floats(0.9, 1.05))
def test_a_little_light_and_shadow_change_no_name(name, light):
    shade = np.clip(np.array(SHADES[name][0]) * light, 0, 255)
    assert color_of(flat(shade)) == name


def test_pixels_that_do_not_agree_have_no_colour_however_many_they_are():
    red, blue = flat((225, 30, 35)), flat((40, 85, 225))
    assert color_of(np.concatenate([red, blue])) is None
    assert color_of(np.concatenate([red, red, blue])) == "red"
    assert color_of(np.zeros((0, 3), np.uint8)) is None
    levels = np.array(SHADES["green"][0], np.uint8)
    assert {color_of(flat(levels, n)) for n in (1, 4096, 4097, 100_000)} == {"green"}


def test_the_mask_decides_which_pixels_vote_and_else_the_middle_of_the_box():
    image = np.full((40, 60, 3), (40, 85, 225), np.uint8)
    image[10:30, 20:40] = (225, 30, 35)
    mask = np.zeros((40, 60), bool)
    mask[10:30, 20:40] = True
    whole = (0, 0, 60, 40)
    found = [thing(whole, mask), thing(whole, ~mask), thing((10, 5, 50, 35)), thing((0, 0, 20, 9))]
    assert PixelColors()(image, found) == ["red", "blue", "red", "blue"]
