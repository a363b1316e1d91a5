"""What a ``config_sha256`` leads to: the configuration itself, in a table beside the rows.

A configuration is all settings of a run as JSON with sorted keys, a space behind each comma and colon, in ASCII. Its
SHA-256 is the digest in the rows. So nobody has to trust the table: the hash of a line is the key of the rows that it
belongs to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from gpipe_bench.results.schema import TABLES
from gpipe_bench.results.tables import companion_path, csv_text

CONFIGURATIONS: Final = "configurations"
"""Name of the companion: ``ablation.csv`` -> ``ablation_configurations.csv``."""

CONFIGURATION_COLUMNS: Final = TABLES["configurations"].columns


def canonical(settings: Mapping[str, Any]) -> str:
    """Settings, which are plain data, as the text of a configuration.

    Raises:
        TypeError, ValueError: a value that JSON does not have.
    """
    return json.dumps(settings, sort_keys=True, allow_nan=False)


def digest(configuration: str) -> str:
    """The ``config_sha256`` of a configuration: 64 hexadecimal digits."""
    return hashlib.sha256(configuration.encode()).hexdigest()


def configuration_records(configurations: Iterable[str]) -> list[dict[str, str]]:
    """A record of :data:`CONFIGURATION_COLUMNS` for each configuration, none twice, in their order."""
    return [{"config_sha256": digest(text), "configuration": text} for text in dict.fromkeys(configurations)]


def configurations_beside(rows: Path, configurations: Iterable[str]) -> dict[Path, str]:
    """The companion of the table at ``rows`` that has its configurations, none twice: its path and text."""
    text = csv_text(CONFIGURATION_COLUMNS, configuration_records(configurations))
    return {companion_path(rows, CONFIGURATIONS): text}
