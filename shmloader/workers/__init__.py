"""The workers of one iterator, as the main process sees them: start, talk, watch, restart, stop.

There are two kinds with one interface, processes and threads. Each worker process has a pipe each way that
only the two of them hold, so a worker that dies can leave neither a lock taken nor half a message behind. Its
death is an event of its own (a pidfd, elsewhere the process sentinel), waited for together with the pipes.

* `shmloader.workers.choice`: which kind a loader has
* `shmloader.workers.interface`: what the main process needs of either kind
* `shmloader.workers.process`: one worker process and its pipes
* `shmloader.workers.launch`: how it is started, and what can be wrong with its arguments
* `shmloader.workers.parcel`: what workers that are started together are given, pickled once
* `shmloader.workers.server`: the fork server, and what it imports for them
* `shmloader.workers.preload`: how it does, in the server itself
* `shmloader.workers.in_server`: what the server imports to that end
* `shmloader.workers.endings`: what is said of workers that died or do not answer
* `shmloader.workers.crew`: all worker processes of one iterator
* `shmloader.workers.threads`: all worker threads of one iterator
* `shmloader.workers.thread_link`: what connects one with the main process
* `shmloader.workers.gate`: its access to the shared memory, which ends before the thread may
* `shmloader.workers.forks`: what becomes of either in processes that the program forks
"""

from shmloader.workers.choice import start_workers
from shmloader.workers.crew import ProcessWorkers
from shmloader.workers.endings import log_replacement, worker_timeout
from shmloader.workers.interface import Worker, Workers
from shmloader.workers.threads import PROCESS, THREAD, ThreadWorkers, check_worker_type

__all__ = [
    "PROCESS",
    "THREAD",
    "ProcessWorkers",
    "ThreadWorkers",
    "Worker",
    "Workers",
    "check_worker_type",
    "log_replacement",
    "start_workers",
    "worker_timeout",
]
