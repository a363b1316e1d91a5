"""A configuration is known by its digest, and nothing else has that digest."""

from __future__ import annotations

import hashlib
import json

import pytest

from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS, canonical, configuration_records, digest


def test_the_digest_is_that_of_the_text():
    text = canonical({"b": 1, "a": [True, None, "ü"]})
    assert text == '{"a": [true, null, "\\u00fc"], "b": 1}'
    assert digest(text) == hashlib.sha256(text.encode()).hexdigest()


def test_the_order_of_settings_does_not_matter():
    assert canonical({"a": 1, "b": {"d": 2, "c": 3}}) == canonical({"b": {"c": 3, "d": 2}, "a": 1})


def test_what_json_does_not_have_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical({"a": float("nan")})


def test_a_configuration_stands_once():
    records = configuration_records(["{}", '{"a": 1}', "{}"])
    assert [json.loads(record["configuration"]) for record in records] == [{}, {"a": 1}]
    assert all(tuple(record) == CONFIGURATION_COLUMNS for record in records)
