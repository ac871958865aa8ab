"""The application that a Serve config file of raysd names: vLLM's own HTTP interface in each replica, and nothing between it and Serve's proxy.

`ray.serve.llm.build_openai_app` puts a second deployment before the engines, which reads every request, sends it on as a Python object and packs each chunk of
the answer anew; with RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING it leaves that out, and asks a router of its own for each request. The deployment of the engines
serves HTTP by itself in both of Ray's proxies, so there is one path here, on any cluster: behind HAProxy, where the cluster has it, a replica is reached
directly, and balanced by its connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def build(arguments: dict[str, Any]) -> Application:
    """What `import_path` names. arguments: as `raysd.deployment.options.application_arguments` says."""
    from ray import serve
    from ray.llm._internal.serve.core.server.builder import build_llm_deployment
    from ray.serve.llm import LLMConfig

    from raysd.backends.serve_replica import Replica, parsed

    told = arguments["llm_config"]
    config = LLMConfig(**{**told, "engine_kwargs": told["engine_kwargs"] | parsed(arguments["engine_flags"])})
    return build_llm_deployment(config, bind_kwargs={"own": arguments["replica"]}, deployment_cls=serve.ingress()(Replica))
