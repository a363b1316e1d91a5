"""torch.profiler around a step: it sees the layers, or a warning says how it would."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile

from tests.engine.support import on_cpu

X = torch.rand(4, 4)
SCHEDULES = pytest.mark.parametrize("schedule", [None, "1f1b"])


def calls_seen(schedule, workers, **options):
    """How many of the four linear layers in a step the profiler sees."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = on_cpu(layers, [1, 1], chunks=2, checkpoint="never", schedule=schedule, workers=workers)
    with profile(activities=[ProfilerActivity.CPU], **options) as seen:
        pipe.step(X, X, mse_loss)
    return sum(event.count for event in seen.key_averages() if event.key == "aten::linear")


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # PyTorch 2.11
@SCHEDULES
def test_a_profile_of_all_threads_sees_the_layers(schedule):
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    assert calls_seen(schedule, "always", experimental_config=config) == 4


@SCHEDULES
def test_without_workers_a_profile_sees_the_layers(schedule):
    assert calls_seen(schedule, "never") == 4


@SCHEDULES
def test_a_profile_of_the_calling_thread_warns_once_in_a_step(schedule):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert calls_seen(schedule, "always") == 0
    (warning,) = [each for each in caught if "torch.profiler" in str(each.message)]
    assert "profile_all_threads=True" in str(warning.message)
    assert "workers='never'" in str(warning.message)
