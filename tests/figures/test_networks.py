"""The figure of networks under every schedule: what is told apart, what is compared, what fits."""

from __future__ import annotations

from gpipe_bench.figures.networks import NETWORKS, settings_of
from gpipe_bench.figures.style import drawing
from gpipe_bench.results.catalogue import reference_figures
from gpipe_bench.schedules import SCHEDULES
from tests.figures.synthetic import write_rows
from tests.figures.test_layout import check
from tests.figures.test_schedules import cell, row


def test_networks_are_named_by_what_differs():
    changes = [
        {"model": "plain", "model_args": "L=2"},
        {"model": "rich", "model_args": "L=2;keep=true"},
        {"model": "rich", "model_args": "L=2;keep=false"},
        {"model": "rich", "model_args": "L=2;keep=false", "variant": "dep-str-x"},
    ]
    (setting,) = settings_of([cell(5, 2, **change) for change in changes])
    words = "keep=false, dep-str-ptl", "keep=false, dep-str-x", "keep=true, dep-str-ptl"
    assert sorted(setting.cells) == ["plain", *(f"rich, {word}" for word in words)]


def test_devices_and_training_have_columns_of_their_own():
    half = {"precision": "bfloat16", "optimizer": "adamw", "steps_overlap": False}
    cells = [cell(5, 2), cell(6, 2, "zb_v"), cell(5, 2, hosts=2), cell(5, 2, **half)]
    found = {setting.title: list(setting.cells["testnet"]) for setting in settings_of(cells)}
    assert found == {
        "2 h9, m = 4\nfloat32": ["1f1b", "zb_v"],
        "2 h9 on 2 hosts, m = 4\nfloat32": ["1f1b"],
        "2 h9, m = 4\nbfloat16\nadamw\nsteps do not overlap": ["1f1b"],
    }


def test_it_fits_both_columns_of_a_page(texts_of):
    half = {"precision": "bfloat16", "optimizer": "adamw", "steps_overlap": False}
    networks = [{"model": "plain"}, *({"model": "rich", "model_args": f"keep={word}"} for word in ("true", "false"))]
    places = [{"profile": "h9"}, {"profile": "a9"}, {"profile": "h9", "hosts": 4}]
    cells = [
        cell(10.0 + k, 5.0 + k, name, 8, **network, **place, **half)
        for k, name in enumerate(SCHEDULES)
        for network in networks
        for place in places
    ]
    with drawing():
        figure = NETWORKS.canvas(cells)
        check(figure, texts_of(figure))
        assert figure.get_figheight() <= 5


def test_the_devices_are_in_one_piece_in_the_title(texts_of):
    cells = [cell(speed, 2, model=model) for speed, model in ((5, "plain"), (4, "of a long name" * 4))]
    with drawing():
        shown = [text.get_text() for text, _ in texts_of(NETWORKS.canvas(cells))]
    assert any("(2 h9, m = 4)" in line for text in shown for line in text.replace("\u00a0", " ").split("\n"))


def test_missing_marks_are_explained_where_there_are_any(texts_of):
    def words(*cells):
        with drawing():
            return " ".join(text.get_text() for text, _ in texts_of(NETWORKS.canvas([*cells])))

    both = [cell(5, 2, name, model=model) for name in ("1f1b", "zb_v") for model in ("plain", "rich")]
    assert "missing" not in words(*both)
    assert "A mark that is missing: the step does not fit." in words(*both[:3])


def test_the_reference_has_figures_of_residuals(tmp_path):
    (tmp_path / "simulated" / "h100").mkdir(parents=True)
    for name in ("residuals", "residuals_float32", "residuals_components"):
        write_rows(tmp_path / "simulated" / "h100" / f"{name}.csv", [row()])
    found = {figure.name: figure.kind for figure in reference_figures(tmp_path)}
    assert found == {
        "residuals": "networks",
        "residuals_float32": "networks",
        "residuals_components": "ablation",
        "residuals_components_shares": "shares",
    }
