"""The shape of the repository, as tests: who may import whom, no cycles, small files, no torch in the front end."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLIENT = ROOT / "clients" / "python"
MAY_IMPORT = {
    "protos": set(),
    "kernels": set(),
    "model_runner": {"protos", "kernels"},
    "gpu_executor": {"protos", "model_runner"},
    "core_proc": {"protos", "gpu_executor"},
    "async_engine": {"protos", "core_proc"},
    "tailrace_client": {"protos"},
}
MAX_LINES = 400
TORCH_FREE = ("protos", "async_engine", "core_proc", "tailrace_client")
TORCH_USERS = {"gpu_executor.worker"}
TOP_LEVEL = {
    "pyproject.toml",
    *("protos", "async_engine", "core_proc", "gpu_executor", "model_runner", "kernels", "clients", "tests"),
    *("README.md", "LICENSE", "Makefile"),
}


def modules():
    found = {}
    for top in MAY_IMPORT:
        base = CLIENT if top == "tailrace_client" else ROOT
        for path in (base / top).rglob("*.py"):
            if "_pb2" not in path.name:
                name = ".".join(path.relative_to(base).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported_names(path):
    """Every module that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


IMPORTS = {name: imported_names(path) for name, path in MODULES.items()}
GRAPH = {name: {target for target in targets if target in MODULES} for name, targets in IMPORTS.items()}


def test_imports_go_one_way():
    for name, targets in GRAPH.items():
        top = name.partition(".")[0]
        for target in targets:
            other = target.partition(".")[0]
            assert other == top or other in MAY_IMPORT[top], f"{name} may not import {target}"


def test_there_is_no_import_cycle():
    done, path = set(), []

    def visit(name):
        assert name not in path, "cycle: " + " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for target in GRAPH[name]:
                visit(target)
            path.pop()
            done.add(name)

    for name in GRAPH:
        visit(name)


def test_files_are_small():
    for path in MODULES.values():
        assert len(path.read_text().splitlines()) <= MAX_LINES, path


def test_torch_is_imported_only_where_tensors_are():
    for name, targets in IMPORTS.items():
        top = name.partition(".")[0]
        if top in TORCH_FREE or (top == "gpu_executor" and name not in TORCH_USERS):
            torch = {target for target in targets if target.partition(".")[0] == "torch"}
            assert not torch, f"{name} may not import torch"


@pytest.mark.parametrize("module", ["async_engine.server", "async_engine.llm", "core_proc.proc", "tailrace_client"])
def test_front_end_core_and_client_start_without_torch_and_transformers(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    environment = {"PYTHONPATH": f"{ROOT}:{CLIENT}", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


def test_transformers_still_imports_models_beside_our_kernels_package():
    """transformers probes a package named `kernels`; ours is first on the path."""
    code = "import kernels, transformers; from transformers import LlamaForCausalLM; print(LlamaForCausalLM)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    assert len((ROOT / "kernels" / "__init__.py").read_text().splitlines()) == 1


def test_every_package_is_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages


def test_top_level_entries_are_the_fixed_ones():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entries = {line.partition("/")[0] for line in listed.splitlines()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL
