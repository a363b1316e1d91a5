"""Files of measured layers: what is written is read, and whatever is wrong is one clear error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.errors import ConfigError
from gpipe_bench.models.measured import COLUMNS, MeasuredLayer, read_layers, write_layers
from gpipe_bench.models.table import MODELS, model_digest, model_spec

HEADER = "name,samples,forward_ms,backward_ms,backward_weights_ms,output_mib,parameters"
ROW = "a,4,1.5,3,1,2,5"

MS, MIB = st.floats(0, 1e5), st.floats(0, 1e5)
OPTIONAL = COLUMNS[4:]


@st.composite
def some_layers(draw):
    """Layers with any set of the optional columns."""
    names = draw(st.sets(st.sampled_from(OPTIONAL)))
    samples = draw(st.none() | st.integers(1, 10**6))
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        values = {name: draw(st.integers(0, 999) if name == "parameters" else MIB) for name in names}
        backward = draw(MS)
        if "backward_weights_ms" in values:
            values["backward_weights_ms"] = draw(st.floats(0, backward))
        name = draw(st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), max_size=9))
        layers.append(MeasuredLayer(name=name, samples=samples, forward_ms=draw(MS), backward_ms=backward, **values))
    return layers


@settings(max_examples=40)
@given(layers=some_layers())
def test_what_is_written_is_read(layers, tmp_path_factory):
    path = tmp_path_factory.mktemp("layers") / "times.csv"
    write_layers(path, layers)
    assert read_layers(path) == tuple(layers)


def read(tmp_path, text, encoding="utf-8"):
    path = tmp_path / "times.csv"
    path.write_bytes(text.encode(encoding))
    return read_layers(path)


@pytest.mark.parametrize(
    "text",
    [
        f"{HEADER}\n{ROW}\n",
        f"{HEADER}\n{ROW}",
        f"\ufeff{HEADER}\r\n{ROW}\r\n",
        f" {HEADER.replace(',', ' , ')} \n\n a , 4 , 1.5, 3.0 ,1,2,5\n,,,,,,\n\n",
        f'"name",{HEADER.partition(",")[2]}\n"a",4,15e-1,3,1,2,5\n',
    ],
    ids=["plain", "no last newline", "of a spreadsheet", "blanks", "quotes"],
)
def test_forms_of_one_file(tmp_path, text):
    expected = MeasuredLayer(
        parameters=5,
        name="a", samples=4, forward_ms=1.5, backward_ms=3, backward_weights_ms=1, output_mib=2
    )  # fmt: skip
    assert read(tmp_path, text) == (expected,)


FIELDS = HEADER.split(",")
WRONG_VALUES = {
    "forward_ms": ["-1", "nan", "inf", "abc", "", "1,5", "1e9", "None"],
    "backward_ms": ["-0.5", "NaN", "x", ""],
    "backward_weights_ms": ["3.5", "-1", "nan", "text"],
    "samples": ["0", "-1", "1.5", "many", "2000000000", "9" * 400],
    "parameters": ["-2", "1.5", "some"],
    "output_mib": ["-1", "nan", "1 MiB", "1e300"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG_VALUES for value in WRONG_VALUES[name]])
def test_a_wrong_value_is_one_error_that_names_column_and_layer(tmp_path, name, value):
    fields = dict(zip(FIELDS, ROW.split(","), strict=True)) | {name: value}
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"{HEADER}\n{ROW}\n{','.join(fields.values())}\n")
    first = caught.value.problems[0]
    assert first.startswith(f"{tmp_path / 'times.csv'}: ")
    assert "layer 1 must " in first
    assert "got " in first
    assert name in first or value == "1,5"
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "layers must have a column forward_ms, got no header; add it to the header"),
        ("name,forward_ms\na,1\n", "must have a column backward_ms, got name, forward_ms; add it"),
        ("forward_ms;backward_ms\n1;2\n", "must have a column forward_ms, got forward_ms;backward_ms;"),
        (f"{HEADER}\n", "layers must be one or more, got none"),
        (f"{HEADER},activations_mib\n{ROW},1\n", "got 'activations_mib'; use 'activation_mib'"),
        (f"{HEADER},\n{ROW},\n", "columns must be some of name, samples, "),
        (f"{HEADER},samples\n{ROW},1\n", "columns must differ, got samples 2 times"),
        (f"{HEADER}\n{ROW},7\n", "layer 0 must have 7 fields, as the header, got 8"),
        (f"{HEADER}\n{ROW}\na,4\n", "layer 1 must have 7 fields, as the header, got 2"),
        (f"{HEADER}\n{ROW}\n{ROW[:-1]}\n", "parameters must be given for all layers or for none, got none for layer 1"),
        (f"{HEADER}\n{ROW}\n{ROW.replace('4', '8')}\n", "samples must be the same for all layers, got 4, 8"),
    ],
)
def test_a_wrong_file_is_one_error(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert all(problem.startswith(f"{tmp_path / 'times.csv'}: ") for problem in caught.value.problems)


@pytest.mark.parametrize(("encoding", "content"), [("utf-16", ROW), ("latin-1", "\xe9,4,1,1,1,1,1")])
def test_other_encodings_are_refused(tmp_path, encoding, content):
    with pytest.raises(ConfigError, match=r"layers must be CSV in UTF-8, got .*times.csv.*; save it as such"):
        read(tmp_path, f"{HEADER}\n{content}\n", encoding)


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match=r"layers must be a file that can be read, got .*nope.csv.*No such file"):
        read_layers(tmp_path / "nope.csv")


def test_many_problems_are_five(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"{HEADER}\n" + 9 * "a,4,-1,3,1,2,5\n")
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize("layers", [[], [MeasuredLayer(forward_ms=-1, backward_ms=1)]])
def test_wrong_layers_are_not_written(tmp_path, layers):
    with pytest.raises(ConfigError):
        write_layers(tmp_path / "times.csv", layers)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_a_model_that_does_not_run(tmp_path):
    path = tmp_path / "times.csv"
    layer = MeasuredLayer(forward_ms=1, backward_ms=2)
    write_layers(path, [layer] * 3)
    spec = model_spec(str(path))
    assert str(path) in MODELS
    assert (spec.layers({}), spec.check({})) == (3, {})
    for attempt in (spec.build, lambda: spec.make_batch(2, {}), lambda: spec.loss(None, None)):
        with pytest.raises(ConfigError, match="model must have layers that run, got their times in"):
            attempt()
    before = model_digest(str(path))
    write_layers(path, [layer, layer, replace(layer, forward_ms=2)])
    assert model_digest(str(path)) != before
