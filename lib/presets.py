"""Named lists of settings, from seconds to the paper's own experiment, and the driver that runs them.

`python -m lib.presets embedded sample` gives each setting to the run notebook, one after the other. A
finished run is skipped, a broken one goes on from its checkpoint, one that fails stops only itself.
`--intervene` also takes the leading terms out of the trained weights and measures the loss anew.
`--dry-run 1` trains nothing: it times steps of the model at its real sizes and says what a run would cost.
"""

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from papermill import execute_notebook

from lib import cost
from lib.model import AttentionOnlyTransformer
from lib.results import (
    REPOSITORY,
    OneSentenceParser,
    environment,
    read_jsonl,
    read_record,
    results_root,
    run_name,
    write_json,
)
from lib.statistics import corpus_statistics
from lib.train import (
    TrainConfig,
    choose_method,
    corpus_of,
    loss_and_gradients,
    setting_from_text,
    switch_tf32_off,
)

NOTEBOOKS = REPOSITORY / "book" / "runs"
SAMPLES = 64  # documents of each text that an intervention is measured on; article, section 6
# A dry run times one step at each of two numbers of sequences and goes on along the line through them.
SEQUENCES = {"paths": (64, 256), "dense": (2, 8)}
FREE_OF_COST = ("learning_rate", "epochs", "steps", "seed", "theory_sequences")  # of one step
DRY_RUN_SECONDS = 60  # no further repetition begins once a preset's steps have taken this long


class Preset(NamedTuple):
    """A line on what it is, and its settings: tuple of TrainConfig."""

    about: str
    settings: tuple[TrainConfig, ...]


def _settings(**given) -> tuple[TrainConfig, ...]:
    return (TrainConfig(**given),)


_EMBEDDED = {
    "corpus": "storyworld",
    "vocab_size": 300,
    "seq_len": 32,
    "max_sequences": 512,
    "out_of_vocabulary": "unk",
    "batch_size": 128,
    "epochs": 10,
}
_SAMPLE = {
    "corpus": "sample",
    "vocab_size": 1000,
    "seq_len": 64,
    "out_of_vocabulary": "unk",
    "holdout": 0.05,  # interventions are measured on these texts, too
    "batch_size": 512,
    "epochs": 100,
}
_FIRST = {"theory_sequences": "first_batch"}  # as published
# Paper, section 5.1 and its appendix on the TinyStories experiments; article, section 5.
_STORIES = {
    "corpus": "tinystories",
    "vocab_size": 3000,
    "seq_len": 200,
    "max_sequences": 65_536,
    "out_of_vocabulary": "drop",
    "num_layers": 3,
    "learning_rate": 0.005,
    "batch_size": 2048,
    **_FIRST,
}
_ARTICLE = _STORIES | {"epochs": 10, "micro_batch_size": 256, "theory_sequences": 2048}
_PAPER = _STORIES | {"epochs": 100}
_LARGE = _PAPER | {"learning_rate": 0.05}
# The paper names no number of sequences for BPE; this is the one of its words.
_BPE = _STORIES | {"tokenizer": "bpe", "vocab_size": 10_000, "epochs": 10}
_ALL = {"theory_sequences": "all"}

PRESETS = {
    "embedded": Preset(
        "the embedded corpus, ten epochs, five seeds: seconds each",
        tuple(TrainConfig(**_EMBEDDED, seed=seed) for seed in range(5)),
    ),
    "embedded-first-batch": Preset(
        "the same weights, theory from the first batch, as published",
        tuple(TrainConfig(**_EMBEDDED | _FIRST, seed=seed) for seed in range(5)),
    ),
    "embedded-held-out": Preset(
        "the embedded corpus with a tenth of its stories put aside, for interventions",
        tuple(TrainConfig(**_EMBEDDED, holdout=0.1, seed=seed) for seed in range(5)),
    ),
    "sample": Preset("the TinyStories sample, small learning rate", _settings(**_SAMPLE)),
    "sample-large-lr": Preset(
        "the sample at ten times the rate: s eta passes 40",
        _settings(**_SAMPLE | {"learning_rate": 0.05}),
    ),
    "sample-first-batch": Preset(
        "the first ten epochs of `sample`, theory from the first batch",
        _settings(**_SAMPLE | _FIRST | {"epochs": 10}),
    ),
    "sample-bpe": Preset(
        "the sample in BPE tokens", _settings(**_SAMPLE | {"tokenizer": "bpe", "epochs": 10})
    ),
    "article": Preset(
        "the article's reproduction, in its micro-batches (on a CPU take --micro-batch-size auto)",
        _settings(**_ARTICLE),
    ),
    "article-all": Preset("the same, theory from all sequences", _settings(**_ARTICLE | _ALL)),
    "paper-small-lr": Preset("the paper's Table 1 and Figure 4", _settings(**_PAPER)),
    "paper-small-lr-all": Preset("the same, theory from all sequences", _settings(**_PAPER | _ALL)),
    "paper-large-lr": Preset("the paper's Figure 4 and Table 3", _settings(**_LARGE)),
    "paper-large-lr-all": Preset("the same, theory from all sequences", _settings(**_LARGE | _ALL)),
    "paper-bpe": Preset("the paper's Table 2", _settings(**_BPE)),
    "paper-bpe-all": Preset("the same, theory from all sequences", _settings(**_BPE | _ALL)),
}


def preset(name: str) -> Preset:
    """The preset of that name. Raises ValueError (one sentence) if there is none."""
    if name not in PRESETS:
        raise ValueError(f"Unknown preset {name}; the presets are {', '.join(PRESETS)}.")
    return PRESETS[name]


def parameters_of(config: TrainConfig, kind: str = "train") -> dict:
    """What the run notebook `kind`, "train" or "intervene", is given for a setting."""
    return asdict(config) | ({} if kind == "train" else {"samples": SAMPLES})


def run_of(config: TrainConfig, kind: str = "train") -> str:
    """The name of the run that the notebook `kind` makes of a setting."""
    return ("" if kind == "train" else f"{kind}-") + run_name(parameters_of(config, kind))


def state(config: TrainConfig, root=None, kind: str = "train") -> dict:
    """Where a run stands: `run` (its name), `state`, `updates`, `seconds`, `peak_memory_mib`.

    `state` is "finished", "broken" (begun, to be resumed), "damaged" (a file cannot be read) or "not yet
    run"; unknown numbers are None.
    """
    name = run_of(config, kind)
    folder = results_root(root) / name
    row = dict.fromkeys(("run", "state", "updates", "seconds", "peak_memory_mib"))
    if not (folder / "run.json").exists():
        return row | {"run": name, "state": "not yet run"}
    numbers = {"seconds": int | float | None, "peak_memory_mib": int | float | None}
    try:
        record = read_record(folder / "run.json", **numbers)
        if (folder / "summary.json").exists():
            found, how = read_record(folder / "summary.json", finished=True), "finished"
        else:
            lines = folder / "metrics.jsonl"
            found = (lines.exists() and read_jsonl(lines) or [{}])[-1]
            how = "broken"
    except ValueError:  # what is wrong is said by the run that wants to read it
        return row | {"run": name, "state": "damaged"}
    return {
        "run": name,
        "state": how,
        "updates": found.get("step"),
        "seconds": found.get("seconds", record["seconds"]),
        "peak_memory_mib": record["peak_memory_mib"],
    }


def execute(config: TrainConfig, root=None, kind: str = "train") -> Path:
    """Run one setting through papermill; the executed copy of the notebook `kind` is returned.

    Raises what stopped the notebook, mostly papermill.PapermillExecutionError.
    """
    copy = REPOSITORY / "_build" / "runs" / f"{run_of(config, kind)}.ipynb"
    copy.parent.mkdir(parents=True, exist_ok=True)
    execute_notebook(
        NOTEBOOKS / f"{kind}.ipynb",
        copy,
        parameters_of(config, kind) | {"results_root": str(results_root(root).resolve())},
        kernel_name="python3",
        cwd=NOTEBOOKS,
        progress_bar=False,
        stderr_file=sys.stderr,  # where the training shows how far it is
    )
    return copy


def run_presets(names, root=None, kinds=("train",), **changed) -> int:
    """Run the settings of the named presets and print the table; returns how many of the runs failed.

    `kinds` are the run notebooks that each goes through, `changed` settings replace those of the
    presets. Raises ValueError for an unknown preset.
    """
    chosen = [
        (name, replace(one, **changed), kind)
        for name in names
        for one in preset(name).settings
        for kind in kinds
    ]
    failed = 0
    for _, config, kind in chosen:
        name = run_of(config, kind)
        if state(config, root, kind)["state"] == "finished":
            continue
        print(name, flush=True)
        try:
            execute(config, root, kind)
        except Exception as error:  # whatever stopped this one must not stop the others
            failed += 1
            print(f"{name} failed: {getattr(error, 'evalue', error)}", file=sys.stderr, flush=True)
    print(table(chosen, root))
    return failed


def table(chosen, root=None) -> str:
    """One line for each (preset, TrainConfig, kind): state, updates, cost; estimate of unfinished training."""
    rows = [("preset", "state", "updates", "seconds", "MiB", "estimate", "run")]
    for name, config, kind in chosen:
        row = state(config, root, kind)
        numbers = [
            "" if row[key] is None else f"{row[key]:,.0f}"
            for key in ("updates", "seconds", "peak_memory_mib")
        ]
        open_training = kind == "train" and row["state"] != "finished"
        expected = cost_in_words(estimate(name, root)) if open_training else ""
        rows.append((name, row["state"], *numbers, expected, row["run"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def estimate(name: str, root=None) -> dict | None:
    """What the last dry run of a preset found (see expected); None if there was none."""
    path = results_root(root) / f"estimate-{name}" / "summary.json"
    if not path.exists():
        return None
    found = read_record(path, refused=str | None)
    measured = "hours", "statistics_seconds", "multiplications_per_second"
    return found if found["refused"] else read_record(path, **dict.fromkeys(measured, int | float))


def cost_in_words(found: dict | None) -> str:
    """An estimate in a few words: the time of one run, or why it does not fit."""
    if found is None:
        return "no dry run yet"
    return found["refused"] or duration(3600 * found["hours"])


def duration(seconds: float) -> str:
    """Seconds in words, to two digits: "12 seconds", "1 minute", "3.4 minutes", "110 hours"."""
    size, unit = next(
        (size, unit)
        for size, unit in ((3600, "hour"), (60, "minute"), (1, "second"))
        if seconds >= size or size == 1
    )
    number = float(f"{seconds / size:.2g}")
    text = f"{number:,.0f}" if number >= 10 else f"{number:g}"
    return f"{text} {unit}" + "s" * (text != "1")


def _clock(device):
    """CPU time where one thread works, since other processes disturb it less; else wall time."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time() if alone else time.perf_counter()


def _line(times: dict[int, float], count: int) -> float:
    """The time at `count` on the line through the `times` at two numbers (or at `count` alone)."""
    small, large = min(times), max(times)
    first, last = times[small], times[large]
    each = max(0.0, (last - first) / (large - small)) if large > small else 0.0
    return last + each * (count - large)


def _sequences(config) -> tuple[int, int]:
    """Sequences of the corpus and of a batch; only where the settings do not say is the corpus read."""
    total = config.max_sequences or len(corpus_of(config).tokens)
    return total, total if config.batch_size == "full" else config.batch_size


def measure(config: TrainConfig, repeats: int = 1) -> dict:
    """Seconds of training steps at the settings' real sizes, on drawn tokens, with few sequences.

    Each is repeated up to `repeats` times and the shortest counts. Returns `refused`: None, or the
    sentence that says why it does not fit into the memory here; where it fits also `method`, `seconds`
    {sequences: seconds of an update}, `counting` {sequences: seconds of the statistics},
    `step_memory_gib` (of a whole step beside weights and statistics, an upper estimate) and
    `multiplications_per_second` (of a large float32 product on this machine).
    Raises what corpus_of raises where only the corpus says how many sequences there are.
    """
    switch_tf32_off()
    device, (_, batch) = config.torch_device(), _sequences(config)
    tokens = cost.story_tokens(config.vocab_size, config.seq_len, min(256, batch), device=device)
    drawn = SimpleNamespace(inputs=tokens[0], vocab_size=config.vocab_size)
    try:
        method = choose_method(config, drawn, batch, device)
        seconds, rate = _step_seconds(config, tokens, batch, method, device, repeats)
        counting = _statistics_seconds(config.vocab_size, tokens, device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return {"refused": str(error)}
    size = config.vocab_size, config.seq_len, config.num_layers, batch
    how = {
        "itemsize": 4 if config.dtype == "float32" else 8,
        "micro_batch": config.micro_batch_size,
    }
    if method == "dense":
        memory = cost.dense_memory(*size, **how)
    else:
        memory = cost.paths_memory(*size, device=device.type, **how)
    return {
        "refused": None,
        "method": method,
        "seconds": seconds,
        "counting": counting,
        "step_memory_gib": memory / 2**30,
        "multiplications_per_second": rate,
    }


def expected(config: TrainConfig, found: dict) -> dict:
    """What follows from `measure` for a run: the time is linear in the number of sequences.

    Adds `updates`, `seconds_per_step`, `hours` (all updates, without snapshots) and
    `statistics_seconds` (of counting the theory's sequences), unless it was refused.
    """
    if found["refused"]:
        return found | {"finished": True}
    total, batch = _sequences(config)
    updates = config.steps or config.epochs * (total // batch)
    per_step = _line(found["seconds"], batch)
    theory = {"all": total, "first_batch": batch}.get(
        config.theory_sequences, config.theory_sequences
    )
    return found | {
        "finished": True,
        "updates": updates,
        "seconds_per_step": per_step,
        "hours": per_step * updates / 3600,
        "statistics_seconds": _line(found["counting"], theory),
    }


def _step_seconds(config, tokens, batch, method, device, repeats):
    """({sequences: seconds of an update}, multiply-adds per second of a large product)."""
    model = AttentionOnlyTransformer(
        config.vocab_size,
        config.seq_len,
        config.num_layers,
        init_std=config.init_std,
        seed=config.seed,
    ).to(device, getattr(torch, config.dtype))

    def update(count):
        start = _clock(device)
        _, gradients = loss_and_gradients(
            model,
            *(part[:count] for part in tokens),
            micro_batch=config.micro_batch_size,
            method=method,
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= config.learning_rate * gradients[name]
        return _clock(device) - start

    seconds, spent = {}, 0.0
    for repeat in range(repeats):
        if repeat and spent > DRY_RUN_SECONDS:
            break
        for count in (min(count, batch) for count in SEQUENCES[method]):
            taken = update(count)
            spent += taken
            seconds[count] = min(taken, seconds.get(count, taken))
    square = torch.randn(2048, 2048, device=device)
    start = _clock(device)
    for _ in range(3):
        square = (square @ square).clamp_(-1, 1)
    return seconds, 3 * 2048**3 / (_clock(device) - start)


def _statistics_seconds(vocab_size, tokens, device):
    """{sequences: seconds of counting them} for a quarter of the tokens and for all."""
    seconds = {}
    for count in (max(1, len(tokens[0]) // 4), len(tokens[0])):
        start = _clock(device)
        corpus_statistics(*(part[:count] for part in tokens), vocab_size, device=device.type)
        seconds[count] = _clock(device) - start
    return seconds


def dry_runs(names, repeats: int, root=None, **changed) -> None:
    """Print what one run of each named preset would cost here, and keep it in `estimate-<preset>/`.

    Raises ValueError for an unknown preset.
    """
    presets = {name: replace(preset(name).settings[0], **changed) for name in names}
    measured = {}  # presets of the same sizes are measured once
    for name, config in presets.items():
        same = tuple(value for key, value in asdict(config).items() if key not in FREE_OF_COST)
        if same not in measured:
            measured[same] = measure(config, repeats)
        found = expected(config, measured[same])
        folder = results_root(root) / f"estimate-{name}"
        made = {"parameters": asdict(config), **environment(config.torch_device())}
        write_json(folder / "run.json", made)
        write_json(folder / "summary.json", found)
        if found["refused"]:
            print(f"{name}: {found['refused']}")
        else:
            print(
                f"{name}: {found['seconds_per_step']:.3g} s a step ({found['method']}), "
                f"{found['updates']:,} updates, {cost_in_words(found)}; "
                f"counting {duration(found['statistics_seconds'])}"
            )


def main(arguments=None) -> int:
    """Command line: 0, 1 if a run failed, 2 and one sentence on bad input."""
    parser = OneSentenceParser(prog="python -m lib.presets", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="presets, see --list")
    parser.add_argument("--list", action="store_true", help="name the presets and stop")
    parser.add_argument("--intervene", action="store_true", help="then take the terms out, too")
    parser.add_argument("--dry-run", type=int, metavar="STEPS", help="time so many steps instead")
    parser.add_argument("--results-root", help="folder of the run records (default: data/results)")
    # What a machine decides and the numbers do not depend on, but for rounding.
    for name in ("device", "micro_batch_size"):
        parser.add_argument("--" + name.replace("_", "-"), help="instead of the preset's")
    try:
        given = parser.parse_args(arguments)
        if given.list:
            for name, (about, settings) in PRESETS.items():
                runs = f"{len(settings)} run" + "s" * (len(settings) > 1)
                print(f"{name:<22}{runs:<8}{about}")
            return 0
        if not given.names:
            raise ValueError(f"Name a preset: {', '.join(PRESETS)}.")
        changed = {
            name: setting_from_text(name, getattr(given, name))
            for name in ("device", "micro_batch_size")
            if getattr(given, name) is not None
        }
        if given.dry_run is None:
            kinds = ("train", "intervene") if given.intervene else ("train",)
            return min(1, run_presets(given.names, given.results_root, kinds, **changed))
        if given.dry_run < 1:
            raise ValueError(f"--dry-run takes at least 1 step, got {given.dry_run}.")
        dry_runs(given.names, given.dry_run, given.results_root, **changed)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
