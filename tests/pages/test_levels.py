"""What the levels are is said in three places, and is what the configuration does."""

from __future__ import annotations

from pathlib import Path

import oxytorch as ox
import pytest

pytestmark = pytest.mark.cpu_only("reads the pages")

ROOT = Path(__file__).resolve().parents[2]
SAID = ("docs/guide/levels.md", "docs/base.md", "python/oxytorch/config.py")


def test_ultra_is_advanced_with_8_bit_optimizer_state() -> None:
    advanced, ultra = dict(ox.PerformanceConfig("advanced")), dict(ox.PerformanceConfig("ultra"))
    assert {key for key in ultra if ultra[key] != advanced[key]} == {"level", "optimizer_state"}
    assert ultra["optimizer_state"] == "int8"
    for page in SAID:
        assert "8-bit optimizer state" in (ROOT / page).read_text(), page
