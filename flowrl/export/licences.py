"""Under which terms the weights are that a LoRA was trained on: a LoRA inherits them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Licence:
    """As a model card's header has it: name and link only where `id` is "other"."""

    id: str  # the Hub's identifier
    name: str = ""
    link: str = ""

    def header(self) -> dict[str, str]:
        found = {"license": self.id, "license_name": self.name, "license_link": self.link}
        return {key: value for key, value in found.items() if value}


def _other(name: str, base: str, file: str) -> Licence:
    return Licence(id="other", name=name, link=f"https://huggingface.co/{base}/blob/main/{file}")


# As the cards of these repositories say, by how their names begin. SANA's card has no identifier
# and says "NSCL v2-custom" in its text.
_STABILITY = ("stabilityai/stable-diffusion-3.5-", "stabilityai-ai-community", "LICENSE.md")
_FLUX_DEV = ("black-forest-labs/FLUX.1-dev", "flux-1-dev-non-commercial-license", "LICENSE.md")
_SANA = ("Efficient-Large-Model/Sana_", "nscl-v2-custom", "LICENSE.txt")


def licence_of(base_model: str) -> Licence | None:
    """Of a pipeline's weights by its name on the Hub; None where it is not known."""
    if base_model == "black-forest-labs/FLUX.1-schnell":
        return Licence(id="apache-2.0")
    for start, name, file in (_STABILITY, _FLUX_DEV, _SANA):
        if base_model.startswith(start):
            return _other(name, base_model, file)
    return None
