"""Scripts that name CUDA on virtual devices: they are told what to write."""

from __future__ import annotations

import pytest

from gpipe_bench.emulator.build import obstacle
from tests.emulator.test_script import emulate

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))

NAMES_CUDA = {
    "cuda()": "torch.nn.Linear(2, 2).cuda()",
    "a pipeline": """
from gpipe_bench import GPipe
GPipe(torch.nn.Sequential(torch.nn.Linear(2, 2)), [1], devices=["cuda:0"])
""",
}


@pytest.mark.parametrize("name", NAMES_CUDA)
def test_a_script_that_names_cuda_is_told_what_to_write(tmp_path, name):
    path = tmp_path / "train.py"
    path.write_text(f"import torch\n{NAMES_CUDA[name]}\n")
    run = emulate(path, "--devices", 2, folder=tmp_path)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith(
        "error: devices of an emulated script must be virtual:0 to virtual:1, got an error about CUDA"
    )
    assert "write torch.device(torch.accelerator.current_accelerator().type, 0) for cuda:0" in last


def test_an_error_of_the_script_that_has_cuda_in_a_path_is_its_own(tmp_path):
    path = tmp_path / "train.py"
    path.write_text('open("cuda/weights.pt")\n')
    run = emulate(path, folder=tmp_path)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("FileNotFoundError")


def test_gpus_are_hidden_from_a_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text('import os\nprint("GPUs:", repr(os.environ["CUDA_VISIBLE_DEVICES"]))\n')
    run = emulate(path, folder=tmp_path)
    assert run.stdout.startswith("GPUs: ''")
    assert "must take its devices from torch.accelerator, not from torch.cuda" in run.stdout
