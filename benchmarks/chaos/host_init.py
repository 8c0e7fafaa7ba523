"""Process 1 of a host: it lives until it is killed, which ends all processes of the host. The kernel reaps
orphans that end, because this process ignores SIGCHLD. It uses the standard library only."""

import signal

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
