"""Generated files are what their sources generate."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROTO = "protos/tailrace/v1/generation.proto"


def test_stubs_are_fresh(tmp_path):
    """`make protos` would change nothing."""
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, PROTO], cwd=ROOT, check=True)
    generated = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(generated) == 3
    for path in generated:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"{path} is stale: run `make protos`"
