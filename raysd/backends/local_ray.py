"""A Ray of our own for one run: head and job server in this process's care, on loopback only, beside any other Ray."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from unittest import mock

from raysd.errors import RaysdError, TryAgainError

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 150 * 2**20
"""Stages hand over files, so the object store stays almost empty."""


@contextlib.contextmanager
def local_ray() -> Iterator[str]:
    """Starts Ray and yields the job server's address; on exit every process of it has been stopped.

    All of its ports are on loopback and free ones, and it asks for a token that only this process and its jobs know. A Ray that
    runs already is neither used nor disturbed. Its processes share this one's fate. Raises TryAgainError if Ray does not start.
    """
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray then takes 127.0.0.1 for this node's address and binds every port to it, as it does on laptops with Windows or macOS.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "AUTOSCALER_METRIC_PORT": "0",
        "DASHBOARD_METRIC_PORT": "0",  # fixed ports otherwise, which a second Ray could not have
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    with _environment(settings, without=("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")):
        import ray
        from ray._private import parameter, ray_constants

        if ray.is_initialized():
            raise RaysdError(
                what="this process is connected to a Ray already", where="raysd.backends.local_ray", fix="pass --address to use that Ray"
            )
        handler = signal.getsignal(signal.SIGTERM)
        # ray.init has no argument for the agent's port, whose default a second Ray on the machine could not have: jobs would find no agent.
        parameters = functools.partial(parameter.RayParams, dashboard_agent_listen_port=0)
        try:
            with mock.patch.object(parameter, "RayParams", parameters), mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False):
                context = ray.init(
                    address="local",
                    include_dashboard=True,
                    dashboard_host=LOOPBACK,
                    _node_ip_address=LOOPBACK,
                    num_cpus=len(os.sched_getaffinity(0)),
                    object_store_memory=OBJECT_STORE_BYTES,
                    log_to_driver=False,
                    configure_logging=False,
                )
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray puts its own in place
            yield f"http://{context.address_info['webui_url']}"
        except (ConnectionError, RuntimeError, TimeoutError, OSError) as err:
            if ray.is_initialized():
                raise  # not Ray's start: what the caller did with it
            raise TryAgainError(
                what=f"Ray did not start on this machine: {err}",
                where="raysd.backends.local_ray",
                fix="check free memory and disk space in /tmp, or name a running cluster with --address",
            ) from err
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _environment(settings: dict[str, str], without: tuple[str, ...]) -> Iterator[None]:
    """The environment with some variables set and some taken out; as before on exit."""
    before = {name: os.environ.get(name) for name in (*settings, *without)}
    os.environ.update(settings)
    for name in without:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
