"""The embedded corpus: short children's stories expanded from a grammar, with known associations.

The sentences and word lists stand in data/storyworld.toml, which explains its own format; this module
only expands them. A story is one outline filled in: a main character, a scene, a plot, a friend. Every
story has its own random stream, seeded by (seed, index), so a longer corpus begins with the shorter
one, and holding a pair of words out replaces the stories that have both and leaves all others as they
were. Only `random.Random.random` is used, whose values are the same in every version of Python.

Three kinds of association are planted, and `truth()` names them:
collocations, a word and the one that always follows it; classes, words that take turns in one slot
and so share predecessors; scenes, a place and the words that come up there, never next to it.
"""

import random
import re
import tomllib
from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations
from pathlib import Path

import numpy as np

DEFAULT_PATH = Path(__file__).resolve().parent.parent / "data" / "storyworld.toml"
TOKEN = re.compile(r"[^\W\d_]+|\d+|\S")  # the words tokenizer of lib.corpus, which this may not import
SLOT = re.compile(r"\{(\w+)\}")
A_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")
ATTEMPTS = 1000  # redraws of one story before giving up
PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}

Template = tuple[tuple[str, str | None], ...]  # (text, slot that follows it or None), …
Options = tuple[list[float], list[Template]]  # cumulative weights that end at 1, and what they choose


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar. Made by `load_grammar`, never changed.

    `lists` is what every story can draw from; `scenes` and `plots` name the lists that a story of
    that scene or plot has besides, and before, those. `outlines` are sequences of names of lists.
    """

    lists: dict[str, Options]
    scenes: dict[str, dict[str, Options]]
    plots: dict[str, dict[str, Options]]
    outlines: list[list[str]]
    keep: frozenset[str]
    scene_weights: list[float]
    plot_weights: list[float]
    outline_weights: list[float]
    truth: dict


@lru_cache(maxsize=8)
def load_grammar(path: str | Path | None = None) -> Grammar:
    """Read and compile a grammar, data/storyworld.toml unless a path is given.

    Raises FileNotFoundError if there is no such file, ValueError if it is not TOML, lacks a table, has
    a list that is empty or not of strings, or a sentence names a list that does not exist.
    """
    path = Path(path or DEFAULT_PATH)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid TOML: {error}; mend that place") from None
    missing = {"zipf", "keep", "outline", "hold_out", "collocations", "classes", "words", "sentences"}
    missing = sorted((missing | {"plots", "scenes"}) - raw.keys())
    if missing:
        raise ValueError(f"{path.name} lacks {', '.join(missing)}; add what is missing")

    def weights(count: int) -> list[float]:
        single = [(k + 1) ** -raw["zipf"] for k in range(count)]
        return [round(total / sum(single), 12) for total in accumulate(single)]

    def compiled(tables: dict) -> dict[str, Options]:
        for name, texts in tables.items():
            if not (isinstance(texts, list) and texts and all(isinstance(t, str) for t in texts)):
                raise ValueError(f"{path.name}: {name!r} must be a list of strings that is not empty")
        return {name: (weights(len(t)), [_compile(text) for text in t]) for name, t in tables.items()}

    slots = {name: words for table in raw["classes"].values() for name, words in table.items()}
    lists = compiled({**slots, **raw["collocations"], **raw["words"], **raw["sentences"]})
    scenes = {
        cue: compiled({k: [v] if isinstance(v, str) else v for k, v in table.items() if k != "words"})
        for cue, table in raw["scenes"].items()
    }
    plots = {name: compiled(table) for name, table in raw["plots"].items()}
    outlines = [outline.split() for outline in raw["outline"]]
    _check_slots(path.name, lists, scenes, plots, outlines)
    return Grammar(
        lists,
        scenes,
        plots,
        outlines,
        frozenset(raw["keep"]),
        weights(len(scenes)),
        weights(len(plots)),
        weights(len(outlines)),
        _truth(raw),
    )


def generate(
    num_stories: int,
    seed: int = 0,
    *,
    hold_out: tuple[tuple[str, str], ...] = (),
    grammar: Grammar | None = None,
) -> list[str]:
    """Expand `num_stories` different stories. Their first k are `generate(k, seed)`.

    hold_out: (cue, word) pairs, each a scene and one of its words that also occurs in another scene;
        no story has both. The stories that do not have both are the same as without `hold_out`.

    Raises ValueError for a number below 1, a bad seed, a pair that cannot be held out, or a grammar
    too small for so many different stories.
    """
    for name, value, least in [("num_stories", num_stories, 1), ("seed", seed, 0)]:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")
    grammar = grammar or load_grammar()
    pairs = _check_hold_out(grammar, hold_out)
    stories: dict[str, None] = {}  # a set that keeps its order
    for index in range(num_stories):
        rng = random.Random(f"{seed}/{index}")
        cue = list(grammar.scenes)[bisect(grammar.scene_weights, rng.random())]
        for _ in range(ATTEMPTS):
            story = _expand(grammar, cue, rng)
            if story not in stories and not (pairs and _has_pair(story, pairs)):
                break
        else:
            raise ValueError(
                f"the grammar offers no further story about the {cue} after {index} stories; ask for "
                "fewer stories, hold out less, or add sentences to the grammar"
            )
        stories[story] = None
    return list(stories)


def truth(grammar: Grammar | None = None) -> dict:
    """What is planted, in lower case: a fresh copy of the truth tables.

    "collocations": [(word, the word that follows it), …]; "classes": name -> members;
    "scenes": cue -> words; "hold_out": (cue, word) pairs meant for `generate`. The tables name all
    that the grammar plants, whether or not a pair was held out of a corpus.
    """
    tables = (grammar or load_grammar()).truth
    return {
        name: {key: list(words) for key, words in table.items()} if isinstance(table, dict) else list(table)
        for name, table in tables.items()
    }


def planted_pairs(tables: dict) -> dict[str, list[tuple[str, str]]]:
    """Pairs (word, partner) of each kind from `truth()`: what a mapping should find.

    Of a class, each pair of members both ways; of a scene, (cue, word).
    """
    classes = [pair for words in tables["classes"].values() for pair in combinations(words, 2)]
    return {
        "collocations": list(tables["collocations"]),
        "classes": classes + [(b, a) for a, b in classes],
        "scenes": [(cue, word) for cue, words in tables["scenes"].items() for word in words],
    }


def separation(scores, frequency, vocabulary, pairs, *, rivals: int = 20) -> float:
    """How well `scores` [word, partner] tells planted pairs from others: 1 always, 0.5 by chance.

    Each pair (word, partner) meets (word, rival) for the `rivals` words nearest to the partner in
    `frequency` [V] that are not planted with the word. The result is the share of such meetings in
    which the planted pair scores higher, ties counting half: an area under the ROC curve, matched
    for frequency. Pairs with a word outside `vocabulary` are left out.
    """
    scores, frequency = np.asarray(scores), np.asarray(frequency)
    index = {word: i for i, word in enumerate(vocabulary)}
    found = [(index[a], index[b]) for a, b in pairs if a in index and b in index]
    planted: dict[int, set[int]] = {}
    for a, b in found:
        planted.setdefault(a, {a}).add(b)
    wins = []
    for a, b in found:
        near = np.argsort(abs(np.log(frequency + 1e-12) - np.log(frequency[b] + 1e-12)), kind="stable")
        rival = [j for j in near[: rivals + len(planted[a])] if j not in planted[a]][:rivals]
        wins.append(np.mean((scores[a, b] > scores[a, rival]) + 0.5 * (scores[a, b] == scores[a, rival])))
    return float(np.mean(wins))


# --- compiling and expanding ---------------------------------------------------------------------


def _compile(text: str) -> Template:
    pieces = SLOT.split(text)  # text, slot, text, …, text
    return tuple(zip(pieces[::2], [*pieces[1::2], None], strict=True))


def _check_slots(name: str, lists: dict, scenes: dict, plots: dict, outlines: list) -> None:
    """Every slot of every story that can be drawn has a list, and no list leads back to itself."""
    character = [f"{who}{case}" for who in ("", "pal_") for case in ("he", "him", "his", "kind")]
    bound = {*character, "He", "His", "hero", "pal", "cue"}

    def visit(slot: str, tables: dict, inside: tuple[str, ...]) -> None:
        if slot in inside or slot not in tables:
            fault = "leads back to itself" if slot in inside else "names no list"
            raise ValueError(f"{name}: {{{slot}}}, used in {inside[-1]!r}, {fault}; mend the sentence")
        if slot not in done:
            for template in tables[slot][1]:
                for _, inner in template:
                    if inner and inner not in bound:
                        visit(inner, tables, (*inside, slot))
            done.add(slot)

    for scene in scenes.values():
        for plot in plots.values():
            done: set[str] = set()
            for slot in {"name_he", "name_she", "kind_he", "kind_she", "animal"}.union(*outlines):
                visit(slot, {**lists, **plot, **scene}, ("outline",))


def _truth(raw: dict) -> dict:
    pairs = [text.lower().split() for texts in raw["collocations"].values() for text in texts]
    classes = {
        name: [word.lower() for words in table.values() for word in words]
        for name, table in raw["classes"].items()
    }
    return {
        "collocations": [tuple(pair) for pair in pairs],
        "classes": classes,
        "scenes": {cue: table["words"] for cue, table in raw["scenes"].items()},
        "hold_out": [tuple(pair) for pair in raw["hold_out"]],
    }


def _check_hold_out(grammar: Grammar, hold_out) -> list[set[str]]:
    scenes = grammar.truth["scenes"]
    for cue, word in hold_out:
        if cue not in scenes or word not in scenes[cue]:
            raise ValueError(f"hold_out: ({cue!r}, {word!r}) is no scene with one of its words; see truth()")
        if not any(word in words for other, words in scenes.items() if other != cue):
            raise ValueError(
                f"hold_out: {word!r} occurs in no other scene than {cue!r} and would vanish; choose a "
                "word that two scenes share, such as those in truth()['hold_out']"
            )
    return [{cue, word} for cue, word in hold_out]


def _has_pair(story: str, pairs: list[set[str]]) -> bool:
    words = set(TOKEN.findall(story.lower()))
    return any(pair <= words for pair in pairs)


def _draw(options: Options, rng: random.Random) -> Template:
    return options[1][bisect(options[0], rng.random())]


def _fill(template: Template, lists: dict, bound: dict, keep: frozenset, rng: random.Random) -> str:
    text = ""
    for literal, slot in template:
        text += literal
        if slot is None:
            return text
        value = bound.get(slot)
        if value is None:
            value = _fill(_draw(lists[slot], rng), lists, bound, keep, rng)
            if slot in keep:
                bound[slot] = value
        text += value
    return text


def _expand(grammar: Grammar, cue: str, rng: random.Random) -> str:
    """One story of the scene `cue`, not checked against others."""
    plot = list(grammar.plots.values())[bisect(grammar.plot_weights, rng.random())]
    lists = {**grammar.lists, **plot, **grammar.scenes[cue]}
    bound = {"cue": cue}

    def fill(template):
        return _fill(template, lists, bound, grammar.keep, rng)

    for who, prefix in [("hero", ""), ("pal", "pal_")]:
        gender = "he" if rng.random() < 0.5 else "she"
        taken = bound.get("hero"), bound.get("kind")
        for slot, options in [(who, f"name_{gender}"), (f"{prefix}kind", f"kind_{gender}" if who == "hero" else "animal")]:
            while bound.get(slot) is None or bound[slot] in taken:
                bound[slot] = fill(_draw(lists[options], rng))
        for case, pronoun in zip(PRONOUNS["he"], PRONOUNS[gender], strict=True):
            bound[prefix + case] = pronoun
    bound |= {"He": bound["he"].capitalize(), "His": bound["his"].capitalize()}
    sentences: list[str] = []
    used: list[Template] = []  # no sentence twice in a story
    for part in grammar.outlines[bisect(grammar.outline_weights, rng.random())]:
        template = _draw(lists[part], rng)
        while template in used:
            template = _draw(lists[part], rng)
        used.append(template)
        sentences.append(fill(template))
    return A_BEFORE_VOWEL.sub(r"\1n ", " ".join(sentences))
