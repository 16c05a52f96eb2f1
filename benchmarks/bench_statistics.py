"""Statistics by index against their one-hot definition, as a ratio in one run on one machine.

The dense side runs on few sequences and is scaled linearly; the second dense size shows how linear it
is. `--corpus` counts real text (its sequences repeated up to --sequences), else words drawn with the
frequencies 1/rank. `--full` holds both sides against each other on all sequences and not only on the dense
side's; `--largest` measures memory at the largest vocabulary that fits into four fifths of what is free. The
budget's sizes: --vocab-size 3000 --seq-len 200 --sequences 2048, minutes long. Nothing is asserted about time.
"""

import math
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch
from measure import machine, parser, product_rate, save

from lib.checks import largest_error
from lib.corpus import load_corpus
from lib.results import peak_memory_mib
from lib.statistics import TABLES, available_memory, corpus_statistics, statistics_memory

NAMES = ("bigram", "context", "query_key_term", "position_term")
PART = 64  # sequences whose one-hot matrices there are at one time


def one_hot(inputs, targets, vocab_size):
    """Inputs, centred targets and prefix means, each [n, T, V] in float32."""
    length = inputs.shape[1]
    x = torch.nn.functional.one_hot(inputs, vocab_size).float()
    r = torch.nn.functional.one_hot(targets, vocab_size).float() - 1 / vocab_size
    mean = torch.ones(length, length).tril() / torch.arange(1, length + 1)[:, None]
    return x, r, mean, mean @ x


def dense_statistics(inputs, targets, vocab_size):
    """bigram, context, query-key and position term by one-hot products in float32, PART sequences at a time."""
    parts = list(zip(inputs.split(PART), targets.split(PART), strict=True))
    made = [one_hot(*parts[0], vocab_size)] if len(parts) == 1 else None
    bigram = context = query_key = position = 0
    for x, r, _, averaged in made or (one_hot(*part, vocab_size) for part in parts):
        bigram = bigram + x.flatten(0, 1).T @ r.flatten(0, 1) / inputs.numel()
        context = context + r.flatten(0, 1).T @ averaged.flatten(0, 1) / inputs.numel()
    usefulness = bigram.T @ (bigram @ context)
    for x, r, mean, _ in made or (one_hot(*part, vocab_size) for part in parts):
        scores = r @ usefulness @ x.mT
        centred = mean * (scores - (mean * scores).sum(dim=-1, keepdim=True)) / inputs.numel()
        query_key = query_key + x.flatten(0, 1).T @ (centred @ x).flatten(0, 1)
        lags = [centred.diagonal(-lag, 1, 2).sum() for lag in range(inputs.shape[1])]
        position = position + torch.stack(lags)
    return dict(zip(NAMES, (bigram, context, query_key, position), strict=True))


def timed(function, *arguments):
    """Wall seconds of one call, processor seconds, and its result."""
    wall, processor = time.perf_counter(), time.process_time()
    result = function(*arguments)
    return time.perf_counter() - wall, time.process_time() - processor, result


def draw_tokens(options):
    """Tokens [N, T + 1]: the corpus repeated, or independent words with frequencies 1/rank."""
    count, length, vocab_size = options.sequences, options.seq_len, options.vocab_size
    if options.corpus:
        tokens = load_corpus(
            options.corpus, vocab_size=vocab_size, seq_len=length, out_of_vocabulary="unk"
        ).tokens
        return tokens.repeat(-(-count // len(tokens)), 1)[:count]
    weights = 1.0 / torch.arange(1, vocab_size + 1)
    generator = torch.Generator().manual_seed(0)
    return torch.multinomial(
        weights.expand(count, -1), length + 1, replacement=True, generator=generator
    )


def memory_growth(tokens, vocab_size):
    """MiB by which a fresh process grows at its peak, once the inputs are there."""
    inputs, targets = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])
    before = peak_memory_mib("cpu")
    corpus_statistics(inputs, targets, vocab_size, device="cpu")
    return peak_memory_mib("cpu") - before


def main():
    # `dense` are the dense side's numbers of sequences; of `repeats` runs by index the fastest counts.
    sizes = {"vocab_size": 1000, "seq_len": 100, "sequences": 1024, "dense": [32, 64], "repeats": 3}
    options = parser(__doc__, **sizes)
    options.add_argument("--full", action="store_true", help="compare on all sequences")
    options.add_argument("--largest", action="store_true", help="memory at the largest vocabulary")
    options.add_argument("--corpus", help="a source of lib.corpus.load_corpus, such as sample")
    options = options.parse_args()
    if min(options.dense) <= 4:
        sys.exit("--dense takes numbers above 4, whose time is what the further sequences add to.")
    if options.largest and available_memory() is None:
        sys.exit("--largest needs to know how much memory is free, which this system does not say.")
    vocab_size, length, count = options.vocab_size, options.seq_len, options.sequences
    try:
        tokens = draw_tokens(options)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    print(f"{machine()}, load {os.getloadavg()[0]:.1f}")
    print(f"V = {vocab_size}, T = {length}, N = {count}, text: {options.corpus or 'drawn'}")
    rate = product_rate()
    print(f"matrix product, float32 2048: {rate / 1e9:.0f} G multiply-adds/s")

    spawn = multiprocessing.get_context("spawn")

    def memory(part, size):
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            grown = pool.submit(memory_growth, part.numpy(), size).result()
        said = statistics_memory(size, length) / 2**20
        print(f"V = {size:,}: peak memory beyond the inputs {grown:.0f} MiB; announced {said:.0f}")
        return {"vocab_size": size, "peak_mib_beyond_inputs": grown, "expected_mib": said}

    memories = [memory(tokens, vocab_size)]
    if options.largest:
        large = math.isqrt(
            int(0.8 * (available_memory() - statistics_memory(1, length))) // (8 * TABLES)
        )
        memories.append(memory(torch.randint(large, tokens[:PART].shape), large))

    def by_index():
        return timed(lambda: corpus_statistics(inputs, targets, vocab_size, device="cpu"))[:2]

    runs = [by_index()]
    dense_statistics(inputs[:4], targets[:4], vocab_size)
    fixed = timed(dense_statistics, inputs[:4], targets[:4], vocab_size)[:2]
    linear = []
    for size in options.dense:
        *taken, dense = timed(dense_statistics, inputs[:size], targets[:size], vocab_size)
        slope = [(a - b) / (size - 4) for a, b in zip(taken, fixed, strict=True)]
        print(f"dense, N = {size}: {taken[0]:.2f} s, {1e3 * slope[0]:.2f} ms a further sequence")
        linear.append({"sequences": size, "seconds": taken[0], "seconds_each": slope[0]})
        runs.append(by_index())
    scaled = [a + b * (count - 4) for a, b in zip(fixed, slope, strict=True)]
    runs += [by_index() for _ in range(options.repeats - len(runs))]

    if options.full:
        size = count
        dense = dense_statistics(inputs, targets, vocab_size)
    indexed = corpus_statistics(inputs[:size], targets[:size], vocab_size, device="cpu")
    errors = {name: largest_error(dense[name], getattr(indexed, name)) for name in NAMES}
    for name, error in errors.items():
        print(f"{name}: dense float32, N = {size}, differs by {error:.1e} of the largest entry")
    wall, processor = (min(r[i] for r in runs) for i in (0, 1))
    print(
        f"matrix product again: {product_rate() / 1e9:.0f} G multiply-adds/s, load {os.getloadavg()[0]:.1f}"
    )
    print(f"by index: {wall:.2f} s, {processor:.2f} processor seconds, best of {len(runs)} runs")
    print(f"dense scaled: {scaled[0]:.1f} s, {scaled[1]:.1f} processor seconds")
    print(f"ratio {scaled[0] / wall:.0f}; in processor seconds {scaled[1] / processor:.0f}")
    if options.save:
        found = {
            "seconds": wall,
            "dense_seconds": scaled[0],
            "ratio": scaled[0] / wall,
            "ratio_processor": scaled[1] / processor,
            "dense": linear,
            "memory": memories,
            "errors": errors,
            "errors_sequences": size,
            "multiply_adds_per_second": rate,
        }
        save(options.save, options, found)


if __name__ == "__main__":
    main()
