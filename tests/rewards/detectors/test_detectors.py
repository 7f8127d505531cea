import pytest
from flowrl_rewards.detectors import load_detector


def test_detectors_are_found_by_name_or_import_path():
    assert load_detector("collections:Counter") == {}
    assert load_detector("collections:Counter", {"cats": 2}) == {"cats": 2}
    with pytest.raises(ValueError, match="or 'module:attribute'"):
        load_detector("nothing")
