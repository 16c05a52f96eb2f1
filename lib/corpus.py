"""From text to a tensor of tokens: words tokenizer, vocabulary, selection rules, cache.

The rules, in the order in which they are applied:

1.  A source gives texts. An empty text is left out.
2.  `holdout` puts a random fraction of the texts aside (chosen by `seed`).
3.  Words: lower case, then runs of letters, runs of digits, else each other character.
4.  Vocabulary: the most frequent words of the texts that are not held out, by (-count, word).
5.  A text needs at least seq_len + 1 tokens.
6.  `out_of_vocabulary`: "drop" drops a text if any token of the whole text is outside the
    vocabulary; "unk" writes `<unk>` (id 0, one of the `vocab_size` words) in its place.
7.  `pack`: "first" keeps the first seq_len + 1 tokens of a text, "windows" cuts the text into
    non-overlapping windows of seq_len + 1 and leaves out the rest.
8.  `max_sequences` takes a random subset of that size (chosen by `seed`), in corpus order.

With `tokenizer="bpe"` the tokens are pieces of words (lib.tokenizers): rule 3 trains on the texts
that are not held out until there are `vocab_size` tokens, rule 4 only sorts them, those that occur
nowhere included. Nothing is ever unknown, so rule 6 does nothing: both values of
`out_of_vocabulary` give the same corpus, without `<unk>`.

A text file without separators has no stories: it is cut into windows of seq_len + 1 tokens, and
each window counts as one text in rules 6 to 8.

"drop" with "first" is the selection of the paper (ICLR 2026, appendix on the TinyStories
experiments): 3,000 words, texts of at least 201 tokens, cut to 201; there, too, BPE keeps every
text that is long enough.
"""

import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import safetensors
import torch
from safetensors.numpy import save_file

from lib.sources import REPOSITORY, check_source, grows, identify, read_texts
from lib.sources import sample_path as sample_path  # belongs to this module's calls, too
from lib.tokenizers import BYTES, BytePairs, Texts, in_byte_pairs, number, tokenize_words

UNKNOWN = "<unk>"
DEFAULT_VOCAB_SIZE = 1000
FIRST_TEXTS = 4000  # of the embedded corpus or of a streamed set; more where they are needed
FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token sequences of one length with their vocabulary.

    `tokens` int64 [sequences, seq_len + 1] and `held_out` int64 [held-out sequences, seq_len + 1]
    hold ids in 0 … vocab_size - 1; `vocabulary[id]` is the word, or the token of BPE as lib.tokenizers
    shows it. Held-out sequences come from other texts than `tokens` and never count in the
    vocabulary. `fingerprint` (64 hexadecimal digits) depends on vocabulary, tokens, held-out tokens
    and the `merges` of BPE (None for words), and on nothing else. `counts` holds the numbers behind
    `report()`, `settings` the arguments of `load_corpus` that decide them (`out_of_vocabulary` is
    None for BPE, where it decides nothing).
    """

    tokens: torch.Tensor = field(repr=False)
    held_out: torch.Tensor = field(repr=False)
    vocabulary: list[str] = field(repr=False)
    seq_len: int
    source_name: str
    fingerprint: str
    settings: dict = field(repr=False)
    counts: dict = field(repr=False)
    merges: list[str] | None = field(default=None, repr=False)

    @property
    def inputs(self) -> torch.Tensor:
        """int64 [sequences, seq_len]: every token but the last of each sequence."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> torch.Tensor:
        """int64 [sequences, seq_len]: the token that follows each input."""
        return self.tokens[:, 1:]

    @property
    def vocab_size(self) -> int:
        return len(self.vocabulary)

    @cached_property
    def index(self) -> dict[str, int]:
        """word -> id."""
        return {word: i for i, word in enumerate(self.vocabulary)}

    @cached_property
    def split(self) -> Callable[[str], list[str]]:
        """The tokenizer of this corpus, a function of a text: `tokenize_words`, or its own BPE."""
        return tokenize_words if self.merges is None else BytePairs(self.merges).split

    def encode(self, words: str | Iterable[str]) -> list[int]:
        """Ids of `words` (a text is split first, by `split`).

        A word outside the vocabulary gives the id of `<unk>`, or a ValueError where there is none.
        """
        if isinstance(words, str):
            words = self.split(words)
        ids = [self.index.get(word, self.index.get(UNKNOWN)) for word in words]
        if None in ids:
            raise ValueError(
                f"{list(words)[ids.index(None)]!r} is not among the {self.vocab_size} words of the "
                "vocabulary; use other words, a larger vocab_size, or out_of_vocabulary='unk'"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Words of `ids` (a list or a one-dimensional tensor)."""
        return [self.vocabulary[int(i)] for i in ids]

    def report(self) -> str:
        """What was read and what each rule kept and dropped, one aligned line each."""
        lines = _report_lines(self)
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)


def load_corpus(
    source: str | Path = "storyworld",
    *,
    tokenizer: str = "words",
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    seq_len: int = 64,
    max_sequences: int | None = None,
    out_of_vocabulary: str = "drop",
    pack: str = "first",
    holdout: float = 0.0,
    revision: str | None = None,
    seed: int = 0,
) -> Corpus:
    """Read a source and apply the rules of this module in their order.

    source: "storyworld" (the embedded corpus, 4,000 stories expanded from `seed`, more where
        `max_sequences` needs them), "sample" (the TinyStories sample, where `sample_path` finds
        it), "tinystories" (from the Hugging Face hub), "openwebtext" or "fineweb" (from the hub,
        too, but so large that only the first texts are fetched, 4,000 or as many as the required
        `max_sequences` needs), or a path to a .txt file (texts between `<|endoftext|>`), a .jsonl
        or a .parquet file (texts in "text").
    tokenizer: "words" or "bpe" (byte-level, trained on this source; case is kept).
    vocab_size: number of tokens V, `<unk>` included. For "storyworld" the default of 1,000 means
        at most 1,000: the grammar may offer fewer words, `Corpus.vocab_size` says how many. For
        "bpe" at least 256, one for each byte.
    seq_len: number of predictions T of a sequence, which has seq_len + 1 tokens.
    holdout: fraction of the texts, at least 0 and below 1, whose sequences go to `held_out`;
        `max_sequences` does not apply to them.
    revision: commit of the hub data set, in place of the pinned one.

    The result is stored in LEADING_TERMS_CACHE (else data/cache) under the hash of the source and
    of all settings; a stored file that is damaged is made again.

    Raises ValueError for a bad parameter or a text that cannot serve, FileNotFoundError for a
    missing file, ConnectionError where the hub cannot be reached.
    """
    settings = {
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "seq_len": seq_len,
        "max_sequences": max_sequences,
        "out_of_vocabulary": out_of_vocabulary,
        "pack": pack,
        "holdout": holdout,
        "revision": revision,
        "seed": seed,
    }
    _check_settings(settings)
    source = check_source(source, settings)
    identity, source_name = identify(source, settings["revision"])
    if grows(source):
        identity.append(str(FIRST_TEXTS))
    key = hashlib.sha256(
        json.dumps([FORMAT_VERSION, identity, settings], sort_keys=True).encode()
    ).hexdigest()
    cached = _cache_dir() / f"corpus-{key[:32]}.safetensors"
    corpus = _read_cache(cached, source_name)
    if corpus is None:
        corpus = _build(source, source_name, settings)
        _write_cache(cached, corpus)
    return corpus


# --- settings ------------------------------------------------------------------------


def _check_settings(settings: dict) -> None:
    def integer(name, least):
        value = settings[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")

    def choice(name, *allowed):
        if settings[name] not in allowed:
            names = " or ".join(repr(value) for value in allowed)
            raise ValueError(f"{name}={settings[name]!r}: must be {names}")

    choice("tokenizer", "words", "bpe")
    choice("out_of_vocabulary", "drop", "unk")
    choice("pack", "first", "windows")
    integer("vocab_size", 2)
    integer("seq_len", 1)
    integer("seed", 0)
    if settings["max_sequences"] is not None:
        integer("max_sequences", 1)
    holdout = settings["holdout"]
    if not isinstance(holdout, int | float) or isinstance(holdout, bool) or not 0 <= holdout < 1:
        raise ValueError(f"holdout={holdout!r}: must be a number of at least 0 and below 1")
    settings["holdout"] = float(holdout)
    if settings["tokenizer"] == "bpe":
        if settings["vocab_size"] < BYTES:
            raise ValueError(
                f"vocab_size={settings['vocab_size']}: tokenizer='bpe' needs at least {BYTES}, one "
                "token for each byte"
            )
        settings["out_of_vocabulary"] = None  # nothing is outside: one corpus, whatever was asked


# --- building -----------------------------------------------------------------------------------


@dataclass
class _Selected:
    """Sequences after every rule but `max_sequences`: int32 [sequences, seq_len + 1]."""

    tokens: np.ndarray
    held_out: np.ndarray
    vocabulary: list[str]
    counts: dict
    merges: list[str] | None


def _build(source: str | Path, source_name: str, settings: dict) -> Corpus:
    dirt = dict.fromkeys(
        ["empty", "mis_encoded", "carriage_returns", "byte_order_mark", "no_separators"], 0
    )
    if grows(source):
        selected = _select_enough(source, source_name, settings, dirt)
    else:
        texts = read_texts(source, settings["revision"], dirt)
        selected = _select(number(texts, dirt, settings["tokenizer"]), source_name, settings)
    tokens = _subset(selected.tokens, settings)
    return Corpus(
        tokens=torch.from_numpy(tokens).long(),
        held_out=torch.from_numpy(selected.held_out).long(),
        vocabulary=selected.vocabulary,
        seq_len=settings["seq_len"],
        source_name=source_name,
        fingerprint=_fingerprint(tokens, selected),
        settings=settings,
        counts=selected.counts,
        merges=selected.merges,
    )


def _select_enough(source: str, name: str, settings: dict, dirt: dict) -> _Selected:
    """The rules, on the first 4,000 texts, or on more where `max_sequences` needs them."""
    if source == "storyworld":
        from lib.storyworld import generate

        def first(count):
            return generate(count, seed=settings["seed"])
    else:
        stream, read = read_texts(source, settings["revision"], dirt), []

        def first(count):
            read.extend(islice(stream, count - len(read)))
            return read

    count, wanted = FIRST_TEXTS, settings["max_sequences"] or 1
    at_most = source == "storyworld" and settings["vocab_size"] == DEFAULT_VOCAB_SIZE
    while True:
        texts = first(count)
        numbered = number(texts, dict(dirt), settings["tokenizer"])
        selected = _select(numbered, name, settings, at_most=at_most)
        available = len(selected.tokens)
        if available >= wanted or len(texts) < count:
            return selected
        count = math.ceil(1.1 * count * wanted / available)


def _select(texts: Texts, name: str, settings: dict, *, at_most: bool = False) -> _Selected:
    """Rules 2 to 7. With `at_most`, the vocabulary may be smaller than asked for."""
    if len(texts.lengths) == 0:
        raise ValueError(f"{name} holds no text, only blank space; choose another source")

    held = _choose_held_out(len(texts.lengths), name, settings)
    merges = None
    if settings["tokenizer"] == "bpe":
        texts, merges = in_byte_pairs(texts, ~held, settings["vocab_size"])
    vocabulary, new_id = _vocabulary(texts, held, name, settings, at_most)
    ids, lengths, width = new_id[texts.ids], texts.lengths, settings["seq_len"] + 1
    first_word = 1 if settings["out_of_vocabulary"] == "unk" else 0
    outside = (ids < first_word).sum()

    longest = lengths[~held].max()
    if texts.dirt["no_separators"]:
        lengths = np.full(len(ids) // width, width)
        held = np.zeros(len(lengths), bool)
    starts = np.cumsum(lengths) - lengths
    long_enough = lengths >= width
    if not (long_enough & ~held).any():
        raise ValueError(
            f"no story of {name} is long enough: seq_len={width - 1} needs {width} tokens and the "
            f"longest has {longest}; choose a smaller seq_len"
        )
    kept = long_enough
    if settings["out_of_vocabulary"] == "drop":
        kept = long_enough & (np.minimum.reduceat(ids[: lengths.sum()], starts) >= 0)
        if not (kept & ~held).any():
            raise ValueError(
                f"every story of {name} with {width} tokens or more has a word outside the "
                f"vocabulary of {len(vocabulary)}; choose a larger vocab_size, a smaller seq_len, "
                "or out_of_vocabulary='unk'"
            )
    cut = {
        name: _cut(ids, starts[rows], lengths[rows], width, settings["pack"])
        for name, rows in [("tokens", kept & ~held), ("held_out", kept & held)]
    }
    if held.any() and len(cut["held_out"]) == 0:
        raise ValueError(
            f"holdout={settings['holdout']}: none of the {held.sum()} held-out texts gives a "
            "sequence; choose a larger holdout"
        )
    counts = {
        **texts.dirt,
        "texts": len(texts.lengths) + texts.dirt["empty"],
        "tokens": len(ids),
        "different_tokens": np.count_nonzero(texts.count()),
        "tokens_outside_vocabulary": outside,
        "texts_or_windows": len(lengths),
        "held_out_texts": held.sum(),
        "too_short": (~long_enough).sum(),
        "out_of_vocabulary": (long_enough & ~kept).sum(),
        "kept_texts": (kept & ~held).sum(),
        "kept_held_out_texts": (kept & held).sum(),
        "available_sequences": len(cut["tokens"]),
    }
    counts = {key: int(value) for key, value in counts.items()}
    return _Selected(**cut, vocabulary=vocabulary, counts=counts, merges=merges)


def _choose_held_out(texts: int, name: str, settings: dict) -> np.ndarray:
    """bool [texts]: True for a random share of the texts."""
    held = np.zeros(texts, bool)
    holdout = settings["holdout"]
    if holdout:
        number = round(holdout * texts)
        if not 0 < number < texts:
            raise ValueError(
                f"holdout={holdout} of the {texts} texts of {name} is {number}: at least one "
                "must be held out and one kept; choose another holdout or a source of more texts"
            )
        random = np.random.default_rng([settings["seed"], 0])
        held[random.choice(texts, number, replace=False)] = True
    return held


def _vocabulary(
    texts: Texts, held: np.ndarray, name: str, settings: dict, at_most: bool
) -> tuple[list[str], np.ndarray]:
    """The vocabulary, and int32 [words]: the new id of each word, 0 or -1 outside of it."""
    words, counts = texts.words, texts.count(~held)
    unknown = settings["out_of_vocabulary"] == "unk"
    bpe = settings["tokenizer"] == "bpe"
    candidates = np.arange(len(words)) if bpe else np.flatnonzero(counts)
    offered = len(candidates)
    size = settings["vocab_size"] - unknown
    if size > offered and not at_most:
        what = "merging byte pairs ends with" if bpe else "it has"
        raise ValueError(
            f"vocab_size={size + unknown} is larger than {name} offers: {what} {offered} different "
            f"tokens; choose {offered + unknown} or less{' (with <unk>)' if unknown else ''}"
        )
    order = sorted(candidates, key=lambda i: (-counts[i], words[i]))[:size]
    new_id = np.full(len(words), 0 if unknown else -1, np.int32)
    new_id[order] = np.arange(len(order)) + unknown
    return [UNKNOWN] * unknown + [words[i] for i in order], new_id


def _cut(
    ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, width: int, pack: str
) -> np.ndarray:
    """int32 [sequences, width]: the first window of each text, or all that do not overlap."""
    windows = lengths // width
    if pack == "first":
        windows = np.minimum(windows, 1)
    first = np.cumsum(windows) - windows
    within = np.arange(windows.sum()) - np.repeat(first, windows)
    at = np.repeat(starts, windows) + width * within
    return np.lib.stride_tricks.sliding_window_view(ids, width)[at]


def _subset(sequences: np.ndarray, settings: dict) -> np.ndarray:
    """A random subset of `max_sequences`, in corpus order."""
    wanted = settings["max_sequences"]
    if wanted is None:
        return sequences
    if wanted > len(sequences):
        raise ValueError(
            f"max_sequences={wanted} is more than there are: {len(sequences)} sequences are left "
            "after the rules; choose that many or fewer, or None for all"
        )
    random = np.random.default_rng([settings["seed"], 1])
    return sequences[np.sort(random.choice(len(sequences), wanted, replace=False))]


def _fingerprint(tokens: np.ndarray, selected: _Selected) -> str:
    made_of = [FORMAT_VERSION, selected.vocabulary]
    if selected.merges is not None:
        made_of.append(selected.merges)
    sha256 = hashlib.sha256(json.dumps(made_of).encode())
    for array_ in (tokens, selected.held_out):
        sha256.update(json.dumps(array_.shape).encode())
        sha256.update(np.ascontiguousarray(array_, "<i4").data)
    return sha256.hexdigest()


# --- report -------------------------------------------------------------------------------------


def _report_lines(corpus: Corpus) -> list[tuple[str, str]]:
    counts, settings, width = corpus.counts, corpus.settings, corpus.seq_len + 1
    unknown = settings["out_of_vocabulary"] == "unk"
    unit = "windows" if counts["no_separators"] else "texts"
    kept = f"{counts['kept_texts']:,}"
    if corpus.held_out.numel():
        kept += f" and {counts['kept_held_out_texts']:,} held out"
    asked = settings["vocab_size"]
    size = f"{corpus.vocab_size:,}{', with <unk>' if unknown else ''}"
    if corpus.merges is not None:
        size += f", the {BYTES} bytes and what {len(corpus.merges):,} merges make of them"
    if corpus.vocab_size < asked:
        size += f" (asked for {asked:,}; the source has no more)"
    share = counts["tokens_outside_vocabulary"] / counts["tokens"]
    lines = [
        ("source", corpus.source_name),
        ("texts read", f"{counts['texts']:,}"),
        ("  empty, left out", f"{counts['empty']:,}"),
        ("  with mis-encoded characters", f"{counts['mis_encoded']:,} (kept as they are)"),
        ("  with carriage returns", f"{counts['carriage_returns']:,} (read as blank space)"),
    ]
    if counts["byte_order_mark"]:
        lines.append(("byte-order mark", "left out"))
    lines += [
        ("tokens", f"{counts['tokens']:,}"),
        ("different tokens", f"{counts['different_tokens']:,}"),
        ("held-out texts", f"{counts['held_out_texts']:,}"),
        ("vocabulary", size),
    ]
    if corpus.merges is None:
        outside = f"{counts['tokens_outside_vocabulary']:,} ({share:.2%})"
        lines.append(("tokens outside the vocabulary", outside))
    if counts["no_separators"]:
        lines.append(
            ("no separators, cut into", f"{counts['texts_or_windows']:,} windows of {width} tokens")
        )
    lines.append((f"{unit} under {width} tokens", f"{counts['too_short']:,} dropped"))
    if settings["out_of_vocabulary"] == "drop":
        lines.append(
            (f"{unit} out of vocabulary", f"{counts['out_of_vocabulary']:,} dropped whole")
        )
    lines += [
        (f"{unit} kept", kept),
        ("sequences available", f"{counts['available_sequences']:,} of {width} tokens"),
        ("sequences taken", f"{len(corpus.tokens):,}"),
        ("held-out sequences", f"{len(corpus.held_out):,}"),
    ]
    if unknown:
        lines.append(("<unk> in the sequences", f"{(corpus.tokens == 0).double().mean():.2%}"))
    return [*lines, ("fingerprint", corpus.fingerprint)]


# --- cache --------------------------------------------------------------------------------------


def _cache_dir() -> Path:
    return Path(os.environ.get("LEADING_TERMS_CACHE") or REPOSITORY / "data" / "cache")


def _digest(record: str, tensors: dict[str, np.ndarray]) -> str:
    sha256 = hashlib.sha256(record.encode())
    for name in ("tokens", "held_out"):
        sha256.update(np.ascontiguousarray(tensors[name]).data)
    return sha256.hexdigest()


def _read_cache(path: Path, source_name: str) -> Corpus | None:
    """The stored corpus; None if there is no file or it is not what was written."""
    if not path.is_file():
        return None
    try:
        with safetensors.safe_open(path, framework="np") as file:
            sha256, record = json.loads(file.metadata()["corpus"])
            tensors = {name: file.get_tensor(name) for name in ("tokens", "held_out")}
        if _digest(record, tensors) != sha256:
            return None
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError):
        return None
    tensors = {name: torch.from_numpy(ids).long() for name, ids in tensors.items()}
    return Corpus(**tensors, source_name=source_name, **json.loads(record))


def _write_cache(path: Path, corpus: Corpus) -> None:
    """One safetensors file with a JSON header, complete or absent."""
    record = {
        name: getattr(corpus, name)
        for name in ("vocabulary", "seq_len", "fingerprint", "settings", "counts", "merges")
    }
    record = json.dumps(record)
    tensors = {name: getattr(corpus, name).int().numpy() for name in ("tokens", "held_out")}
    header = {"corpus": json.dumps([_digest(record, tensors), record])}
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        os.close(handle)
        save_file(tensors, temporary, header)
        os.replace(temporary, path)
    except (OSError, safetensors.SafetensorError) as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        warnings.warn(
            f"the corpus cannot be stored in {path.parent} ({error}), so the next call reads its "
            "source again; make room there or set LEADING_TERMS_CACHE to another folder",
            stacklevel=3,
        )
