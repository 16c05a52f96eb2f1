"""One training step, dense against paths: ratio, memory, part of the machine's speed, scaling.

The dense model runs on few sequences and is scaled linearly; half as many show how linear it is. Times are
of one process on one machine, with its product of two matrices as the yardstick. Nothing is asserted
about time. Options: --vocab-size, --seq-len, --layers, --sequences, --dense-sequences, --threads, --save.
"""

import math
import sys

import torch
from measure import best, distinct_of, machine, parser, product_rate, save

from lib import cost, model, paths
from lib.cost import story_tokens
from lib.results import peak_memory_mib


def step(vocab_size, length, num_layers, counts, few):
    """Print a table of one step's times: by paths for each of `counts`, dense for `few` sequences.

    Returns what is in it, times in seconds and memory in MiB.
    """
    transformer = model.AttentionOnlyTransformer(vocab_size, length, num_layers, init_std=0.02)
    inputs, targets = story_tokens(vocab_size, length, max(*counts, few))
    distinct = distinct_of(inputs)
    print(f"\nV = {vocab_size}, T = {length}, L = {num_layers}, distinct tokens {distinct:.0f}")

    def timed(method, count):
        batch = inputs[:count], targets[:count]
        return best(method, transformer, *batch, budget=0.01)

    # Dense before and after each measurement by paths, since a machine's speed drifts within minutes.
    dense, rates = [timed(model.loss_and_gradients, few)], [product_rate()]
    taken, rows = {}, []
    for count in counts:
        taken[count] = timed(paths.loss_and_gradients, count)
        dense.append(timed(model.loss_and_gradients, few))
        rates.append(product_rate())
    memory = peak_memory_mib("cpu")
    half = timed(model.loss_and_gradients, few // 2)
    rate = sum(rates) / len(rates)
    each = sum(dense) / len(dense) / few
    of_dense = cost.dense_multiplications(vocab_size, length, num_layers, few) / (each * few) / rate
    print(
        f"dense: {1e3 * min(dense) / few:.1f} to {1e3 * max(dense) / few:.1f} ms a sequence at N = {few}, "
        f"{1e3 * half / (few // 2):.1f} at {few // 2}; {of_dense:.0%} of the product's speed, "
        f"{rate / 1e9:.0f} G multiply-adds/s"
    )
    # A dense model that looks layer 1's one-hot products up would save 5 of its 6 L + 2 products T V^2.
    looked_up = 1 - 5 / (6 * num_layers + 2)
    print("    N   paths s  dense scaled s  ratio  ratio, layer 1 looked up  of product's speed")
    for index, count in enumerate(counts):
        size = vocab_size, length, num_layers, count
        scaled = sum(dense[index : index + 2]) / 2 / few * count
        ratio = scaled / taken[count]
        share = sum(cost.paths_multiplications(*size, distinct).values()) / taken[count]
        share /= sum(rates[index : index + 2]) / 2
        print(
            f"{count:5} {taken[count]:9.2f} {scaled:15.1f} {ratio:6.1f} {ratio * looked_up:25.1f} "
            f"{share:19.0%}"
        )
        rows.append(
            {
                "sequences": count,
                "paths_seconds": taken[count],
                "dense_seconds": scaled,
                "ratio": ratio,
                "ratio_looked_up": ratio * looked_up,
                "of_product_speed": share,
            }
        )
    print(f"peak memory of the process after the paths: {memory:.0f} MiB")
    return {
        "layers": num_layers,
        "distinct": distinct,
        "multiply_adds_per_second": rate,
        "peak_mib": memory,
        "dense_sequences": few,
        "dense_seconds_each": each,
        "dense_seconds_each_range": [min(dense) / few, max(dense) / few],
        "dense_seconds_each_of_half": half / (few // 2),
        "dense_of_product_speed": of_dense,
        "rows": rows,
    }


def scaling(vocab_size, length):
    """Print and return exponents of time in N, V, T and the factor of one more layer, beside predicted ones."""
    usual = {"vocab_size": vocab_size, "seq_len": length, "num_layers": 2, "batch_size": 128}
    varied = {
        "batch_size": (32, 128, 512),
        "vocab_size": (vocab_size // 2, vocab_size, 2 * vocab_size),
        "seq_len": (length // 2, length, 2 * length),
        "num_layers": (1, 2, 3),
    }
    print(f"\nScaling around V = {vocab_size}, T = {length}, L = 2, N = 128")
    print("Exponents of the time; for num_layers the factor of a layer")
    print("                         dense  predicted     paths  predicted")
    found = []
    for name, values in varied.items():
        points = []
        for value in values:
            vocab_size, length, num_layers, count = size = (usual | {name: value}).values()
            transformer = model.AttentionOnlyTransformer(
                vocab_size, length, num_layers, init_std=0.02
            )
            batch = story_tokens(vocab_size, length, count)
            points.append(
                {
                    "dense": best(model.loss_and_gradients, transformer, *batch, budget=1),
                    "dense_predicted": cost.dense_cost(*size),
                    "paths": best(paths.loss_and_gradients, transformer, *batch, budget=1),
                    "paths_predicted": cost.paths_cost(*size, distinct_of(batch[0])),
                }
            )
        for i in range(len(values) - 1):
            factors = {key: points[i + 1][key] / points[i][key] for key in points[i]}
            if name != "num_layers":
                steps = math.log(values[i + 1] / values[i])
                factors = {key: math.log(factor) / steps for key, factor in factors.items()}
            numbers = " ".join(f"{factor:9.2f}" for factor in factors.values())
            print(f"{name:10} {values[i]:4} to {values[i + 1]:4} {numbers}", flush=True)
            found.append({"varied": name, "from": values[i], "to": values[i + 1], **factors})
    return found


def main():
    sizes = {"vocab_size": 3000, "seq_len": 200, "layers": [1, 3], "sequences": [64, 512]}
    sizes |= {"dense_sequences": 16, "threads": torch.get_num_threads()}
    options = parser(__doc__, **sizes).parse_args()
    if options.dense_sequences < 2:
        sys.exit("--dense-sequences takes at least 2, since half of them are timed as well.")
    torch.set_num_threads(options.threads)
    print(machine())
    tiny = model.AttentionOnlyTransformer(20, 8, 2)
    for module in (model, paths):
        module.loss_and_gradients(tiny, *story_tokens(20, 8, 4))  # libraries start up
    vocab_size, length = options.vocab_size, options.seq_len
    found = {"steps": []}
    for num_layers in sorted(options.layers):  # before all else: memory's peak only grows
        size = vocab_size, length, num_layers
        found["steps"].append(step(*size, options.sequences, options.dense_sequences))
    found["scaling"] = scaling(vocab_size // 5, length // 3)
    if options.save:
        save(options.save, options, found)


if __name__ == "__main__":
    main()
