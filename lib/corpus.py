"""From text to a tensor of tokens: sources, words tokenizer, vocabulary, selection rules, cache.

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

A text file without separators has no stories: it is cut into windows of seq_len + 1 tokens, and
each window counts as one text in rules 6 to 8.

"drop" with "first" is the selection of the paper (ICLR 2026, appendix on the TinyStories
experiments): 3,000 words, texts of at least 201 tokens, cut to 201.
"""

import hashlib
import json
import math
import os
import re
import tempfile
import warnings
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import safetensors
import torch
from safetensors.numpy import save_file

SEPARATOR = "<|endoftext|>"
UNKNOWN = "<unk>"
TOKEN = re.compile(r"[^\W\d_]+|\d+|\S")
# A stretch of text that ends before blank space, so that a text of any length is split in parts.
BLOCK = re.compile(r".{1,65536}\S*", re.DOTALL)
# UTF-8 bytes read as Windows-1252, as in the TinyStories files: a quotation mark becomes three
# characters that begin with these two.
MIS_ENCODED = re.compile("[\u00e2\u00c2\u00e3\u00c3][\u20ac\u0080-\u00bf]")

HUB = {
    # name: (repository on the hub, split, revision: the commit of 12 August 2024)
    "tinystories": ("roneneldan/TinyStories", "train", "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"),
}
SAMPLE_SHA256 = "508023961c5195ab235e7377ad73e14a35f1a8d565df99228ea663773fc3e623"
SAMPLE_NAME = "TinyStories sample (5,511 stories)"
AVAILABLE = (
    "available are 'storyworld', 'sample', 'tinystories', or the path of a .txt, .jsonl or "
    ".parquet file"
)
DEFAULT_VOCAB_SIZE = 1000
STORYWORLD_STORIES = 4000
FORMAT_VERSION = 1
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token sequences of one length with their vocabulary.

    `tokens` int64 [sequences, seq_len + 1] and `held_out` int64 [held-out sequences, seq_len + 1]
    hold ids in 0 … vocab_size - 1; `vocabulary[id]` is the word. Held-out sequences come from
    other texts than `tokens` and never count in the vocabulary. `fingerprint` (64 hexadecimal
    digits) depends on vocabulary, tokens and held-out tokens, and on nothing else. `counts` holds
    the numbers behind `report()`, `settings` the arguments of `load_corpus` that decide them.
    """

    tokens: torch.Tensor = field(repr=False)
    held_out: torch.Tensor = field(repr=False)
    vocabulary: list[str] = field(repr=False)
    seq_len: int
    source_name: str
    fingerprint: str
    settings: dict = field(repr=False)
    counts: dict = field(repr=False)

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

    def encode(self, words: str | Iterable[str]) -> list[int]:
        """Ids of `words` (a text is split by `tokenize_words` first).

        A word outside the vocabulary gives the id of `<unk>`, or a ValueError where there is none.
        """
        if isinstance(words, str):
            words = tokenize_words(words)
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


def tokenize_words(text: str) -> list[str]:
    """Lower case, then runs of letters, runs of digits, else each other non-space character."""
    return TOKEN.findall(text.lower())


def sample_path() -> Path | None:
    """The TinyStories sample: LEADING_TERMS_SAMPLE, else data/cache/tinystories-sample.txt.

    None if that file does not exist. data/README.md says how to make it.
    """
    default = REPOSITORY / "data" / "cache" / "tinystories-sample.txt"
    path = Path(os.environ.get("LEADING_TERMS_SAMPLE") or default)
    return path if path.is_file() else None


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
        it), "tinystories" (from the Hugging Face hub), or a path to a .txt file (texts between
        `<|endoftext|>`), a .jsonl or a .parquet file (texts in "text").
    vocab_size: number of words V, `<unk>` included. For "storyworld" the default of 1,000 means
        at most 1,000: the grammar may offer fewer words, `Corpus.vocab_size` says how many.
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
    source = _check_source(source, settings)
    identity, source_name = _identify(source, settings)
    key = hashlib.sha256(
        json.dumps([FORMAT_VERSION, identity, settings], sort_keys=True).encode()
    ).hexdigest()
    cached = _cache_dir() / f"corpus-{key[:32]}.safetensors"
    corpus = _read_cache(cached, source_name)
    if corpus is None:
        corpus = _build(source, source_name, settings)
        _write_cache(cached, corpus)
    return corpus


# --- settings and source ------------------------------------------------------------------------


def _check_settings(settings: dict) -> None:
    def integer(name, least):
        value = settings[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")

    def choice(name, *allowed, later=""):
        if settings[name] not in allowed:
            names = " or ".join(repr(value) for value in allowed)
            raise ValueError(f"{name}={settings[name]!r}: must be {names}{later}")

    choice("tokenizer", "words", later=" (the only tokenizer available so far)")
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


def _check_source(source: str | Path, settings: dict) -> str | Path:
    """The name of a source, or the path of a file that exists, is not empty and can be read."""
    revision = settings["revision"]
    if not isinstance(source, str | Path) or not str(source):
        raise ValueError(f"source={source!r}: {AVAILABLE}")
    if source in HUB:
        if revision is not None and (not isinstance(revision, str) or not revision):
            raise ValueError(f"revision={revision!r}: must be a commit of the data set, or None")
        settings["revision"] = revision or HUB[source][2]
        return source
    if revision is not None:
        raise ValueError(f"revision={revision!r}: only sources from the hub have a revision")
    if source == "storyworld":
        return source
    if source == "sample":
        if (source := sample_path()) is None:
            raise FileNotFoundError(
                "the TinyStories sample is not on this machine: set LEADING_TERMS_SAMPLE to the "
                "file, or make data/cache/tinystories-sample.txt as data/README.md says"
            )
    path = Path(source)
    if not path.exists():
        if isinstance(source, str) and not path.suffix and path.name == source:
            raise ValueError(f"source={source!r} is not available; {AVAILABLE}")
        raise FileNotFoundError(f"{path} does not exist; {AVAILABLE}")
    if path.suffix.lower() not in READ or not path.is_file():
        raise ValueError(f"{path} cannot be read as a corpus; {AVAILABLE}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; choose a file with texts in it")
    return path


def _identify(source: str | Path, settings: dict) -> tuple[list[str], str]:
    """What the cached result depends on besides the settings, and the name to show."""
    if source == "storyworld":
        from lib import storyworld

        files = [REPOSITORY / "data" / "storyworld.toml", Path(storyworld.__file__)]
        identity = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        return ["storyworld", str(STORYWORLD_STORIES), *identity], "storyworld"
    if source in HUB:
        repository, split, _ = HUB[source]
        name = f"{repository}, {split}, revision {settings['revision'][:7]}"
        return ["hub", repository, split], name
    with open(source, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    name = SAMPLE_NAME if sha256 == SAMPLE_SHA256 else source.name
    return [source.suffix.lower(), sha256], name


# --- reading ------------------------------------------------------------------------------------


def _decode(line: bytes, offset: int, name: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8: the byte at offset {offset + error.start} cannot be decoded; "
            "convert the file to UTF-8"
        ) from None


def _read_lines(path: Path, dirt: dict) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of a file, without the byte-order mark."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if offset == 0 and line.startswith(b"\xef\xbb\xbf"):
                dirt["byte_order_mark"] = 1
                offset, line = 3, line[3:]
            yield offset, line
            offset += len(line)


def _read_txt(path: Path, dirt: dict) -> Iterator[str]:
    """Texts between separators; blank space after the last separator is no text."""
    separators = 0
    parts: list[str] = []
    for offset, line in _read_lines(path, dirt):
        *ended, rest = _decode(line, offset, path.name).split(SEPARATOR)
        for part in ended:
            yield "".join([*parts, part])
            parts = []
            separators += 1
        parts.append(rest)
    last = "".join(parts)
    if separators == 0:
        dirt["no_separators"] = 1
    if separators == 0 or last.strip():
        yield last


def _read_jsonl(path: Path, dirt: dict) -> Iterator[str]:
    for number, (offset, line) in enumerate(_read_lines(path, dirt), start=1):
        line = _decode(line, offset, path.name)
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            broken = not isinstance(text, str | None)
        except (ValueError, KeyError, TypeError):
            broken = True
        if broken:
            raise ValueError(
                f'line {number} of {path.name} is not a JSON object with a string "text"; '
                "mend or remove that line"
            )
        yield text or ""


def _read_parquet(path: Path, dirt: dict) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path.name} is not a parquet file: {error}") from None
    with file:
        columns = file.schema_arrow
        kind = columns.field("text").type if "text" in columns.names else None
        if kind is None or not (
            pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
        ):
            raise ValueError(
                f'{path.name} has no column "text" of strings (its columns: '
                f"{', '.join(columns.names)}); rename the column that holds the texts"
            )
        for batch in file.iter_batches(columns=["text"], batch_size=4096):
            yield from (text or "" for text in batch.column(0).to_pylist())


def _read_hub(name: str, revision: str) -> Iterator[str]:
    import datasets

    repository, split, _ = HUB[name]
    try:
        dataset = datasets.load_dataset(repository, split=split, revision=revision)
    except Exception as error:  # the client of the hub raises errors of many kinds
        reason = str(error).split("\n")[0]
        raise ConnectionError(
            f"{repository} at revision {revision} cannot be fetched from the Hugging Face hub "
            f"({reason}); check the network and the revision, or use the TinyStories sample "
            "(data/README.md says how to get it) or source='storyworld' instead"
        ) from error
    for batch in dataset.iter(batch_size=4096):
        yield from (text or "" for text in batch["text"])


READ = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


# --- building -----------------------------------------------------------------------------------


@dataclass
class _Texts:
    """All tokens of all non-empty texts: `ids` int32 [tokens] into `words`, `lengths` [texts]."""

    ids: np.ndarray
    lengths: np.ndarray
    words: list[str]
    dirt: dict


def _number_words(texts: Iterable[str], dirt: dict) -> _Texts:
    """Tokenize every text once; a new word gets the next number.

    No token contains blank space, so a text is split there first, which is fast, and the tokens
    of a piece such as `mat.` are found once and remembered.
    """
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__

    @lru_cache(maxsize=1 << 20)
    def numbers_of(piece):
        return tuple(numbers[word] for word in tokenize_words(piece))

    ids = array("i")
    lengths = array("q")
    for text in texts:
        before = len(ids)
        for block in BLOCK.finditer(text):
            ids.extend(chain.from_iterable(map(numbers_of, block.group().split())))
        if len(ids) == before:
            dirt["empty"] += 1
            continue
        lengths.append(len(ids) - before)
        dirt["mis_encoded"] += not text.isascii() and bool(MIS_ENCODED.search(text))
        dirt["carriage_returns"] += "\r" in text
    return _Texts(np.frombuffer(ids, np.int32), np.frombuffer(lengths, np.int64), [*numbers], dirt)


@dataclass
class _Selected:
    """Sequences after every rule but `max_sequences`: int32 [sequences, seq_len + 1]."""

    tokens: np.ndarray
    held_out: np.ndarray
    vocabulary: list[str]
    counts: dict


def _build(source: str | Path, source_name: str, settings: dict) -> Corpus:
    dirt = dict.fromkeys(
        ["empty", "mis_encoded", "carriage_returns", "byte_order_mark", "no_separators"], 0
    )
    if source == "storyworld":
        selected = _select_from_storyworld(settings, dirt)
    else:
        if source in HUB:
            texts = _read_hub(source, settings["revision"])
        else:
            texts = READ[source.suffix.lower()](source, dirt)
        selected = _select(_number_words(texts, dirt), source_name, settings)
    tokens = _subset(selected.tokens, settings)
    return Corpus(
        tokens=torch.from_numpy(tokens).long(),
        held_out=torch.from_numpy(selected.held_out).long(),
        vocabulary=selected.vocabulary,
        seq_len=settings["seq_len"],
        source_name=source_name,
        fingerprint=_fingerprint(tokens, selected.held_out, selected.vocabulary),
        settings=settings,
        counts=selected.counts,
    )


def _select_from_storyworld(settings: dict, dirt: dict) -> _Selected:
    """Expand 4,000 stories, or more where `max_sequences` needs them, and apply the rules."""
    from lib.storyworld import generate

    stories = STORYWORLD_STORIES
    wanted = settings["max_sequences"] or 1
    at_most = settings["vocab_size"] == DEFAULT_VOCAB_SIZE
    while True:
        texts = _number_words(generate(stories, seed=settings["seed"]), dict(dirt))
        selected = _select(texts, "storyworld", settings, at_most=at_most)
        available = len(selected.tokens)
        if available >= wanted:
            return selected
        stories = math.ceil(1.1 * stories * wanted / available)


def _select(texts: _Texts, name: str, settings: dict, *, at_most: bool = False) -> _Selected:
    """Rules 2 to 7. With `at_most`, the vocabulary may be smaller than asked for."""
    ids, lengths, width = texts.ids, texts.lengths, settings["seq_len"] + 1
    if len(lengths) == 0:
        raise ValueError(f"{name} holds no text, only blank space; choose another source")

    held = _choose_held_out(len(lengths), name, settings)
    counts = _count(ids, len(texts.words))
    counts -= _count(ids[np.repeat(held, lengths)], len(texts.words))
    vocabulary, new_id = _vocabulary(texts.words, counts, name, settings, at_most)
    ids = new_id[ids]
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
        "different_tokens": len(texts.words),
        "tokens_outside_vocabulary": outside,
        "texts_or_windows": len(lengths),
        "held_out_texts": held.sum(),
        "too_short": (~long_enough).sum(),
        "out_of_vocabulary": (long_enough & ~kept).sum(),
        "kept_texts": (kept & ~held).sum(),
        "kept_held_out_texts": (kept & held).sum(),
        "available_sequences": len(cut["tokens"]),
    }
    return _Selected(**cut, vocabulary=vocabulary, counts={k: int(v) for k, v in counts.items()})


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


def _count(ids: np.ndarray, size: int) -> np.ndarray:
    """int64 [size]: how often each id occurs; in parts, as bincount copies its input to int64."""
    counts = np.zeros(size, np.int64)
    for start in range(0, len(ids), 1 << 22):
        counts += np.bincount(ids[start : start + (1 << 22)], minlength=size)
    return counts


def _vocabulary(
    words: list[str], counts: np.ndarray, name: str, settings: dict, at_most: bool
) -> tuple[list[str], np.ndarray]:
    """The vocabulary, and int32 [words]: the new id of each word, 0 or -1 outside of it."""
    unknown = settings["out_of_vocabulary"] == "unk"
    offered = int((counts > 0).sum())
    size = settings["vocab_size"] - unknown
    if size > offered and not at_most:
        raise ValueError(
            f"vocab_size={size + unknown} is larger than {name} offers: it has {offered} different "
            f"tokens; choose {offered + unknown} or less{' (with <unk>)' if unknown else ''}"
        )
    order = sorted(np.flatnonzero(counts), key=lambda i: (-counts[i], words[i]))[:size]
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


def _fingerprint(tokens: np.ndarray, held_out: np.ndarray, vocabulary: list[str]) -> str:
    sha256 = hashlib.sha256(json.dumps([FORMAT_VERSION, vocabulary]).encode())
    for array_ in (tokens, held_out):
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
        ("tokens outside the vocabulary", f"{counts['tokens_outside_vocabulary']:,} ({share:.2%})"),
    ]
    if counts["no_separators"]:
        lines.append(
            ("no separators, cut into", f"{counts['texts_or_windows']:,} windows of {width} tokens")
        )
    lines.append((f"{unit} under {width} tokens", f"{counts['too_short']:,} dropped"))
    if not unknown:
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
        for name in ("vocabulary", "seq_len", "fingerprint", "settings", "counts")
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
