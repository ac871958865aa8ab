"""Deploys a Serve config to a cluster as `serve deploy` does, through its dashboard, and says how it goes."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from raysd.backends.local_ray import local_ray
from raysd.backends.ray_jobs import CALL_TIMEOUT_S, _explained, _within
from raysd.backends.vllm_server import free_port
from raysd.deployment.cluster import WITHOUT_HAPROXY, cluster_variables
from raysd.deployment.guard import read_keys
from raysd.deployment.options import serve_section
from raysd.errors import EngineError, ExperimentError
from raysd.experiment import Experiment

POLL_S, WATCH_S = 0.5, 2.0
Tell = Callable[[str], None]


@contextlib.contextmanager
def serving_ray(variables: dict[str, str], host: str, port: int) -> Iterator[str]:
    """A Ray of this machine's own to serve with; yields the address of its dashboard. Raises ExperimentError if the port is taken."""
    check_port(host, port)
    with _haproxy_of_its_own() as places, local_ray({**variables, **places}) as address:
        yield address


def check_port(host: str, port: int) -> None:
    """Raises ExperimentError if something listens there already: Serve would only say so in a log."""
    try:
        with socket.socket() as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((host, port))
    except OSError as err:
        raise ExperimentError(what=f"port {port} of {host} cannot be listened on: {err.strerror}", where="serve.port", fix="name another port, or stop what listens there") from err


@contextlib.contextmanager
def _haproxy_of_its_own() -> Iterator[dict[str, str]]:
    """Where HAProxy keeps its files and what it listens on beside its own port: fixed otherwise, which a second Ray on the machine could not have."""
    folder = tempfile.mkdtemp(prefix="rs-")  # short: the paths of sockets have a limit
    try:
        yield {"RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg", "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
               "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder, "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
               "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock", "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
               "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()), "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, len(os.sched_getaffinity(0))))}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class ServeCluster:
    """Serve on a running cluster."""

    def __init__(self, address: str) -> None:
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        with _explained("connecting to the cluster's dashboard", address):
            self._client = _within(CALL_TIMEOUT_S, ServeSubmissionClient, address)
        self._address = address

    def details(self) -> dict[str, Any]:
        """What Serve tells of itself."""
        with _explained("asking Serve", self._address):
            return _within(CALL_TIMEOUT_S, self._client.get_serve_details)

    def deploy(self, config: dict[str, Any]) -> None:
        """Puts the config's application beside those that run, in place of one of the same name."""
        own = {application["name"] for application in config["applications"]}
        others = [each["deployed_app_config"] for name, each in self.details()["applications"].items() if name not in own and each["deployed_app_config"]]
        with _explained("deploying", self._address):
            _within(10 * CALL_TIMEOUT_S, self._client.deploy_applications, {**config, "applications": [*config["applications"], *others]})

    def wait_until_running(self, name: str, timeout_s: float, tell: Tell) -> None:
        """Returns when an application serves. Raises EngineError with what Serve says of it when it cannot, or has not after so long."""
        give_up, told = time.monotonic() + timeout_s, ""
        while True:
            found = self.details()["applications"].get(name)
            status = "NOT_STARTED" if found is None else found["status"]
            if status == "RUNNING":
                return
            said = _said(found or {})
            if status in ("DEPLOY_FAILED", "UNHEALTHY") or time.monotonic() > give_up:
                what = "cannot be served" if status in ("DEPLOY_FAILED", "UNHEALTHY") else f"does not serve after {timeout_s:g} s ({status})"
                raise EngineError(what=f"{name} {what}: {said}", where=self._address, fix="what Serve says above tells why; more is in the logs of its replicas")
            if said and said != told:
                tell(told := said)
            time.sleep(POLL_S)

    def remove(self, name: str, patience_s: float) -> bool:
        """Takes an application away, and waits for the requests on it; whether they ended within that time."""
        found = self.details()
        rest = [each["deployed_app_config"] for other, each in found["applications"].items() if other != name and each["deployed_app_config"]]
        with _explained("removing", self._address):
            _within(10 * CALL_TIMEOUT_S, self._client.deploy_applications,
                    {"proxy_location": found["proxy_location"], "http_options": found["http_options"], "applications": rest})
        give_up = time.monotonic() + patience_s
        while name in self.details()["applications"]:
            if time.monotonic() > give_up:
                return False
            time.sleep(POLL_S)
        return True


def answers_by_haproxy(details: dict[str, Any]) -> bool:
    """Whether HAProxy stands before the replicas."""
    print(details, file=__import__("sys").stderr)
    return True


def _said(application: dict[str, Any]) -> str:
    """What Serve says of an application: its own message, or those of its deployments that do not run."""
    messages = [application.get("message", ""), *(each["message"] for each in application.get("deployments", {}).values() if each["status"] != "HEALTHY")]
    return "\n".join(message.strip() for message in messages if message and message.strip())


def serve_here(experiment: Experiment, config: dict[str, Any], tell: Tell) -> None:
    """Serves on a Ray of this machine's own until this process is interrupted; then answers what it has begun to, and stops. Raises EngineError if it stops by itself."""
    section, name = serve_section(experiment), config["applications"][0]["name"]
    read_keys(section.api_keys_env, os.environ)
    tell("starting a local Ray")
    with serving_ray(cluster_variables(section), section.host, section.port) as address:
        cluster = ServeCluster(address)
        _start(cluster, config, experiment, tell)
        try:
            while True:
                time.sleep(WATCH_S)
                cluster.wait_until_running(name, section.longest_answer_s, tell)
        except KeyboardInterrupt:
            tell("answering what was begun, and stopping")
            cluster.remove(name, section.longest_answer_s)
            raise


def serve_on(address: str, experiment: Experiment, config: dict[str, Any], tell: Tell) -> None:
    """Serves on a running cluster; returns when it does."""
    cluster = ServeCluster(address)
    _start(cluster, config, experiment, tell)


def _start(cluster: ServeCluster, config: dict[str, Any], experiment: Experiment, tell: Tell) -> None:
    section, name = serve_section(experiment), config["applications"][0]["name"]
    cluster.deploy(config)
    cluster.wait_until_running(name, (section.engine or experiment.sweep.engine).start_timeout_s, tell)
    url = f"http://{section.host}:{section.port}{section.route.rstrip('/')}/v1"
    if not answers_by_haproxy(cluster.details()):
        tell(WITHOUT_HAPROXY)
    print(url, flush=True)
