"""lib.corpus: each rule on texts whose tensors are known by hand, bad input, the cache, BPE."""

import json
import os
import re

import pytest
import torch

from lib import corpus as module
from lib.corpus import load_corpus, sample_path, tokenize_words

STORIES = [
    "The cat sat on the mat.",
    "The cat ran.",
    "A dog sat on a cat.",
    "The dog ran and ran and ran.",
]
# Counts: . ran the 4, cat 3, a and dog on sat 2, mat 1.
WORDS = [".", "ran", "the", "cat", "a", "and", "dog", "on", "sat", "mat"]
FIRST_FOUR = [[2, 3, 8, 7], [2, 3, 1, 0], [4, 6, 8, 7], [2, 6, 1, 5]]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("LEADING_TERMS_CACHE", str(folder))
    return folder


@pytest.fixture
def write(tmp_path):
    def write(content, name="stories.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def joined(stories, separator="\n<|endoftext|>\n"):
    return separator.join(stories) + separator


@pytest.fixture
def stories(write):
    return write(joined(STORIES))


def fail(match, error=ValueError):
    return pytest.raises(error, match=match)


# --- tokenizer and vocabulary -------------------------------------------------------------------


def test_tokenizer():
    assert tokenize_words("Don't stop: 3.5 cats_2, „Ça va“!\r\n") == (
        ["don", "'", "t", "stop", ":", "3", ".", "5", "cats", "_", "2", ","]
        + ["„", "ça", "va", "“", "!"]
    )
    assert tokenize_words("she said, â€œno.â€") == (
        ["she", "said", ",", "â", "€", "œno", ".", "â", "€"]
    )
    assert tokenize_words(" \n\t\r\n") == []


def test_every_token_of_a_long_text_is_the_tokenizer_s(write):
    text = "One, TWO\r\nthree_4 \u2028Ünï\tİ x²\x1c\xa0ΑΣ ΣΑ. " * 3000 + "é" * 70_000 + " end"
    words = tokenize_words(text)
    corpus = load_corpus(write(joined([text])), vocab_size=len(set(words)), seq_len=len(words) - 1)
    assert corpus.decode(corpus.tokens[0]) == words


def test_vocabulary_by_count_then_word(stories):
    corpus = load_corpus(stories, vocab_size=10, seq_len=3)
    assert corpus.vocabulary == WORDS
    assert corpus.vocab_size == 10
    assert corpus.index == {word: i for i, word in enumerate(WORDS)}
    assert load_corpus(stories, vocab_size=7, seq_len=3, out_of_vocabulary="unk").vocabulary == (
        ["<unk>", *WORDS[:6]]
    )


def test_encode_and_decode(stories):
    drop = load_corpus(stories, vocab_size=10, seq_len=3)
    assert drop.encode("The mat.") == drop.encode(["the", "mat", "."]) == [2, 9, 0]
    assert drop.decode(torch.tensor([2, 9, 0])) == ["the", "mat", "."]
    with fail("'bird' is not among the 10 words"):
        drop.encode(["the", "bird"])
    unk = load_corpus(stories, vocab_size=5, seq_len=3, out_of_vocabulary="unk")
    assert unk.encode("the bird") == [3, 0]


# --- selection rules ----------------------------------------------------------------------------


def test_first_tokens_of_every_story(stories):
    corpus = load_corpus(stories, vocab_size=10, seq_len=3)
    assert corpus.tokens.dtype == corpus.held_out.dtype == torch.int64
    assert corpus.tokens.tolist() == FIRST_FOUR
    assert corpus.inputs.tolist() == [row[:3] for row in FIRST_FOUR]
    assert corpus.targets.tolist() == [row[1:] for row in FIRST_FOUR]
    assert corpus.held_out.shape == (0, 4)
    assert corpus.seq_len == 3


def test_short_stories_are_dropped_but_count_in_the_vocabulary(stories):
    corpus = load_corpus(stories, vocab_size=10, seq_len=6)
    assert corpus.tokens.tolist() == [
        [2, 3, 8, 7, 2, 9, 0],
        [4, 6, 8, 7, 4, 3, 0],
        [2, 6, 1, 5, 1, 5, 1],
    ]
    assert corpus.counts["too_short"] == 1
    assert corpus.vocabulary == WORDS


def test_drop_tests_the_whole_story(stories):
    corpus = load_corpus(stories, vocab_size=9, seq_len=3)
    # The first story leaves the vocabulary with its sixth token only.
    assert corpus.tokens.tolist() == FIRST_FOUR[1:]
    assert corpus.counts["out_of_vocabulary"] == 1


def test_drop_keeps_the_vocabulary_as_asked(stories):
    corpus = load_corpus(stories, vocab_size=4, seq_len=3)
    assert corpus.vocabulary == WORDS[:4]
    assert corpus.tokens.tolist() == [[2, 3, 1, 0]]


def test_unk_is_id_0_and_counts_within_the_vocabulary(stories):
    corpus = load_corpus(stories, vocab_size=5, seq_len=3, out_of_vocabulary="unk")
    assert corpus.vocabulary == ["<unk>", ".", "ran", "the", "cat"]
    assert corpus.tokens.tolist() == [[3, 4, 0, 0], [3, 4, 2, 1], [0, 0, 0, 0], [3, 0, 2, 0]]
    assert corpus.counts["tokens_outside_vocabulary"] == 11
    assert "<unk> in the sequences" in corpus.report() and "50.00%" in corpus.report()


def test_windows_do_not_overlap_and_stay_within_a_story(stories):
    corpus = load_corpus(stories, vocab_size=10, seq_len=2, pack="windows")
    assert corpus.tokens.tolist() == [
        [2, 3, 8],
        [7, 2, 9],
        [2, 3, 1],
        [4, 6, 8],
        [7, 4, 3],
        [2, 6, 1],
        [5, 1, 5],
    ]
    drop = load_corpus(stories, vocab_size=9, seq_len=2, pack="windows")
    assert drop.tokens.tolist() == corpus.tokens.tolist()[2:]


def test_a_text_without_separators_is_cut_into_windows(write):
    path = write(" ".join(STORIES))
    corpus = load_corpus(path, vocab_size=10, seq_len=4)
    words = tokenize_words(" ".join(STORIES))
    assert len(words) == 26
    assert corpus.decode(corpus.tokens.flatten()) == words[:25]
    assert re.search(r"no separators, cut into +5 windows of 5 tokens", corpus.report())
    # mat is in the second window, which alone is dropped
    drop = load_corpus(path, vocab_size=9, seq_len=4)
    assert drop.tokens.tolist() == corpus.tokens[[0, 2, 3, 4]].tolist()
    assert drop.counts["out_of_vocabulary"] == 1
    with fail("holdout=0.5 of the 1 texts"):
        load_corpus(path, vocab_size=9, seq_len=4, holdout=0.5)


# --- subset and held-out texts ------------------------------------------------------------------


def numbered(count, repeats=1, last=""):
    """Texts that say their own number in six binary digits, written as words."""
    digits = [format(i, "06b").replace("0", "zero ").replace("1", "one ") for i in range(count)]
    return [text * repeats + last.format(i) for i, text in enumerate(digits)]


def numbers(corpus, tokens):
    names = {corpus.index["zero"]: "0", corpus.index["one"]: "1"}
    return [int("".join(names[i] for i in row), 2) for row in tokens.tolist()]


def test_subset_is_random_in_corpus_order_and_decided_by_the_seed(write):
    path = write(joined(numbered(40)))
    chosen = {}
    for seed in (0, 1):
        corpus = load_corpus(path, vocab_size=2, seq_len=5, max_sequences=10, seed=seed)
        chosen[seed] = numbers(corpus, corpus.tokens)
        assert len(set(chosen[seed])) == 10
        assert chosen[seed] == sorted(chosen[seed])
        assert chosen[seed] != list(range(10))
        assert corpus.counts["available_sequences"] == 40
    assert chosen[0] != chosen[1]
    everything = load_corpus(path, vocab_size=2, seq_len=5, max_sequences=40)
    assert numbers(everything, everything.tokens) == list(range(40))


def test_subset_is_taken_after_the_rules(stories):
    corpus = load_corpus(stories, vocab_size=9, seq_len=3, max_sequences=3)
    assert corpus.tokens.tolist() == FIRST_FOUR[1:]


def test_held_out_sequences_come_from_other_texts(write):
    path = write(joined(numbered(40, repeats=3)))
    corpus = load_corpus(path, vocab_size=2, seq_len=5, pack="windows", holdout=0.25)
    held, kept = numbers(corpus, corpus.held_out), numbers(corpus, corpus.tokens)
    assert len(held) == 30 and len(kept) == 90
    assert not set(held) & set(kept)
    assert set(held) | set(kept) == set(range(40))
    assert held == sorted(held) and set(held) != set(range(10)) != set(range(30, 40))


def test_held_out_texts_do_not_count_in_the_vocabulary(write):
    path = write(joined(numbered(40, last="w{}")))
    texts = {f"{i}" for i in range(40)}
    settings = dict(seq_len=5, out_of_vocabulary="unk", holdout=0.25)
    corpus = load_corpus(path, vocab_size=34, **settings)
    held = {str(i) for i in numbers(corpus, corpus.held_out)}
    assert len(held) == 10
    assert set(corpus.vocabulary) == {"<unk>", "zero", "one", "w"} | (texts - held)
    with fail("it has 33 different tokens; choose 34 or less"):
        load_corpus(path, vocab_size=35, **settings)


def test_holdout_is_decided_by_the_seed_and_untouched_by_max_sequences(write):
    path = write(joined(numbered(40)))
    settings = dict(vocab_size=2, seq_len=5, holdout=0.25)
    whole = load_corpus(path, **settings)
    part = load_corpus(path, max_sequences=7, **settings)
    other = load_corpus(path, seed=1, **settings)
    assert len(part.tokens) == 7 and torch.equal(part.held_out, whole.held_out)
    assert not torch.equal(other.held_out, whole.held_out)


# --- sources ------------------------------------------------------------------------------------


def jsonl(texts):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts)


def parquet(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_three_formats_give_the_same_corpus(stories, write, tmp_path):
    settings = dict(vocab_size=9, seq_len=3)
    expected = load_corpus(stories, **settings)
    lines = write(jsonl(STORIES), "stories.jsonl")
    table = parquet(tmp_path / "stories.parquet", number=[1, 2, 3, 4], text=STORIES)
    for path in (lines, str(lines), table):
        corpus = load_corpus(path, **settings)
        assert corpus.tokens.tolist() == expected.tokens.tolist()
        assert corpus.vocabulary == expected.vocabulary
        assert corpus.fingerprint == expected.fingerprint
        assert corpus.source_name == os.path.basename(path)


def test_dirt_does_no_harm_and_is_counted(write, tmp_path):
    clean = load_corpus(write(joined(["a â€œbâ€ c", "d e f", "g"])), vocab_size=9, seq_len=2)
    dirty = "\r\n<|endoftext|>\r\n".join(["", "a â€œbâ€\r\nc", " \n", "d e f", "g", "", ""])
    path = write(b"\xef\xbb\xbf" + dirty.encode(), "dirty.txt")
    corpus = load_corpus(path, vocab_size=9, seq_len=2)
    assert corpus.fingerprint == clean.fingerprint
    expected = {
        "texts": 6,
        "empty": 3,
        "mis_encoded": 1,
        "carriage_returns": 3,
        "byte_order_mark": 1,
        "no_separators": 0,
        "too_short": 1,
    }
    assert {name: corpus.counts[name] for name in expected} == expected
    lines = '\ufeff{"text": "d e f"}\r\n\n{"text": ""}\n{"text": null}\n{"text": "d e f\\r\\n"}'
    corpus = load_corpus(write(lines, "dirty.jsonl"), vocab_size=3, seq_len=2)
    assert len(corpus.tokens) == 2 and corpus.counts["empty"] == 2
    table = parquet(tmp_path / "dirty.parquet", text=["d e f", None, "", "d e f"])
    corpus = load_corpus(table, vocab_size=3, seq_len=2)
    assert len(corpus.tokens) == 2 and corpus.counts["empty"] == 2


def test_separators_inside_a_line_and_at_the_end(write):
    plain = load_corpus(write(joined(STORIES)), vocab_size=10, seq_len=3)
    for text in ("<|endoftext|>".join(STORIES), joined(STORIES) + "<|endoftext|>\n\n"):
        assert load_corpus(write(text), vocab_size=10, seq_len=3).fingerprint == plain.fingerprint


def test_storyworld_expands_as_many_stories_as_needed(monkeypatch):
    calls = []

    def generate(num_stories, seed=0):
        calls.append((num_stories, seed))
        texts = numbered(64)
        return [texts[i % 64] if i % 2 else "short" for i in range(num_stories)]

    monkeypatch.setattr("lib.storyworld.generate", generate)
    corpus = load_corpus(seq_len=5, max_sequences=100, seed=7)
    assert corpus.vocabulary == ["one", "zero", "short"]  # the default of 1,000 means at most
    assert "asked for 1,000" in corpus.report()
    assert len(corpus.tokens) == 100 and corpus.counts["texts"] == 4000
    corpus = load_corpus(seq_len=5, max_sequences=3000, vocab_size=2)
    assert len(corpus.tokens) == 3000 and corpus.counts["available_sequences"] >= 3000
    assert load_corpus(seq_len=5, vocab_size=2).counts["available_sequences"] == 2000
    assert calls == [(4000, 7), (4000, 0), (6600, 0), (4000, 0)]
    load_corpus(seq_len=5, vocab_size=2)
    assert len(calls) == 4
    with fail("vocab_size=4 is larger than storyworld offers: it has 3"):
        load_corpus(seq_len=5, vocab_size=4)
    with fail("no story of storyworld is long enough"):
        load_corpus(seq_len=6, vocab_size=2, max_sequences=5)


def test_storyworld_itself():
    settings = dict(vocab_size=300, out_of_vocabulary="unk", max_sequences=64)
    corpus = load_corpus(**settings)
    assert corpus.tokens.shape == (64, 65) and corpus.vocab_size == 300
    assert corpus.source_name == "storyworld"
    assert corpus.fingerprint != load_corpus(**settings, seed=1).fingerprint
    default = load_corpus()
    assert len(default.tokens) > 2000 and 400 <= default.vocab_size <= 1000


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (dict(tokenizer="letters"), "tokenizer='letters': must be 'words' or 'bpe'"),
        (
            dict(tokenizer="bpe", vocab_size=255),
            "vocab_size=255: tokenizer='bpe' needs at least 256",
        ),
        (dict(tokenizer="bpe", out_of_vocabulary="keep"), "out_of_vocabulary='keep': must be"),
        (dict(out_of_vocabulary="keep"), "out_of_vocabulary='keep': must be 'drop' or 'unk'"),
        (dict(pack="all"), "pack='all': must be 'first' or 'windows'"),
        (dict(vocab_size=1), "vocab_size=1: must be an integer of at least 2"),
        (dict(vocab_size=9.0), "vocab_size=9.0: must be an integer"),
        (dict(seq_len=0), "seq_len=0: must be an integer of at least 1"),
        (dict(seq_len=True), "seq_len=True: must be an integer"),
        (dict(seed=-1), "seed=-1: must be an integer of at least 0"),
        (dict(max_sequences=0), "max_sequences=0: must be an integer of at least 1"),
        (dict(holdout=1), "holdout=1: must be a number of at least 0 and below 1"),
        (dict(holdout=-0.1), "holdout=-0.1: must be"),
        (dict(holdout=float("nan")), "holdout=nan: must be"),
        (dict(holdout="0.1"), "holdout='0.1': must be"),
        (dict(revision="abc"), "revision='abc': only sources from the hub"),
        (dict(max_sequences=5), "max_sequences=5 is more than there are: 4 sequences"),
        (dict(vocab_size=11), "it has 10 different tokens; choose 10 or less"),
        (
            dict(vocab_size=12, out_of_vocabulary="unk"),
            "it has 10 different tokens; choose 11 or less",
        ),
        (dict(seq_len=8), "needs 9 tokens and the longest has 8"),
        (dict(vocab_size=3, seq_len=5), "has a word outside the vocabulary of 3"),
        (dict(holdout=0.1), "holdout=0.1 of the 4 texts of stories.txt is 0"),
        (dict(holdout=0.9), "holdout=0.9 of the 4 texts of stories.txt is 4"),
        (
            dict(vocab_size=3, seq_len=5, holdout=0.25, out_of_vocabulary="unk", seed=1),
            "none of the 1 held-out texts gives a sequence",
        ),
    ],
)
def test_bad_parameters(stories, parameters, message):
    with fail(re.escape(message)) as error:
        load_corpus(stories, **{"vocab_size": 10, "seq_len": 3, **parameters})
    assert "\n" not in str(error.value)


def test_bad_sources(write, tmp_path):
    with fail("source='storyword' is not available; available are 'storyworld', 'sample', 'tiny"):
        load_corpus("storyword")
    with fail("source=None: available are"):
        load_corpus(None)
    with fail("source='': available are"):
        load_corpus("")
    with fail("revision='': must be a commit"):
        load_corpus("tinystories", revision="")
    with fail("nowhere.txt does not exist", FileNotFoundError):
        load_corpus(tmp_path / "nowhere.txt")
    with fail("cannot be read as a corpus; available are"):
        load_corpus(tmp_path)
    with fail("stories.csv cannot be read as a corpus"):
        load_corpus(write("a b c", "stories.csv"))
    with fail("is empty"):
        load_corpus(write(""))
    with fail("stories.txt holds no text, only blank space"):
        load_corpus(write("\n<|endoftext|>\n \n"))
    with fail("stories.jsonl holds no text"):
        load_corpus(write("\n", "stories.jsonl"))


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_not_utf_8_says_where(write, mark):
    with fail(f"stories.txt is not UTF-8: the byte at offset {len(mark) + 8} "):
        load_corpus(write(mark + "a ü\nb c".encode() + b"\xe9 d"))
    with fail(f"stories.jsonl is not UTF-8: the byte at offset {len(mark) + 25} "):
        load_corpus(write(mark + b'{"text": "a"}\n{"text": "b\xe9"}\n', "stories.jsonl"))


@pytest.mark.parametrize("line", ['{"text": "a', '{"texts": "a"}', '["text"]', '{"text": 3}', "7"])
def test_broken_line_of_jsonl(write, line):
    path = write('{"text": "a b"}\n\n' + line + '\n{"text": "a b"}\n', "stories.jsonl")
    with fail("line 3 of stories.jsonl is not a JSON object"):
        load_corpus(path)


def test_bad_parquet(write, tmp_path):
    with fail("no column .text. of strings \\(its columns: story, number\\)"):
        load_corpus(parquet(tmp_path / "a.parquet", story=["a"], number=[1]))
    with fail("no column .text. of strings"):
        load_corpus(parquet(tmp_path / "b.parquet", text=[1]))
    with fail("c.parquet is not a parquet file"):
        load_corpus(write("text", "c.parquet"))


# --- byte-level BPE -----------------------------------------------------------------------------


@pytest.fixture
def bpe():
    pytest.importorskip("tokenizers")
    return dict(tokenizer="bpe", seq_len=3)


def test_bpe_by_hand(write, bpe):
    # ` a` 4 times, ` ab` 3 times: ␣a is the first merge (7), ␣ab the second (3).
    corpus = load_corpus(write(joined(["a ab ab a", "a ab a"])), vocab_size=258, **bpe)
    assert corpus.vocabulary[:2] == ["␣a", "␣ab"] and corpus.vocab_size == 258
    assert corpus.merges == ["Ġ a", "Ġa b"]
    assert corpus.tokens.tolist() == [[0, 1, 1, 0]]
    assert corpus.counts["too_short"] == 1 and corpus.counts["different_tokens"] == 2
    assert corpus.decode(corpus.encode("A ab\nba")) == ["␣", "A", "␣ab", "␣", "b", "a"]
    assert corpus.encode(["␣ab", "b"]) == [1, corpus.index["b"]]
    # What occurs nowhere follows, each of the 256 bytes included.
    assert corpus.vocabulary[2:] == sorted(corpus.vocabulary[2:])
    assert len(set(corpus.vocabulary)) == 258


def test_every_text_of_bpe_that_is_long_enough_is_kept_whole(stories, bpe):
    corpus = load_corpus(stories, vocab_size=270, **bpe)
    assert len(corpus.tokens) == 4 and corpus.counts["out_of_vocabulary"] == 0
    texts = ["".join(corpus.split(story)).replace("␣", " ")[1:] for story in STORIES]
    assert texts == STORIES
    for row, story in zip(corpus.tokens, STORIES, strict=True):
        assert corpus.decode(row) == corpus.split(story)[:4]
    windows = load_corpus(stories, vocab_size=270, pack="windows", **bpe)
    assert windows.decode(windows.tokens[:3].flatten()) == corpus.split(STORIES[0])[:12]


def test_out_of_vocabulary_changes_nothing_for_bpe(stories, cache, bpe):
    drop = load_corpus(stories, vocab_size=270, out_of_vocabulary="drop", **bpe)
    unk = load_corpus(stories, vocab_size=270, out_of_vocabulary="unk", **bpe)
    assert equal(drop, unk) and drop.fingerprint == unk.fingerprint
    assert len(list(cache.iterdir())) == 1
    assert drop.settings["out_of_vocabulary"] is None
    assert "<unk>" not in drop.vocabulary and "<unk>" not in drop.report()
    assert "270, the 256 bytes and what 14 merges make of them" in drop.report()
    assert "outside" not in drop.report() and "dropped whole" not in drop.report()


def test_bpe_learns_from_texts_that_are_not_held_out(write, bpe):
    path = write(joined([f"w{letter} " * 6 for letter in "abcdef"]))
    corpus = load_corpus(path, vocab_size=260, holdout=0.5, **bpe)
    with fail("merging byte pairs ends with 260"):
        load_corpus(path, vocab_size=261, holdout=0.5, **bpe)
    kept = {corpus.decode(row)[0] for row in corpus.tokens}
    assert len(corpus.tokens) == len(corpus.held_out) == len(kept) == 3
    first, *others = corpus.merges
    assert first == "Ġ w" and {merge.replace("Ġw ", "␣w") for merge in others} == kept
    for row in corpus.held_out:
        assert corpus.decode(row)[0] == "␣w"


def test_a_text_without_separators_is_cut_into_windows_of_byte_pairs(write, bpe):
    corpus = load_corpus(write("ab " * 30), vocab_size=258, **bpe)
    assert corpus.tokens.shape == (7, 4) and corpus.decode(corpus.tokens[0]) == ["␣ab"] * 4


def test_more_byte_pairs_than_the_source_has(stories, bpe):
    message = (
        "vocab_size=999 is larger than stories.txt offers: merging byte pairs ends with 2[0-9]+ "
    )
    with fail(message) as error:
        load_corpus(stories, vocab_size=999, **bpe)
    most = int(re.search(r"choose (\d+) or less$", str(error.value))[1])
    assert len(load_corpus(stories, vocab_size=most, **bpe).vocabulary) == most
    with fail(f"vocab_size={most + 1} is larger"):
        load_corpus(stories, vocab_size=most + 1, **bpe)


def test_cache_of_bpe(stories, cache, builds, bpe):
    first = load_corpus(stories, vocab_size=270, **bpe)
    second = load_corpus(stories, vocab_size=270, **bpe)
    assert len(builds) == 1 and equal(first, second) and first.merges == second.merges
    assert second.encode("The mat.") == first.encode("The mat.")
    load_corpus(stories, vocab_size=9, seq_len=3)
    load_corpus(stories, vocab_size=271, **bpe)
    assert len(builds) == len(list(cache.iterdir())) == 3


def test_fingerprint_of_bpe_depends_on_the_merges(write, bpe):
    """Tokens alike, merges not: the last one is never used in what is kept."""
    texts = ["a a a a", "pq", "rs"]
    corpora = [
        load_corpus(write(joined([texts[0], *tail])), vocab_size=257 + 1, **bpe)
        for tail in (["pq"], ["rs"])
    ]
    a, b = corpora
    assert a.tokens.tolist() == b.tokens.tolist() == [[0, 0, 0, 0]]
    assert a.fingerprint != b.fingerprint
    a.vocabulary[:] = b.vocabulary
    selected = [
        module._Selected(c.tokens.numpy(), c.held_out.numpy(), b.vocabulary, {}, c.merges)
        for c in corpora
    ]
    prints = [module._fingerprint(s.tokens, s) for s in selected]
    assert prints[0] != prints[1] == b.fingerprint


def test_storyworld_in_byte_pairs(bpe):
    corpus = load_corpus(vocab_size=500, **{**bpe, "seq_len": 64})
    assert corpus.vocab_size == 500 and len(corpus.tokens) == 4000
    assert 250 < corpus.counts["different_tokens"] < 320
    assert corpus.decode(corpus.tokens[0])[:4] == ["␣Once", "␣upon", "␣a", "␣time"]


def test_sample_in_byte_pairs(sample, bpe):
    corpus = load_corpus(sample, vocab_size=1000, **{**bpe, "seq_len": 64})
    assert corpus.vocab_size == 1000 and corpus.tokens.shape == (5058, 65)
    assert corpus.counts["too_short"] == 453 and corpus.counts["tokens"] == 1_292_908
    assert len(corpus.merges) == 744 and corpus.counts["different_tokens"] == 799
    assert corpus.vocabulary[:6] == [".", "␣the", "␣and", ",", "␣to", "␣a"]


# --- cache --------------------------------------------------------------------------------------


@pytest.fixture
def builds(monkeypatch):
    """The list that grows whenever a corpus is built rather than read from the cache."""
    calls, build = [], module._build
    monkeypatch.setattr(module, "_build", lambda *args: calls.append(args) or build(*args))
    return calls


def equal(a, b):
    return (
        torch.equal(a.tokens, b.tokens)
        and torch.equal(a.held_out, b.held_out)
        and a.vocabulary == b.vocabulary
        and a.report() == b.report()
        and a.settings == b.settings
    )


def test_cache_hit(stories, cache, builds):
    settings = dict(vocab_size=5, seq_len=3, out_of_vocabulary="unk", holdout=0.25, seed=1)
    first = load_corpus(stories, **settings)
    assert [path.suffix for path in cache.iterdir()] == [".safetensors"]
    second = load_corpus(stories, **settings)
    assert len(builds) == 1
    assert equal(first, second) and second.tokens.dtype == torch.int64
    renamed = stories.rename(stories.with_name("other.txt"))
    third = load_corpus(renamed, **settings)
    assert len(builds) == 1 and third.source_name == "other.txt"


def test_each_setting_and_each_content_has_its_own_file(stories, write, cache):
    base = dict(vocab_size=9, seq_len=3)
    changes = [
        dict(),
        dict(vocab_size=8),
        dict(seq_len=2),
        dict(max_sequences=2),
        dict(out_of_vocabulary="unk"),
        dict(pack="windows"),
        dict(holdout=0.25, out_of_vocabulary="unk"),
        dict(seed=1),
    ]
    for number, change in enumerate(changes, start=1):
        load_corpus(stories, **{**base, **change})
        assert len(list(cache.iterdir())) == number
    before = load_corpus(stories, **base)
    after = load_corpus(write(joined(STORIES[1:])), **base)
    assert len(before.tokens) == 3 == len(after.tokens)
    assert before.fingerprint != after.fingerprint
    assert len(list(cache.iterdir())) == len(changes) + 1


def test_fingerprint_is_of_the_content(stories):
    base = load_corpus(stories, vocab_size=10, seq_len=3)
    assert re.fullmatch("[0-9a-f]{64}", base.fingerprint)
    same = load_corpus(stories, vocab_size=10, seq_len=3, max_sequences=4, seed=5)
    assert same.fingerprint == base.fingerprint
    for change in (dict(seq_len=2), dict(vocab_size=9), dict(max_sequences=3)):
        other = load_corpus(stories, **{"vocab_size": 10, "seq_len": 3, **change})
        assert other.fingerprint != base.fingerprint


def test_damaged_cache_is_made_again(stories, cache, builds):
    first = load_corpus(stories, vocab_size=9, seq_len=3)
    (path,) = cache.iterdir()
    good = path.read_bytes()
    assert good.count(b"kept_texts") == 1
    damages = [
        b"",
        b"rubbish",
        good[:-1],
        good[:-1] + bytes([good[-1] ^ 1]),  # one token
        good.replace(b"kept_texts", b"kept_texus"),  # the record
    ]
    for number, damaged in enumerate(damages, start=2):
        assert damaged != good
        path.write_bytes(damaged)
        assert equal(load_corpus(stories, vocab_size=9, seq_len=3), first)
        assert len(builds) == number
        assert path.read_bytes() == good
    load_corpus(stories, vocab_size=9, seq_len=3)
    assert len(builds) == len(damages) + 1


def test_interrupted_write_leaves_no_cache_file(stories, cache, monkeypatch):
    def save_file(tensors, path, header):
        with open(path, "wb") as file:
            file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(module, "save_file", save_file)
    with pytest.warns(UserWarning, match="No space left on device.*LEADING_TERMS_CACHE"):
        corpus = load_corpus(stories, vocab_size=9, seq_len=3)
    assert corpus.tokens.tolist() == FIRST_FOUR[1:]
    assert list(cache.iterdir()) == []


def test_two_runs_write_the_same_bytes(stories, tmp_path, monkeypatch):
    written = []
    for name in ("one", "two"):
        monkeypatch.setenv("LEADING_TERMS_CACHE", str(tmp_path / name))
        load_corpus(stories, vocab_size=9, seq_len=3)
        (path,) = (tmp_path / name).iterdir()
        written.append(path.read_bytes())
    assert written[0] == written[1]


# --- the real sample ----------------------------------------------------------------------------


def test_sample_path(monkeypatch, tmp_path, write):
    monkeypatch.setenv("LEADING_TERMS_SAMPLE", str(tmp_path / "absent.txt"))
    assert sample_path() is None
    with fail("sample is not on this machine: set LEADING_TERMS_SAMPLE", FileNotFoundError):
        load_corpus("sample")
    path = write(joined(STORIES))
    monkeypatch.setenv("LEADING_TERMS_SAMPLE", str(path))
    assert sample_path() == path
    assert load_corpus("sample", vocab_size=10, seq_len=3).tokens.tolist() == FIRST_FOUR


@pytest.fixture
def sample():
    path = sample_path()
    if path is None:
        pytest.skip("the TinyStories sample is absent: set LEADING_TERMS_SAMPLE to its path")
    return path


def test_sample_report(sample):
    corpus = load_corpus(sample, out_of_vocabulary="unk")
    expected = {
        "texts": 5511,
        "tokens": 978_936,
        "different_tokens": 7854,
        "mis_encoded": 448,
        "too_short": 513,
        "kept_texts": 4998,
    }
    assert {name: corpus.counts[name] for name in expected} == expected
    assert corpus.tokens.shape == (4998, 65)
    assert corpus.source_name == "TinyStories sample (5,511 stories)"
    report = corpus.report()
    for text in ("5,511", "978,936", "7,854", "4,998 of 65 tokens", corpus.fingerprint):
        assert text in report


@pytest.mark.parametrize(
    ("seq_len", "unk", "drop"), [(200, 1540, 149), (128, 4525, 778), (64, 4998, 931)]
)
def test_sample_selection(sample, seq_len, unk, drop):
    settings = dict(vocab_size=3000, seq_len=seq_len)
    assert len(load_corpus(sample, out_of_vocabulary="unk", **settings).tokens) == unk
    assert len(load_corpus(sample, **settings).tokens) == drop
