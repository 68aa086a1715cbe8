"""The worker processes of one iterator, as the main process sees them: start, talk, watch, restart, stop.

Each worker has a pipe each way that only the two of them hold, so a worker that dies can leave neither a
lock taken nor half a message behind. Its death is an event of its own (a pidfd, elsewhere the process
sentinel), waited for together with the pipes.

* `shmloader.workers.process`: one worker and its pipes
* `shmloader.workers.launch`: how its process is started, and what can be wrong with its arguments
* `shmloader.workers.crew`: all workers of one iterator
"""

from shmloader.workers.crew import Workers
from shmloader.workers.launch import check_importable
from shmloader.workers.process import Worker

__all__ = ["Worker", "Workers", "check_importable"]
