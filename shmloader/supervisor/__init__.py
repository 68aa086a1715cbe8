"""The workers of one iterator, as the main process sees them: start, talk, watch, restart, stop.

There are two kinds with one interface, processes and threads. Each worker process has a pipe each way that
only the two of them hold, so a worker that dies can leave neither a lock taken nor half a message behind. Its
death is an event of its own (a pidfd, elsewhere the process sentinel), waited for together with the pipes.

* `shmloader.supervisor.choice`: which kind a loader has
* `shmloader.supervisor.base`: what the main process needs of either kind, and their life
* `shmloader.supervisor.processes`: all worker processes of one iterator
* `shmloader.supervisor.worker_process`: one worker process and its pipes
* `shmloader.supervisor.launch`: the start of a worker process, and its first line
* `shmloader.supervisor.spawn_payload`: arguments of workers that start together, pickled once
* `shmloader.supervisor.mapped_arrays`: arrays over files in such a pickle
* `shmloader.supervisor.fork_server`, `fork_server_ready`: the fork server, and its last import
* `shmloader.supervisor.death_reports`: messages about workers that died or do not answer
* `shmloader.supervisor.threads`: all worker threads of one iterator
* `shmloader.supervisor.thread_channel`: a worker thread's queues, and its revocable access to slots
* `shmloader.supervisor.after_program_fork`: workers in processes that the program forks
"""

from shmloader.supervisor.base import Worker, Workers
from shmloader.supervisor.choice import start_workers
from shmloader.supervisor.death_reports import log_replacement, worker_timeout

__all__ = [
    "Worker",
    "Workers",
    "log_replacement",
    "start_workers",
    "worker_timeout",
]
