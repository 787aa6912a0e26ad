from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import oxytorch as ox
import pytest
from oxytorch.monitor import Bar, Cell, Column, Report, Series

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Balanced(HTMLParser):
    """Checks that every element is closed in order and collects what is shown and referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(html: str) -> Balanced:
    parser = Balanced()
    parser.feed(html)
    parser.close()
    assert parser.open == []
    return parser


def drawings(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def sample(text: str = "plain") -> Report:
    report = Report(text).subtitle(text).metadata(text, text).heading(text).paragraph(text).preformatted(text)
    report.table(
        [text, Column("time", "right", "ms")],
        [[text, 1.5], [None, 12], [Cell("12 s", 12.0, strong=True), math.nan]],
        title=text,
        notes=[text],
    )
    x = np.arange(1, 200)
    report.line_chart(
        [Series(text, x, 1 / x, 0.9 / x, 1.1 / x), Series(text, x, np.full(x.shape, np.nan)), Series("c", x, -x)],
        title=text,
        x_label=text,
        y_label=text,
        log_y=True,
        notes=[text],
    )
    report.bar_chart(
        [Bar(text, 2.0, 1.5, 2.5, "CNN"), Bar("b", -1.0, group="CNN"), Bar("c", math.inf, group="GPT")],
        title=text,
        axis_label=text,
        unit=text,
        reference=1.0,
        reference_label=text,
        notes=[text],
    )
    return report


@pytest.mark.parametrize(
    "text",
    ["plain", "</title><script>alert(1)</script>", "a & b < c > \"d\" 'e'", "\x1b[31m\x00\x07", "日本語 é 🙂", "", " "],
)
def test_html_is_well_formed_whatever_the_text(text: str) -> None:
    html = sample(text).to_html()
    page = parsed(html)
    assert "script" not in page.tags
    assert page.references == []
    svgs = drawings(html)  # parses as XML, so text and attributes are escaped there too
    assert len(svgs) == 2
    shown = text.replace("\x1b", "\ufffd").replace("\x00", "\ufffd").replace("\x07", "\ufffd")
    assert page.text.count(shown) >= 7 or not text.strip()
    assert "\x1b" not in html
    for svg in svgs:
        for element in svg.iter():
            for name, value in element.attrib.items():
                if name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
                    assert math.isfinite(float(value))
                if name == "d":
                    assert re.fullmatch(r"[ML\d .Z-]*", value)


def test_html_refers_to_nothing_outside() -> None:
    html = sample().to_html().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|//|url\(|@import", html)


def test_values_show_on_hover() -> None:
    line, bars = drawings(sample().to_html())
    titles = [element.text or "" for svg in (line, bars) for element in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert any("plain: 1\n" in title and "(0.9 to 1.1)" in title for title in titles)
    assert any("(1.5 to 2.5)" in title for title in titles)


def test_json_gives_the_numbers_back() -> None:
    blocks = json.loads(sample().to_json())["blocks"]
    table, line, bars = blocks[3:]
    assert [cell.get("value") for row in table["rows"] for cell in row] == [None, 1.5, None, 12.0, 12.0, "NaN"]
    assert table["columns"][1] == {"title": "time", "unit": "ms", "align": "right"}
    assert line["series"][0]["high"][1] == 0.55
    assert line["log_y"] is True
    assert bars["bars"][2]["value"] == "Infinity"


def test_files_are_written_whole(tmp_path: Path) -> None:
    report = sample()
    html = report.to_html(tmp_path / "r.html")
    report.to_json(tmp_path / "r.json")
    text = report.to_text(tmp_path / "r.txt", unicode=False)
    assert (tmp_path / "r.html").read_text() == html
    assert json.loads((tmp_path / "r.json").read_text())["schema"] == "oxytorch-report/1"
    assert (tmp_path / "r.txt").read_text() == text
    assert text.isascii()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.json", "r.txt"]
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "no" / "r.html"))):
        report.to_html(tmp_path / "no" / "r.html")


def test_parts_that_do_not_fit_are_refused() -> None:
    report = Report()
    with pytest.raises(ValueError, match="row 0"):
        report.table(["a", "b"], [[1]])
    with pytest.raises(ValueError, match="3 x values"):
        report.line_chart([Series("s", [1, 2, 3], [1, 2])])
    with pytest.raises(ValueError, match="interval"):
        report.bar_chart([Bar("b", 1.0, low=0.5)])
    with pytest.raises(ValueError, match="align"):
        Column("a", "middle")
    with pytest.raises(ValueError, match="level"):
        report.heading("h", 4)


def test_empty_reports_and_charts_say_so() -> None:
    parsed(Report("").to_html())
    report = Report("Empty").line_chart([]).bar_chart([]).table(["a"], [])
    assert len(drawings(report.to_html())) == 2
    assert "nothing to draw" in report.to_html()
    assert "nothing to draw" in report.to_text(unicode=False)
    parsed(ox.PerformanceMonitor().report().to_html())


def test_a_monitors_report_shows_its_run(tmp_path: Path) -> None:
    mon = ox.PerformanceMonitor()
    for i in range(5000):
        with mon.step(samples=2), mon.phase("forward <b>"):
            mon.scalar("loss", 1.0 / (i + 1))
    report = mon.report("My run")
    blocks = json.loads(report.to_json())["blocks"]
    curves = {block["title"] or block["y_label"]: block for block in blocks if block["type"] == "line_chart"}
    assert "loss" in curves
    for chart in curves.values():
        assert len(chart["series"][0]["x"]) <= 512
    page = parsed(report.to_html(tmp_path / "run.html"))
    assert "My run" in page.text
    assert "b" not in page.tags
    assert report.append(Report("Another").paragraph("More.")).to_text().endswith("More.\n")
