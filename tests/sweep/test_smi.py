import json

import pytest

from raysd.sweep.smi import LineReader, Reading, of_amd_fields, own_devices, parse_amd_json, parse_nvidia_csv, parse_rocm_json

AMD = [{"gpu": 0, "usage": {"gfx_activity": {"value": 95, "unit": "%"}, "umc_activity": {"value": 41, "unit": "%"}},
        "power": {"socket_power": {"value": 1180, "unit": "W"}, "gfx_voltage": "N/A"},
        "clock": {"gfx_0": {"clk": {"value": 2380, "unit": "MHz"}, "min_clk": {"value": 500, "unit": "MHz"}}, "gfx_1": {"clk": {"value": 2400, "unit": "MHz"}},
                  "mem_0": {"clk": {"value": 2000, "unit": "MHz"}}, "fclk_0": {"clk": {"value": 1250, "unit": "MHz"}}},
        "temperature": {"edge": "N/A", "hotspot": {"value": 78, "unit": "C"}, "mem": {"value": 60, "unit": "C"}},
        "mem_usage": {"total_vram": {"value": 294896, "unit": "MB"}, "used_vram": {"value": 270000, "unit": "MB"}}}]
BUSY = Reading("0", 1180.0, 2390.0, 2000.0, 78.0, 270000 * 2**20, 294896 * 2**20, 0.95)


@pytest.mark.parametrize("text", [json.dumps(AMD), json.dumps({"gpu_data": AMD}), "WARNING: User is missing the following required groups: render\n" + json.dumps(AMD, indent=4)])
def test_amd_smi_in_its_list_and_wrapped_forms_after_a_warning(text):
    assert parse_amd_json(text) == [BUSY]


def test_older_amd_smi_writes_units_into_the_value_and_has_other_names():
    old = [{"gpu": 3, "usage": {"gfx_activity": "7 %"}, "power": {"average_socket_power": "92 W"}, "clock": {"gfx_0": {"cur_clk": "132 MHz"}, "mem_0": {"cur_clk": "900 MHz"}},
            "temperature": {"edge": "45 C", "hotspot": "N/A"}, "mem_usage": {"total_vram": "196592 MB", "used_vram": "285 MB"}}]
    assert parse_amd_json(json.dumps(old)) == [Reading("3", 92.0, 132.0, 900.0, 45.0, 285 * 2**20, 196592 * 2**20, 0.07)]


def test_what_amd_smi_cannot_say_is_unknown_and_not_zero():
    assert parse_amd_json(json.dumps([{"gpu": 1, "power": "N/A", "usage": {"gfx_activity": "N/A"}, "clock": {}}])) == [Reading("1")]


@pytest.mark.parametrize("text", ["", "amd-smi: error: unrecognized arguments: -w", "{}", '{"gpu_data": 3}', '[{"power": {}}]'])
def test_what_is_no_answer_of_amd_smi_is_an_error(text):
    with pytest.raises(ValueError):
        parse_amd_json(text)


WATCHED = """WARNING: User is missing the following required groups: render
timestamp,gpu,gfx_activity,umc_activity,mm_activity,socket_power,gfx_voltage,gfx_0_clk,gfx_0_min_clk,gfx_1_clk,mem_0_clk,edge,hotspot,mem,total_vram,used_vram
1789948801,0,95,41,N/A,1180,N/A,2380,500,2400,2000,N/A,78,60,294896,270000
1789948801,1,0,0,N/A,N/A,N/A,N/A,500,N/A,2000,N/A,N/A,60,294896,300

timestamp,gpu,socket_power,gfx_0_clk,hotspot
1789948802,0,900,2100,70
"""


def test_lines_of_amd_smis_csv_are_read_by_the_columns_that_stand_above_them():
    reader = LineReader(of_amd_fields)
    assert [reading for line in WATCHED.splitlines() if (reading := reader.read(line)) is not None] == [
        BUSY, Reading("1", None, None, 2000.0, None, 300 * 2**20, 294896 * 2**20, 0.0), Reading("0", 900.0, 2100.0, None, 70.0)]


def test_a_line_that_was_cut_is_an_error():
    reader = LineReader(of_amd_fields)
    reader.read("timestamp,gpu,socket_power")
    with pytest.raises(ValueError, match="2 fields"):
        reader.read("1789948801,0")


def test_rocm_smi_of_rocm_5_and_6():
    new = {"card0": {"Temperature (Sensor edge) (C)": "N/A", "Temperature (Sensor junction) (C)": "72.0", "sclk clock speed:": "(2100Mhz)", "sclk clock level:": "1",
                     "mclk clock speed:": "(1300Mhz)", "Current Socket Graphics Package Power (W)": "550.0", "GPU use (%)": "88",
                     "VRAM Total Memory (B)": "205520896000", "VRAM Total Used Memory (B)": "102760448000"}, "system": {"Driver version": "6.10"}}
    assert parse_rocm_json("\nWARNING: AMD GPU device(s) is/are in a low-power state\n" + json.dumps(new)) == [
        Reading("0", 550.0, 2100.0, 1300.0, 72.0, 102760448000.0, 205520896000.0, 0.88)]
    old = {"card1": {"Temperature (Sensor edge) (C)": "44.0", "Average Graphics Package Power (W)": "22.0", "GPU use (%)": "5"}}
    assert parse_rocm_json(json.dumps(old)) == [Reading("1", 22.0, None, None, 44.0, None, None, 0.05)]
    with pytest.raises(ValueError, match="no card"):
        parse_rocm_json('{"system": {}}')


def test_nvidia_smi_with_what_it_does_not_support():
    assert parse_nvidia_csv("0, 123.50, 1980, 2619, 48, 1024, 143771, 97\n1, [N/A], 345, 2619, 30, 0, 143771, [Not Supported]\n") == [
        Reading("0", 123.5, 1980.0, 2619.0, 48.0, 2.0**30, 143771.0 * 2**20, 0.97), Reading("1", None, 345.0, 2619.0, 30.0, 0.0, 143771.0 * 2**20, None)]
    for text in ("", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "Unable, to, determine, the, device, handle, for, GPU"):
        with pytest.raises(ValueError):
            parse_nvidia_csv(text)


def test_the_devices_of_an_engine_are_those_of_its_mask():
    assert own_devices({"HIP_VISIBLE_DEVICES": "2, 3", "CUDA_VISIBLE_DEVICES": "2,3"}) == {"2", "3"}
    assert own_devices({"CUDA_VISIBLE_DEVICES": "0"}) == {"0"}
    assert own_devices({"CUDA_VISIBLE_DEVICES": "GPU-5d2e"}) is None and own_devices({"HIP_VISIBLE_DEVICES": ""}) is None
