"""A reward for processes of a pool, which is lost while a file says so."""

import os


class Fragile:
    """The images' mean; while the file `lost` is there its process dies at any call."""

    def __init__(self, lost: str, after: int = 0):
        self.lost, self.calls = lost, 0

    def __call__(self, images, prompts, metadata):
        if os.path.exists(self.lost):
            os._exit(3)
        return images.mean((1, 2, 3))
