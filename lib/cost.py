"""What one training step costs, dense (`lib.model`) or by paths (`lib.paths`), and which one to take.

Sizes: V vocabulary, T positions, L layers, N sequences in the step, U distinct tokens in a sequence.
A multiplication is one multiply-add of a matrix product, forward and backward counted. A cost is a
time in units of one multiplication of a large product, so the machine's speed drops out.
"""

import math

import torch

from lib.threads import at_once

# As in lib.paths: blocks of positions in the output stage, elements of an automatic micro-batch.
BLOCKS, MICRO_BATCH = 3, {"cpu": 2**21, "cuda": 2**28}
DENSE_MICRO_BATCH = 2**23  # as in lib.model
MOST_LAYERS = 30  # beyond, 2^L paths are no question of cost any more

# Multiplications of a large product that fit into the time of one multiplication of another shape, or of
# one number made outside products. Fitted to benchmarks/bench_choice.py --full --threads 1 (float32, AVX2,
# torch 2.13); benchmarks/gpu.py can show how far they hold on a GPU, where they were not fitted.
PRICE = {
    "dense": 1.15,  # the dense model's products
    "hidden": 75,  # each of its T V (L + 1) hidden entries
    "scores": 165,  # each of its T^2 L scores
    "tables": 790,  # each entry of the tables of products: packed, zeroed, summed
    "output": 1.0,  # products of paths: output stage
    "attention": 2.05,  # and attention
    "logits": 67,  # each of the T V logits
    "rows": 340,  # each entry of the rows looked up for the output, 2^L U V
    "lookups": 160,  # each entry looked up for the scores, U^2 4^layer
}


def dense_multiplications(vocab_size, seq_len, num_layers, batch_size) -> int:
    """Multiplications of the dense step; nothing goes back into the one-hot inputs of layer 1."""
    v, t, layers = vocab_size, seq_len, num_layers
    return batch_size * ((6 * layers + 2) * t * v * v + (6 * layers - 2) * t * t * v)


def paths_multiplications(vocab_size, seq_len, num_layers, batch_size, distinct) -> dict:
    """Multiplications of the step by paths: {"products" (once per step), "output", "attention"}."""
    v, t, layers, u = vocab_size, seq_len, num_layers, distinct
    products = 2**layers - 1 + sum(4**before - 1 for before in range(layers))
    width = [2**before * u for before in range(layers)]  # of Z in each layer's attention
    attention = sum(3 * (t * w * w + 2 * t * t * w) for w in width)
    attention -= t * u * u + 2 * t * t * u  # nothing goes back into layer 1's inputs
    # Distinct tokens by position t' grow like a power of it; those new in a block start there.
    power = math.log(u) / math.log(max(t, 2))
    ends = [-(-t * block // BLOCKS) for block in range(BLOCKS + 1)]
    seen = [u * (end / t) ** power if end else 0 for end in ends]
    area = sum((t - ends[b]) * (seen[b + 1] - seen[b]) for b in range(BLOCKS))
    return {
        "products": 3 * products * v**3,
        "output": 3 * batch_size * (2**layers - 1) * area * v,
        "attention": batch_size * attention,
    }


def dense_cost(vocab_size, seq_len, num_layers, batch_size) -> float:
    """Time of the dense step in multiplications of a large product."""
    per_sequence = PRICE["hidden"] * seq_len * vocab_size * (num_layers + 1)
    per_sequence += PRICE["scores"] * seq_len**2 * num_layers
    count = dense_multiplications(vocab_size, seq_len, num_layers, batch_size)
    return PRICE["dense"] * count + batch_size * per_sequence


def paths_cost(vocab_size, seq_len, num_layers, batch_size, distinct) -> float:
    """Time of the step by paths in multiplications of a large product."""
    count = paths_multiplications(vocab_size, seq_len, num_layers, batch_size, distinct)
    per_sequence = PRICE["logits"] * seq_len * vocab_size
    per_sequence += PRICE["rows"] * 2**num_layers * distinct * vocab_size
    per_sequence += PRICE["lookups"] * distinct**2 * sum(4**b for b in range(num_layers))
    once = count["products"] + PRICE["tables"] * _table_entries(vocab_size, num_layers)
    stages = sum(PRICE[stage] * count[stage] for stage in ("output", "attention"))
    return once + stages + batch_size * per_sequence


def dense_memory(
    vocab_size, seq_len, num_layers, batch_size, *, itemsize=4, micro_batch="auto"
) -> int:
    """Bytes of the dense step beyond the weights, gradients included; an upper estimate."""
    hidden, layers = seq_len * vocab_size, num_layers
    automatic = max(1, DENSE_MICRO_BATCH // hidden)
    sequences = min(batch_size, automatic if micro_batch == "auto" else micro_batch)
    states = sequences * ((6 * layers + 3) * hidden + 3 * layers * seq_len**2)
    return itemsize * (2 * (2 * layers + 1) * vocab_size**2 + states)


def paths_memory(
    vocab_size, seq_len, num_layers, batch_size, *, device="cpu", itemsize=4, micro_batch="auto"
) -> int:
    """Bytes of the step by paths beyond the weights, gradients included; an upper estimate.

    The products of weights, their packed tables and the sums of gradients are three of a size. On a CPU
    each of torch's threads works on a micro-batch, and a finished one waits to be added.
    """
    v, t, paths = vocab_size, seq_len, 2**num_layers
    sequence = paths * min(t, v) * v + t * (v + paths * t)
    automatic = max(1, MICRO_BATCH[device] // sequence)
    sequences = min(batch_size, automatic if micro_batch == "auto" else micro_batch)
    tables = 3 * _table_entries(v, num_layers) + (2 * num_layers + 2) * v**2
    return itemsize * (tables + 7 * at_once(device) * sequences * sequence)


def choose(
    vocab_size,
    seq_len,
    num_layers,
    batch_size,
    distinct,
    *,
    device,
    memory=None,
    itemsize=4,
    micro_batch="auto",
) -> str:
    """The cheaper of "dense" and "paths" on `device`, among those that fit into `memory` bytes (None: all).

    `distinct`: mean number of distinct tokens in a sequence, 1 to min(T, V). `itemsize`: bytes of a number.
    `micro_batch`: sequences worked on together; "auto": what the two modules take by themselves.
    Raises MemoryError if neither fits.
    """
    memory = math.inf if memory is None else memory
    kind, size = str(device).split(":")[0], (vocab_size, seq_len, num_layers, batch_size)
    if kind != "cpu":  # there lib.paths does not look at the data and takes the bound
        distinct = min(seq_len, vocab_size)
    cost = {"dense": dense_cost(*size)}
    how = {"itemsize": itemsize, "micro_batch": micro_batch}
    need = {"dense": dense_memory(*size, **how)}
    if num_layers <= MOST_LAYERS:
        cost["paths"] = paths_cost(*size, distinct)
        need["paths"] = paths_memory(*size, device=kind, **how)
    fits = [name for name in cost if need[name] <= memory]
    if not fits:
        least = min(need, key=need.get)
        raise MemoryError(
            f"One training step needs about {need[least] / 2**30:.2f} GiB ({least}) and "
            f"{memory / 2**30:.2f} GiB are free; lower vocab_size, num_layers, seq_len or micro_batch_size."
        )
    return min(fits, key=cost.get)


def _table_entries(vocab_size, num_layers) -> int:
    return vocab_size**2 * (sum(4**b for b in range(num_layers)) + 2**num_layers)


def story_tokens(vocab_size, seq_len, sequences, *, device="cpu", seed=0):
    """Inputs and targets [sequences, seq_len], drawn alone and with frequencies like those of words.

    The exponent gives a sequence of 200 about 90 distinct tokens of 3000, as in TinyStories.
    """
    weights = torch.arange(1, vocab_size + 1) ** -1.18
    generator = torch.Generator().manual_seed(seed)
    count = sequences * (seq_len + 1)
    tokens = torch.multinomial(weights, count, replacement=True, generator=generator)
    tokens = tokens.view(sequences, seq_len + 1).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
