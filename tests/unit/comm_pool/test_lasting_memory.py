"""Handles of memory outlive the process that put them there, and end with their last holder."""

import os
import signal
from pathlib import Path

import pytest

from comm_pool.cpu.cell_memory import directory_name, kv_name
from comm_pool.cuda.lasting_memory import CONTENT_BYTES_MAX, MemoryHandles, lasting_memory
from comm_pool.layout import Rank
from comm_pool.mixed import Staged

NAME = kv_name(1)


def memory_with(text: bytes) -> int:
    file = os.memfd_create("aileron-handle")
    os.write(file, text)
    return file


def text_of(handles: MemoryHandles) -> bytes | None:
    found = handles.get(NAME)
    if found is None:
        return None
    texts = [os.pread(file, 100, 0) for file in found[1]]
    for file in found[1]:
        os.close(file)
    return b"|".join([found[0], *texts])


def open_files() -> set[str]:
    return {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}


def test_handles_of_a_killed_process_are_there_for_all_others() -> None:
    handles = MemoryHandles([kv_name(0), NAME])
    assert text_of(handles) is None
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        handles.put(NAME, b"12", [memory_with(b"one"), memory_with(b"two")])
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for _ in range(3):
        assert text_of(handles) == b"12|one|two"
    if not (pid := os.fork()):
        os._exit(0 if text_of(handles) == b"12|one|two" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert handles.get(kv_name(0)) is None
    handles.close()
    os.close(reader)
    os.close(writer)


def test_a_later_handle_replaces_an_earlier_one_and_nothing_is_left_open() -> None:
    handles = MemoryHandles([NAME])
    before = open_files()
    for text in (b"one", b"two"):
        file = memory_with(text)
        handles.put(NAME, b"3", [file])
        os.close(file)
        assert text_of(handles) == b"3|" + text
    assert open_files() == before
    handles.drop(NAME)
    assert text_of(handles) is None
    handles.put(NAME, b"none", [])
    assert text_of(handles) == b"none"
    handles.close()
    assert not any("memfd:aileron-handle" in each for each in open_files())


def test_what_is_too_large_for_a_message_is_refused() -> None:
    handles = MemoryHandles([NAME])
    with pytest.raises(ValueError, match="at most 253"):
        handles.put(NAME, b"x" * (CONTENT_BYTES_MAX + 1), [])
    assert handles.get(NAME) is None
    handles.close()


def test_each_rank_and_each_group_has_its_place() -> None:
    made = lasting_memory(4, (1, 2, 4), [Staged(2, 1), Staged(2, 2)])
    for rank in range(4):
        assert made.handles.get(kv_name(rank)) is None
    for key in ((Rank(3),), (Rank(2), Rank(3)), (Rank(1), Rank(0))):
        assert len(made.cell.map(directory_name(key), 64)) == 64
    assert made.splits == ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2))
    made.close()
