"""The whole way: a made checkpoint of every layout through ``harness diff``, exit 0."""

from __future__ import annotations

import pytest

from cases.checkpoints.layout import LAYOUTS
from harness.cli import main
from tests.checkpoints.conftest import OTHERS, Made, patch


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, *OTHERS])
def test_layouts_pass(made: Made, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The sparse layer, with its weights audit, on tokens beyond the window."""
    words = ["diff", "--layer", "1", "--checkpoint", str(made(layout)), "--length", "150", "--mode", "local"]
    assert main(words) == 0, capsys.readouterr().out


def test_a_bad_scale_is_bad_input(copy: Made, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy("compressed-tensors")
    name = "model.layers.1.mlp.experts.1.up_proj.weight_global_scale"
    patch(folder, name, lambda t: t * 0)
    assert main(["diff", "--layer", "1", "--checkpoint", str(folder), "--length", "8"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert name in error
