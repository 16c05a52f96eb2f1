"""The benchmarks run: the GPU's at tiny sizes on the CPU, and it is refused where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.results import load_run

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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--save estimate-sample", "is no name like bench-gpu"),
        ("--save ..", "is no name like bench-gpu"),
        ("--save bench-../x", "is no name like bench-gpu"),
        ("--sequences 0", "is not a whole number of at least 1"),
        ("--layers -1", "is not a whole number of at least 1"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(options, says):
    done = run("bench_profile.py", *options.split())
    assert done.returncode == 2 and done.stdout == "" and says in done.stderr


TINY = "--vocab-size 100 --seq-len 20 --sequences 8"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options", "printed"),
    [
        ("bench_paths.py", "--layers 1 2 --dense-sequences 4", "of product's speed"),
        ("bench_equality.py", "--layers 1 2 --full", "paths_float64"),
        ("bench_profile.py", "--layers 2", "bookkeeping"),
        ("bench_statistics.py", "--dense 6 8 --repeats 1 --full", "dense float32, N = 8"),
    ],
)
def test_benchmark_at_tiny_sizes_prints_and_keeps_a_record(script, options, printed):
    done = run(script, *TINY.split(), *options.split(), "--save", f"bench-{script}")
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    record = load_run(f"bench-{script}")
    assert record["summary"] and record["run"]["parameters"]["vocab_size"] == 100
    assert record["run"]["tf32"] is False and "save" not in record["run"]["parameters"]


@pytest.mark.slow
def test_equality_is_small_at_tiny_sizes():
    done = run("bench_equality.py", *TINY.split(), "--layers", "3", "--save", "bench-tiny")
    assert done.returncode == 0, done.stderr
    (tenth, few) = load_run("bench-tiny")["summary"]["equality"]
    assert max(tenth["paths"], few["paths"]) < 1e-5
    assert max(tenth["paths_float64"], few["paths_float64"]) < 1e-13
