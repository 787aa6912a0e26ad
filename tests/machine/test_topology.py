from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import oxytorch as ox
import psutil
import pytest
from oxytorch import machine


def test_values_by_name_and_what_follows_from_them(tmp_path: Path) -> None:
    cluster = ox.TopologyConfig(
        nodes=4,
        accelerators_per_node=8,
        accelerator="H200 SXM",
        accelerator_memory="141GB",
        network="infiniband",
        network_bandwidth="3200Gb/s",
        network_latency="5us",
        host_memory="2TiB",
        cores_per_node=112,
    )
    assert cluster.total_accelerators == 32
    assert cluster.total_accelerator_memory == 32 * 141e9
    assert cluster.bisection_bytes_per_s == 2 * 4e11
    assert cluster.network_bytes_per_s_per_accelerator == 5e10
    assert cluster.host_memory_per_accelerator == 2**41 / 8
    assert cluster.cores_per_accelerator == 14
    assert cluster.network_latency == pytest.approx(5e-6)
    assert cluster.node_link is None
    for other in (
        copy.deepcopy(cluster),
        pickle.loads(pickle.dumps(cluster)),
        ox.TopologyConfig.from_json(cluster.to_json()),
        ox.TopologyConfig(**cluster.to_dict()),
    ):
        assert other == cluster
        other.nodes = 8
        assert other != cluster
    (tmp_path / "cluster.yaml").write_text("nodes: 2\nnetwork: efa\nnetwork_bandwidth: 400Gb/s\n")
    read = ox.TopologyConfig.from_file(tmp_path / "cluster.yaml")
    assert read.network_bandwidth == 5e10
    assert read.origin("network") == f"file {tmp_path / 'cluster.yaml'}"
    assert "efa" in read.explain()
    assert repr(read) == (
        "TopologyConfig(nodes=2, accelerators_per_node=0, network='efa', network_bandwidth=50000000000.0)"
    )


def test_wrong_values_are_refused_and_nothing_is_half_applied() -> None:
    cluster = ox.TopologyConfig()
    with pytest.raises(ValueError, match="did you mean 'nodes'"):
        ox.TopologyConfig(nods=2)
    with pytest.raises(ValueError, match="accelerators_per_node is 0"):
        ox.TopologyConfig(accelerator="B200")
    with pytest.raises(TypeError, match="cannot be a list"):
        cluster.nodes = [2]  # type: ignore[assignment]
    with pytest.raises(TypeError, match="not true"):
        cluster.nodes = True
    with pytest.raises(AttributeError, match="no key 'nodez'"):
        cluster.nodez = 2  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no key 'nodez'"):
        cluster.nodez  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(FileNotFoundError):
        ox.TopologyConfig.from_file("/no/such/cluster.yaml")
    assert cluster == ox.TopologyConfig()


def test_detection(tmp_path: Path) -> None:
    here = ox.TopologyConfig.detect()
    here.check()
    assert here.nodes >= 1
    assert here.host_memory == ox.info()["memory"]["limit"] <= psutil.virtual_memory().total
    assert ox.TopologyConfig.detect(environment={"WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "4"}).nodes == 3
    slurm = ox.TopologyConfig.detect(root=tmp_path, environment={"SLURM_NNODES": "5", "SLURM_GPUS_ON_NODE": "8"})
    assert (slurm.nodes, slurm.accelerators_per_node, slurm.host_memory) == (5, 8, None)
    assert slurm.origin("nodes") == "SLURM_NNODES"


def test_hardware_by_the_names_that_torch_reports() -> None:
    h100, reason = machine.find_hardware("NVIDIA H100 80GB HBM3")
    assert h100 is not None
    assert h100["name"] == "H100 SXM"
    assert h100["source"] in reason
    assert h100["peak_ops_per_s"]["bf16"] == pytest.approx(132 * 1.83e9 * 4096, rel=1e-3)
    none, reason = machine.find_hardware("A100")
    assert none is None
    assert "say which" in reason
    assert machine.find_hardware("Riva 128")[0] is None
    table = machine.hardware_table()
    assert all(machine.find_hardware(row["name"])[0] == row for row in table)
    json.dumps(table)


def test_the_class_of_this_processor() -> None:
    features = ox.info()["features"]
    found = machine.cpu_class()
    assert (found is not None) == (features["avx2"] and features["fma"])
    if found is not None and features["avx512f"]:
        assert found["ops_per_cycle"]["fp32"] == 64
    if found is not None:
        assert ("bf16" in found["ops_per_cycle"]) == (
            features["avx512_bf16"] or (features["avx512f"] and features["amx_bf16"])
        )
