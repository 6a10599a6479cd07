"""Nodes on one machine: each has a network, a hostname, processes and memory of its own; a cable can be pulled.

    with emulated_nodes(2) as nodes:
        nodes[0].start(["torchrun", "--rdzv-endpoint", "node-0:29400", ...], environment, log)
        nodes[1].cut()      # its cable is pulled: no process is notified, and what is sent does not arrive
        nodes[1].mend()
        nodes[1].deafen()   # what others send to it is lost, what it sends arrives
        nodes[1].power_off()
        nodes[1].boot()

A node is a set of Linux namespaces (network, hostname, mounts, processes). Its cable is a pair of virtual interfaces
that ends at a bridge, which has a namespace of its own. So nodes share nothing but the disk. All of it is gone when the
processes are. Needs the right to create namespaces, as root has, and commands of util-linux and iproute2;
`emulated_nodes` skips the test otherwise.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ranks import PR_SET_PDEATHSIG

KINDS = ("--net", "--uts", "--mount", "--pid")
CABLE, BRIDGE = "eth0", "bridge"
PATIENCE = 10.0  # seconds until namespaces are there


class Namespaces:
    """One of each kind, which live as long as a process, the keeper. ``init``: the first process inside; if it ends,
    all others do. Skips the test where that is not permitted."""

    def __init__(self, name: str) -> None:
        self._keeper = subprocess.Popen(
            ["unshare", *KINDS, "--fork", "--kill-child", "--mount-proc", "sleep", "infinity"],
            stderr=subprocess.PIPE, text=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        self.init = self._wait_for_init()
        self.run("hostname", name)
        self.run("ip", "link", "set", "lo", "up")

    def inside(self, *command: str) -> list[str]:
        """A command that runs another one inside."""
        return ["nsenter", "--target", str(self.init), *KINDS, "--", *command]

    def run(self, *command: str) -> None:
        """Run a command inside. Raises CalledProcessError."""
        subprocess.run(self.inside(*command), check=True, capture_output=True, text=True)

    def end(self) -> None:
        """End all processes inside."""
        self._keeper.kill()
        self._keeper.communicate()

    def _wait_for_init(self) -> int:
        keeper, end = self._keeper.pid, time.monotonic() + PATIENCE
        while self._keeper.poll() is None and time.monotonic() < end:
            for child in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split():
                if Path(f"/proc/{child}/comm").read_text() == "sleep\n":  # before it, /proc has been mounted
                    return int(child)
            time.sleep(0.01)
        self._keeper.kill()
        said = self._keeper.communicate()[1].strip()
        pytest.skip(f"needs the right to create network namespaces, as root has: {said}")


class Node:
    """One node, booted, its cable plugged in. ``others``: the namespaces of the bridge. ``hosts``: its /etc/hosts."""

    def __init__(self, name: str, address: str, others: Namespaces, hosts: Path) -> None:
        self.name, self.address = name, address
        self._bridge, self._hosts, self._port = others, hosts, f"to-{name}"
        self.boot()

    def boot(self) -> None:
        """Start it, without processes, and with nothing in its memory."""
        self._own = Namespaces(self.name)
        self._own.run("mount", "--bind", str(self._hosts), "/etc/hosts")
        self._own.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        self._bridge.run("ip", "link", "add", self._port, "type", "veth", "peer", "name", CABLE)
        # The number of a process counts in one namespace of processes: here in this one, outside of all nodes.
        move = ["ip", "link", "set", CABLE, "netns", str(self._own.init)]
        subprocess.run(["nsenter", "--target", str(self._bridge.init), "--net", "--", *move], check=True)
        self._bridge.run("ip", "link", "set", self._port, "master", BRIDGE, "up")
        self._own.run("ip", "address", "add", f"{self.address}/24", "dev", CABLE)
        self._own.run("ip", "link", "set", CABLE, "up")

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on this node, in a process group of its own. What it prints goes to the file ``log``."""
        with log.open("wb") as out:
            return subprocess.Popen(
                self._own.inside(*command), env={**os.environ, **environment}, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def cut(self) -> None:
        """Pull the cable."""
        self._bridge.run("ip", "link", "set", self._port, "down")

    def deafen(self) -> None:
        """Lose all that is sent to this node: no packet fits into a bucket of ten bytes. At the bridge, since a sender
        is notified of packets that its own queue loses, and gives up sooner."""
        self._queue("tbf", "rate", "1kbit", "burst", "10", "limit", "10")

    def mend(self) -> None:
        """Undo `cut` and `deafen`."""
        self._bridge.run("ip", "link", "set", self._port, "up")
        self._queue("pfifo")

    def _queue(self, *kind: str) -> None:
        self._bridge.run("tc", "qdisc", "replace", "dev", self._port, "root", *kind)

    def power_off(self) -> None:
        """End it at once; no process is notified."""
        self._bridge.run("ip", "link", "delete", self._port)
        self._own.end()

    def close(self) -> None:
        self._own.end()


@contextmanager
def emulated_nodes(count: int) -> Iterator[list[Node]]:
    """Nodes that know each other by name: node-0, node-1, ..."""
    if missing := [name for name in ("unshare", "nsenter", "hostname", "ip", "tc") if shutil.which(name) is None]:
        pytest.skip(f"needs the commands of util-linux and iproute2, found no {', '.join(missing)}")
    addresses = {f"node-{i}": f"10.77.0.{i + 1}" for i in range(count)}
    bridge, nodes = Namespaces(BRIDGE), list[Node]()
    try:
        bridge.run("ip", "link", "add", BRIDGE, "type", "bridge")
        bridge.run("ip", "link", "set", BRIDGE, "up")
        with tempfile.TemporaryDirectory() as folder:
            hosts = Path(folder) / "hosts"
            hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in addresses.items()))
            for name, address in addresses.items():
                nodes.append(Node(name, address, bridge, hosts))
            yield nodes
    finally:
        for node in nodes:
            node.close()
        bridge.end()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
