"""The hosts of tests that need two."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from frameworks.hosts import HOSTS, Host


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts that reach each other by a cable between their interfaces `eth0`."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip", "hostname") if not shutil.which(tool)]:
        pytest.skip(f"no {' and '.join(missing)} here")
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in HOSTS.items()))
    made = [Host(name, names) for name in HOSTS]
    try:
        if not all(map(Host.is_ready, made)):
            pytest.skip("no hosts can be made of namespaces here (it takes root)")
        ends = [f"{host.holder.pid}" for host in made]
        cable = f"ip link add eth0 netns {ends[0]} type veth peer name eth0 netns {ends[1]}"
        subprocess.run(cable.split(), check=True)
        for host in made:
            host.output("ip", "address", "add", f"{HOSTS[host.name]}/24", "dev", "eth0")
            host.output("ip", "link", "set", "eth0", "up")
        yield made
    finally:
        for host in made:
            host.end()
