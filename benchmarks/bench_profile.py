"""Where a step by paths spends its time: products of weights once, then each sequence's operations.

One thread, so that shares of time are shares of work. Options: --vocab-size, --seq-len, --layers,
--sequences, --save.
"""

from unittest import mock

import torch
from measure import distinct_of, machine, parser, product_rate, save, seconds

from lib import cost, model, paths
from lib.cost import story_tokens

# What torch's operations do here; the rest is bookkeeping and small steps.
KINDS = {
    "products": ("aten::mm", "aten::bmm", "aten::addmm_", "aten::baddbmm_"),
    "look up": ("aten::index_select", "aten::gather", "aten::copy_"),
    "add up": ("aten::scatter_add_", "aten::index_add_", "aten::add_"),
    "softmax and loss": ("aten::exp_", "aten::amax", "aten::sum", "aten::sub_", "aten::mul_")
    + ("aten::_softmax", "aten::_softmax_backward_data", "aten::log", "aten::expm1"),
}


def profiled(vocab_size, length, num_layers, count):
    """Seconds of the products, milliseconds a sequence by kind of operation, and both as a fraction of peak."""
    transformer = model.AttentionOnlyTransformer(vocab_size, length, num_layers, init_std=0.02)
    inputs, targets = story_tokens(vocab_size, length, count)
    parameters = list(transformer.parameters())
    # Once unmeasured: memory is touched for the first time.
    paths._Tables(transformer, length).backward(parameters, 1.0)
    made, tables = seconds(paths._Tables, transformer, length)
    back, _ = seconds(tables.backward, parameters, 1.0)
    tables = paths._Tables(transformer, length)
    tables.backward = lambda parameters, scale: parameters
    rate = product_rate()
    with (
        mock.patch.object(paths, "_Tables", lambda model, length: tables),
        mock.patch.object(paths, "in_threads", lambda work, items, device: map(work, items)),
    ):
        paths.loss_and_gradients(transformer, inputs[:4], targets[:4])
        whole, _ = seconds(paths.loss_and_gradients, transformer, inputs, targets)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            paths.loss_and_gradients(transformer, inputs, targets)
    rate = (rate + product_rate()) / 2
    times = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    total = sum(times.values())
    shares = {
        kind: sum(times.get(name, 0) for name in names) / total for kind, names in KINDS.items()
    }
    shares["bookkeeping"] = 1 - sum(shares.values())
    work = cost.paths_multiplications(vocab_size, length, num_layers, count, distinct_of(inputs))
    each = whole / count
    own = (work["output"] + work["attention"]) / count
    return {
        "layers": num_layers,
        "sequences": count,
        "multiply_adds_per_second": rate,
        "products_seconds": made + back,
        "products_of_product_speed": work["products"] / (made + back) / rate,
        "sequence_seconds": each,
        "sequence_seconds_by_kind": {kind: share * each for kind, share in shares.items()},
        "sequence_products_of_product_speed": own / (shares["products"] * each) / rate,
    }


def main():
    options = parser(
        __doc__, vocab_size=3000, seq_len=200, layers=[1, 2], sequences=64
    ).parse_args()
    torch.set_num_threads(1)
    print(machine())
    rows = []
    for num_layers in options.layers:
        row = profiled(options.vocab_size, options.seq_len, num_layers, options.sequences)
        rows.append(row)
        print(
            f"L = {num_layers}: products of weights {row['products_seconds']:.1f} s a step "
            f"({row['products_of_product_speed']:.0%} of the product's speed); a sequence "
            f"{1e3 * row['sequence_seconds']:.1f} ms, its products at "
            f"{row['sequence_products_of_product_speed']:.0%} of the product's speed"
        )
        for kind, share in row["sequence_seconds_by_kind"].items():
            print(f"    {kind:17} {1e3 * share:6.2f} ms")
    if options.save:
        save(options.save, options, {"rows": rows})


if __name__ == "__main__":
    main()
