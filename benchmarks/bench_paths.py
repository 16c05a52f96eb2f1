"""One training step, dense against paths: ratio, equality, memory, part of the machine's speed, scaling.

The dense model runs on few sequences and is scaled linearly; half as many show how linear it is. Times are
of one process on one machine, with its product of two matrices as the yardstick. Nothing is asserted
about time. Options: --vocab-size, --seq-len, --layers, --sequences, --dense-sequences, --threads.
"""

import argparse
import copy
import math

import torch
from measure import best, machine, product_rate, seconds, story_tokens

from lib import cost, model, paths
from lib.results import peak_memory_mib


def distinct_of(inputs):
    """Mean number of distinct tokens in a sequence."""
    return paths.distinct_tokens(inputs)[2][:, -1].double().mean().item()


def largest_difference(found, expected):
    """Over the parameters: norm of the difference of the gradients over the norm."""
    pairs = [(found[1][name].double(), expected[1][name].double()) for name in expected[1]]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def step(vocab_size, length, num_layers, counts, few):
    """Print a table of one step's times: by paths for each of `counts`, dense for `few` sequences."""
    transformer = model.AttentionOnlyTransformer(vocab_size, length, num_layers, init_std=0.02)
    inputs, targets = story_tokens(vocab_size, length, max(*counts, few))
    distinct = distinct_of(inputs)
    print(f"\nV = {vocab_size}, T = {length}, L = {num_layers}, distinct tokens {distinct:.0f}")
    taken, memory = {}, 0
    for count in counts:
        taken[count], _ = seconds(
            paths.loss_and_gradients, transformer, inputs[:count], targets[:count]
        )
        memory = peak_memory_mib("cpu")
    rate = product_rate()
    dense = {
        count: seconds(model.loss_and_gradients, transformer, inputs[:count], targets[:count])[0]
        for count in (few // 2, few)
    }
    each = dense[few] / few
    done = cost.dense_multiplications(vocab_size, length, num_layers, few)
    print(
        f"dense: {1e3 * each:.1f} ms a sequence at N = {few}, {1e3 * dense[few // 2] / (few // 2):.1f} at "
        f"{few // 2}; {done / dense[few] / rate:.0%} of the product's speed, {rate / 1e9:.0f} G multiply-adds/s"
    )
    # A dense model that looks layer 1's one-hot products up would save 5 of its 6 L + 2 products T V^2.
    looked_up = 1 - 5 / (6 * num_layers + 2)
    print("    N   paths s  dense scaled s  ratio  ratio, layer 1 looked up  of product's speed")
    for count in counts:
        size = vocab_size, length, num_layers, count
        ratio = each * count / taken[count]
        share = sum(cost.paths_multiplications(*size, distinct).values()) / taken[count] / rate
        print(
            f"{count:5} {taken[count]:9.2f} {each * count:15.1f} {ratio:6.1f} {ratio * looked_up:25.1f} "
            f"{share:19.0%}"
        )
    print(f"peak memory of the process after the paths: {memory:.0f} MiB")


def equality(vocab_size, length, num_layers, count):
    """Print how far float32 gradients of both methods lie from the dense model's in float64."""
    single = model.AttentionOnlyTransformer(vocab_size, length, num_layers, init_std=0.02)
    batch = story_tokens(vocab_size, length, count)
    exact = model.loss_and_gradients(copy.deepcopy(single).double(), *batch)
    by_paths = largest_difference(paths.loss_and_gradients(single, *batch), exact)
    dense = largest_difference(model.loss_and_gradients(single, *batch), exact)
    print(
        f"V = {vocab_size}, L = {num_layers}, N = {count}: from float64, paths {by_paths:.1e}, dense {dense:.1e}"
    )


def scaling(vocab_size, length):
    """Print exponents of time in N, V, T and the factor of one more layer, against the cost model's."""
    usual = {"vocab_size": vocab_size, "seq_len": length, "num_layers": 2, "batch_size": 128}
    varied = {
        "batch_size": (64, 256),
        "vocab_size": (vocab_size // 2, 2 * vocab_size),
        "seq_len": (length // 2, 2 * length),
        "num_layers": (1, 2, 3),
    }
    print(f"\nScaling around V = {vocab_size}, T = {length}, L = 2, N = 128")
    print("Exponents of the time; for num_layers the factor of a layer")
    print("                        dense  predicted   paths  predicted")
    for name, values in varied.items():
        points = []
        for value in values:
            vocab_size, length, num_layers, count = size = (usual | {name: value}).values()
            transformer = model.AttentionOnlyTransformer(
                vocab_size, length, num_layers, init_std=0.02
            )
            batch = story_tokens(vocab_size, length, count)
            points.append(
                (
                    best(model.loss_and_gradients, transformer, *batch, budget=0.2),
                    cost.dense_cost(*size),
                    best(paths.loss_and_gradients, transformer, *batch, budget=0.2),
                    cost.paths_cost(*size, distinct_of(batch[0])),
                )
            )
        for (a, b), first, last in zip(zip(values, values[1:]), points, points[1:]):  # noqa: B905
            factors = [y / x for x, y in zip(first, last, strict=True)]
            if name != "num_layers":
                factors = [math.log(factor) / math.log(b / a) for factor in factors]
            print(f"{name:10} {a:4} to {b:4} " + " ".join(f"{f:9.2f}" for f in factors))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocab-size", type=int, default=3000)
    parser.add_argument("--seq-len", type=int, default=200)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--dense-sequences", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    tiny = model.AttentionOnlyTransformer(20, 8, 2)
    for module in (model, paths):
        module.loss_and_gradients(tiny, *story_tokens(20, 8, 4))  # libraries start up
    for num_layers in sorted(options.layers):  # before all else: memory's peak only grows
        step(
            options.vocab_size,
            options.seq_len,
            num_layers,
            options.sequences,
            options.dense_sequences,
        )
    print("\nLargest relative difference of a gradient")
    for num_layers in options.layers:
        equality(options.vocab_size // 10, options.seq_len, num_layers, max(options.sequences))
        equality(options.vocab_size, options.seq_len, num_layers, 4)
    scaling(options.vocab_size // 5, options.seq_len // 3)


if __name__ == "__main__":
    main()
