"""The number of files that a process may have open, connections among them."""

import resource

OTHER_FILES = 256
"""Open files besides the connections."""


def allow_connections(count: int) -> None:
    """Raise the limit of open files of this process and of those that it starts, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
