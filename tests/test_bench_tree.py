"""What `flowrl bench tree` compares; how fast it is, is not a test's business."""

from flowrl.bench.rollout import bench_tree


def test_ratios_stand_beside_those_of_the_plans_own_counts(tiny_pipeline_path):
    rows = bench_tree(
        model=tiny_pipeline_path, prompts=1, batch=16, steps=13, threads=1, repeats=1, device="cpu"
    )
    tree = 1 + 2 * 3 + 4 * 3 + 8 * 3 + 16 * 3  # nodes with children at T = 13, splits 0, 3, 6, 9
    chains, last = 16 * 13, 16
    assert [row["by counts"] for row in rows] == [
        tree / chains,
        (tree - last) / (chains - last),
        (tree - last - 2 * 16) / (tree - last),  # steps 10 and 11 of 13 are left out
    ]
    for row in rows:
        assert row["ratio"] == row["s"] / row["its s"] > 0
        assert row["of counts"] == row["ratio"] / row["by counts"]
