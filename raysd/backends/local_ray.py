"""A Ray of our own for one run: head and job server in a process of their own, on loopback only, beside any other Ray.

The process has its own session, so that a Ctrl-C, which a terminal sends to its whole process group, reaches raysd and not Ray: Ray's dashboard would
lose half of its processes to it and answer no more, and the job could not be stopped. When its standard input closes, which nobody but raysd holds,
it shuts Ray down and ends.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from unittest import mock

from raysd.backends.process_group import end_group
from raysd.errors import TryAgainError

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 150 * 2**20
"""Stages hand over files; only a capture that is a stream has a use for it, and waits when it is full: what spills would be on a disk."""
SHUTDOWN_PATIENCE_S = 30.0


@contextlib.contextmanager
def local_ray(more: Mapping[str, str] | None = None) -> Iterator[str]:
    """Starts Ray and yields the job server's address; on exit every process of it has been stopped. more: variables of its environment.

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
        **(more or {}),
    }
    with _environment(settings, without=("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")):
        answer, said = os.pipe()
        with open(answer, encoding="utf-8") as lines:
            try:
                head = subprocess.Popen([sys.executable, "-m", "raysd.backends.local_ray", str(said)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, pass_fds=[said], start_new_session=True)
            finally:
                os.close(said)
            try:
                line = lines.readline()  # empty if the process has ended
                message = json.loads(line) if line else {"error": f"its process ended with exit code {head.wait()}"}
                if "error" in message:
                    raise TryAgainError(what=f"Ray did not start on this machine: {message['error']}", where="raysd.backends.local_ray",
                                        fix="check free memory and disk space in /tmp, or name a running cluster with --address")
                yield message["address"]
            finally:
                head.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):  # then it is ended less gently
                    head.wait(SHUTDOWN_PATIENCE_S)
                end_group(head, "the local Ray")


def main(answer: int) -> int:
    """Ray's own process: starts it, writes one JSON line with `address` or `error` to the file descriptor, and shuts it down when its owner lets go."""
    import ray
    from ray._private import parameter, ray_constants
    from ray._private.utils import write_ray_address

    # ray.init has no argument for the agent's port, whose default a second Ray on the machine could not have: jobs would find no agent.
    parameters = functools.partial(parameter.RayParams, dashboard_agent_listen_port=0)
    with open(answer, "w", encoding="utf-8") as line, tempfile.TemporaryDirectory(prefix="raysd-", dir=os.environ.get("RAY_TMPDIR"), ignore_cleanup_errors=True) as folder:
        try:
            with mock.patch.object(parameter, "RayParams", parameters), mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False):
                context = ray.init(address="local", include_dashboard=True, dashboard_host=LOOPBACK, _node_ip_address=LOOPBACK,
                                   num_cpus=len(os.sched_getaffinity(0)), object_store_memory=OBJECT_STORE_BYTES, log_to_driver=False,
                                   configure_logging=False, _temp_dir=folder, _system_config={"automatic_object_spilling_enabled": False})
        except (ConnectionError, RuntimeError, TimeoutError, OSError) as err:
            print(json.dumps({"error": str(err)}), file=line)
            return 1
        # As `ray start` does. Without it Ray tells its jobs the address of whichever Ray it finds on the machine first; in a folder of our own, since what
        # is in the default one is for everybody.
        write_ray_address(context.address_info["gcs_address"], folder)
        print(json.dumps({"address": f"http://{context.address_info['webui_url']}"}), file=line, flush=True)
        line.close()
        sys.stdin.buffer.read()  # nobody writes: it returns when the owner closes it, or has ended
        ray.shutdown()
    return 0


@contextlib.contextmanager
def _environment(settings: dict[str, str], without: tuple[str, ...]) -> Iterator[None]:
    """The environment with some variables set and some taken out; as before on exit."""
    before = {name: os.environ.get(name) for name in (*settings, *without)}
    os.environ.update(settings)
    for name in without:
        os.environ.pop(name, None)
    _read_again()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _read_again()


def _read_again() -> None:
    """Lets Ray read the environment anew, if this process has imported it: it reads settings and token once, and would send none, or the one of a Ray before."""
    raylet = sys.modules.get("ray._raylet")
    if raylet is not None:
        raylet.Config.initialize("{}")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
