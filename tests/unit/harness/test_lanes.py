"""Which group of tests a worker takes next."""

from tests.harness.runs.lanes import group_of, next_group


def test_the_first_worker_takes_groups_with_ranks_and_the_others_the_rest() -> None:
    groups = ["tests/unit/test_a.py", "ranks-numerics", "gateway", "ranks-sp"]
    assert next_group(groups, is_first=True) == "ranks-numerics"
    assert next_group(groups, is_first=False) == "tests/unit/test_a.py"


def test_a_worker_without_groups_of_its_own_helps_the_other() -> None:
    assert next_group(["gateway"], is_first=True) == "gateway"
    assert next_group(["ranks-sp", "ranks-numerics"], is_first=False) == "ranks-sp"


def test_a_module_is_a_group_unless_it_shares_processes_with_others() -> None:
    assert group_of("tests/unit/harness/test_record.py") == "tests/unit/harness/test_record.py"
    assert group_of("tests/integration/test_sp.py") == "ranks-tests/integration/test_sp.py"
    assert group_of("tests/integration/test_four_ranks.py") == "ranks-four"
    assert group_of("tests/integration/test_gateway.py") == "gateway"
