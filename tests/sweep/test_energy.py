import pytest

from raysd.sweep.energy import energy_j, energy_of, joules_per_token, usd_per_million_tokens


def test_constant_power_times_time():
    assert energy_j([(float(second), 300.0) for second in range(11)], 2.5, 7.25) == pytest.approx(300 * 4.75)


def test_a_ramp_is_interpolated_at_both_edges_of_the_window():
    samples = [(float(second), 100.0 * second) for second in range(11)]
    assert energy_j(samples, 2.5, 7.5) == pytest.approx(100 * (7.5**2 - 2.5**2) / 2)
    assert energy_j(samples, 3.2, 3.7) == pytest.approx(100 * (3.7**2 - 3.2**2) / 2), "within two samples"


def test_at_an_edge_without_a_sample_beyond_the_last_power_is_held_for_a_while():
    samples = [(1.0, 100.0), (2.0, 200.0)]
    assert energy_j(samples, 0.0, 4.0) == pytest.approx(100 + 150 + 400)
    assert energy_j(samples, 0.0, 5.5) is None


def test_a_gap_is_not_bridged():
    assert energy_j([(0.0, 100.0), (3.0, 100.0), (6.0, 100.0)], 0.0, 6.0) == pytest.approx(600)
    assert energy_j([(0.0, 100.0), (3.1, 100.0), (6.0, 100.0)], 0.0, 6.0) is None
    assert energy_j([], 0.0, 1.0) is None


def row(t_s: float, device: str, power_w: float | None, source: str = "amd-smi") -> dict:
    return {"t_s": t_s, "source": source, "device": device, "power_w": power_w}


def test_devices_add_up_and_others_are_left_out():
    rows = [row(float(second), device, power) for second in range(5) for device, power in (("0", 100.0), ("1", 200.0), ("2", 400.0))]
    rows += [row(float(second), "host", None, "host") for second in range(5)]
    assert energy_of(rows, 0, 4) == pytest.approx(2800)
    assert energy_of(rows, 0, 4, {"0", "1"}) == pytest.approx(1200)
    assert energy_of(rows[-5:], 0, 4) is None, "nobody tells a power"
    assert energy_of([*rows, row(0.0, "3", 50.0)], 0, 4) is None, "one device is known for a moment alone"


@pytest.mark.parametrize("devices", [None, {"0", "1"}])
@pytest.mark.parametrize("power_w", [None, "absent"])
def test_what_only_some_devices_tell_is_not_the_energy_of_all(power_w, devices):
    rows = [row(float(second), "0", 100.0) for second in range(5)] + ([] if power_w == "absent" else [row(float(second), "1", power_w) for second in range(5)])
    told = energy_of(rows, 0, 4, devices)
    assert told == (pytest.approx(400) if power_w == "absent" and devices is None else None), "that there is a second device is known by its rows, or by the mask"


def test_joules_and_dollars_for_tokens():
    assert joules_per_token(1000.0, 250) == 4 and joules_per_token(1000.0, 0) is None
    # research: 936.6 output tokens a second and GPU at 1.90 dollars an hour
    assert usd_per_million_tokens(1.90, 936.6) == pytest.approx(0.564, abs=5e-4)
    assert usd_per_million_tokens(1.90, 0.0) is None
