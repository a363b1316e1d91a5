"""Two hosts: two network namespaces of this machine, joined by a cable that can be slow, or pulled."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gpipe_bench.bench.storage.raw import RawResult
from tests.bench.cells_of import cell, in_file
from tests.distributed.two_hosts import model

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "tests/distributed/two_hosts.py")
MISSING = [tool for tool in ("ip", "tc") if shutil.which(tool) is None] + (["root"] if os.geteuid() else [])

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
    pytest.mark.timeout(180),
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


@pytest.fixture
def hosts():
    hosts = Hosts()
    try:
        hosts.connect()
        yield hosts
    finally:
        hosts.remove()


def losses(text: str) -> list[float]:
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith("loss ")]


@pytest.mark.parametrize(("schedule", "rate"), [("1f1b", None), ("zb_v", "20mbit")])
def test_a_pipeline_trains_across_two_hosts(hosts, schedule, rate):
    if rate is not None:
        hosts.slow_down(rate)
    first, second = hosts.start(SCRIPT, schedule, "3", "60")
    out, other = first.communicate(timeout=120)[0], second.communicate(timeout=120)[0]
    assert (first.returncode, second.returncode) == (0, 0), out + other
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
    assert losses(out) == pytest.approx(expected, rel=1e-5)


def test_the_suite_measures_across_two_hosts(hosts, tmp_path):
    made = cell(schedule="gpipe", transfer="direct", processes=2, hosts=2)
    words = "-m", "gpipe_bench", "run", *in_file(tmp_path, made), "--repeat", "3", "--out", str(tmp_path / "a.json")
    printed = [process.communicate(timeout=120)[0] for process in hosts.start(*words)]
    row = RawResult.read(tmp_path / "a.json").row
    assert (row.status, row.processes, row.hosts, row.device_count, row.repeat) == ("ok", 2, 2, 2, 3), printed
    assert sum("ok: dep-x-ptl repeat 3: " in text for text in printed) == 1


def line_with(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    return next(line for line in process.stdout if text in line)


def test_a_cable_that_is_pulled_ends_both_hosts(hosts):
    processes = hosts.start(SCRIPT, "1f1b", "100000", "5")
    line_with(processes[0], "loss ")
    hosts.pull_the_cable()
    pulled = time.monotonic()
    for process in processes:
        assert "silent" in line_with(process, "must stop")
    assert time.monotonic() - pulled < 60
    # The processes have ended; torchrun itself waits for the other host for a minute and more.
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
