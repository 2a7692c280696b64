"""Generated files are what their sources generate."""

from protos.generate import ROOT, SOURCES, generate
from tests.architecture_table import README, with_table


def test_stubs_and_reference_are_fresh(tmp_path):
    """`make protos` would change nothing."""
    generated = generate(tmp_path)
    assert len(generated) == 3 * len(SOURCES) + 1
    for path in generated:
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), f"{path} is stale: run `make protos`"


def test_every_proto_is_generated_from():
    assert sorted(SOURCES) == sorted(str(path.relative_to(ROOT / "protos")) for path in ROOT.glob("protos/**/*.proto"))


def test_the_table_of_architectures_is_fresh():
    text = README.read_text()
    assert with_table(text) == text, "model_runner/README.md is stale: run `make tables`"
