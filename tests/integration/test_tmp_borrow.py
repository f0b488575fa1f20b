import pytest

from tests.harness.vllm.step_checks import check_runs
from tests.harness.vllm.tiny_models import model_of

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.mark.parametrize("borrow", ["ffn", "all"])
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("name", ["demo", "untied", "one-kv-head", "qwen3-moe"])
def test_four(name, parts, borrow, tmp_path):
    extra = dict(widths=[1, 2, 4], mixed=["sp2tp2"]) if parts == 2 else dict(widths=[1, 4])
    check_runs(
        tmp_path,
        name,
        model_of(name, tmp_path),
        ranks=4,
        parts=parts,
        borrow=borrow,
        runs=("random-1",),
        **extra,
    )


@pytest.mark.parametrize("borrow", ["ffn", "all"])
@pytest.mark.parametrize("name", ["demo", "untied", "one-kv-head", "qwen3-moe"])
def test_dp(name, borrow, tmp_path):
    check_runs(
        tmp_path,
        name,
        model_of(name, tmp_path),
        ranks=2,
        parts=2,
        borrow=borrow,
        widths=[1, 2],
        runs=("dp",),
        alone=1,
    )
