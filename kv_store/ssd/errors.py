"""Errors of a file of blocks.

DiskError         the device or the file system failed: the block is not to be had, others may be
├── DiskFull      no space left: nothing was stored
└── CorruptBlock  what is there is not the block that was written: it must be forgotten
"""

from baton.core.errors import BatonError


class DiskError(BatonError):
    pass


class DiskFull(DiskError):
    pass


class CorruptBlock(DiskError):
    pass
