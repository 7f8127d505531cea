from flowrl.prompts.records import PromptRecord
from flowrl.scoring.check import check_named
from flowrl.scoring.spec import BUILT_IN

OFFLINE = (
    "geneval ocr diversity compressibility incompressibility brightness tiny_colors "
    "tiny_quality tiny_judge tiny_proxy"
).split()
# On a machine without weights, packages and servers.
LACKING = (
    "pickscore clipscore hpsv2 aesthetic hpsv3 vlm_judge vlm_questions pairwise preference taste"
).split()


def test_every_built_in_reward_that_needs_nothing_passes_and_the_others_lack_something():
    assert sorted((*OFFLINE, *LACKING)) == sorted(BUILT_IN)
    assert all(check_named(name).results[0].state != "ok" for name in LACKING)
    for name in OFFLINE:
        checked = check_named(name)
        assert [finding.state for finding in checked.results] == ["ok"], checked.results
        assert "right" in checked.results[0].detail, name  # it has fixtures
        assert checked.version, name


def test_prompts_of_ones_own_are_counted_by_whether_the_reward_can_judge_them():
    def record(number: int, name: str) -> PromptRecord:
        wanted = {"tag": "single_object", "include": [{"class": name, "count": 1}]}
        return PromptRecord(uid=str(number), text=f"a {name}", metadata=wanted)

    square, dog = record(0, "square"), record(1, "dog")
    for prompts, state, counted in (
        ([square, square], "ok", "2 of 2 prompts"),
        ([square, dog], "problem", "1 of 2 prompts"),
    ):
        fits, judged = check_named("geneval", prompts=prompts).results
        assert (fits.state, judged.state) == ("ok", state) and counted in judged.detail
    assert "'dog'" in judged.detail and "mask2former" in judged.detail
