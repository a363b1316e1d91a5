"""``simulate-variants``: all variants of one pipeline in virtual time, for the workflow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpipe_bench.bench.files import check_writable, write_files
from gpipe_bench.bench.raw import results_json
from gpipe_bench.bench.simulated_cells import SimulatedWorkload
from gpipe_bench.bench.validation import validated
from gpipe_bench.cli.options import settings_of

if TYPE_CHECKING:
    from gpipe_bench.rows import Row

__all__ = ["simulate_variants"]

_DEFAULT: Final = SimulatedWorkload()
_BALANCE: Final = "-".join(map(str, _DEFAULT.balance))
_setting: Final = settings_of(SimulatedWorkload)


def simulate_variants(
    *,
    out: Annotated[Path, typer.Option(help="The raw results to write, one JSON file.")],
    model: Annotated[str, _setting("model")] = _DEFAULT.model,
    model_args: Annotated[str, _setting("model_args")] = _DEFAULT.model_args,
    batch_size: Annotated[int, _setting("batch_size")] = _DEFAULT.batch_size,
    chunks: Annotated[int, _setting("chunks")] = _DEFAULT.chunks,
    partitions: Annotated[int, _setting("partitions")] = _DEFAULT.partitions,
    balance: Annotated[str, _setting("balance")] = _BALANCE,
    checkpoint: Annotated[str, _setting("checkpoint")] = _DEFAULT.checkpoint,
    backward: Annotated[str, _setting("backward")] = _DEFAULT.backward,
    transfer: Annotated[str, _setting("transfer")] = _DEFAULT.transfer,
    optimizer: Annotated[str, _setting("optimizer")] = _DEFAULT.optimizer,
    profile: Annotated[str, _setting("profile")] = _DEFAULT.profile,
    flavour: Annotated[str, _setting("flavour")] = _DEFAULT.flavour,
    variants: Annotated[list[str], _setting("variants")] = list(_DEFAULT.variants),  # noqa: B006 - never changed
) -> None:
    """Simulate all variants of one pipeline in this process and write their raw results into one file.

    A variant that does not fit the memory of its devices is a result: a row with status oom that says how much it
    needs, and exit status 0.
    """
    given = {name: value for name, value in locals().items() if name in SimulatedWorkload.model_fields}
    workload = validated(SimulatedWorkload, given, lambda path: f"--{path[0].replace('_', '-')}")
    check_writable(out)
    from gpipe_bench.bench.simulated import simulate_cells

    results = simulate_cells(workload.cells(), _say)
    write_files({out: results_json(results)})
    typer.echo(f"wrote {out} with {len(results)} simulated variants")


def _say(row: Row) -> None:
    value = f"{row.throughput_samples_per_s:.2f} samples/s" if row.throughput_samples_per_s else row.reason
    typer.echo(f"simulated, {row.status}: {row.variant}: {value}")
