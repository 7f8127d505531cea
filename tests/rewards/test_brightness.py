import torch
from flowrl_rewards.brightness import Brightness


def test_brightness_is_the_mean_pixel_and_lets_gradients_through():
    images = torch.stack([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)]).requires_grad_()
    scores = Brightness()(images, ["", ""], [{}, {}])
    assert scores.tolist() == [0.0, 1.0]
    scores.sum().backward()
    assert images.grad is not None and (images.grad == 1 / 48).all()
