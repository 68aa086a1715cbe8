"""The workers of one iterator, as the main process sees them: start, talk, watch, restart, stop.

There are two kinds with one interface, processes and threads. Each worker process has a pipe each way that
only the two of them hold, so a worker that dies can leave neither a lock taken nor half a message behind. Its
death is an event of its own (a pidfd, elsewhere the process sentinel), waited for together with the pipes.

* `shmloader.supervisor.choice`: which kind a loader has
* `shmloader.supervisor.interface`: what the main process needs of either kind
* `shmloader.supervisor.process`: one worker process and its pipes
* `shmloader.supervisor.launch`: how it is started, and what can be wrong with its arguments
* `shmloader.supervisor.spawn_payload`: what workers that are started together are given, pickled once
* `shmloader.supervisor.fork_server`: the fork server, and what it imports for them
* `shmloader.supervisor.preload`: how it does, in the server itself
* `shmloader.supervisor.in_server`: what the server imports to that end
* `shmloader.supervisor.reports`: what is said of workers that died or do not answer
* `shmloader.supervisor.processes`: all worker processes of one iterator
* `shmloader.supervisor.threads`: all worker threads of one iterator
* `shmloader.supervisor.thread_channel`: what connects one with the main process
* `shmloader.supervisor.revocable`: its access to the shared memory, which ends before the thread may
* `shmloader.supervisor.forks`: what becomes of either in processes that the program forks
"""

from shmloader.supervisor.choice import start_workers
from shmloader.supervisor.interface import Worker, Workers
from shmloader.supervisor.processes import ProcessWorkers
from shmloader.supervisor.reports import log_replacement, worker_timeout
from shmloader.supervisor.threads import ThreadWorkers

__all__ = [
    "ProcessWorkers",
    "ThreadWorkers",
    "Worker",
    "Workers",
    "log_replacement",
    "start_workers",
    "worker_timeout",
]
