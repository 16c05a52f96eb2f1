"""Statistics by index against their one-hot definition, as a ratio in one run on one machine.

The dense side runs on few sequences and is scaled linearly; the second dense size shows how linear it
is. Options: --vocab-size, --seq-len, --sequences. Nothing is asserted about time.
"""

import argparse
import time

import torch

from lib.checks import largest_error
from lib.results import environment, peak_memory_mib
from lib.statistics import corpus_statistics


def dense_statistics(inputs, targets, vocab_size):
    """bigram, context and query-key term by one-hot products in float32."""
    sequences, length = inputs.shape
    x = torch.nn.functional.one_hot(inputs, vocab_size).float()
    r = torch.nn.functional.one_hot(targets, vocab_size).float() - 1 / vocab_size
    mean = torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]
    count = sequences * length
    averaged = mean @ x
    bigram = x.flatten(0, 1).T @ r.flatten(0, 1) / count
    context = r.flatten(0, 1).T @ averaged.flatten(0, 1) / count
    scores = r @ (bigram.T @ (bigram @ context)) @ x.mT
    centred = mean * (scores - (mean * scores).sum(dim=-1, keepdim=True))
    query_key = x.flatten(0, 1).T @ (centred @ x).flatten(0, 1) / count
    return bigram, context, query_key


def seconds(function, *arguments):
    """Wall time of one call, and its result."""
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--seq-len", type=int, default=100)
    parser.add_argument("--sequences", type=int, default=1024)
    options = parser.parse_args()
    vocab_size, length, count = options.vocab_size, options.seq_len, options.sequences

    # Frequencies like those of words: a sequence repeats the common ones.
    weights = 1.0 / torch.arange(1, vocab_size + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(
        weights.expand(count, -1), length + 1, replacement=True, generator=generator
    )
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    square = torch.randn(2048, 2048)
    square @ square
    yardstick = 2 * 2048**3 / seconds(torch.matmul, square, square)[0] / 1e9
    machine = environment()
    print(f"{machine['device_name']}, {machine['threads']} threads, torch {torch.__version__}")
    print(f"matrix product, float32 2048: {yardstick:.0f} GFLOP/s")
    print(f"V = {vocab_size}, T = {length}, N = {count}")

    dense_statistics(inputs[:4], targets[:4], vocab_size)
    fixed, _ = seconds(dense_statistics, inputs[:4], targets[:4], vocab_size)
    slopes = {}
    for size in (32, 64):
        taken, dense = seconds(dense_statistics, inputs[:size], targets[:size], vocab_size)
        slopes[size] = (taken - fixed) / (size - 4)
        print(f"dense, N = {size}: {taken:.2f} s, {1e3 * slopes[size]:.2f} ms a further sequence")
    scaled = fixed + slopes[64] * (count - 4)

    indexed = corpus_statistics(inputs[:64], targets[:64], vocab_size, device="cpu")
    found = (indexed.bigram, indexed.context, indexed.query_key_term)
    names = ("bigram", "context", "query_key_term")
    for name, a, b in zip(names, dense, found, strict=True):
        print(f"{name}: dense float32 differs by {largest_error(a, b):.1e} of the largest entry")
    before = peak_memory_mib("cpu")
    taken, _ = seconds(corpus_statistics, inputs, targets, vocab_size)
    print(
        f"by index, N = {count}: {taken:.2f} s, peak memory grew by {peak_memory_mib('cpu') - before:.0f} MiB"
    )
    print(f"dense scaled to N = {count}: {scaled:.1f} s; ratio {scaled / taken:.0f}")


if __name__ == "__main__":
    main()
