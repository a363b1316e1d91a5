"""``calibrate``: the efficiencies of a hardware profile from measurements on one device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpipe_bench.cli.options import named
from gpipe_bench.cli.progress import progress
from gpipe_bench.files import check_writable, write_files

if TYPE_CHECKING:
    from gpipe_bench.simulator.fit import Calibration
    from gpipe_bench.simulator.hardware.profile import Profile


def calibrate(
    *,
    rows: Annotated[list[Path], typer.Option(help="Tables of measured rows; may be given several times.")],
    out: Annotated[Path, typer.Option(help="The profile to write, a YAML file.")],
    profile: Annotated[str, named("profile", "Profile to start from: a name, or the path of a YAML file.")] = "p40",
    optimizer: Annotated[str, typer.Option(help="The optimizer of the measured runs.")] = "sgd",
) -> None:
    """Fit the efficiencies of a profile to rows of one device and one partition, and write the profile.

    Everything else of the profile stays. Prints each fitted share with its interval of 95 %, and the error of each
    cell. The new profile is used by its path: simulate --profile FILE.
    """
    from gpipe_bench.figures.tables import read_rows
    from gpipe_bench.simulator.hardware.profile import load_profile

    start = load_profile(profile)
    check_writable(out)
    measured = [row for path in rows for row in read_rows(path, _COLUMNS)]
    from gpipe_bench.simulator.calibration import calibrate_rows

    with progress(f"fitting the profile to {len(measured)} rows"):
        fit = calibrate_rows(measured, start, optimizer=optimizer, name=out.stem)
    write_files({out: _yaml(fit.profile)})
    _report(fit, start)
    typer.echo(f"wrote {out}")


# Ends of an interval that are further apart than that say little of a share.
_UNCLEAR = 2

_COLUMNS = (
    *("evidence", "model", "model_args", "partitions", "chunks", "checkpoint", "batch_size", "status", "reason"),
    *("throughput_samples_per_s", "device", "device_count"),
)


def _yaml(profile: Profile) -> str:
    import yaml

    text: str = yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False, width=120)
    return text


def _report(fit: Calibration, start: Profile) -> None:
    from gpipe_bench.simulator.calibration import SHARES

    typer.echo(f"efficiencies from {len(fit.errors)} cells; {fit.ignored} rows were of no use")
    for share in SHARES:
        value, before = getattr(fit.profile.efficiency, share), getattr(start.efficiency, share)
        low, high = fit.spread[share]
        unclear = ", which these cells hardly tell" if high > _UNCLEAR * low else ""
        typer.echo(f"  {share}: {value:.3f} (95 %: {low:.3f} to {high:.3f}{unclear}; {before:g} before)")
    for name, error in fit.errors.items():
        typer.echo(f"  {name}: simulated {error:+.1%}")
