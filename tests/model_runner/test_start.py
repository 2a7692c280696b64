"""What a worker imports until its first tokens are there: not the compiler of torch, which takes a second."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from protos.model_files import resolve_model
from tests.model_runner.tiny import save_tiny

SCRIPT = """
import sys
from gpu_executor.worker import Worker
from protos.config import EngineConfig, build
from tests.model_runner.driver import Driver
worker = Worker(build(EngineConfig, model=sys.argv[1], num_kv_blocks=64, max_num_seqs=8, device="cpu"), ())
worker.load(lambda done, total: None)
driver = Driver(worker, 64, 8)
driver.run([driver.add([1, 2, 3], 5)])
sys.exit(next((name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor", "sympy"))), 0))
"""


@pytest.mark.parametrize("architecture", ["", "LlamaForCausalLM", "Qwen3MoeForCausalLM", "Gemma2ForCausalLM"])
def test_the_compiler_of_torch_is_not_imported(tmp_path: Path, architecture: str):
    path = tmp_path if architecture else resolve_model("")
    if architecture:
        save_tiny(tmp_path, architecture)
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True
    )
    assert ran.returncode == 0, ran.stderr
