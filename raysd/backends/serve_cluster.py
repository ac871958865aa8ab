"""Deploys a Serve config to a cluster as `serve deploy` does, through its dashboard, and says how it goes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raysd.backends.local_ray import local_ray
from raysd.backends.ray_jobs import CALL_TIMEOUT_S, PACKAGE, check_reachable, explained, within
from raysd.backends.vllm_server import free_port
from raysd.deployment.cluster import HAPROXY, WITHOUT_HAPROXY, cluster_variables
from raysd.deployment.guard import read_keys
from raysd.deployment.options import patience_s, serve_section
from raysd.errors import EngineError, ExperimentError
from raysd.experiment import Experiment
from raysd.experiment.serve import ServeSection

POLL_S, WATCH_S = 0.5, 2.0
ERROR_LINE = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)\b(\(\w+\))?: ")
"""As a traceback ends."""
REMOVAL_S = 30.0
"""For an application to go, beside what it still answers."""
Tell = Callable[[str], None]


@contextlib.contextmanager
def serving_ray(variables: dict[str, str], host: str, port: int) -> Iterator[str]:
    """A Ray of this machine's own to serve with; yields the address of its dashboard. Raises ExperimentError if the port is taken."""
    check_port(host, port)
    # Serve imports the application by its name; this package need not be installed.
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with _haproxy_of_its_own() as places, local_ray({**variables, **places, "PYTHONPATH": path}) as address:
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
               "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()), "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
               # The one HAProxy here leaves a replica out at once: no more time is needed before it stops listening.
               "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2", "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, len(os.sched_getaffinity(0))))}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class ServeCluster:
    """Serve on a running cluster."""

    def __init__(self, address: str) -> None:
        from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

        address = check_reachable(address)
        with explained("connecting to the cluster's dashboard", address):
            self._client = within(CALL_TIMEOUT_S, ServeSubmissionClient, address)
        self._address, self._before = address, {}

    def details(self) -> dict[str, Any]:
        """What Serve tells of itself."""
        with explained("asking Serve", self._address):
            return within(CALL_TIMEOUT_S, self._client.get_serve_details)

    def has_haproxy(self) -> bool:
        """Whether HAProxy stands before the replicas, and not Serve's own proxy."""
        with explained("asking which proxies there are", self._address):
            answer = within(CALL_TIMEOUT_S, self._client._do_request, "GET", "/api/v0/actors?filter_keys=state&filter_predicates=%3D&filter_values=ALIVE&limit=10000")
            answer.raise_for_status()
        return any(actor["class_name"] == "HAProxyManager" for actor in answer.json()["data"]["result"]["result"])

    def deploy(self, config: dict[str, Any]) -> None:
        """Puts the config's application beside those that run, in place of one of the same name. Raises ExperimentError if Serve listens elsewhere than it asks for."""
        own, found = {application["name"] for application in config["applications"]}, self.details()
        self._before = {name: each["last_deployed_time_s"] for name, each in found["applications"].items()}
        check_same_address(found.get("http_options"), config["http_options"], self._address)
        others = [each["deployed_app_config"] for name, each in found["applications"].items() if name not in own and each["deployed_app_config"]]
        with explained("deploying", self._address):
            within(10 * CALL_TIMEOUT_S, self._client.deploy_applications, {**config, "applications": [*config["applications"], *others]})

    def wait_until_running(self, name: str, timeout_s: float, tell: Tell) -> None:
        """Returns when an application serves as it was deployed last. Raises EngineError with what Serve says of it when it cannot, or has not after so long."""
        give_up, told = time.monotonic() + timeout_s, ""
        while True:
            found = self.details()["applications"].get(name)
            late = found is None or found["last_deployed_time_s"] == self._before.get(name)  # Serve has not begun with it yet
            status = "NOT_STARTED" if late else found["status"]
            if status == "RUNNING":
                return
            said = said_of(found or {})
            if status == "DEPLOY_FAILED" or time.monotonic() > give_up:
                what = "cannot be served" if status == "DEPLOY_FAILED" else f"does not serve after {timeout_s:g} s ({status})"
                raise EngineError(what=f"{name} {what}: {said}", where=self._address, fix="what Serve says above tells why; more is in the logs of its replicas")
            if said and said != told:
                tell(told := said)
            time.sleep(POLL_S)

    def remove(self, name: str, patience_s: float) -> bool:
        """Takes an application away, and waits for the requests on it; whether they ended within that time."""
        found = self.details()
        rest = [each["deployed_app_config"] for other, each in found["applications"].items() if other != name and each["deployed_app_config"]]
        with explained("removing", self._address):
            within(10 * CALL_TIMEOUT_S, self._client.deploy_applications,
                    {"proxy_location": found["proxy_location"], "http_options": found["http_options"], "applications": rest})
        give_up = time.monotonic() + patience_s
        while name in self.details()["applications"]:
            if time.monotonic() > give_up:
                return False
            time.sleep(POLL_S)
        return True


def check_same_address(running: dict[str, Any] | None, asked: dict[str, Any], where: str) -> None:
    """Raises ExperimentError if Serve runs already, and listens elsewhere: it would pass over what is asked for, and another interface may be open to others."""
    if running is not None and (running["host"], running["port"]) != (asked["host"], asked["port"]):
        raise ExperimentError(what=f"Serve runs on this cluster already and listens on {running['host']}:{running['port']}, not on {asked['host']}:{asked['port']}",
                              where=f"serve.host, serve.port ({where})", fix="use the same, or end Serve there with `serve shutdown`, which ends all its applications")


def said_of(application: dict[str, Any]) -> str:
    """What Serve says of an application: its own message, or those of its deployments that do not run."""
    messages = [application.get("message", ""), *(each["message"] for each in application.get("deployments", {}).values() if each["status"] != "HEALTHY")]
    return "\n".join(dict.fromkeys(without_traceback(message) for message in messages if message and message.strip()))


def without_traceback(message: str) -> str:
    """What a message of Serve says; of one that holds a traceback the error that it ends with."""
    lines = message.strip().splitlines()
    if not any(line.startswith("Traceback (most recent call last)") or '  File "' in line for line in lines):
        return message.strip()
    raised = [number for number, line in enumerate(lines) if ERROR_LINE.match(line)]
    return "\n".join(lines[raised[-1]:] if raised else lines[-1:]).strip()


@contextlib.contextmanager
def served_here(experiment: Experiment, config: dict[str, Any], tell: Tell, variables: Mapping[str, str] | None = None) -> Iterator[tuple[str, ServeCluster]]:
    """Serves on a Ray of this machine's own: `with served_here(...) as (url, cluster):`. On exit what was begun is answered first, then all of it has ended.

    variables: of the Ray's environment, in place of some of `cluster_variables`. Raises ExperimentError if the port is taken or keys are asked for and not
    there, EngineError if it does not come to serve.
    """
    section, name = serve_section(experiment), config["applications"][0]["name"]
    read_keys(section.api_keys_env, os.environ)
    _check_cores(config, section)
    tell("starting a local Ray")
    with serving_ray({**cluster_variables(section), **(variables or {})}, section.host, section.port) as address:
        cluster = ServeCluster(address)
        _start(cluster, experiment, config, tell)
        try:
            yield f"http://{section.host}:{section.port}{section.route.rstrip('/')}", cluster
        finally:
            tell("answering what was begun, and stopping")
            if not cluster.remove(name, section.longest_answer_s + REMOVAL_S):
                tell(f"what was not answered after {section.longest_answer_s:g} s is cut off")


def _check_cores(config: dict[str, Any], section: ServeSection) -> None:
    """Raises ExperimentError for more replicas than this machine has cores for: they would wait for ever."""
    told = config["applications"][0]["args"]["llm_config"]
    cores = len(os.sched_getaffinity(0))
    asked = section.autoscaling.max_replicas * told["engine_kwargs"]["tensor_parallel_size"] * told["placement_group_config"]["bundle_per_worker"]["CPU"]
    if asked > cores:
        raise ExperimentError(what=f"{section.autoscaling.max_replicas} replicas ask for {asked} CPU cores, this machine has {cores}", where="serve.autoscaling.max_replicas, serve.cpus",
                              fix="use fewer, or name a cluster that has them with --address")


def serve_here(experiment: Experiment, config: dict[str, Any], tell: Tell) -> None:
    """Serves on a Ray of this machine's own until this process is interrupted, and tells when that gets worse or better: replicas that end are Serve's to replace.

    Raises as `served_here` does, and EngineError if the application was taken away by somebody else.
    """
    name, told = config["applications"][0]["name"], "RUNNING"
    with served_here(experiment, config, tell) as (url, cluster):
        print(f"{url}/v1", flush=True)
        while True:
            time.sleep(WATCH_S)
            found = cluster.details()["applications"].get(name)
            if found is None:
                raise EngineError(what=f"{name} is not served any more: somebody removed it", where=url, fix="serve it again")
            if found["status"] != told:
                told = found["status"]
                tell("\n".join(filter(None, [f"{name}: {told}", said_of(found)])))


def serve_on(address: str, experiment: Experiment, config: dict[str, Any], tell: Tell) -> None:
    """Serves on a running cluster; returns when it does."""
    section = serve_section(experiment)
    _start(ServeCluster(address), experiment, config, tell)
    print(f"http://{section.host}:{section.port}{section.route.rstrip('/')}/v1", flush=True)


def _start(cluster: ServeCluster, experiment: Experiment, config: dict[str, Any], tell: Tell) -> None:
    cluster.deploy(config)
    cluster.wait_until_running(config["applications"][0]["name"], patience_s(experiment), tell)
    if not cluster.has_haproxy():
        tell(f"the cluster's nodes were started without {HAPROXY}=1: {WITHOUT_HAPROXY}")
