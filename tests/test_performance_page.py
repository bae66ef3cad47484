"""The page of measurements says what the JSON files say."""

import json

import pytest
import render_base
import render_docs


def test_the_page_is_up_to_date():
    page = render_docs.PAGE.read_text()
    assert render_docs.render(page) == page, "run python benchmarks/render_docs.py"


def test_another_figure_is_another_page(tmp_path, monkeypatch):
    page = render_docs.PAGE.read_text()
    record = json.loads((render_base.RESULTS / "columns_tried.json").read_text())
    record["rows"][0]["kept ms"] += 1
    for path in render_base.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "columns_tried.json").write_text(json.dumps(record))
    monkeypatch.setattr(render_base, "RESULTS", tmp_path)
    assert render_docs.render(page) != page


def test_a_page_that_lacks_a_table_is_refused():
    page = render_docs.PAGE.read_text().replace("<!-- speed -->", "")
    with pytest.raises(ValueError, match="speed"):
        render_docs.render(page)


def test_what_was_not_measured_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(render_base, "RESULTS", tmp_path)
    assert "Not measured yet: benchmarks/results/kernels_gpu.json" in render_docs.render(render_docs.PAGE.read_text())
