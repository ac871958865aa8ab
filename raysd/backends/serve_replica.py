"""A replica: Ray's LLMServer with raysd's environment, keys, limits and health. Imported where Ray and vLLM are."""

from __future__ import annotations

import argparse
import asyncio
import functools
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from typing import Any

import vllm
from fastapi import HTTPException
from ray import serve
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer
from starlette.exceptions import HTTPException as StarletteHTTPException
from vllm.v1.metrics.loggers import StatLoggerBase

from raysd.backends import engine_watch
from raysd.backends.cpu_engine import cpu_environment
from raysd.backends.devices import engine_environment
from raysd.deployment.guard import Guard, read_keys
from raysd.deployment.vitals import Vitals

WATCH_S = 0.25
LAST_WORDS_S = 1.0
"""For errors to reach the clients of requests that a dead engine had."""
LOGGER = logging.getLogger("ray.serve")
"""Its lines are in the replica's log, which Serve keeps."""


def parsed(flags: list[str]) -> dict[str, Any]:
    """Words of vLLM's command line as arguments of its Python classes, read by its own parser as when a sweep's engine starts. Raises ValueError for what it refuses."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FrontendArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False)))
    unasked = object()
    read = argparse.Namespace(**{action.dest: unasked for action in parser._actions})  # what is there already takes no default
    try:
        parser.parse_args(flags, read)
    except (argparse.ArgumentError, SystemExit) as err:
        raise ValueError(f"vLLM refuses sweep.engine.extra_args {' '.join(flags)}: {err}") from err
    return {name: value for name, value in vars(read).items() if value is not unasked}


class Replica(LLMServer):
    """What Serve starts, balances over and ends."""

    async def __init__(self, llm_config: LLMConfig, *, own: dict[str, Any]) -> None:
        """own: as `application_arguments` says. Raises ExperimentError if the node's environment holds no key where one is asked for."""
        self._own, self._keys = own, read_keys(own["api_keys_env"], os.environ)
        self._vitals = Vitals(own["stuck_after_s"], own["acceptance_floor"], own["acceptance_floor_s"])
        if own["cpus"] is None:
            _take_over(engine_environment(os.environ))
        else:
            _settle_on_cores(own["cpus"], llm_config.engine_kwargs["tensor_parallel_size"], llm_config.runtime_env["env_vars"])
        self._told_floor_s = -float("inf")
        await super().__init__(llm_config, engine_cls=functools.partial(Engine, vitals=self._vitals))
        pids = [str(child.pid) for child in multiprocessing.active_children()]
        self._engine_watch = subprocess.Popen([sys.executable, "-I", "-S", engine_watch.__file__, *pids], stdin=subprocess.PIPE)
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Ends this replica soon after its engine: until Serve's health checks had found out, all that is sent here would fail."""
        while not self.engine.is_dead():
            await asyncio.sleep(WATCH_S)
            if self._vitals.is_stuck(time.monotonic(), self.engine.unfinished()):
                LOGGER.error("the engine has requests and has finished no step for %g s: it is ended, and they with it", self._own["stuck_after_s"])
                for child in multiprocessing.active_children():
                    child.kill()
                while not self.engine.is_dead():
                    await asyncio.sleep(WATCH_S)
        LOGGER.error("the engine is dead: this replica ends, and Serve starts another")
        await asyncio.sleep(LAST_WORDS_S)
        os._exit(1)

    async def __serve_build_asgi_app__(self) -> Any:
        app = await super().__serve_build_asgi_app__()
        app.middleware_stack = None  # vLLM has built it already; Starlette builds it again
        # vLLM words FastAPI's own errors as OpenAI does, and not those of Starlette, which raises for a path or a method that is not there.
        app.exception_handler(StarletteHTTPException)(app.exception_handlers[HTTPException])
        app.add_middleware(Guard, keys=self._keys, max_body_bytes=self._own["max_body_bytes"])
        return app

    async def check_health(self) -> None:
        """Raises if the engine is dead, stuck, or of too little acceptance where such a replica is to be replaced."""
        await super().check_health()
        now_s = time.monotonic()
        if self._vitals.is_stuck(now_s, self.engine.unfinished()):
            raise RuntimeError(f"the engine has requests and has finished no step for {self._own['stuck_after_s']:g} s")
        length = self._vitals.below_floor(now_s)
        if length is not None:
            told = f"acceptance length {length:.2f} over {self._own['acceptance_floor_s']:g} s is below the floor of {self._own['acceptance_floor']:g}"
            if self._own["recycle"]:
                raise RuntimeError(told)
            if now_s - self._told_floor_s > self._own["acceptance_floor_s"]:
                self._told_floor_s = now_s
                LOGGER.warning("%s", told)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What an autoscaling policy may look at: running and waiting requests, and the acceptance length once there is one."""
        return self._vitals.stats(time.monotonic())


class Engine(VLLMEngine):
    """Ray's engine, with raysd's own ear on every step, and on a CPU in as many processes as a sweep's."""

    def __init__(self, llm_config: LLMConfig, vitals: Vitals) -> None:
        super().__init__(llm_config)
        self._vitals = vitals

    async def start(self) -> None:
        """Starts it, without Ray's look for the model's files on each node, a process of its own that takes ten seconds, where they are in a folder."""
        if os.path.isdir(self.llm_config.model_loading_config.model_source):
            self.llm_config.get_or_create_callback().ctx.run_init_node = False
        await super().start()

    def is_dead(self) -> bool:
        """Whether it answers nothing any more."""
        return self._engine_client.errored

    def unfinished(self) -> int:
        """Requests that it has."""
        return self._engine_client.output_processor.get_num_unfinished_requests()

    def _prepare_engine_config(self, callback_ctx: Any) -> Any:
        config = self.llm_config.get_engine_config()
        if config.accelerator.requires_remote_initialization:
            return super()._prepare_engine_config(callback_ctx)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.cli_args import FrontendArgs
        from vllm.usage.usage_lib import UsageContext

        # Ray asks for a worker process even for one rank (raysd/backends/cpu_engine.py says what that costs).
        executor = {"distributed_executor_backend": "uni"} if config.num_devices == 1 else {}
        arguments = AsyncEngineArgs(**config.get_initialization_kwargs() | executor | {"worker_extension_cls": "raysd.backends.cpu_worker.MendedWorker"})
        return arguments, FrontendArgs(**config.frontend_kwargs), arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)

    def _start_async_llm_engine(self, vllm_engine_args: Any, vllm_engine_config: Any, placement_group: Any) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor.abstract import Executor
        from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

        vllm_engine_config.parallel_config.placement_group = placement_group
        if hasattr(vllm.platforms.current_platform.get_device_capability, "cache_clear"):  # asked before Ray had told which devices there are
            vllm.platforms.current_platform.get_device_capability.cache_clear()
        return AsyncLLM(vllm_config=vllm_engine_config, executor_class=Executor.get_class(vllm_engine_config), log_requests=False, log_stats=True,
                        stat_loggers=[RayPrometheusStatLogger, functools.partial(StepListener, self._vitals)])


class StepListener(StatLoggerBase):
    """Tells the vitals of each step."""

    def __init__(self, vitals: Vitals, vllm_config: Any, engine_index: int = 0) -> None:
        self._vitals = vitals

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        if scheduler_stats is not None:
            drafted = scheduler_stats.spec_decoding_stats
            self._vitals.step(time.monotonic(), scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs,
                              drafted.num_drafts if drafted else 0, drafted.num_accepted_tokens if drafted else 0)

    def log_engine_initialized(self) -> None:
        """Nothing to tell."""


def _settle_on_cores(cpus: int, ranks: int, own: dict[str, str]) -> None:
    """Gives this process the environment of a sweep's engine on `cpus` cores of the node, those of its place among the node's replicas."""
    cores = sorted(os.sched_getaffinity(0))
    if cpus < len(cores):
        place = serve.get_replica_context().rank.local_rank
        cores = [cores[(place * cpus + number) % len(cores)] for number in range(cpus)]
        os.sched_setaffinity(0, cores)
    _take_over({**cpu_environment(os.environ, cores, ranks), **own})


def _take_over(environment: dict[str, str]) -> None:
    """Makes it this process's own, for the engine's processes to inherit."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
