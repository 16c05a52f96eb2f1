"""Everything that only a GPU can show, in one command of under 12 minutes: python benchmarks/gpu.py

The article's setting (V = 3000, T = 200, L = 3, batches of 2048): a training step dense and by paths, the
statistics, ten epochs extrapolated, peak memory, equality of CPU and GPU, and whether anything waits
for the device. Prints a table, then everything as JSON. Versions are recorded, none is required.
--device cpu --tiny runs the same lines at sizes of a second.
"""

import json
import sys

import torch
from measure import distinct_of, parser, product_rate, save, seconds

from lib import cost, model, paths
from lib.cost import story_tokens
from lib.results import environment, peak_memory_mib, plain
from lib.statistics import corpus_statistics

ARTICLE = {"vocab_size": 3000, "seq_len": 200, "num_layers": 3, "batch_size": 2048}
TINY = {"vocab_size": 30, "seq_len": 12, "num_layers": 2, "batch_size": 16}


def measured(call, device, repeats, budget=60):
    """Median seconds of up to `repeats` calls after a first one, and the peak memory in MiB.

    No further call begins once `budget` seconds are spent.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first, _ = seconds(call, device=device)
    times = []
    while len(times) < repeats and first + sum(times) < budget:
        times.append(seconds(call, device=device)[0])
    times = sorted(times or [first])
    return {"seconds": times[len(times) // 2], "peak_mib": peak_memory_mib(device)}


def equality(device):
    """For both methods the largest relative difference of a gradient, float64, from the dense one on the CPU."""
    transformer = model.AttentionOnlyTransformer(60, 20, 3, init_std=0.3).double()
    batch = story_tokens(60, 20, 16)
    _, expected = model.loss_and_gradients(transformer, *batch)
    transformer, batch = transformer.to(device), [tokens.to(device) for tokens in batch]
    found = {}
    for module in (model, paths):
        _, gradients = module.loss_and_gradients(transformer, *batch)
        found[module.__name__] = max(
            ((gradients[name].cpu() - exact).norm() / exact.norm()).item()
            for name, exact in expected.items()
        )
    return found


def waits(transformer, batch, device):
    """The message of the first thing that waits for the GPU in a step, by paths or dense; None if nothing does."""
    if device != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("error")
    try:
        for method in (paths.loss_and_gradients, model.loss_and_gradients):
            method(transformer, *batch)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main():
    options = parser(__doc__, corpus_sequences=100_000, repeats=5)
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--tiny", action="store_true", help="sizes of a second")
    options = options.parse_args()
    device, size = options.device, TINY if options.tiny else ARTICLE
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("No CUDA device was found: run this on a GPU, or try it with --device cpu --tiny.")

    vocab_size, length, num_layers, count = size.values()
    transformer = model.AttentionOnlyTransformer(vocab_size, length, num_layers, init_std=0.02)
    transformer.to(device)
    batch = story_tokens(vocab_size, length, count, device=device)
    distinct = distinct_of(batch[0])
    rate = product_rate(device, 256 if options.tiny else 8192)
    result = {"size": size, "distinct": distinct, "machine": environment(device)}
    result["product_multiply_adds_per_second"] = rate
    result["difference_from_cpu_float64"] = equality(device)
    runs = {
        "step by paths": lambda: paths.loss_and_gradients(transformer, *batch),
        "step dense": lambda: model.loss_and_gradients(transformer, *batch),
        "statistics": lambda: corpus_statistics(*batch, vocab_size, device=device),
    }
    for name, call in runs.items():
        result[name] = measured(call, device, options.repeats)
    result["waits_for_the_device"] = waits(transformer, batch, device)
    steps = 10 * (options.corpus_sequences // count)
    result["steps_in_ten_epochs"] = steps
    by_paths, dense = result["step by paths"]["seconds"], result["step dense"]["seconds"]
    result["ten_epochs_hours"] = {"paths": steps * by_paths / 3600, "dense": steps * dense / 3600}
    result["ratio"] = dense / by_paths
    bounded = min(vocab_size, length) if device == "cuda" else distinct
    result["ratio_by_cost_model"] = cost.dense_cost(*size.values()) / cost.paths_cost(
        *size.values(), bounded
    )
    result["of_product_speed"] = {
        "paths": sum(cost.paths_multiplications(*size.values(), bounded).values())
        / by_paths
        / rate,
        "dense": cost.dense_multiplications(*size.values()) / dense / rate,
    }

    print(f"{result['machine']['device_name']}, torch {torch.__version__}, {size}")
    for name in runs:
        print(f"{name:14} {result[name]['seconds']:10.4f} s {result[name]['peak_mib']:9.0f} MiB")
    for name in ("ratio", "ratio_by_cost_model", "of_product_speed", "ten_epochs_hours"):
        print(f"{name}: {result[name]}")
    print(f"difference from the CPU in float64: {result['difference_from_cpu_float64']}")
    print(f"waits for the device: {result['waits_for_the_device'] or 'nothing'}")
    print(json.dumps(plain(result)))
    if options.save:
        save(options.save, options, result)


if __name__ == "__main__":
    main()
