"""lib.sources: sets of the hub, with the loader replaced, whole and streamed; the sample's recipe."""

import re
from itertools import islice

import pytest

from lib import corpus, sources
from lib.corpus import load_corpus
from lib.sources import HUB, sample_path

STORIES = [
    "The cat sat on the mat.",
    "The cat ran.",
    "A dog sat on a cat.",
    "The dog ran and ran and ran.",
]
SETTINGS = dict(vocab_size=9, seq_len=3)


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


@pytest.fixture
def hub(datasets, monkeypatch):
    """Puts texts in the place of the hub; returns what was asked for, and how many were fetched."""

    def put(texts):
        asked = []

        def load_dataset(name, config, *, split, revision, streaming):
            asked.append((name, config, split, revision, streaming))
            if not streaming:
                return datasets.Dataset.from_dict({"text": texts})

            def rows():
                for fetched, text in enumerate(texts, start=1):
                    asked[-1] = (*asked[-1][:5], fetched)
                    yield {"text": text, "url": "…"}

            return datasets.IterableDataset.from_generator(rows)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    return put


def test_a_set_that_is_fetched_whole(hub, tmp_path):
    asked = hub([*STORIES, None])
    file = tmp_path / "stories.txt"
    file.write_text("<|endoftext|>".join(STORIES))
    read = load_corpus("tinystories", **SETTINGS)
    assert read.fingerprint == load_corpus(file, **SETTINGS).fingerprint
    assert read.source_name == "roneneldan/TinyStories, train, revision f54c09f"
    assert read.counts["empty"] == 1
    load_corpus("tinystories", **SETTINGS)  # from the cache
    load_corpus("tinystories", revision="abc", **SETTINGS)
    pinned = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"
    assert asked == [
        ("roneneldan/TinyStories", None, "train", revision, False) for revision in (pinned, "abc")
    ]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("openwebtext", "Skylion007/openwebtext, train, revision 79d93d7"),
        ("fineweb", "HuggingFaceFW/fineweb, sample-10BT, train, revision 9bb295d"),
    ],
)
def test_a_large_set_is_streamed_only_as_far_as_needed(hub, monkeypatch, source, name):
    monkeypatch.setattr(corpus, "FIRST_TEXTS", 2000)
    # Of four texts one is too short: 3,000 sequences need about 4,000 texts.
    texts = [text if i % 4 else "Short." for i, text in enumerate(STORIES * 5000)]
    asked = hub(texts)
    settings = dict(vocab_size=4, seq_len=3, out_of_vocabulary="unk", pack="first")
    read = load_corpus(source, max_sequences=3000, **settings)
    assert read.source_name == name
    assert read.tokens.shape == (3000, 4)
    assert read.counts["texts"] == 4400  # 1.1 × 2,000 × 3,000 / 1,500
    repository, config, split, revision, large = HUB[source]
    assert large and re.fullmatch("[0-9a-f]{40}", revision)
    (one,) = asked
    assert one[:5] == (repository, config, split, revision, True)
    assert 4400 <= one[5] < 4400 + 1024  # read on to the end of a batch
    load_corpus(source, max_sequences=10, **settings)
    assert len(asked) == 2 and asked[1][5] < 2000 + 1024
    load_corpus(source, max_sequences=3000, **settings)  # from the cache
    assert len(asked) == 2


def test_a_large_set_that_ends_before_there_are_enough(hub):
    hub(STORIES * 10)
    assert len(load_corpus("fineweb", max_sequences=30, **SETTINGS).tokens) == 30
    with pytest.raises(ValueError, match="max_sequences=31 is more than there are: 30 sequences"):
        load_corpus("fineweb", max_sequences=31, **SETTINGS)


@pytest.mark.parametrize("source", ["openwebtext", "fineweb"])
def test_a_large_set_is_not_read_whole(hub, source):
    asked = hub(STORIES)
    with pytest.raises(ValueError, match=f"source='{source}' is too large .* give max_sequences"):
        load_corpus(source, **SETTINGS)
    assert asked == []


def test_a_large_set_in_byte_pairs(hub):
    pytest.importorskip("tokenizers")
    hub(STORIES * 10)
    read = load_corpus("openwebtext", tokenizer="bpe", vocab_size=270, seq_len=3, max_sequences=40)
    assert read.decode(read.tokens[0]) == read.split(STORIES[0])[:4]


@pytest.mark.parametrize("source", [*HUB])
def test_without_a_network(datasets, monkeypatch, source):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route\nsecond line")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        ConnectionError, match="cannot be fetched .*no route.*use the TinyStories sample"
    ) as error:
        load_corpus(source, max_sequences=5)
    assert "\n" not in str(error.value)


def test_a_network_that_breaks_off(datasets, monkeypatch):
    def rows():
        yield from ({"text": text} for text in islice(STORIES * 2000, 3000))
        raise OSError("reset by peer")

    def load_dataset(*args, **kwargs):
        return datasets.IterableDataset.from_generator(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ConnectionError, match="fineweb at revision 9bb2.* .*reset by peer"):
        load_corpus("fineweb", max_sequences=5)


def test_recipe_for_the_sample(datasets, monkeypatch, tmp_path, capsys):
    """The code in data/README.md makes the very file out of its own stories, and says so."""
    sample = sample_path()
    if sample is None:
        pytest.skip("the TinyStories sample is absent: set LEADING_TERMS_SAMPLE to its path")
    stories = sample.read_text(encoding="utf-8").split("<|endoftext|>")[:-1]
    rows = [{"text": text.capitalize()} for text in stories] + [{"text": "One more."}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: iter(rows))
    monkeypatch.chdir(tmp_path)
    readme = (sources.REPOSITORY / "data" / "README.md").read_text(encoding="utf-8")
    exec(re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1], {})
    made = tmp_path / "data" / "cache" / "tinystories-sample.txt"
    assert made.read_bytes() == sample.read_bytes()
    assert capsys.readouterr().out.strip() in readme
    assert sources.SAMPLE_SHA256 in readme


@pytest.mark.parametrize("source", [*HUB])
def test_readme_names_what_is_pinned(source):
    readme = (sources.REPOSITORY / "data" / "README.md").read_text(encoding="utf-8")
    assert HUB[source].repository in readme and HUB[source].revision in readme
    assert (HUB[source].config or "") in readme
