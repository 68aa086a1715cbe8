"""Last import of a fork server that was started with SIGINT blocked: unblocks it.

A Ctrl-C that came meanwhile is dropped: it was for the main process. `multiprocessing` ignores SIGINT in the
server from now on, and gives the processes that it forks the handler that is put back here.
"""

import signal
import threading

if threading.current_thread() is threading.main_thread():
    _handler = signal.signal(signal.SIGINT, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, _handler)
