"""Machines: data in and out, rates between the measured points, and mistakes that are named."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from weft.core.cost import Cost
from weft.core.errors import SpecError
from weft.core.machine import Device, Host, Link, Machine, interpolate
from weft.core.units import parse_bytes, show_bytes, show_loss, show_seconds
from weft.planner.machine_profiles import PROFILES, closest_profile, profile


@pytest.mark.parametrize("machine", PROFILES.values(), ids=PROFILES)
def test_profiles_go_through_json(machine):
    assert Machine.from_json(machine.to_json(), "file") == machine


@pytest.mark.parametrize("machine", PROFILES.values(), ids=PROFILES)
def test_profiles_make_sense(machine):
    assert 0 < machine.available_bytes <= machine.memory_bytes
    assert machine.flops["fp32"] <= machine.flops["tf32"]
    assert machine.gather_rate(256, cached=True) > machine.gather_rate(256, cached=False)
    assert machine.replay_seconds <= machine.launch_seconds
    assert not machine.measured


@pytest.mark.parametrize("machine", PROFILES.values(), ids=PROFILES)
def test_profiles_say_where_their_numbers_are_from(machine):
    for part in (machine.host, *machine.devices):
        for one in fields(part):
            if one.name not in ("name", "sources"):
                assert getattr(part, one.name), (part.kind, one.name)
                assert part.sources.get(one.name), (part.kind, one.name)
    for link in machine.links:
        assert link.source
        assert link.latency > 0


@pytest.mark.parametrize("machine", PROFILES.values(), ids=PROFILES)
def test_profiles_have_a_host_and_links(machine):
    machine.host.require_rates()
    assert machine.link("disk", "disk", "host") is not None
    assert (machine.device == "cuda") == bool(machine.devices) == (machine.bus_bandwidth("host", "gpu:0") > 0)
    assert machine.bus_bandwidth("host", "gpu:0") < machine.copy_bandwidth
    assert machine.host_only("host").memory_bytes == machine.host.memory_bytes


@pytest.mark.parametrize(("name", "has"), [("v100-32g", False), ("t4", False), ("cpu", False), ("a10", True)])
def test_bf16_is_there_where_it_is_faster_than_fp32(name, has):
    assert profile(name).has_bf16 is has
    assert has or profile(name).flops["bf16"] <= profile(name).flops["fp32"]


def test_unknown_machine_names_the_close_ones():
    with pytest.raises(SpecError, match=r"no machine 'a100'; did you mean .*'a100-40g'"):
        profile("a100")
    with pytest.raises(SpecError, match="known: v100-32g"):
        profile("zzzz")
    assert profile("H200").name == "h200"


def test_a_driver_name_finds_its_profile():
    assert closest_profile("NVIDIA A100-SXM4-40GB").name == "a100-40g"
    assert closest_profile("Tesla V100-SXM2-32GB").name == "v100-32g"
    assert closest_profile("NVIDIA H200").name == "h200"
    assert closest_profile("NVIDIA H100 80GB HBM3").name == "h100"
    assert closest_profile("NVIDIA L40S").name == "l40s"
    assert closest_profile("NVIDIA A10").name == "a10"
    assert closest_profile("Tesla T4").name == "t4"
    assert closest_profile("NVIDIA A10G") is None


def test_rates_between_the_points():
    rates = ((64, 2.0), (256, 4.0))
    assert interpolate(rates, 128) == 3.0
    assert interpolate(rates, 1 << 20) == 4.0
    assert interpolate(rates, 32) == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 0}, "memory_bytes=0 must be a number above 0"),
        ({"copy_bandwidth": float("nan")}, "copy_bandwidth=nan must be a number above 0"),
        ({"context_bytes": -1}, "context_bytes=-1 must be a number at least 0"),
        ({"gather": ()}, "must be pairs of row bytes"),
        ({"gather": ((64, 1.0), (64, 2.0))}, "must be pairs of row bytes"),
        ({"flops": {"fp32": 1.0, "tf32": 1.0}}, "no rate above 0 for 'bf16'"),
    ],
)
def test_bad_numbers_are_named(change, message):
    with pytest.raises(SpecError, match=message):
        profile("h200").with_device(**change)


def test_without_a_device_the_host_has_to_have_rates():
    with pytest.raises(SpecError, match="host: memory_bytes=0 must be a number above 0"):
        Machine("bare", Host(cores=4))
    with pytest.raises(SpecError, match="host: flops has no rate above 0 for 'tf32'"):
        profile("cpu").with_host(flops={"fp32": 1e9})
    assert Machine("bare", Host(cores=4), profile("h200").devices).device == "cuda"


@pytest.mark.parametrize(
    ("link", "message"),
    [
        (("bus", "host", "gpu:0", 1.0), "kind='bus' must be one of pcie, nvlink, network, disk"),
        (("pcie", "host", "gpu:0", 0), "bytes_per_second=0 must be a number above 0"),
        (("pcie", "host", "gpu:0", 1.0, -1.0), "latency=-1.0 must be a number at least 0"),
    ],
)
def test_bad_links_are_named(link, message):
    with pytest.raises(SpecError, match=f"^link 'host' to 'gpu:0': {message}"):
        Link(*link)


def test_several_devices_and_their_links_go_through_json():
    one = profile("a100-80g")
    links = (*one.links, Link("nvlink", "gpu:0", "gpu:1", 2.5e11, 2e-6, "assumed"))
    machine = replace(one, devices=(one.devices[0], replace(one.devices[0], name="second")), links=links)
    again = Machine.from_json(machine.to_json(), "file")
    assert again == machine
    assert isinstance(again.devices[1], Device)
    assert again.link("nvlink", "gpu:0", "gpu:1").bytes_per_second == 2.5e11
    assert again.link("nvlink", "gpu:1", "gpu:0") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "holds list"),
        ('{"name": "x"}', "no 'host'"),
        ('{"name": "x", "host": {"cores": 0}}', "machine 'x': host: cores=0 must be a number above 0"),
        ('{"name": "x", "host": {}, "devices": 3}', "machine 'x': not as `weft probe` writes one"),
        ('{"name": "x", "host": {}, "links": [{"kind": "pcie"}]}', "a link has no 'from'"),
        ('{"name": "x", "host": {}, "links": [{"from": "host", "to": "gpu:0"}]}', "a link has no 'kind'"),
    ],
)
def test_bad_files_are_named(text, message):
    with pytest.raises(SpecError, match=f"^my.json: .*{message}"):
        Machine.from_json(text, "my.json")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("24 G", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("0.5kib", 512),
        ("512", 512),
        ("512B", 512),
        (1e9, 10**9),
    ],
)
def test_amounts_of_memory(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "24 GiG", "-3GiB", "0", "nan", True, None, float("inf")])
def test_bad_amounts_are_named(text):
    with pytest.raises(SpecError, match="budget="):
        parse_bytes(text)


def test_amounts_are_shown_with_three_digits():
    assert [show_bytes(n) for n in (0, 512, 1536, 1.4 * 2**30, 139 * 2**30)] == [
        "0 B", "512 B", "1.50 KiB", "1.40 GiB", "139 GiB",
    ]  # fmt: skip
    assert [show_seconds(s) for s in (2e-6, 9.37e-4, 0.0471, 1.5, 600, 90_000)] == [
        "2.00 us", "937 us", "47.1 ms", "1.50 s", "10.0 min", "25.0 h",
    ]  # fmt: skip


def test_losses_have_four_decimals_unless_they_run_away():
    assert [show_loss(x) for x in (0.25, 12345.678, 3.46137e20, -2e9)] == ["0.2500", "12345.6780", "3.46e+20", "-2e+09"]
    assert show_loss(float("inf")) == "inf"


def test_cost_goes_through_json():
    cost = Cost(peak_bytes=5, bytes={"weight": 5}, seconds={"gpu": 0.5, "cpu": 0.25}, families={"spmm": 0.75})
    assert cost.epoch_seconds == 0.75
    assert Cost.from_dict(json.loads(json.dumps(cost.to_dict()))) == cost


def test_cost_is_by_resource():
    cost = Cost(seconds={"gpu:0": 0.5, "gpu:1": 0.25, "pcie": 1.0, "disk": 2.0})
    assert (cost.seconds_of("gpu"), cost.seconds_of("cpu"), cost.epoch_seconds) == (0.75, 0.0, 3.75)
    with pytest.raises(SpecError, match="seconds of 'abacus': a resource is one of gpu, cpu, pcie, link, disk"):
        Cost(seconds={"abacus": 1.0})
