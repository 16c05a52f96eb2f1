"""lib.tokenizers: byte-level BPE against a slow one, on text of every kind. Words: test_corpus."""

import os
import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from lib.tokenizers import BYTE_OF, BytePairs, in_byte_pairs, number, readable

pytest.importorskip("tokenizers")
WORDS = {"low": 5, "lower": 2, "newest": 6, "widest": 3, "Zoë's": 4, "no.": 1, "€5,": 2}


def train(vocab_size=280, words=None):
    words = WORDS if words is None else words
    return BytePairs.train(words, words.values(), vocab_size)


def slow_merges(words, number):
    """The most frequent pair, again and again, from lists of bytes; equal counts must not occur."""
    name = {byte: letter for letter, byte in BYTE_OF.items()}
    cut = {word: [name[byte] for byte in f" {word}".encode()] for word in words}
    merges = []
    for _ in range(number):
        pairs = Counter()
        for word, tokens in cut.items():
            for pair in pairwise(tokens):
                pairs[pair] += words[word]
        (best, count), *others = pairs.most_common(2)
        assert all(other < count for _, other in others), "a tie"
        merges.append(" ".join(best))
        for tokens in cut.values():
            for i in range(len(tokens) - 1):
                if tuple(tokens[i : i + 2]) == best:
                    tokens[i : i + 2] = ["".join(best)]
    return merges


def test_merges_are_the_most_frequent_pairs():
    words = {"ab": 100, "cab": 60, "bcab": 30, "zé": 44, "éc": 25, "ze": 3}
    merges = train(256 + 5, words).merges
    assert merges == slow_merges(words, 5)
    assert merges == ["a b", "Ġ ab", "c ab", "Ã ©", "Ġ cab"]


def test_cutting_follows_the_merges():
    pairs = BytePairs(["Ġ l", "o w", "Ġl ow"])
    assert pairs.split("low lower\n\t slow") == ["␣low", "␣low", "e", "r", "␣", "s", "l", "ow"]
    assert pairs.tokens[256:] == ["␣l", "ow", "␣low"]
    assert pairs.ids(["low"]) == [[258]]


def test_any_text_is_written_and_read_back():
    pairs = train()
    text = "Zoë said: „low-er“ ☃\u2028 \U0001f600 ␣ <0xE2> naïve\x00\xad 東京"
    tokens = pairs.split(text)
    data = b"".join(
        bytes(BYTE_OF[letter] for letter in pairs._raw[pairs.tokens.index(token)])
        for token in tokens
    )
    assert data.decode() == "".join(f" {word}" for word in text.split())
    assert pairs.split("") == pairs.split(" \n") == []
    assert pairs.split("a\ud800b") == ["␣", "a", "?", "b"]


def test_no_two_tokens_look_alike():
    words = {"é€☃␣": 9, "<0xE2>": 9, "a␣b": 9, "\x00\x01": 9, "東京": 9, "\u200b": 9}
    tokens = train(300, words | WORDS).tokens
    assert len(set(tokens)) == len(tokens) == 300
    assert all(token.isprintable() and " " not in token for token in tokens)


def test_readable():
    assert readable("Ġthe") == "␣the" and readable("Ċ") == "<0x0A>"
    name = {byte: letter for letter, byte in BYTE_OF.items()}
    spell = lambda data: "".join(name[byte] for byte in data)  # noqa: E731
    assert readable(spell(" é".encode())) == "␣é"
    assert readable(spell("é".encode()[:1])) == "<0xC3>"
    assert readable(spell("␣".encode())) == "<0xE2><0x90><0xA3>"
    assert readable(spell(b"\x80 a")) == "<0x80>␣a"


def test_letters_for_bytes_are_the_package_s():
    from tokenizers import pre_tokenizers

    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(BYTE_OF.values()) == list(range(256))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in ("é", "\x00", "€", "\n", "~", "ÿ"):
        letters = "".join(part for part, _ in whole.pre_tokenize_str(text))
        assert bytes(BYTE_OF[letter] for letter in letters) == text.encode()


def test_order_of_words_and_number_of_threads_change_nothing():
    program = """
import random, sys
from lib.storyworld import generate
from lib.tokenizers import BytePairs
from collections import Counter
words = list(Counter(" ".join(generate(300)).split()).items())
random.Random(int(sys.argv[1])).shuffle(words)
print("\\n".join(BytePairs.train(*zip(*words), 900).merges))
"""
    found = []
    for seed, threads in ((0, "1"), (1, "4")):
        environment = os.environ | {"RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", program, str(seed)]
        found.append(subprocess.run(command, env=environment, capture_output=True, check=True))
    assert found[0].stdout == found[1].stdout and len(found[0].stdout.split(b"\n")) > 600


def test_words_that_occur_often_are_counted_in_full():
    assert train(257, {"ab": 5000, "cd": 4999}).merges == ["a b"]
    assert train(257, {"ab": 4999, "cd": 5000}).merges == ["c d"]


def test_whole_corpora_are_cut_like_single_texts():
    random_ = random.Random(0)
    stories = [" ".join(random_.choices([*WORDS], k=k)) for k in (7, 1, 12, 3)]
    pieces = number(
        [stories[0], " \n", *stories[1:]],
        dict.fromkeys(["empty", "mis_encoded", "carriage_returns"], 0),
        "bpe",
    )
    texts, merges = in_byte_pairs(pieces, np.array([True, True, False, True]), 262)
    assert texts.dirt["empty"] == 1 and texts.ids.dtype == np.int32
    pairs = BytePairs(merges)
    ends = np.cumsum(texts.lengths)
    for story, start, end in zip(stories, ends - texts.lengths, ends, strict=True):
        assert [texts.words[i] for i in texts.ids[start:end]] == pairs.split(story)
    counts = Counter(" ".join(stories[:2] + stories[3:]).split())
    assert merges == BytePairs.train(counts, counts.values(), 262).merges
