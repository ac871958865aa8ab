"""The Serve config file that `serve deploy` and a KubeRay RayService (`serveConfigV2`) take as it is."""

from __future__ import annotations

from typing import Any

import yaml

from raysd.deployment.cluster import WITHOUT_HAPROXY, cluster_variables
from raysd.deployment.options import application_arguments, serve_section
from raysd.experiment import Experiment
from raysd.experiment.serve import is_loopback
from raysd.sweep.engine import EngineSpec

IMPORT_PATH = "raysd.backends.serve_app:build"


def serve_config(experiment: Experiment, spec: EngineSpec, cores: int) -> dict[str, Any]:
    """The whole file as data. cores: of this machine. It holds no key: replicas read them from the variable that it names."""
    section = serve_section(experiment)
    return {"proxy_location": "HeadOnly" if is_loopback(section.host) else "EveryNode",
            "http_options": {"host": section.host, "port": section.port, "request_timeout_s": section.longest_answer_s},
            "applications": [{"name": experiment.name, "route_prefix": section.route, "import_path": IMPORT_PATH,
                              "args": application_arguments(experiment, spec, cores)}]}


def config_text(experiment: Experiment, config: dict[str, Any]) -> str:
    """The file, with what the cluster must have on top."""
    section = serve_section(experiment)
    words = ["For `serve deploy FILE`, or as serveConfigV2 of a RayService. Every node needs raysd, and the folders that are named below.",
             "To be set on every node before Ray starts there:",
             *(f"    {name}={value}" for name, value in cluster_variables(section).items()),
             f"Without the first, {WITHOUT_HAPROXY}."]
    if section.api_keys_env is not None:
        words.append(f"The API keys are read from {section.api_keys_env} on the nodes, and are in no file.")
    return "".join(f"# {line}\n" for line in words) + yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=1000)
