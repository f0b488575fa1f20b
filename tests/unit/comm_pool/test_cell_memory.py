"""Memory that outlives the processes which share it."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from comm_pool.cpu.cell_memory import (
    CellMemory,
    CellMemoryError,
    cell_memory,
    clear,
    directory_name,
    kv_name,
    link_name,
    mailbox_name,
    manifest_name,
    measurements_name,
    plane_name,
    queue_name,
    rest_name,
    weights_name,
)
from comm_pool.mixed import Mixed, Staged

LENGTH = 1 << 16
OF_A_RANK = (mailbox_name, kv_name, weights_name, rest_name, manifest_name, measurements_name)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def in_a_child(run: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_process_finds_what_another_one_has_written_before_it_ended() -> None:
    memory = CellMemory(["board-0"])

    def write() -> None:
        memory.map("board-0", LENGTH)[:5] = b"there"

    in_a_child(write)
    found = memory.map("board-0", LENGTH, is_own=False)
    assert found[:5] == b"there"
    with pytest.raises(TypeError):
        found[:5] = b"never"

    def write_again() -> None:
        own = memory.map("board-0", LENGTH)
        clear(own)
        own[:3] = b"new"

    in_a_child(write_again)
    assert found[:8] == b"new\0\0\0\0\0", "who has it mapped sees the next process' words"


def test_all_must_want_the_same_length() -> None:
    memory = CellMemory(["kv-0"])
    memory.map("kv-0", LENGTH)
    with pytest.raises(CellMemoryError, match="kv-0 has 65536 bytes for some rank, 131072 here"):
        memory.map("kv-0", 2 * LENGTH)


def test_what_is_put_is_replaced_as_a_whole() -> None:
    memory = CellMemory(["measured-0"])
    assert memory.get("measured-0") == b""
    in_a_child(lambda: memory.put("measured-0", b"a long message"))
    assert memory.get("measured-0") == b"a long message"
    memory.put("measured-0", b"short")
    assert memory.get("measured-0") == b"short"


def test_cleared_memory_is_given_back() -> None:
    memory = CellMemory(["kv-0"])
    own = memory.map("kv-0", 1 << 22)
    own[:] = b"k" * len(own)
    file = memory._files["kv-0"]
    assert os.fstat(file).st_blocks * 512 >= 1 << 22
    clear(own)
    assert os.fstat(file).st_blocks == 0
    assert own[:4] == bytes(4)


def test_memory_that_was_let_go_of_stays_mapped() -> None:
    memory = CellMemory(["board-0"])
    before = open_files()
    own = memory.map("board-0", LENGTH)
    memory.close()
    own[:5] = b"there"
    assert own[:5] == b"there"
    del own
    assert open_files() == before - 1


def test_a_cell_has_memory_for_all_groups_and_ranks() -> None:
    memory = cell_memory(4, (1, 2, 4), (Mixed(2, 2),))
    planes = [(0, 1), (2, 3), (0, 1, 2, 3), (0, 2), (1, 3)]
    queues = planes[:3]
    wanted = {plane_name(each) for each in planes} | {queue_name(each) for each in queues}
    wanted |= {directory_name(each) for each in (*queues, *((rank,) for rank in range(4)))}
    for name in OF_A_RANK:
        wanted |= {name(rank) for rank in range(4)}
    assert set(memory._files) == wanted
    memory.close()


def test_pipeline_groups_have_rings_of_links_and_directories_of_their_own() -> None:
    plain = cell_memory(8, (1, 2, 4, 8), ())
    mixed = Staged(2, 2)
    memory = cell_memory(8, (1, 2, 4, 8), (), (Staged(2), Staged(4), Staged(2), mixed))
    pairs, quads = [(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 1, 2, 3), (4, 5, 6, 7)]
    wanted = [link_name(pair, Staged(2), stage) for pair in pairs for stage in range(2)]
    wanted += [link_name(quad, Staged(4), stage) for quad in quads for stage in range(4)]
    wanted += [link_name(quad, mixed, s, part) for quad in quads for s in (0, 1) for part in (0, 1)]
    assert len(set(wanted)) == len(wanted)
    assert link_name((4, 5), Staged(2), 0) == "link-4-5-pp2-from0-part0"
    wanted += [directory_name(ranks[::-1]) for ranks in (*pairs, *quads)]
    wanted += [directory_name((c, d, a, b)) for a, b, c, d in quads]
    assert set(memory._files) - set(plain._files) == set(wanted)
    assert set(plain._files) <= set(memory._files)
    for each in (plain, memory):
        each.close()


@pytest.mark.parametrize(("first", "last"), [(0, 10), (5_000, 6_000), (4_000, 13_000), (1, 16_384)])
def test_a_part_of_a_piece_is_cleared_alone(first: int, last: int) -> None:
    size = 4 * mmap.PAGESIZE
    memory = cell_memory(1, (1,), ())
    mapped = memory.map(kv_name(0), size)
    mapped[:] = b"\1" * size
    clear(mapped, first, last)
    assert mapped[:] == b"\1" * first + bytes(last - first) + b"\1" * (size - last)
    memory.close()
