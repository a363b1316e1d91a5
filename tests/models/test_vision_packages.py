"""Imports of torchvision in files of a user's: with a compiled library that loads, and with one that does not."""

from __future__ import annotations

import os
import sys

import pytest

from tests.models.folders import write
from tests.processes import apart

# As torchvision begins: the library, then the shape functions of its operators.
ABSENT = "LOADED = False"
PRESENT = """
    import torch
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LOADED = True
    """
SHAPES = """
    import torch
    from torchvision import extension
    torch.library.register_fake("torchvision::nms", torch.empty_like)
    torch.library.register_fake("torchvision::qnms", torch.empty_like)
    """
NET = """
    from torch import nn
    import torchvision
    def net():
        return nn.Sequential(*(nn.ReLU() for _ in range(3 + torchvision.extension.LOADED)))
    """


def write_torchvision(folder, extension):
    """A package that begins as torchvision does."""
    write(folder / "torchvision" / "__init__.py", "from . import extension, _meta_registrations")
    write(folder / "torchvision" / "extension.py", extension)
    write(folder / "torchvision" / "_meta_registrations.py", SHAPES)


def layers_of(folder, name):
    from gpipe_bench.models.table import model_spec

    os.chdir(folder)
    sys.path.insert(0, str(folder / "site-packages"))
    return model_spec(name).layers({})


@pytest.mark.parametrize("name", ["net.py:net", "net:net"])
@pytest.mark.parametrize(("extension", "layers"), [(ABSENT, 3), (PRESENT, 4)])
def test_a_users_file_imports_torchvision(tmp_path, name, extension, layers):
    write_torchvision(tmp_path / "site-packages", extension)
    write(tmp_path / "net.py", NET)
    assert apart(layers_of, tmp_path, name) == layers


def layers_after_a_failed_import(folder):
    # Set-up may have mended the import for every Python of this environment.
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "torchvision_repair"]
    sys.path.insert(0, str(folder / "site-packages"))
    with pytest.raises(RuntimeError, match="nms does not exist"):
        import torchvision  # noqa: F401
    return layers_of(folder, "net.py:net")


def test_a_users_file_imports_torchvision_after_an_import_that_failed(tmp_path):
    write_torchvision(tmp_path / "site-packages", ABSENT)
    write(tmp_path / "net.py", NET)
    assert apart(layers_after_a_failed_import, tmp_path) == 3


def imported_for(folder):
    layers_of(folder, "net.py:net")
    return {name.partition(".")[0] for name in sys.modules}


def test_a_users_file_that_needs_no_torchvision_does_not_load_it(tmp_path):
    write(tmp_path / "net.py", "from torch import nn\ndef net(): return nn.Sequential(nn.ReLU())")
    assert "torchvision" not in apart(imported_for, tmp_path)
