"""The embedded corpus: short children's stories expanded from a grammar, with known associations.

The sentences and word lists stand in data/storyworld.toml, which explains its own format; this
module only expands them. A story is an outline filled in: a character, a scene, a plot, a friend.
Every story has its own random stream, seeded by (seed, index), so a longer corpus begins with the
shorter one, and holding a pair of words out replaces the stories that have both and leaves the
others as they were. Only `random.Random.random` is used: the same values in every Python.

Three kinds of association are planted, and `truth()` names them:
collocations, a word and the one that always follows it; classes, words that take turns in one slot
and so share predecessors; scenes, a place and the words that come up there, never next to it.
"""

import random
import re
import tomllib
from bisect import bisect
from dataclasses import dataclass
from itertools import accumulate, permutations
from pathlib import Path

import numpy as np

DEFAULT_PATH = Path(__file__).resolve().parent.parent / "data" / "storyworld.toml"
FORM = {"zipf": int | float, "keep": list, "outline": list, "hold_out": list}
FORM |= dict.fromkeys("collocations classes words sentences plots scenes".split(), dict)
# The words tokenizer of lib.tokenizers, which this module may not import.
TOKEN = re.compile(r"[^\W\d_]+|\d+|\S")
SLOT = re.compile(r"\{(\w+)\}")
A_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")
PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}
BOUND = {f"{who}{word}" for who in ("", "pal_") for word in ("he", "him", "his", "kind")}
BOUND |= {"He", "His", "hero", "pal", "cue"}
ATTEMPTS = 1000  # redraws of one story before giving up

Template = tuple[tuple[str, str | None], ...]  # (text, the slot that follows it or None), …
Options = tuple[list[float], list]  # cumulative weights, the last one 1, and what they choose from


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar, made by `load_grammar`.

    `lists` [name] are the templates that every story can draw from. `scenes` chooses a pair (cue,
    lists of that scene), `plots` the lists of a plot, `outlines` names of lists, in order.
    """

    lists: dict[str, Options]
    scenes: Options
    plots: Options
    outlines: Options
    keep: frozenset[str]
    truth: dict


def load_grammar(path: str | Path | None = None) -> Grammar:
    """Read and compile a grammar, data/storyworld.toml unless a path is given.

    Raises FileNotFoundError if there is no such file; ValueError if it is not TOML, lacks a table,
    has a list that is too short or not of strings, or a sentence names a list that does not exist.
    """
    path = Path(path or DEFAULT_PATH)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not valid TOML: {error}; mend that place") from None
    missing = [name for name, form in FORM.items() if not isinstance(raw.get(name), form)]
    if not missing:
        missing = [
            f"words of the scene {cue}"
            for cue in raw["scenes"]
            if "words" not in raw["scenes"][cue]
        ]
    if missing:
        raise ValueError(f"{path.name} lacks {', '.join(missing)}, or has another type there")

    def options(entries: list) -> Options:
        weights = [(k + 1) ** -raw["zipf"] for k in range(len(entries))]
        return [round(total / sum(weights), 12) for total in accumulate(weights)], entries

    def compiled(tables: dict) -> dict[str, Options]:
        for name, texts in tables.items():
            if not (isinstance(texts, list) and texts and all(isinstance(t, str) for t in texts)):
                raise ValueError(f"{path.name}: {name!r} must be a non-empty list of strings")
        return {name: options([_compile(text) for text in t]) for name, t in tables.items()}

    lists: dict = {}
    for tables in [*raw["classes"].values(), raw["collocations"], raw["words"], raw["sentences"]]:
        lists |= compiled(tables)
    grammar = Grammar(
        lists,
        options([(cue, compiled(tables)) for cue, tables in raw["scenes"].items()]),
        options([compiled(tables) for tables in raw["plots"].values()]),
        options([outline.split() for outline in raw["outline"]]),
        frozenset(raw["keep"]),
        _truth(raw),
    )
    _check_slots(grammar, path.name)
    _check_hold_out(grammar.truth["hold_out"], grammar.truth["scenes"])
    return grammar


def generate(
    num_stories: int,
    seed: int = 0,
    *,
    hold_out: tuple[tuple[str, str], ...] = (),
    grammar: Grammar | None = None,
) -> list[str]:
    """Expand `num_stories` different stories. Their first k are `generate(k, seed)`.

    hold_out: (cue, word) pairs, each a scene and one of its words that another scene has too; no
        story has both. All stories that lack the pair anyway are the same as without `hold_out`.

    Raises ValueError for a number below 1, a bad seed, a pair that cannot be held out, or a grammar
    too small for so many different stories.
    """
    for name, value, least in [("num_stories", num_stories, 1), ("seed", seed, 0)]:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")
    grammar = grammar or load_grammar()
    pairs = _check_hold_out(hold_out, grammar.truth["scenes"])
    stories: dict[str, None] = {}  # a set that keeps its order
    for index in range(num_stories):
        rng = random.Random(f"{seed}/{index}")
        scene = _draw(grammar.scenes, rng)
        for _ in range(ATTEMPTS):
            story = _expand(grammar, scene, rng)
            if story not in stories and not (pairs and _has_pair(story, pairs)):
                break
        else:
            raise ValueError(
                f"the grammar offers no further story about the {scene[0]} after {index} stories; "
                "ask for fewer stories, hold out less, or add sentences to the grammar"
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
        "collocations": list(tables["collocations"]),
        "classes": {name: list(words) for name, words in tables["classes"].items()},
        "scenes": {cue: list(words) for cue, words in tables["scenes"].items()},
        "hold_out": list(tables["hold_out"]),
    }


def planted_pairs(tables: dict) -> dict[str, list[tuple[str, str]]]:
    """Pairs (word, partner) of each kind from `truth()`: what a mapping should find.

    Of a class, each pair of members both ways; of a scene, (cue, word).
    """
    return {
        "collocations": list(tables["collocations"]),
        "classes": [
            pair for words in tables["classes"].values() for pair in permutations(words, 2)
        ],
        "scenes": [(cue, word) for cue, words in tables["scenes"].items() for word in words],
    }


def separation(scores, frequency, vocabulary, pairs, *, rivals: int = 20) -> float:
    """How well `scores` [word, partner] tells planted pairs from others: 1 always, 0.5 by chance.

    Each pair (word, partner) meets (word, rival) for the `rivals` words nearest to the partner in
    `frequency` [V] that are not planted with the word. The result is the share of such meetings in
    which the planted pair scores higher, ties counting half: an area under the ROC curve, matched
    for frequency. A score below 0, less than chance, counts as 0: no association. Pairs with a word
    outside `vocabulary` are left out; ValueError if none remains.
    """
    scores, size = np.maximum(np.asarray(scores), 0), np.log(np.asarray(frequency) + 1e-12)
    index = {word: i for i, word in enumerate(vocabulary)}
    found = [(index[a], index[b]) for a, b in pairs if a in index and b in index]
    if not found:
        raise ValueError("none of the pairs has both words in the vocabulary; choose a larger one")
    planted: dict[int, set[int]] = {}
    for a, b in found:
        planted.setdefault(a, {a}).add(b)
    wins = []
    for a, b in found:
        nearest = np.argsort(abs(size - size[b]), kind="stable")[: rivals + len(planted[a])]
        others = [j for j in nearest if j not in planted[a]][:rivals]
        wins.append(np.mean(np.sign(scores[a, b] - scores[a, others]) / 2 + 0.5))
    return float(np.mean(wins))


# --- compiling and expanding ---------------------------------------------------------------------


def _compile(text: str) -> Template:
    pieces = SLOT.split(text)  # text, slot, text, …, text
    return tuple(zip(pieces[::2], [*pieces[1::2], None], strict=True))


def _truth(raw: dict) -> dict:
    pairs = [
        tuple(text.lower().split()) for texts in raw["collocations"].values() for text in texts
    ]
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"the collocation {' '.join(pair)!r} must have two words; mend it")
    return {
        "collocations": pairs,
        "classes": {
            name: [word.lower() for words in lists.values() for word in words]
            for name, lists in raw["classes"].items()
        },
        "scenes": {cue: lists["words"] for cue, lists in raw["scenes"].items()},
        "hold_out": [tuple(pair) for pair in raw["hold_out"]],
    }


def _check_slots(grammar: Grammar, name: str) -> None:
    """Every slot has a list that is long enough, and no list leads back to itself."""

    def visit(slot: str, inside: tuple[str, ...]) -> None:
        if slot in inside or slot not in lists:
            fault = "leads back to itself" if slot in inside else "names no list"
            raise ValueError(f"{name}: {{{slot}}} in {inside[-1]!r} {fault}; mend the sentence")
        if slot not in done:
            inner = {slot for template in lists[slot][1] for _, slot in template if slot}
            for each in sorted(inner - BOUND):
                visit(each, (*inside, slot))
            done.add(slot)

    for _, scene in grammar.scenes[1]:
        for plot in grammar.plots[1]:
            lists, done = {**grammar.lists, **plot, **scene}, set()
            for outline in grammar.outlines[1]:
                for part in [*outline, "name_he", "name_she", "kind_he", "kind_she", "animal"]:
                    visit(part, ("outline",))
                    least = outline.count(part) or 2  # no sentence twice; two characters
                    if len(set(lists[part][1])) < least:
                        raise ValueError(
                            f"{name}: {part!r} needs {least} different entries; add more"
                        )


def _check_hold_out(hold_out, scenes: dict[str, list[str]]) -> list[set[str]]:
    for pair in hold_out:
        if isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"hold_out: {pair!r} is no pair; write (('pond', 'frog'),)")
        cue, word = pair
        if word not in scenes.get(cue, ()):
            raise ValueError(
                f"hold_out: no scene {cue!r} has the word {word!r}; see truth()['scenes']"
            )
        if sum(word in words for words in scenes.values()) < 2:
            raise ValueError(
                f"hold_out: only the scene {cue!r} has {word!r}, which would vanish; choose a word "
                "that two scenes share, such as those in truth()['hold_out']"
            )
    return [set(pair) for pair in hold_out]


def _has_pair(story: str, pairs: list[set[str]]) -> bool:
    words = set(TOKEN.findall(story.lower()))
    return any(pair <= words for pair in pairs)


def _draw(options: Options, rng: random.Random):
    return options[1][bisect(options[0], rng.random())]


def _fill(template: Template, lists: dict, bound: dict, keep: frozenset, rng: random.Random) -> str:
    text = ""
    for literal, slot in template:
        text += literal
        if slot is not None:
            value = bound.get(slot)
            if value is None:
                value = _fill(_draw(lists[slot], rng), lists, bound, keep, rng)
                if slot in keep:
                    bound[slot] = value
            text += value
    return text


def _expand(grammar: Grammar, scene: tuple[str, dict], rng: random.Random) -> str:
    """One story of the scene (cue, lists), not compared with others."""
    lists = {**grammar.lists, **_draw(grammar.plots, rng), **scene[1]}
    bound = {"cue": scene[0]}
    for who, prefix in [("hero", ""), ("pal", "pal_")]:
        gender = "he" if rng.random() < 0.5 else "she"
        kinds = "animal" if prefix else f"kind_{gender}"
        taken = {bound.get("hero"), bound.get("kind"), None}
        for slot, source in [(who, f"name_{gender}"), (f"{prefix}kind", kinds)]:
            while bound.get(slot) in taken:
                bound[slot] = _fill(_draw(lists[source], rng), lists, {}, grammar.keep, rng)
        for case, pronoun in zip(PRONOUNS["he"], PRONOUNS[gender], strict=True):
            bound[prefix + case] = pronoun
    bound |= {"He": bound["he"].capitalize(), "His": bound["his"].capitalize()}
    used: list[Template] = []
    for part in _draw(grammar.outlines, rng):
        template = _draw(lists[part], rng)
        while template in used:  # no sentence twice in a story
            template = _draw(lists[part], rng)
        used.append(template)
    text = " ".join(_fill(template, lists, bound, grammar.keep, rng) for template in used)
    return A_BEFORE_VOWEL.sub(r"\1n ", text)
