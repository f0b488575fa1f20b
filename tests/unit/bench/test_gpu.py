"""The command line of the GPU benchmark."""

import pytest

from tests.bench.gpu import parser, set_up
from tests.bench.gpu_shapes import FOUR_BITS, SHAPES


@pytest.mark.parametrize(
    ("given", "wanted", "name"),
    [("auto", "auto", "auto"), ("36", 36, "36"), ("48,0", (48, 0), "48-0")],
)
def test_whole_layers_are_one_number_or_one_for_each_rank(
    given: str, wanted: object, name: str
) -> None:
    options = parser().parse_args(
        ["--shape", "demo", "--ranks", "2", "--weight-parts", "2", "--whole-layers", given]
    )
    setup = set_up(options, "demo", None, 0.0)
    assert setup.weights["whole_layers"] == wanted
    assert setup.file.name.endswith(f"-parts-2-ffn-whole-{name}.json")


def test_published_four_bit_checkpoints_have_groups_of_128() -> None:
    groups = [
        SHAPES[f"llama-3-8b-{form}"]["quantization_config"]["group_size"] for form in FOUR_BITS
    ]
    assert groups == [128, 128]
