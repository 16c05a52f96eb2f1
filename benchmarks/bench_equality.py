"""Gradients by paths and by the dense model, float32, against float64. Nothing is timed.

At V / 10 and --sequences, and at V and few sequences, the exact ones are the dense model's. At V and
--sequences these would take most of an hour: there --full takes those of the path expansion in float64,
which the other lines hold against the dense ones. Options: --vocab-size, --seq-len, --layers,
--sequences, --full, --save.
"""

import copy

from measure import machine, parser, save

from lib import model, paths
from lib.cost import story_tokens


def largest_difference(found, expected):
    """Over the parameters: norm of the difference of the gradients over the norm."""
    pairs = [(found[1][name].double(), expected[1][name].double()) for name in expected[1]]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def equality(vocab_size, length, num_layers, count, exact_by=model):
    """Print and return how far float32 gradients lie from `exact_by`'s in float64.

    Those of the dense model too, if it is the exact one; else the float64 path expansion, far cheaper at
    large sizes, is held against float32 paths alone.
    """
    single = model.AttentionOnlyTransformer(vocab_size, length, num_layers, init_std=0.02)
    batch = story_tokens(vocab_size, length, count)
    double = copy.deepcopy(single).double()
    exact = exact_by.loss_and_gradients(double, *batch)
    found = {"vocab_size": vocab_size, "layers": num_layers, "sequences": count}
    found["exact_by"] = "dense" if exact_by is model else "paths"
    found["paths"] = largest_difference(paths.loss_and_gradients(single, *batch), exact)
    if exact_by is model:
        found["dense"] = largest_difference(model.loss_and_gradients(single, *batch), exact)
        found["paths_float64"] = largest_difference(paths.loss_and_gradients(double, *batch), exact)
    errors = ", ".join(
        f"{name} {value:.1e}" for name, value in found.items() if type(value) is float
    )
    print(
        f"V = {vocab_size}, L = {num_layers}, N = {count}: from {found['exact_by']} in float64, {errors}",
        flush=True,
    )
    return found


def main():
    options = parser(__doc__, vocab_size=3000, seq_len=200, layers=[1, 2], sequences=512)
    options.add_argument("--full", action="store_true", help="at V and --sequences, too")
    options = options.parse_args()
    print(machine())
    print("Largest relative difference of a gradient")
    found, length = [], options.seq_len
    for num_layers in options.layers:
        found.append(
            equality(max(2, options.vocab_size // 10), length, num_layers, options.sequences)
        )
        found.append(equality(options.vocab_size, length, num_layers, 4))
        if options.full:
            size = options.vocab_size, length, num_layers, options.sequences
            found.append(equality(*size, paths))
    if options.save:
        save(options.save, options, {"equality": found})


if __name__ == "__main__":
    main()
