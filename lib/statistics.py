"""The corpus statistics that the early weights are made of, counted by index.

Nothing here builds a one-hot matrix of the corpus. A sequence has only U distinct tokens, so its pair
counts form a U by U block that is added into the V by V table at the right rows and columns. Two
passes: `PairCounts` (bigram, context) and then `QueryKeyCounts`, which needs the terms of the first.
Sums are float64, memory is O(V^2) whatever the corpus. Source of the definitions: the paper, section
4.2, as derived again in the chapters `output-step` and `notation`.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

CHUNK_ELEMENTS = 2**22  # largest [sequences, T, T or U] tensor of one chunk: 32 MiB in float64


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


class _Local:
    """A chunk of sequences in its own small vocabularies of at most U tokens a sequence."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        both = torch.cat([inputs, targets], dim=1)
        order, where = both.sort(dim=1)
        is_new = torch.ones_like(order)
        is_new[:, 1:] = order[:, 1:] != order[:, :-1]
        rank = is_new.cumsum(dim=1) - 1
        local = torch.empty_like(both).scatter_(1, where, rank)
        self.size = int(rank.max()) + 1
        self.inputs, self.targets = local.split(inputs.shape[1], dim=1)  # [n, T], values below U
        self.tokens = both.new_zeros(len(both), self.size).scatter_(1, local, both)  # [n, U]
        steps = torch.arange(1, inputs.shape[1] + 1, device=both.device, dtype=torch.float64)
        self.one_hot = _one_hot(self.inputs, self.size)
        self.prefix = self.one_hot.cumsum(dim=1) / steps[:, None]  # [n, T, U]: share of the prefix

    def flat(self, vocab_size: int) -> Tensor:
        """Where the entries of a [n, U, U] block stand in a flattened V by V table."""
        return (self.tokens[:, :, None] * vocab_size + self.tokens[:, None, :]).flatten()


def _one_hot(local: Tensor, size: int) -> Tensor:
    return torch.zeros(*local.shape, size, dtype=torch.float64, device=local.device).scatter_(
        2, local[..., None], 1.0
    )


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
        low, high = (
            min(int(inputs.min()), int(targets.min())),
            max(int(inputs.max()), int(targets.max())),
        )
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"Tokens must lie in 0..{self.vocab_size - 1}, got {low}..{high}: is vocab_size right?"
            )
        chunk = max(1, CHUNK_ELEMENTS // (self.seq_len * 2 * self.seq_len))
        for x, y in zip(inputs.split(chunk), targets.split(chunk), strict=True):
            self._add(_Local(x.to(self.device), y.to(self.device)))
        self.positions += inputs.numel()
        return self

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
        self.following = self._zeros(vocab_size, vocab_size)
        self.prefix = self._zeros(vocab_size, vocab_size)

    def _add(self, local: _Local) -> None:
        where, target = local.flat(self.vocab_size), _one_hot(local.targets, local.size).mT
        self.following.view(-1).index_add_(0, where, (target @ local.one_hot).mT.flatten())
        self.prefix.view(-1).index_add_(0, where, (target @ local.prefix).flatten())

    @property
    def unigram(self) -> Tensor:
        """Frequencies [current] of the input tokens; they sum to 1."""
        return self.following.sum(dim=1) / self._tokens()

    @property
    def bigram(self) -> Tensor:
        """Joint bigram frequency minus unigram(current)/V, [current, next]: rows sum to 0."""
        return self.following / self._tokens() - self.unigram[:, None] / self.vocab_size

    @property
    def context(self) -> Tensor:
        """Prefix co-occurrence minus its mean over next, [next, history]: columns sum to 0."""
        return (self.prefix - self.prefix.mean(dim=0)) / self._tokens()

    def _tokens(self) -> int:
        if not self.positions:
            raise ValueError("No sequence has been counted yet.")
        return self.positions


class QueryKeyCounts(_Counts):
    """Second pass. `usefulness` [next, history] says what seeing history is worth when next comes:
    interchangeability @ context, from the first pass. Collects `query_key` [query, key], `position` [lag]."""

    tables = ("query_key", "position")

    def __init__(self, usefulness: Tensor, seq_len: int):
        super().__init__(len(usefulness), seq_len, usefulness.device)
        self.usefulness = usefulness
        self.query_key = self._zeros(self.vocab_size, self.vocab_size)
        self.position = self._zeros(seq_len)

    def _add(self, local: _Local) -> None:
        scores = self.usefulness[local.tokens[:, :, None], local.tokens[:, None, :]]  # [n, U, U]
        rows = scores.gather(1, local.targets[..., None].expand(-1, -1, local.size))  # [n, T, U]
        centred = rows - (rows * local.prefix).sum(
            dim=2, keepdim=True
        )  # softmax: only differences count
        block = local.one_hot.mT @ (local.prefix * centred)
        self.query_key.view(-1).index_add_(0, local.flat(self.vocab_size), block.flatten())

        steps = torch.arange(1, self.seq_len + 1, device=self.device)
        by_key = centred.gather(
            2, local.inputs[:, None, :].expand(-1, self.seq_len, -1)
        )  # [n, T, T]
        summed = (
            by_key.sum(dim=0) / steps[:, None]
        )  # J summed over the chunk, above the diagonal too
        lag = steps[:, None] - steps[None, :]
        self.position.index_add_(0, lag[lag >= 0], summed[lag >= 0])


def corpus_statistics(
    inputs: Tensor, targets: Tensor, vocab_size: int, *, device="auto"
) -> CorpusStatistics:
    """All statistics of sequences `inputs` with next tokens `targets`, both [N, T], in two passes.

    `device` is where it counts: "auto" takes CUDA if there is one. The result stays there.
    Raises ValueError for an empty corpus, unlike shapes, or tokens outside the vocabulary.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if inputs.ndim != 2 or inputs.numel() == 0:
        raise ValueError(
            f"inputs must hold at least one sequence as [sequences, T], got {tuple(inputs.shape)}."
        )
    pairs = PairCounts(vocab_size, inputs.shape[1], device).add(inputs, targets)
    bigram, context = pairs.bigram, pairs.context
    queries = QueryKeyCounts(bigram.T @ (bigram @ context), inputs.shape[1]).add(inputs, targets)
    return CorpusStatistics(
        pairs.unigram,
        bigram,
        context,
        queries.query_key / pairs.positions,
        queries.position / pairs.positions,
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
    useful = p @ (bigram.T @ (bigram @ context))  # [history], the next token being independent too
    mean = p @ useful
    t = torch.arange(1, seq_len + 1, dtype=torch.float64, device=p.device)
    # The row mean over the prefix holds the key itself, the query itself, and t - 2 further draws.
    key, query, others = (((t - 1) * w / t**2).mean() for w in (t - 1, torch.ones_like(t), t - 2))
    apart = torch.outer(p, p) * (key * useful[None, :] - query * useful[:, None] - others * mean)
    same = torch.diag(p * query * (useful - mean))  # the key is the query position itself
    return CorpusStatistics(
        p, bigram, context, apart + same, torch.zeros(seq_len, dtype=torch.float64, device=p.device)
    )
