"""Gives a disk what was written to it up to its last flush, as a disk has it that lost its power and its cache.

    flushed.py LOG DISK

LOG is what QEMU's blklogwrites driver wrote (the format of the kernel's dm-log-writes), DISK the disk as it was before.
"""

import struct
import sys

FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
SUPER = struct.Struct("<QQQI")  # magic, version, entries, sector size
ENTRY = struct.Struct("<QQQQ")  # sector, sectors, flags, length of the data
MAGIC = 0x6A736677736872


def entries(log):
    """The entries in order: flags, offset and length on the disk, where the data is in the log."""
    magic, version, _, size = SUPER.unpack(log.read(SUPER.size))
    assert (magic, version) == (MAGIC, 1), "this is no log of writes"
    log.seek(0, 2)
    end, at = log.tell(), size
    # The count in the head is written now and then; the log of a machine that was killed goes on after it.
    while at + size <= end:
        log.seek(at)
        sector, sectors, flags, length = ENTRY.unpack(log.read(ENTRY.size))
        data = at + size
        at = data + (0 if flags & DISCARD else sectors * size)
        if at > end or not (sectors or flags):
            return
        yield flags, sector * size, sectors * size, data


def main(log_path, disk_path):
    with open(log_path, "rb") as log, open(disk_path, "r+b") as disk:
        waiting, kept, lost = [], 0, 0
        for flags, offset, length, data in entries(log):
            if flags & FLUSH:
                for from_offset, from_length, from_data in waiting:
                    disk.seek(from_offset)
                    log.seek(from_data or 0)
                    disk.write(log.read(from_length) if from_data else bytes(from_length))
                kept += len(waiting)
                waiting = []
            if length:
                waiting.append((offset, length, None if flags & DISCARD else data))
        lost = len(waiting)
    name = disk_path.rsplit("/", 1)[-1].removesuffix(".disk")
    print(f"          disk {name}: {kept} writes kept, {lost} lost with its cache")


main(*sys.argv[1:])
