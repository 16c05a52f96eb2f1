"""Dense or paths: every cell of a grid timed both ways, and what `lib.cost` would have chosen.

Times are of one step, float32, and put together from parts, since whole steps would take hours: the
dense model's micro-batch is scaled linearly; the path expansion's products of weights are timed once
for each V and L, a number of sequences with these products at hand for each T, and scaled. The last lines
set that against whole steps. Nothing is asserted about time. Options: --full (the whole grid, 13 GiB and
about 10 minutes on two quiet cores), --threads, --save.
"""

import copy
from unittest import mock

import torch
from measure import best, distinct_of, machine, parser, product_rate, save, seconds

from lib import cost, model, paths
from lib.cost import story_tokens

QUICK = {"vocab": (100, 300, 1000), "length": (32, 200), "layers": (1, 2, 3)}
FULL = {"vocab": (300, 1000, 3000), "length": (32, 64, 200), "layers": (1, 2, 3, 4)}
SEQUENCES = (64, 512)


def shortened(tables, length):
    """`tables` for sequences of `length`: the products are the same, the positions' part is cut."""
    tables = copy.copy(tables)
    cut = [table.products[0][:length, :length] for table in tables.biases]
    tables.biases = [paths._Table([bias], dim=0) for bias in cut]
    tables.backward = lambda parameters, scale: parameters  # timed by itself
    return tables


def measured(vocab_size, num_layers, lengths):
    """For each length: (distinct tokens, dense seconds a sequence, paths seconds a step and a sequence)."""
    transformer = model.AttentionOnlyTransformer(
        vocab_size, max(lengths), num_layers, init_std=0.02
    )
    made, tables = seconds(paths._Tables, transformer, max(lengths))
    found = {}
    for length in lengths:
        inputs, targets = story_tokens(vocab_size, length, max(SEQUENCES))
        distinct = distinct_of(inputs)
        at_hand = shortened(tables, length)
        some = max(16, min(512, 2**24 // (vocab_size * length)))
        with mock.patch.object(paths, "_Tables", lambda model, length: at_hand):  # noqa: B023
            slope = best(paths.loss_and_gradients, transformer, inputs[:some], targets[:some])
        few = max(1, min(max(SEQUENCES), model.MICRO_BATCH_ELEMENTS // (length * vocab_size)))
        dense = best(model.loss_and_gradients, transformer, inputs[:few], targets[:few])
        found[length] = [distinct, dense / few, None, slope / some]
    taken_back, _ = seconds(tables.backward, list(transformer.parameters()), 1.0)
    for parts in found.values():
        parts[2] = made + taken_back
    return found


def whole_steps(found):
    """Print times put together from parts against whole steps, for the smallest vocabulary."""
    sequences = SEQUENCES[0]
    for (vocab_size, num_layers, length), (_, dense, fixed, slope) in found.items():
        transformer = model.AttentionOnlyTransformer(vocab_size, length, num_layers, init_std=0.02)
        batch = story_tokens(vocab_size, length, sequences)
        a = best(model.loss_and_gradients, transformer, *batch)
        b = best(paths.loss_and_gradients, transformer, *batch)
        print(
            f"V={vocab_size} T={length} L={num_layers} N={sequences}: whole step over parts, "
            f"dense {a / (dense * sequences):.2f}, paths {b / (fixed + slope * sequences):.2f}"
        )


def main():
    options = parser(__doc__, threads=torch.get_num_threads())
    options.add_argument("--full", action="store_true", help="the whole grid")
    options = options.parse_args()
    torch.set_num_threads(options.threads)
    grid = FULL if options.full else QUICK
    print(machine())
    print(f"matrix product, float32 2048: {product_rate() / 1e9:.0f} G multiply-adds/s")

    measured(50, 2, (16,))  # libraries start up
    print("    V    T  L    N    U   dense s   paths s  dense/paths  by model  choice  regret")
    found, regrets, cells = {}, [], []
    for vocab_size in grid["vocab"]:
        for num_layers in grid["layers"]:
            for length, parts in measured(vocab_size, num_layers, grid["length"]).items():
                distinct, dense_each, fixed, slope = parts
                found[vocab_size, num_layers, length] = parts
                for sequences in SEQUENCES:
                    size = vocab_size, length, num_layers, sequences
                    times = {"dense": dense_each * sequences, "paths": fixed + slope * sequences}
                    choice = cost.choose(*size, distinct, device="cpu")
                    ratio = cost.dense_cost(*size) / cost.paths_cost(*size, distinct)
                    regrets.append(times[choice] / min(times.values()) - 1)
                    cell = dict(
                        zip(("vocab_size", "seq_len", "layers", "sequences"), size, strict=True)
                    )
                    cell |= {"distinct": distinct, "times": times, "parts": parts}
                    cells.append(cell | {"choice": choice, "regret": regrets[-1]})
                    print(
                        f"{vocab_size:5} {length:4} {num_layers:2} {sequences:4} {distinct:4.0f} "
                        f"{times['dense']:9.3f} {times['paths']:9.3f} "
                        f"{times['dense'] / times['paths']:12.2f} {ratio:9.2f}  {choice}  "
                        f"{100 * regrets[-1]:5.0f} %",
                        flush=True,
                    )
    near = sum(regret <= 0.2 for regret in regrets)
    print(f"within 20 % of the better: {near} of {len(regrets)}; worst {100 * max(regrets):.0f} %")
    smallest = grid["vocab"][0]
    whole_steps({cell: parts for cell, parts in found.items() if cell[0] == smallest})
    print(f"matrix product at the end: {product_rate() / 1e9:.0f} G multiply-adds/s")
    if options.save:
        save(options.save, options, {"cells": cells, "within_a_fifth": near})


if __name__ == "__main__":
    main()
