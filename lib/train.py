"""The training loop: plain gradient descent from a configuration, with a record that someone can repeat.

A run is a folder: `run.json` first, `metrics.jsonl` as it goes, `summary.json` at the end. A killed run
resumes from its last checkpoint to the same numbers; a finished one is not run again. From the shell:
`python -m lib.train --corpus storyworld --steps 40`; on several GPUs or machines, `torchrun -m lib.train`.
"""

import hashlib
import json
import math
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from lib import cost, distributed, paths
from lib.compare import Reference
from lib.corpus import load_corpus
from lib.model import AttentionOnlyTransformer
from lib.model import loss_and_gradients as dense
from lib.results import (
    USUAL_VALUES,
    OneSentenceParser,
    append_jsonl,
    atomic_file,
    cache_dir,
    peak_memory_mib,
    read_jsonl,
    read_record,
    results_root,
    run_name,
    run_record,
    write_json,
)
from lib.statistics import available_memory
from lib.theory import PARAMETERS

CHECKPOINT_SECONDS = 60  # a killed run loses at most this and one step
CUBLAS_REPEATABLE = (
    ":4096:8",
    ":16:8",
)  # the workspaces with which cuBLAS repeats to the same bits


@dataclass(frozen=True)
class TrainConfig:
    """Every setting of a run, checked when it is made; the names are the same everywhere.

    `holdout` is the fraction of the texts that training never sees (Corpus.held_out);
    `batch_size` is a number of sequences or "full"; exactly one of `epochs` and `steps` is given;
    `theory_sequences` says which sequences the statistics come from: "all", or the first so many of
    the first epoch's order ("first_batch": as published). `deterministic` lets torch use only
    operations whose repetition gives the same bits (on a CPU they all do, for one number of threads);
    the statistics are then counted on the CPU. Raises ValueError, one sentence.
    """

    corpus: str = "storyworld"
    tokenizer: str = "words"
    vocab_size: int = 400
    seq_len: int = 48
    max_sequences: int | None = None
    out_of_vocabulary: str = "unk"
    holdout: float = 0.0
    num_layers: int = 3
    learning_rate: float = 0.005
    batch_size: int | str = 128
    micro_batch_size: int | str = "auto"
    epochs: int | None = None
    steps: int | None = None
    init_std: float = 0.0
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    theory_sequences: int | str = "all"
    deterministic: bool = False

    def __post_init__(self):
        def refuse(name, expected):
            raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}.")

        def whole(value, least):
            return isinstance(value, int) and not isinstance(value, bool) and value >= least

        for name in ("corpus", "tokenizer"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                refuse(name, "a name or a path")
        for name, least in {"vocab_size": 2, "seq_len": 1, "num_layers": 1, "seed": 0}.items():
            if not whole(getattr(self, name), least):
                refuse(name, f"a whole number of at least {least}")
        if self.seed >= 2**63:  # torch's generators hold no more
            refuse("seed", "below 2**63")
        for name in ("max_sequences", "epochs", "steps"):
            if getattr(self, name) is not None and not whole(getattr(self, name), 1):
                refuse(name, "a whole number of at least 1, or None")
        words = {
            "batch_size": ("full",),
            "micro_batch_size": ("auto",),
            "theory_sequences": ("all", "first_batch"),
        }
        for name, allowed in words.items():
            value = getattr(self, name)
            if not (whole(value, 1) or (isinstance(value, str) and value in allowed)):
                refuse(name, "a whole number of at least 1 or " + " or ".join(map(repr, allowed)))
        for name in ("learning_rate", "init_std", "holdout"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
            ):
                refuse(name, "a finite number")
            if value < 0 or (name == "learning_rate" and value == 0):
                refuse(name, "above 0" if name == "learning_rate" else "at least 0")
            if name == "holdout" and value >= 1:
                refuse(name, "below 1")
            object.__setattr__(self, name, float(value))
        choices = {"device": ("auto", "cpu", "cuda"), "dtype": ("float32", "float64")}
        for name, allowed in (choices | {"out_of_vocabulary": ("drop", "unk")}).items():
            if getattr(self, name) not in allowed:
                refuse(name, "one of " + ", ".join(allowed))
        if not isinstance(self.deterministic, bool):
            refuse("deterministic", "True or False")
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("Give exactly one of epochs and steps.")

    def torch_device(self) -> torch.device:
        """The device to run on; raises ValueError where CUDA is asked for and absent."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda' but no CUDA device is visible; use 'auto' or 'cpu'.")
        cuda = self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())
        return torch.device("cuda" if cuda else "cpu")


@dataclass
class RunResult:
    """A finished run: `summary` and `metrics` as on disk, the `model` (None if its weights are gone).

    With several processes all of them hold it; the files are rank 0's.
    """

    summary: dict
    metrics: list[dict]
    model: AttentionOnlyTransformer | None
    run_dir: Path
    config: TrainConfig = field(repr=False)


def corpus_of(config: TrainConfig):
    """The lib.corpus.Corpus that the settings name; raises what load_corpus raises."""
    names = "tokenizer vocab_size seq_len max_sequences out_of_vocabulary holdout seed".split()
    return load_corpus(config.corpus, **{name: getattr(config, name) for name in names})


def epoch_order(num_sequences: int, seed: int, epoch: int) -> torch.Tensor:
    """Order [num_sequences] in which an epoch visits the sequences, from (seed, epoch) alone."""
    return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(num_sequences))


def snapshot_steps(last: int) -> set[int]:
    """1, 2, 3, 4, 5, 6, 8, 10, … `last`: about eight a decade."""
    return {min(last, round(10 ** (i / 8))) for i in range(8 * len(str(last)) + 1)} | {last}


class _Checkpoint:
    """The latest weights of a run, as safetensors with a JSON header, hashed against damage."""

    def __init__(self, run_dir: Path):
        digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]
        self.path = cache_dir() / "checkpoints" / f"{run_dir.name}-{digest}.safetensors"

    @staticmethod
    def _hash(weights) -> str:
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(name.encode() + weights[name].numpy().tobytes())
        return digest.hexdigest()

    def save(self, model, step: int, identity: dict) -> None:
        weights = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
        header = {"step": step, "identity": identity, "sha256": self._hash(weights)}
        with atomic_file(self.path) as temporary:
            try:
                save_file(
                    weights, str(temporary), metadata={"run": json.dumps(header, sort_keys=True)}
                )
            except SafetensorError as error:  # a full disk arrives as this, not as an OSError
                raise OSError(
                    f"The checkpoint was not written ({error}); the earlier one is unchanged: free some "
                    f"space in {self.path.parent} and start the same run again."
                ) from error

    def load(self, model, identity: dict, *, finished: bool = False) -> int | None:
        """Put the stored weights into `model` and return their step; None if nothing is stored.

        Raises ValueError if the file is damaged or belongs to another run or other shapes.
        """
        if not self.path.exists():
            return None
        what_then = (
            "read this run without its weights" if finished else "start this run from the beginning"
        )
        advice = f"delete {self.path} to {what_then}"
        try:
            with safe_open(str(self.path), framework="pt") as file:
                header = json.loads((file.metadata() or {})["run"])
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise ValueError(f"The checkpoint cannot be read ({error}); {advice}.") from error
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        found = header["identity"] | {
            "parameters": USUAL_VALUES | header["identity"]["parameters"]  # a missing one is usual
        }
        if found != identity or {n: tuple(w.shape) for n, w in weights.items()} != shapes:
            raise ValueError(
                f"The checkpoint belongs to other settings, corpus or shapes; {advice}."
            )
        if header["sha256"] != self._hash(weights):
            raise ValueError(
                f"The checkpoint is damaged, its weights do not match their hash; {advice}."
            )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        return header["step"]


METHODS = {"dense": dense, "paths": paths.loss_and_gradients}


def loss_and_gradients(model, inputs, targets, *, micro_batch="auto", method="dense"):
    """The loss and the gradients of a batch by one of METHODS, which agree but for rounding."""
    return METHODS[method](model, inputs, targets, micro_batch=micro_batch)


def choose_method(config: TrainConfig, corpus, batch_size: int, device: torch.device) -> str:
    """The one of METHODS that a step of this run should take; MemoryError if neither fits."""
    square, item = corpus.vocab_size**2, 4 if config.dtype == "float32" else 8
    free, processes = available_memory(device), distributed.world().size
    if free is not None:
        # Beside the step there are the weights and the statistics: three corpora, and room to compare.
        free = max(0, free - item * square * (2 * config.num_layers + 1) - 8 * square * 14)
    ordered = corpus.inputs[:256].sort(dim=1).values
    distinct = 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1).double().mean().item()
    return cost.choose(
        corpus.vocab_size,
        config.seq_len,
        config.num_layers,
        -(-batch_size // processes),
        distinct,
        device=device,
        memory=free,
        itemsize=item,
        micro_batch=config.micro_batch_size,
    )


def theory_tokens(config: TrainConfig, tokens: torch.Tensor) -> torch.Tensor:
    """The rows of `tokens` that a run's statistics are counted on; ValueError if there are too few."""
    if config.theory_sequences == "all":
        return tokens
    first_batch = config.theory_sequences == "first_batch"
    count = config.batch_size if first_batch else config.theory_sequences
    if count == "full":
        return tokens
    if count > len(tokens):
        raise ValueError(f"theory_sequences is {count} but the corpus has {len(tokens)} sequences.")
    return tokens[epoch_order(len(tokens), config.seed, 0)[:count]]


def switch_tf32_off() -> None:
    """TF32 keeps 10 bits of a float32: the query-key signal would be lost. Raises ValueError if it stays on."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = False
        is_on = matmul.allow_tf32 or cudnn.allow_tf32
    except RuntimeError:  # torch refuses to say, once its older and newer switches have been mixed
        is_on = True
    if is_on:
        raise ValueError(
            "TF32 cannot be switched off, since torch.backends' fp32_precision was set before; leave it unset."
        )


@contextmanager
def _repeatable(config: TrainConfig, device: torch.device):
    """Only operations that repeat to the same bits, if the settings ask for it; as before afterwards.

    Raises ValueError where an operation, or CUDA without its workspace setting, cannot do that.
    """
    if not config.deterministic:
        yield
        return
    if device.type == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in CUBLAS_REPEATABLE:
        raise ValueError(
            "deterministic on CUDA needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before Python starts; "
            "set it or leave deterministic False."
        )
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        raise ValueError(
            f"deterministic is not possible on this device, since {str(error).split(' does not')[0]} does not "
            "repeat to the same bits; leave deterministic False or use device 'cpu'."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)


def train(config: TrainConfig, corpus, run_dir, *, resume=True, progress=True) -> RunResult:
    """Train from zero (or from a small Gaussian) on `corpus` and write the record into `run_dir`.

    Gradient descent without momentum: each parameter loses learning_rate times its gradient. The last
    incomplete batch of an epoch is dropped. At about eight steps a decade and at each epoch's end all
    weights are compared with their leading terms. The gradients are those of lib.model or of lib.paths,
    whichever lib.cost expects to be faster and to fit; the record says which. With `resume`, an earlier,
    killed run of the same settings goes on from its checkpoint, and a finished one is read back;
    without, it starts anew.

    Processes that torchrun started share each batch and the statistics, and all make the same update;
    rank 0 alone writes. The result is that of one process but for the rounding of sums.

    Raises ValueError (one sentence) for settings that do not fit the corpus or the folder's earlier
    run, MemoryError if it will not fit, FloatingPointError if the loss stops being a number; on other
    ranks than the one it happened on, lib.distributed.OtherRankError.
    """
    device = config.torch_device()
    with distributed.processes(device), _repeatable(config, device):
        switch_tf32_off()
        try:
            return _train(config, corpus, Path(run_dir), device, resume, progress)
        except torch.OutOfMemoryError as error:
            raise MemoryError(
                "The GPU's memory is full; lower micro_batch_size, vocab_size or num_layers."
            ) from error


def _train(config, corpus, run_dir: Path, device, resume: bool, progress: bool) -> RunResult:
    world = distributed.world()
    tokens, vocab_size = corpus.tokens, corpus.vocab_size
    batch_size = len(tokens) if config.batch_size == "full" else config.batch_size
    identity = {"parameters": asdict(config), "fingerprint": corpus.fingerprint}
    summary, metrics = run_dir / "summary.json", run_dir / "metrics.jsonl"
    checkpoint = _Checkpoint(run_dir)
    finished, of_first = distributed.from_first((resume and summary.exists(), identity))

    with distributed.together():
        if of_first != identity:
            raise ValueError("This process has other settings or another corpus than process 0.")
        _check_fit(config, corpus, batch_size)
        theory = theory_tokens(config, tokens)
        per_epoch = len(tokens) // batch_size
        last = config.steps or config.epochs * per_epoch
        wanted = snapshot_steps(last) | set(range(per_epoch, last + 1, per_epoch))
        if world.is_first:
            _refuse_other_run(run_dir, identity)
        method = None if finished else choose_method(config, corpus, batch_size, device)
        model = AttentionOnlyTransformer(
            vocab_size,
            config.seq_len,
            config.num_layers,
            init_std=config.init_std,
            seed=config.seed,
        ).to(device, getattr(torch, config.dtype))
    kept = None
    with distributed.together():
        if world.is_first:
            if not resume:  # no process can refuse any more
                for path in (summary, metrics, checkpoint.path):
                    path.unlink(missing_ok=True)
            # Weights without their lines would leave holes in the record: such a run starts anew.
            loaded = checkpoint.load(model, identity, finished=finished) if metrics.exists() else 0
            done = loaded or 0
            if finished:
                kept = done, None, None, _read_finished(summary, metrics, wanted)
            else:
                lines = _read_lines(metrics) if metrics.exists() else []
                _refuse_holes(metrics, lines, {step for step in wanted if step <= done})
                if lines and loaded is None:
                    print(
                        f"{run_dir.name}: no weights in {checkpoint.path}, it starts anew.",
                        file=sys.stderr,
                    )
                if done:  # a resumed run goes on as it began, to the same numbers
                    method = read_record(run_dir / "run.json").get("method", "dense")
                kept = done, _cut_metrics(metrics, lines, done), method, None
    done, spent, method, result = distributed.from_first(kept)
    if done:
        distributed.copy_from_first([p.data for p in model.parameters()])
    if finished:
        return RunResult(*result, model if done else None, run_dir, config)

    reference = Reference.from_tokens(
        theory[:, :-1],
        theory[:, 1:],
        vocab_size,
        seed=config.seed,
        device="cpu" if config.deterministic else device.type,
        statistics_of=distributed.corpus_statistics,
    )
    started, saved = time.monotonic() - spent, time.monotonic()

    def record(**measured):
        found = run_record(asdict(config), corpus, device=device, **measured)
        found |= {"method": method, "processes": world.size}
        found |= {"deflation_shares": reference.shares()}
        write_json(run_dir / "run.json", found)

    with distributed.together():
        if world.is_first:
            record()

    tokens, order = tokens.to(device), None
    bar = tqdm(
        total=last,
        initial=done,
        desc=run_dir.name[:24],
        unit="step",
        **({} if progress and world.is_first else {"disable": True}),
    )

    def keep(step, loss, *, with_line: bool):
        value = loss.item()
        if not (math.isfinite(value) and all(p.isfinite().all() for p in model.parameters())):
            raise FloatingPointError(
                f"The loss is no longer a number after step {step}; lower learning_rate. What was "
                f"written before stands in {run_dir}."
            )
        bar.set_postfix(loss=f"{value:.4f}")
        if with_line:
            line = {
                "step": step,
                "epoch": step / per_epoch,
                "sum_learning_rate": step * config.learning_rate,
                "loss": value,
                "seconds": time.monotonic() - started,
                "comparisons": reference.compare(model, step, config.learning_rate),
            }
            append_jsonl(metrics, line)
        checkpoint.save(model, step, identity)

    for step in range(done + 1, last + 1):
        epoch, batch = divmod(step - 1, per_epoch)
        if order is None or batch == 0:
            order = epoch_order(len(tokens), config.seed, epoch)
            if device.type == "cuda":  # only a copy from pinned memory goes on without the host
                order = order.pin_memory()
            order = order.to(device, non_blocking=True)
        # Up to the update nothing is read on the host: a GPU never waits for the next step.
        chosen = tokens[distributed.shard(order[batch * batch_size : (batch + 1) * batch_size])]
        loss, gradients = loss_and_gradients(
            model,
            chosen[:, :-1],
            chosen[:, 1:],
            micro_batch=config.micro_batch_size,
            method=method,
        )
        distributed.sum_over_ranks([loss, *gradients.values()], weight=len(chosen) / batch_size)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= config.learning_rate * gradients[name]
        bar.update()
        if step in wanted:
            with distributed.together():
                if world.is_first:
                    keep(step, loss, with_line=True)
            saved = time.monotonic()
        elif world.is_first and time.monotonic() - saved > CHECKPOINT_SECONDS:
            keep(step, loss, with_line=False)
            saved = time.monotonic()
    bar.close()

    result, seconds = None, time.monotonic() - started
    with distributed.together():
        if world.is_first:
            record(seconds=seconds, peak_memory=peak_memory_mib(device))
            lines = _read_lines(metrics)
            write_json(summary, _summary(lines, config, batch_size, seconds))
            result = read_record(summary), lines
    return RunResult(*distributed.from_first(result), model, run_dir, config)


def _check_fit(config: TrainConfig, corpus, batch_size: int) -> None:
    sequences, processes = len(corpus.tokens), distributed.world().size
    if corpus.seq_len != config.seq_len or corpus.vocab_size > config.vocab_size:
        raise ValueError(
            f"The corpus has T={corpus.seq_len} and V={corpus.vocab_size}, "
            f"the settings T={config.seq_len} and V={config.vocab_size}."
        )
    if batch_size > sequences:
        raise ValueError(
            f"batch_size is {batch_size} but the corpus has only {sequences} sequences."
        )
    if batch_size < processes:
        raise ValueError(
            f"batch_size is {batch_size} but {processes} processes share each batch; start fewer of them."
        )


def _refuse_other_run(run_dir: Path, identity: dict) -> None:
    if not (run_dir / "run.json").exists():
        if any((run_dir / name).exists() for name in ("metrics.jsonl", "summary.json")):
            raise ValueError(
                f"{run_dir} has results but no run.json that says whose; choose another folder. Nothing was changed."
            )
        return
    earlier = read_record(run_dir / "run.json", parameters=dict, corpus=dict)
    fingerprint = earlier["corpus"].get("fingerprint")
    found = USUAL_VALUES | earlier["parameters"] | {"fingerprint": fingerprint}
    asked = identity["parameters"] | {"fingerprint": identity["fingerprint"]}
    different = sorted(name for name in asked if asked[name] != found.get(name))
    if different:
        raise ValueError(
            f"{run_dir} holds a run with another {', '.join(different)}; choose another folder. Nothing was changed."
        )


def _read_lines(metrics: Path) -> list[dict]:
    return read_jsonl(metrics, step=int, seconds=int | float, loss=int | float, comparisons=list)


def _refuse_holes(metrics: Path, lines: list[dict], wanted: set[int]) -> None:
    steps = [line["step"] for line in lines]
    missing, ordered = sorted(wanted - set(steps)), steps == sorted(set(steps))
    if missing or not ordered:
        what = f"lacks the line of update {missing[0]}" if missing else "has its lines out of order"
        raise ValueError(
            f"{metrics} {what}; restore it, or delete the results of this run to start it from the "
            "beginning. Nothing was changed."
        )


def _read_finished(summary: Path, metrics: Path, wanted: set[int]) -> tuple[dict, list[dict]]:
    found = read_record(summary, finished=True, step=int, seconds=int | float, comparisons=list)
    lines = _read_lines(metrics)
    _refuse_holes(metrics, lines, wanted)
    return found, lines


def _cut_metrics(path: Path, lines: list[dict], step: int) -> float:
    """Drop lines after `step` (a kill came between line and checkpoint); returns the seconds spent."""
    kept = [line for line in lines if line["step"] <= step]
    if len(kept) < len(lines):
        with atomic_file(path) as temporary:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
            temporary.write_text(text)
    return kept[-1]["seconds"] if kept else 0.0


def _summary(metrics: list[dict], config: TrainConfig, batch_size: int, seconds: float) -> dict:
    """Last snapshot, and each parameter's smallest cosine over snapshots and layers (undefined left out)."""
    final = metrics[-1]
    cosines = {
        name: [
            row["cosine"]
            for line in metrics
            for row in line["comparisons"]
            if row["parameter"] == name and row["cosine"] is not None
        ]
        for name in PARAMETERS
    }
    return {
        "finished": True,
        **{
            key: final[key] for key in ("step", "epoch", "sum_learning_rate", "loss", "comparisons")
        },
        "minimum_cosine": {name: min(found, default=None) for name, found in cosines.items()},
        "seconds": seconds,
        "seconds_per_step": seconds / final["step"],
        "tokens_per_second": final["step"] * batch_size * config.seq_len / seconds,
    }


def main(arguments=None) -> int:
    """Command line: one option per setting, named as in TrainConfig; 2 and one sentence on bad input."""
    parser = OneSentenceParser(prog="python -m lib.train", description=__doc__.split("\n")[0])
    for setting in fields(TrainConfig):
        bare = {"nargs": "?", "const": "true"} if setting.type in ("bool", bool) else {}
        parser.add_argument("--" + setting.name.replace("_", "-"), dest=setting.name, **bare)
    parser.add_argument("--results-root", help="folder of the run records (default: data/results)")
    try:
        given = {
            name: text
            for name, text in vars(parser.parse_args(arguments)).items()
            if text is not None
        }
        root = given.pop("results_root", None)
        config = TrainConfig(
            **{name: setting_from_text(name, text) for name, text in given.items()}
        )
        run_dir = results_root(root) / run_name(asdict(config))
        with distributed.processes(config.torch_device()):
            corpus = distributed.first_then_others(lambda: corpus_of(config))
            result = train(config, corpus, run_dir)
            if distributed.world().is_first:
                _print_result(result)
    except distributed.OtherRankError as error:
        distributed.wait_for_the_end()
        if not error.reported:
            print(error, file=sys.stderr)
        return 2
    except (ValueError, OSError, MemoryError, FloatingPointError) as error:
        if not distributed.speaks():
            distributed.wait_for_the_end()
            return 2
        print(error, file=sys.stderr)
        return 2
    return 0


def _print_result(result: RunResult) -> None:
    print(result.run_dir)
    for row in result.summary["comparisons"]:
        print(
            f"{row['parameter']:<10} layer {row['layer']}  cosine {row['cosine']}  error {row['relative_error']}"
        )


def setting_from_text(name: str, text: str):
    """A command-line value in the type that the setting has; texts stay texts."""
    kind = TrainConfig.__dataclass_fields__[name].type
    if kind in ("str", str):
        return text
    if kind in ("bool", bool):
        return {"true": True, "false": False}.get(text.lower(), text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    sys.exit(main())
