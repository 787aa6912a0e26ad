"""Habana's loader is a package of its own."""

from __future__ import annotations

from torch.utils.data import DataLoader


class HabanaDataLoader(DataLoader):
    """A loader that falls back to torch's."""
