"""A reward with three named scores; workers find this module by its name."""


class Parts:
    """How dark, how bright, and how long the prompt is; metadata {"broken": True} fails."""

    name = "parts"
    components = ("dark", "bright", "length")
    calls = 0

    def __call__(self, images, prompts, metadata):
        type(self).calls += 1
        seen = images.mean((1, 2, 3))
        reasons = {row: "the engine broke" for row, data in enumerate(metadata) if "broken" in data}
        lengths = [float(len(prompt)) for prompt in prompts]
        return {"dark": 1 - seen, "bright": seen, "length": lengths}, reasons
