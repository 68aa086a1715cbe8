"""A command that runs a program in the template process and ends as the program ends."""

import json
import os
import signal
import socket
import sys
import time

STATUS_NBYTES = 8
START_S = 120


def main() -> None:
    request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
    connection = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + START_S
    while connection.connect_ex(f"\0{sys.argv[1]}"):
        if time.monotonic() > deadline:
            sys.exit(f"no template process answers at {sys.argv[1]} after {START_S} s")
        time.sleep(0.02)  # the template imports torch
    socket.send_fds(connection, [len(request).to_bytes(STATUS_NBYTES, "big")], [0, 1, 2])
    connection.sendall(request)
    os.closerange(0, 3)  # the program alone holds them now
    answer = connection.recv(STATUS_NBYTES)
    if not answer:
        os._exit(70)  # the template was killed
    status = int.from_bytes(answer, "big", signed=True)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
