"""Two hosts: two network namespaces of this machine, joined by a cable that can be slow, or pulled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gpipe_bench.suite.storage.raw import RawResult
from tests.distributed.two_hosts import model
from tests.suite.cells_of import cell, in_file

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests/distributed/two_hosts.py")
SCHEDULES = ("1f1b", "zb_v")
MISSING = [tool for tool in ("ip", "tc") if shutil.which(tool) is None] + (["root"] if os.geteuid() else [])

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.timeout(300),
]


def command(words: str, *, check: bool = True) -> None:
    subprocess.run(words.split(), check=check, capture_output=True, timeout=20)


class Hosts:
    """Two hosts with the addresses 10.77.0.1 and 10.77.0.2."""

    def __init__(self) -> None:
        self.names = [f"gpipe-{os.getpid()}-{number}" for number in range(2)]
        self.cables = [f"gp{os.getpid()}n{number}"[-15:] for number in range(2)]

    def connect(self) -> None:
        for name in self.names:
            command(f"ip netns add {name}")
        command(f"ip link add {self.cables[0]} type veth peer name {self.cables[1]}")
        for number, (name, cable) in enumerate(zip(self.names, self.cables, strict=True), 1):
            command(f"ip link set {cable} netns {name}")
            command(f"ip -n {name} addr add 10.77.0.{number}/24 dev {cable}")
            command(f"ip -n {name} link set {cable} up")
            command(f"ip -n {name} link set lo up")

    def slow_down(self, rate: str) -> None:
        for name, cable in zip(self.names, self.cables, strict=True):
            command(f"ip netns exec {name} tc qdisc add dev {cable} root tbf rate {rate} burst 64kb latency 400ms")

    def pull_the_cable(self) -> None:
        command(f"ip -n {self.names[0]} link set {self.cables[0]} down")

    def remove(self) -> None:
        for name in self.names:
            command(f"ip netns del {name}", check=False)

    def start(self, *program: str) -> list[subprocess.Popen[str]]:
        """A process on each host."""
        # The first host does not know its own address in the namespace.
        options = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id test --rdzv-endpoint 10.77.0.1:29400"
        return [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", *options.split()),
                    *("--node-rank", str(number), "--local-addr", f"10.77.0.{number + 1}"),
                    *("--rdzv-conf", f"is_host={1 - number}", *program),
                ],
                cwd=ROOT,
                env={**os.environ, "GLOO_SOCKET_IFNAME": cable, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for number, (name, cable) in enumerate(zip(self.names, self.cables, strict=True))
        ]


@pytest.fixture(scope="module")
def hosts():
    hosts = Hosts()
    try:
        hosts.connect()
        yield hosts
    finally:
        hosts.remove()


# First: the cable is pulled later.
def test_the_suite_measures_across_two_hosts(hosts, tmp_path):
    made = cell(schedule="gpipe", transfer="direct", processes=2, hosts=2)
    words = "-m", "gpipe_bench", "run", *in_file(tmp_path, made), "--repeat", "3", "--out", str(tmp_path / "a.json")
    printed = [process.communicate(timeout=240)[0] for process in hosts.start(*words)]
    row = RawResult.read(tmp_path / "a.json").row
    assert (row.status, row.processes, row.hosts, row.device_count, row.repeat) == ("ok", 2, 2, 2, 3), printed
    assert sum(", dep-x-ptl repeat 3: " in text for text in printed) == 1


@pytest.fixture(scope="module")
def printed(hosts):
    """What is printed on each host: over a slow cable, which is pulled amid the last pipeline."""
    hosts.slow_down("20mbit")
    processes, lines = hosts.start(SCRIPT, *SCHEDULES), ([], [])
    lines[0].extend(until(processes[0], "last one"))
    until(processes[0], "1f1b ")
    hosts.pull_the_cable()
    for process, own in zip(processes, lines, strict=True):
        own.extend(until(process, "must stop"))
    # The processes have ended; torchrun itself waits for the other host for a minute and more.
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return lines


def until(process: subprocess.Popen[str], text: str) -> list[str]:
    """The lines up to one with a text, or all of them."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            break
    return lines


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_trains_across_two_hosts(printed, schedule):
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 64 * 64).view(64, 64)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = functional.mse_loss(plain(x), x)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    before = printed[0][: printed[0].index("last one\n")]
    found = [float(line.split()[1]) for line in before if line.startswith(f"{schedule} ")]
    assert found == pytest.approx(expected, rel=1e-5), printed


def test_a_cable_that_is_pulled_ends_both_hosts(printed):
    for lines in printed:
        assert "must stop" in lines[-1]
        assert "silent" in lines[-1]
