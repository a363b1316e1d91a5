"""Published rows simulated with the settings that they were run with: the one way from print to rows and predictions.

- A throughput is that of an epoch with its smaller last mini-batch, as it was printed; all else is of a whole one.
- A memory is the sum over devices of the peak reserved bytes in two steps.
- Where host threads race, in the ablation's baseline, there are more steps, as there were: the mean of their times, the
  most of their memory.
- A utilisation is what sampling the driver shows: the share of a step in which a device computes, or sends a copy.
- torchgpipe exempts micro-batch number ``chunks - 1`` from checkpointing; where a batch gives fewer, none is exempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_bench.components import PUBLISHED
from gpipe_bench.results.configurations import digest
from gpipe_bench.simulator.published.settings import PublishedSetting, settings_of
from gpipe_bench.suite.running.simulated import simulated_columns, simulated_step, simulation_facts, step_result
from gpipe_bench.suite.simulated_cells import SimulatedCell
from gpipe_bench.suite.storage.raw import RawResult
from gpipe_bench.suite.validation import validated

if TYPE_CHECKING:
    from gpipe_bench.results.rows import Row


def simulate_table(table: str, report: Callable[[Row], None] | None = None) -> list[RawResult]:
    """Simulate the rows of a published table; one that does not fit the memory is a row that says so.

    Args:
        table: such as ``unet-speed``.
        report: takes each row as it is made.

    Raises:
        ConfigError: there is no such table.
    """
    facts, results = simulation_facts(), []
    for setting in settings_of(table):
        results.append(simulate_published(setting, facts))
        if report:
            report(results[-1].row)
    return results


def published_cell(setting: PublishedSetting, batch_size: int) -> SimulatedCell:
    """The cell of a published row, with any number of samples.

    Raises:
        ConfigError: a setting is wrong; carries all problems.
    """
    names = ("model", "model_args", "chunks", "checkpoint", "optimizer", "precision", "profile", "flavour")
    given = {
        **{name: getattr(setting, name) for name in names},
        "schedule": setting.schedule or None,
        "batch_size": batch_size,
        "balance": "-".join(map(str, setting.layers)),
        "variant": setting.experiment if setting.table == "ablation" else PUBLISHED[-1],
    }
    cell = validated(SimulatedCell, given, lambda path: f"{setting.table} {setting.experiment}: {path[0]}")
    exempt = cell.checkpoint != "except_last" or cell.microbatches == cell.chunks
    return cell if exempt else cell.changed(checkpoint="always")


def simulate_published(setting: PublishedSetting, facts: Mapping[str, Any], cache: Path | None = None) -> RawResult:
    """The result of a published row.

    Args:
        setting: how it was run.
        facts: columns from :func:`gpipe_bench.suite.running.simulated.simulation_facts`.
        cache: folder of stored traces; the user's cache folder by default.
    """
    cell = published_cell(setting, setting.batch_size)
    step = simulated_step(cell, cell.balance, cache=cache, memory=setting.memory)
    result = step_result(cell, step, cell.balance, simulated_columns(cell, facts), timeline=False)
    speed = step.throughput_samples_per_s
    if step.step_time_ms is not None and setting.rest_batch_size:
        rest = simulated_step(published_cell(setting, setting.rest_batch_size), cell.balance, cache=cache, memory=False)
        assert rest.step_time_ms is not None  # noqa: S101 - without memory it always fits
        samples = setting.full_steps * setting.batch_size + setting.rest_batch_size
        speed = samples / (setting.full_steps * step.step_time_ms + rest.step_time_ms) * 1e3
    name = f"published-{setting.table}-{setting.experiment}"
    configuration = setting.configuration
    row = replace(
        result.row,
        experiment=setting.table,
        cell=name,
        config_sha256=digest(configuration),
        throughput_samples_per_s=speed,
        checkpoint=setting.checkpoint,
    )
    return replace(result, cell=name, row=row, steps=[], configuration=configuration)
