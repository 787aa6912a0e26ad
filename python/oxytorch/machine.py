"""The machine and the cluster: what to tune on the host, the topology, and what makers publish of their hardware."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from . import _C

__all__ = [
    "CpuClass",
    "Hardware",
    "HostRow",
    "TopologyConfig",
    "cpu_class",
    "find_hardware",
    "hardware_table",
    "host_report",
    "host_report_text",
]

_native = _C.machine
_NativeTopology = _C.machine.TopologyConfig
_KEYS = tuple(_NativeTopology.keys())


class HostRow(TypedDict):
    """One setting of the host.

    ``where`` is the path it was read from, ``why`` one sentence with its evidence. With the verdict ``"change"``
    there are a ``suggestion`` and the exact ``command``, which needs root where `needs_root`; ``"fine"`` was judged
    and is good; ``"reported"`` is a fact that is not judged, because what is right depends on more than this machine.
    """

    area: Literal["processor", "memory", "limits", "network", "storage", "accelerator"]
    what: str
    where: str
    value: str
    verdict: Literal["fine", "change", "reported"]
    suggestion: str
    why: str
    command: str
    needs_root: bool


def host_report(data_directory: str | os.PathLike[str] = "", *, root: str | os.PathLike[str] = "/") -> list[HostRow]:
    """Read the host's settings that a training run feels; nothing is changed.

    Parameters
    ----------
    data_directory
        Where the data are: the mount options there are judged. The working directory by default.
    root
        Another machine's tree of /proc, /sys and /run, for tests.

    Returns
    -------
    list of HostRow
        A row for each setting that is there; what cannot be read is left out.
    """
    return cast("list[HostRow]", _native.host_report(os.fspath(data_directory), os.fspath(root)))


def host_report_text(data_directory: str | os.PathLike[str] = "", *, root: str | os.PathLike[str] = "/") -> str:
    """Return `host_report` for a reader: first what to change, with the commands, then the rest."""
    return _native.host_report_text(os.fspath(data_directory), os.fspath(root))


class Hardware(TypedDict):
    """One accelerator as its data sheet has it.

    ``memory_bytes`` is the sheet's GB times 10^9; ``peak_ops_per_s`` maps ``"fp64"``, ``"fp32"``, ``"tf32"``,
    ``"bf16"``, ``"fp16"``, ``"fp8"``, ``"int8"`` to dense operations a second (a multiply-add is two; sheets that count
    sparsity are halved), with those left out that the sheet does not give; ``link_bytes_per_s`` is one way, all links
    of one accelerator together; ``watts`` the board's power limit.
    """

    name: str
    maker: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_ops_per_s: dict[str, float]
    link: str
    link_bytes_per_s: float
    watts: float
    source: str


def hardware_table() -> list[Hardware]:
    """Return every accelerator with published figures."""
    return cast("list[Hardware]", _native.hardware_table())


def find_hardware(name: str) -> tuple[Hardware | None, str]:
    """Return the published figures of an accelerator, and a sentence.

    Parameters
    ----------
    name
        As torch, a driver or a backend reports it (``"NVIDIA H100 80GB HBM3"``, ``"HL-225"``), or the table's own.

    Returns
    -------
    tuple
        The row and its source; or None and why: the name is unknown, or fits several rows.
    """
    row, reason = _native.find_hardware(name)
    return cast("Hardware | None", row), reason


class CpuClass(TypedDict):
    """Dense operations a cycle and core of a kind of processor, by dtype; a multiply-add is two."""

    name: str
    ops_per_cycle: dict[str, float]
    source: str


def cpu_class() -> CpuClass | None:
    """Return the best class whose instructions this processor has; None without AVX2 and FMA.

    ``ops_per_cycle[dtype] * cores * hertz`` is an upper bound of operations a second.
    """
    return cast("CpuClass | None", _native.cpu_class())


class TopologyConfig:
    """The cluster as data: nodes, accelerators, links, memory; readable and writable as attributes.

    Parameters
    ----------
    **values
        Any of the keys below. Sizes (``"80GB"``), rates (``"400Gb/s"`` bits, ``"50GB/s"`` bytes) and durations
        (``"5us"``) may be texts or plain numbers of bytes, bytes a second and seconds. None is unknown.

    Raises
    ------
    ValueError
        For an unknown key (with the nearest right one), a value out of range, or keys that contradict each other.
    TypeError
        For a value of a wrong type.

    Examples
    --------
    >>> cluster = TopologyConfig(nodes=4, accelerators_per_node=8, network_bandwidth="3200Gb/s")
    >>> cluster.total_accelerators, cluster.bisection_bytes_per_s
    (32, 800000000000.0)
    """

    __slots__ = ("_native",)
    __hash__ = None  # type: ignore[assignment]  # it can change

    _native: _NativeTopology

    if TYPE_CHECKING:
        nodes: int
        accelerators_per_node: int
        accelerator: str | None
        accelerator_memory: int | str | None
        node_link: str | None
        node_link_bandwidth: float | str | None
        node_link_latency: float | str | None
        network: str | None
        network_bandwidth: float | str | None
        network_latency: float | str | None
        host_memory: int | str | None
        cores_per_node: int | None

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_native", _NativeTopology())
        for key, value in values.items():
            self._native.set(key, value)
        self._native.check()

    @classmethod
    def _from_native(cls, native: _NativeTopology) -> TopologyConfig:
        config = cls.__new__(cls)
        object.__setattr__(config, "_native", native)
        return config

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> TopologyConfig:
        """Read a .json, .yaml or .yml file; `FileNotFoundError`, `OSError` or as the constructor."""
        return cls._from_native(_NativeTopology.from_file(os.fspath(path)))

    @classmethod
    def from_json(cls, text: str) -> TopologyConfig:
        """Read a JSON object of keys."""
        return cls._from_native(_NativeTopology.from_json(text))

    @classmethod
    def from_yaml(cls, text: str) -> TopologyConfig:
        """Read a YAML mapping of keys."""
        return cls._from_native(_NativeTopology.from_yaml(text))

    @classmethod
    def detect(
        cls, *, root: str | os.PathLike[str] = "/", environment: Mapping[str, str] | None = None
    ) -> TopologyConfig:
        """Find out what this process can: launcher's variables, backends, adapters, cgroup limits.

        Parameters
        ----------
        root, environment
            Another machine's file tree and variables, for tests.

        Returns
        -------
        TopologyConfig
            What cannot be found is None, latencies always; `explain` says where each value came from.
        """
        variables = None if environment is None else dict(environment)
        return cls._from_native(_NativeTopology.detect(os.fspath(root), variables))

    @property
    def total_accelerators(self) -> int:
        """Accelerators of all nodes."""
        return self._native.total_accelerators()

    @property
    def total_accelerator_memory(self) -> float | None:
        """Bytes, or None where one accelerator's memory is unknown."""
        return self._native.total_accelerator_memory()

    @property
    def bisection_bytes_per_s(self) -> float | None:
        """One way between the two halves of the cluster, the network taken as non-blocking.

        Half of the nodes times a node's network; in a single node half of the accelerators times one's link.
        """
        return self._native.bisection_bytes_per_s()

    @property
    def network_bytes_per_s_per_accelerator(self) -> float | None:
        """A node's network shared by its accelerators."""
        return self._native.network_bytes_per_s_per_accelerator()

    @property
    def host_memory_per_accelerator(self) -> float | None:
        """A node's memory in bytes shared by its accelerators."""
        return self._native.host_memory_per_accelerator()

    @property
    def cores_per_accelerator(self) -> float | None:
        """A node's cores shared by its accelerators."""
        return self._native.cores_per_accelerator()

    def check(self) -> None:
        """Raise `ValueError` where keys contradict each other."""
        self._native.check()

    def origin(self, key: str) -> str:
        """Where a value came from: ``"default"``, ``"caller"``, ``"file x.yaml"``, ``"SLURM_NNODES"``; or ``""``."""
        return self._native.origin(key)

    def to_dict(self) -> dict[str, Any]:
        """Every key and its value; bytes, bytes a second and seconds; None where unknown."""
        return {key: self._native.get(key) for key in _KEYS}

    def to_json(self) -> str:
        """Every key and its value, as a JSON object."""
        return self._native.to_json()

    def explain(self) -> str:
        """A table: each key, its value, where it came from and what it means; then what follows from them."""
        return self._native.explain()

    def __getattr__(self, name: str) -> Any:
        if name not in _KEYS:
            raise AttributeError(f"TopologyConfig has no key {name!r}; the keys are {', '.join(_KEYS)}.")
        return self._native.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _KEYS:
            raise AttributeError(f"TopologyConfig has no key {name!r}; the keys are {', '.join(_KEYS)}.")
        self._native.set(name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopologyConfig) and self._native.equals(other._native)

    def __copy__(self) -> TopologyConfig:
        return self._from_native(_NativeTopology(self._native))

    def __deepcopy__(self, memo: dict[int, Any]) -> TopologyConfig:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        return TopologyConfig.from_json, (self.to_json(),)

    def __repr__(self) -> str:
        known = ", ".join(f"{key}={value!r}" for key, value in self.to_dict().items() if value is not None)
        return f"TopologyConfig({known})"
