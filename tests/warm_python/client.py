"""A command that runs a program in the template process and ends as the program ends."""

import json
import os
import signal
import socket
import sys
import time

STATUS_NBYTES = 8


def main() -> None:
    request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
    connection = socket.socket(socket.AF_UNIX)
    while connection.connect_ex(f"\0{sys.argv[1]}"):
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
