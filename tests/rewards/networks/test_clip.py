import pytest
from flowrl_rewards.networks.clip import Clip


def test_long_prompts_are_cut_with_a_warning(tiny_clip):
    clip, long = Clip(tiny_clip, reward="a test", device="cpu"), "a red circle " * 9
    with pytest.warns(UserWarning, match=r"a test reads 14 tokens .* prompt of 29"):
        cut = clip.texts([long])
    assert cut.isfinite().all() and (cut == clip.texts([long])).all()
