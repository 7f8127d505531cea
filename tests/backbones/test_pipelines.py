"""What is refused before a pipeline is loaded."""

import pytest

from flowrl.backbones.loading import load_pipeline, pipeline_path
from flowrl.errors import UserError


def test_a_revision_of_what_is_not_from_the_hub_is_refused():
    for path in ["tiny-sd3", pipeline_path("tiny-flux")]:
        with pytest.raises(
            UserError, match="revision 'v1' is given for .* set pipeline.revision to"
        ):
            load_pipeline(path, dtype="fp32", device="cpu", revision="v1")
