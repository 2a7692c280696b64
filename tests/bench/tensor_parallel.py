"""What a decode step costs when several workers share the model, and how much of it goes on telling each other.

    python -m tests.bench.tensor_parallel [--sizes 1 2 3] [--batches 1 8] [--steps 50] [--rounds 5]

starts so many workers of one thread each over gloo, with random weights in the shape of the embedded model, and
decodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from protos.config import EngineConfig, build
from tests.model_runner.driver import Driver
from tests.model_runner.ranks import Ranks
from tests.model_runner.tiny import make_runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_runner.parallel import Workers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 48,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""SmolLM2-135M, but for its 9 heads of 64 with 3 KV heads: these can be shared by 2 and by 3."""
PROMPT = list(range(10, 42))
WARM_UP = 5


def decode(workers: Workers, path: Path, batch: int, num_steps: int) -> tuple[float, float, int, float]:
    """Seconds of a step, of it in calls to the others, the number of these, and seconds of one such call by itself,
    all workers being ready; medians."""
    config = build(EngineConfig, num_kv_blocks=64 * batch, max_num_seqs=batch, num_threads=1, load_format="dummy")
    runner = make_runner(path, config, workers)
    runner.load(path, lambda done, total: None)
    driver = Driver(runner, 64 * batch, batch)
    rows = [driver.add(PROMPT, WARM_UP + num_steps + 1) for _ in range(batch)]
    driver.run(rows, num_steps=WARM_UP)
    spent: list[float] = []

    def timed(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(tensor: torch.Tensor) -> torch.Tensor:
            begin = time.perf_counter()
            result = call(tensor)
            spent.append(time.perf_counter() - begin)
            return result

        return run

    all_reduce = workers.all_reduce
    overridden: Any = workers
    overridden.all_reduce, overridden.all_gather = timed(workers.all_reduce), timed(workers.all_gather)
    steps, calls = [], []
    for _ in range(num_steps):
        spent.clear()
        begin = time.perf_counter()
        driver.run(rows, num_steps=1)
        steps.append(time.perf_counter() - begin)
        calls.append(sum(spent))
    num_calls = len(spent)
    del overridden.all_reduce, overridden.all_gather
    tensor, alone = torch.zeros(batch, runner._spec.hidden_size), []
    for _ in range(num_steps):
        begin = time.perf_counter()
        all_reduce(tensor)
        alone.append(time.perf_counter() - begin)
    median = statistics.median
    return median(steps), median(calls), num_calls, median(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sys.stdout.write("workers, rows: ms a step; of it with the others: ms, share, calls; us of a call by itself\n")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(CONFIG))
        for size in options.sizes:
            ranks = Ranks(directory / str(size), size)
            for batch in options.batches:
                rounds = [ranks.run(decode, directory, batch, options.steps)[0] for _ in range(options.rounds)]
                step, others, calls, alone = min(rounds)  # the one that was least disturbed
                sys.stdout.write(
                    f"{size}, {batch}: {step * 1e3:.1f}; {others * 1e3:.1f}, {others / step:.0%}, {calls}; "
                    f"{alone * 1e6:.0f}\n"
                )
                sys.stdout.flush()
            ranks.stop()


if __name__ == "__main__":
    main()
