"""A disk on which everything takes longer: the C library's calls on files of one folder wait.

SQLite and Python both end up in those calls, so nothing of the product is changed for it. Needs a
C compiler, as the product does.
"""

import subprocess
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static void wait_for_disk(int fd) {
    char link[32], path[4096];
    const char *folder = getenv("SLOW_DISK_FOLDER"), *wait_us = getenv("SLOW_DISK_US");
    if (!folder || !wait_us) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder)) == 0) usleep(atol(wait_us));
}

#define SLOW(type, name, params, args)                          \
    type name params {                                          \
        static type(*next) params;                              \
        if (!next) next = (type(*) params)dlsym(RTLD_NEXT, #name); \
        wait_for_disk(fd);                                      \
        return next args;                                       \
    }

SLOW(int, fsync, (int fd), (fd))
SLOW(int, fdatasync, (int fd), (fd))
SLOW(ssize_t, read, (int fd, void *data, size_t size), (fd, data, size))
SLOW(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
SLOW(ssize_t, pread64, (int fd, void *data, size_t size, off64_t at), (fd, data, size, at))
SLOW(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
"""


def slowed(folder: Path, wait_ms: int) -> dict[str, str]:
    """Return the environment in which files under a folder are slow; nothing of it for 0 ms."""
    if not wait_ms:
        return {}
    source, library = folder / "slow_disk.c", folder / "slow_disk.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return {
        "LD_PRELOAD": str(library),
        "SLOW_DISK_FOLDER": str(folder.resolve()),
        "SLOW_DISK_US": str(wait_ms * 1_000),
    }
