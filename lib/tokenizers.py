"""Tokenizers: words, and pieces of words (byte-level BPE); whole corpora as numbered tokens.

Words are lower case: runs of letters, runs of digits, else each other character.

Byte-level BPE is trained, by the tokenizers package, on the corpus's own text. Its alphabet is the 256
bytes of UTF-8. Training merges the most frequent pair of neighbouring tokens into a new one, again
and again, until there are `vocab_size` tokens; a text is then cut by the same merges. Any text can
be written so: nothing is unknown. Upper and lower case stay as they are. Blank space of any kind
and length counts as one space; a word carries the space before it, the first word of a text has one
too, and no token reaches from one word into the next.

A token of BPE is shown by its characters, its space as `␣`, and what is no whole printable
character byte by byte, as `<0xE2>`. No two tokens look alike.
"""

import json
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np

TOKEN = re.compile(r"[^\W\d_]+|\d+|\S")
# A stretch of text that ends before blank space, so that a text of any length is split in parts.
BLOCK = re.compile(r".{1,65536}\S*", re.DOTALL)
# UTF-8 bytes read as Windows-1252, as in the TinyStories files: a quotation mark becomes three
# characters that begin with these two.
MIS_ENCODED = re.compile("[\u00e2\u00c2\u00e3\u00c3][\u20ac\u0080-\u00bf]")

SPACE = "␣"
BYTES = 256
REPEATS = 4096  # how often a word is repeated in one text for the trainer


def tokenize_words(text: str) -> list[str]:
    """Lower case, then runs of letters, runs of digits, else each other non-space character."""
    return TOKEN.findall(text.lower())


def _byte_names() -> dict[str, int]:
    """Character -> byte: how the tokenizers package, after GPT-2, writes each byte as a letter."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(BYTES) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_names()


def readable(token: str) -> str:
    """How a token, in the package's letters for bytes, is shown."""
    data = bytes(BYTE_OF[letter] for letter in token)
    text = data.decode("utf-8", errors="surrogateescape")
    return "".join(SPACE if char == " " else char if _shows(char) else _hex(char) for char in text)


def _shows(char: str) -> bool:
    return char.isprintable() and char != SPACE


def _hex(char: str) -> str:
    data = char.encode("utf-8", errors="surrogateescape")
    return "".join(f"<0x{byte:02X}>" for byte in data)


class BytePairs:
    """A trained tokenizer; `merges` are its pairs in order, each `"first second"`."""

    def __init__(self, merges: Sequence[str]):
        self.merges = list(merges)

    @classmethod
    def train(cls, words: Iterable[str], counts: Iterable[int], vocab_size: int) -> "BytePairs":
        """Learn from `words`, none with blank space in it, and how often each occurs.

        The result has at most `vocab_size` tokens: fewer if every word is one token before. The
        same words and counts give the same merges, in whatever order and on any number of threads.
        """
        from tokenizers import pre_tokenizers, trainers

        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        texts = (
            _spaced(word) * min(REPEATS, count - done)
            for word, count in zip(words, map(int, counts), strict=True)
            for done in range(0, count, REPEATS)
        )
        tokenizer = _tokenizer()
        tokenizer.train_from_iterator(texts, trainer)
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        return cls([" ".join(pair) for pair in merges])

    @cached_property
    def _raw(self) -> list[str]:
        """All tokens in the package's letters, the bytes first, then by the merge that makes each."""
        made = (merge.replace(" ", "") for merge in self.merges)
        return list(dict.fromkeys([*BYTE_OF, *made]))

    @cached_property
    def tokens(self) -> list[str]:
        """All tokens as they are shown; `ids` counts in this list."""
        return [readable(token) for token in self._raw]

    @cached_property
    def _model(self):
        ids = {token: i for i, token in enumerate(self._raw)}
        return _tokenizer(ids, [tuple(merge.split(" ")) for merge in self.merges])

    def ids(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of each word, as numbers in `tokens`."""
        return [found.ids for found in self._model.encode_batch([*map(_spaced, words)])]

    def split(self, text: str) -> list[str]:
        """The tokens of a text as they are shown; blank space of any kind counts as one space."""
        return [self.tokens[i] for word in self.ids(text.split()) for i in word]


def _spaced(word: str) -> str:
    """The word with its space; half a surrogate pair, which JSON can hold, becomes `?`."""
    return " " + word.encode("utf-8", errors="replace").decode("utf-8")


def _tokenizer(*model):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(*model))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@dataclass
class Texts:
    """All tokens of all non-empty texts: `ids` int32 [tokens] into `words`, `lengths` [texts].

    What is cut at blank space alone has words of text in the place of tokens.
    """

    ids: np.ndarray
    lengths: np.ndarray
    words: list[str]
    dirt: dict

    def count(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """int64 [words]: how often each occurs in the chosen texts (bool [texts]), else in all."""
        ids = self.ids if chosen is None else self.ids[np.repeat(chosen, self.lengths)]
        counts = np.zeros(len(self.words), np.int64)
        for part in _parts(ids):  # as bincount copies its input to int64
            counts += np.bincount(part, minlength=len(counts))
        return counts


def _parts(ids: np.ndarray) -> list[np.ndarray]:
    return [ids[start : start + (1 << 22)] for start in range(0, len(ids), 1 << 22)]


def number(texts: Iterable[str], dirt: dict, tokenizer: str) -> Texts:
    """Tokenize every text once; a new word gets the next number. Counts what is odd in `dirt`.

    No token contains blank space, so a text is split there first, which is fast, and the tokens
    of a piece such as `mat.` are found once and remembered. For "bpe" the pieces themselves are
    numbered: its tokens are known only after all have been counted, by `in_byte_pairs`.
    """
    split = tokenize_words if tokenizer == "words" else lambda piece: [piece]
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__

    @lru_cache(maxsize=1 << 20)
    def numbers_of(piece):
        return tuple(numbers[word] for word in split(piece))

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
    return Texts(np.frombuffer(ids, np.int32), np.frombuffer(lengths, np.int64), [*numbers], dirt)


def in_byte_pairs(texts: Texts, chosen: np.ndarray, vocab_size: int) -> tuple[Texts, list[str]]:
    """Texts of pieces in tokens of BPE, and the merges that the chosen of them (bool [texts]) give."""
    pairs = BytePairs.train(texts.words, texts.count(chosen), vocab_size)
    found = pairs.ids(texts.words)
    flat = np.fromiter(chain.from_iterable(found), np.int32)
    sizes = np.fromiter(map(len, found), np.int32)
    starts = np.cumsum(sizes) - sizes

    def tokens_of(pieces):
        size = sizes[pieces]
        within = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        return flat[np.repeat(starts[pieces], size) + within]

    ids = np.concatenate([tokens_of(part) for part in _parts(texts.ids)])
    first = np.cumsum(texts.lengths) - texts.lengths
    lengths = np.add.reduceat(sizes[texts.ids], first, dtype=np.int64)
    return Texts(ids, lengths, pairs.tokens, texts.dirt), pairs.merges
