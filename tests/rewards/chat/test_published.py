import pytest
import torch
from chat_servers import Scripted, completion, text_of
from flowrl_rewards.chat.published import ExplainedJudge, QuestionGraph, graph_score
from flowrl_rewards.vlm_judge import VLMJudge


@pytest.mark.parametrize(("chain", "right"), [(True, 1 / 4), (False, 2 / 4)])
def test_a_child_of_a_no_counts_0_and_its_own_children_by_the_benchmark(chain, right):
    """DPG-Bench, chained: 0 0 0 1; OneIG-Bench: 0 0 1 1."""
    said = {
        "A?": {"No": 0.6, "Yes": 0.4},
        "B?": {"yes": 0.9},
        "C?": {" Yes": 0.7},
        "D?": {"Yes": 1},
    }
    graph = [["A?", []], ["B?", [0]], ["C?", [1]], ["D?", []]]

    def script(body):
        return completion("", said[text_of(body).removesuffix(" Answer with yes or no.")])

    with Scripted(script) as server:
        judge = QuestionGraph({"model": "m", "base_url": server.url}, chain=chain)
        scores, reasons = judge(torch.rand(1, 3, 8, 8), ["p"], [{"question_graph": graph}])
    assert scores == [right] and not reasons
    assert graph_score([True] * 4, [parents for _, parents in graph], chain) == 1
    assert graph_score([True, False, True], [[], [], [0, 1]], chain) == 1 / 3
    for bad in ([], [["A?", [1]]], [["A?"]]):
        with pytest.raises(ValueError):
            judge.check("p", {"question_graph": bad})


def test_wiscore_weighs_consistency_realism_and_beauty_and_the_judge_reads_the_explanation():
    asked = []

    def script(body):
        asked.append(text_of(body))
        return completion("Consistency: 2\nRealism: 1\n**Aesthetic Quality**: 0")

    with Scripted(script) as server:
        judge = ExplainedJudge({"model": "m", "base_url": server.url}, rubric="wise")
        told = [{"Explanation": "mooncakes"}, {}]
        scores, reasons = judge(torch.rand(2, 3, 8, 8), ["a pastry"] * 2, told)
    assert scores == [pytest.approx((0.7 * 2 + 0.2 * 1 + 0.1 * 0) / 2)] * 2 and not reasons
    assert sorted("mooncakes" in text for text in asked) == [False, True]


def test_a_level_of_t2i_compbench_is_20_points():
    with Scripted(lambda _: completion('{"score": 3, "explanation": "so"}')) as server:
        judge = VLMJudge({"model": "m", "base_url": server.url}, "t2i_compbench")
        assert judge(torch.rand(1, 3, 8, 8), ["p"], [{}])[0] == [60 / 100]
