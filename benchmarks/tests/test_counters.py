"""What is read of a profiler's output, on output as it prints it: no GPU is needed."""

import pandas as pd
import pytest

from benchmarks.papers import counters


def profile_of(*kernels: str) -> str:
    """What the profiler prints for kernels: messages, then a line a metric."""
    lines = ["==PROF== Connected to process 7", '"ID","Kernel Name","Metric Name","Metric Value"']
    for number, kernel in enumerate(kernels):
        for place, metric in enumerate(counters.METRICS):
            lines.append(f'"{number}","{kernel}","{metric}","{1000 * (place + 1):,}"')
    return "\n".join([*lines, "==PROF== Disconnected"])


def test_kernels_belong_to_the_case_of_the_marker_before_them():
    marker = f"void at::cuda::{counters.MARKER}(long)"
    actual = counters.read(profile_of(marker, "one", "two", marker, "three"))
    assert actual["Kernel Name"].tolist() == ["one", "two", "three"]
    assert actual["number"].tolist() == [0, 0, 1]
    assert set(counters.METRICS.values()) <= set(actual.columns)
    assert actual["ns"].tolist() == [1000.0] * 3


def test_figures_of_several_kernels_are_of_their_sums():
    kernels = pd.DataFrame({
        "ns": [1e6, 3e6], "dram_read": [1e9, 0.0], "dram_write": [0.0, 1e9], "l2_bytes": [2e9, 2e9],
        "l1_sectors": [100.0, 300.0], "l1_hits": [100.0, 0.0], "l2_sectors": [10.0, 10.0],
        "l2_hits": [5.0, 10.0], "bandwidth": [10.0, 50.0], "occupancy": [100.0, 20.0],
    })  # fmt: skip
    actual = counters.figures(kernels)
    assert (actual["ms"], actual["dram_gb"], actual["l2_gb"]) == (4.0, 2.0, 4.0)
    assert (actual["l1_hit_rate"], actual["l2_hit_rate"]) == (25.0, 75.0)
    assert (actual["bandwidth"], actual["occupancy"]) == (40.0, 40.0)


def test_a_profile_without_the_counters_is_refused():
    with pytest.raises(ValueError, match="no table"):
        counters.read("==ERROR== the user has no permission")
    with pytest.raises(ValueError, match="lts__t_bytes"):
        counters.read(profile_of("kernel").replace("lts__t_bytes.sum", "other"))
