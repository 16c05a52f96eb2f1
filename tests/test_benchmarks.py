"""The benchmarks run: the GPU's at tiny sizes on the CPU, and it is refused where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(script, *options):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_gpu_benchmark_at_tiny_sizes_on_the_cpu():
    done = run("gpu.py", "--device", "cpu", "--tiny", "--repeats", "2")
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    result = json.loads(last)
    assert any(line.startswith("step by paths") for line in table)
    assert max(result["difference_from_cpu_float64"].values()) < 1e-11
    assert result["waits_for_the_device"] is None
    assert result["steps_in_ten_epochs"] == 10 * (100_000 // 16)
    hours = result["step by paths"]["seconds"] * result["steps_in_ten_epochs"] / 3600
    assert result["ten_epochs_hours"]["paths"] == pytest.approx(hours)
    assert {"python", "torch"} <= set(result["machine"]["versions"])


@pytest.mark.slow
def test_gpu_benchmark_without_a_gpu_is_refused_with_a_sentence():
    done = run("gpu.py")
    assert done.returncode != 0 and done.stdout == ""
    assert done.stderr.startswith("No CUDA device was found") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_paths_benchmark_at_tiny_sizes():
    sizes = "--vocab-size 100 --seq-len 20 --layers 1 2 --sequences 8 --dense-sequences 4"
    done = run("bench_paths.py", *sizes.split())
    assert done.returncode == 0, done.stderr
    assert "of product's speed" in done.stdout and "num_layers" in done.stdout
