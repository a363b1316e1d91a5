"""`gpipe-bench emulate`: a script runs to its end on virtual devices, and a planted race is found with its lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.emulator.build import obstacle
from gpipe_bench.figures.tables import read_rows
from gpipe_bench.results import schema
from gpipe_bench.suite.published.known_errors import speed_error_words
from tests.models.test_vision_packages import ABSENT, write_torchvision
from tests.overlaps import partial_overlaps
from tests.processes import command
from tests.project.pages import PAGES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "emulated" / "planted_race.py"
pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

LOOP = """
import torch
kind = torch.accelerator.current_accelerator().type
places = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
weights = [torch.ones(64, 64, device=place, requires_grad=True) for place in places]
for _ in range({steps}):
    x = torch.ones(8, 64, device=places[0])
    for place, weight in zip(places, weights):
        x = x.to(place) @ weight
    x.sum().backward()
{end}
"""


def emulate(*words, folder=ROOT):
    return command(["emulate", *words], folder)


@pytest.mark.parametrize("variant", ["baseline", "dep-str-ptl"])
def test_one_gpu_needs_what_was_measured(variant):
    run = emulate(EXAMPLE.with_name("unet_on_one_gpu.py"), "--devices", 1, "--profile", "h100", "--", variant)
    assert run.returncode == 0, run.stderr
    allocated = float(re.search(r"^ +0( +[0-9.]+%){3} +([0-9.]+)", run.stdout, re.MULTILINE)[2])
    rows = read_rows(
        REFERENCE_FOLDER / "measured/1x-nvidia-h100-80gb-hbm3/ablation.csv", schema.TABLES["rows"].headers[-1]
    )
    measured = {row.peak_allocated_gib for row in rows if row.variant == variant and row.status == "ok"}
    # Workspaces of cuDNN are missing.
    assert 0.85 * max(measured) <= allocated <= min(measured)


def test_traces_of_one_script_on_two_machines_differ_in_durations_alone(tmp_path):
    script = tmp_path / "loop.py"
    for name, profile, end in (("a.jsonl", "h100", ""), ("b.jsonl.gz", "h200", ""), ("c.jsonl", "h100", "x * 2")):
        script.write_text(LOOP.format(steps=2, end=end))
        run = emulate(script, "--devices", 2, "--profile", profile, "--trace", name, folder=tmp_path)
        assert run.returncode == 0, run.stderr
    same = command(["diff", "a.jsonl", "b.jsonl.gz"], tmp_path)
    assert same.returncode == 0, same.stderr
    assert re.fullmatch(r"the same rows; [1-9][0-9]* rows have other durations\n", same.stdout)
    other = command(["diff", "a.jsonl", "c.jsonl"], tmp_path)
    assert other.returncode == 1
    assert re.match(r"row [0-9]+ differs in ", other.stdout)


def test_a_cell_has_a_trace_of_rows(tmp_path):
    small = "--model-args", "depth=2;B=1;C=8;size=32", "--batch-size", 8, "--chunks", 2, "--partitions", 2
    run = emulate(*small, "--trace", "rows.jsonl", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    kinds = {line.get("of") for line in lines}
    assert {"forward", "recompute", "backward", "copy", "copy_grad"} <= kinds


def test_the_page_shows_what_is_printed():
    run = emulate(EXAMPLE, "--devices", 2, "--profile", "h100")
    assert run.returncode == 0, run.stderr
    assert "\n".join(run.stdout.splitlines()[:2]) in PAGES["docs/emulator.md"]


def test_without_a_script_a_balance_is_found_for_a_cell():
    run = emulate("--partitions", 2, "--model-args", "depth=2;B=1;C=8;size=32", "--batch-size", 8, "--chunks", 2)
    assert run.returncode == 0, run.stderr
    layers = [int(text) for text in re.findall(r"^cuda:\d +(\d+) ", run.stdout, re.MULTILINE)]
    assert len(layers) == 2
    assert sum(layers) == 29


def script(folder, *, steps=3, end=""):
    path = folder / "train.py"
    path.write_text(LOOP.format(steps=steps, end=end))
    return path


def line_of(text):
    lines = EXAMPLE.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_a_planted_race_is_found_with_operators_and_lines():
    run = emulate(EXAMPLE, "--devices", 2, "--races")
    assert run.returncode == 0, run.stderr
    assert "1 race\n" in run.stdout
    assert re.search(rf"read: device_to_device .*planted_race.py:{line_of('moved =')}\n", run.stdout)
    assert re.search(rf"does not wait for relu.* .*planted_race.py:{line_of('hidden = front')}\n", run.stdout)


def test_with_the_wait_there_is_no_race():
    run = emulate(EXAMPLE, "--devices", 2, "--races", "--", "--mended")
    assert run.returncode == 0, run.stderr
    assert "no races" in run.stdout


FREED = """
import torch
kind = torch.accelerator.current_accelerator().type
side = torch.Stream(f"{kind}:0")
x = torch.ones(2**20, device=f"{kind}:0")
side.wait_stream(torch.accelerator.current_stream(f"{kind}:0"))
with side:
    y = x * 2
del x
z = torch.ones(2**20, device=f"{kind}:0")
"""


def test_memory_freed_too_early_is_found_after_the_line_before(tmp_path):
    path = tmp_path / "freed.py"
    path.write_text(FREED)
    run = emulate(path, "--devices", 1, "--races", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert f"free: free on device 0 stream 0 after {path}:8" in run.stdout
    assert f"does not wait for mul on device 0 stream 1 at {path}:8" in run.stdout


def test_steps_end_with_the_backward_pass_where_there_is_no_optimizer(tmp_path):
    run = emulate(script(tmp_path), "--devices", 3, "--profile", "p40", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "emulated on 3 x Tesla P40 (p40)" in run.stdout
    assert run.stdout.splitlines()[-1] == speed_error_words("p40")
    assert re.search(r"2 steps after the first: \d+\.\d+ ms per step", run.stdout)


def test_one_step_is_not_timed(tmp_path):
    run = emulate(script(tmp_path, steps=1), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "no second step" in run.stdout
    assert "error of simulated" not in run.stdout


def test_the_same_script_takes_the_same_virtual_time(tmp_path):
    path = script(tmp_path)
    assert emulate(path, folder=tmp_path).stdout == emulate(path, folder=tmp_path).stdout


def test_launches_that_cost_nothing_are_told(tmp_path):
    trace = tmp_path / "trace.json"
    run = emulate(script(tmp_path), "--devices", 2, "--no-host-time", "--trace", trace, folder=tmp_path)
    assert run.stdout.splitlines()[0].endswith("values are not computed; launches cost nothing")
    assert json.loads(trace.read_text())["otherData"]["host_time"] is False


def test_a_timeline_for_perfetto(tmp_path):
    run = emulate(script(tmp_path), "--devices", 2, "--trace", tmp_path / "out.json", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    trace = json.loads((tmp_path / "out.json").read_text())
    slices = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert {row["pid"] for row in slices} == {0, 1}
    assert {"mm", "device_to_device"} <= {row["name"] for row in slices}
    assert trace["otherData"]["evidence"] == "emulated"
    assert partial_overlaps(trace) == []


BACKWARD = """
import torch

class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in the backward pass")

try:
    Broken.apply(torch.ones(2, requires_grad=True)).sum().backward()
except ValueError as error:
    raise RuntimeError("mine") from error
"""


@pytest.mark.parametrize(
    "text", [BACKWARD, "x = (\n", "from gpipe_bench import GPipe\nGPipe(None, [1])\n", "import absent_module\n"]
)
def test_an_error_of_the_script_is_shown_as_python_shows_it(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    plain = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
    run = emulate(path, folder=tmp_path)
    assert run.returncode == plain.returncode == 1
    assert run.stderr == plain.stderr


def test_a_script_that_compiles_its_model_is_told_that_it_runs_eagerly(tmp_path):
    path = script(tmp_path, end="f = torch.compile(torch.relu)\nassert f(weights[0]).shape == (64, 64)")
    run = emulate(path, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert f"{path}:11: UserWarning: torch.compile does nothing on virtual devices" in run.stderr


HIGHER_ORDER = """
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.while_loop import while_loop
x = map_over(lambda row: torch.sin(row @ weights[0]), x.detach())
x = while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, v.sin()), (torch.tensor(0), x))[1]
x.sum().backward()
assert weights[0].grad.shape == (64, 64)
"""


def test_a_script_with_higher_order_operators_runs_without_a_warning(tmp_path):
    run = emulate(script(tmp_path, end=HIGHER_ORDER), "--devices", 1, folder=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")


def test_tensors_that_do_not_fit_end_the_script(tmp_path):
    run = emulate(script(tmp_path, end="torch.empty(2**36, device=places[0])"), "--profile", "p40", folder=tmp_path)
    assert run.returncode == 1
    assert "OutOfMemoryError: virtual device 0 out of memory: tried to allocate 274877906944 bytes" in run.stderr


HALVED = """
import torch
device = torch.accelerator.current_accelerator().type
weight = torch.ones(2**20, device=device, requires_grad=True)

def step(batch):
    (torch.ones(batch, 2**20, device=device) * weight).square().sum().backward()

batch, steps = 3072, 0  # full in the forward pass, and its half in the backward pass
while steps < 3:
    try:
        step(batch)
        steps += 1
    except torch.OutOfMemoryError:
        print("no room for", batch)
        batch //= 2
"""


def test_a_script_that_catches_a_full_device_goes_on(tmp_path):
    path = tmp_path / "halved.py"
    path.write_text(HALVED)
    run = emulate(path, "--devices", 1, "--profile", "p40", folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("no room for 3072\nno room for 1536\nemulated")
    assert re.search(r"steps after the first: \d+\.\d+ ms per step", run.stdout)


FAILING = """
import torch
from torch import nn
from gpipe_bench import Pipe

kind = torch.accelerator.current_accelerator().type
places = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
passes = 0

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        global passes
        passes += 1
        if passes % 40 == 0:
            raise ValueError("not a number")
        return 2 * grad

class Layer(nn.Linear):
    def forward(self, x):
        return Double.apply(super().forward(x))

pipe = Pipe(nn.Sequential(*(Layer(64, 64, device=place) for place in places)), chunks=4)
for _ in range(40):
    try:
        pipe(torch.ones(256, 64, device=places[0])).local_value().sum().backward()
    except ValueError as error:
        print("without this batch:", error)
"""


def test_training_goes_on_after_backward_passes_that_fail(tmp_path):
    path = tmp_path / "failing.py"
    path.write_text(FAILING)
    run = emulate(path, "--devices", 4, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("without this batch: not a number") > 5
    assert "steps after the first" in run.stdout


def test_segments_that_do_not_fit_are_one_line(tmp_path):
    end = "kept = [torch.empty(10 * 2**20 + 1, dtype=torch.uint8, device=places[0]) for _ in range(2000)]"
    run = emulate(script(tmp_path, end=end), "--devices", 1, "--profile", "p40", folder=tmp_path)
    assert run.returncode == 1
    assert run.stderr.startswith("error: out of memory: device 0 needs 23.4 GiB of allocator segments and has 22.0 GiB")
    assert run.stdout == ""


def test_there_must_be_a_script(tmp_path):
    run = emulate("absent.py", folder=tmp_path)
    assert run.returncode == 2
    assert run.stderr == "error: script must be a Python file, got 'absent.py'; check the path\n"


HANDED_OVER = """
import queue, sys, threading, torch
from concurrent.futures import ThreadPoolExecutor
kind = torch.accelerator.current_accelerator().type

def work(index):
    x = torch.ones(64, 64, device=f"{kind}:{index}")
    for _ in range(200):
        x = x * 2

def thread(index, box, event):
    class Worker(threading.Thread):
        def run(self):
            work(index)
            event.set()
            box.put(index)
    Worker().start()

def pool(index):
    with ThreadPoolExecutor(1) as workers:
        workers.submit(work, index).result()

def joined(index):
    tasks = queue.Queue()
    tasks.put(index)
    def run():
        work(tasks.get())
        tasks.task_done()
    threading.Thread(target=run).start()
    tasks.join()

way = sys.argv[1]
weight = torch.ones(4, 4, device=f"{kind}:0", requires_grad=True)
for _ in range(3):
    for index in range(2):
        event, box = threading.Event(), queue.LifoQueue()
        if way == "none":
            work(index)
        elif way == "pool":
            pool(index)
        elif way == "joined":
            joined(index)
        else:
            thread(index, box, event)
            event.wait() if way == "event" else box.get()
    (weight * 2).sum().backward()
"""


def test_work_that_other_threads_do_in_turn_takes_as_long_as_that_of_one_thread(tmp_path):
    path = tmp_path / "threads.py"
    path.write_text(HANDED_OVER)
    times = {}
    for way in ("none", "pool", "joined", "event", "lifo"):
        printed = emulate(path, "--devices", 2, "--", way, folder=tmp_path).stdout
        times[way] = float(re.search(r"2 steps after the first: (\d+\.\d+) ms", printed)[1])
    assert times == dict.fromkeys(times, times["none"])
    assert times["none"] > 1


def test_backward_passes_of_other_threads_and_inside_others_end_no_step(tmp_path):
    path = tmp_path / "schedule.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from gpipe_bench import GPipe\n"
        "kind = torch.accelerator.current_accelerator().type\n"
        "layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))\n"
        "pipe = GPipe(layers, [1, 1], devices=[f'{kind}:0', f'{kind}:1'], chunks=4, schedule='1f1b')\n"
        "for _ in range(3):\n"
        "    pipe.step(torch.ones(8, 4, device=f'{kind}:0'), torch.ones(8, 4, device=f'{kind}:1'), nn.MSELoss())\n"
    )
    run = emulate(path, "--devices", 2, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "no second step" in run.stdout


def test_a_script_that_uses_no_device_is_told_so(tmp_path):
    path = tmp_path / "cpu.py"
    path.write_text("import torch\nweight = torch.ones(2, requires_grad=True)\nweight.sum().backward()\n")
    run = emulate(path, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "no virtual device was used" in run.stdout


def test_the_timeline_does_not_overwrite_the_script(tmp_path):
    path = script(tmp_path)
    text = path.read_text()
    run = emulate(path, "--trace", path, folder=tmp_path)
    assert run.returncode == 2
    assert run.stderr.startswith("error: output must be another file than inputs")
    assert path.read_text() == text


def test_a_script_imports_a_torchvision_whose_library_does_not_load(tmp_path):
    write_torchvision(tmp_path, ABSENT)
    path = script(tmp_path)
    path.write_text("import torchvision\n" + path.read_text())
    run = emulate(path)
    assert run.returncode == 0, run.stderr


def test_what_writes_about_cuda_to_stderr_is_not_loaded(tmp_path):
    run = emulate(script(tmp_path, end="import sys\nassert 'torch.utils.cpp_extension' not in sys.modules"))
    assert run.returncode == 0, run.stderr
