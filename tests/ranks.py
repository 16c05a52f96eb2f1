"""What tests/test_distributed.py starts in several processes: `torchrun -m tests.ranks TASK …`.

`share FOLDER` counts, trains and fails in a controlled way, and leaves what each rank saw in FOLDER.
`break ARGUMENTS` is `lib.train` with these arguments, in which rank 1 fails at its fifth step.
"""

import json
import sys
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from lib import distributed, statistics, train
from lib.distributed import OtherRankError, together, world
from lib.results import peak_memory_mib

CONFIG = train.TrainConfig(
    vocab_size=40,
    seq_len=12,
    max_sequences=61,
    batch_size=17,
    num_layers=2,
    steps=7,
    learning_rate=0.1,
    device="cpu",
    dtype="float64",
)

LARGE = 5000  # tokens, whose tables dominate the memory of a rank

TOO_FAST = "--vocab-size 40 --seq-len 12 --max-sequences 61 --steps 6 --batch-size 17 --learning-rate 1e30".split()


def share(folder: Path) -> None:
    with distributed.processes(torch.device("cpu")):
        corpus = distributed.first_then_others(lambda: train.corpus_of(CONFIG))
        tables, rank = {}, world().rank
        for name, rows in {"all": 61, "one": 1}.items():  # of one sequence, rank 1 has none
            found = distributed.corpus_statistics(
                corpus.inputs[:rows], corpus.targets[:rows], 40, device="cpu"
            )
            tables |= {f"{name}.{key}": value for key, value in vars(found).items()}
        seen = []
        for broken in ({0}, {1}, {0, 1}, set()):
            try:
                with together():
                    if rank in broken:
                        raise ValueError(f"rank {rank} says why")
                seen.append("went on")
            except (ValueError, OtherRankError) as error:
                seen.append(f"{type(error).__name__}: {error}")
        result = train.train(replace(CONFIG, dtype="float32"), corpus, folder / "run")
        weights = {name: p.detach() for name, p in result.model.named_parameters()}
        save_file(
            {name: value.contiguous() for name, value in (tables | weights).items()},
            str(folder / f"rank{rank}.safetensors"),
        )
        distributed.GRACE_SECONDS, errors = 0, StringIO()
        with redirect_stderr(errors):
            status = train.main([f"--results-root={folder}", *TOO_FAST])
        try:
            with mock.patch.object(statistics, "available_memory", lambda device: rank and 2**40):
                distributed.corpus_statistics(corpus.inputs, corpus.targets, 40, device="cpu")
        except (MemoryError, OtherRankError) as error:
            refused = str(error)
        before = peak_memory_mib("cpu")
        distributed.corpus_statistics(corpus.inputs, corpus.targets, LARGE, device="cpu")
        report = {"memory": 2**20 * (peak_memory_mib("cpu") - before), "refused": refused}
        report |= {"together": seen, "summary": result.summary, "metrics": len(result.metrics)}
        report["not a number"] = status, errors.getvalue()
        (folder / f"rank{rank}.json").write_text(json.dumps(report))


def fail_at_the_fifth_step(*arguments, calls=[], real=train.loss_and_gradients, **options):  # noqa: B006
    calls.append(1)
    if len(calls) == 5 and world().rank == 1:
        raise MemoryError("Rank 1 has no memory left.")
    return real(*arguments, **options)


if __name__ == "__main__":
    if sys.argv[1] == "share":
        share(Path(sys.argv[2]))
    else:
        train.loss_and_gradients = fail_at_the_fifth_step
        sys.exit(train.main(sys.argv[2:]))
