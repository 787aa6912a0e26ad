"""What the hpu backend tells of Gaudi cards, over a fake libhlml.so; each scenario in a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch_device

pytestmark = pytest.mark.cpu_only("starts processes with devices of their own")

ROOT = Path(__file__).resolve().parents[2]
BUILD = torch_device.BUILD
BACKEND = BUILD / "src" / "liboxytorch-backend-hpu.so"
FAKES = BUILD / "tests" / "hpu"
CODES = {
    1: "not initialised",
    2: "refuses an argument",
    3: "does not support it",
    5: "initialised already",
    6: "finds no such thing",
    7: "buffer is too small",
    9: "driver is not loaded",
    10: "did not answer in time",
    15: "the card is lost",
    20: "no host memory left",
    21: "no such data now",
    49: "reason it does not know",
    77: "undocumented code 77",
}

# `report()` as a user's process would ask for it.
ASK = f"""
import ctypes, json, os, sys, time
library = ctypes.CDLL({str(BACKEND)!r})
library.oxy_hpu_report.restype = ctypes.c_uint64
library.oxy_hpu_report.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
def report():
    text = ctypes.create_string_buffer(1 << 20)
    assert 0 < library.oxy_hpu_report(text, len(text)) <= len(text)
    return json.loads(text.value)
"""


def run(
    tmp_path: Path,
    code: str,
    *lines: str,
    library: Path | str = FAKES / "libhlml.so",
    timeout: float = 60,
    **variables: str,
) -> Any:
    """Run code with a scenario; what it prints last is JSON."""
    scenario = tmp_path / "scenario"
    scenario.write_text("\n".join([f"calls={tmp_path / 'calls'}", *lines]) + "\n")
    kept = {
        k: v for k, v in os.environ.items() if k not in ("HLS_MODULE_ID", "HABANA_VISIBLE_MODULES", "OXYTORCH_HLML")
    }
    environment = {**kept, "FAKE_HLML": str(scenario), "OXYTORCH_HLML": str(library), **variables}
    done = subprocess.run(
        [sys.executable, "-c", ASK + code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def report(tmp_path: Path, *lines: str, **arguments: Any) -> Any:
    return run(tmp_path, "print(json.dumps(report()))", *lines, **arguments)


def one_sentence(text: str) -> bool:
    return bool(text) and "\n" not in text and len(text) < 400


def test_eight_cards_in_units_of_the_table(tmp_path: Path) -> None:
    told = report(tmp_path, "cards=8", "power=350500", "5.power=601000", "energy=7500", "5.used=5000", "name=HL-225")
    assert told["problem"] == ""
    assert told["hlml"] == told["driver"] == "1.24.0-fake"
    assert [card["module"] for card in told["cards"]] == list(range(8))
    card = told["cards"][5]
    values = card["values"]
    assert card["name"] == "HL-225" and card["serial"] == "FAKE5" and card["unknown"] == {}
    assert (values["power"], told["units"]["power"]) == (601.0, "W")
    assert (values["energy"], told["units"]["energy"]) == (7.5, "J")
    assert values["memory_used"] == 5000
    assert values["memory_free"] + values["memory_used"] == values["memory_total"] == 128 << 30
    assert (values["temperature"], values["board_temperature"]) == (41, 42)
    assert told["cards"][4]["values"]["power"] == 350.5
    assert set(values) == set(told["units"])


@pytest.mark.parametrize(("bits", "power", "heat"), [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (4, 0, 0)])
def test_throttling(tmp_path: Path, bits: int, power: int, heat: int) -> None:
    values = report(tmp_path, f"throttle={bits}", "violation0=12", "violation1=34")["cards"][0]["values"]
    assert (values["throttled_by_power"], values["throttled_by_heat"]) == (power, heat)
    assert (values["power_violation"], values["heat_violation"]) == (12, 34)


def test_ports_come_from_the_card(tmp_path: Path) -> None:
    cards = report(tmp_path, "cards=2", "1.down=5", "0.ports=0x0", "1.ports1=0x7")["cards"]
    assert (cards[0]["values"]["ports"], cards[0]["values"]["ports_up"]) == (0, 0)
    assert (cards[1]["values"]["ports"], cards[1]["values"]["ports_up"]) == (27, 26)


def test_rows_and_errors(tmp_path: Path) -> None:
    lines = ("rows0=2", "rows1=40", "rows_pending=1", "ecc0=3", "ecc1=99", "replays=6")
    values = report(tmp_path, *lines)["cards"][0]["values"]
    assert values["replaced_rows"] == 42 and values["replaced_rows_pending"] == 1
    assert values["uncorrected_ecc_errors"] == 3 and values["pcie_replays"] == 6


def test_a_lost_card_takes_no_other_with_it(tmp_path: Path) -> None:
    told = report(tmp_path, "cards=8", "3.lost=1")
    assert [card["lost"] for card in told["cards"]] == [index == 3 for index in range(8)]
    assert told["cards"][3]["values"] == {}
    assert all("the card is lost" in why for why in told["cards"][3]["unknown"].values())
    assert told["cards"][4]["unknown"] == {}


def test_a_card_lost_at_the_first_look(tmp_path: Path) -> None:
    told = report(tmp_path, "cards=2", "1.fail.device_get_handle_by_index=15")
    assert not told["cards"][0]["lost"] and told["cards"][1]["lost"]
    assert "the card is lost" in told["cards"][1]["unknown"]["card"]


def test_an_old_library_says_what_it_has_not(tmp_path: Path) -> None:
    (card,) = report(tmp_path, library=FAKES / "old" / "libhlml.so")["cards"]
    assert card["values"]["power"] == 350
    assert set(card["unknown"]) == {
        "power_violation", "heat_violation", "replaced_rows", "replaced_rows_pending", "ports", "ports_up",
    }  # fmt: skip
    assert card["unknown"]["ports"] == "this libhlml.so is too old: it has no hlml_get_mac_addr_info"


def test_no_library_and_libraries_that_are_none(tmp_path: Path) -> None:
    text = tmp_path / "text.so"
    text.write_text("not a library\n")
    for library, sentence in (
        ("/nowhere/libhlml.so", "OXYTORCH_HLML names a library that cannot be opened: /nowhere/libhlml.so"),
        (text, "OXYTORCH_HLML names a library that cannot be opened"),
        (FAKES / "other" / "libhlml.so", "so it is no libhlml.so"),
        ("", "Gaudi's management library libhlml.so cannot be opened"),
    ):
        told = report(tmp_path, library=library)
        assert sentence in told["problem"] and one_sentence(told["problem"])
        assert told["cards"] == []


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_a_sentence(tmp_path: Path, code: int) -> None:
    (card,) = report(tmp_path, f"fail.device_get_power_usage={code}", f"fail.nic_get_link={code}")["cards"]
    assert CODES[code] in card["unknown"]["power"] and one_sentence(card["unknown"]["power"])
    assert CODES[code] in card["unknown"]["ports_up"]
    assert card["lost"] == (code == 15)
    assert "utilization" in card["values"], "what was read before stays"

    counted = report(tmp_path, f"fail.device_get_count={code}")
    assert CODES[code] in counted["problem"]
    started = report(tmp_path, f"fail.init={code}", "cards=1")
    if code != 5:  # somebody else's library handle initialised it: the fake then answers "not initialised" itself
        assert started["problem"].startswith("hlml_init failed: ") and CODES[code] in started["problem"]


@pytest.mark.parametrize("which", ["get_mac_addr_info", "device_get_replaced_rows", "device_get_memory_info"])
def test_a_failure_inside_a_meter_of_several_calls(tmp_path: Path, which: str) -> None:
    (card,) = report(tmp_path, f"fail.{which}=21")["cards"]
    assert card["unknown"] and all("no such data" in why for why in card["unknown"].values())


def test_no_card(tmp_path: Path) -> None:
    assert report(tmp_path, "cards=0")["problem"] == "libhlml.so sees no Gaudi card"


def test_facts_that_a_card_does_not_tell(tmp_path: Path) -> None:
    fails = [f"fail.device_get_{what}=3" for what in ("name", "uuid", "serial", "minor_number", "module_id")]
    (card,) = report(tmp_path, *fails)["cards"]
    assert (card["name"], card["serial"], card["minor"], card["module"]) == ("", "", -1, -1)
    assert card["values"]["power"] == 350


def test_a_library_that_hangs_hangs_no_one(tmp_path: Path) -> None:
    told = report(tmp_path, "hang.init=60000", timeout=30)
    assert told["problem"] == "libhlml.so has not answered for 2 seconds"


def test_a_card_that_hangs_keeps_its_name(tmp_path: Path) -> None:
    told = report(tmp_path, "hang.device_get_power_usage=60000", timeout=30)
    assert told["problem"] == "libhlml.so has not answered for 2 seconds"
    assert told["cards"][0]["name"] == "HL-325L" and told["cards"][0]["values"] == {}


def test_samples_are_at_most_one_a_second_and_change(tmp_path: Path) -> None:
    code = """
start = time.monotonic()
first = [report()["cards"][0]["values"]["power"] for _ in range(200)]
spent = time.monotonic() - start
for _ in range(100):
    time.sleep(0.1)
    if (last := report()["cards"][0]["values"]["power"]) != first[-1]: break
print(json.dumps([first, last, spent, len(os.listdir("/proc/self/task"))]))
"""
    first, last, spent, threads = run(tmp_path, code, "power=100000,200000,300000,400000,500000,600000")
    assert first[0] == 100 and len(set(first)) <= 1 + spent
    assert last > 100
    assert threads == 2, "one thread samples"
    calls = (tmp_path / "calls").read_text().split()
    assert calls.count("init") == 1 and calls.count("device_get_handle_by_index") == 1, "handles are kept"
    assert calls[-1] == "shutdown", "the thread ends with the process"


def test_a_fork_is_told_so(tmp_path: Path) -> None:
    code = """
report()
inside, outside = os.pipe()
if os.fork() == 0:
    os.write(outside, report()["problem"].encode())
    sys.exit(0)
print(json.dumps(os.read(inside, 1000).decode()))
"""
    assert "forked" in run(tmp_path, code)


def test_the_note_of_used_memory(tmp_path: Path) -> None:
    minor = 1_000_000 + os.getpid()
    note = Path(f"/dev/shm/mem_usage_accel{minor}")
    lines = (f"minor={minor}", "used=777")
    now = int(time.time())
    try:
        for fields, known in (((1, now, 777), True), ((1, now - 3600, 777), False), ((9, now, 777), False)):
            note.write_bytes(struct.pack("QQQ", *fields))
            (card,) = report(tmp_path, *lines)["cards"]
            assert card["values"].get("memory_used") == (777 if known else None)
            assert ("older than 30 seconds" in card["unknown"].get("memory_used", "")) == (not known)
            assert card["values"]["memory_total"] == 128 << 30
    finally:
        note.unlink()
    assert report(tmp_path, *lines)["cards"][0]["values"]["memory_used"] == 777, "without a note it is the card's word"


def test_which_card_is_this_process_s(tmp_path: Path) -> None:
    lines = ("cards=4", "0.module=3", "1.module=2", "2.module=1", "3.module=0")
    assert report(tmp_path, *lines)["own"] == -1
    assert report(tmp_path, *lines, HLS_MODULE_ID="2")["own"] == 1
    assert report(tmp_path, *lines, HABANA_VISIBLE_MODULES="3")["own"] == 0
    assert report(tmp_path, *lines, HABANA_VISIBLE_MODULES="3,2")["own"] == -1
    assert report(tmp_path, *lines, HLS_MODULE_ID="nonsense")["own"] == -1
    assert report(tmp_path, "cards=1")["own"] == 0


def test_texts_survive_json(tmp_path: Path) -> None:
    assert report(tmp_path, 'name=a"b\\c\td')["cards"][0]["name"] == 'a"b\\c\td'


def test_a_process_without_torch_says_which_thing_is_missing(tmp_path: Path) -> None:
    program = Path(torch_device.PACKAGE.origin).parent / "bin" / "oxytorch-conformance"
    done = subprocess.run([program, BACKEND], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "torch is not loaded in this process; Gaudi's management library" in done.stdout + done.stderr


# ---- the fake keeps to the public layouts, as Python's own binding reads them


class Memory(ctypes.Structure):
    _fields_ = [("free", ctypes.c_ulonglong), ("total", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class PciCap(ctypes.Structure):
    _fields_ = [("link_speed", ctypes.c_char * 10), ("link_width", ctypes.c_char * 10)]


class PciInfo(ctypes.Structure):
    _fields_ = [
        ("bus", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 15),
        ("device", ctypes.c_uint),
        ("domain", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("caps", PciCap),
    ]


class MacInfo(ctypes.Structure):
    _fields_ = [("addr", ctypes.c_ubyte * 6), ("id", ctypes.c_int)]


class NicStats(ctypes.Structure):
    _fields_ = [
        ("port", ctypes.c_uint32),
        ("str_buf", ctypes.c_char_p),
        ("val_buf", ctypes.POINTER(ctypes.c_uint64)),
        ("num_of_counters_out", ctypes.POINTER(ctypes.c_uint32)),
    ]


class RowAddress(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint8) for name in ("hbm_idx", "pc", "sid", "bank_idx")] + [("row", ctypes.c_uint16)]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    scenario = tmp_path / "scenario"
    scenario.write_text("cards=8\nused=3\nrows1=2\nreceived=9\n")
    monkeypatch.setenv("FAKE_HLML", str(scenario))
    library = ctypes.CDLL(str(FAKES / "libhlml.so"))
    assert library.hlml_init() == 0
    yield library
    assert library.hlml_shutdown() == 0


def test_the_fake_has_all_functions() -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", FAKES / "libhlml.so"], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines() if " T hlml_" in line}
    assert len(names) == 61
    used = {
        line.split("X(")[1].split(",")[0]
        for line in (ROOT / "backends/hpu/hlml.h").read_text().splitlines()
        if "  X(" in line
    }
    assert len(used) == 26 and {f"hlml_{name}" for name in used} <= names


def test_layouts(fake: Any) -> None:
    card = ctypes.c_void_p()
    assert fake.hlml_device_get_handle_by_UUID(b"01P0-FAKE-6", ctypes.byref(card)) == 0
    memory = Memory()
    assert fake.hlml_device_get_memory_info(card, ctypes.byref(memory)) == 0
    assert (memory.used, memory.free + memory.used) == (3, memory.total)
    pci = PciInfo()
    assert fake.hlml_device_get_pci_info(card, ctypes.byref(pci)) == 0
    assert (pci.bus, pci.bus_id, pci.caps.link_speed, pci.caps.link_width) == (6, b"0000:06:00.0", b"32GT/s", b"x16")
    by_address = ctypes.c_void_p()
    assert fake.hlml_device_get_handle_by_pci_bus_id(pci.bus_id, ctypes.byref(by_address)) == 0
    assert by_address.value == card.value
    addresses, actual = (MacInfo * 48)(), ctypes.c_uint()
    assert fake.hlml_device_get_mac_info(card, addresses, 48, 0, ctypes.byref(actual)) == 0
    assert actual.value == 24 and addresses[23].id == 23 and addresses[23].addr[4] == 6
    rows, count = (RowAddress * 32)(), ctypes.c_uint(32)
    assert fake.hlml_device_get_replaced_rows(card, 1, ctypes.byref(count), rows) == 0
    assert count.value == 2 and rows[1].row == 1
    count.value = 1
    assert fake.hlml_device_get_replaced_rows(card, 1, ctypes.byref(count), rows) == 7
    text, values, number = ctypes.create_string_buffer(320), (ctypes.c_uint64 * 10)(), ctypes.c_uint32()
    statistics = NicStats(0, ctypes.cast(text, ctypes.c_char_p), values, ctypes.pointer(number))
    assert fake.hlml_nic_get_statistics(card, ctypes.byref(statistics)) == 0
    assert (number.value, text.value, values[0]) == (1, b"port_rcv_data", 9)
    up = ctypes.c_bool()
    assert fake.hlml_nic_get_link(card, 3, ctypes.byref(up)) == 0 and up.value
    name = ctypes.create_string_buffer(4)
    assert fake.hlml_device_get_name(card, name, 4) == 7


def test_what_the_fake_refuses(fake: Any) -> None:
    card = ctypes.c_void_p()
    assert fake.hlml_device_get_handle_by_index(8, ctypes.byref(card)) == 2
    assert fake.hlml_init() == 5
    assert fake.hlml_device_get_handle_by_UUID(b"none", ctypes.byref(card)) == 6
    assert fake.hlml_device_get_handle_by_index(0, ctypes.byref(card)) == 0
    mode = ctypes.c_int()
    assert fake.hlml_device_get_persistence_mode(card, ctypes.byref(mode)) == 3
    events = ctypes.c_void_p()
    assert fake.hlml_event_set_create(ctypes.byref(events)) == 0
    assert fake.hlml_device_register_events(card, ctypes.c_ulonglong(2), events) == 0
    assert fake.hlml_event_set_wait(events, ctypes.create_string_buffer(16), 1) == 10
    assert fake.hlml_event_set_free(events) == 0
