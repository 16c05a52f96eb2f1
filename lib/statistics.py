"""The corpus statistics that the early weights are made of, counted by index.

Nothing here builds a one-hot matrix of the corpus. A sequence has only U distinct tokens, so its pair
counts form a U by U block that is added into the V by V table at the right rows and columns. Two
passes: `PairCounts` (bigram, context) and then `QueryKeyCounts`, which needs the terms of the first.
Products with the bigram matrix cost its nonzero pairs times V, not V^3. Sums are float64; memory is
`statistics_memory`, whatever the corpus. Source of the definitions: the paper, section 4.2, as derived
again in the chapters `output-step` and `notation`.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lib.threads import at_once, in_threads

# Largest [sequences, T, T or U] tensor of a chunk: 4 MiB, so that it stays in cache.
CHUNK_ELEMENTS = 2**19
CUDA_CHUNKS = 32  # how many times larger chunks are on a GPU, which wants fewer and longer steps
TABLES = 4  # of V by V at one time
SPARSE_SHARE = 1 / 40  # of nonzero pairs: above it a dense product is the faster one


def statistics_memory(vocab_size: int, seq_len: int, device="cpu") -> int:
    """Bytes that `corpus_statistics` needs at its peak, beyond its inputs and the program itself.

    TABLES float64 tables of V^2 (following, prefix, bigram, context; later bigram, context, usefulness,
    query_key), of which the result keeps three, and about eight working tensors for each chunk at work.
    """
    return 8 * TABLES * vocab_size**2 + _working_memory(seq_len, device)


def _working_memory(seq_len: int, device) -> int:
    return 8 * 8 * max(_chunk_elements(device), 2 * seq_len**2) * at_once(device)


def _chunk_elements(device) -> int:
    return CHUNK_ELEMENTS * (CUDA_CHUNKS if torch.device(device).type == "cuda" else 1)


def available_memory(device="cpu") -> int | None:
    """Bytes that this process may still allocate on `device`; None where the system does not say.

    Processes that torchrun started on one machine share its memory equally; a GPU belongs to one.
    """
    if torch.device(device).type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(n.split()[1]) * 1024 for n in lines if n.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def require_statistics_memory(vocab_size: int, seq_len: int, device) -> None:
    """Raise MemoryError, one sentence, if `statistics_memory` is more than there is."""
    _require_memory(vocab_size, device, TABLES, _working_memory(seq_len, device))


def _require_memory(vocab_size: int, device, tables: int, working: int = 0) -> None:
    needed, available = 8 * tables * vocab_size**2 + working, available_memory(device)
    if available is not None and needed > available:
        fits = math.isqrt(max(0, available - working) // (8 * tables))
        raise MemoryError(
            f"Statistics of {vocab_size:,} tokens need {needed / 2**30:.1f} GiB and {device} has "
            f"{available / 2**30:.1f} GiB free: take a vocab_size up to about {fits:,} or a machine "
            "with more memory."
        )


@dataclass(frozen=True)
class CorpusStatistics:
    """Every statistic of the book, float64; probabilities, so all per token.

    `unigram` [current]; `bigram` [current, next]; `context` [next, history];
    `query_key_term` [query, key]; `position_term` [lag]. Derived: `interchangeability` [next, next],
    `value_term` [history, hidden].
    """

    unigram: Tensor
    bigram: Tensor
    context: Tensor
    query_key_term: Tensor
    position_term: Tensor

    @property
    def vocab_size(self) -> int:
        return len(self.unigram)

    @property
    def seq_len(self) -> int:
        return len(self.position_term)

    @cached_property
    def interchangeability(self) -> Tensor:
        """Gram matrix [next, next] of predecessor profiles, the columns of `bigram`."""
        return self.bigram.T @ self.bigram

    @cached_property
    def value_term(self) -> Tensor:
        """Leading term [history, hidden] of the value matrix: context read back through the bigrams."""
        return self.context.T @ self.bigram.T


def usefulness(unigram: Tensor, bigram: Tensor, context: Tensor) -> Tensor:
    """interchangeability @ context, [next, history]: what seeing history is worth when next comes.

    `bigram` is joint frequencies, most of them zero, minus unigram / V: where few pairs occur, a product
    costs those pairs times V.
    """
    level = unigram / len(unigram)
    joint = bigram + level[:, None]  # exactly zero where a pair never occurs
    if joint.count_nonzero() >= SPARSE_SHARE * joint.numel():
        del joint  # a table less
        return bigram.T @ (bigram @ context)
    joint = joint.to_sparse()
    heard = torch.outer(-level, context.sum(dim=0)).addmm_(joint, context)  # bigram @ context
    return (-(level @ heard)).repeat(len(level), 1).addmm_(joint.t(), heard)


def _ranked(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each sequence's 2T tokens in ascending order, where they stood, and their rank among the distinct."""
    ordered, where = torch.cat([inputs, targets], dim=1).sort(dim=1)
    is_new = torch.ones_like(ordered, dtype=torch.bool)
    is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return ordered, where, is_new.cumsum(dim=1) - 1


class _Local:
    """Sequences `inputs`, `targets` [n, T], each in its own vocabulary of at most `size` = U tokens."""

    def __init__(self, inputs: Tensor, targets: Tensor, size: int, vocab_size: int):
        count, length = inputs.shape
        ordered, where, rank = _ranked(inputs, targets)
        tokens = ordered.new_zeros(count, size).scatter_(1, rank, ordered)
        local = torch.empty_like(rank).scatter_(1, where, rank)
        self.inputs = local[:, :length]  # [n, T], values below U
        first_row = size * torch.arange(count, device=local.device)[:, None]
        self.input_rows, self.target_rows = (
            (part + first_row).flatten() for part in local.split(length, dim=1)
        )  # [n T] rows of a [n U, ...] tensor
        self.pairs = (inputs * vocab_size + targets).flatten()  # [n T], in a flattened V by V table
        self.block = (tokens[:, :, None] * vocab_size + tokens[:, None, :]).flatten()  # [n U U]
        self.steps = torch.arange(1, length + 1, device=local.device, dtype=torch.float64)[:, None]
        one_hot = self.steps.new_zeros(count, length, size).scatter_(2, self.inputs[..., None], 1.0)
        self.prefix = one_hot.cumsum_(dim=1).div_(self.steps)  # [n, T, U]: share of the prefix

    def sums(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (n, t) of `values` [n, T, U] summed by the token that `rows` names, and where they belong."""
        size = values.shape[2]
        sums = values.new_zeros(len(values) * size, size).index_add_(0, rows, values.flatten(0, 1))
        return self.block, sums.flatten()


class _Counts:
    """Shared by the two passes: named float64 sums, the number of tokens, merging and saving."""

    tables: tuple[str, ...]

    def __init__(self, vocab_size: int, seq_len: int, device="cpu"):
        if vocab_size < 1 or seq_len < 1:
            raise ValueError(
                f"vocab_size and seq_len must be at least 1, got {vocab_size} and {seq_len}."
            )
        self.vocab_size, self.seq_len, self.device, self.positions = vocab_size, seq_len, device, 0

    def _zeros(self, *shape) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64, device=self.device)

    def add(self, inputs: Tensor, targets: Tensor):
        """Count sequences: `inputs`, `targets` [N, T] of integers below V. Returns self.

        Raises ValueError for other shapes or for tokens outside the vocabulary.
        """
        if inputs.shape != targets.shape or inputs.ndim != 2 or inputs.shape[1] != self.seq_len:
            raise ValueError(
                f"inputs and targets must both be [sequences, {self.seq_len}], "
                f"got {tuple(inputs.shape)} and {tuple(targets.shape)}."
            )
        if len(inputs) == 0:
            return self
        for sums in in_threads(self._sums, self._chunks(inputs, targets), self.device):
            for name, (where, values) in zip(self.tables, sums, strict=True):
                getattr(self, name).view(-1).scatter_add_(0, where, values)
        self.positions += inputs.numel()
        return self

    def _chunks(self, inputs: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Inputs and targets of sequences with like numbers of distinct tokens, and the largest of these.

        Waits for the device once. Raises ValueError for tokens outside the vocabulary.
        """
        found, count = [], max(1, _chunk_elements(self.device) // self.seq_len)
        for part in zip(inputs.split(count), targets.split(count), strict=True):
            ordered, _, rank = _ranked(*(t.to(self.device, torch.int64) for t in part))
            found.append(torch.stack([rank[:, -1] + 1, ordered[:, 0], ordered[:, -1]]))
        distinct, low, high = torch.cat(found, dim=1)
        distinct, order = distinct.sort(stable=True)
        *sizes, low, high = torch.cat([distinct, low.min()[None], high.max()[None]]).tolist()
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"Tokens must lie in 0..{self.vocab_size - 1}, got {low}..{high}: is vocab_size right?"
            )
        order, start = order.to(inputs.device), 0
        while start < len(inputs):
            widest = max(self.seq_len, sizes[start])
            count = max(1, _chunk_elements(self.device) // (self.seq_len * widest))
            chosen = order[start : start + count]
            start += len(chosen)
            yield inputs[chosen], targets[chosen], sizes[start - 1]

    def _sums(self, chunk) -> list[tuple[Tensor, Tensor]]:
        """For each table, where in it a chunk's sums belong, flattened, and the sums."""
        *pair, size = chunk
        pair = (t.to(self.device, torch.int64) for t in pair)
        return self._local_sums(_Local(*pair, size, self.vocab_size))

    def merge(self, other):
        """Add the counts of another part of the corpus. Returns self; ValueError if the shapes differ."""
        if (type(self), self.vocab_size, self.seq_len) != (
            type(other),
            other.vocab_size,
            other.seq_len,
        ):
            raise ValueError(
                "Only counts of one kind, vocabulary and sequence length can be merged."
            )
        for name in self.tables:
            getattr(self, name).add_(getattr(other, name).to(self.device))
        self.positions += other.positions
        return self

    def save(self, path) -> None:
        """Write the sums to `path` as safetensors."""
        header = {k: str(getattr(self, k)) for k in ("vocab_size", "seq_len", "positions")}
        save_file(
            {name: getattr(self, name).cpu() for name in self.tables}, str(path), metadata=header
        )

    def load(self, path):
        """Read sums that `save` wrote. Returns self; ValueError if they belong to other sizes."""
        with safe_open(str(Path(path)), framework="pt") as file:
            header = file.metadata() or {}
            found = set(file.keys()), header.get("vocab_size"), header.get("seq_len")
            if found != (set(self.tables), str(self.vocab_size), str(self.seq_len)):
                raise ValueError(
                    f"{path} holds other counts than asked for (V={found[1]}, T={found[2]})."
                )
            for name in self.tables:
                getattr(self, name).copy_(file.get_tensor(name))
        self.positions = int(header["positions"])
        return self


class PairCounts(_Counts):
    """First pass. `following` [current, next] counts pairs; `prefix` [next, history] sums 1/t over
    every earlier-or-current occurrence of history in the prefix of length t before next."""

    tables = ("following", "prefix")

    def __init__(self, vocab_size: int, seq_len: int, device="cpu"):
        super().__init__(vocab_size, seq_len, device)
        _require_memory(vocab_size, device, 2)
        self.following = self._zeros(vocab_size, vocab_size)
        self.prefix = self._zeros(vocab_size, vocab_size)

    def _local_sums(self, local: _Local):
        once = local.steps.new_ones(1).expand(len(local.pairs))
        return [(local.pairs, once), local.sums(local.target_rows, local.prefix)]

    @property
    def unigram(self) -> Tensor:
        """Frequencies [current] of the input tokens; they sum to 1."""
        return self.following.sum(dim=1) / self._tokens()

    @property
    def bigram(self) -> Tensor:
        """Joint bigram frequency minus unigram(current)/V, [current, next]: rows sum to 0."""
        return (self.following / self._tokens()).sub_((self.unigram / self.vocab_size)[:, None])

    @property
    def context(self) -> Tensor:
        """Prefix co-occurrence minus its mean over next, [next, history]: columns sum to 0."""
        return (self.prefix - self.prefix.mean(dim=0)).div_(self._tokens())

    def _tokens(self) -> int:
        if not self.positions:
            raise ValueError("No sequence has been counted yet.")
        return self.positions


class QueryKeyCounts(_Counts):
    """Second pass. `usefulness` [next, history] says what seeing history is worth when next comes,
    from the first pass by the function of that name. Collects `query_key` [query, key], `position` [lag]."""

    tables = ("query_key", "position")

    def __init__(self, usefulness: Tensor, seq_len: int):
        super().__init__(len(usefulness), seq_len, usefulness.device)
        self.usefulness = usefulness.contiguous()
        self.query_key = self._zeros(self.vocab_size, self.vocab_size)
        self.position = self._zeros(seq_len)

    def _local_sums(self, local: _Local):
        count, length, size = local.prefix.shape
        scores = self.usefulness.view(-1).index_select(0, local.block).view(-1, size)  # [n U, U]
        rows = scores.index_select(0, local.target_rows).view(count, length, size)
        mean = (rows * local.prefix).sum(dim=2, keepdim=True)  # [n, T, 1]
        # The softmax's derivative at uniform attention: only differences from the mean count.
        query_key = local.sums(local.input_rows, (rows - mean).mul_(local.prefix))

        keys = local.inputs[:, None, :].expand(-1, size, -1)
        by_key = scores.view(count, size, size).gather(2, keys).view(-1, length)  # [n U, T]
        by_key = by_key.index_select(0, local.target_rows).view(count, length, length)
        summed = (by_key.sum(dim=0) - mean.sum(dim=0)) / local.steps  # J summed over the chunk
        lag = (local.steps - local.steps.T).long().clamp(min=0)
        return [query_key, (lag.flatten(), summed.tril().flatten())]


def corpus_statistics(
    inputs: Tensor, targets: Tensor, vocab_size: int, *, device="auto"
) -> CorpusStatistics:
    """All statistics of sequences `inputs` with next tokens `targets`, both [N, T], in two passes.

    `device` is where it counts: "auto" takes CUDA if there is one. The result stays there.
    Raises ValueError for an empty corpus, unlike shapes, or tokens outside the vocabulary, and
    MemoryError, before anything is allocated, where `statistics_memory` is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if inputs.ndim != 2 or inputs.numel() == 0:
        raise ValueError(
            f"inputs must hold at least one sequence as [sequences, T], got {tuple(inputs.shape)}."
        )
    require_statistics_memory(vocab_size, inputs.shape[1], device)
    return count_all(inputs, targets, vocab_size, device, _Counts.add)


def count_all(inputs: Tensor, targets: Tensor, vocab_size: int, device, count) -> CorpusStatistics:
    """Both passes. `count(counts, inputs, targets)` lets an empty PairCounts or QueryKeyCounts count them."""
    length = inputs.shape[1]
    pairs = count(PairCounts(vocab_size, length, device), inputs, targets)
    positions, first = pairs.positions, (pairs.unigram, pairs.bigram, pairs.context)
    del pairs  # its two tables
    queries = count(QueryKeyCounts(usefulness(*first), length), inputs, targets)
    return CorpusStatistics(
        *first, queries.query_key.div_(positions), queries.position.div_(positions)
    )


def unigram_statistics(unigram: Tensor, seq_len: int) -> CorpusStatistics:
    """What the statistics would be, in expectation, if every token were an independent draw.

    `unigram` [V] must sum to 1. This is the null that knows word frequencies and nothing else. Its
    position term is exactly zero: independent tokens make every lag equally useful.
    Raises ValueError if `unigram` is not a distribution.
    """
    p = unigram.to(torch.float64)
    if p.ndim != 1 or p.min() < 0 or abs(p.sum().item() - 1) > 1e-9:
        raise ValueError("unigram must be a vector of frequencies that sum to 1.")
    surprise = p - 1 / len(p)
    bigram, context = torch.outer(p, surprise), torch.outer(surprise, p)
    useful = p @ bigram.T @ bigram @ context  # [history], the next token being independent too
    mean = p @ useful
    t = torch.arange(1, seq_len + 1, dtype=torch.float64, device=p.device)
    # The row mean over the prefix holds the key itself, the query itself, and t - 2 further draws.
    key, query, others = (((t - 1) * w / t**2).mean() for w in (t - 1, torch.ones_like(t), t - 2))
    apart = torch.outer(p, p) * (key * useful[None, :] - query * useful[:, None] - others * mean)
    same = torch.diag(p * query * (useful - mean))  # the key is the query position itself
    return CorpusStatistics(
        p, bigram, context, apart + same, torch.zeros(seq_len, dtype=torch.float64, device=p.device)
    )
