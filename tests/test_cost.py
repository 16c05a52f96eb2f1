"""lib.cost: its counts are those of the code, its costs grow as they must, and memory is refused in time."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, bmm_flop

from lib import cost, model, paths

N, T, V = 5, 9, 14


def counted(function, *arguments):
    """Multiply-adds of the matrix products that `function` makes."""

    def added(_, a, b, *rest, out_val=None, **options):
        return bmm_flop(a, b)

    in_place = {torch.ops.aten.baddbmm_: added}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        function(*arguments)
    return counter.get_total_flops() // 2


def batch(repeats):
    """Inputs [N, T] whose tokens are all distinct, or come `repeats` times each, one after another."""
    rows = [torch.arange(T) // repeats + shift for shift in range(N)]
    return torch.stack(rows), torch.stack(rows)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_counts_are_those_of_the_code(num_layers, monkeypatch):
    # The counter sees one thread alone.
    monkeypatch.setattr(paths, "in_threads", lambda function, items, device: map(function, items))
    transformer = model.AttentionOnlyTransformer(V, T, num_layers, init_std=0.1)
    dense = counted(model.loss_and_gradients, transformer, *batch(1))
    assert dense == cost.dense_multiplications(V, T, num_layers, N)
    for repeats in (1, 3):  # U = T and U = T / 3, new ones at an even pace
        found = counted(paths.loss_and_gradients, transformer, *batch(repeats))
        expected = cost.paths_multiplications(V, T, num_layers, N, T // repeats)
        if repeats == 1:
            assert found == pytest.approx(sum(expected.values()), rel=1e-12)
        else:  # the power law of distinct tokens is only near
            known = found - expected["products"] - expected["attention"]
            assert known == pytest.approx(expected["output"], rel=0.25)


def test_products_per_step():
    counts = [
        cost.paths_multiplications(10, 5, layers, 1, 5)["products"] for layers in (1, 2, 3, 4)
    ]
    assert counts == [3 * number * 1000 for number in (1, 6, 25, 96)]


def test_constants_are_those_of_the_code():
    assert cost.BLOCKS == paths.BLOCKS
    assert cost.MICRO_BATCH == {"cpu": paths.CPU_ELEMENTS, "cuda": paths.DEVICE_ELEMENTS}
    assert cost.DENSE_MICRO_BATCH == model.MICRO_BATCH_ELEMENTS


@pytest.mark.parametrize(
    "larger", [(600, 64, 2, 64), (300, 128, 2, 64), (300, 64, 3, 64), (300, 64, 2, 128)]
)
def test_more_costs_more(larger):
    size = (300, 64, 2, 64)
    assert cost.dense_cost(*larger) > cost.dense_cost(*size)
    assert cost.paths_cost(*larger, 40) > cost.paths_cost(*size, 40)
    assert cost.dense_memory(*larger) >= cost.dense_memory(*size)
    assert cost.paths_memory(*larger) >= cost.paths_memory(*size)


def test_more_distinct_tokens_cost_more():
    costs = [cost.paths_cost(300, 64, 2, 64, distinct) for distinct in (1, 2, 20, 64)]
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_dense_for_few_sequences_and_many_layers_paths_for_many():
    room = {"device": "cpu", "memory": 2**40}
    assert cost.choose(3000, 200, 1, 2048, 90, **room) == "paths"
    assert cost.choose(3000, 200, 3, 2048, 90, **room) == "paths"
    assert cost.choose(3000, 200, 3, 4, 90, **room) == "dense"
    assert cost.choose(1000, 32, 4, 64, 20, **room) == "dense"
    # Where dense is once the cheaper, more sequences turn the choice at most once.
    choices = [cost.choose(3000, 200, 3, 2**power, 90, **room) for power in range(12)]
    assert choices == sorted(choices)


def test_without_the_counts_of_distinct_tokens_paths_are_dearer():
    """Off the CPU the bound min(T, V) stands for the distinct tokens, whatever they are."""
    for distinct in (1, 50):
        assert cost.choose(300, 64, 3, 40, distinct, device="cuda:0", memory=2**40) == cost.choose(
            300, 64, 3, 40, 64, device="cpu", memory=2**40
        )


def test_what_does_not_fit_is_not_chosen():
    size = (3000, 200, 3, 2048)
    dense, by_paths = cost.dense_memory(*size), cost.paths_memory(*size)
    assert dense < by_paths
    assert cost.choose(*size, 90, device="cpu", memory=by_paths) == "paths"
    assert cost.choose(*size, 90, device="cpu", memory=by_paths - 1) == "dense"
    with pytest.raises(
        MemoryError, match=r"needs about \d\.\d\d GiB \(dense\) and .* are free; lower"
    ):
        cost.choose(*size, 90, device="cpu", memory=dense - 1)
    assert cost.paths_memory(*size, itemsize=8) == 2 * by_paths


def test_hundreds_of_layers_are_a_matter_of_the_dense_model():
    assert cost.choose(20, 8, 600, 16, 8, device="cpu") == "dense"


def test_without_a_limit_everything_fits():
    assert cost.choose(30000, 200, 2, 10**6, 90, device="cpu") == "paths"


PEAK = """
import torch
from lib import {module} as module
from lib.model import AttentionOnlyTransformer
def kib(name):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])
torch.set_num_threads(1)
transformer = AttentionOnlyTransformer({v}, {t}, {layers}, init_std=0.02)
tokens = torch.randint({v}, ({n}, {t}))
before = kib("VmRSS")
module.loss_and_gradients(transformer, tokens, tokens)
print(kib("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads Linux's account of memory"
)
@pytest.mark.parametrize(
    "module, size",
    [("model", (300, 200, 3, 140)), ("paths", (300, 200, 3, 40)), ("paths", (1000, 32, 3, 8))],
)
def test_estimated_memory_is_near_the_peak(module, size):
    v, t, layers, n = size
    source = PEAK.format(module=module, v=v, t=t, layers=layers, n=n)
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    )
    estimate = {"model": cost.dense_memory, "paths": cost.paths_memory}[module](*size)
    assert 0.5 * estimate < int(done.stdout) * 1024 < 1.2 * estimate + 32 * 2**20
