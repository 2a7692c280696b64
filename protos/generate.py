"""Makes what is generated from the .proto files: Python stubs and the reference page.

    python -m protos.generate [DIRECTORY]

writes them under a directory, the repository's root unless told. Needs grpcio-tools.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from protos.reference import reference_page

ROOT = Path(__file__).parents[1]
SOURCES = [
    *(f"tailrace/v1/{name}.proto" for name in ("generation", "model", "admin", "load_report")),
    *(f"compat/{name}.proto" for name in ("smg_common", "vllm_engine", "vllm_inference", "vllm_control", "kserve")),
]
ENDS = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
REFERENCE = Path("protos/REFERENCE.md")
_OWN_IMPORT = re.compile(r"^from (?=tailrace\.|compat )", re.MULTILINE)


def generate(directory: Path) -> list[Path]:
    """Writes stubs and page below `directory`, as they lie in the repository; returns their paths in it."""
    target = directory / "protos"
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        described = Path(scratch) / "set.binpb"
        outputs = [f"--{kind}={target}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
        outputs += [f"--descriptor_set_out={described}", "--include_source_info"]
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", *outputs, *SOURCES], cwd=ROOT, check=True
        )
        files = FileDescriptorSet.FromString(described.read_bytes()).file
    stubs = [Path("protos") / source.replace(".proto", end) for source in SOURCES for end in ENDS]
    for stub in stubs:
        # Names of .proto files are those of their package; ours lies one folder deeper.
        text = (directory / stub).read_text()
        (directory / stub).write_text(_OWN_IMPORT.sub("from protos.", text))
    (directory / REFERENCE).write_text(reference_page([file for file in files if file.package.startswith("tailrace.")]))
    return [*stubs, REFERENCE]


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
